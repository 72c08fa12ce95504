#include "torpor/device.hpp"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using Free = nb::call_guard<nb::gil_scoped_release>;  // other Python threads run meanwhile

namespace torpor {

void bind_device(nb::module_& module) {
  nb::class_<Device>(module, "Device")
      .def_static("host", &make_host_device, "name"_a, "capacity_bytes"_a,
                  "granularity_bytes"_a = std::size_t{2} << 20, Free())
      .def_static("cuda", &make_cuda_device, "ordinal"_a = 0, Free())
      .def_prop_ro("kind",
                   [](const Device& self) { return self.kind() == DeviceKind::cuda ? "cuda" : "host"; })
      .def_prop_ro("id", &Device::id)
      .def_prop_ro("ordinal", &Device::ordinal)
      .def_prop_ro("granularity_bytes", &Device::granularity_bytes)
      .def("memory_info", [](Device& self) {
        MemoryInfo info{};
        {
          const nb::gil_scoped_release free;
          info = self.memory_info();
        }
        return nb::make_tuple(info.free_bytes, info.total_bytes);
      });

  nb::class_<FaultyDevice, Device>(module, "FaultyDevice")
      .def(nb::new_([](std::shared_ptr<Device> inner) { return make_faulty_device(std::move(inner)); }),
           "inner"_a)
      .def("fail_at", &FaultyDevice::fail_at, "k"_a, "forever"_a = false)
      .def("delay", &FaultyDevice::delay, "call"_a, "seconds"_a)
      .def("corrupt_copy", &FaultyDevice::corrupt_copy, "k"_a)
      .def_prop_ro("calls", &FaultyDevice::calls)
      .def("log", &FaultyDevice::log);

  nb::class_<DeviceEvent>(module, "DeviceEvent")
      .def(nb::init<std::shared_ptr<Device>>(), "device"_a)
      .def("complete", &DeviceEvent::complete)
      .def(
          "__enter__", [](DeviceEvent& self) -> DeviceEvent& { return self; }, nb::rv_policy::reference)
      .def("__exit__", [](DeviceEvent& self, const nb::args&) { self.complete(); });

  module.def("cuda_device_count", &cuda_device_count, Free());
}

}  // namespace torpor
