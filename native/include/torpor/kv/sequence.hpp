// Sequence: one request's tokens and the pages of their K and V.  suspended ↔ active → closed
#pragma once

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

// What KvManager keeps of a sequence; read and written under its lock.
struct SequenceRecord {
  std::uint64_t id = 0;
  std::string scope;
  SequenceState state = SequenceState::suspended;
  bool locks_pages = false;               // as it does while active, and closed until the transaction is over
  std::vector<Token> history;             // committed
  std::vector<Page*> pages;               // one a block, beyond the history too
  std::shared_ptr<std::int32_t[]> table;  // as many entries as the pool has slots
  std::size_t matched_tokens = 0;
  std::uint64_t epoch = 0;           // of the prefixes: blocks of an older epoch never become reusable
  std::size_t published_blocks = 0;  // leading blocks known to the prefix tree …
  NodeRef tip;                       // … and the last of them
  bool contents_lost = false;        // a sleep discarded K and V of its history
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
  // Slot of each block, no_slot where there is none or the sequence is not active. Stable address.
  [[nodiscard]] std::shared_ptr<std::int32_t[]> table() const noexcept { return record_->table; }
  [[nodiscard]] std::size_t table_entries() const noexcept;

  // Brings every page to the GPU and locks it. False when there is no room, or the pool is parked; then
  // nothing changed. A failed device call throws and leaves this sequence suspended as it was.
  [[nodiscard]] bool resume();
  // Work on the pages must be done. They may move to the host from now on, and are never dropped.
  void suspend();
  // Grows or shrinks, in whole blocks, not below the history. False as for resume().
  [[nodiscard]] bool resize(std::size_t capacity_tokens);
  // K and V of these tokens lie in the pages now, behind the history. Full blocks become reusable by others.
  void commit(std::span<const Token> tokens);
  // Committed full blocks stay as droppable prefixes; the rest is freed. Repeatable.
  void close() noexcept;

 private:
  std::shared_ptr<KvManager> manager_;
  std::shared_ptr<SequenceRecord> record_;
};

}  // namespace torpor::kv
