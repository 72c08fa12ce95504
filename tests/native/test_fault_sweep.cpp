// Every device call of a sleep and of a wake fails once, in every mode (M3, F6, F26).
#include "ledger_rig.hpp"

using namespace rig;

namespace {

constexpr std::array all_modes{RestoreMode::none, RestoreMode::memset, RestoreMode::cpu, RestoreMode::pinned,
                               RestoreMode::disk};
constexpr std::uint64_t far_too_many_calls = 200;

// Two regions of several chunks; what lies where is checked by bytes, and memory by the device's books.
void fill_rig(Rig& rig) {
  (void)rig.region("weights", 2 * chunk + grain / 2);
  (void)rig.region("workspace", grain + 3);
  rig.faulty->fail_at(0);
}

Modes both(RestoreMode mode) {
  return {{"weights", mode}, {"workspace", mode}};
}

void check_contents(const Rig& rig, RestoreMode mode) {
  if (preserves(mode)) CHECK(rig.all_hold());
  if (mode == RestoreMode::memset) CHECK(rig.is_zero(*rig.regions[0]) && rig.is_zero(*rig.regions[1]));
}

// Ends a commit that a fault has broken: it only goes forward, and it gets there.
void drive_forward(const Rig& rig) {
  CHECK(rig.phase() == LedgerPhase::committing);
  CHECK(rig.ledger->status().mutated);
  CHECK_THROWS(Misuse, rig.ledger->abort());
  (void)rig.finish();
}

enum class Ended { without_fault, after_stage_fault, after_commit_fault };

// One transition with the k-th call failing. After it, the transition has been done, by a retry if need be.
Ended transition(const Rig& rig, Action kind, RestoreMode mode, std::uint64_t k) {
  const std::size_t free_before = rig.free_bytes();
  const std::size_t host_before = rig.host_bytes();
  const auto parked_before = rig.ledger->parked_tags();
  const Plan plan = rig.plan(kind, both(mode));
  CHECK(plan.refusals.empty());
  rig.faulty->fail_at(k);
  Ended ended = Ended::without_fault;
  try {
    (void)rig.ledger->stage(plan, patience);
  } catch (const DeviceError&) {
    ended = Ended::after_stage_fault;
    rig.faulty->fail_at(0);
    CHECK(rig.phase() == LedgerPhase::idle);
    CHECK(!rig.ledger->status().mutated);
    CHECK(rig.free_bytes() == free_before);
    CHECK(rig.host_bytes() == host_before);
    CHECK(rig.ledger->parked_tags() == parked_before);
    if (kind == Action::sleep) CHECK(rig.all_hold());
    if (kind == Action::wake) CHECK(test_device::is_bare(rig.regions[0]->address()));
    (void)rig.ledger->stage(plan, patience);  // the retry
  }
  try {
    (void)rig.finish();
  } catch (const DeviceError&) {
    ended = Ended::after_commit_fault;
    rig.faulty->fail_at(0);
    drive_forward(rig);
  }
  rig.faulty->fail_at(0);
  CHECK(rig.phase() == LedgerPhase::idle);
  return ended;
}

struct Counts {
  int stage_faults = 0;
  int commit_faults = 0;
};

Counts sweep(Action faulty_kind, RestoreMode mode) {
  Counts counts;
  for (std::uint64_t k = 1; k < far_too_many_calls; ++k) {
    Rig rig;
    fill_rig(rig);
    const std::size_t free_awake = rig.free_bytes();
    const Ended slept = transition(rig, Action::sleep, mode, faulty_kind == Action::sleep ? k : 0);
    CHECK(rig.free_bytes() == capacity);
    CHECK(test_device::is_bare(rig.regions[1]->address()));
    const Ended woken = transition(rig, Action::wake, mode, faulty_kind == Action::wake ? k : 0);
    CHECK(rig.free_bytes() == free_awake);
    CHECK(rig.host_bytes() == 0);
    check_contents(rig, mode);
    const Ended ended = faulty_kind == Action::sleep ? slept : woken;
    if (ended == Ended::without_fault) return counts;
    (ended == Ended::after_stage_fault ? counts.stage_faults : counts.commit_faults) += 1;
  }
  check::fail(__FILE__, __LINE__, "the sweep never came to its end");
}

// The calls of one faultless transition, so that the sweep can be seen to have met each of them.
std::size_t calls_of(Action kind, RestoreMode mode) {
  Rig rig;
  fill_rig(rig);
  if (kind == Action::wake) (void)rig.sleep(both(mode));
  const std::uint64_t before = rig.faulty->calls();
  if (kind == Action::sleep) (void)rig.sleep(both(mode));
  if (kind == Action::wake) (void)rig.wake();
  return rig.faulty->calls() - before;
}

}  // namespace

CASE(
    "any device call of a sleep may fail: before the decision nothing has changed, after it the sleep ends "
    "(M3, F6)") {
  for (const RestoreMode mode : all_modes) {
    const Counts counts = sweep(Action::sleep, mode);
    CHECK(counts.commit_faults == 4);  // three chunks of weights and one of workspace are unmapped
    CHECK(counts.stage_faults >= (preserves(mode) ? 7 : 1));
    CHECK(static_cast<std::size_t>(counts.stage_faults + counts.commit_faults) ==
          calls_of(Action::sleep, mode));
  }
}

CASE(
    "any device call of a wake may fail: it stays asleep with its copies whole, and the retry is right (M3, "
    "F26)") {
  for (const RestoreMode mode : all_modes) {
    const Counts counts = sweep(Action::wake, mode);
    CHECK(counts.commit_faults == 0);  // a wake's commit makes no device call
    CHECK(counts.stage_faults >= 9);
    CHECK(static_cast<std::size_t>(counts.stage_faults) == calls_of(Action::wake, mode));
  }
}

CASE("a copy of several pieces may fail at each of them, and a stop is heard between them (M3, C6)") {
  constexpr std::size_t size = (std::size_t{64} << 20) + 7;  // two pieces of at most 64 MiB
  constexpr std::size_t room = std::size_t{66} << 20;        // whole granules
  Rig rig(0, room);
  (void)rig.region("weights", size);
  const std::size_t free_awake = rig.free_bytes();
  const auto copies_or_waits = [](const std::vector<std::string>& log) {
    return std::count_if(log.begin(), log.end(),
                         [](const auto& call) { return call == "copy" || call == "wait"; });
  };
  for (std::uint64_t k = 1; k <= 7; ++k) {  // quiesce, then twice create_host, copy and wait
    rig.faulty->fail_at(k);
    CHECK_THROWS(DeviceError, rig.stage(Action::sleep));
    rig.faulty->fail_at(0);
    CHECK(rig.host_bytes() == 0 && rig.free_bytes() == free_awake);
  }
  CHECK(rig.stage(Action::sleep).moved_bytes == size);
  CHECK(copies_or_waits(rig.faulty->log()) == 4);
  (void)rig.finish();
  rig.faulty->fail_at(0);
  rig.faulty->delay("wait", 0.3);
  std::thread stopper([&] {
    until_called(*rig.faulty, "wait");
    rig.ledger->stop();
  });
  CHECK_THROWS(Stopped, rig.stage(Action::wake));
  stopper.join();
  CHECK(rig.free_bytes() == room && rig.host_bytes() == size);
  rig.faulty->delay("wait", 0);
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("a device that fails for good leaves nothing behind once it is gone") {
  Rig rig;
  fill_rig(rig);
  rig.faulty->fail_at(1, true);
  CHECK_THROWS(DeviceError, rig.stage(Action::sleep, both(RestoreMode::cpu)));
  CHECK(rig.phase() == LedgerPhase::idle);
  rig.regions.clear();
  rig.ledger.reset();
  CHECK(rig.free_bytes() == capacity);
}

CASE("creating a region may fail at any call and leaves nothing (M3)") {
  int faults = 0;
  for (std::uint64_t k = 1; k < far_too_many_calls; ++k) {
    Rig rig;
    rig.faulty->fail_at(k);
    try {
      (void)rig.ledger->create_region({.tag = "weights", .size_bytes = 3 * chunk});
      break;
    } catch (const DeviceError&) {
      ++faults;
      CHECK(rig.free_bytes() == capacity);
      CHECK(rig.ledger->tags().empty());
    }
    (void)rig.region("weights", 3 * chunk);
  }
  CHECK(faults == 7);  // one reservation, three times create and map
}
