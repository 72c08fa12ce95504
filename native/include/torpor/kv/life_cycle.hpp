// LifeCycle: what becomes of the pages of layers of one kind.
//
//   full    every block of a sequence keeps its page
//   window  blocks that hold neither a sink nor one of the last window_tokens of the history are stale: their
//           pages go back
//   state   one page a sequence, written over and over; snapshots of it belong to block borders
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torpor::kv {

enum class LayerKind : std::uint8_t { full, window, state };

// Misuse that lists the kinds.
[[nodiscard]] LayerKind parse_layer_kind(const std::string& text);
[[nodiscard]] const char* to_string(LayerKind kind) noexcept;

struct LifeCycle {
  LayerKind kind = LayerKind::full;
  std::size_t window_tokens = 0;
  std::size_t sink_tokens = 0;      // the first tokens of a sequence, which a window keeps
  std::vector<std::size_t> layers;  // in order
  std::size_t page_bytes = 0;
  std::size_t group = 0;

  [[nodiscard]] bool same_kind(const LifeCycle& other) const noexcept {
    return kind == other.kind && window_tokens == other.window_tokens && sink_tokens == other.sink_tokens;
  }
  // Blocks before this one, from first_stale_block() on, are stale once this many tokens are computed.
  [[nodiscard]] std::size_t stale_end(std::size_t history_tokens,
                                      std::size_t tokens_per_block) const noexcept {
    if (kind != LayerKind::window || history_tokens <= window_tokens) return 0;
    return (history_tokens - window_tokens) / tokens_per_block;
  }
  [[nodiscard]] std::size_t first_stale_block(std::size_t tokens_per_block) const noexcept {
    return sink_tokens / tokens_per_block + (sink_tokens % tokens_per_block != 0 ? 1 : 0);
  }
  [[nodiscard]] bool stale(std::size_t block, std::size_t history_tokens,
                           std::size_t tokens_per_block) const noexcept {
    return block >= first_stale_block(tokens_per_block) &&
           block < stale_end(history_tokens, tokens_per_block);
  }
};

}  // namespace torpor::kv
