#include "torpor/kv/pool_exchange.hpp"

#include <utility>

namespace torpor::kv {

PoolExchange::PoolExchange(std::vector<GpuPool*> pools, std::vector<std::size_t> sizes_bytes)
    : pools_(std::move(pools)), sizes_bytes_(std::move(sizes_bytes)) {}

void PoolExchange::run() {
  for (std::size_t pool = 0; pool < pools_.size(); ++pool) shrink(pool);
  for (std::size_t pool = 0; pool < pools_.size(); ++pool) grow(pool);
}

void PoolExchange::shrink(std::size_t pool) {
  GpuPool& from = *pools_[pool];
  while (from.mapped_bytes() > from.size_down_to(sizes_bytes_[pool])) {
    chunks_.reserve(chunks_.size() + 1);
    steps_.reserve(steps_.size() + 1);
    chunks_.push_back(from.take_chunk());
    steps_.push_back({Kind::taken, pool, chunks_.size() - 1});
  }
}

void PoolExchange::grow(std::size_t pool) {
  GpuPool& to = *pools_[pool];
  while (to.mapped_bytes() < sizes_bytes_[pool]) {
    const std::size_t index = largest_chunk(sizes_bytes_[pool] - to.mapped_bytes());
    if (index == chunks_.size()) break;
    steps_.reserve(steps_.size() + 1);
    to.add_chunk(chunks_[index]);
    steps_.push_back({Kind::given, pool, index});
  }
  while (to.mapped_bytes() < sizes_bytes_[pool]) {
    steps_.reserve(steps_.size() + 1);
    (void)to.add_new_chunk(sizes_bytes_[pool] - to.mapped_bytes());
    steps_.push_back({Kind::created, pool, 0});
  }
}

// Of those that nobody has, and no larger than this; the end when there is none.
std::size_t PoolExchange::largest_chunk(std::size_t limit_bytes) const noexcept {
  std::size_t best = chunks_.size();
  for (std::size_t index = 0; index < chunks_.size(); ++index) {
    const std::size_t bytes = chunks_[index].size_bytes();
    if (bytes == 0 || bytes > limit_bytes) continue;
    if (best == chunks_.size() || bytes > chunks_[best].size_bytes()) best = index;
  }
  return best;
}

bool PoolExchange::undo() noexcept {
  bool whole = true;
  for (; !steps_.empty(); steps_.pop_back()) {
    try {
      undo_step(steps_.back());
    } catch (...) {
      whole = false;
    }
  }
  chunks_.clear();
  return whole;
}

void PoolExchange::undo_step(const Step& step) {
  GpuPool& pool = *pools_[step.pool];
  switch (step.kind) {
    case Kind::created:
      return pool.drop_chunk();
    case Kind::given:
      chunks_[step.chunk] = pool.take_chunk();
      return;
    case Kind::taken:
      if (chunks_[step.chunk].size_bytes() > 0) pool.add_chunk(chunks_[step.chunk]);
      return;
  }
}

}  // namespace torpor::kv
