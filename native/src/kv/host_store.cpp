#include "torpor/kv/host_store.hpp"

#include <utility>

namespace torpor::kv {
namespace {

// What a piece is a multiple of: a huge page.
constexpr std::size_t piece_granule_bytes = std::size_t{2} << 20;
// Pieces are registered with the driver one by one; larger ones do not make that faster.
constexpr std::size_t piece_limit_bytes = std::size_t{256} << 20;

}  // namespace

HostStore::HostStore(std::shared_ptr<HostPool> pool, std::size_t cold_bytes, std::size_t ceiling_bytes)
    : PieceStore(Tier::host, {.place_bytes = cold_bytes,
                              .ceiling_bytes = ceiling_bytes,
                              .granule_bytes = piece_granule_bytes,
                              .limit_bytes = piece_limit_bytes}),
      pool_(std::move(pool)) {}

HostStore::~HostStore() {
  close_all();
}

void HostStore::open(std::size_t piece, std::size_t size_bytes) {
  buffers_[piece] = pool_->acquire(size_bytes, true);
}

void HostStore::close(std::size_t piece) noexcept {
  pool_->give_back(std::move(buffers_[piece]));
  buffers_[piece] = HostBuffer{};
}

}  // namespace torpor::kv
