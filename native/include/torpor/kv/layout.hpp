// Layout: where each buffer of each layer lies inside a slot, and which layers share one.
//
// Layers of one kind form a life cycle. All its layers of one token block (or of one state) lie in one slot,
// so that a page moves as one copy; every buffer begins at a multiple of 16 bytes:
//   slot = [layer 0: buffer, buffer …][layer 1: …] …
//   a buffer of full and window layers = [tokens_per_block][shape …] elements, of state layers = [shape …]
// Life cycles whose slots have the same size share a pool group, and any slot of it serves any of them. A
// view of one buffer over all slots of its group is strided: neighbouring slots are page_bytes apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "torpor/kv/life_cycle.hpp"

namespace torpor::kv {

enum class DType : std::uint8_t { float32, float16, bfloat16, uint8 };

// Misuse that lists what is allowed.
[[nodiscard]] DType parse_dtype(const std::string& text);
[[nodiscard]] std::size_t item_bytes(DType dtype) noexcept;

struct BufferSpec {
  std::string role;                // "k", "v", "conv", … ; unique within its layer
  std::vector<std::size_t> shape;  // of one token; of the whole state in state layers
  DType dtype = DType::float16;
};

struct LayerSpec {
  LayerKind kind = LayerKind::full;
  std::size_t window_tokens = 0;  // window layers only
  std::size_t sink_tokens = 0;    // window layers only
  std::vector<BufferSpec> buffers;
};

struct PoolGroup {
  std::size_t page_bytes = 0;
  std::vector<std::size_t> life_cycles;
};

// Where a buffer is.
struct Placement {
  const BufferSpec* buffer = nullptr;
  std::size_t life_cycle = 0;
  std::size_t group = 0;
  std::size_t offset_bytes = 0;  // in every slot of the group
  std::size_t size_bytes = 0;
};

class Layout final {
 public:
  Layout() = default;
  // Misuse with a word on what to change: nothing declared, a number that is 0, a role twice in one layer, a
  // window where there is none, a page larger than 1 GiB.
  Layout(std::vector<LayerSpec> layers, std::size_t tokens_per_block);
  // The short form: full attention, K and V of kv_heads × head_dim in every layer.
  [[nodiscard]] static Layout uniform(std::size_t layers, std::size_t kv_heads, std::size_t head_dim,
                                      DType dtype, std::size_t tokens_per_block);

  [[nodiscard]] std::size_t tokens_per_block() const noexcept { return tokens_per_block_; }
  [[nodiscard]] const std::vector<LayerSpec>& layers() const noexcept { return layers_; }
  [[nodiscard]] const std::vector<LifeCycle>& life_cycles() const noexcept { return life_cycles_; }
  [[nodiscard]] const std::vector<PoolGroup>& groups() const noexcept { return groups_; }
  [[nodiscard]] bool has(LayerKind kind) const noexcept;
  // Misuse when there is no such layer or role.
  [[nodiscard]] Placement place(std::size_t layer, const std::string& role) const;
  // The bytes of each group when sequences of this many tokens share total_bytes: in proportion to what one
  // of them takes there (a state counts twice: a snapshot stands beside it), in multiples of granule_bytes,
  // and at least room for one page each. Misuse when not even that fits.
  [[nodiscard]] std::vector<std::size_t> divide(std::size_t total_bytes, std::size_t sequence_tokens,
                                                std::size_t granule_bytes) const;

 private:
  [[nodiscard]] double demand_bytes(const PoolGroup& group, std::size_t sequence_tokens) const noexcept;

  std::size_t tokens_per_block_ = 0;
  std::vector<LayerSpec> layers_;
  std::vector<std::vector<Placement>> places_;  // by layer; `buffer` is set by place()
  std::vector<LifeCycle> life_cycles_;
  std::vector<PoolGroup> groups_;
};

}  // namespace torpor::kv
