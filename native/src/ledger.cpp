// The transaction over all participants.
#include "torpor/ledger.hpp"

#include <algorithm>
#include <array>
#include <thread>
#include <utility>

#include "externals.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

constexpr std::array<const char*, 4> phase_names{"idle", "staged", "committing", "committed"};
constexpr std::chrono::seconds registration_patience{30};
constexpr std::chrono::microseconds lock_pause{100};

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::size_t device_bytes(const std::vector<std::shared_ptr<Participant>>& participants) {
  std::size_t total = 0;
  for (const auto& one : participants) total += one->usage().device_bytes;
  return total;
}

// The first refusal, as the exception that says the same.
[[noreturn]] void raise(const Refusal& refusal) {
  if (refusal.code == "device_memory") {
    throw OutOfDeviceMemory(refusal.reason, refusal.needed_bytes, refusal.free_bytes);
  }
  if (refusal.code == "disk") {
    throw OutOfDisk(refusal.reason, refusal.needed_bytes, refusal.free_bytes);
  }
  if (refusal.code == "host_memory") {
    throw OutOfHostMemory(refusal.reason, refusal.needed_bytes, refusal.free_bytes);
  }
  throw Misuse(refusal.reason);
}

// Counted for as long as it lives.
class Counted final {
 public:
  explicit Counted(std::atomic<int>& count) noexcept : count_(count) { ++count_; }
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted() { --count_; }

 private:
  std::atomic<int>& count_;
};

}  // namespace

const char* to_string(LedgerPhase phase) noexcept {
  return phase_names[static_cast<std::size_t>(phase)];
}

Registration::Registration(std::shared_ptr<Externals> externals, std::uint64_t id)
    : externals_(std::move(externals)), id_(id) {}

void Registration::close() noexcept {
  externals_->remove(id_);
}

class Ledger::Step final {
 public:
  explicit Step(Ledger& ledger)
      : wanting_(ledger.wanting_), working_(ledger.work_), stepping_(ledger.stepping_) {
    stepping_.store(true);
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;
  ~Step() { stepping_.store(false); }

 private:
  Counted wanting_;
  std::lock_guard<std::mutex> working_;
  std::atomic<bool>& stepping_;
};

class Ledger::Door final : public Maintenance {
 public:
  explicit Door(Ledger& ledger) noexcept : ledger_(&ledger) {}
  void close() noexcept {
    const std::lock_guard<std::mutex> guard(mutex_);
    ledger_ = nullptr;
  }
  void run(const std::string& tag, const std::string& call, const std::function<void()>& work) override {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (ledger_ == nullptr) return work();
    ledger_->maintain(tag, call, work);
  }

 private:
  std::mutex mutex_;  // held while work runs, so that the ledger lives as long
  Ledger* ledger_;
};

Ledger::Ledger(const std::shared_ptr<Device>& device, std::size_t host_pool_bytes)
    : Ledger(device, LedgerStorage{std::make_shared<HostPool>(device, host_pool_bytes), nullptr}) {}

Ledger::Ledger(std::shared_ptr<Device> device, LedgerStorage storage)
    : device_(std::move(device)),
      host_pool_(std::move(storage.host_pool)),
      disk_(std::move(storage.disk)),
      externals_(std::make_shared<Externals>()),
      door_(std::make_shared<Door>(*this)) {
  if (!host_pool_ || host_pool_->device() != device_) {
    throw Misuse("a ledger needs a host pool of its own device: memory is registered with that one alone");
  }
}

Ledger::~Ledger() {
  door_->close();
}

void Ledger::must_be_idle(const std::string& what) const {
  const LedgerStatus now = status();
  if (now.phase == LedgerPhase::idle) return;
  throw Misuse(what + ": operation '" + now.operation + "' is " + to_string(now.phase) +
               "; finish it (commit, publish) or abort it first");
}

std::shared_ptr<Region> Ledger::create_region(RegionSpec spec) {
  const std::lock_guard<std::mutex> working(work_);
  must_be_idle("create_region");
  auto region = std::make_shared<Region>(device_, host_pool_, disk_, std::move(spec));
  regions_.reserve(regions_.size() + 1);
  insert(region);
  regions_.push_back(region);
  return region;
}

void Ledger::add(std::shared_ptr<Participant> participant) {
  const std::lock_guard<std::mutex> working(work_);
  must_be_idle("add");
  insert(std::move(participant));
}

void Ledger::insert(std::shared_ptr<Participant> participant) {
  const auto before = [](const auto& one, const auto& other) {
    return std::pair(one->tag(), one->name()) < std::pair(other->tag(), other->name());
  };
  const auto place = std::lower_bound(participants_.begin(), participants_.end(), participant, before);
  if (place != participants_.end() && !before(participant, *place)) {
    throw Misuse("tag '" + participant->tag() + "' has a '" + participant->name() +
                 "' already; give it a name of its own");
  }
  (*participants_.insert(place, std::move(participant)))->joins(door_);
  remember();
}

void Ledger::maintain(const std::string& tag, const std::string& call, const std::function<void()>& work) {
  const Counted wanting(wanting_);
  std::unique_lock<std::mutex> working(work_, std::defer_lock);
  while (!working.try_lock()) {
    if (stepping_.load()) throw Misuse(call + ": an operation is under way; call again when it is over");
    std::this_thread::sleep_for(lock_pause);
  }
  must_be_idle(call);
  if (const auto parked = parked_tags(); !parked.empty()) {
    throw Misuse(call + ": '" + parked.front() + "' is asleep; wake everything first");
  }
  if (const auto names = externals_->blocking(tag); !names.empty()) {
    throw Misuse(call + ": memory of '" + tag + "' is registered with " + names.front() +
                 ", which cannot follow; close the registration first");
  }
  try {
    work();
  } catch (...) {
    remember();
    throw;
  }
  remember();
}

std::shared_ptr<Registration> Ledger::register_external(const std::string& name, const std::string& tag,
                                                        bool moves_kv) {
  const Deadline deadline = Clock::now() + registration_patience;
  for (;;) {
    {
      // Under work_: an operation that begins from here on sees the entry in its plan.
      const std::lock_guard<std::mutex> working(work_);
      if (status().phase == LedgerPhase::idle) {
        return std::make_shared<Registration>(externals_, externals_->add(name, tag, moves_kv));
      }
    }
    std::unique_lock<std::mutex> waiting(state_);
    const bool idle =
        idle_again_.wait_until(waiting, deadline, [this] { return status_.phase == LedgerPhase::idle; });
    if (!idle) {
      throw Misuse("cannot register '" + name + "': operation '" + status_.operation +
                   "' is still under way; try again when it has ended");
    }
  }
}

Plan Ledger::preflight(Request request) {
  // A reader or a region being made is worth waiting for; a running step is a conflict.
  const Counted wanting(wanting_);
  std::unique_lock<std::mutex> working(work_, std::defer_lock);
  while (!working.try_lock() && !stepping_.load()) std::this_thread::sleep_for(lock_pause);
  const LedgerStatus now = status();
  if (working.owns_lock() && now.phase == LedgerPhase::idle) return make_plan(std::move(request));
  Plan plan;
  plan.refusals.push_back({.code = "conflict",
                           .tag = "",
                           .reason = "operation '" + now.operation + "' is under way; wait for its end"});
  plan.request = std::move(request);
  return plan;
}

StageReport Ledger::stage(const Plan& plan, std::chrono::duration<double> timeout) {
  const Clock::time_point start = Clock::now();
  const Step step(*this);
  must_be_idle("stage");
  if (!plan.refusals.empty()) raise(plan.refusals.front());
  stop_.store(false);
  const Plan fresh = make_plan(plan.request);
  if (!fresh.refusals.empty()) raise(fresh.refusals.front());
  StageContext context{.device = device_,
                       .host_pool = host_pool_.get(),
                       .deadline = start + std::chrono::duration_cast<Clock::duration>(timeout),
                       .stop = &stop_,
                       .verify = fresh.request.verify};
  {
    const std::lock_guard<std::mutex> guard(state_);
    status_.operation = fresh.request.operation;
    status_.kind = fresh.request.kind;
    status_.evicted = {};
  }
  try {
    device_->quiesce(context.deadline);  // nothing may run on what will be copied or unmapped (M5)
    stage_entries(fresh, context);
  } catch (...) {
    undo_.unwind();
    note_evicted();
    entries_.clear();
    remember();
    throw;
  }
  set_phase(LedgerPhase::staged);
  return {.seconds = seconds_since(start),
          .moved_bytes = context.moved_bytes,
          .digest = fresh.digest,
          .evicted = note_evicted(),
          .parts = context.parts};
}

// A wake goes over all participants twice, so that the machine's memory is there before the device's is
// taken.
void Ledger::stage_entries(const Plan& plan, StageContext& context) {
  const auto check = [&] {
    if (stop_.load()) throw Stopped("stage of '" + plan.request.operation + "' was stopped");
    if (Clock::now() > context.deadline) throw DeviceBusy("stage did not end within its deadline");
  };
  Plan ignored;
  const auto those = chosen(plan.request, ignored);
  for (std::size_t i = 0; i < those.size(); ++i) {
    if (!plan.items[i].noop) entries_.push_back({those[i], plan.items[i]});
  }
  for (const Entry& entry : entries_) {
    if (entry.item.action != Action::wake) continue;
    check();
    entry.participant->prepare_wake(entry.item, undo_, context);
  }
  for (const Entry& entry : entries_) {
    check();
    if (entry.item.action == Action::sleep) {
      entry.participant->stage_sleep(entry.item, undo_, context);
    } else {
      entry.participant->stage_wake(entry.item, undo_, context);
    }
  }
  check();  // a device may have done its work before anybody asked it how late that was
}

CommitReport Ledger::commit() {
  const Clock::time_point start = Clock::now();
  const Step step(*this);
  const LedgerPhase phase = status().phase;
  if (phase == LedgerPhase::committed) return report_;
  if (phase == LedgerPhase::idle) throw Misuse("commit: nothing is staged; stage a plan first");
  if (phase == LedgerPhase::staged) {
    report_ = {};
    device_bytes_before_ = device_bytes(participants_);
    {
      const std::lock_guard<std::mutex> guard(state_);
      status_.mutated = true;  // before the first call that cannot be taken back
    }
    set_phase(LedgerPhase::committing);
    undo_.dismiss();
  }
  try {
    commit_entries();
  } catch (...) {
    report_.seconds += seconds_since(start);
    report_.evicted = note_evicted();
    remember();
    throw;
  }
  report_.seconds += seconds_since(start);
  report_.evicted = note_evicted();
  set_phase(LedgerPhase::committed);
  return report_;
}

void Ledger::commit_entries() {
  for (Entry& entry : entries_) {
    if (entry.done) continue;
    if (entry.item.action == Action::sleep) {
      entry.participant->commit_sleep();
    } else {
      entry.participant->commit_wake();
      report_.device_bytes += entry.item.device_bytes;
    }
    entry.done = true;
  }
  const std::size_t now_bytes = device_bytes(participants_);
  report_.freed_bytes = device_bytes_before_ - std::min(device_bytes_before_, now_bytes);
}

Evicted Ledger::note_evicted() {
  Evicted all;
  for (const Entry& entry : entries_) {
    if (entry.item.action != Action::sleep) continue;
    const Evicted one = entry.participant->evicted();
    all.pages += one.pages;
    all.prefix_tokens += one.prefix_tokens;
  }
  const std::lock_guard<std::mutex> guard(state_);
  return status_.evicted = all;
}

void Ledger::publish() {
  const Step step(*this);
  const LedgerPhase phase = status().phase;
  if (phase == LedgerPhase::idle) return;
  if (phase != LedgerPhase::committed) throw Misuse("publish: commit the staged operation first");
  for (Entry& entry : entries_) entry.participant->publish();
  entries_.clear();
  set_phase(LedgerPhase::idle);
}

void Ledger::abort() {
  const Step step(*this);
  const LedgerStatus now = status();
  if (now.phase == LedgerPhase::idle) return;
  if (now.phase != LedgerPhase::staged) {
    throw Misuse("abort: the commit of '" + now.operation +
                 "' has begun and only goes forward; commit again");
  }
  undo_.unwind();
  entries_.clear();
  set_phase(LedgerPhase::idle);
}

void Ledger::stop() noexcept {
  stop_.store(true);
}

}  // namespace torpor
