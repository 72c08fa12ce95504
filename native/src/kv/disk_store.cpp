#include "torpor/kv/disk_store.hpp"

#include <utility>

namespace torpor::kv {
namespace {

// Small enough that a disk gets room back soon, large enough that the file is no patchwork.
constexpr std::size_t piece_granule_bytes = std::size_t{1} << 20;
constexpr std::size_t piece_limit_bytes = std::size_t{64} << 20;

}  // namespace

DiskStore::DiskStore(std::shared_ptr<DiskFile> file, std::size_t cold_bytes, std::size_t ceiling_bytes)
    : PieceStore(Tier::disk, {.place_bytes = round_up(cold_bytes, DiskFile::block_bytes),
                              .ceiling_bytes = ceiling_bytes,
                              .granule_bytes = piece_granule_bytes,
                              .limit_bytes = piece_limit_bytes}),
      file_(std::move(file)) {}

DiskStore::~DiskStore() {
  close_all();
}

void DiskStore::open(std::size_t piece, std::size_t size_bytes) {
  extents_[piece] = DiskExtent(file_, size_bytes);
}

}  // namespace torpor::kv
