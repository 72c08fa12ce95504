#include "torpor/kv/prefix_tree.hpp"

#include <algorithm>
#include <array>
#include <cassert>
#include <utility>

namespace torpor::kv {
namespace {

constexpr std::size_t first_buckets = 64;

constexpr std::size_t first_window = 4, max_window = 64;

// Multiply and fold: cheap, and every input bit reaches every output bit after two rounds.
std::uint64_t mix(std::uint64_t hash, std::uint64_t value) noexcept {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ULL;
  return hash ^ (hash >> 29);
}

std::uint64_t bits(Token token) noexcept {
  return static_cast<std::uint32_t>(token);
}

}  // namespace

PrefixTree::PrefixTree(std::size_t tokens_per_block, std::uint64_t hash_mask)
    : tokens_per_block_(tokens_per_block), hash_mask_(hash_mask), buckets_(first_buckets, nullptr) {}

std::uint64_t PrefixTree::chained_hash(std::uint64_t parent_hash,
                                       std::span<const Token> block) const noexcept {
  std::uint64_t hash = parent_hash;
  std::size_t at = 0;
  for (; at + 1 < block.size(); at += 2) hash = mix(hash, bits(block[at]) << 32 | bits(block[at + 1]));
  if (at < block.size()) hash = mix(hash, bits(block[at]));
  return mix(hash, block.size()) & hash_mask_;
}

std::vector<Node*> PrefixTree::match(const std::string& scope, std::span<const Token> tokens) const {
  std::vector<Node*> chain;
  const auto known = roots_.find(scope);
  if (known == roots_.end()) return chain;
  const Node* parent = known->second;
  // In a large tree nearly every step is a cache miss. The hashes of blocks ahead need no node, so that the
  // misses of a whole window overlap; it grows with the match, since an unknown prompt ends in the first.
  std::array<std::uint64_t, max_window> hashes{};
  std::array<Node*, max_window> nodes{};
  for (std::size_t window = first_window; tokens.size() >= tokens_per_block_;
       window = std::min(2 * window, max_window)) {
    const std::size_t blocks = std::min(window, tokens.size() / tokens_per_block_);
    const auto block = [&](std::size_t at) {
      return tokens.subspan(at * tokens_per_block_, tokens_per_block_);
    };
    std::uint64_t hash = parent->hash;
    for (std::size_t at = 0; at < blocks; ++at) {
      hashes[at] = hash = chained_hash(hash, block(at));
      __builtin_prefetch(&bucket(hash));
    }
    for (std::size_t at = 0; at < blocks; ++at) __builtin_prefetch(nodes[at] = bucket(hashes[at]));
    for (std::size_t at = 0; at < blocks; ++at) {
      if (nodes[at] == nullptr) continue;
      __builtin_prefetch(nodes[at]->tokens.data());
      __builtin_prefetch(&nodes[at]->tokens.back());
    }
    for (std::size_t at = 0; at < blocks; ++at) {
      Node* const node = confirmed(nodes[at], *parent, hashes[at], block(at));
      if (node == nullptr) return chain;
      chain.push_back(node);
      parent = node;
    }
    tokens = tokens.subspan(blocks * tokens_per_block_);
  }
  return chain;
}

Node* PrefixTree::find(const Node& parent, std::span<const Token> block) const noexcept {
  const std::uint64_t hash = chained_hash(parent.hash, block);
  return confirmed(bucket(hash), parent, hash, block);
}

Node* PrefixTree::confirmed(Node* first, const Node& parent, std::uint64_t hash,
                            std::span<const Token> block) noexcept {
  for (Node* node = first; node != nullptr; node = node->next_in_bucket) {
    if (node->hash == hash && node->parent == &parent && std::ranges::equal(node->tokens, block)) return node;
  }
  return nullptr;
}

Node& PrefixTree::root(const std::string& scope) {
  const auto known = roots_.find(scope);
  if (known != roots_.end()) return *known->second;
  Node& fresh = nodes_.take();
  try {
    fresh.scope = &roots_.emplace(scope, &fresh).first->first;
  } catch (...) {
    nodes_.give_back(fresh);
    throw;
  }
  fresh.serial = ++last_serial_;
  fresh.hash = root_hash(scope);
  fresh.pages.clear();
  return fresh;
}

// Not std::hash: other processes must come to the same number.
std::uint64_t PrefixTree::root_hash(const std::string& scope) const noexcept {
  std::uint64_t hash = 0;
  for (const char byte : scope) hash = mix(hash, static_cast<unsigned char>(byte));
  return mix(hash, scope.size()) & hash_mask_;
}

std::vector<std::uint64_t> PrefixTree::hashes(const std::string& scope, std::span<const Token> tokens) const {
  std::vector<std::uint64_t> found;
  std::uint64_t hash = root_hash(scope);
  for (; tokens.size() >= tokens_per_block_; tokens = tokens.subspan(tokens_per_block_)) {
    hash = chained_hash(hash, tokens.first(tokens_per_block_));
    found.push_back(hash);
  }
  return found;
}

Node& PrefixTree::insert(Node& parent, std::span<const Token> block, std::span<Page* const> pages) {
  assert(!block.empty() && block.size() <= tokens_per_block_ && find(parent, block) == nullptr);
  if (2 * blocks_ >= buckets_.size()) grow_buckets();
  Node& node = nodes_.take();
  try {
    node.tokens.assign(block.begin(), block.end());
    node.pages.assign(pages.begin(), pages.end());
  } catch (...) {
    nodes_.give_back(node);
    throw;
  }
  node.last_tier = Tier::gpu;
  node.serial = ++last_serial_;
  node.hash = chained_hash(parent.hash, block);
  for (Page* page : pages) {
    assert(page == nullptr || page->node == nullptr);
    if (page != nullptr) page->node = &node;
  }
  node.parent = &parent;
  node.next_sibling = parent.first_child;
  if (parent.first_child != nullptr) parent.first_child->previous_sibling = &node;
  parent.first_child = &node;
  Node*& bucket = buckets_[node.hash & (buckets_.size() - 1)];
  node.next_in_bucket = bucket;
  bucket = &node;
  ++blocks_;
  tokens_ += block.size();
  if (listener_ != nullptr) listener_->stored(node);
  return node;
}

void PrefixTree::attach(Node& node, Page& page) {
  assert(page.node == nullptr && node.page(page.life_cycle) == nullptr);
  if (node.pages.size() <= page.life_cycle) node.pages.resize(page.life_cycle + std::size_t{1}, nullptr);
  node.pages[page.life_cycle] = &page;
  page.node = &node;
}

void PrefixTree::detach(Page& page) noexcept {
  Node* const node = std::exchange(page.node, nullptr);
  node->pages[page.life_cycle] = nullptr;
  node->last_tier = page.tier;
  prune(node);
}

void PrefixTree::prune(Node* node) noexcept {
  while (node->scope == nullptr && node->first_child == nullptr && !node->has_pages()) {
    Node* const parent = node->parent;
    take_out(*node);
    node = parent;
  }
  drop_empty_root(node);
}

void PrefixTree::take_out(Node& leaf) noexcept {
  assert(leaf.first_child == nullptr && leaf.parent != nullptr && !leaf.has_pages());
  if (listener_ != nullptr) listener_->removed(leaf);
  Node** link = &buckets_[leaf.hash & (buckets_.size() - 1)];
  while (*link != &leaf) link = &(*link)->next_in_bucket;
  *link = leaf.next_in_bucket;
  (leaf.previous_sibling != nullptr ? leaf.previous_sibling->next_sibling : leaf.parent->first_child) =
      leaf.next_sibling;
  if (leaf.next_sibling != nullptr) leaf.next_sibling->previous_sibling = leaf.previous_sibling;
  leaf.parent = leaf.next_sibling = leaf.previous_sibling = leaf.next_in_bucket = nullptr;
  leaf.serial = 0;
  nodes_.give_back(leaf);
  --blocks_;
  tokens_ -= leaf.tokens.size();
}

void PrefixTree::drop_empty_root(Node* root) noexcept {
  if (root->scope == nullptr || root->first_child != nullptr) return;
  roots_.erase(roots_.find(*root->scope));
  root->scope = nullptr;
  root->serial = 0;
  nodes_.give_back(*root);
}

void PrefixTree::grow_buckets() {
  decltype(buckets_) larger(buckets_.size() * 2, nullptr);
  for (Node* node : buckets_) {
    while (node != nullptr) {
      Node* const next = node->next_in_bucket;
      Node*& bucket = larger[node->hash & (larger.size() - 1)];
      node->next_in_bucket = bucket;
      bucket = node;
      node = next;
    }
  }
  buckets_.swap(larger);
}

}  // namespace torpor::kv
