// EventLog: what became of known blocks, for routers that follow prefixes.
//
// A ring of fixed size: numbers go up by one, and the newest event takes the place of the oldest. A reader
// that comes too late is told how many it missed; what they were is gone, and it must begin anew.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torpor/kv/page.hpp"
#include "torpor/kv/prefix_tree.hpp"

namespace torpor::kv {

enum class EventKind : std::uint8_t { stored, removed, moved };
[[nodiscard]] const char* to_string(EventKind kind) noexcept;

struct Event {
  std::uint64_t number = 0;  // 1, 2, 3 …
  EventKind kind = EventKind::stored;
  std::uint64_t block = 0;       // chained hash (PrefixTree::hashes)
  std::uint64_t parent = 0;      // that of the block above it, or of its scope
  std::uint32_t tokens = 0;      // fewer than a block's: a partial block
  std::uint16_t life_cycle = 0;  // moved: of the page
  // stored, removed: the coldest tier that a page of the block is, or last was, in; moved: where the page is
  // now.
  Tier tier = Tier::gpu;
};

// Owned and locked by KvManager. Recording allocates nothing.
class EventLog final : public PrefixTree::Listener {
 public:
  struct Batch {
    std::vector<Event> events;  // oldest first
    std::uint64_t next = 0;     // ask with this the next time
    // So many between the last one seen and these were overwritten. At least 1 for a number that was never
    // given.
    std::uint64_t lost = 0;
  };

  explicit EventLog(std::size_t capacity) : ring_(capacity) {}
  void stored(const Node& node) noexcept override { add(EventKind::stored, node, node.coldest()); }
  void removed(const Node& node) noexcept override { add(EventKind::removed, node, node.last_tier); }
  void moved(const Page& page) noexcept;
  // Those with a higher number.
  [[nodiscard]] Batch after(std::uint64_t number) const;

 private:
  Event& add(EventKind kind, const Node& node, Tier tier) noexcept;

  std::vector<Event> ring_;
  Event unseen_;  // written when there is no ring
  std::uint64_t last_ = 0;
};

}  // namespace torpor::kv
