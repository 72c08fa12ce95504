// PrefixMatch: the longest known prefix that a new sequence can go on from.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "torpor/kv/layout.hpp"
#include "torpor/kv/prefix_tree.hpp"

namespace torpor::kv {

struct PrefixMatch {
  std::vector<Node*> chain;     // whole blocks, first one first
  Node* tail = nullptr;         // a block that begins with what comes behind them …
  std::size_t tail_tokens = 0;  // … with so many tokens
  std::size_t tokens = 0;       // in all
};

// A prefix is usable where everything is there that its next token needs: every block in full attention, the
// sinks and the last window_tokens in a window, a snapshot at its very end in a state. At most `max_blocks`
// blocks. `partial`: the last one may be shared in part (never with states: they match exactly). Reads only.
[[nodiscard]] PrefixMatch longest_prefix(const PrefixTree& tree, const Layout& layout,
                                         const std::string& scope, std::span<const Token> tokens,
                                         std::size_t max_blocks, bool partial);

}  // namespace torpor::kv
