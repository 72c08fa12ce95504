// Long copies in windows, so that a stop flag and a deadline are heard.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "torpor/device.hpp"

namespace torpor {

constexpr std::size_t transfer_window_bytes = std::size_t{64} << 20;

// Copies that become known one after the other: the next ones can be prepared while earlier ones are under
// way, in windows of at most 64 MiB, two of them at most. On a throw (DeviceBusy, Stopped, DeviceError), and
// when it goes without finish(), nothing is in flight any more, so that both sides can be freed.
class Transfer final {
 public:
  Transfer(Device& device, StreamId stream, Deadline deadline, const StopFlag* stop)
      : device_(device), stream_(stream), deadline_(deadline), stop_(stop) {}
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;
  Transfer(Transfer&&) = delete;
  Transfer& operator=(Transfer&&) = delete;
  ~Transfer();

  // joins: where it goes on from the one before, on both sides, the two may become one copy.
  void add(Copy next, bool joins = false);
  // Puts what was added under way and waits for all of it. Returns the bytes moved since the start.
  std::size_t finish();
  // Windows put under way since the start.
  [[nodiscard]] std::size_t windows() const noexcept { return windows_; }
  // Seconds spent waiting for windows under way.
  [[nodiscard]] double waited_s() const noexcept { return waited_s_; }

 private:
  void submit();

  Device& device_;
  StreamId stream_;
  Deadline deadline_;
  const StopFlag* stop_;
  std::vector<Copy> window_;
  std::size_t window_bytes_ = 0;
  std::size_t moved_bytes_ = 0;
  std::size_t windows_ = 0;
  double waited_s_ = 0;
  std::optional<Device::Mark> before_;
  bool in_flight_ = false;
};

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
