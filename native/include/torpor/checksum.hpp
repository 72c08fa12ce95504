// A position-sensitive checksum of bytes (K13): a byte that changed is always seen, and bytes that changed
// places are, but for one case in 2^64. Not made to resist an attacker.
//
// Every 64-bit lane is mixed with its position by multiplying and rotating, and the lanes are summed: parts
// can be computed in any order, on any thread.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "torpor/device.hpp"

namespace torpor {

// Of size_bytes of readable memory that begin `position` bytes into the whole. position is a multiple of 8,
// and so is size_bytes but for the last part. The sum of all parts is the whole's checksum.
[[nodiscard]] std::uint64_t checksum_part(Address at, std::size_t size_bytes, std::size_t position) noexcept;

// What is summed at once of a range, and where it lies in there.
struct ChecksumPart {
  std::size_t owner;  // number of the range
  ByteRange range;
  std::size_t position;
};
// All ranges in order, cut into parts of at most limit_bytes, a multiple of 8.
[[nodiscard]] std::vector<ChecksumPart> checksum_parts(std::span<const ByteRange> ranges,
                                                       std::size_t limit_bytes);

// Of each range of memory that the CPU can read, by several threads when there is much of it.
// DeviceBusy past the deadline, Stopped when told.
[[nodiscard]] std::vector<std::uint64_t> checksum_in_place(std::span<const ByteRange> ranges,
                                                           Deadline deadline, const StopFlag* stop);

// Of each range of device memory, copied out through two host buffers of the device. The same values as
// above; for devices that cannot compute where the bytes are.
[[nodiscard]] std::vector<std::uint64_t> checksum_by_copying(Device& device,
                                                             std::span<const ByteRange> ranges,
                                                             StreamId stream, Deadline deadline,
                                                             const StopFlag* stop);

}  // namespace torpor
