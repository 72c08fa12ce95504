// PieceStore: the books over pieces and their places.
#include "torpor/kv/cold_store.hpp"

#include <algorithm>
#include <cassert>
#include <utility>

#include "torpor/device.hpp"

namespace torpor::kv {

PieceStore::PieceStore(Tier tier, const Sizes& sizes)
    : tier_(tier), sizes_(sizes), ceiling_places_(sizes.ceiling_bytes / sizes.place_bytes) {}

// Grows with what is committed, so that the number of pieces stays small for large tiers.
std::size_t PieceStore::next_piece_places(std::size_t missing, std::size_t committed) const noexcept {
  const std::size_t wanted_bytes = std::max(missing, committed / 8) * sizes_.place_bytes;
  const std::size_t limit_bytes = std::max(sizes_.place_bytes, sizes_.limit_bytes);
  const std::size_t places =
      round_up(std::min(wanted_bytes, limit_bytes), sizes_.granule_bytes) / sizes_.place_bytes;
  // Below the ceiling never more than the ceiling; beyond it no more than needed.
  const std::size_t left = committed < ceiling_places_ ? ceiling_places_ - committed : 0;
  return std::min(places, std::max(left, missing));
}

std::size_t PieceStore::piece_bytes(std::size_t places) const noexcept {
  return round_up(places * sizes_.place_bytes, sizes_.granule_bytes);
}

std::size_t PieceStore::bytes_to_commit(std::size_t places) const noexcept {
  std::size_t bytes = 0;
  std::size_t added = 0;
  while (committed_free() + added < places) {
    const std::size_t next = next_piece_places(places - committed_free() - added, committed_ + added);
    bytes += piece_bytes(next);
    added += next;
  }
  return bytes;
}

void PieceStore::ensure(std::size_t places) {
  try {
    while (committed_free() < places) add_piece(next_piece_places(places - committed_free(), committed_));
  } catch (...) {
    trim();
    throw;
  }
}

void PieceStore::add_piece(std::size_t places) {
  Piece piece;
  piece.places = static_cast<std::uint32_t>(places);
  piece.free.reserve(places);
  for (std::size_t index = places; index > 0; --index)
    piece.free.push_back(static_cast<std::uint32_t>(index - 1));
  auto hole = std::ranges::find_if(pieces_, [](const Piece& one) { return one.places == 0; });
  if (hole == pieces_.end()) hole = pieces_.insert(pieces_.end(), Piece{});
  const auto number = static_cast<std::size_t>(hole - pieces_.begin());
  make_room_for(pieces_.size());
  open(number, piece_bytes(places));
  committed_ += places;
  ++empty_pieces_;
  committed_bytes_ += size_bytes(number);
  *hole = std::move(piece);
  first_with_room_ = std::min(first_with_room_, number);
}

Place PieceStore::take() noexcept {
  assert(committed_free() > 0);
  while (pieces_[first_with_room_].free.empty()) ++first_with_room_;
  Piece& piece = pieces_[first_with_room_];
  if (piece.free.size() == piece.places) --empty_pieces_;
  const Place place{static_cast<std::uint32_t>(first_with_room_), piece.free.back(), tier_};
  piece.free.pop_back();
  ++used_;
  return place;
}

void PieceStore::give_back(Place place) noexcept {
  assert(place && place.tier == tier_ && pieces_[place.piece].free.size() < pieces_[place.piece].places);
  Piece& piece = pieces_[place.piece];
  piece.free.push_back(place.index);
  if (piece.free.size() == piece.places) ++empty_pieces_;
  first_with_room_ = std::min(first_with_room_, static_cast<std::size_t>(place.piece));
  --used_;
}

void PieceStore::trim() noexcept {
  if (empty_pieces_ == 0) return;
  empty_pieces_ = 0;
  for (std::size_t number = 0; number < pieces_.size(); ++number) {
    Piece& piece = pieces_[number];
    if (piece.places == 0 || piece.free.size() < piece.places) continue;
    committed_ -= piece.places;
    committed_bytes_ -= size_bytes(number);
    close(number);
    piece = Piece{};
  }
}

void PieceStore::close_all() noexcept {
  for (std::size_t number = 0; number < pieces_.size(); ++number) {
    if (pieces_[number].places > 0) close(number);
  }
  pieces_.clear();
}

std::vector<std::size_t> PieceStore::first_numbers() const {
  std::vector<std::size_t> numbers{0};
  numbers.reserve(pieces_.size() + 1);
  for (const Piece& piece : pieces_) numbers.push_back(numbers.back() + piece.places);
  return numbers;
}

std::uint64_t PieceStore::at(Place place) const noexcept {
  return base(place.piece) + std::uint64_t{place.index} * sizes_.place_bytes;
}

}  // namespace torpor::kv
