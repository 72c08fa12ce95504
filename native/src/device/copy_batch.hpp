// Preparing a batch of copies for a driver: fewer and larger ones, none across a border that it cannot cross.
#pragma once

#include <map>
#include <span>
#include <vector>

#include "torpor/device.hpp"

namespace torpor {

// Host buffers that a device made, and how they are registered with its driver.
class HostRanges final {
 public:
  struct Range {
    std::size_t size_bytes;
    bool pinned;
  };
  // Registration goes in pieces of this size, and no copy may cross from one into the next.
  static constexpr std::size_t piece_bytes = std::size_t{1} << 30;

  void add(Address base, Range range) { ranges_.emplace(base, range); }
  // Null range (0 bytes) when there is none.
  Range remove(Address base) noexcept;
  // Bytes from `at` to the end of its registered piece; pinned as the range is. Nothing when it is no host
  // address.
  [[nodiscard]] std::optional<Range> room_at(Address at) const noexcept;
  // Asks for one address after the other: most lie in the range of the one before. The ranges must not change
  // meanwhile.
  class Reader;

 private:
  // From `at`, which lies in this range at `base`.
  [[nodiscard]] static Range room_in(Address base, const Range& range, Address at) noexcept;
  std::map<Address, Range> ranges_;
};

class HostRanges::Reader final {
 public:
  explicit Reader(const HostRanges& ranges) noexcept : ranges_(ranges) {}
  [[nodiscard]] std::optional<Range> room_at(Address at) noexcept;

 private:
  const HostRanges& ranges_;
  Address base_ = 0;
  Range range_{0, false};  // at base_; 0 bytes: none known yet
  // No host address lies between these two: device memory, one range for all its addresses.
  Address gap_begin_ = 0;
  Address gap_end_ = 0;
};

struct Batches {
  std::vector<Copy> pinned;    // between registered host memory and the device, or within the device
  std::vector<Copy> pageable;  // the driver stages these by itself, one call each
};

// Joins neighbours (each copy that goes on where the one before ended, on both sides), then cuts at borders.
// Misuse when a copy leaves its host buffer.
[[nodiscard]] Batches prepare(std::span<const Copy> batch, const HostRanges& host);

}  // namespace torpor
