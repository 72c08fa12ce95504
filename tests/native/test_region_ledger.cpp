// Region and Ledger: what a transaction promises when nothing breaks, and when it is refused.
#include "ledger_rig.hpp"
#include "process.hpp"
#include "text.hpp"

using namespace rig;

namespace {

const Usage usage_of(const Rig& rig, const std::string& tag) {
  for (const Usage& usage : rig.ledger->memory()) {
    if (usage.tag == tag) return usage;
  }
  check::fail(__FILE__, __LINE__, "no such tag");
}

const Item item_of(const Plan& plan, const std::string& tag) {
  for (const Item& item : plan.items) {
    if (item.tag == tag) return item;
  }
  check::fail(__FILE__, __LINE__, "no such item");
}

}  // namespace

CASE("preserving modes bring every byte back to the same address, memset brings zeros (S1)") {
  for (const RestoreMode mode : {RestoreMode::memset, RestoreMode::cpu, RestoreMode::pinned}) {
    Rig rig;
    const auto region = rig.region("weights", 2 * chunk + 5);
    const Address address = region->address();
    const CommitReport slept = rig.sleep({{"weights", mode}});
    CHECK(slept.freed_bytes == 2 * chunk + grain);
    CHECK(rig.free_bytes() == capacity);
    CHECK(rig.host_bytes() == (preserves(mode) ? 2 * chunk + 5 : 0));
    CHECK(test_device::is_bare(address));
    const CommitReport woken = rig.wake();
    CHECK(woken.device_bytes == 2 * chunk + grain && woken.freed_bytes == 0);
    CHECK(region->address() == address);
    CHECK(rig.host_bytes() == 0);
    CHECK(preserves(mode) ? rig.all_hold() : rig.is_zero(*region));
  }
}

CASE("a staged sleep is still whole: contents, memory, and an abort forgets it") {
  Rig rig;
  const auto region = rig.region("weights", chunk);
  const std::size_t free_awake = rig.free_bytes();
  const StageReport report = rig.stage(Action::sleep, {{"weights", RestoreMode::cpu}});
  CHECK(report.moved_bytes == chunk);
  CHECK(rig.phase() == LedgerPhase::staged && !rig.ledger->status().mutated);
  CHECK(rig.all_hold() && rig.free_bytes() == free_awake && !region->parked());
  CHECK(rig.host_bytes() == chunk);
  rig.ledger->abort();
  CHECK(rig.phase() == LedgerPhase::idle && rig.host_bytes() == 0);
  rig.ledger->abort();    // nothing to do
  rig.write(*region, 7);  // changed after the abort: a later sleep must not use the old copy
  (void)rig.sleep();
  (void)rig.wake();
  CHECK(rig.holds(*region, 7));
}

CASE("an aborted wake leaves it asleep with its copy, and a later one is right (F26)") {
  Rig rig;
  const auto region = rig.region("weights", chunk);
  (void)rig.sleep();
  (void)rig.stage(Action::wake);
  CHECK(region->parked());
  rig.ledger->abort();
  CHECK(rig.free_bytes() == capacity && test_device::is_bare(region->address()));
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("sleep of what sleeps and wake of what is awake change nothing (C1, F20)") {
  Rig rig;
  (void)rig.region("weights", chunk);
  const Plan awake = rig.plan(Action::wake);
  CHECK(awake.refusals.empty() && item_of(awake, "weights").noop && awake.device_bytes == 0);
  (void)rig.wake();
  (void)rig.sleep({{"weights", RestoreMode::cpu}});
  for (const RestoreMode mode : {RestoreMode::cpu, RestoreMode::pinned}) {
    const Item item = item_of(rig.plan(Action::sleep, {{"weights", mode}}), "weights");
    CHECK(item.noop && item.mode == RestoreMode::cpu && item.keep_bytes == 0 && item.free_bytes == 0);
    CHECK(rig.sleep({{"weights", mode}}).freed_bytes == 0);
    CHECK(rig.host_bytes() == chunk);
  }
  (void)rig.wake();
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("a weaker mode for what sleeps drops the copy at commit, not before (C1)") {
  Rig rig;
  const auto region = rig.region("weights", chunk);
  (void)rig.sleep({{"weights", RestoreMode::pinned}});
  (void)rig.stage(Action::sleep, {{"weights", RestoreMode::memset}});
  CHECK(rig.host_bytes() == chunk);
  rig.ledger->abort();
  CHECK(usage_of(rig, "weights").mode == RestoreMode::pinned);
  (void)rig.sleep({{"weights", RestoreMode::memset}});
  CHECK(rig.host_bytes() == 0 && usage_of(rig, "weights").mode == RestoreMode::memset);
  const Item stronger = item_of(rig.plan(Action::sleep, {{"weights", RestoreMode::cpu}}), "weights");
  CHECK(stronger.noop && stronger.mode == RestoreMode::memset && stronger.keep_bytes == 0);
  (void)rig.wake();
  CHECK(rig.is_zero(*region));
}

CASE("further tags sleep while some do, and a part wakes while the rest sleeps (C2, C3)") {
  Rig rig;
  (void)rig.region("weights", chunk);
  (void)rig.region("workspace", grain);
  (void)rig.sleep({}, {"weights"});
  CHECK(rig.ledger->parked_tags() == std::vector<std::string>{"weights"});
  const CommitReport rest = rig.sleep();
  CHECK(rest.freed_bytes == grain);
  CHECK((rig.ledger->parked_tags() == std::vector<std::string>{"weights", "workspace"}));
  (void)rig.wake({"workspace"});
  CHECK(rig.ledger->parked_tags() == std::vector<std::string>{"weights"});
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("a region made while its tag sleeps is awake, and both wake and sleep take it along (K12, F19)") {
  Rig rig;
  (void)rig.region("weights", chunk);
  (void)rig.sleep();
  (void)rig.region("weights", grain, {.name = "adapter"});
  (void)rig.wake();
  CHECK(rig.all_hold());
  CHECK(rig.sleep().freed_bytes == chunk + grain);
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("a preserve_always region stays mapped and is residual in every mode (S3, F13)") {
  for (const RestoreMode mode : {RestoreMode::none, RestoreMode::pinned}) {
    Rig rig;
    const auto scales = rig.region("scales", 100, {.preserve_always = true});
    (void)rig.region("weights", chunk);
    CHECK(rig.sleep({{"scales", mode}, {"weights", RestoreMode::cpu}}).freed_bytes == chunk);
    CHECK(rig.free_bytes() == capacity - grain);
    CHECK(usage_of(rig, "scales").residual_bytes == grain && usage_of(rig, "weights").residual_bytes == 0);
    CHECK(rig.holds(*scales, 1));
    (void)rig.sleep({{"scales", RestoreMode::none}}, {"scales"});
    (void)rig.wake();
    CHECK(rig.all_hold() && usage_of(rig, "scales").residual_bytes == 0);
  }
}

CASE("a wake without room is refused ten times with numbers, leaks nothing, and then succeeds (M4, F5)") {
  Rig rig;
  (void)rig.region("weights", 4 * chunk);
  (void)rig.region("workspace", 2 * chunk);
  (void)rig.sleep();
  auto hog = std::make_unique<Physical>(rig.host, capacity - 5 * chunk);
  for (int round = 0; round < 10; ++round) {
    const Plan plan = rig.plan(Action::wake);
    CHECK(plan.refusals.size() == 1);
    const Refusal refusal = plan.refusals.front();
    CHECK(refusal.code == "device_memory" && refusal.needed_bytes == 6 * chunk &&
          refusal.free_bytes == 5 * chunk);
    CHECK(refusal.reason.starts_with("needed " + bytes_text(6 * chunk) + ", free " + bytes_text(5 * chunk) +
                                     " on " + device_text(*rig.host)));
    CHECK_THROWS(OutOfDeviceMemory, rig.ledger->stage(plan, patience));
    CHECK(rig.free_bytes() == 5 * chunk && rig.host_bytes() == 6 * chunk);
  }
  hog.reset();
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("memory that goes away between preflight and stage, or during stage, is no loss either (M4, F23)") {
  Rig rig;
  (void)rig.region("weights", 4 * chunk);
  (void)rig.region("workspace", 2 * chunk);
  (void)rig.sleep();
  const Plan plan = rig.plan(Action::wake);
  CHECK(plan.refusals.empty());
  auto hog = std::make_unique<Physical>(rig.host, capacity - 5 * chunk);
  CHECK_THROWS(OutOfDeviceMemory, rig.ledger->stage(plan, patience));
  hog.reset();
  rig.faulty->fail_at(0);
  rig.faulty->delay("quiesce", 0.5);  // after the plan was made again, before anything is created
  std::thread thief([&] {
    until_called(*rig.faulty, "quiesce");
    hog = std::make_unique<Physical>(rig.host, capacity - 5 * chunk);
  });
  bool refused = false;
  try {
    (void)rig.ledger->stage(plan, patience);
  } catch (const OutOfDeviceMemory& error) {
    refused = true;
    CHECK(error.needed_bytes > error.free_bytes);
  }
  thief.join();
  CHECK(refused && rig.free_bytes() == 5 * chunk && rig.host_bytes() == 6 * chunk);
  CHECK(rig.phase() == LedgerPhase::idle);
  hog.reset();
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("an unchanged immutable region is saved once, within the pool's bound (M8, M9)") {
  Rig rig(2 * chunk);
  const auto weights = rig.region("weights", chunk, {.immutable = true});
  const auto beyond = rig.region("large", 2 * chunk, {.immutable = true});
  CHECK(rig.stage(Action::sleep).moved_bytes == 3 * chunk);
  (void)rig.finish();
  (void)rig.wake();
  CHECK(rig.host_bytes() <= 2 * chunk);
  CHECK(rig.ledger->host_pool()->retained_bytes() + rig.ledger->host_pool()->idle_bytes() <= 2 * chunk);
  const std::size_t kept = usage_of(rig, "weights").host_bytes + usage_of(rig, "large").host_bytes;
  CHECK(kept > 0);
  const Plan plan = rig.plan(Action::sleep);
  CHECK(plan.keep_bytes == 3 * chunk - kept);
  CHECK(rig.ledger->stage(plan, patience).moved_bytes == 3 * chunk - kept);
  (void)rig.finish();
  CHECK(rig.ledger->host_pool()->retained_bytes() == 0);  // what sleeps is needed, not kept for speed
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("a change to an immutable region is saved again once it is told (M9)") {
  Rig rig(4 * chunk);
  const auto weights = rig.region("weights", chunk, {.immutable = true});
  (void)rig.sleep();
  CHECK_THROWS(Misuse, weights->contents_changed());
  (void)rig.wake();
  CHECK(rig.host_bytes() == chunk);
  rig.write(*weights, 9);
  weights->contents_changed();
  CHECK(rig.host_bytes() == 0 && rig.ledger->host_pool()->retained_bytes() == 0);
  CHECK(rig.stage(Action::sleep).moved_bytes == chunk);
  (void)rig.finish();
  (void)rig.wake();
  CHECK(rig.holds(*weights, 9));
}

CASE("a discarding sleep drops a retained backup as well (K1 for regions)") {
  Rig rig(4 * chunk);
  const auto weights = rig.region("weights", chunk, {.immutable = true});
  (void)rig.sleep();
  (void)rig.wake();
  CHECK(rig.host_bytes() == chunk);
  (void)rig.sleep({{"weights", RestoreMode::memset}});
  CHECK(rig.host_bytes() == 0 && rig.ledger->host_pool()->retained_bytes() == 0);
  (void)rig.wake();
  CHECK(rig.is_zero(*weights));
}

CASE("a hundred cycles leave files, mappings and memory where they were (M2, F17, F18)") {
  for (const std::size_t pool_bytes : {std::size_t{0}, 2 * chunk}) {
    Rig rig(pool_bytes);
    (void)rig.region("weights", 2 * chunk + 1);
    (void)rig.region("workspace", chunk);
    const std::array modes{RestoreMode::cpu, RestoreMode::pinned};
    const auto cycle = [&](int round) {
      const RestoreMode mode = modes[static_cast<std::size_t>(round) % modes.size()];
      (void)rig.sleep({{"weights", mode}, {"workspace", mode}});
      (void)rig.wake();
    };
    for (int round = 0; round < 4; ++round) cycle(round);
    const std::size_t files = process::open_files();
    const std::size_t maps = process::mappings();
    const std::size_t free_awake = rig.free_bytes();
    for (int round = 0; round < 100; ++round) cycle(round);
    CHECK(process::open_files() == files);
    CHECK(process::mappings() < maps + 50);  // a sanitizer's own grow; one leaked in each cycle would be 100
    CHECK(rig.free_bytes() == free_awake && rig.all_hold());
    CHECK(rig.ledger->host_pool()->idle_bytes() <= pool_bytes);
  }
}

CASE("a ledger that is dropped in the middle gives everything back") {
  Rig rig;
  (void)rig.region("weights", chunk);
  (void)rig.stage(Action::sleep);
  rig.regions.clear();
  rig.ledger.reset();
  CHECK(rig.free_bytes() == capacity);
}
