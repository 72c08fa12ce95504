#include "cuda_driver.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <array>

#include "torpor/errors.hpp"

namespace torpor::cuda {

namespace {

using GetProcAddress = Status (*)(const char* symbol, void** found, int version, std::uint64_t flags,
                                  int* result);

// After these every further call of the context fails as well: only a new process helps.
constexpr std::array<Status, 16> sticky_codes{
    4,    // driver shut down
    46,   // device unavailable
    214,  // uncorrectable memory error
    220,  // uncorrectable NVLink error
    226,  // contained error
    700,  // illegal address
    702,  // launch timed out
    709,  // context destroyed
    710,  // assertion in a kernel
    714,  // hardware stack error
    715,  // illegal instruction
    716,  // misaligned address
    717,  // invalid address space
    718,  // invalid program counter
    719,  // launch failed
    721,  // tensor memory leaked
};

class Loader final {
 public:
  Loader() {
    // Never closed: the driver keeps threads and exit handlers that point into it.
    library_ = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library_ == nullptr) {
      throw DeviceError("no CUDA driver (libcuda.so.1) here; use a host device, or run where a GPU is",
                        "dlopen", 0, 0);
    }
    find_ = reinterpret_cast<GetProcAddress>(dlsym(library_, "cuGetProcAddress_v2"));
    if (find_ == nullptr) too_old("cuGetProcAddress_v2");
  }

  template <typename Function>
  void need(Function& entry, const char* name, int version) const {
    want(entry, name, version);
    if (entry == nullptr) too_old(name);
  }

  template <typename Function>
  void want(Function& entry, const char* name, int version) const {
    void* found = nullptr;
    int result = 0;
    const Status status = find_(name, &found, version, 0, &result);
    entry = status == success && result == 0 ? reinterpret_cast<Function>(found) : nullptr;
  }

 private:
  [[noreturn]] static void too_old(const char* name) {
    throw DeviceError(std::string("the CUDA driver lacks ") + name + "; install one for CUDA 12.0 or later",
                      "cuGetProcAddress", 500, 0);
  }

  void* library_ = nullptr;
  GetProcAddress find_ = nullptr;
};

void load_memory_entries(const Loader& loader, Driver& driver) {
  loader.need(driver.address_reserve, "cuMemAddressReserve", 10020);
  loader.need(driver.address_free, "cuMemAddressFree", 10020);
  loader.need(driver.mem_create, "cuMemCreate", 10020);
  loader.need(driver.mem_release, "cuMemRelease", 10020);
  loader.need(driver.mem_map, "cuMemMap", 10020);
  loader.need(driver.mem_unmap, "cuMemUnmap", 10020);
  loader.need(driver.mem_set_access, "cuMemSetAccess", 10020);
  loader.need(driver.mem_granularity, "cuMemGetAllocationGranularity", 10020);
  loader.need(driver.mem_get_info, "cuMemGetInfo", 3020);
  loader.need(driver.host_register, "cuMemHostRegister", 6050);
  loader.need(driver.host_unregister, "cuMemHostUnregister", 4000);
  loader.need(driver.copy_async, "cuMemcpyAsync", 4000);
  loader.want(driver.copy_batch_async, "cuMemcpyBatchAsync", 13000);
  loader.need(driver.fill_async, "cuMemsetD8Async", 3020);
}

}  // namespace

std::shared_ptr<const Driver> load_driver() {
  const Loader loader;
  auto driver = std::make_shared<Driver>();
  loader.need(driver->init, "cuInit", 2000);
  loader.need(driver->get_error_name, "cuGetErrorName", 6000);
  loader.need(driver->device_get_count, "cuDeviceGetCount", 2000);
  loader.need(driver->device_get, "cuDeviceGet", 2000);
  loader.need(driver->device_get_uuid, "cuDeviceGetUuid", 11040);
  loader.need(driver->primary_context_retain, "cuDevicePrimaryCtxRetain", 7000);
  loader.need(driver->primary_context_release, "cuDevicePrimaryCtxRelease", 11000);
  loader.need(driver->context_get_current, "cuCtxGetCurrent", 4000);
  loader.need(driver->context_set_current, "cuCtxSetCurrent", 4000);
  loader.want(driver->context_record_event, "cuCtxRecordEvent", 12050);
  load_memory_entries(loader, *driver);
  loader.need(driver->stream_create, "cuStreamCreate", 2000);
  loader.need(driver->stream_destroy, "cuStreamDestroy", 4000);
  loader.need(driver->event_create, "cuEventCreate", 2000);
  loader.need(driver->event_destroy, "cuEventDestroy", 4000);
  loader.need(driver->event_record, "cuEventRecord", 2000);
  loader.need(driver->event_query, "cuEventQuery", 2000);
  loader.need(driver->exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", 10010);
  loader.need(driver->module_load_data, "cuModuleLoadData", 2000);
  loader.need(driver->module_unload, "cuModuleUnload", 2000);
  loader.need(driver->module_get_function, "cuModuleGetFunction", 2000);
  loader.need(driver->launch_kernel, "cuLaunchKernel", 4000);
  driver->check(driver->init(0), "cuInit");
  return driver;
}

std::string Driver::message(const char* call, Status status) const {
  const char* name = nullptr;
  if (get_error_name(status, &name) != success || name == nullptr) name = "unknown error";
  return std::string(call) + " failed: " + name + " (" + std::to_string(status) + ")";
}

void Driver::check(Status status, const char* call, std::size_t size_bytes) const {
  if (status == success) return;
  const bool sticky = std::find(sticky_codes.begin(), sticky_codes.end(), status) != sticky_codes.end();
  throw DeviceError(
      message(call, status) + (sticky ? "; the CUDA context is lost, restart this process" : ""), call,
      status, size_bytes, sticky);
}

}  // namespace torpor::cuda
