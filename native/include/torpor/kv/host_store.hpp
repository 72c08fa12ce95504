// HostStore: places for pages in host memory, committed in pieces when they are needed and given back when empty.
//
// The ceiling is what the host tier may use; a preserving sleep may take places beyond it for as long as it lasts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "torpor/device.hpp"
#include "torpor/kv/page.hpp"

namespace torpor::kv {

// Where the pieces come from and go to.
class HostSource {
 public:
  HostSource() = default;
  HostSource(const HostSource&) = delete;
  HostSource& operator=(const HostSource&) = delete;
  HostSource(HostSource&&) = delete;
  HostSource& operator=(HostSource&&) = delete;
  virtual ~HostSource() = default;
  // At least that large. OutOfHostMemory when there is no room.
  [[nodiscard]] virtual HostBuffer take(std::size_t size_bytes) = 0;
  virtual void give_back(HostBuffer buffer) noexcept = 0;
  // What take() could give now, as far as the kernel can say.
  [[nodiscard]] virtual std::size_t available_bytes() const = 0;
};

class HostStore final {
 public:
  HostStore(std::shared_ptr<HostSource> source, std::size_t page_bytes, std::size_t ceiling_bytes);
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;
  HostStore(HostStore&&) = delete;
  HostStore& operator=(HostStore&&) = delete;
  ~HostStore();

  [[nodiscard]] std::size_t ceiling_places() const noexcept { return ceiling_places_; }
  [[nodiscard]] std::size_t used() const noexcept { return used_; }
  // Places that may still be used below the ceiling, committed or not.
  [[nodiscard]] std::size_t room() const noexcept { return used_ < ceiling_places_ ? ceiling_places_ - used_ : 0; }
  [[nodiscard]] std::size_t committed_free() const noexcept { return committed_ - used_; }
  [[nodiscard]] std::size_t committed_bytes() const noexcept { return committed_bytes_; }
  [[nodiscard]] std::size_t available_bytes() const { return source_->available_bytes(); }
  // What ensure(places) would commit.
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
  [[nodiscard]] std::size_t piece_places(std::size_t missing) const noexcept;

  std::shared_ptr<HostSource> source_;
  std::size_t page_bytes_;
  std::size_t ceiling_places_;
  std::vector<Piece> pieces_;
  std::size_t first_with_room_ = 0;  // no piece before it has a free place
  std::size_t used_ = 0;
  std::size_t committed_ = 0;
  std::size_t committed_bytes_ = 0;
};

}  // namespace torpor::kv
