// KvManager: how a sequence gets its pages onto the GPU, all or nothing over the pool groups. The lock is
// held.
#include <cmath>
#include <utility>

#include "torpor/kv/kv_manager.hpp"
#include "torpor/transfer.hpp"

namespace torpor::kv {
namespace {

// Marks pages that the running move wants, so that they are no victims of it.
class TransitMark final {
 public:
  explicit TransitMark(const std::vector<Arrivals>& arrivals) noexcept : arrivals_(arrivals) { set(true); }
  TransitMark(const TransitMark&) = delete;
  TransitMark& operator=(const TransitMark&) = delete;
  TransitMark(TransitMark&&) = delete;
  TransitMark& operator=(TransitMark&&) = delete;
  ~TransitMark() { set(false); }

 private:
  void set(bool value) noexcept {
    for (const Arrivals& one : arrivals_) {
      for (Page* page : one.pages) page->in_transit = value;
    }
  }
  const std::vector<Arrivals>& arrivals_;
};

// The page at `block` is to be taken now: another's, or none although the block is not stale.
bool wants_fresh(const Strand& strand, std::size_t block, bool stale) noexcept {
  if (strand.pages[block] == nullptr) return !stale;
  return strand.borrowed && block + 1 == strand.pages.size();
}

}  // namespace

std::vector<FreshPage> KvManager::fresh_pages_of(const SequenceRecord& record) const {
  std::vector<FreshPage> fresh;
  for (std::size_t index = 0; index < record.strands.size(); ++index) {
    const Strand& one = record.strands[index];
    if (cycle(index).kind == LayerKind::state && one.pages.empty()) fresh.push_back({.life_cycle = index});
    for (std::size_t block = 0; block < one.pages.size(); ++block) {
      if (!wants_fresh(one, block, stale(index, block, record.history.size()))) continue;
      fresh.push_back({.life_cycle = index,
                       .block = block,
                       .source = one.pages[block],
                       .scratch = one.pages[block] == nullptr});
    }
  }
  return fresh;
}

std::vector<Arrivals> KvManager::arrivals_of(const SequenceRecord& record,
                                             std::span<const FreshPage> fresh) const {
  std::vector<Arrivals> arrivals(caches_.size());
  for (const Strand& one : record.strands) {
    for (Page* page : one.pages) {
      if (page == nullptr) continue;
      Arrivals& group = arrivals[cycle(page->life_cycle).group];
      group.pages.push_back(page);
      if (page->slot == no_slot) group.away.push_back(page);
      const bool borrowed = one.borrowed && page == one.pages.back();
      if (!borrowed && page->status != Status::locked) ++group.to_lock;
    }
  }
  for (const FreshPage& page : fresh) {
    ++arrivals[cycle(page.life_cycle).group].fresh;
    ++arrivals[cycle(page.life_cycle).group].to_lock;
  }
  return arrivals;
}

bool KvManager::passes_utilisation(const std::vector<Arrivals>& arrivals) const noexcept {
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    const PageCache& cache = caches_[group];
    const double limit = std::floor(spec_.max_utilisation * static_cast<double>(cache.gpu().slots()));
    const std::size_t wanted = cache.pages_with(Status::locked) + arrivals[group].to_lock;
    if (arrivals[group].to_lock > 0 && static_cast<double>(wanted) > limit) return true;
  }
  return false;
}

// Makes room in every group, or says at once that there is none in one of them, and brings in what is away.
bool KvManager::gather(const std::vector<Arrivals>& arrivals) {
  const TransitMark mark(arrivals);
  const kv::Limits limits = call_limits();
  const auto wanted = [&](std::size_t group) { return arrivals[group].away.size() + arrivals[group].fresh; };
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    if (!caches_[group].could_make_room(wanted(group), arrivals[group].away)) return false;
  }
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    if (!caches_[group].make_room(wanted(group), limits, arrivals[group].away)) return false;
  }
  for (std::size_t group = 0; group < caches_.size(); ++group) {
    caches_[group].bring_in(arrivals[group].away, limits);
  }
  return true;
}

bool KvManager::resume(SequenceRecord& record) {
  require_open(record, "resume");
  require_settled("resume");
  if (record.state == SequenceState::active) return true;
  if (parked_) return false;
  std::vector<FreshPage> fresh = fresh_pages_of(record);
  const std::vector<Arrivals> arrivals = arrivals_of(record, fresh);
  if (passes_utilisation(arrivals) || !gather(arrivals)) return false;
  take(fresh, record.priority);
  // Nothing fails from here on.
  for (const FreshPage& one : fresh) {
    Strand& strand = record.strands[one.life_cycle];
    if (strand.pages.empty()) strand.pages.push_back(nullptr);  // a state; it has room
    if (one.source != nullptr) cache_of(one.life_cycle).release(*one.source);
    cache_of(one.life_cycle).unlock(*one.page);  // locked again below, like the others
    cache_of(one.life_cycle).set_scratch(*one.page, one.scratch);
    strand.pages[one.block] = one.page;
  }
  for (Strand& strand : record.strands) {
    strand.borrowed = false;
    for (std::size_t block = 0; block < strand.pages.size(); ++block) {
      Page* const page = strand.pages[block];
      if (page == nullptr) continue;
      cache_of(*page).lock(*page);
      strand.table[static_cast<std::ptrdiff_t>(block)] = page->slot;
    }
  }
  record.locks_pages = true;
  record.state = SequenceState::active;
  return true;
}

// Takes every page, locked, and fills it; on a throw all are back.
void KvManager::take(std::vector<FreshPage>& fresh, std::uint8_t priority) {
  try {
    for (FreshPage& one : fresh) {
      one.page = &cache_of(one.life_cycle).take_locked(static_cast<std::uint16_t>(one.life_cycle), priority);
    }
    fill(fresh);
  } catch (...) {
    give_back(fresh);
    throw;
  }
}

void KvManager::give_back(std::span<const FreshPage> fresh) noexcept {
  for (const FreshPage& one : fresh) {
    if (one.page == nullptr) continue;
    cache_of(one.life_cycle).unlock(*one.page);
    cache_of(one.life_cycle).release(*one.page);
  }
}

void KvManager::fill(std::span<const FreshPage> fresh) {
  const kv::Limits limits = call_limits();
  std::vector<Copy> copies;
  for (const FreshPage& one : fresh) {
    const PageCache& cache = cache_of(one.life_cycle);
    const Address to = cache.gpu().address(one.page->slot);
    if (one.source != nullptr) {
      copies.push_back({to, cache.gpu().address(one.source->slot), cache.page_bytes()});
    } else if (!one.scratch) {
      zero_range(*device_, to, cache.page_bytes(), limits.deadline, limits.stop);
    }
  }
  if (!copies.empty()) transfer(*device_, copies, StreamId::in, limits.deadline, limits.stop);
}

}  // namespace torpor::kv
