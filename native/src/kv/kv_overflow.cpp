// KvManager: what a preserving sleep needs room for, and what it drops where there is too little (K9). The
// lock is held in all of these.
#include <algorithm>
#include <string>

#include "text.hpp"
#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace torpor::kv {

// Of one pool group. What the host tier has no room for goes to the disk tier, where there is one, as pages
// do at any other time.
KvManager::Saving KvManager::saving(std::size_t group, Tier to, const Drops& drops) const noexcept {
  const PageCache& cache = caches_[group];
  const auto room = [&](Tier tier) {
    const std::size_t places = cache.save_room(tier);
    return places == SIZE_MAX ? places : places + drops.freed(group, tier);
  };
  Saving found;
  std::size_t left = cache.pages_to_save() - drops.unsaved(group);
  if (to == Tier::host) {
    found.host = std::min(left, room(Tier::host));
    left -= found.host;
  }
  if (to == Tier::disk || spec_.disk_bytes > 0) {
    found.disk = std::min(left, room(Tier::disk));
    left -= found.disk;
  }
  found.homeless = left;
  return found;
}

SaveRoom KvManager::to_commit(Tier to, const Drops& drops) const noexcept {
  SaveRoom bytes{.host_bytes = 0, .disk_bytes = 0};
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    const Saving places = saving(group, to, drops);
    const auto commits = [&](Tier tier, std::size_t count) {
      const ColdStore* const there = caches_[group].store(tier);
      const std::size_t freed = std::min(count, drops.freed(group, tier));
      return there != nullptr ? there->bytes_to_commit(count - freed) : 0;
    };
    bytes.host_bytes += commits(Tier::host, places.host);
    bytes.disk_bytes += commits(Tier::disk, places.disk);
  }
  return bytes;
}

// Where too much is to be saved. `tier`: what has no room, of a group that keeps most there; gpu when all
// tiers together have none.
std::optional<KvManager::Excess> KvManager::excess(Tier to, const Drops& drops, const SaveRoom& room) const {
  std::size_t most_host = 0;
  std::size_t most_disk = 0;
  const auto larger = [&](std::size_t group, std::size_t other, std::size_t Saving::* places) {
    return saving(group, to, drops).*places * caches_[group].mover().cold_bytes() >
           saving(other, to, drops).*places * caches_[other].mover().cold_bytes();
  };
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    if (saving(group, to, drops).homeless > 0) return Excess{group, Tier::gpu};
    if (larger(group, most_host, &Saving::host)) most_host = group;
    if (larger(group, most_disk, &Saving::disk)) most_disk = group;
  }
  const SaveRoom bytes = to_commit(to, drops);
  if (bytes.host_bytes > room.host_bytes) return Excess{most_host, Tier::host};
  if (bytes.disk_bytes > room.disk_bytes) return Excess{most_disk, Tier::disk};
  return std::nullopt;
}

// In the order of eviction until the rest fits, or nothing is left that may be dropped: the coldest tier
// first, since what fell there is older.
Drops KvManager::choose_drops(Tier to, const SaveRoom& room) const {
  Drops drops(spec_.layout);
  std::vector<std::deque<Page*>> candidates(caches_.size());
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    for (const Tier tier : {Tier::disk, Tier::host, Tier::cold_gpu, Tier::gpu}) {
      const bool saves_there = tier == to || (tier == Tier::disk && spec_.disk_bytes > 0);
      if (tier >= Tier::host && !saves_there) continue;
      std::ranges::copy(caches_[group].first_to_evict(tier), std::back_inserter(candidates[group]));
    }
  }
  while (const auto over = excess(to, drops, room)) {
    std::deque<Page*>& there = candidates[over->group];
    // A place on the disk is of no use to a host without memory.
    while (over->tier == Tier::host && !there.empty() && there.front()->tier == Tier::disk) there.pop_front();
    if (there.empty()) break;
    drops.add(*there.front());
    there.pop_front();
  }
  return drops;
}

// Where the ceilings are too low, also without what is dropped.
std::optional<Refusal> KvManager::refuse_without_room(Tier to, const Drops& drops, bool evicts) const {
  std::size_t needed_bytes = 0;
  std::size_t free_bytes = 0;
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    const Saving places = saving(group, to, drops);
    const std::size_t cold_bytes = caches_[group].mover().cold_bytes();
    free_bytes += (places.host + places.disk) * cold_bytes;
    needed_bytes += (places.host + places.disk + places.homeless) * cold_bytes;
  }
  if (needed_bytes == free_bytes) return std::nullopt;
  const std::string disk = to == Tier::disk ? "disk" : "host";
  return Refusal{.code = to == Tier::disk ? "disk" : "host_memory",
                 .tag = spec_.tag,
                 .reason = "'" + spec_.tag + "' has " + bytes_text(needed_bytes) + " to keep" +
                           (evicts ? " that may not be dropped" : "") + ", and its " + disk +
                           " tier has room for " + bytes_text(free_bytes) + "; raise " + disk + "_bytes, " +
                           (evicts ? "close sequences" : "let overflow evict drop reusable prefixes") +
                           ", or choose another restore mode",
                 .needed_bytes = needed_bytes,
                 .free_bytes = free_bytes};
}

void KvManager::add_saving(Item& item, Tier to, const Drops& drops) const {
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    const PageCache& cache = caches_[group];
    const Saving places = saving(group, to, drops);
    item.keep_bytes += (cache.pages_to_save() - drops.unsaved(group)) * cache.mover().cold_bytes();
    item.buffer_bytes = std::max({item.buffer_bytes, cache.buffer_bytes(Tier::host, places.host),
                                  cache.buffer_bytes(Tier::disk, places.disk)});
  }
  const SaveRoom bytes = to_commit(to, drops);
  item.host_bytes = bytes.host_bytes;
  item.disk_bytes = bytes.disk_bytes;
  item.evicts = drops.sum();
  if (!drops.empty()) {
    item.digest +=
        " evicts=" + std::to_string(drops.sum().pages) + "/" + std::to_string(drops.sum().prefix_tokens);
  }
  if (auto refusal = refuse_without_room(to, drops, item.evicts_within.has_value())) {
    item.refusals.push_back(*std::move(refusal));
  }
}

// Gives every page that is saved its place. What is dropped goes when the sleep commits, and until then room
// beyond the ceilings serves; where the machine has none, what is dropped in cold tiers goes now.
PageCache::Travellers KvManager::plan_save(std::size_t group, Tier to) {
  PageCache& cache = caches_[group];
  const Drops none(spec_.layout);
  const Drops& drops = drops_ ? *drops_ : none;
  const std::size_t spilled = to == Tier::disk ? 0 : saving(group, to, drops).disk;
  try {
    return cache.plan_save(to, spilled, drops.pages(group));
  } catch (const OutOfMemory&) {
    if (drops.pages(group).size() == drops.unsaved(group)) throw;
  }
  std::vector<Page*> now;
  std::ranges::copy_if(drops.pages(group), std::back_inserter(now), [](const Page* page) {
    return page->status == Status::droppable && page->tier >= Tier::host;
  });
  evict(group, now);
  return cache.plan_save(to, spilled, drops.pages(group));
}

void KvManager::evict(std::size_t group, std::span<Page* const> pages) noexcept {
  const auto evicted_pages = [this] {
    std::uint64_t sum = 0;
    for (const PageCache& cache : caches_) sum += cache.counters().evicted_pages;
    return static_cast<std::size_t>(sum);
  };
  const std::size_t pages_before = evicted_pages();
  const std::size_t tokens_before = prefixes_.tokens();
  caches_[group].evict(pages);
  evicted_.pages += evicted_pages() - pages_before;
  evicted_.prefix_tokens += tokens_before - prefixes_.tokens();
}

void KvManager::evict_chosen() noexcept {
  if (!drops_) return;
  const Drops& chosen = *drops_;
  for (std::size_t group = 0; group < caches_.size(); ++group) evict(group, chosen.pages(group));
  drops_.reset();
}

}  // namespace torpor::kv
