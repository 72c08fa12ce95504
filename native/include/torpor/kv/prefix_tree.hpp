// PrefixTree: which token blocks are known, and the page that holds each.
//
// A block is found by a 64-bit hash chained over (scope; tokens of all blocks up to it) and confirmed by
// comparing its parent and its own tokens, so that a collision costs time and never gives a wrong page. The
// first block's parent is the root of its scope: the scope is a security boundary, and blocks of two scopes
// never meet.
//
// A node without its parent could not be found: removing one removes everything below it.
// Not thread-safe; the owner of the pages has the lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "torpor/kv/page.hpp"
#include "torpor/kv/records.hpp"

namespace torpor::kv {

using Token = std::int32_t;

struct Node {
  Node* parent = nullptr;  // nullptr: this is a root
  Node* first_child = nullptr;
  Node* next_sibling = nullptr;
  Node* previous_sibling = nullptr;
  Node* next_in_bucket = nullptr;
  Page* page = nullptr;
  std::uint64_t hash = 0;
  std::uint64_t serial = 0;            // changes when the record is used for another block; 0 while unused
  std::vector<Token> tokens;           // tokens_per_block of them
  const std::string* scope = nullptr;  // a root's; else nullptr
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

  // The pages of the longest known chain of whole blocks that `tokens` begins with, first block first. Reads
  // only.
  [[nodiscard]] std::vector<Node*> match(const std::string& scope, std::span<const Token> tokens) const;
  // nullptr when unknown.
  [[nodiscard]] Node* find(const Node& parent, std::span<const Token> block) const noexcept;
  // The scope's root, made when there is none.
  [[nodiscard]] Node& root(const std::string& scope);
  // The block must be unknown below this parent. Sets page.node. May throw bad_alloc; then nothing changed.
  Node& insert(Node& parent, std::span<const Token> block, Page& page);
  // Removes the node and all below it, deepest first; each page's `node` is cleared before `gone(page)`.
  template <typename F>
  void remove(Node& node, F gone);
  // Removes everything.
  template <typename F>
  void clear(F gone);
  // Forgets the root of a scope that has no blocks; does nothing for other nodes.
  void drop_empty_root(Node* root) noexcept;

  [[nodiscard]] std::size_t blocks() const noexcept { return blocks_; }
  [[nodiscard]] std::size_t scopes() const noexcept { return roots_.size(); }

 private:
  [[nodiscard]] std::uint64_t chained_hash(std::uint64_t parent_hash,
                                           std::span<const Token> block) const noexcept;
  void grow_buckets();
  // Unlinks a leaf and gives its page.
  Page& take_out(Node& leaf) noexcept;

  std::size_t tokens_per_block_;
  std::uint64_t hash_mask_;
  std::unordered_map<std::string, Node*> roots_;
  Records<Node> nodes_;
  std::vector<Node*> buckets_;  // a power of two
  std::size_t blocks_ = 0;
  std::uint64_t last_serial_ = 0;
};

template <typename F>
void PrefixTree::remove(Node& node, F gone) {
  Node* const top = &node;
  Node* current = top;
  for (;;) {
    while (current->first_child != nullptr) current = current->first_child;
    Node* const parent = current->parent;
    const bool last = current == top;
    gone(take_out(*current));
    if (last) {
      drop_empty_root(parent);
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
      remove(*root->first_child, gone);
    }
  }
}

}  // namespace torpor::kv
