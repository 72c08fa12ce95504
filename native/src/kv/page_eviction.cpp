// PageCache: which pages fall where, and which are dropped. Changes nothing.
#include <algorithm>

#include "torpor/kv/page_cache.hpp"

namespace torpor::kv {
namespace {

// The `count` last ones of `from`: what a tier keeps of what falls into it is the newest.
std::vector<Page*> take_last(std::vector<Page*>& from, std::size_t count) {
  const auto first = from.end() - static_cast<std::ptrdiff_t>(count);
  std::vector<Page*> taken(first, from.end());
  from.erase(first, from.end());
  return taken;
}

}  // namespace

PageCache::Rooms PageCache::rooms(std::span<Page* const> arriving) const noexcept {
  Rooms found{};
  for (const Tier tier : cold_tiers) {
    const ColdStore* const there = store(tier);
    if (there != nullptr && there->ceiling_places() > 0) found[index(tier)] = {there->room(), true};
  }
  for (const Page* page : arriving) {
    Room& room = found[index(page->tier)];
    if (page->place && room.displaces) ++room.places;
  }
  return found;
}

// The first `limit` pages of a tier that may leave it and leave room behind.
PageCache::Falling PageCache::victims(Tier tier, std::size_t limit) const {
  Falling found;
  const auto collect = [&](const EvictionQueue& queue, std::vector<Page*>& into) {
    for (Page* page = queue.first(); page != nullptr && limit > 0; page = queue.after(*page)) {
      const bool held_back = page->status == Status::held && page->refused;
      if (page->in_transit || held_back || (tier != Tier::gpu && !page->place)) continue;
      into.push_back(page);
      --limit;
    }
  };
  collect(droppable(tier), found.droppable);
  collect(held(tier), found.held);
  return found;
}

std::optional<PageCache::Eviction> PageCache::plan_eviction(std::size_t n, const Rooms& rooms) const {
  if (n > gpu_.slots()) return std::nullopt;
  const std::size_t missing = n > gpu_.free_slots() ? n - gpu_.free_slots() : 0;
  Falling falling = victims(Tier::gpu, missing);
  if (falling.droppable.size() + falling.held.size() < missing) return std::nullopt;
  Eviction plan;
  for (const Tier tier : cold_tiers) settle(tier, rooms[index(tier)], falling, plan);
  if (!falling.held.empty()) return std::nullopt;
  plan.drops.insert(plan.drops.end(), falling.droppable.begin(), falling.droppable.end());
  return plan;
}

// Lets fall into a tier what finds room there: held pages before droppable ones. Held ones may displace any
// page of the tier, droppable ones only droppable ones of no higher priority, which are older. What is
// displaced or finds no room falls on.
void PageCache::settle(Tier tier, const Room& room, Falling& falling, Eviction& plan) const {
  if (room.places == 0 && !room.displaces) return;
  // What the codec refuses can only be dropped.
  const auto refused =
      std::ranges::stable_partition(falling.droppable, [](const Page* page) { return !page->refused; });
  plan.drops.insert(plan.drops.end(), refused.begin(), refused.end());
  falling.droppable.erase(refused.begin(), refused.end());
  const std::size_t wanted = falling.droppable.size() + falling.held.size();
  Falling there = victims(tier, room.displaces && wanted > room.places ? wanted - room.places : 0);
  const std::size_t for_droppable = room.places + there.droppable.size();
  const std::size_t held_in = std::min(falling.held.size(), for_droppable + there.held.size());
  const std::size_t free = room.places - std::min(room.places, held_in);
  std::size_t droppable_in = std::min(falling.droppable.size(), free);
  while (droppable_in < falling.droppable.size()) {
    const Page* const best_left = falling.droppable[falling.droppable.size() - 1 - droppable_in];
    const std::size_t next = held_in + droppable_in - room.places;
    if (next >= there.droppable.size() || best_left->priority < there.droppable[next]->priority) break;
    ++droppable_in;
  }
  const std::size_t settled = held_in + droppable_in;
  const std::size_t displaced = settled > room.places ? settled - room.places : 0;
  for (Page* page : take_last(falling.droppable, droppable_in)) plan.falls.push_back({page, tier});
  for (Page* page : take_last(falling.held, held_in)) plan.falls.push_back({page, tier});
  there.droppable.resize(std::min(there.droppable.size(), displaced));
  there.held.resize(displaced - there.droppable.size());
  falling.droppable.insert(falling.droppable.begin(), there.droppable.begin(), there.droppable.end());
  std::ranges::stable_sort(falling.droppable, {}, &Page::priority);
  falling.held.insert(falling.held.begin(), there.held.begin(), there.held.end());
}

}  // namespace torpor::kv
