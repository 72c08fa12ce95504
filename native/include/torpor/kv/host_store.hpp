// HostStore: places for cold pages in host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "torpor/device.hpp"
#include "torpor/host_pool.hpp"
#include "torpor/kv/cold_store.hpp"

namespace torpor::kv {

// What a piece is a multiple of: a huge page.
constexpr std::size_t host_granule_bytes = std::size_t{2} << 20;
// Pieces are registered with the driver one by one; larger ones do not make that faster.
constexpr std::size_t host_piece_limit_bytes = std::size_t{256} << 20;

class HostStore final : public PieceStore {
 public:
  HostStore(std::shared_ptr<HostPool> pool, std::size_t cold_bytes, std::size_t ceiling_bytes);
  HostStore(const HostStore&) = delete;
  HostStore& operator=(const HostStore&) = delete;
  HostStore(HostStore&&) = delete;
  HostStore& operator=(HostStore&&) = delete;
  ~HostStore() override;

 private:
  void make_room_for(std::size_t pieces) override { buffers_.resize(pieces); }
  void open(std::size_t piece, std::size_t size_bytes) override;
  void close(std::size_t piece) noexcept override;
  [[nodiscard]] std::uint64_t base(std::size_t piece) const noexcept override {
    return buffers_[piece].base();
  }
  [[nodiscard]] std::size_t size_bytes(std::size_t piece) const noexcept override {
    return buffers_[piece].size_bytes();
  }

  std::shared_ptr<HostPool> pool_;
  std::vector<HostBuffer> buffers_;  // by piece
};

}  // namespace torpor::kv
