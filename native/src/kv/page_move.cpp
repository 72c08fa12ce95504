#include "torpor/kv/page_move.hpp"

#include <algorithm>

#include "torpor/transfer.hpp"

namespace torpor::kv {
namespace {

Copy as_copy(const PageMove& move, StreamId direction, std::size_t size_bytes) {
  if (direction == StreamId::out) return {move.host, move.gpu, size_bytes};
  return {move.gpu, move.host, size_bytes};
}

}  // namespace

std::size_t move_pages(Device& device, StreamId direction, std::vector<PageMove> moves,
                       std::size_t page_bytes, const Limits& limits) {
  std::ranges::sort(moves, {}, &PageMove::gpu);
  std::vector<Copy> copies;
  copies.reserve(moves.size());
  std::uint32_t last_piece = 0;
  for (const PageMove& move : moves) {
    const Copy next = as_copy(move, direction, page_bytes);
    const bool joins = !copies.empty() && last_piece == move.piece &&
                       copies.back().destination + copies.back().size_bytes == next.destination &&
                       copies.back().source + copies.back().size_bytes == next.source;
    if (joins) {
      copies.back().size_bytes += page_bytes;
    } else {
      copies.push_back(next);
    }
    last_piece = move.piece;
  }
  return transfer(device, copies, direction, limits.deadline, limits.stop);
}

}  // namespace torpor::kv
