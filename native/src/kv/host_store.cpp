#include "torpor/kv/host_store.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

namespace torpor::kv {
namespace {

// What a piece is a multiple of: a huge page.
constexpr std::size_t piece_granule_bytes = std::size_t{2} << 20;
// Pieces are registered with the driver one by one; larger ones do not make that faster.
constexpr std::size_t piece_limit_bytes = std::size_t{256} << 20;

}  // namespace

HostStore::HostStore(std::shared_ptr<HostPool> pool, std::size_t page_bytes, std::size_t ceiling_bytes)
    : pool_(std::move(pool)), page_bytes_(page_bytes), ceiling_places_(ceiling_bytes / page_bytes) {}

HostStore::~HostStore() {
  for (Piece& piece : pieces_) {
    if (piece.places > 0) pool_->give_back(std::move(piece.buffer));
  }
}

// Grows with what is committed, so that the number of pieces stays small for large tiers.
std::size_t HostStore::next_piece_places(std::size_t missing, std::size_t committed) const noexcept {
  const std::size_t wanted_bytes = std::max(missing, committed / 8) * page_bytes_;
  const std::size_t limit_bytes = std::max(page_bytes_, piece_limit_bytes);
  const std::size_t places = round_up(std::min(wanted_bytes, limit_bytes), piece_granule_bytes) / page_bytes_;
  // Below the ceiling never more than the ceiling; beyond it no more than needed.
  const std::size_t left = committed < ceiling_places_ ? ceiling_places_ - committed : 0;
  return std::min(places, std::max(left, missing));
}

std::size_t HostStore::piece_bytes(std::size_t places) const noexcept {
  return round_up(places * page_bytes_, piece_granule_bytes);
}

std::size_t HostStore::bytes_to_commit(std::size_t places) const noexcept {
  std::size_t bytes = 0;
  std::size_t added = 0;
  while (committed_free() + added < places) {
    const std::size_t next = next_piece_places(places - committed_free() - added, committed_ + added);
    bytes += piece_bytes(next);
    added += next;
  }
  return bytes;
}

void HostStore::ensure(std::size_t places) {
  try {
    while (committed_free() < places) add_piece(next_piece_places(places - committed_free(), committed_));
  } catch (...) {
    trim();
    throw;
  }
}

void HostStore::add_piece(std::size_t places) {
  Piece piece;
  piece.places = static_cast<std::uint32_t>(places);
  piece.free.reserve(places);
  for (std::size_t index = places; index > 0; --index)
    piece.free.push_back(static_cast<std::uint32_t>(index - 1));
  auto hole = std::ranges::find_if(pieces_, [](const Piece& one) { return one.places == 0; });
  if (hole == pieces_.end()) hole = pieces_.insert(pieces_.end(), Piece{});
  piece.buffer = pool_->acquire(piece_bytes(places), true);
  committed_ += places;
  ++empty_pieces_;
  committed_bytes_ += piece.buffer.size_bytes();
  *hole = std::move(piece);
  first_with_room_ = std::min(first_with_room_, static_cast<std::size_t>(hole - pieces_.begin()));
}

Place HostStore::take() noexcept {
  assert(committed_free() > 0);
  while (pieces_[first_with_room_].free.empty()) ++first_with_room_;
  Piece& piece = pieces_[first_with_room_];
  if (piece.free.size() == piece.places) --empty_pieces_;
  const Place place{static_cast<std::uint32_t>(first_with_room_), piece.free.back()};
  piece.free.pop_back();
  ++used_;
  return place;
}

void HostStore::give_back(Place place) noexcept {
  assert(place && pieces_[place.piece].free.size() < pieces_[place.piece].places);
  Piece& piece = pieces_[place.piece];
  piece.free.push_back(place.index);
  if (piece.free.size() == piece.places) ++empty_pieces_;
  first_with_room_ = std::min(first_with_room_, static_cast<std::size_t>(place.piece));
  --used_;
}

void HostStore::trim() noexcept {
  if (empty_pieces_ == 0) return;
  empty_pieces_ = 0;
  for (Piece& piece : pieces_) {
    if (piece.places == 0 || piece.free.size() < piece.places) continue;
    committed_ -= piece.places;
    committed_bytes_ -= piece.buffer.size_bytes();
    pool_->give_back(std::move(piece.buffer));
    piece = Piece{};
  }
}

Address HostStore::address(Place place) const noexcept {
  return pieces_[place.piece].buffer.base() + std::size_t{place.index} * page_bytes_;
}

}  // namespace torpor::kv
