// What a failing device leaves of pools that change: every call failing in turn, and every call from then on
// (M3, K12).
#include "kv_hybrid.hpp"

using namespace kv_rig;
using torpor::DeviceError;
using torpor::RestoreMode;

namespace {

// A pool of 24 slots in disorder: held pages, old and new reusable ones. Cut to 8, two pages fall, two are
// dropped, and those behind the end move, some into the slots of what leaves.
struct World {
  std::shared_ptr<Rig> rig;
  Tracked held;
  std::size_t free_bytes = 0;
};

World crowded(std::uint64_t seed) {
  World world;
  world.rig = std::make_shared<Rig>(
      Options{.gpu_slots = 24, .host_slots = 2, .seed = seed, .device_bytes = 4 * granule_bytes});
  Rig& rig = *world.rig;
  Tracked old = rig.started("old", tokens_from(0, 16));
  old.handle->close();
  world.held = rig.started("held", tokens_from(0, 20));
  world.held.handle->suspend();
  Tracked fresh = rig.started("new", tokens_from(0, 12));
  fresh.handle->close();
  world.free_bytes = rig.free_bytes();
  return world;
}

void prefix_holds(Rig& rig, const char* scope, std::size_t tokens) {
  Tracked heir = rig.create(scope, tokens_from(0, tokens + 1));
  CHECK(heir.handle->matched_tokens() == tokens && heir.handle->resume() && rig.holds(heir));
  heir.handle->close();
}

void is_crowded_still(World& world) {
  Rig& rig = *world.rig;
  CHECK(rig.kv->slots() == 24 && rig.free_bytes() == world.free_bytes);
  CHECK(rig.stats().host_pages == 0 && rig.stats().host_bytes == 0 && rig.stats().evicted_pages == 0);
  CHECK(rig.stats().free_slots == 12 && rig.stats().held_pages == 5 && rig.stats().droppable_pages == 7);
  prefix_holds(rig, "old", 16);  // in this order: the order of use is as it was
  CHECK(world.held.handle->resume() && rig.holds(world.held));
  world.held.handle->suspend();
  prefix_holds(rig, "new", 12);
}

void is_cut(World& world) {
  Rig& rig = *world.rig;
  CHECK(rig.kv->slots() == 8 && rig.free_bytes() == world.free_bytes + 2 * granule_bytes);
  CHECK(world.held.handle->resume() && rig.holds(world.held));
  world.held.handle->suspend();
  prefix_holds(rig, "new", 12);
  prefix_holds(rig, "old", 8);
}

}  // namespace

CASE("any device call that fails while a pool shrinks leaves it as it was, and the retry works (M3)") {
  bool overwrites = false;
  for (const std::uint64_t seed : {1U, 2U, 3U}) {
    const int faults =
        sweep_faults<World>([&] { return crowded(seed); },
                            [&](World& world) {
                              world.rig->kv->resize_pools(8 * page_bytes);
                              const auto log = world.rig->device->log();
                              overwrites |= std::ranges::count(log, "copy") >= 3;  // down, aside, together
                              world.rig->device->fail_at(0);
                              is_cut(world);
                            },
                            is_crowded_still);
    CHECK(faults >= 6);  // quiesce, two copies with a wait each, two chunks
  }
  CHECK(overwrites);
}

CASE("any device call that fails while a pool grows leaves it as it was, and the retry works (M3)") {
  const int faults = sweep_faults<World>(
      [] {
        World world = crowded(4);
        world.rig->kv->resize_pools(8 * page_bytes);
        world.free_bytes = world.rig->free_bytes();
        return world;
      },
      [](World& world) {
        world.rig->kv->resize_pools(24 * page_bytes);
        CHECK(world.rig->kv->slots() == 24 &&
              world.rig->free_bytes() == world.free_bytes - 2 * granule_bytes);
        CHECK(world.held.handle->resume() && world.rig->holds(world.held));
      },
      [](World& world) {
        CHECK(world.rig->kv->slots() == 8 && world.rig->free_bytes() == world.free_bytes);
        CHECK(world.held.handle->resume() && world.rig->holds(world.held));
        world.held.handle->suspend();
      });
  CHECK(faults == 5);  // quiesce, and create and map twice
}

CASE("a device that fails for good from any call on leaves sound books and held pages whole (M3)") {
  for (std::uint64_t k = 1;; ++k) {
    World world = crowded(1);
    Rig& rig = *world.rig;
    rig.device->fail_at(k, true);
    bool failed = false;
    try {
      rig.kv->resize_pools(8 * page_bytes);
    } catch (const DeviceError&) {
      failed = true;
    }
    rig.device->fail_at(0);
    if (!failed) break;
    // What could not be put back is not pretended: the pool is what is mapped.
    CHECK(rig.kv->slots() * page_bytes == 4 * granule_bytes - rig.free_bytes());
    CHECK(rig.kv->slots() == 24 || rig.kv->slots() == 16);
    CHECK(world.held.handle->resume() && rig.holds(world.held));
    world.held.handle->suspend();
    prefix_holds(rig, "old", rig.kv->probe("old", tokens_from(0, 17)));
    prefix_holds(rig, "new", 12);
    const std::size_t gpu_bytes = rig.kv->slots() * page_bytes;
    rig.kv->resize_pools(gpu_bytes, 24 * page_bytes);  // a preserving sleep keeps to the host tier's ceiling
    rig.sleep(RestoreMode::pinned);
    rig.wake();
    rig.kv->resize_pools(8 * page_bytes, 2 * page_bytes);
    CHECK(world.held.handle->resume() && rig.holds(world.held));
    prefix_holds(rig, "new", 12);
  }
}

namespace {

// Attention and states: 16 granules for the former, 2 for the latter, and nothing left on the device.
struct Hybrid {
  std::shared_ptr<kv_hybrid::Rig> rig;
  std::vector<kv_hybrid::Tracked> sequences;
};

Hybrid hybrid() {
  Hybrid world;
  world.rig = std::make_shared<kv_hybrid::Rig>(kv_hybrid::Options{
      .kinds = {kv_hybrid::LayerKind::full, kv_hybrid::LayerKind::state}, .gpu_slots = 64, .host_slots = 64});
  for (const char* scope : {"a", "b", "c"}) {
    world.sequences.push_back(world.rig->started(scope, tokens_from(0, 18)));
    world.sequences.back().handle->suspend();
  }
  return world;
}

void all_hold(Hybrid& world) {
  for (auto& one : world.sequences) {
    CHECK(one.handle->resume() && world.rig->holds(one));
    one.handle->suspend();
  }
}

std::size_t size_of(const Hybrid& world, std::size_t pool) {
  return world.rig->kv->pool_stats()[pool].size_bytes;
}

}  // namespace

CASE("pools give each other memory by shares, within the same bytes, though the device has none left (K12)") {
  Hybrid world = hybrid();
  auto& kv = *world.rig->kv;
  const Address states = kv.address(1, "ssm");
  const torpor::Physical other(world.rig->device, world.rig->free_bytes());
  CHECK(size_of(world, 0) == 7 * granule_bytes && size_of(world, 1) == granule_bytes);
  kv.rebalance({1, 1});
  CHECK(size_of(world, 0) == 4 * granule_bytes && size_of(world, 1) == 4 * granule_bytes);
  CHECK(world.rig->free_bytes() == 0 && kv.address(1, "ssm") == states);
  all_hold(world);
  world.rig->sleep(RestoreMode::pinned);
  world.rig->wake();
  all_hold(world);
  // As far as the sequences allow: each needs 5 blocks, and 3 states lie on the GPU.
  kv.rebalance({1000, 1});
  CHECK(size_of(world, 0) == 7 * granule_bytes && size_of(world, 1) == granule_bytes);
  kv.rebalance({1, 1000});
  CHECK(size_of(world, 0) == granule_bytes && size_of(world, 1) == 7 * granule_bytes);
  all_hold(world);
  kv.rebalance();  // by use: 15 pages of 8 KiB against 3 of 4
  CHECK(size_of(world, 0) == 7 * granule_bytes && size_of(world, 1) == granule_bytes);
  all_hold(world);
  CHECK_THROWS(torpor::Misuse, kv.rebalance({1}));
  CHECK_THROWS(torpor::Misuse, kv.rebalance({1, -1}));
  CHECK_THROWS(torpor::Misuse, kv.rebalance({1, std::nan("")}));
}

CASE("any device call that fails while pools give each other memory leaves both as they were (M3)") {
  const int faults = sweep_faults<Hybrid>(
      hybrid,
      [](Hybrid& world) {
        world.rig->kv->rebalance({1, 7});
        world.rig->device->fail_at(0);
        CHECK(size_of(world, 0) == granule_bytes && size_of(world, 1) == 7 * granule_bytes);
        all_hold(world);
      },
      [](Hybrid& world) {
        CHECK(size_of(world, 0) == 7 * granule_bytes && size_of(world, 1) == granule_bytes);
        CHECK(world.rig->kv->stats().host_pages == 0 && world.rig->kv->stats().held_pages == 18);
        all_hold(world);
      });
  CHECK(faults >= 1 + 6 + 6);
}
