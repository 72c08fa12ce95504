#include "torpor/kv/page_cache.hpp"

#include <cassert>
#include <utility>

namespace torpor::kv {

PageCache::PageCache(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool,
                     const CacheLimits& limits, PageWatcher& watcher)
    : device_(std::move(device)),
      page_bytes_(limits.page_bytes),
      gpu_(device_, limits.page_bytes, limits.gpu_bytes, limits.seed),
      host_(std::move(pool), limits.page_bytes, limits.host_bytes),
      watcher_(watcher) {}

void PageCache::file(Page& page) noexcept {
  if (page.list != nullptr) page.list->remove(page);
  if (page.status == Status::droppable) droppable(page.tier).push_newest(page);
  if (page.status == Status::held) held(page.tier).push_newest(page);
}

void PageCache::set_status(Page& page) noexcept {
  const Status before = page.status;
  page.status = page.active_sequences > 0 ? Status::locked
                : page.sequences > 0      ? Status::held
                : page.node != nullptr    ? Status::droppable
                                          : Status::unused;
  if (before == Status::locked) --locked_;
  if (page.status == Status::locked) ++locked_;
  file(page);
}

void PageCache::hold(Page& page) noexcept {
  ++page.sequences;
  set_status(page);
}

void PageCache::release(Page& page) noexcept {
  assert(page.sequences > page.active_sequences);
  --page.sequences;
  set_status(page);
  if (page.status == Status::unused) free_page(page);
}

void PageCache::lock(Page& page) noexcept {
  assert(page.sequences > page.active_sequences);
  ++page.active_sequences;
  set_status(page);
}

void PageCache::unlock(Page& page) noexcept {
  assert(page.active_sequences > 0);
  --page.active_sequences;
  set_status(page);
}

Page& PageCache::take_locked(std::uint16_t life_cycle) {
  Page& page = pages_.take();
  page = Page{};
  page.life_cycle = life_cycle;
  page.slot = gpu_.take();
  page.sequences = 1;
  page.active_sequences = 1;
  ++in_tier_[static_cast<std::size_t>(Tier::gpu)];
  set_status(page);
  return page;
}

void PageCache::give_back_place(Page& page) noexcept {
  if (page.place) host_.give_back(std::exchange(page.place, Place{}));
}

void PageCache::free_page(Page& page) noexcept {
  assert(page.node == nullptr && page.sequences == 0);
  set_scratch(page, false);
  if (page.list != nullptr) page.list->remove(page);
  if (page.slot != no_slot) gpu_.give_back(std::exchange(page.slot, no_slot));
  give_back_place(page);
  --in_tier_[static_cast<std::size_t>(page.tier)];
  page.status = Status::unused;
  pages_.give_back(page);
}

void PageCache::unlink(Page& page, Why why) noexcept {
  assert(page.node == nullptr);
  if (why == Why::all_forgotten) ++counters_.forgotten_pages;
  if (page.sequences > 0) return;  // private from now on
  if (why == Why::room) ++counters_.evicted_pages;
  free_page(page);
}

void PageCache::set_scratch(Page& page, bool scratch) noexcept {
  if (page.scratch == scratch) return;
  page.scratch = scratch;
  scratch ? ++scratch_ : --scratch_;
}

void PageCache::discard(bool zero) noexcept {
  for (Page& page : pages_.all()) {
    if (page.status == Status::unused) continue;
    give_back_place(page);
    page.zero_on_arrival = zero && page.tier == Tier::host;  // a wake zeroes the GPU pool
  }
  host_.trim();
}

std::vector<ByteRange> PageCache::host_tier() {
  std::vector<ByteRange> pages;
  for (const Page& page : pages_.all()) {
    if (page.status == Status::unused || page.tier != Tier::host || !page.place) continue;
    pages.push_back({host_.address(page.place), page_bytes_});
  }
  return pages;
}

std::size_t PageCache::pages_in(Tier tier) const noexcept {
  return in_tier_[static_cast<std::size_t>(tier)];
}

std::size_t PageCache::pages_with(Status status) const noexcept {
  switch (status) {
    case Status::locked:
      return locked_;
    case Status::held:
      return held_[0].size() + held_[1].size();
    case Status::droppable:
      return droppable_[0].size() + droppable_[1].size();
    case Status::unused:
      break;
  }
  return 0;
}

}  // namespace torpor::kv
