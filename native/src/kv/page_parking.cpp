// PageCache: how its pages leave the GPU for a sleep and come back.
#include <algorithm>
#include <cassert>
#include <utility>

#include "torpor/kv/page_cache.hpp"
#include "torpor/kv/page_order.hpp"

namespace torpor::kv {
namespace {

constexpr std::size_t prefetch_ahead = 12;

bool is_on_gpu(const Page& page) noexcept {
  return page.status != Status::unused && (page.tier == Tier::gpu || page.tier == Tier::cold_gpu);
}

// Pages are used in an order of their own, and each is far from the one before.
void prefetch(const PageCache::Travellers& some, std::size_t end) noexcept {
  if (some.next + prefetch_ahead < end) __builtin_prefetch(some.pages[some.next + prefetch_ahead], 1);
}

// The first `count` ones by status come first; else all stay in the order in which they are.
void put_first(std::vector<Page*>& pages, std::size_t count) {
  std::vector<Page*> first = pages;
  std::ranges::nth_element(first, first.begin() + static_cast<std::ptrdiff_t>(count), {}, &Page::status);
  first.resize(count);
  std::ranges::sort(first);
  std::ranges::stable_partition(pages, [&](Page* page) { return std::ranges::binary_search(first, page); });
}

}  // namespace

std::size_t PageCache::pages_to_save() const noexcept {
  return pages_in(Tier::gpu) - scratch_ + (cold_gpu_ ? cold_gpu_->used() : 0);
}

std::size_t PageCache::saved_pages() const noexcept {
  return saved_pages(Tier::host) + saved_pages(Tier::disk);
}

// In the order of their slots, so that neighbours get neighbouring places: fewer, larger copies. Nothing is
// copied before this is done: of many pages no more is looked at than where they are.
std::vector<Page*> PageCache::pages_leaving_gpu(std::span<Page* const> without) {
  std::vector<Page*> found = gpu_.pages();
  assert(found.size() == pages_in(Tier::gpu));
  if (cold_gpu_ && pages_in(Tier::cold_gpu) > 0) {
    PageOrder places(pages_in(Tier::cold_gpu), cold_gpu_->ceiling_places());
    for (Page& page : pages_.all()) {
      if (is_on_gpu(page) && page.tier == Tier::cold_gpu) places.add(page.place.index, page);
    }
    const std::vector<Page*> cold = places.take();
    found.insert(found.end(), cold.begin(), cold.end());
  }
  if (scratch_ > 0) std::erase_if(found, [](const Page* page) { return page->scratch; });
  if (!without.empty()) {
    std::vector<Page*> left_out(without.begin(), without.end());
    std::ranges::sort(left_out);
    std::erase_if(found, [&](Page* page) { return std::ranges::binary_search(left_out, page); });
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

PageCache::Travellers PageCache::plan_save(Tier to, std::size_t spilled, std::span<Page* const> without) {
  Travellers leaving{.tier = to, .pages = pages_leaving_gpu(without), .spilled = spilled};
  if (spilled > 0) {
    put_first(leaving.pages, spilled);
    store(Tier::disk)->ensure(spilled);
  }
  try {
    store(to)->ensure(leaving.pages.size() - spilled);
  } catch (...) {
    trim();
    throw;
  }
  return leaving;
}

void PageCache::save_next(Travellers& leaving, std::size_t limit, std::vector<Move>& moves) {
  moves.clear();
  const std::size_t end = std::min(leaving.pages.size(), leaving.next + limit);
  moves.reserve(end - leaving.next);
  for (; leaving.next < end; ++leaving.next) {
    prefetch(leaving, end);
    Page& page = *leaving.pages[leaving.next];
    page.saved = store(leaving.next < leaving.spilled ? Tier::disk : leaving.tier)->take();
    ++saved_in_[index(page.saved.tier)];
    const PageEnd from = page.tier == Tier::gpu ? end_at(page.slot) : end_at(page.place);
    moves.push_back({&page, from, end_at(page.saved)});
  }
}

void PageCache::keep_order(Travellers& saved) noexcept {
  if (saved.tier == Tier::host && saved.spilled == 0) saved_order_ = std::move(saved.pages);
}

void PageCache::drop_saved() noexcept {
  for (Page& page : pages_.all()) {
    if (is_on_gpu(page)) give_back_saved(page);
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

PageCache::Travellers PageCache::plan_restore(Tier tier) {
  Travellers returning{.tier = tier, .pages = {}};
  if (pages_in(tier) == 0) return returning;
  if (tier == Tier::gpu && saved_order_.size() == pages_in(tier) && pages_in(Tier::cold_gpu) == 0) {
    returning.pages = std::exchange(saved_order_, {});
    return returning;
  }
  // In the order of their places: with slots given in order that joins the copies.
  const std::vector<std::size_t> in_host = host_.first_numbers();
  const std::vector<std::size_t> on_disk = disk_ ? disk_->first_numbers() : std::vector<std::size_t>{0};
  PageOrder saved(saved_pages(), in_host.back() + on_disk.back());
  for (Page& page : pages_.all()) {
    const bool away = tier == Tier::gpu ? page.slot == no_slot : !page.place;
    if (page.status == Status::unused || page.tier != tier || !away) continue;
    if (!page.saved) {
      returning.pages.push_back(&page);
    } else if (page.saved.tier == Tier::host) {
      saved.add(in_host[page.saved.piece] + page.saved.index, page);
    } else {
      saved.add(in_host.back() + on_disk[page.saved.piece] + page.saved.index, page);
    }
  }
  const std::vector<Page*> with_contents = saved.take();
  returning.pages.insert(returning.pages.end(), with_contents.begin(), with_contents.end());
  if (tier != Tier::gpu && !returning.pages.empty()) store(tier)->ensure(returning.pages.size());
  return returning;
}

void PageCache::restore_next(Travellers& returning, std::size_t limit, Restore& todo) {
  todo.moves.clear();
  todo.blanks.clear();
  const bool gpu = returning.tier == Tier::gpu;
  if (gpu) limit = std::min(limit, gpu_.ready_slots());
  const std::size_t end = std::min(returning.pages.size(), returning.next + limit);
  todo.moves.reserve(end - returning.next);
  for (; returning.next < end; ++returning.next) {
    prefetch(returning, end);
    Page& page = *returning.pages[returning.next];
    if (gpu) {
      page.slot = gpu_.take();
      gpu_.settle_in(page.slot, page);
    } else {
      page.place = store(returning.tier)->take();
    }
    const PageEnd to = gpu ? end_at(page.slot) : end_at(page.place);
    if (page.saved) {
      todo.moves.push_back({&page, end_at(page.saved), to});
    } else if (!gpu) {
      todo.blanks.push_back(to);
    }
  }
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
