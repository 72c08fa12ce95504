// Page: the K and V of one token block, wherever they lie, and the intrusive lists that order pages by use.
//
// Status follows from who uses the page:
//   locked     an active sequence uses it: it stays in its slot
//   held       only suspended sequences use it: it may move to another tier, and is never dropped
//   droppable  no sequence uses it, a prefix node does: it may move, and may be dropped for room
//   unused     nobody uses it: the record waits for its next use
#pragma once

#include <cstddef>
#include <cstdint>

namespace torpor::kv {

struct Node;  // prefix_tree.hpp

enum class Status : std::uint8_t { unused, droppable, held, locked };
enum class Tier : std::uint8_t { gpu, host };

constexpr std::int32_t no_slot = -1;

// Where a page's bytes lie in host memory (host_store.hpp). Empty = no place.
struct Place {
  std::uint32_t piece = UINT32_MAX;
  std::uint32_t index = 0;
  [[nodiscard]] explicit operator bool() const noexcept { return piece != UINT32_MAX; }
};

class PageList;

struct Page {
  Status status = Status::unused;
  Tier tier = Tier::gpu;               // the tier it belongs to, also while it is parked
  bool in_transit = false;             // wanted by the running move: no victim
  std::uint16_t life_cycle = 0;        // what it holds: page i of a node is of life cycle i
  bool scratch = false;                // room to compute in: never saved
  bool zero_on_arrival = false;        // lost its contents to a memset sleep: reads zero in its next slot
  std::int32_t slot = no_slot;         // in the GPU pool; no_slot when in the host tier or parked
  Place place;                         // in host memory; empty = no bytes there
  std::uint32_t sequences = 0;         // open sequences that use it
  std::uint32_t active_sequences = 0;  // of them active
  Node* node = nullptr;                // of the prefix tree, when others may find it
  PageList* list = nullptr;            // the list that it is in
  Page* older = nullptr;
  Page* newer = nullptr;
};

// Least recently used first. All operations O(1); a page is in one list at most.
class PageList final {
 public:
  PageList() = default;
  PageList(const PageList&) = delete;
  PageList& operator=(const PageList&) = delete;
  PageList(PageList&&) = delete;
  PageList& operator=(PageList&&) = delete;
  ~PageList() = default;
  void push_newest(Page& page) noexcept;
  void remove(Page& page) noexcept;
  [[nodiscard]] Page* oldest() const noexcept { return oldest_; }
  [[nodiscard]] std::size_t size() const noexcept { return size_; }

 private:
  Page* oldest_ = nullptr;
  Page* newest_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace torpor::kv
