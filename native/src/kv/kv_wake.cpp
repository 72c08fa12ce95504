// KvManager as a Participant: how the cache wakes.
//
// Cold tiers before hot ones, over all pool groups (K6): first what rests in host memory and on disk is
// checked, or made anew after a discard, before any participant of the ledger takes device memory; then the
// cold tier on the GPU, the GPU pool, and the page tables. Saved copies stay until publish, so that a wake
// that is taken back has lost nothing.
#include <algorithm>
#include <deque>

#include "stopwatch.hpp"
#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"
#include "torpor/transfer.hpp"

namespace torpor::kv {
namespace {

constexpr std::size_t prefetch_ahead = 12;  // pages: about as long as a look into memory takes

}  // namespace

// What is under way to one pool group.
struct KvManager::Arriving {
  Arriving(PageCache& to, const StageContext& context)
      : cache(to), flow(to.mover(), {context.deadline, context.stop}) {}
  PageCache& cache;
  PageMover::Flow flow;
  std::vector<Move> moves;  // kept where their contents are to be checked
};

Item KvManager::plan_wake() const {
  const std::lock_guard guard(mutex_);
  Item item = item_of(Action::wake, parked_ ? mode_ : RestoreMode::none);
  item.noop = !parked_;
  if (item.noop) return item;
  for (const PageCache& cache : caches_) item.device_bytes += cache.device_bytes();
  const bool kept = preserves(mode_);
  if (kept) item.keep_bytes = saved_bytes();
  for (const PageCache& cache : caches_) {
    for (const Tier tier : {Tier::host, Tier::disk}) {
      const std::size_t pages = kept ? cache.saved_pages(tier) : cache.pages_in(tier);
      item.buffer_bytes = std::max(item.buffer_bytes, cache.buffer_bytes(tier, pages));
    }
    if (kept) continue;
    item.host_bytes += cache.bytes_to_remake(Tier::host);
    item.disk_bytes += cache.bytes_to_remake(Tier::disk);
  }
  return item;
}

void KvManager::prepare_wake(const Item&, UndoStack& undo, StageContext& context) {
  {
    const std::lock_guard guard(mutex_);
    require_settled("wake");
    if (!parked_) return;
    undo.push([this]() noexcept { undo_wake(); });
    stage_ = Stage::wake;
  }
  for (const Tier tier : {Tier::disk, Tier::host}) restore(tier, context);
}

void KvManager::stage_wake(const Item&, UndoStack&, StageContext& context) {
  {
    const std::lock_guard guard(mutex_);
    if (stage_ != Stage::wake) return;
  }
  for (const Tier tier : {Tier::cold_gpu, Tier::gpu}) restore(tier, context);
}

// Every page of the tier has its room again afterwards, and in it what was saved, or a page of zeros. In the
// GPU pool what a discard left is undefined but after memset. Page tables are written while the last copies
// are under way.
void KvManager::restore(Tier tier, StageContext& context) {
  std::deque<Arriving> arriving;
  for (PageCache& cache : caches_) begin_restore(cache, tier, arriving.emplace_back(cache, context), context);
  if (tier == Tier::gpu) {
    const Stopwatch planning(context.parts.planning_s);
    const std::lock_guard guard(mutex_);
    write_tables();
  }
  const kv::Limits limits{context.deadline, context.stop};
  for (Arriving& one : arriving) {
    {
      const Stopwatch copying(context.parts.copying_s);
      context.moved_bytes += one.flow.finish();
      context.parts.waiting_s += one.flow.waited_s();
    }
    if (!sums_.recorded()) continue;
    if (sums_.same(one.cache.mover(), one.moves, limits) &&
        sums_.same(one.cache.mover(), one.cache.resting(tier), limits)) {
      continue;
    }
    throw ContentsCorrupt(
        "pages of '" + spec_.tag + "' in the tier " + to_string(tier) +
            " are not what went to sleep; what was saved is kept: try the wake again, or put "
            "the tag to sleep with restore mode none and compute them anew",
        spec_.tag);
  }
}

// Pages get their room, and the pool its memory, while earlier pages are under way; but where that would hold
// the copies up, the pool has its memory first.
void KvManager::begin_restore(PageCache& cache, Tier tier, Arriving& arriving, StageContext& context) {
  const kv::Limits limits{context.deadline, context.stop};
  const bool zeroed = tier == Tier::gpu && mode_ == RestoreMode::memset;
  PageCache::Travellers returning;
  {
    const Stopwatch ahead(context.parts.ahead_s);
    const std::lock_guard guard(mutex_);
    if (tier != Tier::gpu || zeroed || cache.page_bytes() < device_->kernel_copy_bytes()) {
      const Stopwatch mapping(context.parts.mapping_s);
      cache.map(tier);
    }
    const Stopwatch planning(context.parts.planning_s);
    returning = cache.plan_restore(tier);
  }
  if (zeroed) {
    zero_range(*device_, cache.gpu().base(), cache.gpu().size_bytes(), limits.deadline, limits.stop);
  }
  const auto map_next = [&] {
    const Stopwatch mapping(context.parts.mapping_s);
    const std::lock_guard guard(mutex_);
    return cache.map_next();
  };
  PageCache::Restore todo;
  for (std::size_t windows = 0; !returning.done();) {
    const bool has_time = arriving.flow.windows() > windows;
    if (tier == Tier::gpu && (has_time || cache.gpu().ready_slots() == 0)) (void)map_next();
    windows = arriving.flow.windows();
    {
      const Stopwatch planning(context.parts.planning_s);
      const std::lock_guard guard(mutex_);
      cache.restore_next(returning, cache.mover().flow_pages(), todo);
    }
    const Stopwatch copying(context.parts.copying_s);
    cache.mover().write_blank(todo.blanks, limits);
    arriving.flow.add(todo.moves);
    if (sums_.recorded()) arriving.moves.insert(arriving.moves.end(), todo.moves.begin(), todo.moves.end());
  }
  while (tier == Tier::gpu && map_next()) continue;
}

void KvManager::undo_wake() noexcept {
  const std::lock_guard guard(mutex_);
  clear_tables();
  for (PageCache& cache : caches_) {
    cache.leave_slots();
    if (!preserves(mode_)) cache.discard();  // what was made anew goes with the wake
    cache.drop_mappings();
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
      for (std::size_t i = 0; i < one.pages.size(); ++i) {
        // The pages of a sequence lie far from each other.
        if (i + prefetch_ahead < one.pages.size()) __builtin_prefetch(one.pages[i + prefetch_ahead]);
        one.table[static_cast<std::ptrdiff_t>(i)] = one.pages[i] != nullptr ? one.pages[i]->slot : no_slot;
      }
    }
  }
}

}  // namespace torpor::kv
