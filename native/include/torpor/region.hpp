// Region: opaque tagged bytes (weights, graphs, workspace) at an address that never changes.
//
// Asleep, its physical memory is gone and its contents lie in host memory, or nowhere, by the restore mode. A
// wake keeps the saved copy until it is published. An immutable region may keep it longer, within the host
// pool's bound: the next sleep then only unmaps (M9). A preserve_always region stays mapped and is residual
// (S3): checksums are of use there only when it is immutable, since of any other its owner may write to it
// while it sleeps (K13).
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "torpor/host_pool.hpp"
#include "torpor/participant.hpp"

namespace torpor {

class SavedCopy;  // src/saved_copy.hpp

struct RegionSpec {
  std::string tag{};
  std::size_t size_bytes = 0;
  std::string name{};
  RestoreMode restore = RestoreMode::pinned;  // when a sleep names no mode
  bool immutable = false;
  bool preserve_always = false;
  bool zero_on_wake = false;  // reads zero after a wake from `none` too (S4)
};

class Region final : public Participant {
 public:
  // Reserves and maps. OutOfDeviceMemory, DeviceError; Misuse for a size of 0 or an empty tag.
  Region(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool, std::shared_ptr<DiskFile> disk,
         RegionSpec spec);
  ~Region() override;

  [[nodiscard]] Address address() const noexcept { return reservation_.base(); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return spec_.size_bytes; }
  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }
  // An immutable region was written to: its retained backup is worth nothing now. Misuse while parked. Waits
  // for a piece of one that is being saved.
  void contents_changed();
  // Saves the next piece of an immutable region's backup while it is awake (M9). True when more is to come.
  // The backup counts under the pool's bound from its first piece on; none is begun that does not fit there,
  // or into room_bytes of host memory or disk, which it then takes from.
  bool prefill_piece(StageContext& context, std::size_t& room_bytes);
  // Drops a backup that is kept for speed alone; returns the bytes of host memory that it took.
  std::size_t drop_backup() noexcept;

  [[nodiscard]] const std::string& tag() const noexcept override { return spec_.tag; }
  [[nodiscard]] const std::string& name() const noexcept override { return spec_.name; }
  [[nodiscard]] bool parked() const noexcept override { return parked_.load(); }
  [[nodiscard]] RestoreMode default_mode() const noexcept override { return spec_.restore; }
  [[nodiscard]] Usage usage() const override;
  [[nodiscard]] bool supports(RestoreMode) const noexcept override { return true; }
  [[nodiscard]] bool can_verify(Action action) const noexcept override;

  [[nodiscard]] std::vector<HostPiece> host_pieces() const override;
  [[nodiscard]] Item plan_sleep(RestoreMode mode) const override;
  [[nodiscard]] Item plan_wake() const override;
  void stage_sleep(const Item& item, UndoStack& undo, StageContext& context) override;
  void stage_wake(const Item& item, UndoStack& undo, StageContext& context) override;
  std::size_t commit_sleep() override;
  void commit_wake() noexcept override;
  void publish() noexcept override;

 private:
  using Checksums = std::vector<std::uint64_t>;  // by pieces; empty: none were taken

  // A copy that is there already and serves this mode (M9).
  [[nodiscard]] bool has_copy_for(RestoreMode mode) const noexcept;
  [[nodiscard]] Checksums checksums(StreamId stream, const StageContext& context) const;
  void save(RestoreMode mode, StageContext& context);
  void restore(StageContext& context);
  void verify(const StageContext& context) const;
  void drop_copies() noexcept;
  void end_retention() noexcept;

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<HostPool> pool_;
  const std::shared_ptr<DiskFile> disk_;
  const RegionSpec spec_;
  const std::size_t mapped_bytes_;  // size_bytes in whole granules
  const Reservation reservation_;
  std::vector<Mapping> mappings_;
  std::vector<Mapping> staged_mappings_;  // of a wake that is not committed
  // While awake its owner may drop what others look at or make, and that without the ledger's lock.
  mutable std::mutex copies_;
  // Asleep: the contents; awake: a retained backup, or one to be published. Null: none.
  std::unique_ptr<SavedCopy> saved_;
  std::unique_ptr<SavedCopy> staged_saved_;  // of a sleep that is not committed
  Checksums sums_;                           // of what saved_ holds
  Checksums staged_sums_;
  bool staging_done_ = false;       // a commit has taken them over
  std::size_t retained_bytes_ = 0;  // what of saved_ counts under the pool's bound
  std::atomic<bool> parked_{false};
  RestoreMode mode_ = RestoreMode::none;     // in force while parked
  std::optional<RestoreMode> pending_mode_;  // of a sleep that is staged or half committed
};

}  // namespace torpor
