// Region: opaque tagged bytes (weights, graphs, workspace) at an address that never changes.
//
// Asleep, its physical memory is gone and its contents lie in host memory, or nowhere, by the restore mode. A
// wake keeps the saved copy until it is published. An immutable region may keep it longer, within the host
// pool's bound: the next sleep then only unmaps (M9). A preserve_always region stays mapped and is residual
// (S3).
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torpor/host_pool.hpp"
#include "torpor/participant.hpp"

namespace torpor {

struct RegionSpec {
  std::string tag{};
  std::size_t size_bytes = 0;
  std::string name{};
  RestoreMode restore = RestoreMode::pinned;  // when a sleep names no mode
  bool immutable = false;
  bool preserve_always = false;
};

class Region final : public Participant {
 public:
  // Reserves and maps. OutOfDeviceMemory, DeviceError; Misuse for a size of 0 or an empty tag.
  Region(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool, RegionSpec spec);
  ~Region() override;

  [[nodiscard]] Address address() const noexcept { return reservation_.base(); }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return spec_.size_bytes; }
  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }
  // An immutable region was written to: its retained backup is worth nothing now. Misuse while parked.
  void contents_changed();

  [[nodiscard]] const std::string& tag() const noexcept override { return spec_.tag; }
  [[nodiscard]] const std::string& name() const noexcept override { return spec_.name; }
  [[nodiscard]] bool parked() const noexcept override { return parked_.load(); }
  [[nodiscard]] RestoreMode default_mode() const noexcept override { return spec_.restore; }
  [[nodiscard]] Usage usage() const override;

  [[nodiscard]] Item plan_sleep(RestoreMode mode) const override;
  [[nodiscard]] Item plan_wake() const override;
  void stage_sleep(const Item& item, UndoStack& undo, StageContext& context) override;
  void stage_wake(const Item& item, UndoStack& undo, StageContext& context) override;
  std::size_t commit_sleep() override;
  void commit_wake() noexcept override;
  void publish() noexcept override;

 private:
  using Copies = std::vector<HostBuffer>;

  [[nodiscard]] Item item_of(Action action) const;
  void copy_out(RestoreMode mode, StageContext& context);
  void restore(RestoreMode mode, StageContext& context);
  void drop(Copies& host) noexcept;
  void end_retention() noexcept;

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<HostPool> pool_;
  const RegionSpec spec_;
  const std::size_t mapped_bytes_;  // size_bytes in whole granules
  const Reservation reservation_;
  std::vector<Mapping> mappings_;
  std::vector<Mapping> staged_mappings_;  // of a wake that is not committed
  Copies saved_;                    // asleep: the contents; awake: a retained backup, or one to be published
  Copies staged_saved_;             // of a sleep that is not committed
  std::size_t retained_bytes_ = 0;  // what of saved_ counts under the pool's bound
  std::atomic<bool> parked_{false};
  RestoreMode mode_ = RestoreMode::none;     // in force while parked
  std::optional<RestoreMode> pending_mode_;  // of a sleep that is staged or half committed
};

}  // namespace torpor
