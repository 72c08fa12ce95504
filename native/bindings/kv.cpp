#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <memory>
#include <utility>

#include "bindings.hpp"
#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"

namespace nb = nanobind;

namespace torpor {
namespace {

using kv::KvManager;
using kv::Sequence;
using Tokens = std::vector<kv::Token>;

// Runs without the GIL: waits for a lock or a device must not stop other Python threads.
template <typename F>
auto released(F work) {
  const nb::gil_scoped_release without_gil;
  return work();
}

// Keeps what it points to alive for as long as any array over it lives.
template <typename T>
nb::capsule owner_of(std::shared_ptr<T> kept) {
  auto box = std::make_unique<std::shared_ptr<T>>(std::move(kept));
  const nb::capsule owner(box.get(),
                          [](void* held) noexcept { delete static_cast<std::shared_ptr<T>*>(held); });
  (void)box.release();
  return owner;
}

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

nb::object page_table(const Sequence& self, std::size_t life_cycle) {
  const std::array<std::size_t, 1> shape{self.table_entries(life_cycle)};
  const auto table = self.table(life_cycle);
  const nb::ndarray<nb::numpy, std::int32_t> view(table.get(), 1, shape.data(), owner_of(table));
  return nb::cast(view, nb::rv_policy::reference);
}

nb::dict stats(const KvManager& self) {
  const kv::KvStats now = released([&] { return self.stats(); });
  nb::dict row;
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
                                             const std::string& codec) {
  kv::KvSpec spec;
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

nb::list pools(const KvManager& self) {
  nb::list rows;
  for (const kv::PoolStats& now : released([&] { return self.pool_stats(); })) {
    nb::dict row;
    row["page_bytes"] = now.page_bytes;
    row["slots"] = now.slots;
    row["free_slots"] = now.free_slots;
    row["locked_pages"] = now.locked_pages;
    row["held_pages"] = now.held_pages;
    row["droppable_pages"] = now.droppable_pages;
    row["host_pages"] = now.host_pages;
    rows.append(row);
  }
  return rows;
}

nb::list life_cycles(const KvManager& self) {
  nb::list rows;
  for (const kv::LifeCycle& one : self.layout().life_cycles()) {
    nb::dict row;
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

nb::dict events(const KvManager& self, std::uint64_t after) {
  const kv::EventLog::Batch batch = released([&] { return self.events(after); });
  nb::list rows;
  for (const kv::Event& event : batch.events) {
    nb::dict row;
    row["number"] = event.number;
    row["kind"] = kv::to_string(event.kind);
    row["block"] = event.block;
    row["parent"] = event.parent;
    row["tokens"] = event.tokens;
    if (event.kind == kv::EventKind::moved) {
      row["life_cycle"] = event.life_cycle;
      row["tier"] = kv::to_string(event.tier);
    }
    rows.append(row);
  }
  nb::dict answer;
  answer["events"] = rows;
  answer["next"] = batch.next;
  answer["lost"] = batch.lost;
  return answer;
}

std::shared_ptr<KvManager> create_kv_cache(Ledger& self, const std::vector<kv::LayerSpec>& layers,
                                           std::size_t tokens_per_block, std::size_t gpu_bytes,
                                           std::size_t host_bytes, const std::string& tag,
                                           const std::string& name, const std::string& restore,
                                           std::size_t sequence_tokens, std::size_t max_sequence_tokens,
                                           double max_utilisation, bool partial_blocks,
                                           std::size_t event_count, std::optional<std::uint64_t> seed,
                                           std::size_t disk_bytes, const std::string& disk_path,
                                           std::size_t cold_gpu_bytes, const std::string& codec) {
  kv::KvSpec spec;
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

void bind_layout(nb::module_& module) {
  nb::class_<kv::BufferSpec>(module, "Buffer")
      .def(
          "__init__",
          [](kv::BufferSpec* self, const std::string& role, const std::vector<std::size_t>& shape,
             const std::string& dtype) {
            new (self) kv::BufferSpec{.role = role, .shape = shape, .dtype = kv::parse_dtype(dtype)};
          },
          nb::arg("role"), nb::arg("shape"), nb::arg("dtype"))
      .def_ro("role", &kv::BufferSpec::role)
      .def_ro("shape", &kv::BufferSpec::shape);
  nb::class_<kv::LayerSpec>(module, "LayerSpec")
      .def(
          "__init__",
          [](kv::LayerSpec* self, const std::string& kind, const std::vector<kv::BufferSpec>& buffers,
             std::size_t window, std::size_t sinks) {
            new (self) kv::LayerSpec{.kind = kv::parse_layer_kind(kind),
                                     .window_tokens = window,
                                     .sink_tokens = sinks,
                                     .buffers = buffers};
          },
          nb::arg("kind"), nb::arg("buffers"), nb::kw_only(), nb::arg("window") = 0, nb::arg("sinks") = 0)
      .def_prop_ro("kind", [](const kv::LayerSpec& self) { return kv::to_string(self.kind); })
      .def_ro("window", &kv::LayerSpec::window_tokens)
      .def_ro("sinks", &kv::LayerSpec::sink_tokens)
      .def_ro("buffers", &kv::LayerSpec::buffers);
}

void bind_sequence(nb::module_& module) {
  nb::class_<Sequence>(module, "Sequence")
      .def_prop_ro("id", &Sequence::id)
      .def_prop_ro("state",
                   [](const Sequence& self) { return kv::to_string(released([&] { return self.state(); })); })
      .def_prop_ro("matched_tokens", &Sequence::matched_tokens)
      .def_prop_ro("history_tokens", &Sequence::history_tokens, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("capacity_tokens", &Sequence::capacity_tokens, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("contents_lost", &Sequence::contents_lost, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("page_table", [](const Sequence& self) { return page_table(self, 0); })
      .def("table", &page_table, nb::arg("life_cycle"))
      .def("snapshot", &Sequence::snapshot, nb::call_guard<nb::gil_scoped_release>())
      .def("resume", &Sequence::resume, nb::call_guard<nb::gil_scoped_release>())
      .def("suspend", &Sequence::suspend, nb::call_guard<nb::gil_scoped_release>())
      .def("resize", &Sequence::resize, nb::arg("capacity_tokens"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "commit", [](Sequence& self, const Tokens& tokens) { released([&] { self.commit(tokens); }); },
          nb::arg("tokens"))
      .def("close", &Sequence::close, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_kv(nb::module_& module, nb::class_<Ledger>& ledger) {
  nb::class_<KvManager>(module, "KvManager")
      .def_prop_ro("tokens_per_block", [](const KvManager& self) { return self.layout().tokens_per_block(); })
      .def_prop_ro("slots", [](const KvManager& self) { return self.slots(); })
      .def_prop_ro("page_bytes", [](const KvManager& self) { return self.layout().groups()[0].page_bytes; })
      .def_prop_ro("life_cycles", &life_cycles)
      .def_prop_ro("parked", &KvManager::parked)
      .def("page_view", &page_view, nb::arg("layer"), nb::arg("role"))
      .def(
          "probe",
          [](const KvManager& self, const std::string& scope, const Tokens& tokens) {
            return released([&] { return self.probe(scope, tokens); });
          },
          nb::arg("scope"), nb::arg("tokens"))
      .def(
          "create_sequence",
          [](KvManager& self, const std::string& scope, const Tokens& prompt) {
            return released([&] { return self.create_sequence(scope, prompt); });
          },
          nb::arg("scope"), nb::arg("prompt"))
      .def("forget_prefixes", &KvManager::forget_prefixes, nb::call_guard<nb::gil_scoped_release>())
      .def("stats", &stats)
      .def("pools", &pools)
      .def("events", &events, nb::arg("after") = 0)
      .def(
          "block_hashes",
          [](const KvManager& self, const std::string& scope, const Tokens& tokens) {
            return released([&] { return self.block_hashes(scope, tokens); });
          },
          nb::arg("scope"), nb::arg("tokens"));
  bind_layout(module);
  bind_sequence(module);
  ledger.def("create_kv_cache", &create_kv_cache, nb::arg("layers"), nb::arg("tokens_per_block"),
             nb::arg("gpu_bytes"), nb::arg("host_bytes") = 0, nb::kw_only(), nb::arg("tag") = "kv_cache",
             nb::arg("name") = "", nb::arg("restore") = "none", nb::arg("sequence_tokens") = 4096,
             nb::arg("max_sequence_tokens") = 0, nb::arg("max_utilisation") = 1.0,
             nb::arg("partial_blocks") = false, nb::arg("event_count") = 1024, nb::arg("seed") = nb::none(),
             nb::arg("disk_bytes") = 0, nb::arg("disk_path") = "", nb::arg("cold_gpu_bytes") = 0,
             nb::arg("codec") = "identity");
  ledger.def("create_kv_manager", &create_kv_manager, nb::arg("layers"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("dtype"), nb::arg("tokens_per_block"), nb::arg("gpu_bytes"),
             nb::arg("host_bytes") = 0, nb::kw_only(), nb::arg("tag") = "kv_cache", nb::arg("name") = "",
             nb::arg("restore") = "none", nb::arg("seed") = nb::none(), nb::arg("disk_bytes") = 0,
             nb::arg("disk_path") = "", nb::arg("cold_gpu_bytes") = 0, nb::arg("codec") = "identity");
}

}  // namespace torpor
