// Page: the K and V of one token block, wherever they lie, and the intrusive lists that order pages by use.
//
// Status follows from who uses the page:
//   locked     an active sequence uses it: it stays in its slot
//   held       only suspended sequences use it: it may move to another tier, and is never dropped
//   droppable  no sequence uses it, a prefix node does: it may move, and may be dropped for room
//   unused     nobody uses it: the record waits for its next use
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace torpor::kv {

struct Node;  // prefix_tree.hpp

enum class Status : std::uint8_t { unused, droppable, held, locked };
// The fastest first; pages fall from one to the next that there is. All but gpu are cold: a page is one blob
// there, made by the codec.
enum class Tier : std::uint8_t { gpu, cold_gpu, host, disk };
constexpr std::size_t tier_count = 4;
constexpr std::array<Tier, 3> cold_tiers{Tier::cold_gpu, Tier::host, Tier::disk};
[[nodiscard]] const char* to_string(Tier tier) noexcept;

// Pages of a lower level leave a tier before all of a higher one.
constexpr std::uint8_t priority_levels = 4;
constexpr std::uint8_t default_priority = 1;

constexpr std::int32_t no_slot = -1;

// Where the cold form of a page lies (cold_store.hpp). Empty = no place.
struct Place {
  std::uint32_t piece = UINT32_MAX;
  std::uint32_t index = 0;
  Tier tier = Tier::host;
  [[nodiscard]] explicit operator bool() const noexcept { return piece != UINT32_MAX; }
};

class PageList;

struct Page {
  Status status = Status::unused;
  Tier tier = Tier::gpu;         // the tier it belongs to, also while it is parked
  bool in_transit = false;       // wanted by the running move: no victim
  std::uint16_t life_cycle = 0;  // what it holds: page i of a node is of life cycle i
  bool scratch = false;          // room to compute in: never saved
  bool refused = false;          // the codec refused it in the running move: no victim that moves
  std::uint8_t priority = default_priority;
  std::int32_t slot = no_slot;         // in the GPU pool; no_slot when in a cold tier or parked
  Place place;                         // in its cold tier; empty: on the GPU, parked, or without contents
  Place saved;                         // of a page on the GPU: the copy that a sleep made
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

// The pages of one status in one tier, in the order in which they leave it: by priority, then the least
// recently used first. All operations O(1): the levels are few.
class EvictionQueue final {
 public:
  void push_newest(Page& page) noexcept { levels_[page.priority].push_newest(page); }
  [[nodiscard]] Page* first() const noexcept { return first_from(0); }
  // The one that leaves after this page, which is in here.
  [[nodiscard]] Page* after(const Page& page) const noexcept {
    return page.newer != nullptr ? page.newer : first_from(page.priority + std::size_t{1});
  }
  [[nodiscard]] std::size_t size() const noexcept;

 private:
  [[nodiscard]] Page* first_from(std::size_t level) const noexcept;
  std::array<PageList, priority_levels> levels_;
};

}  // namespace torpor::kv
