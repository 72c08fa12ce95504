#include "torpor/kv/layout.hpp"

#include "torpor/errors.hpp"

namespace torpor::kv {
namespace {

constexpr std::size_t page_limit_bytes = std::size_t{1} << 30;

// a * b, or 0 when it would pass the limit; 0 stays 0.
std::size_t bounded_product(std::size_t a, std::size_t b) noexcept {
  return (a == 0 || b > page_limit_bytes / a) ? 0 : a * b;
}

}  // namespace

DType parse_dtype(const std::string& text) {
  if (text == "float32") return DType::float32;
  if (text == "float16") return DType::float16;
  if (text == "bfloat16") return DType::bfloat16;
  throw Misuse("dtype '" + text + "' is not supported; use float32, float16 or bfloat16");
}

Role parse_role(const std::string& text) {
  if (text == "k") return Role::k;
  if (text == "v") return Role::v;
  throw Misuse("role '" + text + "' does not exist; use \"k\" or \"v\"");
}

std::size_t item_bytes(DType dtype) noexcept {
  return dtype == DType::float32 ? 4 : 2;
}

void Layout::check() const {
  std::size_t bytes = 2 * item_bytes(dtype);
  for (const std::size_t factor : {layers, kv_heads, head_dim, tokens_per_block}) {
    if (factor == 0) throw Misuse("layers, kv_heads, head_dim and tokens_per_block must be at least 1");
    bytes = bounded_product(bytes, factor);
    if (bytes == 0) throw Misuse("one page would be larger than 1 GiB; lower tokens_per_block");
  }
}

std::size_t Layout::part_bytes() const noexcept {
  return tokens_per_block * kv_heads * head_dim * item_bytes(dtype);
}

std::size_t Layout::offset_bytes(std::size_t layer, Role role) const {
  if (layer >= layers) {
    throw Misuse("layer " + std::to_string(layer) + " does not exist; there are " + std::to_string(layers));
  }
  return (2 * layer + (role == Role::v ? 1 : 0)) * part_bytes();
}

}  // namespace torpor::kv
