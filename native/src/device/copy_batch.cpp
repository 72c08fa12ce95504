#include "copy_batch.hpp"

#include <algorithm>
#include <iterator>

#include "torpor/errors.hpp"

namespace torpor {

namespace {

std::vector<Copy> joined(std::span<const Copy> batch) {
  std::vector<Copy> copies;
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

std::optional<HostRanges::Range> HostRanges::room_at(Address at) const noexcept {
  auto after = ranges_.upper_bound(at);
  if (after == ranges_.begin()) return std::nullopt;
  const auto& [base, range] = *std::prev(after);
  const std::size_t offset = at - base;
  if (offset >= range.size_bytes) return std::nullopt;
  const std::size_t to_end = range.size_bytes - offset;
  const std::size_t to_border = piece_bytes - offset % piece_bytes;
  return Range{range.pinned ? std::min(to_end, to_border) : to_end, range.pinned};
}

Batches prepare(std::span<const Copy> batch, const HostRanges& host) {
  Batches batches;
  for (Copy rest : joined(batch)) {
    const bool from_host = host.room_at(rest.source).has_value();
    const bool to_host = host.room_at(rest.destination).has_value();
    if (from_host && to_host) throw Misuse("copy: one side must be device memory");
    while (rest.size_bytes > 0) {
      HostRanges::Range room{rest.size_bytes, true};
      if (from_host || to_host) {
        const auto found = host.room_at(from_host ? rest.source : rest.destination);
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
