// PageCache: the moves between the tiers.
#include <algorithm>
#include <cassert>
#include <utility>

#include "torpor/errors.hpp"
#include "torpor/kv/page_cache.hpp"

namespace torpor::kv {

PageMove PageCache::as_move(std::int32_t slot, Place place) const noexcept {
  return {gpu_.address(slot), host_.address(place), place.piece};
}

std::optional<PageCache::Eviction> PageCache::plan_eviction(std::size_t n, std::size_t host_room,
                                                            std::size_t displaceable) const {
  Eviction plan;
  if (n > gpu_.slots()) return std::nullopt;
  std::size_t missing = n > gpu_.free_slots() ? n - gpu_.free_slots() : 0;
  std::vector<Page*> reusable;
  for (Page* page = droppable_[0].oldest(); page != nullptr && missing > 0; page = page->newer, --missing) {
    reusable.push_back(page);
  }
  for (Page* page = held_[0].oldest(); page != nullptr && missing > 0; page = page->newer) {
    if (page->in_transit) continue;
    plan.move.push_back(page);
    --missing;
  }
  const std::size_t room = host_room + displaceable;
  if (missing > 0 || plan.move.size() > room) return std::nullopt;
  // Of the droppable ones the newest keep a place; they are newer than what they displace.
  const std::size_t kept = std::min(reusable.size(), room - plan.move.size());
  const auto first_kept = reusable.end() - static_cast<std::ptrdiff_t>(kept);
  plan.drop.assign(reusable.begin(), first_kept);
  plan.move.insert(plan.move.begin(), first_kept, reusable.end());
  plan.displace = plan.move.size() > host_room ? plan.move.size() - host_room : 0;
  return plan;
}

std::optional<PageCache::Eviction> PageCache::settle_eviction(std::size_t n) {
  for (;;) {
    auto plan = plan_eviction(n, host_.room(), droppable(Tier::host).size());
    if (!plan) return plan;
    if (plan->displace > 0) {
      for (std::size_t i = 0; i < plan->displace && droppable(Tier::host).oldest() != nullptr; ++i) {
        watcher_.drop(*droppable(Tier::host).oldest());
      }
      continue;  // More than what was asked for may be gone: plan again.
    }
    try {
      host_.ensure(plan->move.size());
      return plan;
    } catch (const OutOfHostMemory&) {
      // Less than the ceiling is to be had: make do with what is committed.
      return plan_eviction(n, std::min(host_.committed_free(), host_.room()), 0);
    }
  }
}

bool PageCache::could_make_room(std::size_t n) const {
  return n <= gpu_.free_slots() || plan_eviction(n, host_.room(), droppable_[1].size()).has_value();
}

bool PageCache::make_room(std::size_t n, const Limits& limits) {
  if (n <= gpu_.free_slots()) return true;
  const auto plan = settle_eviction(n);
  if (!plan) return false;
  move_out(plan->move, limits);
  for (Page* page : plan->drop) {
    // One may be gone already, with a block above it.
    if (page->status == Status::droppable) watcher_.drop(*page);
  }
  host_.trim();
  return true;
}

void PageCache::move_out(std::span<Page* const> pages, const Limits& limits) {
  std::vector<Place> places;
  std::vector<PageMove> moves;
  places.reserve(pages.size());
  moves.reserve(pages.size());
  for (const Page* page : pages) {
    places.push_back(host_.take());
    moves.push_back(as_move(page->slot, places.back()));
  }
  try {
    move_pages(*device_, StreamId::out, std::move(moves), page_bytes_, limits);
  } catch (...) {
    for (const Place place : places) host_.give_back(place);
    host_.trim();
    throw;
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Page& page = *pages[i];
    gpu_.give_back(std::exchange(page.slot, no_slot));
    page.place = places[i];
    set_tier(page, Tier::host);
  }
  counters_.moved_out_pages += pages.size();
}

void PageCache::set_tier(Page& page, Tier tier) noexcept {
  --in_tier_[static_cast<std::size_t>(page.tier)];
  page.tier = tier;
  ++in_tier_[static_cast<std::size_t>(page.tier)];
  file(page);
  watcher_.moved(page);
}

void PageCache::bring_in(std::span<Page* const> pages, const Limits& limits) {
  std::vector<std::int32_t> slots;
  slots.reserve(pages.size());
  for (std::size_t i = 0; i < pages.size(); ++i) slots.push_back(gpu_.take());
  try {
    fill_and_move(pages, slots, limits);
  } catch (...) {
    for (const std::int32_t slot : slots) gpu_.give_back(slot);
    throw;
  }
  for (std::size_t i = 0; i < pages.size(); ++i) {
    Page& page = *pages[i];
    page.slot = slots[i];
    page.zero_on_arrival = false;
    give_back_place(page);
    set_tier(page, Tier::gpu);
  }
  host_.trim();
  counters_.moved_in_pages += pages.size();
}

std::size_t PageCache::fill_and_move(std::span<Page* const> pages, std::span<const std::int32_t> slots,
                                     const Limits& limits) {
  std::vector<PageMove> moves;
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (pages[i]->place) {
      moves.push_back(as_move(slots[i], pages[i]->place));
    } else if (pages[i]->zero_on_arrival) {
      zero_range(*device_, gpu_.address(slots[i]), page_bytes_, limits);
    }
  }
  return move_pages(*device_, StreamId::in, std::move(moves), page_bytes_, limits);
}

std::vector<Page*> PageCache::gpu_pages() {
  std::vector<Page*> found;
  found.reserve(pages_in(Tier::gpu));
  for (Page& page : pages_.all()) {
    if (page.status != Status::unused && page.tier == Tier::gpu) found.push_back(&page);
  }
  return found;
}

std::vector<PageMove> PageCache::plan_save() {
  std::vector<Page*> pages = gpu_pages();
  std::erase_if(pages, [](const Page* page) { return page->scratch; });
  std::ranges::sort(pages, {}, &Page::slot);  // Neighbours get neighbouring places: fewer, larger copies.
  std::vector<PageMove> moves;
  moves.reserve(pages.size());
  host_.ensure(pages.size());
  for (Page* page : pages) {
    page->place = host_.take();
    moves.push_back(as_move(page->slot, page->place));
  }
  return moves;
}

void PageCache::drop_saved() noexcept {
  for (Page& page : pages_.all()) {
    if (page.status != Status::unused && page.tier == Tier::gpu) give_back_place(page);
  }
  host_.trim();
}

void PageCache::leave_slots() noexcept {
  for (Page& page : pages_.all()) {
    if (page.status != Status::unused && page.tier == Tier::gpu) page.slot = no_slot;
  }
  gpu_.give_back_all();
}

std::vector<PageMove> PageCache::plan_restore() {
  std::vector<Page*> pages = gpu_pages();
  // In the order of their places: with slots given in order that joins the copies.
  const auto host_address = [this](const Page* page) { return page->place ? host_.address(page->place) : 0; };
  std::ranges::sort(pages, {}, host_address);
  std::vector<PageMove> moves;
  moves.reserve(pages.size());
  for (Page* page : pages) {
    page->slot = gpu_.take();
    if (page->place) moves.push_back(as_move(page->slot, page->place));
  }
  return moves;
}

}  // namespace torpor::kv
