#include "torpor/arena.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <utility>

#include "bindings.hpp"
#include "torpor/allocator_hook.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace torpor {

namespace {

std::shared_ptr<Arena> create_arena(Ledger& self, const std::string& tag, std::size_t reserve_bytes,
                                    const std::string& name, const std::string& restore) {
  auto arena = std::make_shared<Arena>(
      self.device(), self.host_pool(), self.disk(),
      ArenaSpec{
          .tag = tag, .reserve_bytes = reserve_bytes, .name = name, .restore = parse_restore_mode(restore)});
  self.add(arena);
  return arena;
}

std::pair<std::string, std::string> hook(const std::shared_ptr<Arena>& self) {
  const AllocatorHook names = hook_of(self);
  return {names.allocate, names.free};
}

}  // namespace

void bind_arena(nb::module_& module, nb::class_<Ledger>& ledger) {
  nb::class_<Arena>(
      module, "Arena",
      "Memory of one tag for code that allocates by itself. Made by `Ledger.create_arena`. C++: "
      "torpor/arena.hpp.")
      .def_prop_ro("tag", [](const Arena& self) { return self.tag(); })
      .def_prop_ro("name", [](const Arena& self) { return self.name(); })
      .def_prop_ro("address", &Arena::address, "Where its addresses begin; never changes (S1).")
      .def_prop_ro("reserve_bytes", &Arena::reserve_bytes, "Of addresses: the most that it can hold.")
      .def_prop_ro("used_bytes", &Arena::used_bytes, "Of blocks in use, awake or asleep.")
      .def_prop_ro("mapped_bytes", &Arena::mapped_bytes, "Of device memory behind them; 0 while parked.")
      .def_prop_ro("parked", &Arena::parked, "Asleep: no memory backs the addresses, and a read faults.")
      .def("allocate", &Arena::allocate, "size_bytes"_a, Free(),
           "The address of a new block, aligned to 512 bytes.\n\nMisuse while asleep; OutOfDeviceMemory when "
           "the device or the reserved addresses have no more.")
      .def("free", &Arena::free, "block"_a, Free(),
           "Give a block back, asleep too. Misuse for an address that no block begins at.")
      .def("hook", &hook,
           "Names of this extension's C functions that allocate from it and free, as torch's "
           "CUDAPluggableAllocator\ntakes them. The arena then lives as long as the process. Misuse when 16 "
           "arenas have theirs.")
      .def("hook_error", &hook_error, "Why the hook last gave no memory; empty if it always did.");
  ledger.def("create_arena", &create_arena, "tag"_a, "reserve_bytes"_a, nb::kw_only(), "name"_a = "",
             "restore"_a = "none", Free(),
             "Reserve addresses for blocks of this tag; memory comes as they are asked for.\n\n`restore` is "
             "the default mode. Misuse while an operation is staged, or for a tag and name that are taken.");
}

}  // namespace torpor
