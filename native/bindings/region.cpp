#include "torpor/region.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <utility>

#include "bindings.hpp"
#include "owner.hpp"

namespace nb = nanobind;

namespace torpor {

namespace {

int dlpack_type(const Device& device) {
  return device.kind() == DeviceKind::cuda ? nb::device::cuda::value : nb::device::cpu::value;
}

// The capsule keeps the region, and with it the reservation, for as long as any tensor over it lives.
nb::object dlpack(const std::shared_ptr<Region>& region, const nb::kwargs& arguments) {
  const nb::ndarray<nb::array_api, std::uint8_t, nb::ndim<1>> bytes(
      reinterpret_cast<std::uint8_t*>(region->address()), {region->size_bytes()}, owner_of(region), {},
      nb::dtype<std::uint8_t>(), dlpack_type(*region->device()), region->device()->ordinal());
  return nb::cast(bytes).attr("__dlpack__")(**arguments);
}

}  // namespace

void bind_region(nb::module_& module) {
  nb::class_<Region>(
      module, "Region",
      "Opaque tagged bytes at a fixed address. Made by `Ledger.create_region`. C++: torpor/region.hpp.")
      .def_prop_ro("tag", [](const Region& self) { return self.tag(); })
      .def_prop_ro("name", [](const Region& self) { return self.name(); })
      .def_prop_ro("address", &Region::address, "Of its first byte on the device; never changes (S1).")
      .def_prop_ro("size_bytes", &Region::size_bytes, "As asked for; whole granules are mapped.")
      .def_prop_ro("parked", &Region::parked, "Asleep: no memory backs the address, and a read faults.")
      .def("contents_changed", &Region::contents_changed, nb::call_guard<nb::gil_scoped_release>(),
           "An immutable region was written to: the next sleep saves it anew. Misuse while parked.")
      .def("__dlpack__", &dlpack, nb::sig("def __dlpack__(self, **kwargs: typing.Any) -> typing.Any"),
           "uint8, shape (size_bytes,), on the region's device. The memory outlives the Region object.")
      .def(
          "__dlpack_device__",
          [](const Region& self) { return std::pair(dlpack_type(*self.device()), self.device()->ordinal()); },
          "(DLPack's device type: 1 CPU, 2 CUDA; ordinal).");
}

}  // namespace torpor
