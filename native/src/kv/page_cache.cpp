#include "torpor/kv/page_cache.hpp"

#include <cassert>
#include <string>
#include <utility>

#include "torpor/errors.hpp"

namespace torpor::kv {

namespace {

std::shared_ptr<const Codec> codec_of(const CacheLimits& limits) {
  return limits.codec != nullptr ? limits.codec : make_codec("identity");
}

}  // namespace

PageCache::PageCache(std::shared_ptr<Device> device, const std::shared_ptr<HostPool>& pool,
                     const CacheLimits& limits, PageWatcher& watcher)
    : device_(std::move(device)),
      pool_(pool),
      page_bytes_(limits.page_bytes),
      gpu_(device_, limits.page_bytes, limits.gpu_bytes, limits.seed, limits.room),
      host_(pool, codec_of(limits)->cold_bytes(limits.page_bytes), limits.host_bytes),
      mover_(device_, pool, limits.disk, codec_of(limits), limits.page_bytes),
      watcher_(watcher) {
  if (limits.disk_bytes > 0 && limits.disk == nullptr) {
    throw Misuse("disk_bytes is " + std::to_string(limits.disk_bytes) +
                 ", but there is no folder for the file; set disk_path");
  }
  if (limits.disk != nullptr) disk_.emplace(limits.disk, mover_.cold_bytes(), limits.disk_bytes);
  if (limits.cold_gpu_bytes > 0) cold_gpu_.emplace(device_, mover_.cold_bytes(), limits.cold_gpu_bytes);
}

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

void PageCache::set_priority(Page& page, std::uint8_t priority) noexcept {
  assert(priority < priority_levels);
  if (page.list != nullptr) page.list->remove(page);
  page.priority = priority;
  file(page);
}

Page& PageCache::take_locked(std::uint16_t life_cycle, std::uint8_t priority) {
  Page& page = pages_.take();
  page = Page{};
  page.life_cycle = life_cycle;
  page.priority = priority;
  page.slot = gpu_.take();
  gpu_.settle_in(page.slot, page);
  page.sequences = 1;
  page.active_sequences = 1;
  ++in_tier_[index(Tier::gpu)];
  set_status(page);
  return page;
}

ColdStore* PageCache::store(Tier tier) noexcept {
  return const_cast<ColdStore*>(std::as_const(*this).store(tier));
}

const ColdStore* PageCache::store(Tier tier) const noexcept {
  switch (tier) {
    case Tier::gpu:
      break;
    case Tier::cold_gpu:
      return cold_gpu();
    case Tier::host:
      return &host_;
    case Tier::disk:
      return disk();
  }
  return nullptr;
}

void PageCache::trim() noexcept {
  host_.trim();
  if (disk_) disk_->trim();
}

void PageCache::give_back(Place& place) noexcept {
  if (place) store(place.tier)->give_back(place);
  place = Place{};
}

void PageCache::give_back_saved(Page& page) noexcept {
  if (!page.saved) return;
  --saved_in_[index(page.saved.tier)];
  give_back(page.saved);
  if (!saved_order_.empty()) saved_order_ = {};
}

void PageCache::free_page(Page& page) noexcept {
  assert(page.node == nullptr && page.sequences == 0);
  set_scratch(page, false);
  if (page.list != nullptr) page.list->remove(page);
  if (page.slot != no_slot) gpu_.give_back(std::exchange(page.slot, no_slot));
  give_back(page.place);
  give_back_saved(page);
  --in_tier_[index(page.tier)];
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

void PageCache::discard() noexcept {
  for (Page& page : pages_.all()) {
    if (page.status == Status::unused) continue;
    give_back(page.place);
    give_back_saved(page);
  }
  trim();
}

std::vector<PageEnd> PageCache::resting(Tier tier) const {
  std::vector<PageEnd> pages;
  if (tier != Tier::host && tier != Tier::disk) return pages;
  for (const Page& page : pages_.all()) {
    if (page.status != Status::unused && page.tier == tier && page.place) pages.push_back(end_at(page.place));
  }
  return pages;
}

std::size_t PageCache::pages_in(Tier tier) const noexcept {
  return in_tier_[index(tier)];
}

std::size_t PageCache::pages_with(Status status) const noexcept {
  if (status == Status::locked) return locked_;
  if (status == Status::unused) return 0;
  std::size_t pages = 0;
  for (const EvictionQueue& queue : status == Status::held ? held_ : droppable_) pages += queue.size();
  return pages;
}

}  // namespace torpor::kv
