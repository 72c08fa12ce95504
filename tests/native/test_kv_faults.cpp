// What a failure leaves of the KV cache: every device call failing in turn, no memory, a stop, an abort.
#include <thread>

#include "kv_world.hpp"

using namespace kv_rig;
using torpor::Action;
using torpor::Misuse;
using torpor::RestoreMode;

namespace {

// Twelve pages of two suspended sequences, four of the first on the host; a third wants the whole pool.
struct Pair {
  std::shared_ptr<Rig> rig;
  Tracked one, two;
  std::size_t free_bytes = 0;
};

Pair two_suspended() {
  Pair world;
  world.rig = std::make_shared<Rig>(Options{.host_slots = 16, .seed = 3});
  world.one = world.rig->started("a", tokens_from(0, 22));
  world.one.handle->suspend();
  world.two = world.rig->started("b", tokens_from(0, 23));
  world.two.handle->suspend();
  world.free_bytes = world.rig->free_bytes();
  return world;
}

void both_are_whole(Pair& world) {
  CHECK(world.rig->free_bytes() == world.free_bytes);
  CHECK(world.rig->stats().sequences == 2 && world.rig->stats().prefix_tokens == 40);
  for (Tracked* one : {&world.two, &world.one}) {
    CHECK(one->handle->resume() && world.rig->holds(*one));
    one->handle->suspend();
  }
}

}  // namespace

CASE(
    "any device call that fails in resume leaves sequences and contents as they were, and the retry works "
    "(M3)") {
  const int faults = sweep_faults<Pair>(
      two_suspended,
      [](Pair& world) {
        CHECK(world.one.handle->resume());
        CHECK(world.rig->holds(world.one));
      },
      [](Pair& world) {
        CHECK(world.one.handle->state() == SequenceState::suspended &&
              table_of(world.one) == std::vector<std::int32_t>(8, no_slot));
        both_are_whole(world);
      });
  CHECK(faults >= 4);  // a copy and a wait each way
}

CASE(
    "any device call that fails in resize leaves sequences and contents as they were, and the retry works "
    "(M3)") {
  const auto world_with_active = [] {
    Pair world = two_suspended();
    CHECK(world.one.handle->resume());
    return world;
  };
  const int faults = sweep_faults<Pair>(
      world_with_active,
      [](Pair& world) {
        if (world.one.handle->state() != SequenceState::active) CHECK(world.one.handle->resume());
        CHECK(world.one.handle->resize(32) && world.one.handle->capacity_tokens() == 32);
        CHECK(world.rig->holds(world.one));
        CHECK(world.one.handle->resize(22));
      },
      [](Pair& world) {
        CHECK(world.one.handle->capacity_tokens() == 24);
        CHECK(world.rig->holds(world.one));
        world.one.handle->suspend();
        both_are_whole(world);
      });
  CHECK(faults >= 2);
}

CASE("abort of a staged sleep or wake leaves everything as it was") {
  for (const RestoreMode mode :
       {RestoreMode::none, RestoreMode::memset, RestoreMode::pinned, RestoreMode::disk}) {
    World world = mixed_world();
    Rig& rig = *world.rig;
    const std::size_t host_before = rig.stats().host_bytes;
    rig.stage(rig.plan(Action::sleep, mode));
    CHECK(rig.holds(world.active));  // the old state is what the outside sees
    rig.ledger->abort();
    CHECK(rig.stats().host_bytes == host_before);
    is_whole(world);
    rig.sleep(mode);
    const std::size_t free_asleep = rig.free_bytes();
    rig.stage(rig.plan(Action::wake));
    rig.ledger->abort();
    CHECK(rig.kv->parked() && rig.free_bytes() == free_asleep);
    CHECK(table_of(world.active) == std::vector<std::int32_t>(8, no_slot));
    rig.wake();
    CHECK(rig.free_bytes() == world.free_bytes);
    if (preserves(mode)) contents_are_whole(world);
  }
}

CASE("any device call that fails in a sleep leaves everything as it was or is driven forward (M3, F6)") {
  for (const RestoreMode mode :
       {RestoreMode::none, RestoreMode::memset, RestoreMode::pinned, RestoreMode::disk}) {
    const int faults = sweep_faults<World>(
        [] { return mixed_world(); },
        [&](World& world) {
          Rig& rig = *world.rig;
          if (rig.ledger->status().phase == torpor::LedgerPhase::idle)
            rig.stage(rig.plan(Action::sleep, mode));
          rig.ledger->commit();
          rig.ledger->publish();
          CHECK(rig.kv->parked() && rig.free_bytes() == world.free_bytes + pool_bytes);
          rig.device->fail_at(0);  // the faults are for the sleep
          rig.wake();
          CHECK(rig.free_bytes() == world.free_bytes);
          if (preserves(mode)) {
            is_whole(world);
            contents_are_whole(world);
          }
        },
        [&](World& world) {
          // Before the decision: as before. After it: the same commit again.
          if (world.rig->ledger->status().phase == torpor::LedgerPhase::idle && !world.rig->kv->parked()) {
            is_whole(world);
          }
        });
    CHECK(faults >= (preserves(mode) ? 4 : 2));  // quiesce, (copy, wait,) unmap
  }
}

CASE(
    "any device call that fails in a wake leaves it asleep with its contents, and the retry works (M3, F6, "
    "F26)") {
  for (const RestoreMode mode :
       {RestoreMode::none, RestoreMode::memset, RestoreMode::pinned, RestoreMode::disk}) {
    std::size_t free_asleep = 0;
    const int faults = sweep_faults<World>(
        [&] {
          World world = mixed_world();
          world.rig->sleep(mode);
          free_asleep = world.rig->free_bytes();
          return world;
        },
        [&](World& world) {
          Rig& rig = *world.rig;
          rig.stage(rig.plan(Action::wake));
          rig.ledger->commit();
          rig.ledger->publish();
          CHECK(!rig.kv->parked() && rig.free_bytes() == world.free_bytes);
          if (mode == RestoreMode::memset) CHECK(rig.all_zero(world.active));
          if (preserves(mode)) {
            is_whole(world);
          }
        },
        [&](World& world) {
          CHECK(world.rig->kv->parked() && world.rig->free_bytes() == free_asleep);
          CHECK(table_of(world.active) == std::vector<std::int32_t>(8, no_slot));
        });
    CHECK(faults >= 3);
  }
}

CASE("a commit that failed half way goes on where it stopped, closes in between included") {
  Rig rig({.gpu_slots = 32, .seed = 4});  // 4 chunks
  Tracked one = rig.started("a", tokens_from(0, 20));
  const std::size_t before = rig.free_bytes();
  rig.stage(rig.plan(Action::sleep, RestoreMode::pinned));
  rig.device->fail_at(3);
  CHECK_THROWS(torpor::DeviceError, rig.ledger->commit());
  CHECK(rig.free_bytes() == before + 2 * granule_bytes && rig.ledger->status().mutated);
  CHECK_THROWS(Misuse, rig.kv->create_sequence("a", tokens_from(0, 4)));
  Tracked two = one;
  two.handle->close();
  CHECK(rig.ledger->commit().freed_bytes == 4 * granule_bytes);
  rig.ledger->publish();
  CHECK(rig.free_bytes() == before + 4 * granule_bytes);
  rig.wake();
  Tracked heir = rig.create("a", tokens_from(0, 21));
  CHECK(heir.handle->matched_tokens() == 20 && heir.handle->resume() && rig.holds(heir));
}

CASE("a stage that is stopped or late leaves everything as it was (C6)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.device->delay("copy", 0.2);
  std::thread stopper([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    rig.ledger->stop();
  });
  CHECK_THROWS(torpor::Stopped, rig.sleep(RestoreMode::pinned));
  stopper.join();
  rig.device->delay("copy", 0);
  is_whole(world);
  rig.sleep(RestoreMode::pinned);
  rig.wake();
  contents_are_whole(world);
}

CASE("sleep without enough host memory is refused with the bytes, and nothing changed (F18)") {
  Rig rig({.seed = 4});
  Tracked one = rig.started("a", tokens_from(0, 30));
  rig.scarce->host_free_bytes = 0;
  const auto plan = rig.plan(Action::sleep, RestoreMode::pinned);
  CHECK(plan.refusals.size() == 1 && plan.refusals[0].code == "host_memory");
  CHECK(plan.refusals[0].needed_bytes == plan.host_bytes && plan.refusals[0].free_bytes == 0);
  CHECK_THROWS(torpor::OutOfHostMemory, rig.stage(plan));
  CHECK(!rig.kv->parked() && rig.holds(one) && rig.kv->probe("a", tokens_from(0, 30)) == 28);
  rig.sleep(RestoreMode::none);
  CHECK(rig.kv->parked());
}

CASE(
    "wake without device memory is refused, the saved contents stay, and a later wake has them (M4, F5, "
    "F26)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.sleep(RestoreMode::pinned);
  for (int round = 0; round < 3; ++round) {
    const torpor::Physical other(rig.device, rig.free_bytes());
    const auto plan = rig.plan(Action::wake);
    CHECK(plan.refusals.size() == 1 && plan.refusals[0].code == "device_memory");
    CHECK_THROWS(torpor::OutOfDeviceMemory, rig.stage(plan));
    CHECK(rig.kv->parked() && rig.free_bytes() == 0);
  }
  rig.wake();
  is_whole(world);
  contents_are_whole(world);
}
