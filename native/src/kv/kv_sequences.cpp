// KvManager: what its sequences ask for. The lock is held in all of these.
#include <algorithm>
#include <cassert>
#include <ranges>
#include <string>
#include <utility>

#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace torpor::kv {

std::size_t KvManager::blocks_for(std::size_t tokens) const noexcept {
  const std::size_t size = spec_.layout.tokens_per_block();
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

void KvManager::suspend(SequenceRecord& record) {
  require_open(record, "suspend");
  require_settled("suspend");
  if (record.state == SequenceState::suspended) return;
  record.locks_pages = false;
  record.state = SequenceState::suspended;
  for (Strand& one : record.strands) {
    for (Page*& page : std::views::reverse(one.pages)) {
      if (page == nullptr) continue;
      PageCache& cache = cache_of(*page);
      cache.unlock(*page);
      if (page->scratch) cache.release(*std::exchange(page, nullptr));
    }
    std::fill_n(one.table.get(), one.pages.size(), no_slot);
  }
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
  if (blocks > record.blocks && !grow(record, blocks)) return false;
  let_go(record, blocks);
  record.capacity_tokens = capacity_tokens;
  mark_scratch(record);
  return true;
}

bool KvManager::grow(SequenceRecord& record, std::size_t blocks) {
  if (blocks > max_blocks_) return false;
  const std::size_t before = record.blocks;
  std::vector<Arrivals> arrivals(caches_.size());
  for (std::size_t index = 0; index < record.strands.size(); ++index) {
    if (cycle(index).kind == LayerKind::state) continue;
    record.strands[index].pages.reserve(blocks);
    arrivals[cycle(index).group].fresh += blocks - before;
  }
  if (!gather(arrivals)) return false;
  record.blocks = blocks;
  try {
    for (std::size_t index = 0; index < record.strands.size(); ++index) {
      if (cycle(index).kind == LayerKind::state) continue;
      Strand& one = record.strands[index];
      while (one.pages.size() < blocks) {
        Page& page = cache_of(index).take_locked(static_cast<std::uint16_t>(index), record.priority);
        one.table[static_cast<std::ptrdiff_t>(one.pages.size())] = page.slot;
        one.pages.push_back(&page);
      }
    }
  } catch (...) {
    let_go(record, before);
    throw;
  }
  return true;
}

// Blocks that hold nothing computed yet and that their window will have passed at the capacity asked for.
void KvManager::mark_scratch(SequenceRecord& record) noexcept {
  for (std::size_t index = 0; index < record.strands.size(); ++index) {
    if (cycle(index).kind != LayerKind::window) continue;
    Strand& one = record.strands[index];
    for (std::size_t block = blocks_for(record.history.size()); block < one.pages.size(); ++block) {
      if (one.pages[block] == nullptr) continue;
      cache_of(index).set_scratch(*one.pages[block], stale(index, block, record.capacity_tokens));
    }
  }
}

void KvManager::let_go_page(const SequenceRecord& record, Page& page) noexcept {
  PageCache& cache = cache_of(page);
  if (record.locks_pages) cache.unlock(page);
  cache.release(page);
}

// Of an active or suspended sequence; the tables keep no trace.
void KvManager::let_go(SequenceRecord& record, std::size_t first_block) noexcept {
  for (std::size_t index = 0; index < record.strands.size(); ++index) {
    if (cycle(index).kind == LayerKind::state) continue;
    Strand& one = record.strands[index];
    while (one.pages.size() > first_block) {
      Page* const page = one.pages.back();
      one.pages.pop_back();
      one.borrowed = false;
      one.table[static_cast<std::ptrdiff_t>(one.pages.size())] = no_slot;
      if (page != nullptr) let_go_page(record, *page);
    }
  }
  record.blocks = std::min(record.blocks, first_block);
  trim();
}

void KvManager::let_go_all(SequenceRecord& record) noexcept {
  let_go(record, 0);
  for (Strand& one : record.strands) {
    for (Page* page : one.pages) let_go_page(record, *page);  // states
    one.pages.clear();
    one.table[0] = no_slot;
  }
  // Of a block without pages nothing is left when nobody goes on from it.
  if (Node* tip = record.tip.get(); tip != nullptr) prefixes_.prune(tip);
  trim();
}

void KvManager::commit(SequenceRecord& record, std::span<const Token> tokens) {
  require_open(record, "commit");
  require_settled("commit");
  if (parked_) throw Misuse("commit: '" + spec_.tag + "' is asleep, so nothing was computed; wake it first");
  if (record.state != SequenceState::active)
    throw Misuse("commit: the sequence is suspended; resume it first");
  const std::size_t capacity = record.blocks * spec_.layout.tokens_per_block();
  if (tokens.size() > capacity - record.history.size()) {
    throw Misuse("commit: " + std::to_string(tokens.size()) + " tokens behind a history of " +
                 std::to_string(record.history.size()) + " pass the capacity of " + std::to_string(capacity) +
                 "; resize first");
  }
  record.history.insert(record.history.end(), tokens.begin(), tokens.end());
  mark_scratch_computed(record);
  publish_blocks(record);
  pass_windows(record);
}

// Blocks that have become part of the history and are not stale yet are scratch no more.
void KvManager::mark_scratch_computed(SequenceRecord& record) noexcept {
  const std::size_t end = blocks_for(record.history.size());
  for (std::size_t index = 0; index < record.strands.size(); ++index) {
    if (cycle(index).kind != LayerKind::window) continue;
    Strand& one = record.strands[index];
    for (std::size_t block = one.first_live; block < end; ++block) {
      Page* const page = one.pages[block];
      if (page != nullptr && page->scratch && !stale(index, block, record.history.size())) {
        cache_of(index).set_scratch(*page, false);
      }
    }
  }
}

void KvManager::pass_windows(SequenceRecord& record) noexcept {
  const std::size_t size = spec_.layout.tokens_per_block();
  for (std::size_t index = 0; index < record.strands.size(); ++index) {
    Strand& one = record.strands[index];
    const std::size_t end = cycle(index).stale_end(record.history.size(), size);
    for (std::size_t block = std::max(one.first_live, cycle(index).first_stale_block(size)); block < end;
         ++block) {
      one.table[static_cast<std::ptrdiff_t>(block)] = no_slot;
      if (Page* const page = std::exchange(one.pages[block], nullptr); page != nullptr) {
        let_go_page(record, *page);
      }
    }
    one.first_live = std::max(one.first_live, end);
  }
}

void KvManager::close(SequenceRecord& record) noexcept {
  if (record.state == SequenceState::closed) return;
  const auto entry = sequences_.find(record.id);
  if (stage_ == Stage::none || stage_ == Stage::wake_committed) {
    publish_partial(record);
    let_go_all(record);
  } else {
    pending_.push_back(entry->second);
    for (Strand& one : record.strands) std::fill_n(one.table.get(), one.pages.size(), no_slot);
  }
  record.state = SequenceState::closed;
  sequences_.erase(entry);
}

}  // namespace torpor::kv
