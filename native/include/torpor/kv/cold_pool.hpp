// ColdPool: places for cold pages on the GPU itself: more pages than slots fit where the cold form is
// smaller, and none of them is lost to a slow bus. A fixed number of places; all are mapped or none.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "torpor/kv/cold_store.hpp"
#include "torpor/kv/gpu_pool.hpp"

namespace torpor::kv {

class ColdPool final : public ColdStore {
 public:
  // Misuse and OutOfDeviceMemory as GpuPool.
  ColdPool(std::shared_ptr<Device> device, std::size_t cold_bytes, std::size_t gpu_bytes)
      : pool_(std::move(device), cold_bytes, gpu_bytes, std::nullopt) {}

  [[nodiscard]] GpuPool& pool() noexcept { return pool_; }
  [[nodiscard]] const GpuPool& pool() const noexcept { return pool_; }

  [[nodiscard]] std::size_t ceiling_places() const noexcept override { return pool_.slots(); }
  [[nodiscard]] std::size_t used() const noexcept override { return pool_.slots() - pool_.free_slots(); }
  [[nodiscard]] std::size_t committed_free() const noexcept override { return pool_.free_slots(); }
  [[nodiscard]] std::size_t committed_bytes() const noexcept override { return pool_.mapped_bytes(); }
  [[nodiscard]] std::size_t bytes_to_commit(std::size_t) const noexcept override { return 0; }
  void ensure(std::size_t places) override;
  [[nodiscard]] Place take() noexcept override {
    return {0, static_cast<std::uint32_t>(pool_.take()), Tier::cold_gpu};
  }
  void give_back(Place place) noexcept override { pool_.give_back(static_cast<std::int32_t>(place.index)); }
  void trim() noexcept override {}
  [[nodiscard]] std::uint64_t at(Place place) const noexcept override {
    return pool_.address(static_cast<std::int32_t>(place.index));
  }

 private:
  GpuPool pool_;
};

}  // namespace torpor::kv
