// PrefixTree: which token blocks are known, and the pages that hold each: at most one a life cycle.
//
// A block is found by a 64-bit hash chained over (scope; tokens of all blocks up to it) and confirmed by
// comparing its parent and its own tokens, so that a collision costs time and never gives a wrong page. The
// first block's parent is the root of its scope: the scope is a security boundary, and blocks of two scopes
// never meet.
//
// A node without its parent could not be found: removing one removes everything below it. A node may be
// without pages (a block whose sliding window has passed); when nothing is left below such a node either,
// prune() takes it out. The last block of a chain may be partial: fewer tokens, nothing below it. Not
// thread-safe; the owner of the pages has the lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torpor/kv/huge_pages.hpp"
#include "torpor/kv/page.hpp"
#include "torpor/kv/records.hpp"

namespace torpor::kv {

using Token = std::int32_t;

// What a lookup reads comes first, in one cache line.
struct alignas(64) Node {
  Node* parent = nullptr;  // nullptr: this is a root
  Node* next_in_bucket = nullptr;
  std::uint64_t hash = 0;
  std::vector<Token> tokens;  // tokens_per_block of them; fewer: a partial block
  Node* first_child = nullptr;
  Node* next_sibling = nullptr;
  Node* previous_sibling = nullptr;
  std::uint64_t serial = 0;            // changes when the record is used for another block; 0 while unused
  std::vector<Page*> pages;            // by life cycle; nullptr where there is none
  const std::string* scope = nullptr;  // a root's; else nullptr
  Tier last_tier = Tier::gpu;          // that the page was in which it lost last

  [[nodiscard]] Page* page(std::size_t life_cycle = 0) const noexcept {
    return life_cycle < pages.size() ? pages[life_cycle] : nullptr;
  }
  [[nodiscard]] bool has_pages() const noexcept {
    return std::ranges::any_of(pages, [](const Page* one) { return one != nullptr; });
  }
  // Of the tiers that its pages are in; gpu when there are none.
  [[nodiscard]] Tier coldest() const noexcept {
    Tier found = Tier::gpu;
    for (const Page* one : pages) {
      if (one != nullptr) found = std::max(found, one->tier);
    }
    return found;
  }
};

// A node that may be gone by the next look.
class NodeRef final {
 public:
  NodeRef() = default;
  explicit NodeRef(Node& node) noexcept : node_(&node), serial_(node.serial) {}
  // nullptr when it is gone. Valid as long as the tree lives.
  [[nodiscard]] Node* get() const noexcept {
    return node_ != nullptr && node_->serial == serial_ ? node_ : nullptr;
  }

 private:
  Node* node_ = nullptr;
  std::uint64_t serial_ = 0;
};

class PrefixTree final {
 public:
  // hash_mask keeps only some bits of each hash, so that tests can force collisions.
  explicit PrefixTree(std::size_t tokens_per_block, std::uint64_t hash_mask = UINT64_MAX);

  // Hears of every block that becomes known or unknown. It must live as long as the tree.
  class Listener {
   public:
    virtual void stored(const Node& node) noexcept = 0;
    virtual void removed(const Node& node) noexcept = 0;

   protected:
    ~Listener() = default;
  };
  void tell(Listener& listener) noexcept { listener_ = &listener; }

  // The longest known chain of whole blocks that `tokens` begins with, first block first. Reads only.
  [[nodiscard]] std::vector<Node*> match(const std::string& scope, std::span<const Token> tokens) const;
  // nullptr when unknown.
  [[nodiscard]] Node* find(const Node& parent, std::span<const Token> block) const noexcept;
  // The scope's root; nullptr when it has no blocks.
  [[nodiscard]] const Node* known_root(const std::string& scope) const noexcept {
    const auto known = roots_.find(scope);
    return known == roots_.end() ? nullptr : known->second;
  }
  // The scope's root, made when there is none.
  [[nodiscard]] Node& root(const std::string& scope);
  // Of the children of `parent`, whole or partial, the one that shares most leading tokens with `tokens`
  // among those that `usable(node)`; and how many. {nullptr, 0} when none shares any.
  template <typename F>
  [[nodiscard]] std::pair<Node*, std::size_t> longest_shared(const Node& parent,
                                                             std::span<const Token> tokens, F usable) const;
  // The block must be unknown below this parent. `pages` are by life cycle, nullptr where there is none; sets
  // the node of each. Fewer tokens than a block make a partial one. May throw bad_alloc; then nothing
  // changed.
  Node& insert(Node& parent, std::span<const Token> block, std::span<Page* const> pages);
  Node& insert(Node& parent, std::span<const Token> block, Page& page) {
    Page* const pages[]{&page};
    return insert(parent, block, pages);
  }
  // Gives a known block a page of a life cycle that it has none of. May throw bad_alloc; then nothing
  // changed.
  void attach(Node& node, Page& page);
  // The block stays known without this page, for as long as something is left of it or below it.
  void detach(Page& page) noexcept;
  // Takes out this node and those above it that have neither pages nor anything below them.
  void prune(Node* node) noexcept;
  // The chained hash of each whole block of `tokens`, as events and other processes see it.
  [[nodiscard]] std::vector<std::uint64_t> hashes(const std::string& scope,
                                                  std::span<const Token> tokens) const;
  // Removes the node and all below it, deepest first; each page's `node` is cleared before `gone(page)`.
  template <typename F>
  void remove(Node& node, F gone);
  // Removes everything.
  template <typename F>
  void clear(F gone);
  // Forgets the root of a scope that has no blocks; does nothing for other nodes.
  void drop_empty_root(Node* root) noexcept;

  [[nodiscard]] std::size_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::size_t tokens() const noexcept { return tokens_; }
  [[nodiscard]] std::size_t scopes() const noexcept { return roots_.size(); }

 private:
  [[nodiscard]] std::uint64_t chained_hash(std::uint64_t parent_hash,
                                           std::span<const Token> block) const noexcept;
  [[nodiscard]] Node* const& bucket(std::uint64_t hash) const noexcept {
    return buckets_[hash & (buckets_.size() - 1)];
  }
  // The known one among the nodes of a bucket from `first` on; nullptr when there is none.
  [[nodiscard]] static Node* confirmed(Node* first, const Node& parent, std::uint64_t hash,
                                       std::span<const Token> block) noexcept;
  [[nodiscard]] std::uint64_t root_hash(const std::string& scope) const noexcept;
  void grow_buckets();
  // Unlinks a leaf without pages.
  void take_out(Node& leaf) noexcept;

  std::size_t tokens_per_block_;
  std::uint64_t hash_mask_;
  std::unordered_map<std::string, Node*> roots_;
  Records<Node> nodes_;
  std::vector<Node*, HugePages<Node*>> buckets_;  // a power of two, at least twice the blocks
  std::size_t blocks_ = 0;
  std::size_t tokens_ = 0;
  std::uint64_t last_serial_ = 0;
  Listener* listener_ = nullptr;
};

template <typename F>
std::pair<Node*, std::size_t> PrefixTree::longest_shared(const Node& parent, std::span<const Token> tokens,
                                                         F usable) const {
  std::pair<Node*, std::size_t> best{nullptr, 0};
  for (Node* child = parent.first_child; child != nullptr; child = child->next_sibling) {
    const auto differs = std::ranges::mismatch(child->tokens, tokens);
    const auto shared = static_cast<std::size_t>(differs.in1 - child->tokens.begin());
    if (shared > best.second && usable(*child)) best = {child, shared};
  }
  return best;
}

template <typename F>
void PrefixTree::remove(Node& node, F gone) {
  Node* const top = &node;
  Node* current = top;
  for (;;) {
    while (current->first_child != nullptr) current = current->first_child;
    Node* const parent = current->parent;
    const bool last = current == top;
    if (current->has_pages()) current->last_tier = current->coldest();
    for (Page*& held : current->pages) {
      if (held == nullptr) continue;
      Page& page = *std::exchange(held, nullptr);
      page.node = nullptr;
      gone(page);
    }
    take_out(*current);
    if (last) {
      prune(parent);
      return;
    }
    current = parent;
  }
}

template <typename F>
void PrefixTree::clear(F gone) {
  while (!roots_.empty()) {
    Node* const root = roots_.begin()->second;
    if (root->first_child == nullptr) {
      drop_empty_root(root);
    } else {
      // The last of these may take the root with it.
      remove(*root->first_child, gone);
    }
  }
}

}  // namespace torpor::kv
