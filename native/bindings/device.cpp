#include "torpor/device.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <utility>

#include "bindings.hpp"

namespace nb = nanobind;
using namespace nb::literals;

namespace torpor {
namespace {

std::pair<std::size_t, std::size_t> memory_info(Device& self) {
  const MemoryInfo info = released([&] { return self.memory_info(); });
  return {info.free_bytes, info.total_bytes};
}

void bind_faulty_device(nb::module_& module) {
  nb::class_<FaultyDevice, Device>(
      module, "FaultyDevice",
      "Wraps a device and makes chosen calls fail; new memory comes dirty. For tests.")
      .def(nb::new_([](std::shared_ptr<Device> inner) { return make_faulty_device(std::move(inner)); }),
           "inner"_a)
      .def("fail_at", &FaultyDevice::fail_at, "k"_a, "forever"_a = false,
           "The k-th call from now fails (1 is the next, 0 none); once, unless `forever`.")
      .def("delay", &FaultyDevice::delay, "call"_a, "seconds"_a,
           "Sleep before each call of this name (\"\" is every call).")
      .def("corrupt_copy", &FaultyDevice::corrupt_copy, "k"_a,
           "One byte of what the k-th copy from now writes is flipped behind its back; 0: none.")
      .def_prop_ro("calls", &FaultyDevice::calls, "Calls so far that can fail.")
      .def("log", &FaultyDevice::log, "Their names, in order.");
}

}  // namespace

void bind_device(nb::module_& module) {
  nb::class_<Device>(module, "Device",
                     "One GPU's memory. Make one with `host` or `cuda`; thread-safe. C++: torpor/device.hpp.")
      .def_static(
          "host", &make_host_device, "name"_a, "capacity_bytes"_a,
          "granularity_bytes"_a = std::size_t{2} << 20, Free(),
          "A GPU played by RAM. Processes of this user that give the same name share the capacity.\n\n"
          "Misuse: a capacity of 0 or other than the one that the name has, a granularity that is no "
          "multiple of\nthe machine's pages.")
      .def_static("cuda", &make_cuda_device, "ordinal"_a = 0, Free(),
                  "The GPU with this ordinal. DeviceError where there is no driver or no such GPU.")
      .def_prop_ro(
          "kind", [](const Device& self) { return self.kind() == DeviceKind::cuda ? "cuda" : "host"; },
          "\"host\" or \"cuda\".")
      .def_prop_ro("id", &Device::id, "GPU UUID, or \"host:<name>\".")
      .def_prop_ro("ordinal", &Device::ordinal, "The GPU's number in this process; 0 for a host device.")
      .def_prop_ro("granularity_bytes", &Device::granularity_bytes,
                   "Physical memory comes in multiples of this.")
      .def_prop_ro("kernels", &Device::kernels,
                   "'loaded', or why a GPU's copies and checksums go without kernels of our own.")
      .def("memory_info", &memory_info,
           "(free, total) in bytes: the driver's answer, or the host device's books over all processes.");
  bind_faulty_device(module);

  nb::class_<DeviceEvent>(
      module, "DeviceEvent",
      "Held while your own work on the device's memory runs: a sleep waits for it, up to its deadline "
      "(M5).\n\n"
      "For the host device; a GPU's driver knows what runs. A context manager. C++: torpor/device.hpp.")
      .def(nb::init<std::shared_ptr<Device>>(), "device"_a)
      .def("complete", &DeviceEvent::complete, "The work is done. Repeating it does nothing.")
      .def(
          "__enter__", [](DeviceEvent& self) -> DeviceEvent& { return self; }, nb::rv_policy::reference)
      .def(
          "__exit__", [](DeviceEvent& self, const nb::args&) { self.complete(); },
          nb::sig("def __exit__(self, *args: object) -> None"));

  module.def("cuda_device_count", &cuda_device_count, Free(),
             "GPUs that the driver shows to this process; 0 without a driver.");
}

}  // namespace torpor
