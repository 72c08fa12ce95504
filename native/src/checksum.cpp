// The checksum of readable memory, and the way round for memory that only the device can read.
#include "torpor/checksum.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <thread>

#include "checksum_mix.hpp"
#include "torpor/errors.hpp"
#include "torpor/transfer.hpp"

namespace torpor {

namespace {

constexpr std::size_t lane_bytes = sizeof(std::uint64_t);
constexpr std::size_t part_bytes = std::size_t{4} << 20;  // of a thread's work; a stop is heard between them
constexpr std::size_t window_bytes = std::size_t{16} << 20;

void check_limits(Deadline deadline, const StopFlag* stop) {
  if (stop != nullptr && stop->load()) throw Stopped("stopped before the checksums were done");
  if (Clock::now() > deadline) throw DeviceBusy("checksums were not done within the deadline");
}

bool must_end(Deadline deadline, const StopFlag* stop) noexcept {
  return (stop != nullptr && stop->load()) || Clock::now() > deadline;
}

// Parts that fill one host buffer.
struct Window {
  std::span<const ChecksumPart> parts;
  std::size_t size_bytes = 0;
};

std::vector<Window> windows_of(const std::vector<ChecksumPart>& parts) {
  std::vector<Window> windows;
  for (std::size_t first = 0, next = 0; first < parts.size(); first = next) {
    std::size_t size_bytes = 0;
    while (next < parts.size() && size_bytes + parts[next].range.size_bytes <= window_bytes) {
      size_bytes += round_up(parts[next++].range.size_bytes, lane_bytes);
    }
    windows.push_back({std::span(parts).subspan(first, next - first), size_bytes});
  }
  return windows;
}

// A host buffer of a device that is not held by a pointer that shares it.
class Scratch final {
 public:
  Scratch(Device& device, std::size_t size_bytes)
      : device_(device), size_bytes_(size_bytes), base_(device.create_host(size_bytes, true)) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { device_.destroy_host(base_, size_bytes_); }
  [[nodiscard]] Address base() const noexcept { return base_; }

 private:
  Device& device_;
  std::size_t size_bytes_;
  Address base_;
};

void submit(Device& device, const Window& window, Address buffer, StreamId stream) {
  std::vector<Copy> copies;
  copies.reserve(window.parts.size());
  for (const ChecksumPart& part : window.parts) {
    copies.push_back({buffer, part.range.at, part.range.size_bytes});
    buffer += round_up(part.range.size_bytes, lane_bytes);
  }
  device.copy(copies, stream);
}

}  // namespace

std::uint64_t checksum_part(Address at, std::size_t size_bytes, std::size_t position) noexcept {
  const auto* bytes = reinterpret_cast<const unsigned char*>(at);
  std::uint64_t index = position / lane_bytes;
  std::uint64_t sum = 0;
  std::size_t done = 0;
  for (; done + lane_bytes <= size_bytes; done += lane_bytes) {
    std::uint64_t lane = 0;
    std::memcpy(&lane, bytes + done, lane_bytes);
    sum += mixed(lane, ++index);
  }
  if (done < size_bytes) {
    std::uint64_t lane = 0;
    std::memcpy(&lane, bytes + done, size_bytes - done);
    sum += mixed(lane, ++index);
  }
  return sum;
}

std::vector<ChecksumPart> checksum_parts(std::span<const ByteRange> ranges, std::size_t limit_bytes) {
  std::vector<ChecksumPart> parts;
  parts.reserve(ranges.size());
  for (std::size_t owner = 0; owner < ranges.size(); ++owner) {
    const ByteRange& range = ranges[owner];
    for (std::size_t at = 0; at < range.size_bytes; at += limit_bytes) {
      parts.push_back({owner, {range.at + at, std::min(limit_bytes, range.size_bytes - at)}, at});
    }
  }
  return parts;
}

std::vector<std::uint64_t> checksum_in_place(std::span<const ByteRange> ranges, Deadline deadline,
                                             const StopFlag* stop) {
  const std::vector<ChecksumPart> parts = checksum_parts(ranges, part_bytes);
  std::vector<std::atomic<std::uint64_t>> sums(ranges.size());
  std::size_t total_bytes = 0;
  for (const ByteRange& range : ranges) total_bytes += range.size_bytes;
  std::atomic<std::size_t> next{0};
  const auto work = [&]() noexcept {
    for (std::size_t i = next++; i < parts.size() && !must_end(deadline, stop); i = next++) {
      const auto& [owner, range, position] = parts[i];
      sums[owner] += checksum_part(range.at, range.size_bytes, position);
    }
  };
  {
    const std::size_t most = std::max(1U, std::thread::hardware_concurrency());
    const std::size_t count = std::clamp<std::size_t>(total_bytes / part_bytes, 1, most);
    std::vector<std::jthread> helpers;
    for (std::size_t i = 1; i < count; ++i) helpers.emplace_back(work);
    work();
  }
  if (!parts.empty()) check_limits(deadline, stop);
  return {sums.begin(), sums.end()};
}

std::vector<std::uint64_t> checksum_by_copying(Device& device, std::span<const ByteRange> ranges,
                                               StreamId stream, Deadline deadline, const StopFlag* stop) {
  const std::vector<ChecksumPart> parts = checksum_parts(ranges, window_bytes);
  const std::vector<Window> windows = windows_of(parts);
  std::vector<std::uint64_t> sums(ranges.size());
  if (windows.empty()) return sums;
  const std::array<Scratch, 2> buffers{Scratch(device, window_bytes), Scratch(device, window_bytes)};
  try {
    submit(device, windows[0], buffers[0].base(), stream);
    for (std::size_t i = 0; i < windows.size(); ++i) {
      device.wait(stream, deadline, stop);
      if (i + 1 < windows.size()) submit(device, windows[i + 1], buffers[(i + 1) % 2].base(), stream);
      Address at = buffers[i % 2].base();
      for (const auto& [owner, range, position] : windows[i].parts) {
        sums[owner] += checksum_part(at, range.size_bytes, position);
        at += round_up(range.size_bytes, lane_bytes);
      }
    }
  } catch (...) {
    drain(device, stream);
    throw;
  }
  return sums;
}

std::vector<std::uint64_t> Device::checksum(std::span<const ByteRange> ranges, StreamId stream,
                                            Deadline deadline, const StopFlag* stop) {
  return checksum_by_copying(*this, ranges, stream, deadline, stop);
}

}  // namespace torpor
