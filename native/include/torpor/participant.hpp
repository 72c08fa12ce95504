// What the Ledger asks of everything that sleeps: a Region, a KvManager. One participant per tagged piece of
// memory.
//
// Life of one transaction, all under the ledger's lock, never two at once:
//   plan_*   reads only. Says what it would do, and what forbids it (refusals).
//   stage_*  all that can fail or take long; the old state stays whole and is still what the outside sees.
//   Every
//            change that an abort must take back is an object pushed on the UndoStack, whose destructor takes
//            it back. A throw ends the stage; the ledger then unwinds the stack.
//   commit_* the last step. commit_sleep makes device calls (unmap, release): it may throw, may be called
//   again and
//            then goes on where it stopped. commit_wake only flips state.
//   publish  drops what a wake no longer needs (saved copies).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torpor/device.hpp"

namespace torpor {

enum class RestoreMode : std::uint8_t { none, memset, cpu, pinned, disk };
[[nodiscard]] constexpr bool preserves(RestoreMode mode) noexcept {
  return mode >= RestoreMode::cpu;
}
[[nodiscard]] const char* to_string(RestoreMode mode) noexcept;
// Throws Misuse that lists the modes.
[[nodiscard]] RestoreMode parse_restore_mode(const std::string& text);

enum class Action : std::uint8_t { sleep, wake };

struct Refusal {
  std::string code;  // "external_registration", "host_memory", "device_memory", "conflict", …
  std::string tag;
  std::string reason;  // tells a person what to do next
  std::size_t needed_bytes = 0;
  std::size_t free_bytes = 0;
};

// What a participant may newly commit for what it saves.
struct SaveRoom {
  std::size_t host_bytes = SIZE_MAX;
  std::size_t disk_bytes = SIZE_MAX;
};

// What a sleep drops, or has dropped, since not everything fits (K9).
struct Evicted {
  std::size_t pages = 0;
  std::size_t prefix_tokens = 0;  // that were findable before
};

// What one participant will do. Bytes are what really moves to or from the driver.
struct Item {
  std::string tag;
  std::string name;
  Action action = Action::sleep;
  bool noop = false;  // already there (C1)
  RestoreMode mode = RestoreMode::none;
  std::size_t free_bytes = 0;    // sleep: device bytes that will be given back; wake: 0
  std::size_t device_bytes = 0;  // wake: device bytes needed; sleep: 0
  std::size_t keep_bytes = 0;    // sleep: live bytes copied to the host; wake: bytes copied back
  std::size_t host_bytes = 0;    // host memory to be newly committed
  std::size_t disk_bytes = 0;    // room on the disk to be newly taken
  std::size_t buffer_bytes = 0;  // host memory that a move passes through, given back at its end
  std::string digest;            // logical content only (page counts, sequences), equal on all ranks
  std::vector<Refusal> refusals;
  std::optional<SaveRoom> evicts_within;  // sleep: what does not fit in here is dropped
  Evicted evicts;                         // what that is
};

// Host memory that a sleep takes, in one piece.
struct HostPiece {
  std::size_t size_bytes = 0;
  bool pinned = true;
  std::size_t granule_bytes = 0;  // a smaller one of whole granules is of use, too; 0: it is not
};

// Objects whose destructors put things back, last one first. dismiss() forgets them: the change stands.
class UndoStack final {
 public:
  UndoStack() = default;
  UndoStack(UndoStack&&) = default;
  UndoStack& operator=(UndoStack&&) = delete;
  ~UndoStack() { unwind(); }
  template <typename F>
  void push(F put_back);  // F is noexcept-callable
  void unwind() noexcept;
  void dismiss() noexcept;
  [[nodiscard]] std::size_t size() const noexcept { return steps_.size(); }

 private:
  struct Step {
    virtual ~Step() = default;
    bool armed = true;
  };
  template <typename F>
  struct StepOf final : Step {
    explicit StepOf(F f) : put_back(std::move(f)) {}
    ~StepOf() override {
      if (this->armed) put_back();
    }
    F put_back;
  };
  std::vector<std::unique_ptr<Step>> steps_;
};

template <typename F>
void UndoStack::push(F put_back) {
  static_assert(noexcept(put_back()), "an undo step must not throw");
  steps_.push_back(std::make_unique<StepOf<F>>(std::move(put_back)));
}

class HostPool;  // host_pool.hpp: bounded host memory kept between cycles
class DiskFile;  // disk_file.hpp: room for what sleeps on a disk

// Of a stage, where participants tell it apart: KV caches do. What a device does meanwhile is in none of
// them.
struct StageParts {
  double planning_s = 0;  // books: which page gets which room, page tables
  double mapping_s = 0;   // memory of the device
  double copying_s = 0;   // copies put under way and waited for
  double waiting_s = 0;   // of that: waited for, with nothing to prepare meanwhile
  double ahead_s = 0;     // of planning and mapping: while no copy was under way yet
};

struct StageContext {
  std::shared_ptr<Device> device;
  HostPool* host_pool = nullptr;
  Deadline deadline;
  const StopFlag* stop = nullptr;
  // Sleep: record checksums of all that is preserved; a wake compares whatever was recorded (K13).
  bool verify = false;
  std::size_t moved_bytes = 0;  // participants add what they copied
  StageParts parts{};
};

struct Usage {
  std::string tag;
  std::string name;
  bool parked = false;
  RestoreMode mode = RestoreMode::none;  // in force while parked
  std::size_t reserved_bytes = 0;        // addresses
  std::size_t device_bytes = 0;          // physical memory now
  std::size_t live_bytes = 0;            // of them in use (a region: all)
  std::size_t host_bytes = 0;            // host tier and saved copies
  std::size_t residual_bytes = 0;        // stays mapped while parked (preserve_always)
  std::size_t disk_bytes = 0;            // saved copies on the disk
};

// Work on a participant's own memory outside of transactions.
class Maintenance {
 public:
  Maintenance() = default;
  Maintenance(const Maintenance&) = delete;
  Maintenance& operator=(const Maintenance&) = delete;
  Maintenance(Maintenance&&) = delete;
  Maintenance& operator=(Maintenance&&) = delete;
  virtual ~Maintenance() = default;
  // Runs it while no operation can begin. Misuse, and it is not run, while an operation is under way, while
  // anything is parked (K12), and while memory of the tag is registered with something that cannot follow
  // (K10).
  virtual void run(const std::string& tag, const std::string& call, const std::function<void()>& work) = 0;
};

class Participant {
 public:
  Participant() = default;
  Participant(const Participant&) = delete;
  Participant& operator=(const Participant&) = delete;
  Participant(Participant&&) = delete;
  Participant& operator=(Participant&&) = delete;
  virtual ~Participant() = default;

  [[nodiscard]] virtual const std::string& tag() const noexcept = 0;
  [[nodiscard]] virtual const std::string& name() const noexcept = 0;
  [[nodiscard]] virtual bool parked() const noexcept = 0;
  [[nodiscard]] virtual RestoreMode default_mode() const noexcept = 0;
  [[nodiscard]] virtual Usage usage() const = 0;
  // The ledger that it belongs to from now on: empty when that is gone.
  virtual void joins(const std::weak_ptr<Maintenance>&) {}
  // Whether it can be put to sleep in that mode at all.
  [[nodiscard]] virtual bool supports(RestoreMode mode) const noexcept { return mode != RestoreMode::disk; }
  // Whether a preserving sleep can record checksums, or a wake has some to compare with (K13).
  [[nodiscard]] virtual bool can_verify(Action) const noexcept { return false; }

  [[nodiscard]] virtual Item plan_sleep(RestoreMode mode) const = 0;
  // With overflow evict: it drops what it may until the rest fits in there.
  [[nodiscard]] virtual Item plan_sleep_within(RestoreMode mode, const SaveRoom&) const {
    return plan_sleep(mode);
  }
  [[nodiscard]] virtual Item plan_wake() const = 0;
  // What a sleep of the default mode would take of the host pool, at most and as far as it is known in
  // advance.
  [[nodiscard]] virtual std::vector<HostPiece> host_pieces() const { return {}; }
  // Dropped by the last sleep that was staged here, up to now.
  [[nodiscard]] virtual Evicted evicted() const noexcept { return {}; }
  virtual void stage_sleep(const Item& item, UndoStack& undo, StageContext& context) = 0;
  // Before stage_wake of any participant: what a wake needs besides device memory (host memory, room on a
  // disk), and checks of what rests there.
  virtual void prepare_wake(const Item&, UndoStack&, StageContext&) {}
  virtual void stage_wake(const Item& item, UndoStack& undo, StageContext& context) = 0;
  // Returns the device bytes given back by this call. Throws where the driver does; call again to go on.
  virtual std::size_t commit_sleep() = 0;
  virtual void commit_wake() noexcept = 0;
  virtual void publish() noexcept = 0;

 protected:
  // What every plan of it begins with.
  [[nodiscard]] Item item_of(Action action) const {
    Item item;
    item.tag = tag();
    item.name = name();
    item.action = action;
    return item;
  }
};

}  // namespace torpor
