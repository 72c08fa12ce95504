// Windows, states and full attention through sleep and wake, and through device calls that fail.
#include <algorithm>

#include "kv_hybrid.hpp"

using namespace kv_hybrid;
using torpor::Action;
using torpor::RestoreMode;

namespace {

// An active sequence, a suspended one, and a snapshot that nobody uses; some of it on the host.
struct World {
  std::shared_ptr<Rig> rig;
  Tracked active, suspended;
  std::size_t free_bytes = 0;
};

World hybrid_world() {
  World world;
  world.rig = std::make_shared<Rig>(Options{.host_slots = 48});
  Rig& rig = *world.rig;
  Tracked passing = rig.started("p", tokens_from(0, 8));
  CHECK(passing.handle->snapshot());
  passing.handle->close();
  world.suspended = rig.started("s", tokens_from(0, 19));
  world.suspended.handle->suspend();
  world.active = rig.started("a", tokens_from(0, 18));
  CHECK(rig.kv->stats().host_pages > 0 && rig.kv->probe("p", tokens_from(0, 9)) == 8);
  world.free_bytes = rig.free_bytes();
  return world;
}

void is_whole(World& world) {
  CHECK(!world.rig->kv->parked() && world.rig->free_bytes() == world.free_bytes);
  CHECK(world.rig->holds(world.active) && world.rig->kv->probe("p", tokens_from(0, 9)) == 8);
  CHECK(world.suspended.handle->state() == SequenceState::suspended);
}

void contents_are_whole(World& world) {
  Rig& rig = *world.rig;
  CHECK(rig.holds(world.active));
  world.active.handle->suspend();
  CHECK(world.suspended.handle->resume() && rig.holds(world.suspended));
  world.suspended.handle->suspend();
  Tracked heir = rig.create("p", tokens_from(0, 9));
  CHECK(heir.tokens.size() == 8 && heir.handle->resume() && rig.holds(heir));
  CHECK(rig.extend(heir, tokens_from(8, 7)) && rig.holds(heir));
}

}  // namespace

CASE("windows, states, snapshots and history come back byte for byte, in other slots (K3, K11, S2)") {
  for (const RestoreMode mode : {RestoreMode::cpu, RestoreMode::pinned}) {
    World world = hybrid_world();
    Rig& rig = *world.rig;
    const auto* const state = world.active.handle->table(2).get();
    const auto table = world.active.handle->table(0);
    const std::vector<std::int32_t> before(table.get(), table.get() + 5);
    const std::size_t host_pages = rig.kv->stats().host_pages;
    rig.sleep(mode);
    CHECK(rig.free_bytes() == world.free_bytes + std::size_t{3} * granule_bytes);
    CHECK(*state == no_slot && rig.kv->probe("p", tokens_from(0, 9)) == 8);
    rig.wake();
    is_whole(world);
    CHECK(rig.kv->stats().host_pages == host_pages && world.active.handle->table(2).get() == state);
    CHECK(!std::equal(before.begin(), before.end(), world.active.handle->table(0).get()));
    contents_are_whole(world);
  }
}

CASE("a discarding sleep forgets snapshots and keeps slots, windows and history (K1, K2, K11, F14)") {
  for (const RestoreMode mode : {RestoreMode::none, RestoreMode::memset}) {
    World world = hybrid_world();
    Rig& rig = *world.rig;
    rig.sleep(mode);
    rig.wake();
    CHECK(rig.free_bytes() == world.free_bytes);
    for (const char* scope : {"p", "s", "a"}) CHECK(rig.kv->probe(scope, tokens_from(0, 20)) == 0);
    CHECK(world.active.handle->contents_lost() && world.active.handle->history_tokens() == 18);
    CHECK(world.active.handle->table(2)[0] != no_slot && world.active.handle->table(1)[1] == no_slot);
    if (mode == RestoreMode::memset) CHECK(rig.all_zero(world.active));
    world.active.handle->suspend();
    CHECK(world.suspended.handle->resume());
    if (mode == RestoreMode::memset) CHECK(rig.all_zero(world.suspended));
    CHECK(rig.extend(world.suspended, tokens_from(19, 5)));
    CHECK(!world.suspended.handle->snapshot() && rig.kv->probe("s", tokens_from(0, 25)) == 0);
  }
}

CASE("scratch is never saved, and every block has a slot again after wake (K7)") {
  Rig rig({.gpu_slots = 40});
  Tracked one = rig.started("a", tokens_from(0, 4));
  CHECK(one.handle->resize(40));
  const auto plan = rig.plan(Action::sleep, RestoreMode::pinned);
  CHECK(plan.keep_bytes ==
        (10 + 3) * kv_rig::page_bytes + state_bytes);  // of ten blocks in the window seven are scratch
  rig.run(plan);
  rig.wake();
  const auto table = one.handle->table(1);
  for (std::ptrdiff_t at = 0; at < 10; ++at) CHECK(table[at] != no_slot);
  CHECK(rig.holds(one) && rig.extend(one, tokens_from(4, 36)) && rig.holds(one));
}

CASE("scratch of a resume that failed is gone before the sleep, and taken by the next resume (K7)") {
  Rig rig({.gpu_slots = 40, .host_slots = 64});
  Tracked one = rig.started("a", tokens_from(0, 10));
  CHECK(one.handle->resize(40));
  one.handle->suspend();
  Tracked big = rig.create("b", {});
  CHECK(big.handle->resume() && big.handle->resize(64));  // moves the first out
  big.handle->close();
  const std::size_t idle = rig.kv->pool_stats()[0].free_slots;
  rig.device->fail_at(1);
  CHECK_THROWS(torpor::DeviceError, (void)one.handle->resume());
  rig.device->fail_at(0);
  CHECK(rig.kv->stats().locked_pages == 0 && rig.kv->pool_stats()[0].free_slots == idle);
  rig.sleep(RestoreMode::pinned);
  CHECK(!one.handle->resume());
  rig.wake();
  CHECK(one.handle->resume() && rig.holds(one) && one.handle->table(1)[6] != no_slot);
  CHECK(rig.extend(one, tokens_from(10, 30)) && rig.holds(one));
}

CASE("any device call that fails in sleep or wake leaves every kind of page as it was (M3, K11)") {
  const int faults = kv_rig::sweep_faults<World>(
      hybrid_world,
      [](World& world) { world.rig->stage(world.rig->plan(Action::sleep, RestoreMode::pinned)); },
      [](World& world) {
        is_whole(world);
        contents_are_whole(world);
        world.rig->ledger->abort();
      });
  CHECK(faults >= 2);
  const auto asleep = [] {
    World world = hybrid_world();
    world.rig->sleep(RestoreMode::pinned);
    return world;
  };
  const int wake_faults = kv_rig::sweep_faults<World>(
      asleep, [](World& world) { world.rig->stage(world.rig->plan(Action::wake)); },
      [](World& world) {
        CHECK(world.rig->kv->parked());
        CHECK(world.rig->free_bytes() == world.free_bytes + std::size_t{3} * granule_bytes);
        world.rig->wake();
        is_whole(world);
        contents_are_whole(world);
        world.rig->sleep(RestoreMode::pinned);
      });
  CHECK(wake_faults >= 6);
}

CASE(
    "any device call that fails in a resume over several pools leaves the sequence suspended and whole "
    "(M3)") {
  const int faults = kv_rig::sweep_faults<World>(
      [] {
        World world = hybrid_world();
        world.active.handle->suspend();
        world.active = world.rig->create("p", tokens_from(0, 9));  // its state is a copy to be made
        return world;
      },
      [](World& world) { CHECK(world.active.handle->resume() && world.rig->holds(world.active)); },
      [](World& world) {
        CHECK(world.active.handle->state() == SequenceState::suspended &&
              world.rig->kv->stats().locked_pages == 0);
        CHECK(world.rig->free_bytes() == world.free_bytes);
        CHECK(world.rig->kv->probe("p", tokens_from(0, 9)) == 8);
        CHECK(world.suspended.handle->resume() && world.rig->holds(world.suspended));
        world.suspended.handle->suspend();
      });
  CHECK(faults >= 2);
}

CASE("any device call that fails in a snapshot leaves no snapshot and a sequence that goes on (M3)") {
  const auto ready = [] {
    World world = hybrid_world();
    CHECK(world.rig->extend(world.active, {18, 19}));
    return world;
  };
  const int faults = kv_rig::sweep_faults<World>(
      ready, [](World& world) { CHECK(world.active.handle->snapshot()); },
      [](World& world) {
        CHECK(world.rig->kv->probe("a", tokens_from(0, 21)) == 0 && world.rig->holds(world.active));
      });
  CHECK(faults >= 2);
}
