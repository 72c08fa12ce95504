// Between device memory and a disk file, through two pinned buffers.
#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

#include "torpor/disk_file.hpp"
#include "torpor/transfer.hpp"

namespace torpor {

namespace {

// Large enough that a disk runs at its full rate, small enough that a stop is heard soon.
constexpr std::size_t window_bytes = std::size_t{8} << 20;

// Neighbours in the file, together in one buffer.
struct Window {
  struct Part {
    Address device;
    std::size_t at;  // in the buffer
    std::size_t size_bytes;
  };
  std::uint64_t offset = 0;
  std::size_t size_bytes = 0;  // in whole blocks
  std::vector<Part> parts;
};

std::vector<Window> windows_of(std::span<const DiskMove> moves) {
  std::vector<Window> windows;
  for (DiskMove rest : moves) {
    while (rest.size_bytes > 0) {
      const bool joins = !windows.empty() && windows.back().size_bytes < window_bytes &&
                         windows.back().offset + windows.back().size_bytes == rest.offset;
      if (!joins) windows.push_back({.offset = rest.offset, .size_bytes = 0, .parts = {}});
      Window& window = windows.back();
      const std::size_t part_bytes = std::min(rest.size_bytes, window_bytes - window.size_bytes);
      window.parts.push_back({rest.device, window.size_bytes, part_bytes});
      window.size_bytes += round_up(part_bytes, DiskFile::block_bytes);
      rest = {rest.device + part_bytes, rest.offset + part_bytes, rest.size_bytes - part_bytes};
    }
  }
  return windows;
}

// The two buffers, back in the pool at the end.
class Bounce final {
 public:
  Bounce(HostPool& pool, const std::vector<Window>& windows) : pool_(pool) {
    std::size_t largest = DiskFile::block_bytes;
    for (const Window& window : windows) largest = std::max(largest, window.size_bytes);
    buffers_[0] = pool_.acquire(largest, true);
    if (windows.size() > 1) buffers_[1] = pool_.acquire(largest, true);
  }
  Bounce(const Bounce&) = delete;
  Bounce& operator=(const Bounce&) = delete;
  ~Bounce() {
    for (HostBuffer& buffer : buffers_) pool_.give_back(std::move(buffer));
  }
  [[nodiscard]] Address of(std::size_t window) const noexcept { return buffers_[window % 2].base(); }

 private:
  HostPool& pool_;
  std::array<HostBuffer, 2> buffers_;
};

void submit(Device& device, const Window& window, Address buffer, StreamId stream) {
  std::vector<Copy> copies;
  copies.reserve(window.parts.size());
  for (const Window::Part& part : window.parts) {
    const Address host = buffer + part.at;
    copies.push_back(stream == StreamId::out ? Copy{host, part.device, part.size_bytes}
                                             : Copy{part.device, host, part.size_bytes});
    // What another use left in the buffer must not get onto the disk.
    const std::size_t padding_bytes = round_up(part.size_bytes, DiskFile::block_bytes) - part.size_bytes;
    if (padding_bytes > 0) std::memset(reinterpret_cast<void*>(host + part.size_bytes), 0, padding_bytes);
  }
  device.copy(copies, stream);
}

std::size_t bytes_of(std::span<const DiskMove> moves) noexcept {
  std::size_t total = 0;
  for (const DiskMove& move : moves) total += move.size_bytes;
  return total;
}

}  // namespace

std::size_t disk_buffer_bytes(std::size_t size_bytes) noexcept {
  const std::size_t whole_bytes = round_up(size_bytes, DiskFile::block_bytes);
  return whole_bytes <= window_bytes ? whole_bytes : 2 * window_bytes;
}

std::size_t save_to_disk(Device& device, HostPool& pool, DiskFile& file, std::span<const DiskMove> moves,
                         Deadline deadline, const StopFlag* stop) {
  const std::vector<Window> windows = windows_of(moves);
  if (windows.empty()) return 0;
  const Bounce bounce(pool, windows);
  try {
    submit(device, windows[0], bounce.of(0), StreamId::out);
    for (std::size_t i = 0; i < windows.size(); ++i) {
      device.wait(StreamId::out, deadline, stop);
      if (i + 1 < windows.size()) submit(device, windows[i + 1], bounce.of(i + 1), StreamId::out);
      file.write(windows[i].offset, bounce.of(i), windows[i].size_bytes);
    }
  } catch (...) {
    drain(device, StreamId::out);
    throw;
  }
  return bytes_of(moves);
}

std::size_t load_from_disk(Device& device, HostPool& pool, DiskFile& file, std::span<const DiskMove> moves,
                           Deadline deadline, const StopFlag* stop) {
  const std::vector<Window> windows = windows_of(moves);
  if (windows.empty()) return 0;
  const Bounce bounce(pool, windows);
  try {
    for (std::size_t i = 0; i < windows.size(); ++i) {
      file.read(windows[i].offset, bounce.of(i), windows[i].size_bytes);
      if (i > 0) device.wait(StreamId::in, deadline, stop);
      submit(device, windows[i], bounce.of(i), StreamId::in);
    }
    device.wait(StreamId::in, deadline, stop);
  } catch (...) {
    drain(device, StreamId::in);
    throw;
  }
  return bytes_of(moves);
}

}  // namespace torpor
