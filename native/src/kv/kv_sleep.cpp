// KvManager as a Participant: how the cache sleeps and wakes.
//
// Sleep: save the live pages beside the old state, then (commit) forget or keep, and unmap.
// Wake: map, give every page of the GPU tier a slot, restore, rewrite the page tables; the saved copies stay
// until publish, so that a wake that is taken back has lost nothing.
#include <algorithm>
#include <string>

#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace torpor::kv {

Usage KvManager::usage() const {
  const std::lock_guard guard(mutex_);
  Usage usage;
  usage.tag = spec_.tag;
  usage.name = spec_.name;
  usage.parked = parked_;
  usage.mode = parked_ ? mode_ : RestoreMode::none;
  for (const PageCache& cache : caches_) {
    usage.reserved_bytes += cache.gpu().size_bytes();
    usage.device_bytes += cache.gpu().mapped_bytes();
    if (!parked_) usage.live_bytes += cache.pages_in(Tier::gpu) * cache.page_bytes();
    usage.host_bytes += cache.host().committed_bytes();
  }
  return usage;
}

Item KvManager::item_of(Action action, RestoreMode mode) const {
  Item item;
  item.tag = spec_.tag;
  item.name = spec_.name;
  item.action = action;
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
                   " host=" + std::to_string(cache.pages_in(Tier::host));
  }
  item.digest +=
      " sequences=" + std::to_string(sequences_.size()) + " tokens=" + std::to_string(history_tokens);
  return item;
}

Item KvManager::plan_sleep(RestoreMode mode) const {
  const std::lock_guard guard(mutex_);
  if (parked_) {
    // Only what was kept can be let go; nothing that is gone comes back (C1).
    const bool drops = preserves(mode_) && !preserves(mode);
    Item item = item_of(Action::sleep, drops ? mode : mode_);
    item.noop = !drops;
    return item;
  }
  Item item = item_of(Action::sleep, mode);
  for (const PageCache& cache : caches_) {
    item.free_bytes += cache.gpu().mapped_bytes();
    if (preserves(mode)) item.host_bytes += cache.host().bytes_to_commit(cache.saved_pages());
  }
  if (preserves(mode)) item.keep_bytes = saved_bytes();
  return item;
}

Item KvManager::plan_wake() const {
  const std::lock_guard guard(mutex_);
  Item item = item_of(Action::wake, parked_ ? mode_ : RestoreMode::none);
  item.noop = !parked_;
  if (item.noop) return item;
  for (const PageCache& cache : caches_) item.device_bytes += cache.gpu().size_bytes();
  if (preserves(mode_)) item.keep_bytes = saved_bytes();
  return item;
}

std::size_t KvManager::saved_bytes() const noexcept {
  std::size_t bytes = 0;
  for (const PageCache& cache : caches_) bytes += cache.saved_pages() * cache.page_bytes();
  return bytes;
}

bool KvManager::can_verify(Action action) const noexcept {
  const std::lock_guard guard(mutex_);
  return action == Action::sleep || sums_.recorded();
}

void KvManager::stage_sleep(const Item& item, UndoStack& undo, StageContext& context) {
  std::vector<std::vector<PageMove>> moves(caches_.size());
  {
    const std::lock_guard guard(mutex_);
    require_settled("sleep");
    undo.push([this]() noexcept { undo_sleep(); });
    stage_ = Stage::sleep;
    staged_mode_ = item.mode;
    for (std::size_t group = 0; group < caches_.size(); ++group) {
      if (!parked_ && preserves(item.mode)) moves[group] = caches_[group].plan_save();
    }
  }
  const Limits limits{context.deadline, context.stop};
  const bool records = context.verify && !parked_ && preserves(item.mode);
  if (records) sums_.begin();
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    PageCache& cache = caches_[group];
    if (records) {
      sums_.record(*device_, moves[group], cache.page_bytes(), limits);
      sums_.record(*device_, cache.host_tier(), limits);
    }
    context.moved_bytes +=
        move_pages(*device_, StreamId::out, std::move(moves[group]), cache.page_bytes(), limits);
  }
}

void KvManager::undo_sleep() noexcept {
  const std::lock_guard guard(mutex_);
  for (PageCache& cache : caches_) {
    if (!parked_) cache.drop_saved();
  }
  if (!parked_) sums_.clear();
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
    if (!preserves(staged_mode_)) lose_contents(staged_mode_ == RestoreMode::memset);
    for (PageCache& cache : caches_) cache.leave_slots();
  }
  std::size_t freed_bytes = 0;
  for (PageCache& cache : caches_) {
    while (const std::size_t chunk_bytes = cache.gpu().release_one()) freed_bytes += chunk_bytes;
  }
  mode_ = staged_mode_;
  parked_ = true;
  stage_ = Stage::none;
  close_pending();  // what was closed between two attempts
  return freed_bytes;
}

void KvManager::lose_contents(bool zero) noexcept {
  begin_epoch();
  for (auto& [id, record] : sequences_) record->contents_lost |= record->has_pages();
  forget_all();
  sums_.clear();
  for (PageCache& cache : caches_) cache.discard(zero);
}

void KvManager::stage_wake(const Item&, UndoStack& undo, StageContext& context) {
  const Limits limits{context.deadline, context.stop};
  std::vector<std::vector<PageMove>> moves;
  bool zero = false;
  {
    const std::lock_guard guard(mutex_);
    require_settled("wake");
    if (!parked_) return;
    undo.push([this]() noexcept { undo_wake(); });
    stage_ = Stage::wake;
    for (PageCache& cache : caches_) {
      cache.gpu().map();
      moves.push_back(cache.plan_restore());
    }
    zero = mode_ == RestoreMode::memset;
  }
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    PageCache& cache = caches_[group];
    if (zero) zero_range(*device_, cache.gpu().base(), cache.gpu().size_bytes(), limits);
    context.moved_bytes += move_pages(*device_, StreamId::in, moves[group], cache.page_bytes(), limits);
    if (!sums_.same(*device_, moves[group], cache.page_bytes(), limits) ||
        !sums_.same(*device_, cache.host_tier(), limits)) {
      throw ContentsCorrupt(
          "pages of '" + spec_.tag +
              "' are not what went to sleep; the saved copies are kept: try the wake again, "
              "or put the tag to sleep with restore mode none and compute them anew",
          spec_.tag);
    }
  }
  const std::lock_guard guard(mutex_);
  write_tables();
}

void KvManager::undo_wake() noexcept {
  const std::lock_guard guard(mutex_);
  clear_tables();
  for (PageCache& cache : caches_) {
    cache.leave_slots();
    cache.gpu().drop_mappings();
  }
  stage_ = Stage::none;
  close_pending();
}

void KvManager::commit_wake() noexcept {
  const std::lock_guard guard(mutex_);
  if (stage_ != Stage::wake) return;
  parked_ = false;
  stage_ = Stage::wake_committed;
  close_pending();
}

void KvManager::publish() noexcept {
  const std::lock_guard guard(mutex_);
  if (stage_ == Stage::wake_committed) publish_wake();
}

void KvManager::publish_wake() noexcept {
  for (PageCache& cache : caches_) cache.drop_saved();
  sums_.clear();
  stage_ = Stage::none;
}

void KvManager::write_tables() noexcept {
  for (auto& [id, record] : sequences_) {
    if (record->state != SequenceState::active) continue;
    for (const Strand& one : record->strands) {
      std::ranges::transform(one.pages, one.table.get(),
                             [](const Page* page) { return page != nullptr ? page->slot : no_slot; });
    }
  }
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
