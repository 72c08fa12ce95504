// Transfer: many pages between the GPU pool and host memory, as few large copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torpor/device.hpp"

namespace torpor::kv {

struct PageMove {
  Address gpu;
  Address host;
  std::uint32_t piece;  // of the host memory: copies never cross from one piece into the next
};

// Until when, and what may end it.
struct Limits {
  Deadline deadline;
  const StopFlag* stop = nullptr;
};

// Copies page_bytes of every move and waits for it, at most 64 MiB between two looks at the limits. Neighbours are
// joined. On a throw nothing is in flight any more, as far as the device still answers. Returns the bytes copied.
std::size_t move_pages(Device& device, StreamId direction, std::vector<PageMove> moves, std::size_t page_bytes,
                       const Limits& limits);

// Likewise; bytes may be any number.
void fill_range(Device& device, Address at, std::uint8_t value, std::size_t size_bytes, const Limits& limits);

}  // namespace torpor::kv
