// GpuPool: the slots on the GPU. One range of addresses that never changes, physical memory under all of it
// or none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "torpor/device.hpp"

namespace torpor::kv {

class GpuPool final {
 public:
  // As many slots as fit into gpu_bytes, in whole granules. Reserves and maps. Misuse when not even one slot
  // fits, OutOfDeviceMemory when the device has no room. seed: slots are given in a random order.
  GpuPool(std::shared_ptr<Device> device, std::size_t page_bytes, std::size_t gpu_bytes,
          std::optional<std::uint64_t> seed);

  [[nodiscard]] std::size_t slots() const noexcept { return slots_; }
  [[nodiscard]] std::size_t free_slots() const noexcept { return free_.size(); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return range_.size_bytes(); }
  [[nodiscard]] std::size_t mapped_bytes() const noexcept;
  [[nodiscard]] Address base() const noexcept { return range_.base(); }
  [[nodiscard]] Address address(std::int32_t slot) const noexcept {
    return range_.base() + static_cast<std::size_t>(slot) * page_bytes_;
  }

  // There must be a free slot. What lies in it is undefined.
  [[nodiscard]] std::int32_t take() noexcept;
  void give_back(std::int32_t slot) noexcept;
  void give_back_all() noexcept;

  // All or nothing; may throw.
  void map();
  // Takes back map(): cannot fail, what the driver refuses to unmap is left to it.
  void drop_mappings() noexcept { mappings_.clear(); }
  // Unmaps and frees one chunk and returns its bytes, 0 when nothing is mapped. May throw; then nothing
  // changed.
  [[nodiscard]] std::size_t release_one();

 private:
  std::shared_ptr<Device> device_;
  std::size_t page_bytes_;
  std::size_t slots_;
  std::optional<std::mt19937_64> random_;
  Reservation range_;
  std::vector<Mapping> mappings_;
  std::vector<std::int32_t> free_;  // its capacity is slots_ always: give_back must not allocate
};

}  // namespace torpor::kv
