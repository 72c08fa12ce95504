// HostStore: places for pages in host memory, committed in pieces when they are needed and given back when
// empty.
//
// The ceiling is what the host tier may use; a preserving sleep may take places beyond it for as long as it
// lasts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "torpor/device.hpp"
#include "torpor/host_pool.hpp"
#include "torpor/kv/page.hpp"

namespace torpor::kv {

class HostStore final {
 public:
  HostStore(std::shared_ptr<HostPool> pool, std::size_t page_bytes, std::size_t ceiling_bytes);
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;
  HostStore(HostStore&&) = delete;
  HostStore& operator=(HostStore&&) = delete;
  ~HostStore();

  [[nodiscard]] std::size_t ceiling_places() const noexcept { return ceiling_places_; }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }
  // Places that may still be used below the ceiling, committed or not.
  [[nodiscard]] std::size_t room() const noexcept {
    return used_ < ceiling_places_ ? ceiling_places_ - used_ : 0;
  }
  [[nodiscard]] std::size_t committed_free() const noexcept { return committed_ - used_; }
  [[nodiscard]] std::size_t committed_bytes() const noexcept { return committed_bytes_; }
  // What ensure(places) commits; what lies idle in the pool counts too.
  [[nodiscard]] std::size_t bytes_to_commit(std::size_t places) const noexcept;

  // Commits until `places` are free. OutOfHostMemory when there is no room; then nothing changed.
  void ensure(std::size_t places);
  // There must be a free committed place.
  [[nodiscard]] Place take() noexcept;
  void give_back(Place place) noexcept;
  // Gives empty pieces back.
  void trim() noexcept;
  [[nodiscard]] Address address(Place place) const noexcept;

 private:
  struct Piece {
    HostBuffer buffer;
    std::vector<std::uint32_t> free;  // capacity: all its places
    std::uint32_t places = 0;         // 0: no piece here
  };
  void add_piece(std::size_t places);
  // Of the piece to add when so many places are missing and so many are committed.
  [[nodiscard]] std::size_t next_piece_places(std::size_t missing, std::size_t committed) const noexcept;
  [[nodiscard]] std::size_t piece_bytes(std::size_t places) const noexcept;

  std::shared_ptr<HostPool> pool_;
  std::size_t page_bytes_;
  std::size_t ceiling_places_;
  std::vector<Piece> pieces_;
  std::size_t first_with_room_ = 0;  // no piece before it has a free place
  std::size_t empty_pieces_ = 0;     // without a used place
  std::size_t used_ = 0;
  std::size_t committed_ = 0;
  std::size_t committed_bytes_ = 0;
};

}  // namespace torpor::kv
