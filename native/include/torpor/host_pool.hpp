// HostPool: host memory that is kept between cycles because making it is slow (M8).
//
// What is kept lies under one bound: idle buffers here, and backups that regions retain while they are awake.
// Saved copies of what sleeps do not count: they are needed. Thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "torpor/device.hpp"

namespace torpor {

class HostPool final {
 public:
  // bound_bytes 0 keeps nothing.
  HostPool(std::shared_ptr<Device> device, std::size_t bound_bytes);
  HostPool(const HostPool&) = delete;
  HostPool& operator=(const HostPool&) = delete;
  HostPool(HostPool&&) = delete;
  HostPool& operator=(HostPool&&) = delete;
  ~HostPool() = default;

  // At least size_bytes: an idle buffer of at most twice the size, else a new one. Throws as create_host
  // does, but not before everything idle was given back to the machine.
  [[nodiscard]] HostBuffer acquire(std::size_t size_bytes, bool pinned);
  // Kept when it fits under the bound, else freed.
  void give_back(HostBuffer buffer) noexcept;

  // Counts a backup that its owner keeps under the bound; idle buffers make way. False: over the bound.
  [[nodiscard]] bool retain(std::size_t size_bytes) noexcept;
  void release_retained(std::size_t size_bytes) noexcept;

  // Frees idle buffers until at most target_bytes of them are left; returns the bytes freed.
  std::size_t trim(std::size_t target_bytes = 0) noexcept;

  // A new bound; idle buffers over it are freed at once. Backups over it go when their owners let them go.
  void resize(std::size_t bound_bytes) noexcept;

  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }
  [[nodiscard]] std::size_t bound_bytes() const noexcept;
  [[nodiscard]] std::size_t idle_bytes() const noexcept;
  [[nodiscard]] std::size_t retained_bytes() const noexcept;

 private:
  std::size_t free_idle(std::size_t target_bytes) noexcept;  // the lock is held

  const std::shared_ptr<Device> device_;
  mutable std::mutex mutex_;
  std::size_t bound_bytes_;
  std::vector<HostBuffer> idle_;  // the oldest first
  std::size_t idle_bytes_ = 0;
  std::size_t retained_bytes_ = 0;
};

}  // namespace torpor
