// Sequence: one request's tokens and the pages of their K and V.  suspended ↔ active → closed
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "torpor/kv/page.hpp"
#include "torpor/kv/prefix_tree.hpp"

namespace torpor::kv {

class KvManager;

enum class SequenceState : std::uint8_t { suspended, active, closed };
[[nodiscard]] const char* to_string(SequenceState state) noexcept;

// The pages of one life cycle in one sequence.
struct Strand {
  std::vector<Page*> pages;               // one a block, beyond the history too; a state has one in all.
                                          // nullptr: stale, or scratch of a suspended sequence
  std::shared_ptr<std::int32_t[]> table;  // slot of each page
  std::size_t entries = 0;                // of the table
  std::size_t first_live = 0;             // blocks before it that hold no sink are stale
  bool borrowed = false;                  // the last page is another's: the next resume copies it
};

// What KvManager keeps of a sequence; read and written under its lock.
struct SequenceRecord {
  std::uint64_t id = 0;
  std::string scope;
  std::uint8_t priority = default_priority;  // of the pages that it computes
  SequenceState state = SequenceState::suspended;
  bool locks_pages = false;         // as it does while active, and closed until the transaction is over
  std::vector<Token> history;       // committed
  std::size_t blocks = 0;           // capacity
  std::size_t capacity_tokens = 0;  // as last asked for: what a window will have passed by then is scratch
  std::vector<Strand> strands;      // by life cycle
  std::size_t matched_tokens = 0;
  std::uint64_t epoch = 0;           // of the prefixes: blocks of an older epoch never become reusable
  std::size_t published_blocks = 0;  // leading blocks known to the prefix tree …
  NodeRef tip;                       // … and the last of them
  bool contents_lost = false;        // a sleep discarded K and V of its history

  [[nodiscard]] bool has_pages() const noexcept {
    return std::ranges::any_of(strands, [](const Strand& one) { return !one.pages.empty(); });
  }
};

// A caller's handle; the destructor closes. Thread-safe. Every call on a closed sequence but close() is
// Misuse.
class Sequence final {
 public:
  Sequence(std::shared_ptr<KvManager> manager, std::shared_ptr<SequenceRecord> record) noexcept;
  Sequence(const Sequence&) = delete;
  Sequence& operator=(const Sequence&) = delete;
  Sequence(Sequence&&) = delete;
  Sequence& operator=(Sequence&&) = delete;
  ~Sequence();

  [[nodiscard]] std::uint64_t id() const noexcept { return record_->id; }
  [[nodiscard]] SequenceState state() const;
  [[nodiscard]] std::size_t matched_tokens() const noexcept { return record_->matched_tokens; }
  [[nodiscard]] std::size_t history_tokens() const;
  [[nodiscard]] std::size_t capacity_tokens() const;
  // The history's K and V are gone: a discarding sleep took them. They must be computed again.
  [[nodiscard]] bool contents_lost() const;
  // Slot of each block in a life cycle, of the one state in a state's; no_slot where there is none (a stale
  // block too) or the sequence is not active. Stable address. Misuse when there is no such life cycle.
  [[nodiscard]] std::shared_ptr<std::int32_t[]> table(std::size_t life_cycle = 0) const;
  [[nodiscard]] std::size_t table_entries(std::size_t life_cycle = 0) const;

  // Brings every page to the GPU and locks it; takes what it has no page for yet: scratch, the copy of a page
  // that it shares a part of, its state (zeros, or a copy of the snapshot it was matched to). False when
  // there is no room, more than max_utilisation of a pool would be locked, or the cache is parked; then
  // nothing changed. A failed device call throws and leaves this sequence suspended as it was.
  [[nodiscard]] bool resume();
  // Work on the pages must be done. They may move to the host from now on, and are never dropped; scratch
  // goes back.
  void suspend();
  // Grows or shrinks, in whole blocks, not below the history. Blocks that a window will have passed once that
  // many tokens are computed get scratch pages. False as for resume(), whatever the utilisation.
  [[nodiscard]] bool resize(std::size_t capacity_tokens);
  // K and V of these tokens lie in the pages now, behind the history. Full blocks become reusable by others;
  // what windows have passed goes back. Each state is the one after these tokens.
  void commit(std::span<const Token> tokens);
  // Keeps a copy of each state at the end of the history, a block border, for sequences that begin with
  // exactly these tokens. False when there is no room, or the history is older than the last forget_prefixes.
  [[nodiscard]] bool snapshot();
  // Committed full blocks stay as droppable prefixes; the rest is freed. Repeatable.
  void close() noexcept;

 private:
  std::shared_ptr<KvManager> manager_;
  std::shared_ptr<SequenceRecord> record_;
};

}  // namespace torpor::kv
