// The cuda device: virtual memory management of the driver API, two streams, registered host memory.
//
// Every method makes the device's primary context current on the calling thread for its own duration. It is
// the context that torch uses too, so that quiesce sees all of a process's work on the GPU.
#pragma once

#include <unistd.h>

#include <array>
#include <mutex>
#include <unordered_map>

#include "copy_batch.hpp"
#include "cuda_driver.hpp"
#include "host_reservation.hpp"
#include "kernels/kernel_set.hpp"
#include "torpor/device.hpp"

namespace torpor {

// Makes a context current for as long as this lives, and our calls harmless to a capture of a graph that this
// or another thread has under way: an allocator is called during captures, and what we do is no part of them.
class CurrentContext final {
 public:
  CurrentContext(const cuda::Driver& driver, cuda::Context context) noexcept : driver_(driver) {
    driver_.context_get_current(&before_);
    changed_ = before_ != context && driver_.context_set_current(context) == cuda::success;
    exchanged_ = driver_.exchange_capture_mode(&capture_mode_) == cuda::success;
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;
  ~CurrentContext() {
    if (exchanged_) driver_.exchange_capture_mode(&capture_mode_);
    if (changed_ && before_ != nullptr) driver_.context_set_current(before_);
  }

 private:
  const cuda::Driver& driver_;
  cuda::Context before_ = nullptr;
  bool changed_ = false;
  int capture_mode_ = cuda::capture_relaxed;  // and what it was before
  bool exchanged_ = false;
};

class CudaDevice final : public Device {
 public:
  CudaDevice(std::shared_ptr<const cuda::Driver> driver, int ordinal);
  ~CudaDevice() override;

  DeviceKind kind() const noexcept override { return DeviceKind::cuda; }
  std::string id() const override { return id_; }
  int ordinal() const noexcept override { return ordinal_; }
  std::size_t granularity_bytes() const noexcept override { return granularity_bytes_; }
  std::size_t chunk_bytes() const noexcept override {
    return round_up(large_chunk_bytes, granularity_bytes_);
  }
  bool can_pin() const noexcept override { return true; }
  std::string kernels() const override { return kernels_ ? "loaded" : why_no_kernels_; }
  std::size_t kernel_copy_bytes() const noexcept override {
    return kernels_ ? kernels::KernelSet::small_copy_bytes : 0;
  }
  MemoryInfo memory_info() override;

  Address reserve_range(std::size_t size_bytes) override;
  void unreserve_range(Address base, std::size_t size_bytes) noexcept override;
  PhysicalHandle create_physical(std::size_t size_bytes) override;
  void destroy_physical(PhysicalHandle handle) noexcept override;
  void map_range(Address at, PhysicalHandle handle, std::size_t size_bytes) override;
  void unmap_range(Address at, std::size_t size_bytes) override;
  Address create_host(std::size_t size_bytes, bool pinned) override;
  void destroy_host(Address base, std::size_t size_bytes) noexcept override;

  void copy(std::span<const Copy> batch, StreamId stream) override;
  void fill(Address at, std::uint8_t value, std::size_t size_bytes, StreamId stream) override;
  void wait(StreamId stream, Deadline deadline, const StopFlag* stop) override;
  Mark mark(StreamId stream) override;
  void wait_for(Mark mark, StreamId stream, Deadline deadline, const StopFlag* stop) override;
  std::vector<std::uint64_t> checksum(std::span<const ByteRange> ranges, StreamId stream, Deadline deadline,
                                      const StopFlag* stop) override;
  void quiesce(Deadline deadline) override;

 private:
  // Large creates are quickest in pieces of this size once freed memory has been scrubbed, a third of a
  // second later.
  static constexpr std::size_t large_chunk_bytes = std::size_t{1} << 30;

  struct Pages {
    cuda::Handle handle;
    std::size_t size_bytes;
    Address mapped_at;  // 0 while not mapped
  };

  [[nodiscard]] CurrentContext enter() const noexcept { return {*driver_, context_}; }
  [[nodiscard]] bool foreign() const noexcept { return getpid() != owner_pid_; }
  [[nodiscard]] cuda::AllocationProperties properties() const noexcept;
  [[nodiscard]] cuda::Stream stream_of(StreamId stream) const noexcept {
    return streams_[static_cast<std::size_t>(stream)];
  }
  void check_size(std::size_t size_bytes, const char* call) const;
  void release_all() noexcept;
  void copy_pinned(std::span<const Copy> batch, cuda::Stream stream);
  void copy_small(std::vector<Copy>& batch, cuda::Stream stream);
  [[nodiscard]] std::vector<std::uint64_t> checksum_by_kernel(std::span<const ByteRange> ranges,
                                                              StreamId stream, Deadline deadline,
                                                              const StopFlag* stop);
  void poll(cuda::Event event, Deadline deadline, const StopFlag* stop, const char* what);

  const std::shared_ptr<const cuda::Driver> driver_;
  const int ordinal_;
  const int owner_pid_;
  cuda::DeviceIndex index_ = 0;
  cuda::Context context_ = nullptr;
  std::array<cuda::Stream, 2> streams_{};
  // Of the latest marks, one after the other. A mark whose event stands for a later one by now has long
  // happened, or is waited for a little longer than it must.
  struct Marks {
    std::array<cuda::Event, 8> events{};
    std::atomic<Mark> next{0};
  };
  std::array<Marks, 2> marks_{};
  std::string id_;
  HostReservation host_memory_;
  std::unique_ptr<kernels::KernelSet> kernels_;  // its tables lie in there
  std::string why_no_kernels_;
  std::size_t granularity_bytes_ = 0;

  std::mutex mutex_;  // over the tables; never held across a call that waits
  PhysicalHandle next_handle_ = 1;
  std::unordered_map<PhysicalHandle, Pages> pages_;
  std::unordered_map<Address, PhysicalHandle> mapped_;
  HostRanges host_;
};

}  // namespace torpor
