// Drops: what a sleep is going to drop since not everything fits (K9): reusable pages, and what cannot be
// found without them. A plan of what PageCache::evict() will do; nothing changes here.
#pragma once

#include <array>
#include <cstddef>
#include <unordered_set>
#include <vector>

#include "torpor/kv/layout.hpp"
#include "torpor/kv/prefix_tree.hpp"
#include "torpor/participant.hpp"

namespace torpor::kv {

class Drops final {
 public:
  // The layout must live as long as this.
  explicit Drops(const Layout& layout);

  // A droppable page, unless it goes with another one already.
  void add(Page& page);

  [[nodiscard]] const Evicted& sum() const noexcept { return sum_; }
  [[nodiscard]] bool empty() const noexcept { return sum_.pages == 0; }
  // All that go, of one pool group; those that were added before those that go with them.
  [[nodiscard]] const std::vector<Page*>& pages(std::size_t group) const noexcept {
    return groups_[group].pages;
  }
  // How many of them lie on the GPU, in either tier, so that no sleep saves them.
  [[nodiscard]] std::size_t unsaved(std::size_t group) const noexcept {
    return freed(group, Tier::gpu) + freed(group, Tier::cold_gpu);
  }
  // How many of them leave a place in this tier.
  [[nodiscard]] std::size_t freed(std::size_t group, Tier tier) const noexcept {
    return groups_[group].by_tier[static_cast<std::size_t>(tier)];
  }

 private:
  struct Group {
    std::vector<Page*> pages;
    std::array<std::size_t, tier_count> by_tier{};
  };
  void add_page(Page& page);
  // Of this node and all below it: their blocks are unknown from then on.
  void add_tree(Node& top);
  // This node and those above it, as far as nothing is left of them.
  void prune(Node* node);
  [[nodiscard]] bool bare(const Node& node) const;
  void forget(const Node& node);

  const Layout& layout_;
  std::vector<Group> groups_;
  std::unordered_set<const Page*> gone_;
  std::unordered_set<const Node*> unknown_;
  Evicted sum_;
};

}  // namespace torpor::kv
