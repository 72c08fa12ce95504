#include "torpor/kv/layout.hpp"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace torpor {

void bind_layout(nb::module_& module) {
  nb::class_<kv::BufferSpec>(module, "Buffer", "One tensor of a layer. C++: torpor/kv/layout.hpp.")
      .def(
          "__init__",
          [](kv::BufferSpec* self, const std::string& role, const std::vector<std::size_t>& shape,
             const std::string& dtype) {
            new (self) kv::BufferSpec{.role = role, .shape = shape, .dtype = kv::parse_dtype(dtype)};
          },
          "role"_a, "shape"_a, "dtype"_a,
          "shape: of one token (\"full\", \"window\"), or of the whole state (\"state\").\n\n"
          "dtype: float32, float16, bfloat16, uint8; else Misuse.")
      .def_ro("role", &kv::BufferSpec::role)
      .def_ro("shape", &kv::BufferSpec::shape);
  nb::class_<kv::LayerSpec>(
      module, "LayerSpec",
      "kind: \"full\" attention, a sliding \"window\", or a recurrent \"state\". window and sinks are "
      "tokens.\n\nA window keeps the blocks of the last `window` tokens of the history and of the first "
      "`sinks` "
      "ones. Its other\nblocks are stale: their pages go back and their page-table entries are -1. C++: "
      "torpor/kv/layout.hpp.")
      .def(
          "__init__",
          [](kv::LayerSpec* self, const std::string& kind, const std::vector<kv::BufferSpec>& buffers,
             std::size_t window, std::size_t sinks) {
            new (self) kv::LayerSpec{.kind = kv::parse_layer_kind(kind),
                                     .window_tokens = window,
                                     .sink_tokens = sinks,
                                     .buffers = buffers};
          },
          "kind"_a, "buffers"_a, nb::kw_only(), "window"_a = 0, "sinks"_a = 0,
          "Misuse for an unknown kind; the rest is checked when a cache is made of it.")
      .def_prop_ro("kind", [](const kv::LayerSpec& self) { return kv::to_string(self.kind); })
      .def_ro("window", &kv::LayerSpec::window_tokens)
      .def_ro("sinks", &kv::LayerSpec::sink_tokens)
      .def_ro("buffers", &kv::LayerSpec::buffers);
}

}  // namespace torpor
