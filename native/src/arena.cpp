// Arena: blocks, and the memory behind them.
#include "torpor/arena.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

#include "saved_copy.hpp"
#include "text.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

// What a growing arena takes from the device at a time, where so much is there.
constexpr std::size_t growth_bytes = std::size_t{32} << 20;

ArenaSpec checked(ArenaSpec spec) {
  if (spec.tag.empty()) throw Misuse("an arena needs a tag, e.g. \"cuda_graph\"");
  if (spec.reserve_bytes == 0)
    throw Misuse("an arena of tag '" + spec.tag + "' needs reserve_bytes above 0: the most it may ever hold");
  return spec;
}

std::size_t total_bytes(const std::map<Address, std::size_t>& blocks) noexcept {
  std::size_t total = 0;
  for (const auto& [at, size_bytes] : blocks) total += size_bytes;
  return total;
}

}  // namespace

Arena::Arena(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool, std::shared_ptr<DiskFile> disk,
             ArenaSpec spec)
    : device_(std::move(device)),
      pool_(std::move(pool)),
      disk_(std::move(disk)),
      spec_(checked(std::move(spec))),
      reservation_(device_, round_up(spec_.reserve_bytes, device_->granularity_bytes())) {}

Arena::~Arena() = default;

std::size_t Arena::used_bytes() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return total_bytes(used_);
}

std::size_t Arena::mapped_bytes() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  return parked_ ? 0 : mapped_bytes_;
}

bool Arena::parked() const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  return parked_;
}

Address Arena::allocate(std::size_t size_bytes) {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (parked_ || staged_) {
    throw Misuse("the arena of tag '" + spec_.tag + "' is asleep; wake it before allocating from it");
  }
  if (size_bytes == 0) throw Misuse("allocate: a block has at least one byte");
  if (size_bytes > reservation_.size_bytes())
    size_bytes = reservation_.size_bytes() + 1;  // no overflow below
  const std::size_t wanted = round_up(size_bytes, alignment_bytes);
  if (const auto block = take(wanted)) return *block;
  grow(wanted);
  return take(wanted).value();
}

// The smallest place that it fits into, so that large ones last.
std::optional<Address> Arena::take(std::size_t size_bytes) {
  auto best = unused_.end();
  for (auto one = unused_.begin(); one != unused_.end(); ++one) {
    if (one->second >= size_bytes && (best == unused_.end() || one->second < best->second)) best = one;
  }
  if (best == unused_.end()) return std::nullopt;
  const auto [at, room_bytes] = *best;
  used_.emplace(at, size_bytes);
  unused_.erase(best);
  if (room_bytes > size_bytes) unused_.emplace(at + size_bytes, room_bytes - size_bytes);
  return at;
}

// Behind what is backed already, whose unused end counts.
void Arena::grow(std::size_t size_bytes) {
  const Address end = address() + mapped_bytes_;
  std::size_t at_the_end = 0;
  if (!unused_.empty()) {
    const auto& [at, room_bytes] = *std::prev(unused_.end());
    if (at + room_bytes == end) at_the_end = room_bytes;
  }
  const std::size_t least = round_up(size_bytes - at_the_end, device_->granularity_bytes());
  const std::size_t left = reservation_.size_bytes() - mapped_bytes_;
  if (least > left) {
    throw OutOfDeviceMemory("the arena of tag '" + spec_.tag + "' has " + bytes_text(left) +
                                " of addresses left, and " + bytes_text(least) +
                                " are needed; give it more reserve_bytes",
                            least, left);
  }
  const std::size_t liberal =
      std::clamp(round_up(growth_bytes, device_->granularity_bytes()), least, std::max(least, left));
  std::vector<Mapping> mapped;
  std::size_t grown_bytes = liberal;
  try {
    mapped = map_chunks(device_, end, liberal);
  } catch (const OutOfDeviceMemory&) {
    if (liberal == least) throw;
    grown_bytes = least;
    mapped = map_chunks(device_, end, least);
  }
  mappings_.reserve(mappings_.size() + mapped.size());
  add_unused(end, grown_bytes);
  std::ranges::move(mapped, std::back_inserter(mappings_));
  mapped_bytes_ += grown_bytes;
}

void Arena::add_unused(Address at, std::size_t size_bytes) {
  auto after = unused_.lower_bound(at);
  if (after != unused_.end() && at + size_bytes == after->first) {
    size_bytes += after->second;
    after = unused_.erase(after);
  }
  if (after != unused_.begin()) {
    auto& [before_at, before_bytes] = *std::prev(after);
    if (before_at + before_bytes == at) {
      before_bytes += size_bytes;
      return;
    }
  }
  unused_.emplace(at, size_bytes);
}

void Arena::free(Address block) {
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = used_.find(block);
  if (found == used_.end()) throw Misuse("free: no block of this arena begins there");
  add_unused(block, found->second);
  used_.erase(found);
  if (!parked_ && !staged_) shrink();
}

// Whole mappings at the end without a block in them go back. One that the device does not let go stays.
void Arena::shrink() {
  while (!mappings_.empty() && !unused_.empty()) {
    const auto last = std::prev(unused_.end());
    Mapping& mapping = mappings_.back();
    const Address end = mapping.address() + mapping.size_bytes();
    if (last->first + last->second != end || last->first > mapping.address()) return;
    const std::size_t size_bytes = mapping.size_bytes();
    try {
      mapping.release();
    } catch (const Error&) {
      return;
    }
    mappings_.pop_back();
    mapped_bytes_ -= size_bytes;
    if (last->second == size_bytes) {
      unused_.erase(last);
    } else {
      last->second -= size_bytes;
    }
  }
}

}  // namespace torpor
