// PageCache: how its pages get out of the last slots of the GPU pool.
//
// Everything is copied before anything counts as moved. A copy may go into the slot of a page that leaves the
// GPU; what lay there is kept on the host meanwhile, so that this too can be taken back.
#include <algorithm>
#include <utility>

#include "page_clearing.hpp"
#include "torpor/transfer.hpp"

namespace torpor::kv {
namespace {

bool has_slot_from(const Page& page, std::size_t first) noexcept {
  return page.status != Status::unused && page.slot != no_slot &&
         static_cast<std::size_t>(page.slot) >= first;
}

}  // namespace

std::unique_ptr<PageCache::Clearing> PageCache::stage_clearing(std::size_t slots, const Limits& limits) {
  auto staged = std::make_unique<Clearing>();
  bool has_room = true;
  past_refusals([&] {
    auto leaving = plan_clearing(slots);
    has_room = leaving.has_value();
    if (!has_room) return;
    staged->leaving = std::move(*leaving);
    staged->places = copy_down(staged->leaving.falls, limits);
  });
  if (!has_room) {
    trim();
    return nullptr;
  }
  try {
    plan_relocations(*staged, slots);
    copy_relocations(*staged, limits);
  } catch (...) {
    undo_clearing(*staged, limits);
    throw;
  }
  return staged;
}

std::optional<PageCache::Eviction> PageCache::plan_clearing(std::size_t slots) {
  Rooms room = rooms({});
  // Its places are fixed: one would have to be empty before another page takes it.
  room[index(Tier::cold_gpu)].displaces = false;
  for (;;) {
    auto leaving = plan_eviction(gpu_.slots() - slots, room);
    if (!leaving) return std::nullopt;
    const auto scarce = ensure_places(leaving->falls);
    if (!scarce) return leaving;
    room[index(*scarce)] = committed_room(*scarce, room[index(*scarce)]);
  }
}

void PageCache::plan_relocations(Clearing& staged, std::size_t slots) {
  std::vector<Page*> leaving = staged.leaving.drops;
  for (const Fall& one : staged.leaving.falls) leaving.push_back(one.page);
  std::erase_if(leaving, [](const Page* page) { return page->slot == no_slot; });
  std::ranges::sort(leaving);
  std::vector<Page*> staying;
  for (Page& page : pages_.all()) {
    if (has_slot_from(page, slots) && !std::ranges::binary_search(leaving, &page)) staying.push_back(&page);
  }
  std::ranges::sort(staying, {}, &Page::slot);
  std::vector<Clearing::Relocation> targets;
  for (const std::int32_t slot : gpu_.free_list()) {
    if (static_cast<std::size_t>(slot) < slots) targets.push_back({nullptr, slot, nullptr});
  }
  std::ranges::sort(targets, {}, &Clearing::Relocation::to);
  for (Page* page : leaving) {
    if (!has_slot_from(*page, slots)) targets.push_back({nullptr, page->slot, page});
  }
  targets.resize(staying.size());  // there are as many at least: the plan made room
  for (std::size_t i = 0; i < staying.size(); ++i) targets[i].page = staying[i];
  staged.relocations = std::move(targets);
}

void PageCache::copy_relocations(Clearing& staged, const Limits& limits) {
  std::vector<Copy> moves;
  std::vector<Address> overwritten;
  for (const Clearing::Relocation& one : staged.relocations) {
    moves.push_back({gpu_.address(one.to), gpu_.address(one.page->slot), page_bytes_});
    if (one.over != nullptr) overwritten.push_back(gpu_.address(one.to));
  }
  if (!overwritten.empty()) {
    staged.safe = pool_->acquire(overwritten.size() * page_bytes_, true);
    std::vector<Copy> saves;
    saves.reserve(overwritten.size());
    for (const Address at : overwritten) {
      saves.push_back({staged.safe.base() + saves.size() * page_bytes_, at, page_bytes_});
    }
    transfer(*device_, saves, StreamId::out, limits.deadline, limits.stop);
    staged.overwritten = true;
  }
  if (!moves.empty()) transfer(*device_, moves, StreamId::in, limits.deadline, limits.stop);
}

void PageCache::undo_clearing(Clearing& staged, const Limits& limits) noexcept {
  bool whole = true;
  if (staged.overwritten) {
    try {
      std::vector<Copy> copies;
      for (const Clearing::Relocation& one : staged.relocations) {
        if (one.over == nullptr) continue;
        copies.push_back(
            {gpu_.address(one.to), staged.safe.base() + copies.size() * page_bytes_, page_bytes_});
      }
      transfer(*device_, copies, StreamId::in, limits.deadline, limits.stop);
    } catch (...) {
      whole = false;
    }
  }
  if (!whole) staged.relocations.clear();
  if (!whole) return commit_clearing(staged);
  for (Place& place : staged.places) give_back(place);
  pool_->give_back(std::move(staged.safe));
  trim();
}

void PageCache::commit_clearing(Clearing& staged) noexcept {
  for (const Clearing::Relocation& one : staged.relocations) one.page->slot = one.to;
  for (std::size_t i = 0; i < staged.leaving.falls.size(); ++i) {
    settle_fall(staged.leaving.falls[i], staged.places[i]);
  }
  drop_all(staged.leaving.drops);
  pool_->give_back(std::move(staged.safe));
  trim();
}

std::size_t PageCache::held_places(Tier tier, const Clearing* staged) const noexcept {
  std::size_t places = 0;
  for (const Page& page : pages_.all()) {
    if (page.status == Status::held && page.tier == tier && page.place) ++places;
  }
  if (staged == nullptr) return places;
  for (const Fall& one : staged->leaving.falls) {
    if (one.page->status != Status::held) continue;
    if (one.to == tier) ++places;
    if (one.page->tier == tier) --places;
  }
  return places;
}

std::size_t PageCache::room_below() const noexcept {
  std::size_t room = 0;
  for (const Tier tier : cold_tiers) {
    const ColdStore* const there = store(tier);
    if (there == nullptr) continue;
    const std::size_t kept = held_places(tier, nullptr);
    room += there->ceiling_places() - std::min(there->ceiling_places(), kept);
  }
  return room;
}

void PageCache::drop_beyond(Tier tier) noexcept {
  const ColdStore& there = *store(tier);
  while (there.used() > there.ceiling_places() && droppable(tier).first() != nullptr) {
    watcher_.drop(*droppable(tier).first());
  }
  trim();
}

void PageCache::settle_pool(std::vector<bool>& used) noexcept {
  std::fill(used.begin(), used.end(), false);
  for (const Page& page : pages_.all()) {
    if (has_slot_from(page, 0)) used[static_cast<std::size_t>(page.slot)] = true;
  }
  gpu_.settle(used);
  for (Page& page : pages_.all()) {
    if (has_slot_from(page, 0)) gpu_.settle_in(page.slot, page);
  }
}

}  // namespace torpor::kv
