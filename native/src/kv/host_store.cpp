#include "torpor/kv/host_store.hpp"

#include <utility>

namespace torpor::kv {

HostStore::HostStore(std::shared_ptr<HostPool> pool, std::size_t cold_bytes, std::size_t ceiling_bytes)
    : PieceStore(Tier::host, {.place_bytes = cold_bytes,
                              .ceiling_bytes = ceiling_bytes,
                              .granule_bytes = host_granule_bytes,
                              .limit_bytes = host_piece_limit_bytes}),
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
