#include "torpor/kv/transfer.hpp"

#include <algorithm>
#include <chrono>
#include <functional>

#include "torpor/errors.hpp"

namespace torpor::kv {
namespace {

constexpr std::size_t chunk_limit_bytes = std::size_t{64} << 20;
// How long a failed batch is waited for before its memory is used for something else.
constexpr std::chrono::seconds drain_time{10};

void throw_if_stopped(const Limits& limits) {
  if (limits.stop != nullptr && limits.stop->load()) throw Stopped("stopped between two copies");
}

// Runs `submit` and waits. After a failure the device must not go on copying into memory that is given back.
void submit_and_wait(Device& device, StreamId stream, const Limits& limits, const std::function<void()>& submit) {
  throw_if_stopped(limits);
  try {
    submit();
    device.wait(stream, limits.deadline, limits.stop);
  } catch (...) {
    try {
      device.wait(stream, Clock::now() + drain_time, nullptr);
    } catch (const Error&) {  // The first error is the one to tell.
    }
    throw;
  }
}

Copy as_copy(const PageMove& move, StreamId direction, std::size_t offset_bytes, std::size_t size_bytes) {
  if (direction == StreamId::out) return {move.host + offset_bytes, move.gpu + offset_bytes, size_bytes};
  return {move.gpu + offset_bytes, move.host + offset_bytes, size_bytes};
}

}  // namespace

std::size_t move_pages(Device& device, StreamId direction, std::vector<PageMove> moves, std::size_t page_bytes,
                       const Limits& limits) {
  std::ranges::sort(moves, {}, &PageMove::gpu);
  std::vector<Copy> batch;
  std::size_t batch_bytes = 0;
  std::size_t moved_bytes = 0;
  const auto flush = [&] {
    if (batch.empty()) return;
    submit_and_wait(device, direction, limits, [&] { device.copy(batch, direction); });
    moved_bytes += batch_bytes;
    batch.clear();
    batch_bytes = 0;
  };
  std::uint32_t last_piece = 0;
  for (const PageMove& move : moves) {
    for (std::size_t done = 0; done < page_bytes;) {
      const std::size_t part = std::min(page_bytes - done, chunk_limit_bytes - batch_bytes);
      const Copy next = as_copy(move, direction, done, part);
      const bool joins = !batch.empty() && last_piece == move.piece &&
                         batch.back().destination + batch.back().size_bytes == next.destination &&
                         batch.back().source + batch.back().size_bytes == next.source;
      if (joins) {
        batch.back().size_bytes += part;
      } else {
        batch.push_back(next);
      }
      last_piece = move.piece;
      batch_bytes += part;
      done += part;
      if (batch_bytes == chunk_limit_bytes) flush();
    }
  }
  flush();
  return moved_bytes;
}

void fill_range(Device& device, Address at, std::uint8_t value, std::size_t size_bytes, const Limits& limits) {
  // A device fills at least ten times as fast as a host copies.
  constexpr std::size_t fill_limit_bytes = 8 * chunk_limit_bytes;
  for (std::size_t done = 0; done < size_bytes;) {
    const std::size_t part = std::min(size_bytes - done, fill_limit_bytes);
    submit_and_wait(device, StreamId::in, limits, [&] { device.fill(at + done, value, part, StreamId::in); });
    done += part;
  }
}

}  // namespace torpor::kv
