// Layout: where K and V of each layer lie inside one slot.
//
// One slot holds all layers of one token block, so that a page moves as one copy:
//   slot = [layer 0: K, V][layer 1: K, V] …, each K or V = [tokens_per_block][kv_heads][head_dim] elements.
// A view of one (layer, role) over all slots is strided: neighbouring slots are page_bytes apart.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace torpor::kv {

enum class DType : std::uint8_t { float32, float16, bfloat16 };
enum class Role : std::uint8_t { k, v };

// Both throw Misuse that lists what is allowed.
[[nodiscard]] DType parse_dtype(const std::string& text);
[[nodiscard]] Role parse_role(const std::string& text);
[[nodiscard]] std::size_t item_bytes(DType dtype) noexcept;

struct Layout {
  std::size_t layers;
  std::size_t kv_heads;
  std::size_t head_dim;
  DType dtype;
  std::size_t tokens_per_block;

  // Misuse when a number is 0 or the page would be larger than 1 GiB.
  void check() const;
  // Bytes of one role of one layer in one slot.
  [[nodiscard]] std::size_t part_bytes() const noexcept;
  [[nodiscard]] std::size_t page_bytes() const noexcept { return part_bytes() * 2 * layers; }
  // Misuse when there is no such layer.
  [[nodiscard]] std::size_t offset_bytes(std::size_t layer, Role role) const;
};

}  // namespace torpor::kv
