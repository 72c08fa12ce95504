#include "torpor/kv/layout.hpp"

#include <algorithm>
#include <set>

#include "torpor/device.hpp"
#include "torpor/errors.hpp"

namespace torpor::kv {
namespace {

constexpr std::size_t page_limit_bytes = std::size_t{1} << 30;
constexpr std::size_t life_cycle_limit = 64;
constexpr std::size_t layer_limit = 65'536;
// As much as the widest load of a kernel takes at once.
constexpr std::size_t buffer_alignment_bytes = 16;

std::string name_of(std::size_t layer) {
  return "layer " + std::to_string(layer);
}

std::size_t buffer_bytes(const BufferSpec& buffer, std::size_t tokens, const std::string& layer) {
  if (buffer.role.empty()) throw Misuse(layer + " has a buffer without a role; name it, e.g. \"k\"");
  if (buffer.shape.empty())
    throw Misuse(layer + ", \"" + buffer.role + "\": the shape is empty; give its sizes");
  std::size_t bytes = item_bytes(buffer.dtype) * tokens;
  for (const std::size_t size : buffer.shape) {
    if (size == 0)
      throw Misuse(layer + ", \"" + buffer.role + "\": every size in its shape must be at least 1");
    if (bytes > page_limit_bytes / size) {
      throw Misuse(layer + ": one page would be larger than 1 GiB; lower tokens_per_block");
    }
    bytes *= size;
  }
  return bytes;
}

void check_kind(const LayerSpec& layer, const std::string& name) {
  if (layer.buffers.empty()) throw Misuse(name + " has no buffers; give it at least one");
  const bool window = layer.kind == LayerKind::window;
  if (window && layer.window_tokens == 0) throw Misuse(name + " slides over no tokens; give it a window");
  if (!window && (layer.window_tokens != 0 || layer.sink_tokens != 0)) {
    throw Misuse(name + " has a window or sinks but is of kind \"" + to_string(layer.kind) +
                 "\"; only \"window\" layers have them");
  }
  std::set<std::string> roles;
  for (const BufferSpec& buffer : layer.buffers) {
    if (!roles.insert(buffer.role).second)
      throw Misuse(name + " has two buffers with role \"" + buffer.role + "\"");
  }
}

}  // namespace

LayerKind parse_layer_kind(const std::string& text) {
  for (const LayerKind kind : {LayerKind::full, LayerKind::window, LayerKind::state}) {
    if (text == to_string(kind)) return kind;
  }
  throw Misuse("kind '" + text + "' does not exist; use \"full\", \"window\" or \"state\"");
}

const char* to_string(LayerKind kind) noexcept {
  switch (kind) {
    case LayerKind::full:
      return "full";
    case LayerKind::window:
      return "window";
    case LayerKind::state:
      return "state";
  }
  return "?";
}

DType parse_dtype(const std::string& text) {
  if (text == "float32") return DType::float32;
  if (text == "float16") return DType::float16;
  if (text == "bfloat16") return DType::bfloat16;
  if (text == "uint8") return DType::uint8;
  throw Misuse("dtype '" + text + "' is not supported; use float32, float16, bfloat16 or uint8");
}

std::size_t item_bytes(DType dtype) noexcept {
  switch (dtype) {
    case DType::float32:
      return 4;
    case DType::float16:
    case DType::bfloat16:
      return 2;
    case DType::uint8:
      return 1;
  }
  return 1;
}

Layout::Layout(std::vector<LayerSpec> layers, std::size_t tokens_per_block)
    : tokens_per_block_(tokens_per_block), layers_(std::move(layers)) {
  if (layers_.empty()) throw Misuse("a KV cache needs at least one layer");
  if (layers_.size() > layer_limit)
    throw Misuse("more than 65,536 layers; say how many the model really has");
  if (tokens_per_block == 0) throw Misuse("tokens_per_block must be at least 1");
  if (tokens_per_block > page_limit_bytes)
    throw Misuse("one page would be larger than 1 GiB; lower tokens_per_block");
  for (std::size_t index = 0; index < layers_.size(); ++index) {
    const LayerSpec& layer = layers_[index];
    check_kind(layer, name_of(index));
    LifeCycle wanted{.kind = layer.kind,
                     .window_tokens = layer.window_tokens,
                     .sink_tokens = layer.sink_tokens,
                     .layers = {}};
    auto cycle =
        std::ranges::find_if(life_cycles_, [&](const LifeCycle& one) { return one.same_kind(wanted); });
    if (cycle == life_cycles_.end()) {
      if (life_cycles_.size() == life_cycle_limit) {
        throw Misuse("more than " + std::to_string(life_cycle_limit) + " kinds of layers; use fewer windows");
      }
      cycle = life_cycles_.insert(life_cycles_.end(), std::move(wanted));
    }
    cycle->layers.push_back(index);
    auto& places = places_.emplace_back();
    const std::size_t tokens = layer.kind == LayerKind::state ? 1 : tokens_per_block;
    for (const BufferSpec& buffer : layer.buffers) {
      const std::size_t bytes = buffer_bytes(buffer, tokens, name_of(index));
      places.push_back({.buffer = nullptr,
                        .life_cycle = static_cast<std::size_t>(cycle - life_cycles_.begin()),
                        .offset_bytes = cycle->page_bytes,
                        .size_bytes = bytes});
      cycle->page_bytes = round_up(cycle->page_bytes + bytes, buffer_alignment_bytes);
      if (cycle->page_bytes > page_limit_bytes) {
        throw Misuse("one page would be larger than 1 GiB; lower tokens_per_block");
      }
    }
  }
  for (std::size_t index = 0; index < life_cycles_.size(); ++index) {
    LifeCycle& cycle = life_cycles_[index];
    auto group = std::ranges::find(groups_, cycle.page_bytes, &PoolGroup::page_bytes);
    if (group == groups_.end()) {
      group = groups_.insert(groups_.end(), PoolGroup{.page_bytes = cycle.page_bytes, .life_cycles = {}});
    }
    cycle.group = static_cast<std::size_t>(group - groups_.begin());
    group->life_cycles.push_back(index);
  }
}

Layout Layout::uniform(std::size_t layers, std::size_t kv_heads, std::size_t head_dim, DType dtype,
                       std::size_t tokens_per_block) {
  if (layers == 0 || kv_heads == 0 || head_dim == 0 || tokens_per_block == 0) {
    throw Misuse("layers, kv_heads, head_dim and tokens_per_block must be at least 1");
  }
  if (layers > layer_limit) throw Misuse("more than 65,536 layers; say how many the model really has");
  const LayerSpec layer{.buffers = {{"k", {kv_heads, head_dim}, dtype}, {"v", {kv_heads, head_dim}, dtype}}};
  return {std::vector<LayerSpec>(layers, layer), tokens_per_block};
}

bool Layout::has(LayerKind kind) const noexcept {
  return std::ranges::any_of(life_cycles_, [kind](const LifeCycle& one) { return one.kind == kind; });
}

Placement Layout::place(std::size_t layer, const std::string& role) const {
  if (layer >= layers_.size()) {
    throw Misuse(name_of(layer) + " does not exist; there are " + std::to_string(layers_.size()));
  }
  std::string roles;
  for (std::size_t index = 0; index < layers_[layer].buffers.size(); ++index) {
    const BufferSpec& buffer = layers_[layer].buffers[index];
    if (buffer.role == role) {
      Placement found = places_[layer][index];
      found.buffer = &buffer;
      found.group = life_cycles_[found.life_cycle].group;
      return found;
    }
    roles += (roles.empty() ? "\"" : ", \"") + buffer.role + "\"";
  }
  throw Misuse("role '" + role + "' does not exist in " + name_of(layer) + "; use one of " + roles);
}

double Layout::demand_bytes(const PoolGroup& group, std::size_t sequence_tokens) const noexcept {
  double bytes = 0;
  for (const std::size_t index : group.life_cycles) {
    const LifeCycle& cycle = life_cycles_[index];
    const std::size_t blocks = std::max<std::size_t>(1, sequence_tokens / tokens_per_block_);
    const std::size_t kept = (cycle.window_tokens + cycle.sink_tokens) / tokens_per_block_ + 2;
    const std::size_t pages = cycle.kind == LayerKind::state    ? 2
                              : cycle.kind == LayerKind::window ? std::min(blocks, kept)
                                                                : blocks;
    bytes += static_cast<double>(pages) * static_cast<double>(cycle.page_bytes);
  }
  return bytes;
}

std::vector<std::size_t> Layout::divide(std::size_t total_bytes, std::size_t sequence_tokens,
                                        std::size_t granule_bytes) const {
  if (groups_.size() == 1) return {total_bytes};
  double demand = 0;
  for (const PoolGroup& group : groups_) demand += demand_bytes(group, sequence_tokens);
  std::vector<std::size_t> parts;
  std::vector<std::size_t> least;
  std::size_t taken = 0;
  for (const PoolGroup& group : groups_) {
    least.push_back(round_up(group.page_bytes, granule_bytes));
    const double share = demand_bytes(group, sequence_tokens) / demand * static_cast<double>(total_bytes);
    parts.push_back(std::max(least.back(), static_cast<std::size_t>(share) / granule_bytes * granule_bytes));
    taken += parts.back();
  }
  while (taken > total_bytes) {
    std::size_t richest = 0;
    for (std::size_t group = 1; group < parts.size(); ++group) {
      if (parts[group] - least[group] > parts[richest] - least[richest]) richest = group;
    }
    if (parts[richest] == least[richest]) {
      throw Misuse("gpu_bytes is " + std::to_string(total_bytes) +
                   ", but one page of each kind of layer takes " + std::to_string(taken) +
                   " bytes in whole granules; raise gpu_bytes");
    }
    parts[richest] -= granule_bytes;
    taken -= granule_bytes;
  }
  *std::ranges::max_element(parts) += (total_bytes - taken) / granule_bytes * granule_bytes;
  return parts;
}

}  // namespace torpor::kv
