// Arena: memory of one tag for code that allocates by itself (a framework's caching allocator, pools of CUDA
// graphs): blocks in a reserved range of addresses, backed piece by piece as they are asked for.
//
// Asleep, all physical memory is gone, and what blocks hold lies in host memory or on disk, or nowhere, by
// the restore mode: only blocks that are in use are saved. Every address is what it was after a wake (S1).
// allocate() and free() may come from any thread; blocks may be given back asleep, but none is handed out.
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "torpor/host_pool.hpp"
#include "torpor/participant.hpp"

namespace torpor {

class SavedCopy;  // src/saved_copy.hpp

struct ArenaSpec {
  std::string tag{};
  std::size_t reserve_bytes = 0;  // of addresses: the most that it can ever hold
  std::string name{};
  RestoreMode restore = RestoreMode::none;  // when a sleep names no mode
};

class Arena final : public Participant, public std::enable_shared_from_this<Arena> {
 public:
  static constexpr std::size_t alignment_bytes = 512;

  // Reserves addresses, and no memory. Misuse for a size of 0 or an empty tag.
  Arena(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool, std::shared_ptr<DiskFile> disk,
        ArenaSpec spec);
  ~Arena() override;

  [[nodiscard]] Address address() const noexcept { return reservation_.base(); }
  [[nodiscard]] std::size_t reserve_bytes() const noexcept { return reservation_.size_bytes(); }
  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }
  // Of blocks that are in use, and of memory that backs them.
  [[nodiscard]] std::size_t used_bytes() const;
  [[nodiscard]] std::size_t mapped_bytes() const;
  // A block of at least one byte, aligned to alignment_bytes. Misuse while asleep or on the way there;
  // OutOfDeviceMemory when the device has no more, or the reserved addresses are used up.
  [[nodiscard]] Address allocate(std::size_t size_bytes);
  // Gives whole unused pieces at the end back to the device, awake. Misuse for what is no block.
  void free(Address block);

  [[nodiscard]] const std::string& tag() const noexcept override { return spec_.tag; }
  [[nodiscard]] const std::string& name() const noexcept override { return spec_.name; }
  [[nodiscard]] bool parked() const noexcept override;
  [[nodiscard]] RestoreMode default_mode() const noexcept override { return spec_.restore; }
  [[nodiscard]] Usage usage() const override;
  [[nodiscard]] bool supports(RestoreMode) const noexcept override { return true; }
  [[nodiscard]] bool can_verify(Action action) const noexcept override;

  [[nodiscard]] Item plan_sleep(RestoreMode mode) const override;
  [[nodiscard]] Item plan_wake() const override;
  void stage_sleep(const Item& item, UndoStack& undo, StageContext& context) override;
  void stage_wake(const Item& item, UndoStack& undo, StageContext& context) override;
  std::size_t commit_sleep() override;
  void commit_wake() noexcept override;
  void publish() noexcept override;

 private:
  // Neighbouring blocks in use, and where their contents lie asleep.
  struct Run {
    Address at;
    std::size_t size_bytes;
    std::unique_ptr<SavedCopy> copy;
  };
  struct Saved {
    std::vector<Run> runs;
    std::vector<std::uint64_t> sums;  // by pieces of runs; empty: none were taken
  };

  [[nodiscard]] std::vector<Run> runs() const;  // of what is in use; mutex_ is held
  [[nodiscard]] std::vector<std::uint64_t> checksums(const std::vector<Run>& runs, StreamId stream,
                                                     const StageContext& context) const;
  void save(RestoreMode mode, StageContext& context);
  void restore(StageContext& context);
  [[nodiscard]] std::optional<Address> take(std::size_t size_bytes);
  void grow(std::size_t size_bytes);
  void add_unused(Address at, std::size_t size_bytes);
  void shrink();

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<HostPool> pool_;
  const std::shared_ptr<DiskFile> disk_;
  const ArenaSpec spec_;
  const Reservation reservation_;

  mutable std::mutex mutex_;  // over all below, but not held while contents are copied: the ledger's lock is
  std::map<Address, std::size_t> used_;
  std::map<Address, std::size_t> unused_;  // backed, and in no block; no two are neighbours
  std::vector<Mapping> mappings_;          // from the beginning on, without gaps
  std::size_t mapped_bytes_ = 0;           // also asleep: what a wake maps again
  std::vector<Mapping> staged_mappings_;
  Saved saved_;
  Saved staged_saved_;
  bool parked_ = false;
  bool staged_ = false;  // between the stage of a sleep and its end
  bool saved_taken_over_ = false;
  RestoreMode mode_ = RestoreMode::none;
  std::optional<RestoreMode> pending_mode_;
};

}  // namespace torpor
