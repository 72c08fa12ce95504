// GpuPool: the slots on the GPU. One range of addresses that never changes, physical memory under the
// beginning of it or under none of it. Behind that beginning is room to grow.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "torpor/device.hpp"

namespace torpor::kv {

struct Page;  // page.hpp

// How a pool may change.
struct PoolRoom {
  std::size_t reserved_bytes = 0;  // of addresses, no less than the pool has; 0 = it never grows
  std::size_t chunk_bytes = 0;     // of physical memory: what it gives away at once; 0 = the device's
};

class GpuPool final {
 public:
  // As many slots as fit into gpu_bytes, in whole granules. Reserves and maps. Misuse when not even one slot
  // fits, OutOfDeviceMemory when the device has no room. seed: slots are given in a random order.
  GpuPool(std::shared_ptr<Device> device, std::size_t page_bytes, std::size_t gpu_bytes,
          std::optional<std::uint64_t> seed, const PoolRoom& room = {});

  [[nodiscard]] std::size_t slots() const noexcept { return slots_; }
  [[nodiscard]] std::size_t free_slots() const noexcept { return free_.size(); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }  // when mapped
  [[nodiscard]] std::size_t reserved_bytes() const noexcept { return range_.size_bytes(); }
  [[nodiscard]] std::size_t mapped_bytes() const noexcept;
  [[nodiscard]] Address base() const noexcept { return range_.base(); }
  [[nodiscard]] Address address(std::int32_t slot) const noexcept {
    return range_.base() + static_cast<std::size_t>(slot) * page_bytes_;
  }

  // There must be a free slot with memory under it. What lies in it is undefined.
  [[nodiscard]] std::int32_t take() noexcept;
  void give_back(std::int32_t slot) noexcept;
  void give_back_all() noexcept;
  // Whose a slot is that was taken, until it is given back.
  void settle_in(std::int32_t slot, Page& page) noexcept { in_slot_[static_cast<std::size_t>(slot)] = &page; }
  // The pages in the order of their slots. May throw bad_alloc.
  [[nodiscard]] std::vector<Page*> pages() const;

  // All or nothing; may throw.
  void map();
  // Maps one more chunk of a pool that is parked or mapped in part; false when nothing is left. May throw;
  // then nothing changed.
  bool map_next();
  // Free slots with memory under them: all but in a pool that is mapped in part.
  [[nodiscard]] std::size_t ready_slots() const noexcept { return free_.size() - bare_slots_; }
  // Takes back map(): cannot fail, what the driver refuses to unmap is left to it.
  void drop_mappings() noexcept;
  // Unmaps and frees one chunk and returns its bytes, 0 when nothing is mapped. May throw; then nothing
  // changed.
  [[nodiscard]] std::size_t release_one();

  // --- maintenance of a mapped pool; its slots follow with settle() ---
  // What is left of it when as many chunks go as can, and it keeps this much.
  [[nodiscard]] std::size_t size_down_to(std::size_t least_bytes) const noexcept;
  [[nodiscard]] std::vector<std::size_t> chunk_sizes() const;  // from the base on
  // Unmaps its last chunk, which keeps what is in it. May throw; then nothing changed.
  [[nodiscard]] Physical take_chunk();
  // Maps memory behind its end. May throw; then nothing changed, and the memory is the caller's still.
  void add_chunk(Physical& physical);
  // Maps a new chunk of at most so many bytes, and returns its size. May throw; then nothing changed.
  [[nodiscard]] std::size_t add_new_chunk(std::size_t limit_bytes);
  // Frees its last chunk: cannot fail, what the driver refuses to unmap is left to it.
  void drop_chunk() noexcept { mappings_.pop_back(); }
  // So that settle() need not allocate with a pool of this size. May throw.
  void reserve_books(std::size_t size_bytes) {
    free_.reserve(size_bytes / page_bytes_);
    in_slot_.reserve(size_bytes / page_bytes_);
  }
  // The slots are those of the memory that is mapped now; in use are those that `used` says, all of them
  // there. Their pages have to settle in anew.
  void settle(const std::vector<bool>& used) noexcept;
  [[nodiscard]] const std::vector<std::int32_t>& free_list() const noexcept { return free_; }

 private:
  void count_bare_slots() noexcept;

  std::shared_ptr<Device> device_;
  std::size_t page_bytes_;
  std::size_t slots_;
  std::size_t size_bytes_;
  std::size_t chunk_bytes_;
  std::optional<std::mt19937_64> random_;
  Reservation range_;
  std::vector<Mapping> mappings_;   // one behind the other from the base on
  std::vector<std::int32_t> free_;  // its capacity is slots_ at least: give_back must not allocate
  std::size_t bare_slots_ = 0;      // without memory: all free, and the first ones in free_
  std::vector<Page*> in_slot_;      // by slot; nullptr: free, or nobody has settled in
};

}  // namespace torpor::kv
