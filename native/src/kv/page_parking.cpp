// PageCache: how its pages leave the GPU for a sleep and come back.
#include <algorithm>
#include <utility>

#include "torpor/kv/page_cache.hpp"

namespace torpor::kv {
namespace {

bool is_on_gpu(const Page& page) noexcept {
  return page.status != Status::unused && (page.tier == Tier::gpu || page.tier == Tier::cold_gpu);
}

}  // namespace

std::size_t PageCache::pages_to_save() const noexcept {
  return pages_in(Tier::gpu) - scratch_ + (cold_gpu_ ? cold_gpu_->used() : 0);
}

std::size_t PageCache::saved_pages() const noexcept {
  return static_cast<std::size_t>(std::ranges::count_if(
      pages_.all(), [](const Page& page) { return is_on_gpu(page) && static_cast<bool>(page.saved); }));
}

std::vector<Page*> PageCache::pages_leaving_gpu() {
  std::vector<Page*> found;
  found.reserve(pages_in(Tier::gpu) + pages_in(Tier::cold_gpu));
  for (Page& page : pages_.all()) {
    if (is_on_gpu(page)) found.push_back(&page);
  }
  return found;
}

std::vector<Page*> PageCache::first_to_evict(std::size_t limit) const {
  std::vector<Page*> found;
  // The colder tier first: what fell there is older.
  for (const Tier tier : {Tier::cold_gpu, Tier::gpu}) {
    const EvictionQueue& queue = droppable(tier);
    for (Page* page = queue.first(); page != nullptr && found.size() < limit; page = queue.after(*page)) {
      found.push_back(page);
    }
  }
  return found;
}

std::vector<Move> PageCache::plan_save(Tier to, std::span<Page* const> without) {
  std::vector<Page*> pages = pages_leaving_gpu();
  std::vector<Page*> left_out(without.begin(), without.end());
  std::ranges::sort(left_out);
  std::erase_if(pages, [&](const Page* page) {
    const bool empty = page->tier == Tier::cold_gpu && !page->place;
    return empty || page->scratch || std::ranges::binary_search(left_out, page);
  });
  // Neighbours get neighbouring places: fewer, larger copies.
  std::ranges::sort(pages, {}, [this](const Page* page) {
    return page->tier == Tier::gpu ? end_at(page->slot).at : end_at(page->place).at;
  });
  std::vector<Move> moves;
  moves.reserve(pages.size());
  ColdStore& there = *store(to);
  there.ensure(pages.size());
  for (Page* page : pages) {
    page->saved = there.take();
    const PageEnd from = page->tier == Tier::gpu ? end_at(page->slot) : end_at(page->place);
    moves.push_back({page, from, end_at(page->saved)});
  }
  return moves;
}

void PageCache::drop_saved() noexcept {
  for (Page& page : pages_.all()) {
    if (is_on_gpu(page)) give_back(page.saved);
  }
  trim();
}

void PageCache::leave_slots() noexcept {
  for (Page& page : pages_.all()) {
    if (!is_on_gpu(page)) continue;
    page.slot = no_slot;
    if (page.tier == Tier::cold_gpu) page.place = Place{};
  }
  gpu_.give_back_all();
  if (cold_gpu_) cold_gpu_->pool().give_back_all();
}

std::vector<Move> PageCache::plan_restore() {
  std::vector<Page*> pages = pages_leaving_gpu();
  // In the order of their places: with slots given in order that joins the copies.
  std::ranges::sort(pages, {}, [this](const Page* page) { return page->saved ? end_at(page->saved).at : 0; });
  std::vector<Move> moves;
  moves.reserve(pages.size());
  for (Page* page : pages) {
    if (page->tier == Tier::gpu) {
      page->slot = gpu_.take();
    } else if (page->saved) {
      page->place = cold_gpu_->take();
    }
    if (!page->saved) continue;
    const PageEnd to = page->tier == Tier::gpu ? end_at(page->slot) : end_at(page->place);
    moves.push_back({page, end_at(page->saved), to});
  }
  return moves;
}

void PageCache::evict(std::span<Page* const> pages) noexcept {
  drop_all(pages);
  trim();
}

void PageCache::map() {
  gpu_.map();
  if (!cold_gpu_) return;
  try {
    cold_gpu_->pool().map();
  } catch (...) {
    gpu_.drop_mappings();
    throw;
  }
}

void PageCache::drop_mappings() noexcept {
  gpu_.drop_mappings();
  if (cold_gpu_) cold_gpu_->pool().drop_mappings();
}

std::size_t PageCache::release_one() {
  const std::size_t bytes = gpu_.release_one();
  return bytes > 0 || !cold_gpu_ ? bytes : cold_gpu_->pool().release_one();
}

std::size_t PageCache::mapped_bytes() const noexcept {
  return gpu_.mapped_bytes() + (cold_gpu_ ? cold_gpu_->pool().mapped_bytes() : 0);
}

std::size_t PageCache::device_bytes() const noexcept {
  return gpu_.size_bytes() + (cold_gpu_ ? cold_gpu_->pool().size_bytes() : 0);
}

}  // namespace torpor::kv
