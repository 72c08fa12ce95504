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
  const auto code =
      dtype == kv::DType::bfloat16 ? nb::dlpack::dtype_code::Bfloat : nb::dlpack::dtype_code::Float;
  return {static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(8 * kv::item_bytes(dtype)), 1};
}

nb::object page_view(std::shared_ptr<KvManager> self, std::size_t layer, const std::string& role) {
  const kv::Layout& layout = self->layout();
  const Address at = self->address(layer, kv::parse_role(role));
  const std::array<std::size_t, 4> shape{self->slots(), layout.tokens_per_block, layout.kv_heads,
                                         layout.head_dim};
  const auto head = static_cast<std::int64_t>(layout.head_dim);
  const auto token = head * static_cast<std::int64_t>(layout.kv_heads);
  const auto page = static_cast<std::int64_t>(layout.page_bytes() / kv::item_bytes(layout.dtype));
  const std::array<std::int64_t, 4> strides{page, token, head, 1};
  const bool cuda = self->device().kind() == DeviceKind::cuda;
  const int ordinal = self->device().ordinal();
  const nb::ndarray<nb::array_api> view(reinterpret_cast<void*>(at), 4, shape.data(),
                                        owner_of(std::move(self)), strides.data(), dlpack_dtype(layout.dtype),
                                        cuda ? nb::device::cuda::value : nb::device::cpu::value, ordinal);
  return nb::cast(view, nb::rv_policy::reference);
}

nb::object page_table(const Sequence& self) {
  const std::array<std::size_t, 1> shape{self.table_entries()};
  const auto table = self.table();
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
  return row;
}

std::shared_ptr<KvManager> create_kv_manager(Ledger& self, std::size_t layers, std::size_t kv_heads,
                                             std::size_t head_dim, const std::string& dtype,
                                             std::size_t tokens_per_block, std::size_t gpu_bytes,
                                             std::size_t host_bytes, const std::string& tag,
                                             const std::string& name, const std::string& restore,
                                             std::optional<std::uint64_t> seed) {
  kv::KvSpec spec;
  spec.layout = {.layers = layers,
                 .kv_heads = kv_heads,
                 .head_dim = head_dim,
                 .dtype = kv::parse_dtype(dtype),
                 .tokens_per_block = tokens_per_block};
  spec.gpu_bytes = gpu_bytes;
  spec.host_bytes = host_bytes;
  spec.tag = tag;
  spec.name = name;
  spec.restore = parse_restore_mode(restore);
  spec.seed = seed;
  return released([&] {
    auto manager = KvManager::make(self.device(), self.host_pool(), std::move(spec));
    self.add(manager);
    return manager;
  });
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
      .def_prop_ro("page_table", &page_table)
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
      .def_prop_ro("tokens_per_block", [](const KvManager& self) { return self.layout().tokens_per_block; })
      .def_prop_ro("slots", &KvManager::slots)
      .def_prop_ro("page_bytes", [](const KvManager& self) { return self.layout().page_bytes(); })
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
      .def("stats", &stats);
  bind_sequence(module);
  ledger.def("create_kv_manager", &create_kv_manager, nb::arg("layers"), nb::arg("kv_heads"),
             nb::arg("head_dim"), nb::arg("dtype"), nb::arg("tokens_per_block"), nb::arg("gpu_bytes"),
             nb::arg("host_bytes") = 0, nb::kw_only(), nb::arg("tag") = "kv_cache", nb::arg("name") = "",
             nb::arg("restore") = "none", nb::arg("seed") = nb::none());
}

}  // namespace torpor
