// The few entries of the CUDA driver API that are used, found at run time: no CUDA header or library at build
// time.
//
// Names and layouts follow the CUDA Driver API reference; each entry is asked for with the version of the
// signature declared here, since some changed theirs (cuMemcpyBatchAsync in 13.0).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace torpor::cuda {

using Status = int;  // CUresult
using DeviceIndex = int;
using Pointer = unsigned long long;  // CUdeviceptr
using Handle = unsigned long long;   // CUmemGenericAllocationHandle
using Context = struct ContextTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;

enum : Status {
  success = 0,
  invalid_value = 1,
  out_of_memory = 2,
  not_ready = 600,
  capture_unsupported = 900,
};

constexpr unsigned int stream_non_blocking = 1;
constexpr unsigned int event_disable_timing = 2;
constexpr unsigned int host_register_portable = 1;
constexpr int granularity_minimum = 0;
constexpr int capture_relaxed = 2;

struct Location {
  int type;  // 1: a device
  int id;
};
struct AllocationProperties {
  int type;  // 1: pinned to its location
  int handle_types;
  Location location;
  void* windows_only;
  struct {
    unsigned char compression;
    unsigned char rdma;
    unsigned short usage;
    unsigned char reserved[4];
  } flags;
};
struct AccessDescription {
  Location location;
  int flags;  // 3: read and write
};
struct CopyAttributes {
  int source_access_order;  // 1: in stream order
  Location source_hint;
  Location destination_hint;
  unsigned int flags;
};
struct Uuid {
  unsigned char bytes[16];
};

struct Driver {
  Status (*init)(unsigned int);
  Status (*get_error_name)(Status, const char**);
  Status (*device_get_count)(int*);
  Status (*device_get)(DeviceIndex*, int);
  Status (*device_get_uuid)(Uuid*, DeviceIndex);
  Status (*primary_context_retain)(Context*, DeviceIndex);
  Status (*primary_context_release)(DeviceIndex);
  Status (*context_get_current)(Context*);
  Status (*context_set_current)(Context);
  Status (*context_record_event)(Context, Event);  // null before 12.5
  Status (*address_reserve)(Pointer*, std::size_t, std::size_t, Pointer, unsigned long long);
  Status (*address_free)(Pointer, std::size_t);
  Status (*mem_create)(Handle*, std::size_t, const AllocationProperties*, unsigned long long);
  Status (*mem_release)(Handle);
  Status (*mem_map)(Pointer, std::size_t, std::size_t, Handle, unsigned long long);
  Status (*mem_unmap)(Pointer, std::size_t);
  Status (*mem_set_access)(Pointer, std::size_t, const AccessDescription*, std::size_t);
  Status (*mem_granularity)(std::size_t*, const AllocationProperties*, int);
  Status (*mem_get_info)(std::size_t*, std::size_t*);
  Status (*host_register)(void*, std::size_t, unsigned int);
  Status (*host_unregister)(void*);
  Status (*copy_async)(Pointer, Pointer, std::size_t, Stream);
  Status (*copy_batch_async)(Pointer*, Pointer*, std::size_t*, std::size_t, CopyAttributes*, std::size_t*,
                             std::size_t, Stream);  // null before 13.0; refuses the NULL stream
  Status (*fill_async)(Pointer, unsigned char, std::size_t, Stream);
  Status (*stream_create)(Stream*, unsigned int);
  Status (*stream_destroy)(Stream);
  Status (*event_create)(Event*, unsigned int);
  Status (*event_destroy)(Event);
  Status (*event_record)(Event, Stream);
  Status (*event_query)(Event);
  Status (*exchange_capture_mode)(int*);
  Status (*module_load_data)(Module*, const void*);
  Status (*module_unload)(Module);
  Status (*module_get_function)(Function*, Module, const char*);
  // Grid x, y, z, block x, y, z, dynamic shared bytes, stream, arguments, nothing.
  Status (*launch_kernel)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                          Stream, void**, void**);

  // "cuMemCreate failed: CUDA_ERROR_OUT_OF_MEMORY (2)".
  [[nodiscard]] std::string message(const char* call, Status status) const;
  // Throws DeviceError unless success; sticky when the context is lost with it.
  void check(Status status, const char* call, std::size_t size_bytes = 0) const;
};

// Finds and initialises the driver. DeviceError when there is none, or it is too old (CUDA 12.0 is needed).
[[nodiscard]] std::shared_ptr<const Driver> load_driver();

}  // namespace torpor::cuda
