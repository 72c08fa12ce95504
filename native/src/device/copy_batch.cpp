#include "copy_batch.hpp"

#include <algorithm>
#include <iterator>
#include <limits>

#include "torpor/errors.hpp"

namespace torpor {

namespace {

std::vector<Copy> joined(std::span<const Copy> batch) {
  std::vector<Copy> copies;
  copies.reserve(batch.size());
  for (const Copy& next : batch) {
    if (next.size_bytes == 0) continue;
    if (!copies.empty()) {
      Copy& last = copies.back();
      if (last.destination + last.size_bytes == next.destination &&
          last.source + last.size_bytes == next.source) {
        last.size_bytes += next.size_bytes;
        continue;
      }
    }
    copies.push_back(next);
  }
  return copies;
}

}  // namespace

HostRanges::Range HostRanges::remove(Address base) noexcept {
  const auto found = ranges_.find(base);
  if (found == ranges_.end()) return {0, false};
  const Range range = found->second;
  ranges_.erase(found);
  return range;
}

HostRanges::Range HostRanges::room_in(Address base, const Range& range, Address at) noexcept {
  const std::size_t offset = at - base;
  const std::size_t to_end = range.size_bytes - offset;
  const std::size_t to_border = piece_bytes - offset % piece_bytes;
  return {range.pinned ? std::min(to_end, to_border) : to_end, range.pinned};
}

std::optional<HostRanges::Range> HostRanges::room_at(Address at) const noexcept {
  return Reader(*this).room_at(at);
}

std::optional<HostRanges::Range> HostRanges::Reader::room_at(Address at) noexcept {
  if (at - base_ < range_.size_bytes) return room_in(base_, range_, at);
  if (at >= gap_begin_ && at < gap_end_) return std::nullopt;
  const auto after = ranges_.ranges_.upper_bound(at);
  const Address next = after == ranges_.ranges_.end() ? std::numeric_limits<Address>::max() : after->first;
  const bool first = after == ranges_.ranges_.begin();
  const Address base = first ? 0 : std::prev(after)->first;
  const Range range = first ? Range{0, false} : std::prev(after)->second;
  if (at - base < range.size_bytes) {
    base_ = base;
    range_ = range;
    return room_in(base_, range_, at);
  }
  gap_begin_ = base + range.size_bytes;
  gap_end_ = next;
  return std::nullopt;
}

Batches prepare(std::span<const Copy> batch, const HostRanges& host) {
  Batches batches;
  batches.pinned.reserve(batch.size());
  HostRanges::Reader sources(host);
  HostRanges::Reader destinations(host);
  for (Copy rest : joined(batch)) {
    const bool from_host = sources.room_at(rest.source).has_value();
    const bool to_host = destinations.room_at(rest.destination).has_value();
    if (from_host && to_host) throw Misuse("copy: one side must be device memory");
    while (rest.size_bytes > 0) {
      HostRanges::Range room{rest.size_bytes, true};
      if (from_host || to_host) {
        const auto found = from_host ? sources.room_at(rest.source) : destinations.room_at(rest.destination);
        if (!found) throw Misuse("copy: the host side must lie within host buffers of this device");
        room = *found;
      }
      const std::size_t part_bytes = std::min(rest.size_bytes, room.size_bytes);
      (room.pinned ? batches.pinned : batches.pageable)
          .push_back({rest.destination, rest.source, part_bytes});
      rest = {rest.destination + part_bytes, rest.source + part_bytes, rest.size_bytes - part_bytes};
    }
  }
  return batches;
}

}  // namespace torpor
