#include "torpor/region.hpp"

#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include "bindings.hpp"

namespace nb = nanobind;

namespace torpor {

namespace {

int dlpack_type(const Device& device) {
  return device.kind() == DeviceKind::cuda ? nb::device::cuda::value : nb::device::cpu::value;
}

// The capsule keeps the region, and with it the reservation, for as long as any tensor over it lives.
nb::object dlpack(std::shared_ptr<Region> region, const nb::kwargs& arguments) {
  auto kept = std::make_unique<std::shared_ptr<Region>>(region);
  const nb::capsule owner(kept.get(),
                          [](void* held) noexcept { delete static_cast<std::shared_ptr<Region>*>(held); });
  (void)kept.release();
  const nb::ndarray<nb::array_api, std::uint8_t, nb::ndim<1>> bytes(
      reinterpret_cast<std::uint8_t*>(region->address()), {region->size_bytes()}, owner, {},
      nb::dtype<std::uint8_t>(), dlpack_type(*region->device()), region->device()->ordinal());
  return nb::cast(bytes).attr("__dlpack__")(**arguments);
}

}  // namespace

void bind_region(nb::module_& module) {
  nb::class_<Region>(module, "Region")
      .def_prop_ro("tag", [](const Region& self) { return self.tag(); })
      .def_prop_ro("name", [](const Region& self) { return self.name(); })
      .def_prop_ro("address", &Region::address)
      .def_prop_ro("size_bytes", &Region::size_bytes)
      .def_prop_ro("parked", &Region::parked)
      .def("contents_changed", &Region::contents_changed)
      .def("__dlpack__", &dlpack)
      .def("__dlpack_device__", [](const Region& self) {
        return nb::make_tuple(dlpack_type(*self.device()), self.device()->ordinal());
      });
}

}  // namespace torpor
