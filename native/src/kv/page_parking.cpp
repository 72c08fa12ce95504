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
  return saved_pages(Tier::host) + saved_pages(Tier::disk);
}

std::size_t PageCache::saved_pages(Tier tier) const noexcept {
  return static_cast<std::size_t>(std::ranges::count_if(pages_.all(), [tier](const Page& page) {
    return is_on_gpu(page) && page.saved && page.saved.tier == tier;
  }));
}

std::vector<Page*> PageCache::pages_leaving_gpu() {
  std::vector<Page*> found;
  found.reserve(pages_in(Tier::gpu) + pages_in(Tier::cold_gpu));
  for (Page& page : pages_.all()) {
    if (is_on_gpu(page)) found.push_back(&page);
  }
  return found;
}

std::size_t PageCache::save_room(Tier to) const noexcept {
  const ColdStore* const there = store(to);
  if (there == nullptr) return 0;
  return there->ceiling_places() > 0 ? there->room() : SIZE_MAX;
}

std::vector<Page*> PageCache::first_to_evict(Tier tier) const {
  std::vector<Page*> found;
  const EvictionQueue& queue = droppable(tier);
  for (Page* page = queue.first(); page != nullptr; page = queue.after(*page)) found.push_back(page);
  return found;
}

std::size_t PageCache::buffer_bytes(Tier saved, std::size_t pages) const noexcept {
  if (pages == 0 || (saved == Tier::host && mover_.codec().identity())) return 0;
  return mover_.buffer_bytes(pages);
}

std::vector<Move> PageCache::plan_save(Tier to, std::size_t spilled, std::span<Page* const> without) {
  std::vector<Page*> pages = pages_leaving_gpu();
  std::vector<Page*> left_out(without.begin(), without.end());
  std::ranges::sort(left_out);
  std::erase_if(
      pages, [&](const Page* page) { return page->scratch || std::ranges::binary_search(left_out, page); });
  const auto first_in_host = pages.begin() + static_cast<std::ptrdiff_t>(spilled);
  if (spilled > 0) std::ranges::nth_element(pages, first_in_host, {}, &Page::status);
  // Neighbours get neighbouring places: fewer, larger copies.
  const auto lies_at = [this](const Page* page) {
    return page->tier == Tier::gpu ? end_at(page->slot).at : end_at(page->place).at;
  };
  std::sort(pages.begin(), first_in_host, [&](Page* a, Page* b) { return lies_at(a) < lies_at(b); });
  std::sort(first_in_host, pages.end(), [&](Page* a, Page* b) { return lies_at(a) < lies_at(b); });
  std::vector<Move> moves;
  moves.reserve(pages.size());
  if (spilled > 0) store(Tier::disk)->ensure(spilled);
  try {
    store(to)->ensure(pages.size() - spilled);
  } catch (...) {
    trim();
    throw;
  }
  for (Page* page : pages) {
    page->saved = store(moves.size() < spilled ? Tier::disk : to)->take();
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

PageCache::Restore PageCache::plan_restore(Tier tier) {
  const bool gpu = tier == Tier::gpu;
  std::vector<Page*> pages;
  for (Page& page : pages_.all()) {
    const bool away = gpu ? page.slot == no_slot : !page.place;
    if (page.status != Status::unused && page.tier == tier && away) pages.push_back(&page);
  }
  // In the order of their places: with slots given in order that joins the copies.
  std::ranges::sort(pages, {}, [this](const Page* page) { return page->saved ? end_at(page->saved).at : 0; });
  Restore plan;
  plan.moves.reserve(pages.size());
  plan.blanks.reserve(pages.size());
  if (!gpu && !pages.empty()) store(tier)->ensure(pages.size());
  for (Page* page : pages) {
    if (gpu) {
      page->slot = gpu_.take();
    } else {
      page->place = store(tier)->take();
    }
    const PageEnd to = gpu ? end_at(page->slot) : end_at(page->place);
    if (page->saved) {
      plan.moves.push_back({page, end_at(page->saved), to});
    } else if (!gpu) {
      plan.blanks.push_back(to);
    }
  }
  return plan;
}

std::size_t PageCache::bytes_to_remake(Tier tier) const noexcept {
  const ColdStore* const there = store(tier);
  return there != nullptr ? there->bytes_to_commit(pages_in(tier)) : 0;
}

void PageCache::evict(std::span<Page* const> pages) noexcept {
  drop_all(pages);
  trim();
}

void PageCache::map(Tier tier) {
  if (tier == Tier::gpu) gpu_.map();
  if (tier == Tier::cold_gpu && cold_gpu_) cold_gpu_->pool().map();
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

std::size_t PageCache::reserved_bytes() const noexcept {
  return gpu_.reserved_bytes() + (cold_gpu_ ? cold_gpu_->pool().reserved_bytes() : 0);
}

std::size_t PageCache::device_bytes() const noexcept {
  return gpu_.size_bytes() + (cold_gpu_ ? cold_gpu_->pool().size_bytes() : 0);
}

}  // namespace torpor::kv
