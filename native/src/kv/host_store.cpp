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
std::size_t HostStore::piece_places(std::size_t missing) const noexcept {
  const std::size_t wanted = std::max(missing * page_bytes_, committed_bytes_ / 8);
  const std::size_t bytes = round_up(
      std::clamp(wanted, page_bytes_, std::max(page_bytes_, piece_limit_bytes)), piece_granule_bytes);
  std::size_t places = bytes / page_bytes_;
  // Below the ceiling never more than the ceiling; beyond it no more than needed.
  const std::size_t left = committed_ < ceiling_places_ ? ceiling_places_ - committed_ : 0;
  places = std::min(places, std::max(left, missing));
  return places;
}

std::size_t HostStore::bytes_to_commit(std::size_t places) const noexcept {
  if (places <= committed_free()) return 0;
  return round_up((places - committed_free()) * page_bytes_, piece_granule_bytes);
}

void HostStore::ensure(std::size_t places) {
  try {
    while (committed_free() < places) add_piece(piece_places(places - committed_free()));
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
  piece.buffer = pool_->acquire(round_up(places * page_bytes_, piece_granule_bytes), true);
  committed_ += places;
  committed_bytes_ += piece.buffer.size_bytes();
  *hole = std::move(piece);
  first_with_room_ = std::min(first_with_room_, static_cast<std::size_t>(hole - pieces_.begin()));
}

Place HostStore::take() noexcept {
  assert(committed_free() > 0);
  while (pieces_[first_with_room_].free.empty()) ++first_with_room_;
  Piece& piece = pieces_[first_with_room_];
  const Place place{static_cast<std::uint32_t>(first_with_room_), piece.free.back()};
  piece.free.pop_back();
  ++used_;
  return place;
}

void HostStore::give_back(Place place) noexcept {
  assert(place && pieces_[place.piece].free.size() < pieces_[place.piece].places);
  pieces_[place.piece].free.push_back(place.index);
  first_with_room_ = std::min(first_with_room_, static_cast<std::size_t>(place.piece));
  --used_;
}

void HostStore::trim() noexcept {
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
