// PoolExchange: physical memory that goes from pools that shrink to pools that grow, chunk by chunk.
//
// What one pool gives, another takes as it is, so that nobody else can get it in between; what nobody takes
// goes to the device at the end, and what is missing is taken from it. Until commit() everything can be put
// back, contents included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torpor/kv/gpu_pool.hpp"

namespace torpor::kv {

class PoolExchange final {
 public:
  // sizes_bytes: what each pool is to have in the end, in whole granules. A pool gives no more than whole
  // chunks.
  PoolExchange(std::vector<GpuPool*> pools, std::vector<std::size_t> sizes_bytes);

  // May throw (OutOfDeviceMemory, DeviceError, bad_alloc); then undo().
  void run();
  // Puts everything back, the last step first. False when a step of that failed: its chunk stays where it is
  // or goes to the device, and what lay in the chunks that were moved is lost; the pools are sound, of the
  // sizes that are mapped.
  [[nodiscard]] bool undo() noexcept;
  // What no pool has taken goes to the device.
  void commit() noexcept { chunks_.clear(); }

 private:
  enum class Kind : std::uint8_t { taken, given, created };
  struct Step {
    Kind kind;
    std::size_t pool;
    std::size_t chunk;  // not of created ones
  };
  void shrink(std::size_t pool);
  void grow(std::size_t pool);
  [[nodiscard]] std::size_t largest_chunk(std::size_t limit_bytes) const noexcept;
  void undo_step(const Step& step);

  std::vector<GpuPool*> pools_;
  std::vector<std::size_t> sizes_bytes_;
  std::vector<Physical> chunks_;  // that pools have given; empty while another has it
  std::vector<Step> steps_;
};

}  // namespace torpor::kv
