// KvManager as a Participant: how the cache sleeps and wakes.
//
// Sleep: save the live pages beside the old state, then (commit) forget or keep, and unmap.
// Wake: map, give every page of the GPU tier a slot, restore, rewrite the page tables; the saved copies stay
// until publish, so that a wake that is taken back has lost nothing.
#include <algorithm>
#include <string>

#include "torpor/kv/kv_manager.hpp"

namespace torpor::kv {

Usage KvManager::usage() const {
  const std::lock_guard guard(mutex_);
  return {.tag = spec_.tag,
          .name = spec_.name,
          .parked = parked_,
          .mode = parked_ ? mode_ : RestoreMode::none,
          .reserved_bytes = cache_.gpu().size_bytes(),
          .device_bytes = cache_.gpu().mapped_bytes(),
          .live_bytes = parked_ ? 0 : cache_.pages_in(Tier::gpu) * cache_.page_bytes(),
          .host_bytes = cache_.host().committed_bytes()};
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
      spec_.tag + "/" + spec_.name + (action == Action::sleep ? " sleep " : " wake ") + to_string(mode) +
      " slots=" + std::to_string(slots()) + " locked=" + std::to_string(cache_.pages_with(Status::locked)) +
      " held=" + std::to_string(cache_.pages_with(Status::held)) +
      " droppable=" + std::to_string(cache_.pages_with(Status::droppable)) +
      " host=" + std::to_string(cache_.pages_in(Tier::host)) +
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
  item.free_bytes = cache_.gpu().mapped_bytes();
  if (preserves(mode)) {
    item.keep_bytes = cache_.saved_pages() * cache_.page_bytes();
    item.host_bytes = cache_.host().bytes_to_commit(cache_.saved_pages());
  }
  return item;
}

Item KvManager::plan_wake() const {
  const std::lock_guard guard(mutex_);
  Item item = item_of(Action::wake, parked_ ? mode_ : RestoreMode::none);
  item.noop = !parked_;
  if (item.noop) return item;
  item.device_bytes = cache_.gpu().size_bytes();
  if (preserves(mode_)) item.keep_bytes = cache_.saved_pages() * cache_.page_bytes();
  return item;
}

void KvManager::stage_sleep(const Item& item, UndoStack& undo, StageContext& context) {
  std::vector<PageMove> moves;
  {
    const std::lock_guard guard(mutex_);
    require_settled("sleep");
    undo.push([this]() noexcept { undo_sleep(); });
    stage_ = Stage::sleep;
    staged_mode_ = item.mode;
    if (!parked_ && preserves(item.mode)) moves = cache_.plan_save();
  }
  context.moved_bytes += move_pages(*device_, StreamId::out, std::move(moves), cache_.page_bytes(),
                                    {context.deadline, context.stop});
}

void KvManager::undo_sleep() noexcept {
  const std::lock_guard guard(mutex_);
  if (!parked_) cache_.drop_saved();
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
    cache_.leave_slots();
  }
  std::size_t freed_bytes = 0;
  while (const std::size_t chunk_bytes = cache_.gpu().release_one()) freed_bytes += chunk_bytes;
  mode_ = staged_mode_;
  parked_ = true;
  stage_ = Stage::none;
  close_pending();  // what was closed between two attempts
  return freed_bytes;
}

void KvManager::lose_contents(bool zero) noexcept {
  begin_epoch();
  for (auto& [id, record] : sequences_) record->contents_lost |= !record->pages.empty();
  forget_all();
  cache_.discard(zero);
}

void KvManager::stage_wake(const Item&, UndoStack& undo, StageContext& context) {
  const Limits limits{context.deadline, context.stop};
  std::vector<PageMove> moves;
  bool zero = false;
  {
    const std::lock_guard guard(mutex_);
    require_settled("wake");
    if (!parked_) return;
    undo.push([this]() noexcept { undo_wake(); });
    stage_ = Stage::wake;
    cache_.gpu().map();
    moves = cache_.plan_restore();
    zero = mode_ == RestoreMode::memset;
  }
  if (zero) zero_range(*device_, cache_.gpu().base(), cache_.gpu().size_bytes(), limits);
  context.moved_bytes += move_pages(*device_, StreamId::in, std::move(moves), cache_.page_bytes(), limits);
  const std::lock_guard guard(mutex_);
  write_tables();
}

void KvManager::undo_wake() noexcept {
  const std::lock_guard guard(mutex_);
  clear_tables();
  cache_.leave_slots();
  cache_.gpu().drop_mappings();
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
  cache_.drop_saved();
  stage_ = Stage::none;
}

void KvManager::write_tables() noexcept {
  for (auto& [id, record] : sequences_) {
    if (record->state != SequenceState::active) continue;
    std::ranges::transform(record->pages, record->table.get(), [](const Page* page) { return page->slot; });
  }
}

void KvManager::clear_tables() noexcept {
  for (auto& [id, record] : sequences_) std::fill_n(record->table.get(), record->pages.size(), no_slot);
}

void KvManager::close_pending() noexcept {
  for (const std::shared_ptr<SequenceRecord>& record : pending_) let_go(*record, 0);
  pending_.clear();
}

}  // namespace torpor::kv
