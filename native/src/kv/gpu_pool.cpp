#include "torpor/kv/gpu_pool.hpp"

#include <cassert>
#include <limits>
#include <string>
#include <utility>

#include "torpor/errors.hpp"

namespace torpor::kv {
namespace {

std::size_t slots_in(const Device& device, std::size_t page_bytes, std::size_t gpu_bytes) {
  const std::size_t granule = device.granularity_bytes();
  const std::size_t slots = gpu_bytes / granule * granule / page_bytes;
  if (slots == 0) {
    throw Misuse("gpu_bytes is " + std::to_string(gpu_bytes) + ", but one page takes " +
                 std::to_string(page_bytes) + " bytes and the pool whole granules of " +
                 std::to_string(granule) + "; raise gpu_bytes");
  }
  if (slots > static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max())) {
    throw Misuse("gpu_bytes holds more slots than a page table can number; raise tokens_per_block");
  }
  return slots;
}

}  // namespace

GpuPool::GpuPool(std::shared_ptr<Device> device, std::size_t page_bytes, std::size_t gpu_bytes,
                 std::optional<std::uint64_t> seed)
    : device_(std::move(device)), page_bytes_(page_bytes), slots_(slots_in(*device_, page_bytes, gpu_bytes)) {
  if (seed) random_.emplace(*seed);
  free_.reserve(slots_);
  give_back_all();
  range_ = Reservation(device_, round_up(slots_ * page_bytes_, device_->granularity_bytes()));
  map();
}

std::size_t GpuPool::mapped_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const Mapping& mapping : mappings_) bytes += mapping.size_bytes();
  return bytes;
}

std::int32_t GpuPool::take() noexcept {
  assert(!free_.empty());
  if (random_) std::swap(free_[(*random_)() % free_.size()], free_.back());
  const std::int32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void GpuPool::give_back(std::int32_t slot) noexcept {
  assert(slot >= 0 && static_cast<std::size_t>(slot) < slots_ && free_.size() < slots_);
  free_.push_back(slot);
}

void GpuPool::give_back_all() noexcept {
  free_.clear();
  // Lowest slot last, so that neighbours are given one after the other and copies of them can be joined.
  for (std::size_t slot = slots_; slot > 0; --slot) free_.push_back(static_cast<std::int32_t>(slot - 1));
}

void GpuPool::map() {
  assert(mappings_.empty());
  mappings_ = map_chunks(device_, range_.base(), range_.size_bytes());
}

std::size_t GpuPool::release_one() {
  if (mappings_.empty()) return 0;
  const std::size_t bytes = mappings_.back().size_bytes();
  mappings_.back().release();
  mappings_.pop_back();
  return bytes;
}

}  // namespace torpor::kv
