// DiskStore: places for cold pages in a file without a name. Room is allocated before it is needed, so that a
// page on its way down never meets a full disk; what is given back is free on the disk at once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "torpor/disk_file.hpp"
#include "torpor/kv/cold_store.hpp"

namespace torpor::kv {

class DiskStore final : public PieceStore {
 public:
  // Places are whole blocks of the file.
  DiskStore(std::shared_ptr<DiskFile> file, std::size_t cold_bytes, std::size_t ceiling_bytes);
  DiskStore(const DiskStore&) = delete;
  DiskStore& operator=(const DiskStore&) = delete;
  DiskStore(DiskStore&&) = delete;
  DiskStore& operator=(DiskStore&&) = delete;
  ~DiskStore() override;
  [[nodiscard]] DiskFile& file() const noexcept { return *file_; }

 private:
  void make_room_for(std::size_t pieces) override { extents_.resize(pieces); }
  void open(std::size_t piece, std::size_t size_bytes) override;
  void close(std::size_t piece) noexcept override { extents_[piece] = DiskExtent{}; }
  [[nodiscard]] std::uint64_t base(std::size_t piece) const noexcept override {
    return extents_[piece].offset();
  }
  [[nodiscard]] std::size_t size_bytes(std::size_t piece) const noexcept override {
    return extents_[piece].size_bytes();
  }

  std::shared_ptr<DiskFile> file_;
  std::vector<DiskExtent> extents_;  // by piece
};

}  // namespace torpor::kv
