// KvManager: its pools grow, shrink, and give each other memory, between two transactions.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <utility>

#include "page_clearing.hpp"
#include "text.hpp"
#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"
#include "torpor/kv/pool_exchange.hpp"

namespace torpor::kv {
namespace {

std::string pool_text(std::size_t group) {
  return "pool " + std::to_string(group);
}

// Chunks that go from pool to pool in thought.
class Shares final {
 public:
  Shares(const std::vector<const GpuPool*>& pools, std::vector<double> wanted_bytes,
         std::vector<std::size_t> least_bytes)
      : wanted_(std::move(wanted_bytes)), least_(std::move(least_bytes)), gives_(pools.size()) {
    for (std::size_t pool = 0; pool < pools.size(); ++pool) {
      chunks_.push_back(pools[pool]->chunk_sizes());
      sizes_.push_back(pools[pool]->size_bytes());
      room_.push_back(pools[pool]->reserved_bytes());
      gives_[pool] = static_cast<double>(sizes_[pool]) > wanted_[pool];
    }
  }

  // Whether one more chunk brings the pools nearer to what is wanted.
  bool step() {
    std::size_t from = 0;
    std::size_t to = 0;
    for (std::size_t pool = 0; pool < sizes_.size(); ++pool) {
      if (excess(pool) > excess(from)) from = pool;
      if (excess(pool) < excess(to)) to = pool;
    }
    if (from == to || !gives_[from] || gives_[to] || chunks_[from].size() < 2) return false;
    const std::size_t chunk_bytes = chunks_[from].back();
    const auto chunk = static_cast<double>(chunk_bytes);
    const bool nearer = std::abs(excess(from) - chunk) + std::abs(excess(to) + chunk) <
                        std::abs(excess(from)) + std::abs(excess(to));
    if (!nearer || sizes_[from] < least_[from] + chunk_bytes || sizes_[to] + chunk_bytes > room_[to]) {
      return false;
    }
    chunks_[from].pop_back();
    sizes_[from] -= chunk_bytes;
    sizes_[to] += chunk_bytes;
    return true;
  }
  [[nodiscard]] const std::vector<std::size_t>& sizes() const noexcept { return sizes_; }

 private:
  [[nodiscard]] double excess(std::size_t pool) const noexcept {
    return static_cast<double>(sizes_[pool]) - wanted_[pool];
  }
  std::vector<double> wanted_;
  std::vector<std::size_t> least_;
  std::vector<bool> gives_;
  std::vector<std::vector<std::size_t>> chunks_;
  std::vector<std::size_t> sizes_;
  std::vector<std::size_t> room_;
};

}  // namespace

void KvManager::resize_pools(const std::vector<std::size_t>& gpu_bytes,
                             std::optional<std::size_t> host_bytes) {
  maintain("resize_pools", [&] { reshape(sizes_of(gpu_bytes), host_bytes); });
}

void KvManager::resize_pools(std::size_t gpu_bytes, std::optional<std::size_t> host_bytes) {
  maintain("resize_pools", [&] {
    const std::size_t granule = device_->granularity_bytes();
    reshape(sizes_of(spec_.layout.divide(gpu_bytes, spec_.sequence_tokens, granule)), host_bytes);
  });
}

void KvManager::rebalance(const std::vector<double>& shares) {
  maintain("rebalance", [&] { reshape(by_shares(shares), std::nullopt); });
}

void KvManager::maintain(const char* call, const std::function<void()>& work) {
  std::shared_ptr<Maintenance> ledger;
  {
    const std::lock_guard guard(mutex_);
    ledger = ledger_.lock();
  }
  const auto locked = [&] {
    const std::lock_guard guard(mutex_);
    require_maintainable(call);
    work();
  };
  if (ledger != nullptr) {
    ledger->run(spec_.tag, call, locked);
  } else {
    locked();
  }
}

void KvManager::require_maintainable(const std::string& call) {
  require_settled(call.c_str());
  if (parked_) throw Misuse(call + ": '" + spec_.tag + "' is asleep; wake it first");
  const auto active = std::ranges::count_if(
      sequences_, [](const auto& entry) { return entry.second->state == SequenceState::active; });
  if (active > 0) {
    throw Misuse(call + ": " + std::to_string(active) + " sequences are active; suspend them first");
  }
}

std::vector<std::size_t> KvManager::sizes_of(const std::vector<std::size_t>& gpu_bytes) const {
  if (gpu_bytes.size() != caches_.size()) {
    throw Misuse("resize_pools: there are " + std::to_string(caches_.size()) + " pools, but " +
                 std::to_string(gpu_bytes.size()) + " sizes; give one a pool, in the order of pools()");
  }
  const std::size_t granule = device_->granularity_bytes();
  std::vector<std::size_t> sizes;
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    const GpuPool& pool = caches_[group].gpu();
    const std::size_t size = gpu_bytes[group] / granule * granule;
    if (size < caches_[group].page_bytes()) {
      throw Misuse("resize_pools: " + pool_text(group) + " needs room for one page of " +
                   std::to_string(caches_[group].page_bytes()) + " bytes in whole granules of " +
                   std::to_string(granule) + "; give it more");
    }
    if (size > pool.reserved_bytes()) {
      throw Misuse("resize_pools: " + pool_text(group) + " has addresses for " +
                   bytes_text(pool.reserved_bytes()) + ", not for " + bytes_text(size) +
                   "; make the cache with a higher max_gpu_bytes");
    }
    sizes.push_back(size < pool.size_bytes() ? pool.size_down_to(size) : size);
  }
  return sizes;
}

// Of each pool: what the largest sequence needs there, of those that could resume now.
std::vector<std::size_t> KvManager::slots_for_sequences() const {
  std::vector<std::size_t> least(caches_.size(), 1);
  for (const auto& [id, record] : sequences_) {
    const std::vector<Arrivals> arrivals = arrivals_of(*record, fresh_pages_of(*record));
    for (std::size_t group = 0; group < caches_.size(); ++group) {
      const Arrivals& one = arrivals[group];
      const double utilised = std::ceil(static_cast<double>(one.to_lock) / spec_.max_utilisation);
      const std::size_t needed = std::max(one.pages.size() + one.fresh, static_cast<std::size_t>(utilised));
      if (needed <= caches_[group].gpu().slots()) least[group] = std::max(least[group], needed);
    }
  }
  return least;
}

std::vector<std::size_t> KvManager::by_shares(std::vector<double> shares) const {
  if (shares.empty()) {
    for (const PageCache& cache : caches_) {
      const std::size_t pages = cache.pages_with(Status::held) + cache.pages_with(Status::droppable);
      shares.push_back(static_cast<double>(std::max<std::size_t>(1, pages) * cache.page_bytes()));
    }
  }
  const bool positive = std::ranges::all_of(shares, [](double one) { return std::isfinite(one) && one > 0; });
  if (shares.size() != caches_.size() || !positive) {
    throw Misuse("rebalance: give one share more than 0 for each of the " + std::to_string(caches_.size()) +
                 " pools, in the order of pools(); or none, to go by use");
  }
  const double all_shares = std::reduce(shares.begin(), shares.end());
  std::size_t total_bytes = 0;
  for (const PageCache& cache : caches_) total_bytes += cache.gpu().size_bytes();
  const std::vector<std::size_t> for_sequences = slots_for_sequences();
  std::vector<const GpuPool*> pools;
  std::vector<std::size_t> least_bytes;
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    const PageCache& cache = caches_[group];
    pools.push_back(&cache.gpu());
    shares[group] *= static_cast<double>(total_bytes) / all_shares;
    // Held pages that no colder tier takes stay.
    const std::size_t held = cache.held_in(Tier::gpu);
    const std::size_t staying = held - std::min(held, cache.room_below());
    least_bytes.push_back(std::max(for_sequences[group], staying) * cache.page_bytes());
  }
  Shares moves(pools, shares, least_bytes);
  while (moves.step()) {
  }
  return moves.sizes();
}

void KvManager::reshape(const std::vector<std::size_t>& sizes, std::optional<std::size_t> host_bytes) {
  require_sequences_fit(sizes);
  const kv::Limits limits = call_limits();
  device_->quiesce(limits.deadline);  // nothing may run on what will be unmapped (M5)
  std::vector<std::unique_ptr<PageCache::Clearing>> clearings(caches_.size());
  std::vector<std::vector<bool>> used;
  std::vector<GpuPool*> pools;
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    PageCache& cache = caches_[group];
    const std::size_t larger = std::max(sizes[group], cache.gpu().size_bytes());
    cache.gpu().reserve_books(larger);
    used.emplace_back(larger / cache.page_bytes());
    pools.push_back(&cache.gpu());
  }
  const auto settle = [&]() noexcept {
    for (std::size_t group = 0; group < caches_.size(); ++group) {
      if (clearings[group] != nullptr) caches_[group].commit_clearing(*clearings[group]);
      caches_[group].settle_pool(used[group]);
    }
  };
  bool whole = true;  // the memory is where it was
  PoolExchange exchange(pools, sizes);
  UndoStack undo;
  set_host_ceilings(host_bytes, sizes, undo);
  undo.push([&]() noexcept {
    if (!whole) return settle();
    for (std::size_t group = 0; group < caches_.size(); ++group) {
      if (clearings[group] != nullptr) caches_[group].undo_clearing(*clearings[group], limits);
    }
  });
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    PageCache& cache = caches_[group];
    if (sizes[group] < cache.gpu().size_bytes()) {
      const std::size_t slots = sizes[group] / cache.page_bytes();
      clearings[group] = cache.stage_clearing(slots, limits);
      if (clearings[group] == nullptr) refuse_shrinking(group, slots);
    }
    if (host_bytes) require_host_fits(group, clearings[group].get());
  }
  undo.push([&]() noexcept { whole = exchange.undo(); });
  exchange.run();
  undo.dismiss();
  settle();
  exchange.commit();
  for (PageCache& cache : caches_) cache.drop_beyond(Tier::host);
}

void KvManager::require_sequences_fit(const std::vector<std::size_t>& sizes) const {
  const std::vector<std::size_t> least = slots_for_sequences();
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    const std::size_t page_bytes = caches_[group].page_bytes();
    if (sizes[group] / page_bytes >= least[group]) continue;
    throw Misuse("a sequence needs " + std::to_string(least[group]) + " slots of " + pool_text(group) +
                 " to resume, and would find " + std::to_string(sizes[group] / page_bytes) +
                 "; close it, or leave the pool " + bytes_text(least[group] * page_bytes));
  }
}

void KvManager::set_host_ceilings(std::optional<std::size_t> host_bytes,
                                  const std::vector<std::size_t>& sizes, UndoStack& undo) {
  if (!host_bytes) return;
  const std::size_t total_bytes = std::reduce(sizes.begin(), sizes.end());
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    HostStore& host = caches_[group].host();
    undo.push([&host, before = host.ceiling_places()]() noexcept { host.set_ceiling_places(before); });
    const double part = static_cast<double>(sizes[group]) / static_cast<double>(total_bytes);
    const auto bytes = static_cast<std::size_t>(part * static_cast<double>(*host_bytes));
    host.set_ceiling_places((caches_.size() == 1 ? *host_bytes : bytes) / host.place_bytes());
  }
}

void KvManager::require_host_fits(std::size_t group, const PageCache::Clearing* staged) const {
  const PageCache& cache = caches_[group];
  const std::size_t needed = cache.held_places(Tier::host, staged);
  const std::size_t places = cache.host().ceiling_places();
  if (needed <= places) return;
  const std::size_t place_bytes = cache.host().place_bytes();
  throw OutOfHostMemory("the host tier of " + pool_text(group) + " cannot shrink to " +
                            std::to_string(places) + " pages: suspended sequences hold " +
                            std::to_string(needed) + "; close some, or leave more host_bytes",
                        needed * place_bytes, places * place_bytes);
}

void KvManager::refuse_shrinking(std::size_t group, std::size_t slots) const {
  const PageCache& cache = caches_[group];
  const std::size_t held = cache.held_in(Tier::gpu);
  throw OutOfDeviceMemory(
      pool_text(group) + " cannot shrink to " + std::to_string(slots) + " slots: suspended sequences hold " +
          std::to_string(held) + " pages there, and colder tiers have room for " +
          std::to_string(cache.room_below()) + "; close sequences, raise host_bytes, or leave the pool more",
      held * cache.page_bytes(), slots * cache.page_bytes());
}

}  // namespace torpor::kv
