// PageMover::Flow: moves that are planned while earlier ones are under way.
#include <algorithm>
#include <tuple>

#include "torpor/kv/page_mover.hpp"

namespace torpor::kv {
namespace {

bool to_host(const Move& move) noexcept {
  return move.to.tier == Tier::host;
}

std::uint64_t on_device(const Move& move) noexcept {
  return to_host(move) ? move.from.at : move.to.at;
}

std::uint64_t on_other_side(const Move& move) noexcept {
  return to_host(move) ? move.to.at : move.from.at;
}

}  // namespace

void PageMover::Flow::add(std::span<const Move> moves) {
  if (moves.empty()) return;
  const auto key = [this](const Move& move) {
    return std::tuple(!mover_.straight(move), move.from.tier, move.to.tier);
  };
  const auto first = key(moves.front());
  if (std::ranges::all_of(moves, [&](const Move& move) { return key(move) == first; })) {
    return add_alike(moves);
  }
  std::vector<Move> sorted(moves.begin(), moves.end());
  std::ranges::stable_sort(sorted, {}, key);
  for (auto begin = sorted.begin(); begin != sorted.end();) {
    const auto end =
        std::find_if(begin, sorted.end(), [&](const Move& move) { return key(move) != key(*begin); });
    add_alike({begin, end});
    begin = end;
  }
}

void PageMover::Flow::add_alike(std::span<const Move> moves) {
  if (mover_.straight(moves.front())) {
    copy_straight(moves);
  } else {
    mover_.copy_buffered(moves, limits_);
  }
  const bool page = moves.front().to.tier == Tier::gpu;
  moved_bytes_ += moves.size() * (page ? mover_.page_bytes_ : mover_.cold_bytes_);
}

PageMover::Flow::Lane& PageMover::Flow::lane(bool out) {
  std::optional<Lane>& there = out ? out_ : in_;
  if (!there) there.emplace(*mover_.device_, out ? StreamId::out : StreamId::in, limits_);
  return *there;
}

void PageMover::Flow::copy_straight(std::span<const Move> moves) {
  // What are neighbours on both sides follow each other in the order of either.
  if (!std::ranges::is_sorted(moves, {}, on_device) && !std::ranges::is_sorted(moves, {}, on_other_side)) {
    std::vector<Move> sorted(moves.begin(), moves.end());
    std::ranges::sort(sorted, {}, on_device);
    return copy_straight(sorted);
  }
  const Move& first = moves.front();
  const bool page = first.from.tier == Tier::gpu || first.to.tier == Tier::gpu;
  const std::size_t size_bytes = page ? mover_.page_bytes_ : mover_.cold_bytes_;
  Lane& lane = this->lane(to_host(first));
  for (const Move& move : moves) {
    const std::uint32_t piece = to_host(move) ? move.to.piece : move.from.piece;
    lane.transfer.add({static_cast<Address>(move.to.at), static_cast<Address>(move.from.at), size_bytes},
                      piece == lane.last_piece);
    lane.last_piece = piece;
  }
}

std::size_t PageMover::Flow::finish() {
  if (out_) out_->transfer.finish();
  if (in_) in_->transfer.finish();
  return moved_bytes_;
}

std::size_t PageMover::Flow::windows() const noexcept {
  return (out_ ? out_->transfer.windows() : 0) + (in_ ? in_->transfer.windows() : 0);
}

double PageMover::Flow::waited_s() const noexcept {
  return (out_ ? out_->transfer.waited_s() : 0) + (in_ ? in_->transfer.waited_s() : 0);
}

}  // namespace torpor::kv
