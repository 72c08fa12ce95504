#include "torpor/kv/gpu_pool.hpp"

#include <algorithm>
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

// No more than a page table can number.
std::size_t reservation_bytes(const PoolRoom& room, std::size_t size_bytes, std::size_t page_bytes,
                              std::size_t granule_bytes) {
  constexpr auto most_slots = static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max());
  const std::size_t wanted = std::min(room.reserved_bytes, most_slots * page_bytes);
  return std::max(size_bytes, wanted / granule_bytes * granule_bytes);
}

}  // namespace

GpuPool::GpuPool(std::shared_ptr<Device> device, std::size_t page_bytes, std::size_t gpu_bytes,
                 std::optional<std::uint64_t> seed, const PoolRoom& room)
    : device_(std::move(device)),
      page_bytes_(page_bytes),
      slots_(slots_in(*device_, page_bytes, gpu_bytes)),
      size_bytes_(round_up(slots_ * page_bytes_, device_->granularity_bytes())),
      chunk_bytes_(room.chunk_bytes != 0 ? room.chunk_bytes : device_->chunk_bytes()) {
  if (seed) random_.emplace(*seed);
  free_.reserve(slots_);
  in_slot_.resize(slots_);
  give_back_all();
  const std::size_t granule = device_->granularity_bytes();
  range_ = Reservation(device_, reservation_bytes(room, size_bytes_, page_bytes_, granule));
  map();
}

std::size_t GpuPool::mapped_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const Mapping& mapping : mappings_) bytes += mapping.size_bytes();
  return bytes;
}

std::int32_t GpuPool::take() noexcept {
  assert(ready_slots() > 0);
  if (random_) std::swap(free_[bare_slots_ + (*random_)() % ready_slots()], free_.back());
  const std::int32_t slot = free_.back();
  free_.pop_back();
  return slot;
}

void GpuPool::give_back(std::int32_t slot) noexcept {
  assert(slot >= 0 && static_cast<std::size_t>(slot) < slots_ && free_.size() < slots_);
  free_.push_back(slot);
  in_slot_[static_cast<std::size_t>(slot)] = nullptr;
}

std::vector<Page*> GpuPool::pages() const {
  std::vector<Page*> found;
  found.reserve(slots_ - free_.size());
  for (Page* const page : in_slot_) {
    if (page != nullptr) found.push_back(page);
  }
  return found;
}

void GpuPool::give_back_all() noexcept {
  std::ranges::fill(in_slot_, nullptr);
  free_.clear();
  // Lowest slot last, so that neighbours are given one after the other and copies of them can be joined.
  for (std::size_t slot = slots_; slot > 0; --slot) free_.push_back(static_cast<std::int32_t>(slot - 1));
}

void GpuPool::map() {
  assert(mappings_.empty());
  try {
    while (map_next()) continue;
  } catch (...) {
    drop_mappings();
    throw;
  }
}

bool GpuPool::map_next() {
  if (mapped_bytes() >= size_bytes_) return false;
  (void)add_new_chunk(size_bytes_ - mapped_bytes());
  count_bare_slots();
  return true;
}

void GpuPool::drop_mappings() noexcept {
  mappings_.clear();
  count_bare_slots();
}

// A pool changes between parked and mapped only while all slots without memory are free; in the order of
// give_back_all they are the first ones then.
void GpuPool::count_bare_slots() noexcept {
  bare_slots_ = slots_ - std::min(slots_, mapped_bytes() / page_bytes_);
}

std::size_t GpuPool::release_one() {
  if (mappings_.empty()) return 0;
  const std::size_t bytes = mappings_.back().size_bytes();
  mappings_.back().release();
  mappings_.pop_back();
  count_bare_slots();
  return bytes;
}

std::size_t GpuPool::size_down_to(std::size_t least_bytes) const noexcept {
  std::size_t left_bytes = mapped_bytes();
  for (auto one = mappings_.rbegin(); one != mappings_.rend(); ++one) {
    if (left_bytes < least_bytes + one->size_bytes()) break;
    left_bytes -= one->size_bytes();
  }
  return left_bytes;
}

std::vector<std::size_t> GpuPool::chunk_sizes() const {
  std::vector<std::size_t> sizes;
  sizes.reserve(mappings_.size());
  for (const Mapping& mapping : mappings_) sizes.push_back(mapping.size_bytes());
  return sizes;
}

Physical GpuPool::take_chunk() {
  assert(!mappings_.empty());
  Physical physical = mappings_.back().take_off();
  mappings_.pop_back();
  return physical;
}

void GpuPool::add_chunk(Physical& physical) {
  assert(mapped_bytes() + physical.size_bytes() <= range_.size_bytes());
  mappings_.reserve(mappings_.size() + 1);
  mappings_.push_back(Mapping::over(device_, range_.base() + mapped_bytes(), physical));
}

std::size_t GpuPool::add_new_chunk(std::size_t limit_bytes) {
  Physical physical(device_, std::min(limit_bytes, chunk_bytes_));
  const std::size_t bytes = physical.size_bytes();
  add_chunk(physical);
  return bytes;
}

void GpuPool::settle(const std::vector<bool>& used) noexcept {
  size_bytes_ = mapped_bytes();
  slots_ = size_bytes_ / page_bytes_;
  count_bare_slots();
  in_slot_.assign(slots_, nullptr);
  free_.clear();
  for (std::size_t slot = slots_; slot > 0; --slot) {
    const bool taken = slot <= used.size() && used[slot - 1];
    if (!taken) free_.push_back(static_cast<std::int32_t>(slot - 1));
  }
}

}  // namespace torpor::kv
