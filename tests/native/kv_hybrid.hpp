// A cache of three kinds of layers: full attention and a sliding window that share a pool, and a state with
// its own. Every token's row, and every state, carries a pattern that follows from the scope and all tokens
// up to it.
#pragma once

#include "kv_rig.hpp"

namespace kv_hybrid {

using kv_rig::block;
using kv_rig::granule_bytes;
using kv_rig::Tokens;
using kv_rig::tokens_from;
using torpor::Address;
using torpor::kv::KvManager;
using torpor::kv::LayerKind;
using torpor::kv::no_slot;
using torpor::kv::Sequence;
using torpor::kv::SequenceState;
using torpor::kv::Token;

// Of a page of attention: a token's row, and a state.
inline const std::size_t row_bytes = kv_rig::page_bytes / block;
inline const std::size_t state_bytes = kv_rig::page_bytes / 2;

constexpr std::size_t window = 6;
constexpr std::size_t sinks = 3;  // the first block

struct Options {
  std::vector<LayerKind> kinds{LayerKind::full, LayerKind::window, LayerKind::state};
  std::size_t gpu_slots = 24;  // of 8 KiB
  std::size_t host_slots = 0;
  double max_utilisation = 1;
  bool partial_blocks = false;
  std::size_t event_count = 1024;
  std::size_t max_sequence_tokens = 256;
  std::size_t sequence_tokens = 32;
  std::size_t disk_slots = 0;
  std::size_t cold_gpu_slots = 0;
};

inline torpor::kv::Layout layout_of(const std::vector<LayerKind>& kinds) {
  using torpor::kv::DType;
  std::vector<torpor::kv::LayerSpec> layers;
  for (const LayerKind kind : kinds) {
    if (kind == LayerKind::full)
      layers.push_back({.kind = kind, .buffers = {{"k", {row_bytes / 4}, DType::float32}}});
    if (kind == LayerKind::window) {
      layers.push_back({.kind = kind,
                        .window_tokens = window,
                        .sink_tokens = sinks,
                        .buffers = {{"k", {2, row_bytes / 8}, DType::float32}}});
    }
    if (kind == LayerKind::state)
      layers.push_back({.kind = kind, .buffers = {{"ssm", {state_bytes / 4}, DType::float32}}});
  }
  return {layers, block};
}

struct Tracked {
  std::shared_ptr<Sequence> handle;
  std::string scope;
  Tokens tokens;
};

class Rig : public KvTransactions<Rig> {
 public:
  explicit Rig(const Options& options = {})
      : near(test_device::make(granule_bytes, 16, 1)),
        memory(near),
        scarce(std::make_shared<kv_rig::ScarceDevice>(near)),
        device(torpor::make_faulty_device(scarce)),
        ledger(std::make_unique<torpor::Ledger>(device, 0)) {
    torpor::kv::KvSpec spec;
    spec.layout = layout_of(options.kinds);
    spec.gpu_bytes = options.gpu_slots * kv_rig::page_bytes;
    spec.host_bytes = options.host_slots * kv_rig::page_bytes;
    spec.seed = 5;
    spec.max_utilisation = options.max_utilisation;
    spec.partial_blocks = options.partial_blocks;
    spec.event_count = options.event_count;
    spec.max_sequence_tokens = options.max_sequence_tokens;
    spec.sequence_tokens = options.sequence_tokens;
    spec.disk_bytes = options.disk_slots * kv_rig::page_bytes;
    if (options.disk_slots > 0) spec.disk_path = std::filesystem::temp_directory_path().string();
    spec.cold_gpu_bytes = options.cold_gpu_slots * kv_rig::page_bytes;
    kv = KvManager::make(device, ledger->host_pool(), std::move(spec));
    ledger->add(kv);
  }

  std::shared_ptr<torpor::Device> near;  // past all wrappers
  mutable test_device::Memory memory;
  std::shared_ptr<kv_rig::ScarceDevice> scarce;
  std::shared_ptr<torpor::FaultyDevice> device;
  std::unique_ptr<torpor::Ledger> ledger;
  std::shared_ptr<KvManager> kv;

  [[nodiscard]] std::size_t free_bytes() const { return device->memory_info().free_bytes; }
  [[nodiscard]] const torpor::kv::LifeCycle& cycle(std::size_t index) const {
    return kv->layout().life_cycles()[index];
  }
  [[nodiscard]] std::size_t cycles() const { return kv->layout().life_cycles().size(); }

  [[nodiscard]] Tracked create(const std::string& scope, const Tokens& prompt) {
    Tracked one{kv->create_sequence(scope, prompt), scope, {}};
    one.tokens.assign(prompt.begin(),
                      prompt.begin() + static_cast<std::ptrdiff_t>(one.handle->matched_tokens()));
    return one;
  }

  // Computes these tokens in one step: room, rows, states, commit. False when there is no room.
  [[nodiscard]] bool extend(Tracked& one, const Tokens& tokens) {
    const std::size_t before = one.tokens.size();
    if (!one.handle->resize(before + tokens.size())) return false;
    one.tokens.insert(one.tokens.end(), tokens.begin(), tokens.end());
    for (std::size_t index = 0; index < cycles(); ++index) {
      const auto table = one.handle->table(index);
      if (cycle(index).kind == LayerKind::state) {
        write(index, table[0], 0, state_bytes, one, one.tokens.size());
        continue;
      }
      for (std::size_t at = before; at < one.tokens.size(); ++at) {
        const std::int32_t slot = table[static_cast<std::ptrdiff_t>(at / block)];
        write(index, slot, at % block * row_bytes, row_bytes, one, at + 1);
      }
    }
    one.handle->commit(tokens);
    return true;
  }

  [[nodiscard]] Tracked started(const std::string& scope, const Tokens& prompt) {
    Tracked one = create(scope, prompt);
    CHECK(one.handle->resume());
    CHECK(extend(one, Tokens(prompt.begin() + static_cast<std::ptrdiff_t>(one.tokens.size()), prompt.end())));
    return one;
  }

  // Of an active sequence: every row that its next token may look at, and every state.
  [[nodiscard]] bool holds(const Tracked& one) const {
    if (one.handle->state() != SequenceState::active || one.handle->history_tokens() != one.tokens.size())
      return false;
    for (std::size_t index = 0; index < cycles(); ++index) {
      const auto table = one.handle->table(index);
      if (cycle(index).kind == LayerKind::state) {
        if (table[0] == no_slot) return false;
        if (one.tokens.empty() ? !zero(index, table[0])
                               : !reads(index, table[0], 0, state_bytes, one, one.tokens.size()))
          return false;
        continue;
      }
      for (std::size_t at = 0; at < one.tokens.size(); ++at) {
        const std::int32_t slot = table[static_cast<std::ptrdiff_t>(at / block)];
        if (cycle(index).stale(at / block, one.tokens.size(), block)) {
          if (slot != no_slot) return false;
        } else if (slot == no_slot || !reads(index, slot, at % block * row_bytes, row_bytes, one, at + 1)) {
          return false;
        }
      }
    }
    return true;
  }
  [[nodiscard]] bool all_zero(const Tracked& one) const {
    for (std::size_t index = 0; index < cycles(); ++index) {
      const auto table = one.handle->table(index);
      for (std::size_t at = 0; at < one.handle->table_entries(index); ++at) {
        const std::int32_t slot = table[static_cast<std::ptrdiff_t>(at)];
        if (slot != no_slot && !zero(index, slot)) return false;
      }
    }
    return true;
  }

 private:
  [[nodiscard]] Address address(std::size_t index, std::int32_t slot, std::size_t offset) const {
    const std::size_t layer = cycle(index).layers[0];
    CHECK(slot >= 0 && static_cast<std::size_t>(slot) < kv->slots(cycle(index).group));
    const std::string role = cycle(index).kind == LayerKind::state ? "ssm" : "k";
    return kv->address(layer, role) + offset + static_cast<std::size_t>(slot) * cycle(index).page_bytes;
  }
  [[nodiscard]] static std::uint64_t pattern(std::size_t index, const Tracked& one, std::size_t tokens) {
    return kv_rig::pattern_of(one.scope, std::span(one.tokens).first(tokens)) + index;
  }
  [[nodiscard]] static std::vector<std::uint64_t> words(std::size_t index, std::size_t bytes,
                                                        const Tracked& one, std::size_t tokens) {
    const std::uint64_t wanted = pattern(index, one, tokens);
    std::vector<std::uint64_t> all(bytes / 8);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = kv_rig::word_of(wanted, i);
    return all;
  }
  void write(std::size_t index, std::int32_t slot, std::size_t offset, std::size_t bytes, const Tracked& one,
             std::size_t tokens) {
    memory.write(address(index, slot, offset), words(index, bytes, one, tokens).data(), bytes);
  }
  [[nodiscard]] bool reads(std::size_t index, std::int32_t slot, std::size_t offset, std::size_t bytes,
                           const Tracked& one, std::size_t tokens) const {
    return memory.holds(address(index, slot, offset), words(index, bytes, one, tokens).data(), bytes);
  }
  [[nodiscard]] bool zero(std::size_t index, std::int32_t slot) const {
    return memory.is_zero(address(index, slot, 0), cycle(index).page_bytes);
  }
};

}  // namespace kv_hybrid
