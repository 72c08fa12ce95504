#include "torpor/transfer.hpp"

#include <algorithm>

#include "stopwatch.hpp"

namespace torpor {

namespace {
constexpr std::chrono::seconds drain_limit{30};
}  // namespace

Transfer::~Transfer() {
  if (in_flight_) drain(device_, stream_);
}

void Transfer::add(Copy next, bool joins) {
  while (next.size_bytes > 0) {
    const std::size_t part_bytes = std::min(next.size_bytes, transfer_window_bytes - window_bytes_);
    Copy* const last = joins && !window_.empty() ? &window_.back() : nullptr;
    if (last != nullptr && last->destination + last->size_bytes == next.destination &&
        last->source + last->size_bytes == next.source) {
      last->size_bytes += part_bytes;
    } else {
      window_.push_back({next.destination, next.source, part_bytes});
    }
    window_bytes_ += part_bytes;
    next = {next.destination + part_bytes, next.source + part_bytes, next.size_bytes - part_bytes};
    if (window_bytes_ == transfer_window_bytes) submit();
  }
}

void Transfer::submit() {
  if (window_.empty()) return;
  in_flight_ = true;  // also when the call fails: some of it may be under way
  device_.copy(window_, stream_);
  const Device::Mark here = device_.mark(stream_);
  if (before_) {
    const Stopwatch waiting(waited_s_);
    device_.wait_for(*before_, stream_, deadline_, stop_);
  }
  before_ = here;
  ++windows_;
  moved_bytes_ += window_bytes_;
  window_.clear();
  window_bytes_ = 0;
}

std::size_t Transfer::finish() {
  submit();
  if (in_flight_) {
    const Stopwatch waiting(waited_s_);
    device_.wait(stream_, deadline_, stop_);
  }
  in_flight_ = false;
  before_.reset();
  return moved_bytes_;
}

std::size_t transfer(Device& device, std::span<const Copy> copies, StreamId stream, Deadline deadline,
                     const StopFlag* stop) {
  Transfer all(device, stream, deadline, stop);
  for (const Copy& one : copies) all.add(one);
  return all.finish();
}

void zero_range(Device& device, Address at, std::size_t size_bytes, Deadline deadline, const StopFlag* stop) {
  try {
    device.fill(at, 0, size_bytes, StreamId::in);
    device.wait(StreamId::in, deadline, stop);
  } catch (...) {
    drain(device, StreamId::in);
    throw;
  }
}

void drain(Device& device, StreamId stream) noexcept {
  try {
    device.wait(stream, Clock::now() + drain_limit, nullptr);
  } catch (...) {
    // A device that cannot even be waited for is lost; the caller's own error says so.
  }
}

}  // namespace torpor
