#include "torpor/kv/prefix_match.hpp"

#include <algorithm>

namespace torpor::kv {
namespace {

// Of a life cycle with a page a block, after `tokens` tokens that lie in the chain and then the tail.
bool has_every_page(const LifeCycle& cycle, std::size_t index, std::span<Node* const> chain, const Node* tail,
                    std::size_t tokens, std::size_t tokens_per_block) {
  if (tail != nullptr && tail->page(index) == nullptr) return false;
  if (cycle.kind == LayerKind::full) return true;  // a block without this page is not in the tree
  const auto has = [&](std::size_t block) { return chain[block]->page(index) != nullptr; };
  const std::size_t sinks = std::min(cycle.first_stale_block(tokens_per_block), chain.size());
  for (std::size_t block = 0; block < sinks; ++block) {
    if (!has(block)) return false;
  }
  for (std::size_t block = std::max(sinks, cycle.stale_end(tokens, tokens_per_block)); block < chain.size();
       ++block) {
    if (!has(block)) return false;
  }
  return true;
}

bool usable(const Layout& layout, std::span<Node* const> chain, const Node* tail, std::size_t tokens) {
  for (std::size_t index = 0; index < layout.life_cycles().size(); ++index) {
    const LifeCycle& cycle = layout.life_cycles()[index];
    if (cycle.kind == LayerKind::state) {
      if (tail != nullptr || (!chain.empty() && chain.back()->page(index) == nullptr)) return false;
    } else if (!has_every_page(cycle, index, chain, tail, tokens, layout.tokens_per_block())) {
      return false;
    }
  }
  return true;
}

}  // namespace

PrefixMatch longest_prefix(const PrefixTree& tree, const Layout& layout, const std::string& scope,
                           std::span<const Token> tokens, std::size_t max_blocks, bool partial) {
  PrefixMatch found;
  std::vector<Node*> chain = tree.match(scope, tokens);
  if (chain.size() > max_blocks) chain.resize(max_blocks);
  const std::size_t size = layout.tokens_per_block();
  for (std::size_t blocks = chain.size();; --blocks) {
    const auto head = std::span(chain).first(blocks);
    const Node* above = blocks > 0 ? chain[blocks - 1] : tree.known_root(scope);
    if (partial && blocks < max_blocks && above != nullptr) {
      const auto rest = tokens.subspan(blocks * size, std::min(size, tokens.size() - blocks * size));
      const auto [node, shared] = tree.longest_shared(*above, rest, [&](const Node& tail) {
        // With as few tokens as one a window wants no less than with more.
        return usable(layout, head, &tail, blocks * size + 1);
      });
      if (node != nullptr) {
        found.tail = node;
        found.tail_tokens = shared;
        found.tokens = blocks * size + shared;
        found.chain.assign(head.begin(), head.end());
        return found;
      }
    }
    if (blocks == 0) return found;
    if (usable(layout, head, nullptr, blocks * size)) {
      found.chain.assign(head.begin(), head.end());
      found.tokens = blocks * size;
      return found;
    }
  }
}

}  // namespace torpor::kv
