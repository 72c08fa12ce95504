// Many pages between the GPU pool and host memory, as few large copies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torpor/device.hpp"

namespace torpor::kv {

struct PageMove {
  Address gpu;
  Address host;
  std::uint32_t piece;  // of the host memory: a copy never crosses from one piece into the next
};

// Until when, and what may end it.
struct Limits {
  Deadline deadline;
  const StopFlag* stop = nullptr;
};

// Copies page_bytes of every move and waits for it; neighbours are joined. Returns the bytes copied.
// On a throw nothing is in flight any more.
std::size_t move_pages(Device& device, StreamId direction, std::vector<PageMove> moves,
                       std::size_t page_bytes, const Limits& limits);

}  // namespace torpor::kv
