// KvManager: what its sequences ask for. The lock is held in all of these.
#include <algorithm>
#include <cassert>
#include <ranges>
#include <string>
#include <utility>

#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace torpor::kv {
namespace {

// Marks pages that the running move wants, so that they are no victims of it.
class TransitMark final {
 public:
  explicit TransitMark(std::span<Page* const> pages) noexcept : pages_(pages) { set(true); }
  TransitMark(const TransitMark&) = delete;
  TransitMark& operator=(const TransitMark&) = delete;
  TransitMark(TransitMark&&) = delete;
  TransitMark& operator=(TransitMark&&) = delete;
  ~TransitMark() { set(false); }

 private:
  void set(bool value) noexcept {
    for (Page* page : pages_) page->in_transit = value;
  }
  std::span<Page* const> pages_;
};

}  // namespace

std::size_t KvManager::blocks_for(std::size_t tokens) const noexcept {
  const std::size_t size = spec_.layout.tokens_per_block;
  return tokens / size + (tokens % size != 0 ? 1 : 0);
}

void KvManager::require_open(const SequenceRecord& record, const char* call) const {
  if (record.state == SequenceState::closed) {
    throw Misuse(std::string(call) + ": sequence " + std::to_string(record.id) +
                 " is closed; create a new one");
  }
}

void KvManager::require_settled(const char* call) {
  if (stage_ == Stage::none) return;
  if (stage_ == Stage::wake_committed) {
    publish_wake();
    return;
  }
  const bool sleeping = stage_ == Stage::sleep || stage_ == Stage::sleep_committing;
  throw Misuse(std::string(call) + ": a " + (sleeping ? "sleep" : "wake") + " of '" + spec_.tag +
               "' is under way; call again when it is over");
}

bool KvManager::resume(SequenceRecord& record) {
  require_open(record, "resume");
  require_settled("resume");
  if (record.state == SequenceState::active) return true;
  if (parked_) return false;
  std::vector<Page*> away;
  for (Page* page : record.pages) {
    if (page->tier == Tier::host) away.push_back(page);
  }
  {
    const TransitMark mark(record.pages);
    const Limits limits = call_limits();
    if (!cache_.make_room(away.size(), limits)) return false;
    cache_.bring_in(away, limits);
  }
  for (std::size_t block = 0; block < record.pages.size(); ++block) {
    cache_.lock(*record.pages[block]);
    record.table[static_cast<std::ptrdiff_t>(block)] = record.pages[block]->slot;
  }
  record.locks_pages = true;
  record.state = SequenceState::active;
  return true;
}

void KvManager::suspend(SequenceRecord& record) {
  require_open(record, "suspend");
  require_settled("suspend");
  if (record.state == SequenceState::suspended) return;
  record.locks_pages = false;
  record.state = SequenceState::suspended;
  for (Page* page : std::views::reverse(record.pages)) cache_.unlock(*page);
  std::fill_n(record.table.get(), record.pages.size(), no_slot);
}

bool KvManager::resize(SequenceRecord& record, std::size_t capacity_tokens) {
  require_open(record, "resize");
  require_settled("resize");
  if (record.state != SequenceState::active)
    throw Misuse("resize: the sequence is suspended; resume it first");
  if (capacity_tokens < record.history.size()) {
    throw Misuse("resize: " + std::to_string(capacity_tokens) + " tokens is less than the history of " +
                 std::to_string(record.history.size()) + "; close the sequence and create a shorter one");
  }
  if (parked_) return false;
  const std::size_t blocks = blocks_for(capacity_tokens);
  if (blocks > record.pages.size()) return grow(record, blocks);
  let_go(record, blocks);
  return true;
}

bool KvManager::grow(SequenceRecord& record, std::size_t blocks) {
  if (blocks > slots()) return false;
  record.pages.reserve(blocks);
  if (!cache_.make_room(blocks - record.pages.size(), call_limits())) return false;
  const std::size_t before = record.pages.size();
  try {
    while (record.pages.size() < blocks) {
      Page& page = cache_.take_locked();
      record.table[static_cast<std::ptrdiff_t>(record.pages.size())] = page.slot;
      record.pages.push_back(&page);
    }
  } catch (...) {
    let_go(record, before);
    throw;
  }
  return true;
}

// Of an active or suspended sequence; the table keeps no trace.
void KvManager::let_go(SequenceRecord& record, std::size_t first_block) noexcept {
  while (record.pages.size() > first_block) {
    Page& page = *record.pages.back();
    record.pages.pop_back();
    record.table[static_cast<std::ptrdiff_t>(record.pages.size())] = no_slot;
    if (record.locks_pages) cache_.unlock(page);
    cache_.release(page);
  }
  cache_.host().trim();
}

void KvManager::commit(SequenceRecord& record, std::span<const Token> tokens) {
  require_open(record, "commit");
  require_settled("commit");
  if (parked_) throw Misuse("commit: '" + spec_.tag + "' is asleep, so nothing was computed; wake it first");
  if (record.state != SequenceState::active)
    throw Misuse("commit: the sequence is suspended; resume it first");
  const std::size_t capacity = record.pages.size() * spec_.layout.tokens_per_block;
  if (tokens.size() > capacity - record.history.size()) {
    throw Misuse("commit: " + std::to_string(tokens.size()) + " tokens behind a history of " +
                 std::to_string(record.history.size()) + " pass the capacity of " + std::to_string(capacity) +
                 "; resize first");
  }
  record.history.insert(record.history.end(), tokens.begin(), tokens.end());
  publish_blocks(record);
}

// Makes full blocks findable. Where an equal block is known already the sequence keeps its own page, which
// nobody else finds: its page table must not change under a running kernel. The page goes when the sequence
// closes.
void KvManager::publish_blocks(SequenceRecord& record) {
  if (record.epoch != epoch_) return;
  const std::size_t size = spec_.layout.tokens_per_block;
  const std::size_t full = record.history.size() / size;
  if (full == record.published_blocks) return;
  Node* parent = record.tip.get();
  if (parent == nullptr) {
    // Nothing published yet, or a block above the tip was dropped: begin again at the root, and mend the
    // chain.
    record.published_blocks = 0;
    parent = &prefixes_.root(record.scope);
  }
  while (record.published_blocks < full) {
    const auto block = std::span(record.history).subspan(record.published_blocks * size, size);
    Node* node = prefixes_.find(*parent, block);
    if (node == nullptr) node = &prefixes_.insert(*parent, block, *record.pages[record.published_blocks]);
    parent = node;
    record.tip = NodeRef(*node);
    ++record.published_blocks;
  }
}

void KvManager::close(SequenceRecord& record) noexcept {
  if (record.state == SequenceState::closed) return;
  const auto entry = sequences_.find(record.id);
  if (stage_ == Stage::none || stage_ == Stage::wake_committed) {
    let_go(record, 0);
  } else {
    pending_.push_back(entry->second);
    std::fill_n(record.table.get(), record.pages.size(), no_slot);
  }
  record.state = SequenceState::closed;
  sequences_.erase(entry);
}

}  // namespace torpor::kv
