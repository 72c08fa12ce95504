// Long copies in windows, so that a stop flag and a deadline are heard.
#pragma once

#include <span>

#include "torpor/device.hpp"

namespace torpor {

constexpr std::size_t transfer_window_bytes = std::size_t{64} << 20;

// Copies all of them, in windows of at most 64 MiB, two of them under way at most. Returns the bytes moved.
// When it throws (DeviceBusy, Stopped, DeviceError) nothing is in flight any more, so that both sides can be
// freed.
std::size_t transfer(Device& device, std::span<const Copy> copies, StreamId stream, Deadline deadline,
                     const StopFlag* stop);

// Writes zeros and waits. When it throws nothing is in flight any more, so that an undo may unmap.
void zero_range(Device& device, Address at, std::size_t size_bytes, Deadline deadline, const StopFlag* stop);

// Waits until nothing is in flight on the stream, for at most half a minute; swallows errors.
void drain(Device& device, StreamId stream) noexcept;

}  // namespace torpor
