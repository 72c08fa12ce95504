// The kernels loaded into a context, and the page-locked tables that they read their work from.
//
// Nothing here waits with the lock held. A launch takes a free table; when none is free (two windows of a
// stream are under way already) the caller copies by other means.
#pragma once

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "../cuda_driver.hpp"
#include "../host_reservation.hpp"
#include "torpor/checksum.hpp"
#include "torpor/device.hpp"

namespace torpor::kernels {

class KernelSet final {
 public:
  // Pieces that are smaller on average go by the copy kernel; above, the driver's own copies are as fast.
  static constexpr std::size_t small_copy_bytes = std::size_t{256} << 10;
  static constexpr std::size_t table_entries = 8192;

  // Loads and runs each kernel once, with the context current: a load in the middle of a wake could run out
  // of memory. Null when there is nothing to load, the GPU is too old for the image, or memory for tables is
  // short; `why` then says so in words.
  [[nodiscard]] static std::unique_ptr<KernelSet> load(const cuda::Driver& driver, HostReservation& memory,
                                                       cuda::Stream stream, std::string& why);
  KernelSet(const KernelSet&) = delete;
  KernelSet& operator=(const KernelSet&) = delete;
  ~KernelSet();

  // Puts copies on the stream, from the first on, and returns how many: all unless tables run out. Both sides
  // are device memory or page-locked; the copies do not depend on each other.
  [[nodiscard]] std::size_t copy(std::span<const Copy> batch, cuda::Stream stream);

  // One launch of checksums under way: its sums are there once `done` has happened; it gives its table back.
  class Sums final {
   public:
    Sums(KernelSet& owner, std::size_t slot, std::size_t count) : owner_(owner), slot_(slot), count_(count) {}
    Sums(const Sums&) = delete;
    Sums& operator=(const Sums&) = delete;
    ~Sums() { owner_.slots_[slot_].taken.store(false); }
    [[nodiscard]] cuda::Event done() const noexcept { return owner_.slots_[slot_].done; }
    [[nodiscard]] std::span<const std::uint64_t> values() const noexcept {
      return {owner_.slots_[slot_].sums, count_};
    }

   private:
    KernelSet& owner_;
    std::size_t slot_;
    std::size_t count_;
  };
  // table_entries parts at most. Null when no table is free.
  [[nodiscard]] std::unique_ptr<Sums> checksum(std::span<const ChecksumPart> parts, cuda::Stream stream);

 private:
  struct Slot {
    void* table = nullptr;
    std::uint64_t* sums = nullptr;
    cuda::Event done = nullptr;
    std::atomic<bool> taken{false};  // by a Sums that has not been read yet
  };

  KernelSet(const cuda::Driver& driver, HostReservation& memory) : driver_(driver), host_memory_(memory) {}
  void make(std::span<const std::byte> image, cuda::Stream stream);
  [[nodiscard]] Slot* free_slot();
  void launch(cuda::Function kernel, unsigned blocks, cuda::Stream stream, void** arguments);

  const cuda::Driver& driver_;
  HostReservation& host_memory_;
  cuda::Module module_ = nullptr;
  cuda::Function copy_ = nullptr;
  cuda::Function checksum_ = nullptr;
  Address memory_ = 0;
  bool registered_ = false;
  std::mutex mutex_;  // over the choice of a slot up to its launch
  std::array<Slot, 6> slots_;
};

}  // namespace torpor::kernels
