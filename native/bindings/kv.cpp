#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <memory>
#include <utility>

#include "bindings.hpp"
#include "owner.hpp"
#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace torpor {
namespace {

using kv::KvManager;
using Tokens = std::vector<kv::Token>;
using Counts = nb::typed<nb::dict, nb::str, nb::int_>;

nb::dlpack::dtype dlpack_dtype(kv::DType dtype) {
  const auto code = dtype == kv::DType::bfloat16 ? nb::dlpack::dtype_code::Bfloat
                    : dtype == kv::DType::uint8  ? nb::dlpack::dtype_code::UInt
                                                 : nb::dlpack::dtype_code::Float;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * kv::item_bytes(dtype)), 1};
}

// Strides count elements of this buffer; where a page is no whole number of them, as bytes would be needed, a
// page_bytes that is a multiple of 16 always is one.
nb::object page_view(std::shared_ptr<KvManager> self, std::size_t layer, const std::string& role) {
  const kv::Placement place = self->layout().place(layer, role);
  const Address at = self->address(layer, role);
  const std::size_t item_bytes = kv::item_bytes(place.buffer->dtype);
  std::vector<std::size_t> shape{self->slots(place.group)};
  const bool state = self->layout().life_cycles()[place.life_cycle].kind == kv::LayerKind::state;
  if (!state) shape.push_back(self->layout().tokens_per_block());
  shape.insert(shape.end(), place.buffer->shape.begin(), place.buffer->shape.end());
  std::vector<std::int64_t> strides(shape.size(), 1);
  for (std::size_t axis = shape.size() - 1; axis > 1; --axis) {
    strides[axis - 1] = strides[axis] * static_cast<std::int64_t>(shape[axis]);
  }
  strides[0] = static_cast<std::int64_t>(self->layout().groups()[place.group].page_bytes / item_bytes);
  const bool cuda = self->device().kind() == DeviceKind::cuda;
  const int ordinal = self->device().ordinal();
  const nb::dlpack::dtype dtype = dlpack_dtype(place.buffer->dtype);
  const nb::ndarray<nb::array_api> view(reinterpret_cast<void*>(at), shape.size(), shape.data(),
                                        owner_of(std::move(self)), strides.data(), dtype,
                                        cuda ? nb::device::cuda::value : nb::device::cpu::value, ordinal);
  return nb::cast(view, nb::rv_policy::reference);
}

Counts stats(const KvManager& self) {
  const kv::KvStats now = released([&] { return self.stats(); });
  Counts row;
  row["slots"] = now.slots;
  row["free_slots"] = now.free_slots;
  row["locked_pages"] = now.locked_pages;
  row["held_pages"] = now.held_pages;
  row["droppable_pages"] = now.droppable_pages;
  row["host_pages"] = now.host_pages;
  row["host_bytes"] = now.host_bytes;
  row["host_slots"] = now.host_slots;
  row["sequences"] = now.sequences;
  row["prefix_tokens"] = now.prefix_tokens;
  row["lookup_tokens"] = now.lookup_tokens;
  row["hits_tokens"] = now.hits_tokens;
  row["evicted_pages"] = now.evicted_pages;
  row["forgotten_pages"] = now.forgotten_pages;
  row["moved_out_pages"] = now.moved_out_pages;
  row["moved_in_pages"] = now.moved_in_pages;
  row["moved_down_pages"] = now.moved_down_pages;
  row["cold_gpu_pages"] = now.cold_gpu_pages;
  row["cold_gpu_slots"] = now.cold_gpu_slots;
  row["disk_pages"] = now.disk_pages;
  row["disk_bytes"] = now.disk_bytes;
  row["disk_slots"] = now.disk_slots;
  return row;
}

void set_cold_tiers(kv::KvSpec& spec, const Ledger& ledger, std::size_t disk_bytes,
                    const std::string& disk_path, std::size_t cold_gpu_bytes, const std::string& codec) {
  spec.disk_bytes = disk_bytes;
  spec.disk_path = disk_path;
  if (disk_path.empty()) spec.disk_file = ledger.disk();
  spec.cold_gpu_bytes = cold_gpu_bytes;
  spec.codec = codec;
}

std::shared_ptr<KvManager> create_kv_manager(Ledger& self, std::size_t layers, std::size_t kv_heads,
                                             std::size_t head_dim, const std::string& dtype,
                                             std::size_t tokens_per_block, std::size_t gpu_bytes,
                                             std::size_t host_bytes, const std::string& tag,
                                             const std::string& name, const std::string& restore,
                                             std::optional<std::uint64_t> seed, std::size_t disk_bytes,
                                             const std::string& disk_path, std::size_t cold_gpu_bytes,
                                             const std::string& codec, std::size_t max_gpu_bytes) {
  kv::KvSpec spec;
  spec.max_gpu_bytes = max_gpu_bytes;
  spec.layout = kv::Layout::uniform(layers, kv_heads, head_dim, kv::parse_dtype(dtype), tokens_per_block);
  spec.gpu_bytes = gpu_bytes;
  spec.host_bytes = host_bytes;
  spec.tag = tag;
  spec.name = name;
  spec.restore = parse_restore_mode(restore);
  spec.seed = seed;
  set_cold_tiers(spec, self, disk_bytes, disk_path, cold_gpu_bytes, codec);
  return released([&] {
    auto manager = KvManager::make(self.device(), self.host_pool(), std::move(spec));
    self.add(manager);
    return manager;
  });
}

Rows life_cycles(const KvManager& self) {
  Rows rows;
  for (const kv::LifeCycle& one : self.layout().life_cycles()) {
    Row row;
    row["kind"] = kv::to_string(one.kind);
    row["window"] = one.window_tokens;
    row["sinks"] = one.sink_tokens;
    row["layers"] = one.layers;
    row["pool"] = one.group;
    row["page_bytes"] = one.page_bytes;
    rows.append(row);
  }
  return rows;
}

Row events(const KvManager& self, std::uint64_t after) {
  const kv::EventLog::Batch batch = released([&] { return self.events(after); });
  Rows rows;
  for (const kv::Event& event : batch.events) {
    Row row;
    row["number"] = event.number;
    row["kind"] = kv::to_string(event.kind);
    row["block"] = event.block;
    row["parent"] = event.parent;
    row["tokens"] = event.tokens;
    row["tier"] = kv::to_string(event.tier);
    if (event.kind == kv::EventKind::moved) row["life_cycle"] = event.life_cycle;
    rows.append(row);
  }
  Row answer;
  answer["events"] = rows;
  answer["next"] = batch.next;
  answer["lost"] = batch.lost;
  return answer;
}

std::shared_ptr<KvManager> create_kv_cache(
    Ledger& self, const std::vector<kv::LayerSpec>& layers, std::size_t tokens_per_block,
    std::size_t gpu_bytes, std::size_t host_bytes, const std::string& tag, const std::string& name,
    const std::string& restore, std::size_t sequence_tokens, std::size_t max_sequence_tokens,
    double max_utilisation, bool partial_blocks, std::size_t event_count, std::optional<std::uint64_t> seed,
    std::size_t disk_bytes, const std::string& disk_path, std::size_t cold_gpu_bytes,
    const std::string& codec, std::size_t max_gpu_bytes) {
  kv::KvSpec spec;
  spec.max_gpu_bytes = max_gpu_bytes;
  spec.layout = kv::Layout(layers, tokens_per_block);
  spec.gpu_bytes = gpu_bytes;
  spec.host_bytes = host_bytes;
  spec.tag = tag;
  spec.name = name;
  spec.restore = parse_restore_mode(restore);
  spec.sequence_tokens = sequence_tokens;
  spec.max_sequence_tokens = max_sequence_tokens;
  spec.max_utilisation = max_utilisation;
  spec.partial_blocks = partial_blocks;
  spec.event_count = event_count;
  spec.seed = seed;
  set_cold_tiers(spec, self, disk_bytes, disk_path, cold_gpu_bytes, codec);
  return released([&] {
    auto manager = KvManager::make(self.device(), self.host_pool(), std::move(spec));
    self.add(manager);
    return manager;
  });
}

void bind_creation(nb::class_<Ledger>& ledger) {
  ledger.def(
      "create_kv_cache", &create_kv_cache, "layers"_a, "tokens_per_block"_a, "gpu_bytes"_a,
      "host_bytes"_a = 0, nb::kw_only(), "tag"_a = "kv_cache", "name"_a = "", "restore"_a = "none",
      "sequence_tokens"_a = 4096, "max_sequence_tokens"_a = 0, "max_utilisation"_a = 1.0,
      "partial_blocks"_a = false, "event_count"_a = 1024, "seed"_a = nb::none(), "disk_bytes"_a = 0,
      "disk_path"_a = "", "cold_gpu_bytes"_a = 0, "codec"_a = "identity", "max_gpu_bytes"_a = 0,
      "A paged cache of layers of several kinds; `create_kv_manager` is the short form for K and V "
      "alone.\n\nLayers of one kind (the same window and sinks) are a life cycle; life cycles with equal "
      "page sizes share a\npool. gpu_bytes and host_bytes are divided over the pools in proportion to what "
      "a sequence of sequence_tokens\ntakes in each, in whole granules. max_sequence_tokens bounds page "
      "tables (0: what fits the pools of full\nattention; without such, 2**20). `resume` locks at most "
      "max_utilisation of each pool. partial_blocks: prompts\nalso match the beginning of a block, at the "
      "price of one page copied on resume; matched_tokens is then any\nnumber. event_count: how many "
      "events are kept. max_gpu_bytes: addresses for `resize_pools`, for each\npool (0: as many as "
      "gpu_bytes). Misuse "
      "when a layer or a size is impossible; OutOfDeviceMemory.");
  ledger.def(
      "create_kv_manager", &create_kv_manager, "layers"_a, "kv_heads"_a, "head_dim"_a, "dtype"_a,
      "tokens_per_block"_a, "gpu_bytes"_a, "host_bytes"_a = 0, nb::kw_only(), "tag"_a = "kv_cache",
      "name"_a = "", "restore"_a = "none", "seed"_a = nb::none(), "disk_bytes"_a = 0, "disk_path"_a = "",
      "cold_gpu_bytes"_a = 0, "codec"_a = "identity", "max_gpu_bytes"_a = 0,
      "A paged KV pool of at most gpu_bytes. dtype: float32, float16, bfloat16. seed: random slot order "
      "(tests).\n\nPages that leave it fall into the tiers that there are: cold_gpu_bytes on the GPU, "
      "host_bytes, disk_bytes (in\nan unlinked file in the folder disk_path; without one, in the "
      "ledger's). codec, of pages in those tiers:\nidentity, checked (with a checksum). max_gpu_bytes: "
      "addresses for "
      "`KvManager.resize_pools` (0: as many as\ngpu_bytes). Errors as of create_kv_cache; OutOfDisk.");
}

void bind_figures(nb::class_<KvManager>& manager) {
  manager
      .def_prop_ro("tokens_per_block", [](const KvManager& self) { return self.layout().tokens_per_block(); })
      .def_prop_ro(
          "slots", [](const KvManager& self) { return self.slots(); },
          "GPU slots of the first pool, those in use included.")
      .def_prop_ro(
          "page_bytes", [](const KvManager& self) { return self.layout().groups()[0].page_bytes; },
          "Of the first pool: its slots are so many bytes apart.")
      .def_prop_ro(
          "life_cycles", &life_cycles,
          "[{kind, window, sinks, layers, pool, page_bytes}]; their order is that of Sequence.table.")
      .def_prop_ro("parked", &KvManager::parked)
      .def("stats", &stats,
           "Over all pools:\n\n{slots, free_slots, locked_pages, held_pages, droppable_pages, host_pages, "
           "host_bytes, host_slots,\nsequences, prefix_tokens; since the start: lookup_tokens, hits_tokens, "
           "evicted_pages (for room),\nforgotten_pages (with all prefixes), moved_out_pages, "
           "moved_in_pages,\nmoved_down_pages (from one cold tier into a colder one), cold_gpu_pages, "
           "cold_gpu_slots, disk_pages, disk_bytes,\ndisk_slots}.")
      .def("events", &events, "after"_a = 0,
           "{events: [{number, kind, block, parent, tokens, tier, …}], next, lost}: what became of known "
           "blocks "
           "since.\n\nkind: \"stored\", \"removed\", or \"moved\" with {life_cycle} of the page. tier: "
           "\"gpu\" | "
           "\"cold_gpu\" | \"host\" |\n\"disk\": where the page is now; of a block that was stored or "
           "removed, the "
           "coldest tier that a page of\nit is, or last was, in. Ask with `next` the next time. The last "
           "event_count "
           "are kept in a ring, the\nnewest over the oldest. lost: how many were overwritten before they "
           "were read (at "
           "least 1 when `after`\nis not of this cache); unless it is 0, begin anew.");
}

}  // namespace

void bind_kv(nb::module_& module, nb::class_<Ledger>& ledger) {
  nb::class_<KvManager> manager(
      module, "KvManager",
      "Bytes whose meaning is known: K and V of every layer, paged. One slot holds all layers of a token "
      "block.\n\nMade by `Ledger.create_kv_cache` and `create_kv_manager`; thread-safe. Figures are its own "
      "books. C++:\ntorpor/kv/kv_manager.hpp.");
  manager
      .def(
          "page_view", &page_view, "layer"_a, "role"_a,
          nb::sig("def page_view(self, layer: int, role: str) -> typing.Any"),
          "DLPack object over all slots of the layer's pool, strided; the address never changes (S1).\n\n"
          "Shape: (slots, tokens_per_block, *shape of the buffer); for a state (slots, *shape). In the short "
          "form roles\nare \"k\" and \"v\", and their shape is (kv_heads, head_dim). Misuse for another "
          "layer or "
          "role.")
      .def(
          "probe",
          [](const KvManager& self, const std::string& scope, const Tokens& tokens) {
            return released([&] { return self.probe(scope, tokens); });
          },
          "scope"_a, "tokens"_a,
          "How many leading tokens a new sequence would find. Reads only.\n\nSomething must be there for "
          "every "
          "layer: all blocks in full attention, sinks and window in a window, a\nsnapshot at exactly that "
          "many "
          "tokens in a state.")
      .def(
          "create_sequence",
          [](KvManager& self, const std::string& scope, const Tokens& prompt, std::size_t priority) {
            return released([&] { return self.create_sequence(scope, prompt, priority); });
          },
          "scope"_a, "prompt"_a, nb::kw_only(), "priority"_a = kv::default_priority,
          "Suspended; holds the longest known prefix of whole blocks, at most len(prompt) - 1 "
          "tokens.\n\nscope: "
          "a security boundary; sequences of two scopes never share a block.\n\npriority, 0 to 3: pages of a "
          "lower one leave a tier, and are dropped, before all of a higher\none; among equals the least "
          "recently "
          "used goes first. It is that of the pages that the sequence\ncomputes; pages that it finds known "
          "are "
          "raised to it, never lowered. Misuse for another number.")
      .def("forget_prefixes", &KvManager::forget_prefixes, Free(),
           "Drops every reusable page on every tier; returns the tokens lost.")
      .def(
          "block_hashes",
          [](const KvManager& self, const std::string& scope, const Tokens& tokens) {
            return released([&] { return self.block_hashes(scope, tokens); });
          },
          "scope"_a, "tokens"_a,
          "The hash of each whole block, chained over the scope and all tokens up to it: how events name "
          "blocks.");
  bind_figures(manager);
  bind_pools(manager);
  bind_creation(ledger);
}

}  // namespace torpor
