// Ledger: all regions and KV managers of one rank, under one transaction at a time.
//
//   preflight → stage → commit → publish, or abort at any time before commit
//
// Everything that can fail happens in stage, where it can still be undone; the undo is a stack of objects.
// Thread- safe: one step runs at a time, and status() and stop() never wait for it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "torpor/disk_file.hpp"
#include "torpor/host_pool.hpp"
#include "torpor/participant.hpp"
#include "torpor/plan.hpp"
#include "torpor/region.hpp"

namespace torpor {

class Externals;  // src/externals.hpp

enum class LedgerPhase : std::uint8_t { idle, staged, committing, committed };
[[nodiscard]] const char* to_string(LedgerPhase phase) noexcept;

struct StageReport {
  double seconds = 0;
  std::size_t moved_bytes = 0;
  std::string digest;  // of what was really staged: a drain may have changed it since preflight
  Evicted evicted;     // already: what stays dropped when this stage is taken back
  StageParts parts{};  // of seconds, as far as they are known apart
};

struct CommitReport {
  std::size_t freed_bytes = 0;   // given back to the driver since the commit began
  std::size_t device_bytes = 0;  // taken from the driver by a wake
  double seconds = 0;            // of all calls of commit together
  Evicted evicted;               // since the stage began
};

struct LedgerStatus {
  LedgerPhase phase = LedgerPhase::idle;
  std::string operation;  // staged, or last one
  std::optional<Action> kind;
  bool mutated = false;  // the first irreversible call was begun, and publish has not come
  std::vector<std::string> parked_tags;
  Evicted evicted;  // by `operation` up to now, also when its stage failed or was taken back (K9)
};

// Something outside that remembers addresses or slots. It stays registered until close(), also when the
// object is forgotten: losing a handle must not allow a sleep.
class Registration final {
 public:
  Registration(std::shared_ptr<Externals> externals, std::uint64_t id);
  void close() noexcept;

 private:
  std::shared_ptr<Externals> externals_;
  std::uint64_t id_;
};

// Where contents go while they sleep.
struct LedgerStorage {
  std::shared_ptr<HostPool> host_pool;  // of the same Device; several ledgers may share one (M8)
  std::shared_ptr<DiskFile> disk;       // null: restore mode disk is refused
};

class Ledger final {
 public:
  // A host pool of its own; host_pool_bytes bounds the host memory kept between cycles (M8).
  Ledger(const std::shared_ptr<Device>& device, std::size_t host_pool_bytes);
  // Misuse for a host pool of another Device, or none.
  Ledger(std::shared_ptr<Device> device, LedgerStorage storage);
  Ledger(const Ledger&) = delete;
  Ledger& operator=(const Ledger&) = delete;
  Ledger(Ledger&&) = delete;
  Ledger& operator=(Ledger&&) = delete;
  ~Ledger();

  [[nodiscard]] const std::shared_ptr<Device>& device() const noexcept { return device_; }
  [[nodiscard]] const std::shared_ptr<HostPool>& host_pool() const noexcept { return host_pool_; }
  [[nodiscard]] const std::shared_ptr<DiskFile>& disk() const noexcept { return disk_; }
  [[nodiscard]] std::vector<std::string> tags() const;         // sorted, without repeats
  [[nodiscard]] std::vector<std::string> parked_tags() const;  // of which anything is parked

  // Both: Misuse while an operation is staged, and for a second participant of the same tag and name.
  std::shared_ptr<Region> create_region(RegionSpec spec);
  void add(std::shared_ptr<Participant> participant);
  // Waits for the end of a running operation, for half a minute at most (K10).
  [[nodiscard]] std::shared_ptr<Registration> register_external(const std::string& name,
                                                                const std::string& tag, bool moves_kv);

  // Makes the backups of awake immutable regions (M9), piece by piece, and returns the bytes saved. An
  // operation goes first: then this ends, and what is not complete is dropped by a sleep or gone on with by
  // the next call. Regions whose backup has no room under the host pool's bound, or whose begin would take
  // more than room_bytes of host memory or disk, are left out.
  std::size_t prefill_backups(std::chrono::duration<double> timeout, std::size_t room_bytes = SIZE_MAX);
  // Makes idle host memory in advance, as the next sleep would take it: under the host pool's bound, and
  // room_bytes more at most. Returns the bytes made. An operation goes first: then this ends.
  // OutOfHostMemory.
  std::size_t fill_host_pool(std::chrono::duration<double> timeout, std::size_t room_bytes = SIZE_MAX);
  // Ends the two above, for good.
  void stop_prefilling() noexcept;
  // Gives back what is kept between cycles for speed (M8): idle host memory and backups of awake regions,
  // until at most target_bytes of both are left. Returns the bytes of host memory freed.
  std::size_t trim_host(std::size_t target_bytes = 0);
  [[nodiscard]] std::vector<std::string> registrations() const;

  // No mutation. Refuses with "conflict" while another operation is under way.
  [[nodiscard]] Plan preflight(Request request);
  // Plans again first: what has become impossible since is thrown. On a throw everything is as before.
  StageReport stage(const Plan& plan, std::chrono::duration<double> timeout);
  // Idempotent; after a throw call it again to go on.
  CommitReport commit();
  void publish();
  void abort();
  void stop() noexcept;

  [[nodiscard]] LedgerStatus status() const;
  // By participant, as of the last finished step when one is running.
  [[nodiscard]] std::vector<Usage> memory() const;

 private:
  class Step;  // holds work_ and sets stepping_
  class Door;  // to maintain(), for participants that may live longer than this
  struct Entry {
    std::shared_ptr<Participant> participant;
    Item item;
    bool done = false;
  };

  void must_be_idle(const std::string& what) const;
  void maintain(const std::string& tag, const std::string& call, const std::function<void()>& work);
  void insert(std::shared_ptr<Participant> participant);
  void remember() const;  // takes the snapshot that readers get while a step runs
  void set_phase(LedgerPhase phase);
  [[nodiscard]] Plan make_plan(Request request) const;
  [[nodiscard]] std::vector<std::shared_ptr<Participant>> chosen(const Request& request, Plan& plan) const;
  // Overflow evict: plans again those items that may drop something for room.
  void plan_evictions(const std::vector<std::shared_ptr<Participant>>& those, Plan& plan) const;
  void total(Plan& plan) const;
  void refuse_what_cannot_be(const Participant& one, const Item& item, bool verify, Plan& plan) const;
  void refuse_without_room(Plan& plan) const;
  void stage_entries(const Plan& plan, StageContext& context);
  void commit_entries();
  // Adds up what the participants of this operation have dropped, and shows it in the status.
  Evicted note_evicted();

  const std::shared_ptr<Device> device_;
  const std::shared_ptr<HostPool> host_pool_;
  const std::shared_ptr<DiskFile> disk_;
  const std::shared_ptr<Externals> externals_;
  const std::shared_ptr<Door> door_;
  StopFlag stop_{false};
  std::atomic<bool> no_prefilling_{false};
  std::atomic<int> wanting_{0};        // how many wait to plan or to step: a background backup lets them in
  std::atomic<bool> stepping_{false};  // a step of a transaction runs, not just somebody who reads

  mutable std::mutex work_;                                 // held for a whole step
  std::vector<std::shared_ptr<Participant>> participants_;  // in the order of (tag, name)
  std::vector<std::shared_ptr<Region>> regions_;            // of them
  std::vector<Entry> entries_;                              // of the transaction that is under way
  UndoStack undo_;
  CommitReport report_;
  std::size_t device_bytes_before_ = 0;

  mutable std::mutex state_;  // held for moments only
  mutable std::condition_variable idle_again_;
  LedgerStatus status_;
  mutable std::vector<std::string> tags_;
  mutable std::vector<std::string> parked_tags_;
  mutable std::vector<Usage> memory_;
};

}  // namespace torpor
