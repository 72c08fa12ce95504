// KvManager as a Participant: how the cache sleeps (kv_wake.cpp: how it wakes). It saves the live pages
// beside the old state, then (commit) forgets or keeps, and unmaps.
#include <algorithm>
#include <string>

#include "stopwatch.hpp"
#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace torpor::kv {
namespace {

// Where a sleep in this mode keeps what was on the GPU.
Tier tier_of(RestoreMode mode) noexcept {
  return mode == RestoreMode::disk ? Tier::disk : Tier::host;
}

}  // namespace

Usage KvManager::usage() const {
  const std::lock_guard guard(mutex_);
  Usage usage;
  usage.tag = spec_.tag;
  usage.name = spec_.name;
  usage.parked = parked_;
  usage.mode = parked_ ? mode_ : RestoreMode::none;
  for (const PageCache& cache : caches_) {
    usage.reserved_bytes += cache.reserved_bytes();
    usage.device_bytes += cache.mapped_bytes();
    if (!parked_) usage.live_bytes += cache.pages_in(Tier::gpu) * cache.page_bytes();
    usage.host_bytes += cache.host().committed_bytes();
    if (cache.disk() != nullptr) usage.disk_bytes += cache.disk()->committed_bytes();
  }
  return usage;
}

// Of pages that there may be one day: as much as the host tier may take, or the GPU's pools hold.
std::vector<HostPiece> KvManager::host_pieces() const {
  const std::lock_guard guard(mutex_);
  std::vector<HostPiece> pieces;
  if (parked_ || !preserves(spec_.restore)) return pieces;
  for (const PageCache& cache : caches_) {
    const HostStore& host = cache.host();
    std::size_t left_bytes =
        std::min(host.ceiling_places() * host.place_bytes(), cache.gpu().slots() * cache.page_bytes());
    left_bytes -= std::min(left_bytes, host.committed_bytes());
    while (left_bytes >= host_granule_bytes) {
      const std::size_t size_bytes =
          std::min(left_bytes, host_piece_limit_bytes) / host_granule_bytes * host_granule_bytes;
      pieces.push_back({.size_bytes = size_bytes, .granule_bytes = host_granule_bytes});
      left_bytes -= size_bytes;
    }
  }
  return pieces;
}

Item KvManager::item_of(Action action, RestoreMode mode) const {
  Item item = Participant::item_of(action);
  item.mode = mode;
  std::size_t history_tokens = 0;
  for (const auto& [id, record] : sequences_) history_tokens += record->history.size();
  item.digest =
      spec_.tag + "/" + spec_.name + (action == Action::sleep ? " sleep " : " wake ") + to_string(mode);
  for (const PageCache& cache : caches_) {
    item.digest += " slots=" + std::to_string(cache.gpu().slots()) +
                   " locked=" + std::to_string(cache.pages_with(Status::locked)) +
                   " held=" + std::to_string(cache.pages_with(Status::held)) +
                   " droppable=" + std::to_string(cache.pages_with(Status::droppable)) +
                   " cold_gpu=" + std::to_string(cache.pages_in(Tier::cold_gpu)) +
                   " host=" + std::to_string(cache.pages_in(Tier::host)) +
                   " disk=" + std::to_string(cache.pages_in(Tier::disk));
  }
  item.digest +=
      " sequences=" + std::to_string(sequences_.size()) + " tokens=" + std::to_string(history_tokens);
  return item;
}

Item KvManager::plan_sleep(RestoreMode mode) const {
  const std::lock_guard guard(mutex_);
  return sleep_item(mode, std::nullopt);
}

Item KvManager::plan_sleep_within(RestoreMode mode, const SaveRoom& room) const {
  const std::lock_guard guard(mutex_);
  return sleep_item(mode, room);
}

Item KvManager::sleep_item(RestoreMode mode, const std::optional<SaveRoom>& evicts_within) const {
  if (parked_) {
    // Only what was kept can be let go; nothing that is gone comes back (C1).
    const bool drops = preserves(mode_) && !preserves(mode);
    Item item = item_of(Action::sleep, drops ? mode : mode_);
    item.noop = !drops;
    return item;
  }
  Item item = item_of(Action::sleep, mode);
  for (const PageCache& cache : caches_) item.free_bytes += cache.mapped_bytes();
  if (!preserves(mode) || !supports(mode)) return item;
  const Tier to = tier_of(mode);
  item.evicts_within = evicts_within;
  add_saving(item, to, evicts_within ? choose_drops(to, *evicts_within) : Drops(spec_.layout));
  return item;
}

std::size_t KvManager::saved_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const PageCache& cache : caches_) bytes += cache.saved_pages() * cache.mover().cold_bytes();
  return bytes;
}

bool KvManager::can_verify(Action action) const noexcept {
  const std::lock_guard guard(mutex_);
  return action == Action::sleep || sums_.recorded();
}

Evicted KvManager::evicted() const noexcept {
  const std::lock_guard guard(mutex_);
  return evicted_;
}

void KvManager::stage_sleep(const Item& item, UndoStack& undo, StageContext& context) {
  std::vector<PageCache::Travellers> leaving(caches_.size());
  {
    const Stopwatch planning(context.parts.planning_s);
    const Stopwatch ahead(context.parts.ahead_s);
    const std::lock_guard guard(mutex_);
    evicted_ = {};
    require_settled("sleep");
    undo.push([this]() noexcept { undo_sleep(); });
    stage_ = Stage::sleep;
    staged_mode_ = item.mode;
    if (parked_ || !preserves(item.mode)) return;
    // The same choice as the plan's: nothing has moved since.
    if (item.evicts_within) drops_.emplace(choose_drops(tier_of(item.mode), *item.evicts_within));
    for (std::size_t group = 0; group < caches_.size(); ++group) {
      leaving[group] = plan_save(group, tier_of(item.mode));
    }
  }
  if (context.verify) sums_.begin();
  for (std::size_t group = 0; group < caches_.size(); ++group) save(caches_[group], leaving[group], context);
  sums_.end();
}

// Pages get their places while earlier ones are under way: the books of small pages take nearly as long as
// the copies.
void KvManager::save(PageCache& cache, PageCache::Travellers& leaving, StageContext& context) {
  const Limits limits{context.deadline, context.stop};
  PageMover::Flow flow(cache.mover(), limits);
  std::vector<Move> moves;
  while (!leaving.done()) {
    {
      const Stopwatch planning(context.parts.planning_s);
      const std::lock_guard guard(mutex_);
      cache.save_next(leaving, cache.mover().flow_pages(), moves);
    }
    if (context.verify) sums_.record(cache.mover(), moves, limits);
    const Stopwatch copying(context.parts.copying_s);
    flow.add(moves);
  }
  {
    const Stopwatch copying(context.parts.copying_s);
    context.moved_bytes += flow.finish();
    context.parts.waiting_s += flow.waited_s();
  }
  {
    const std::lock_guard guard(mutex_);
    cache.keep_order(leaving);
  }
  if (!context.verify) return;
  for (const Tier tier : {Tier::disk, Tier::host}) sums_.record(cache.mover(), cache.resting(tier), limits);
}

void KvManager::undo_sleep() noexcept {
  const std::lock_guard guard(mutex_);
  for (PageCache& cache : caches_) {
    if (!parked_) cache.drop_saved();
  }
  if (!parked_) sums_.clear();
  drops_.reset();
  stage_ = Stage::none;
  close_pending();
}

std::size_t KvManager::commit_sleep() {
  const std::lock_guard guard(mutex_);
  if (stage_ != Stage::sleep && stage_ != Stage::sleep_committing) return 0;
  if (stage_ == Stage::sleep) {
    stage_ = Stage::sleep_committing;
    close_pending();
    clear_tables();
    if (!preserves(staged_mode_)) lose_contents();
    evict_chosen();
    for (PageCache& cache : caches_) cache.leave_slots();
  }
  std::size_t freed_bytes = 0;
  for (PageCache& cache : caches_) {
    while (const std::size_t chunk_bytes = cache.release_one()) freed_bytes += chunk_bytes;
  }
  mode_ = staged_mode_;
  parked_ = true;
  stage_ = Stage::none;
  close_pending();  // what was closed between two attempts
  return freed_bytes;
}

void KvManager::lose_contents() noexcept {
  begin_epoch();
  for (auto& [id, record] : sequences_) record->contents_lost |= record->has_pages();
  forget_all();
  sums_.clear();
  for (PageCache& cache : caches_) cache.discard();
}

void KvManager::clear_tables() noexcept {
  for (auto& [id, record] : sequences_) {
    for (const Strand& one : record->strands) std::fill_n(one.table.get(), one.pages.size(), no_slot);
  }
}

void KvManager::close_pending() noexcept {
  for (const std::shared_ptr<SequenceRecord>& record : pending_) let_go_all(*record);
  pending_.clear();
}

}  // namespace torpor::kv
