// ColdStore: places for the cold form of pages in one tier below the GPU pool.
//
// PieceStore is one whose places are committed in pieces when they are needed and given back when empty; host
// memory and disk are such. The ceiling is what the tier may use; a preserving sleep, and a move until its
// end, may take places beyond it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torpor/kv/page.hpp"

namespace torpor::kv {

class ColdStore {
 public:
  ColdStore() = default;
  ColdStore(const ColdStore&) = delete;
  ColdStore& operator=(const ColdStore&) = delete;
  ColdStore(ColdStore&&) = delete;
  ColdStore& operator=(ColdStore&&) = delete;
  virtual ~ColdStore() = default;

  [[nodiscard]] virtual std::size_t ceiling_places() const noexcept = 0;
  [[nodiscard]] virtual std::size_t used() const noexcept = 0;
  [[nodiscard]] virtual std::size_t committed_free() const noexcept = 0;
  [[nodiscard]] virtual std::size_t committed_bytes() const noexcept = 0;
  // Places that may still be used below the ceiling, committed or not.
  [[nodiscard]] std::size_t room() const noexcept {
    return used() < ceiling_places() ? ceiling_places() - used() : 0;
  }
  // What ensure(places) commits; what lies idle in a pool counts too.
  [[nodiscard]] virtual std::size_t bytes_to_commit(std::size_t places) const noexcept = 0;

  // Commits until `places` are free. An OutOfMemory of its kind when there is no room; then nothing changed.
  virtual void ensure(std::size_t places) = 0;
  // There must be a free committed place.
  [[nodiscard]] virtual Place take() noexcept = 0;
  virtual void give_back(Place place) noexcept = 0;
  // Gives back what is committed and empty.
  virtual void trim() noexcept = 0;
  // Where the place begins: an address, or an offset in a file.
  [[nodiscard]] virtual std::uint64_t at(Place place) const noexcept = 0;
};

class PieceStore : public ColdStore {
 public:
  // granule_bytes: what the size of a piece is a multiple of. limit_bytes: of one piece, but for one larger
  // page.
  struct Sizes {
    std::size_t place_bytes;  // from one place to the next
    std::size_t ceiling_bytes;
    std::size_t granule_bytes;
    std::size_t limit_bytes;
  };

  [[nodiscard]] std::size_t ceiling_places() const noexcept final { return ceiling_places_; }
  void set_ceiling_places(std::size_t places) noexcept { ceiling_places_ = places; }
  [[nodiscard]] std::size_t place_bytes() const noexcept { return sizes_.place_bytes; }
  [[nodiscard]] std::size_t used() const noexcept final { return used_; }
  [[nodiscard]] std::size_t committed_free() const noexcept final { return committed_ - used_; }
  [[nodiscard]] std::size_t committed_bytes() const noexcept final { return committed_bytes_; }
  [[nodiscard]] std::size_t bytes_to_commit(std::size_t places) const noexcept final;
  void ensure(std::size_t places) final;
  [[nodiscard]] Place take() noexcept final;
  void give_back(Place place) noexcept final;
  void trim() noexcept final;
  [[nodiscard]] std::uint64_t at(Place place) const noexcept final;
  // The number of each piece's first place when all places are counted through, piece by piece; behind them
  // how many there are.
  [[nodiscard]] std::vector<std::size_t> first_numbers() const;

 protected:
  PieceStore(Tier tier, const Sizes& sizes);
  // Room for one more piece than there are must be kept, so that open() is the last thing that can fail.
  virtual void make_room_for(std::size_t pieces) = 0;
  // Commits piece number `piece`. Throws when there is no room.
  virtual void open(std::size_t piece, std::size_t size_bytes) = 0;
  virtual void close(std::size_t piece) noexcept = 0;
  [[nodiscard]] virtual std::uint64_t base(std::size_t piece) const noexcept = 0;
  [[nodiscard]] virtual std::size_t size_bytes(std::size_t piece) const noexcept = 0;
  // For destructors of those that own pieces.
  void close_all() noexcept;

 private:
  struct Piece {
    std::vector<std::uint32_t> free;  // capacity: all its places
    std::uint32_t places = 0;         // 0: no piece here
  };
  void add_piece(std::size_t places);
  // Of the piece to add when so many places are missing and so many are committed.
  [[nodiscard]] std::size_t next_piece_places(std::size_t missing, std::size_t committed) const noexcept;
  [[nodiscard]] std::size_t piece_bytes(std::size_t places) const noexcept;

  Tier tier_;
  Sizes sizes_;
  std::size_t ceiling_places_;
  std::vector<Piece> pieces_;
  std::size_t first_with_room_ = 0;  // no piece before it has a free place
  std::size_t empty_pieces_ = 0;     // without a used place
  std::size_t used_ = 0;
  std::size_t committed_ = 0;
  std::size_t committed_bytes_ = 0;
};

}  // namespace torpor::kv
