// Device: the small interface to one GPU's memory, and the move-only owners over it.
//
// The virtual functions are the primitives that an implementation provides (host, cuda) and that a wrapper
// counts and fails (faulty). Everything above talks through the owners, whose noexcept destructors put things
// back:
//
//   Reservation  a range of addresses, parked (no access) until something is mapped into it
//   Physical     committed physical memory, a multiple of the granularity
//   Mapping      a Physical at an address; reading and writing allowed while it lives
//   HostBuffer   host memory that the device can copy from and to
//
// Each owner keeps the device alive. Errors: errors.hpp. A primitive that throws has changed nothing.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace torpor {

using Address = std::uintptr_t;
using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

// Long work polls this between chunks of at most 64 MiB and ends with Stopped.
using StopFlag = std::atomic<bool>;

struct MemoryInfo {
  std::size_t free_bytes;  // what the driver (or the host device's books over all processes) says is free
  std::size_t total_bytes;
};

// One copy. Exactly one side may be host memory, and then it lies within one HostBuffer; both may be on the
// device.
struct Copy {
  Address destination;
  Address source;
  std::size_t size_bytes;
};

// Mapped device memory, or memory within one HostBuffer.
struct ByteRange {
  Address at;
  std::size_t size_bytes;
};

// Two directions with a stream each, so that both can run at once: `out` is device to host; `in` is host to
// device, and takes fills and copies within the device too.
enum class StreamId : std::uint8_t { out, in };

enum class DeviceKind : std::uint8_t { host, cuda };

// Opaque to everyone but the implementation. 0 is never a valid handle.
using PhysicalHandle = std::uint64_t;

class Device : public std::enable_shared_from_this<Device> {
 public:
  Device() = default;
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;
  Device(Device&&) = delete;
  Device& operator=(Device&&) = delete;
  virtual ~Device() = default;

  [[nodiscard]] virtual DeviceKind kind() const noexcept = 0;
  // The GPU's UUID ("GPU-…"), or "host:<name>".
  [[nodiscard]] virtual std::string id() const = 0;
  // CUDA ordinal for DLPack; 0 for the host.
  [[nodiscard]] virtual int ordinal() const noexcept = 0;
  // What sizes of Physical are multiples of (2 MiB on CUDA and by default on the host device).
  [[nodiscard]] virtual std::size_t granularity_bytes() const noexcept = 0;
  // The chunk that large mappings should be cut into.
  [[nodiscard]] virtual std::size_t chunk_bytes() const noexcept = 0;
  [[nodiscard]] virtual bool can_pin() const noexcept = 0;
  // "loaded", or why a GPU's copies and checksums go without kernels of our own.
  [[nodiscard]] virtual std::string kernels() const { return "not a GPU"; }
  // Smaller pieces are copied by a kernel, and mapping memory meanwhile takes several times as long.
  [[nodiscard]] virtual std::size_t kernel_copy_bytes() const noexcept { return 0; }
  [[nodiscard]] virtual MemoryInfo memory_info() = 0;
  // What create_host could still commit: by the machine and by the cgroups of this process.
  [[nodiscard]] virtual std::size_t free_host_bytes() const;

  // --- primitives; sizes and offsets are multiples of granularity_bytes() ---
  [[nodiscard]] virtual Address reserve_range(std::size_t size_bytes) = 0;
  virtual void unreserve_range(Address base, std::size_t size_bytes) noexcept = 0;
  // Commits memory at once: OutOfDeviceMemory here, never a fault at first touch.
  [[nodiscard]] virtual PhysicalHandle create_physical(std::size_t size_bytes) = 0;
  // A mapping of it that could not be unmapped before goes along.
  virtual void destroy_physical(PhysicalHandle handle) noexcept = 0;
  virtual void map_range(Address at, PhysicalHandle handle, std::size_t size_bytes) = 0;
  // Can fail (faulty device, lost context): then the mapping is still there.
  virtual void unmap_range(Address at, std::size_t size_bytes) = 0;
  // Host memory: huge pages, MADV_DONTFORK, committed; registered with the driver when `pinned` and
  // can_pin().
  [[nodiscard]] virtual Address create_host(std::size_t size_bytes, bool pinned) = 0;
  virtual void destroy_host(Address base, std::size_t size_bytes) noexcept = 0;

  // --- work; asynchronous, in order on a stream ---
  virtual void copy(std::span<const Copy> batch, StreamId stream) = 0;
  virtual void fill(Address at, std::uint8_t value, std::size_t size_bytes, StreamId stream) = 0;
  // Waits by polling until everything on the stream is done. DeviceBusy past the deadline, Stopped when told.
  virtual void wait(StreamId stream, Deadline deadline, const StopFlag* stop) = 0;
  // A place in a stream's work, behind all that was put there before, and waiting for no more than that. For
  // whoever keeps a batch under way while it prepares the next; a device without such places waits for all.
  using Mark = std::uint64_t;
  [[nodiscard]] virtual Mark mark(StreamId) { return 0; }
  virtual void wait_for(Mark, StreamId stream, Deadline deadline, const StopFlag* stop) {
    wait(stream, deadline, stop);
  }
  // One position-sensitive checksum a range (checksum.hpp), of what the stream's work so far leaves there
  // (K13). Waits for it: DeviceBusy, Stopped. The host device computes where the bytes are, with several
  // threads, a GPU by its kernel; without kernels the bytes go out through pinned buffers, at the speed of
  // one CPU core.
  [[nodiscard]] virtual std::vector<std::uint64_t> checksum(std::span<const ByteRange> ranges,
                                                            StreamId stream, Deadline deadline,
                                                            const StopFlag* stop);
  // Waits for all work of the context, also what others submitted (M5). DeviceBusy past the deadline.
  virtual void quiesce(Deadline deadline) = 0;
  // Work of others, from submission to its end: what DeviceEvent says. Only a device that cannot see it for
  // itself counts it; a GPU's driver sees everything.
  virtual void begin_work() noexcept {}
  virtual void end_work() noexcept {}
};

class Reservation final {
 public:
  Reservation() = default;
  Reservation(std::shared_ptr<Device> device, std::size_t size_bytes);
  Reservation(Reservation&& other) noexcept;
  Reservation& operator=(Reservation&& other) noexcept;
  Reservation(const Reservation&) = delete;
  Reservation& operator=(const Reservation&) = delete;
  ~Reservation();
  [[nodiscard]] Address base() const noexcept { return base_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }

 private:
  std::shared_ptr<Device> device_;
  Address base_ = 0;
  std::size_t size_bytes_ = 0;
};

class Physical final {
 public:
  Physical() = default;
  Physical(std::shared_ptr<Device> device, std::size_t size_bytes);
  Physical(Physical&& other) noexcept;
  Physical& operator=(Physical&& other) noexcept;
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;
  ~Physical();
  [[nodiscard]] PhysicalHandle handle() const noexcept { return handle_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }

 private:
  std::shared_ptr<Device> device_;
  PhysicalHandle handle_ = 0;
  std::size_t size_bytes_ = 0;
};

// Owns the Physical that it maps. release() unmaps and frees and can throw (then nothing changed);
// the destructor does the same and swallows.
class Mapping final {
 public:
  Mapping() = default;
  Mapping(std::shared_ptr<Device> device, Address at, Physical physical);
  // Takes the physical memory over only when it is mapped: on a throw it is the caller's still.
  [[nodiscard]] static Mapping over(std::shared_ptr<Device> device, Address at, Physical& physical);
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  void release();
  // Unmaps, and gives the physical memory back with what is in it. Can throw; then nothing changed.
  [[nodiscard]] Physical take_off();
  [[nodiscard]] Address address() const noexcept { return at_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return physical_.size_bytes(); }
  [[nodiscard]] explicit operator bool() const noexcept { return at_ != 0; }

 private:
  std::shared_ptr<Device> device_;
  Address at_ = 0;
  Physical physical_;
};

class HostBuffer final {
 public:
  HostBuffer() = default;
  HostBuffer(std::shared_ptr<Device> device, std::size_t size_bytes, bool pinned);
  HostBuffer(HostBuffer&& other) noexcept;
  HostBuffer& operator=(HostBuffer&& other) noexcept;
  HostBuffer(const HostBuffer&) = delete;
  HostBuffer& operator=(const HostBuffer&) = delete;
  ~HostBuffer();
  [[nodiscard]] Address base() const noexcept { return base_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }
  [[nodiscard]] bool pinned() const noexcept { return pinned_; }
  [[nodiscard]] explicit operator bool() const noexcept { return base_ != 0; }

 private:
  std::shared_ptr<Device> device_;
  Address base_ = 0;
  std::size_t size_bytes_ = 0;
  bool pinned_ = false;
};

// Held by a thread whose own work reads or writes the device's memory: while it lives, quiesce waits (M5).
class DeviceEvent final {
 public:
  explicit DeviceEvent(std::shared_ptr<Device> device) : device_(std::move(device)) { device_->begin_work(); }
  DeviceEvent(DeviceEvent&& other) noexcept : device_(std::move(other.device_)) {}
  DeviceEvent& operator=(DeviceEvent&&) = delete;
  DeviceEvent(const DeviceEvent&) = delete;
  DeviceEvent& operator=(const DeviceEvent&) = delete;
  ~DeviceEvent() { complete(); }
  void complete() noexcept {
    if (device_) std::exchange(device_, nullptr)->end_work();
  }

 private:
  std::shared_ptr<Device> device_;
};

// Maps [base, base + size) in chunks of device.chunk_bytes(), or of chunk_bytes. All or nothing: on a throw
// what was mapped is gone again.
[[nodiscard]] std::vector<Mapping> map_chunks(const std::shared_ptr<Device>& device, Address base,
                                              std::size_t size_bytes, std::size_t chunk_bytes = 0);
[[nodiscard]] std::size_t round_up(std::size_t size_bytes, std::size_t multiple) noexcept;

// --- implementations (src/device/host.cpp, cuda.cpp, faulty.cpp) ---

// A GPU's memory played by RAM: memfd pages at fixed addresses. Processes that give the same name share the
// capacity.
[[nodiscard]] std::shared_ptr<Device> make_host_device(const std::string& name, std::size_t capacity_bytes,
                                                       std::size_t granularity_bytes = std::size_t{2} << 20);
// The driver API by dlopen. DeviceError when there is no driver or no such GPU.
[[nodiscard]] std::shared_ptr<Device> make_cuda_device(int ordinal);
[[nodiscard]] int cuda_device_count() noexcept;  // 0 where there is no driver

// Wraps a device and makes chosen calls fail; which call is counted over all primitives and work functions.
// New memory comes dirty, as a GPU's may.
class FaultyDevice : public Device {
 public:
  // The k-th counted call from now (1 = the next) throws; 0 = none. Fires once unless `forever`.
  virtual void fail_at(std::uint64_t k, bool forever = false) noexcept = 0;
  // Sleeps this long before each counted call of that name ("unmap_range", …; "" = every call). 0 = off.
  virtual void delay(const std::string& call, double seconds) = 0;
  // One byte of what the k-th copy from now (1 = the next) has written is flipped behind its back; 0 = none.
  virtual void corrupt_copy(std::uint64_t k) noexcept = 0;
  [[nodiscard]] virtual std::uint64_t calls() const noexcept = 0;
  [[nodiscard]] virtual std::vector<std::string> log() const = 0;  // names of counted calls since fail_at
};
[[nodiscard]] std::shared_ptr<FaultyDevice> make_faulty_device(std::shared_ptr<Device> inner);

}  // namespace torpor
