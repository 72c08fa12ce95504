#include "torpor/transfer.hpp"

#include <algorithm>
#include <optional>
#include <vector>

namespace torpor {

namespace {
constexpr std::chrono::seconds drain_limit{30};
}  // namespace

std::size_t transfer(Device& device, std::span<const Copy> copies, StreamId stream, Deadline deadline,
                     const StopFlag* stop) {
  std::vector<Copy> window;
  std::size_t window_bytes = 0;
  std::size_t moved_bytes = 0;
  std::optional<Device::Mark> before;
  const auto run_window = [&] {
    if (window.empty()) return;
    device.copy(window, stream);
    const Device::Mark here = device.mark(stream);
    if (before) device.wait_for(*before, stream, deadline, stop);
    before = here;
    moved_bytes += window_bytes;
    window.clear();
    window_bytes = 0;
  };
  try {
    for (Copy rest : copies) {
      while (rest.size_bytes > 0) {
        const std::size_t part_bytes = std::min(rest.size_bytes, transfer_window_bytes - window_bytes);
        window.push_back({rest.destination, rest.source, part_bytes});
        window_bytes += part_bytes;
        rest = {rest.destination + part_bytes, rest.source + part_bytes, rest.size_bytes - part_bytes};
        if (window_bytes == transfer_window_bytes) run_window();
      }
    }
    run_window();
    if (before) device.wait(stream, deadline, stop);
  } catch (...) {
    drain(device, stream);
    throw;
  }
  return moved_bytes;
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
