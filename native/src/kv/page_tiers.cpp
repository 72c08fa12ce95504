// PageCache: the moves between the tiers.
#include <algorithm>
#include <cassert>
#include <utility>

#include "torpor/errors.hpp"
#include "torpor/kv/page_cache.hpp"

namespace torpor::kv {

bool PageCache::could_make_room(std::size_t n, std::span<Page* const> arriving) const {
  return n <= gpu_.free_slots() || plan_eviction(n, rooms(arriving)).has_value();
}

bool PageCache::make_room(std::size_t n, const Limits& limits, std::span<Page* const> arriving) {
  if (n <= gpu_.free_slots()) return true;
  bool done = false;
  past_refusals([&] { done = evict_for(n, limits, arriving); });
  return done;
}

void PageCache::past_refusals(const std::function<void()>& attempt) {
  std::vector<Page*> refused;
  const auto forgive = [&]() noexcept {
    for (Page* page : refused) page->refused = false;
  };
  try {
    for (bool again = true; again;) {
      again = false;
      try {
        attempt();
      } catch (const PageRefused& refusal) {
        refused.reserve(refused.size() + 1);
        Page* const page = const_cast<Page*>(refusal.page);
        page->refused = true;
        refused.push_back(page);
        again = true;
      }
    }
  } catch (...) {
    forgive();
    throw;
  }
  forgive();
}

bool PageCache::evict_for(std::size_t n, const Limits& limits, std::span<Page* const> arriving) {
  for (Rooms room = rooms(arriving);;) {
    auto plan = plan_eviction(n, room);
    if (!plan) return false;
    // The cold tier on the GPU cannot take a page before another has left it.
    const auto in_cold_gpu = [](const Page* page) { return page->tier == Tier::cold_gpu; };
    const bool in_two_steps = std::ranges::any_of(plan->falls, in_cold_gpu, &Fall::page) ||
                              std::ranges::any_of(plan->drops, in_cold_gpu);
    if (in_two_steps) {
      std::erase_if(plan->falls, [](const Fall& one) { return one.page->tier == Tier::gpu; });
      std::erase_if(plan->drops, [](const Page* page) { return page->tier == Tier::gpu; });
    }
    if (crowds_cold_gpu(*plan)) {
      // What arrives from there has to leave before its places can be used.
      if (!step_aside(arriving, limits)) return false;
      room = rooms(arriving);
      continue;
    }
    if (const auto scarce = ensure_places(plan->falls)) {
      room[index(*scarce)] = committed_room(*scarce, room[index(*scarce)]);
      continue;
    }
    fall(plan->falls, limits);
    drop_all(plan->drops);
    trim();
    if (!in_two_steps) return true;
    room = rooms(arriving);
  }
}

bool PageCache::crowds_cold_gpu(const Eviction& plan) const noexcept {
  if (!cold_gpu_) return false;
  return static_cast<std::size_t>(std::ranges::count(plan.falls, Tier::cold_gpu, &Fall::to)) >
         cold_gpu_->room();
}

bool PageCache::step_aside(std::span<Page* const> arriving, const Limits& limits) {
  std::vector<Fall> falls;
  for (Page* page : arriving) {
    if (page->tier == Tier::cold_gpu && page->place) falls.push_back({page, Tier::host});
  }
  if (falls.empty() || ensure_places(falls)) return false;
  fall(falls, limits);
  return true;
}

std::optional<Tier> PageCache::ensure_places(std::span<const Fall> falls) {
  for (const Tier tier : cold_tiers) {
    const auto places = static_cast<std::size_t>(std::ranges::count(falls, tier, &Fall::to));
    if (places == 0) continue;
    try {
      store(tier)->ensure(places);
    } catch (const OutOfMemory&) {
      trim();
      return tier;
    }
  }
  return std::nullopt;
}

PageCache::Room PageCache::committed_room(Tier tier, const Room& wanted) const noexcept {
  return {std::min(store(tier)->committed_free(), wanted.places), false};
}

std::vector<Place> PageCache::copy_down(std::span<const Fall> falls, const Limits& limits) {
  std::vector<Place> places;
  std::vector<Move> moves;
  places.reserve(falls.size());
  moves.reserve(falls.size());
  for (const Fall& one : falls) {
    places.push_back(store(one.to)->take());
    const PageEnd from = one.page->tier == Tier::gpu ? end_at(one.page->slot) : end_at(one.page->place);
    moves.push_back({one.page, from, end_at(places.back())});
  }
  try {
    mover_.run(moves, limits);
  } catch (...) {
    for (Place& place : places) give_back(place);
    trim();
    throw;
  }
  return places;
}

void PageCache::settle_fall(const Fall& one, Place place) noexcept {
  Page& page = *one.page;
  ++(page.tier == Tier::gpu ? counters_.moved_out_pages : counters_.moved_down_pages);
  if (page.slot != no_slot) gpu_.give_back(std::exchange(page.slot, no_slot));
  give_back(page.place);
  page.place = place;
  set_tier(page, one.to);
}

// All of them or, on a throw, none.
void PageCache::fall(std::span<const Fall> falls, const Limits& limits) {
  const std::vector<Place> places = copy_down(falls, limits);
  for (std::size_t i = 0; i < falls.size(); ++i) settle_fall(falls[i], places[i]);
}

void PageCache::drop_all(std::span<Page* const> pages) noexcept {
  for (Page* page : pages) {
    // One may be gone already, with a block above it.
    if (page->status == Status::droppable) watcher_.drop(*page);
  }
}

void PageCache::set_tier(Page& page, Tier tier) noexcept {
  --in_tier_[index(page.tier)];
  page.tier = tier;
  ++in_tier_[index(page.tier)];
  file(page);
  watcher_.moved(page);
}

void PageCache::bring_in(std::span<Page* const> pages, const Limits& limits) {
  std::vector<std::int32_t> slots;
  std::vector<Move> moves;
  slots.reserve(pages.size());
  moves.reserve(pages.size());
  for (const Page* page : pages) {
    slots.push_back(gpu_.take());
    assert(page->place);
    moves.push_back({page, end_at(page->place), end_at(slots.back())});
  }
  try {
    mover_.run(moves, limits);
  } catch (...) {
    for (const std::int32_t slot : slots) gpu_.give_back(slot);
    throw;
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Page& page = *pages[i];
    page.slot = slots[i];
    gpu_.settle_in(page.slot, page);
    give_back(page.place);
    set_tier(page, Tier::gpu);
  }
  trim();
  counters_.moved_in_pages += pages.size();
}

}  // namespace torpor::kv
