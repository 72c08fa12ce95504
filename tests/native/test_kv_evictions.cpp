// Evictions where they are hard: during a stage that is then taken back (F26), over layers of several kinds,
// between full tiers, and without memory for the buffers that a move passes through.
#include "kv_hybrid.hpp"
#include "kv_trio.hpp"

using namespace kv_rig;
using torpor::Action;
using torpor::Evicted;
using torpor::LedgerPhase;
using torpor::Overflow;
using torpor::Plan;
using torpor::RestoreMode;

namespace {

constexpr std::size_t old_tokens = 32;

template <typename AnyRig>
Plan planned(const AnyRig& rig, RestoreMode mode, Overflow overflow = Overflow::evict) {
  torpor::Request request;
  request.kind = Action::sleep;
  request.operation = "test";
  request.restore = {{"kv_cache", mode}};
  request.overflow = overflow;
  return rig.ledger->preflight(request);
}

// A prefix of 8 pages, of which 3 fell to the disk before a suspended sequence of 3 pages. The disk has
// room for 8 in the tier's pieces, so that 8 pages find places only where those 3 have gone already.
struct Full {
  std::shared_ptr<Rig> rig;
  Tracked held;
  std::size_t free_bytes = 0;
  [[nodiscard]] std::size_t found() const { return rig->kv->probe("old", tokens_from(0, old_tokens + 1)); }
  [[nodiscard]] Evicted told() const { return rig->ledger->status().evicted; }
  [[nodiscard]] bool idle() const { return rig->ledger->status().phase == LedgerPhase::idle; }
};

Full full_disk() {
  Full world;
  world.rig = std::make_shared<Rig>(
      Options{.gpu_slots = 8,
              .seed = 3,
              .disk_slots = 8,
              .disk_limit_bytes = torpor::round_up(8 * page_bytes, std::size_t{1} << 20)});
  world.rig->started("old", tokens_from(0, old_tokens)).handle->close();
  world.held = world.rig->started("h", tokens_from(0, 12));
  world.held.handle->suspend();
  CHECK(world.rig->stats().disk_pages == 3 && world.found() == old_tokens);
  world.free_bytes = world.rig->free_bytes();
  return world;
}

// Awake, and nothing is gone but what is told.
void is_as_told(const Full& world) {
  CHECK(!world.rig->kv->parked() && world.rig->free_bytes() == world.free_bytes);
  CHECK(world.found() == old_tokens - world.told().prefix_tokens);
  CHECK(world.told().prefix_tokens == world.told().pages * block);
  CHECK(world.rig->stats().disk_pages == 3 - world.told().pages);
}

void whole_after(Full& world) {
  CHECK(world.held.handle->resume() && world.rig->holds(world.held));
  world.held.handle->suspend();
  Tracked heir = world.rig->create("old", tokens_from(0, 21));
  CHECK(heir.handle->matched_tokens() == 20 && heir.handle->resume() && world.rig->holds(heir));
}

}  // namespace

CASE("what goes during a stage stays gone when that is taken back, and is told (K9, F26)") {
  Full world = full_disk();
  Rig& rig = *world.rig;
  const Plan plan = planned(rig, RestoreMode::disk);
  CHECK(plan.refusals.empty() && plan.evicts.pages == 3);
  const auto staged = rig.ledger->stage(plan, std::chrono::seconds(20));
  CHECK(staged.evicted.pages == 3 && staged.evicted.prefix_tokens == 3 * block);
  rig.ledger->abort();
  CHECK(world.told().pages == 3);
  is_as_told(world);
  whole_after(world);
}

CASE("a call that fails in a stage that evicts leaves the rest whole, and the loss is told (M3, F26)") {
  const int faults = sweep_faults<Full>(
      full_disk,
      [](Full& world) {
        Rig& rig = *world.rig;
        if (world.idle()) rig.stage(planned(rig, RestoreMode::disk));
        rig.ledger->commit();
        rig.ledger->publish();
        rig.device->fail_at(0);
        rig.wake();
        CHECK(world.found() == old_tokens - 3 * block && rig.free_bytes() == world.free_bytes);
        whole_after(world);
      },
      [](Full& world) {
        if (world.idle()) is_as_told(world);
      });
  CHECK(faults >= 4);
}

CASE("windows and states: what is planned is what goes, and what is left is right (K9, K11)") {
  std::size_t evicting = 0;
  for (std::size_t host_slots = 4; host_slots <= 24; host_slots += 2) {
    kv_hybrid::Rig rig({.gpu_slots = 48, .host_slots = host_slots, .sequence_tokens = 12});
    kv_hybrid::Tracked held = rig.started("h", tokens_from(0, 19));
    held.handle->suspend();
    for (const char* scope : {"a", "b", "c"}) {
      kv_hybrid::Tracked one = rig.started(scope, tokens_from(0, 12));
      CHECK(one.handle->snapshot());
      one.handle->close();
    }
    const auto tokens = [&] { return rig.kv->stats().prefix_tokens; };
    const std::size_t before = tokens();
    const Plan plan = planned(rig, RestoreMode::pinned);
    if (!plan.refusals.empty()) {
      CHECK(plan.refusals[0].needed_bytes > plan.refusals[0].free_bytes && tokens() == before);
      continue;
    }
    const bool fits = planned(rig, RestoreMode::pinned, Overflow::reject).refusals.empty();
    CHECK(fits == (plan.evicts.pages == 0));
    evicting += fits ? 0 : 1;
    rig.stage(plan);
    const Evicted gone = rig.ledger->commit().evicted;
    rig.ledger->publish();
    CHECK(gone.pages == plan.evicts.pages && gone.prefix_tokens == plan.evicts.prefix_tokens);
    CHECK(before - tokens() == gone.prefix_tokens);
    rig.wake();
    CHECK(held.handle->resume() && rig.holds(held));
    held.handle->suspend();
    for (const char* scope : {"a", "b", "c"}) {
      kv_hybrid::Tracked heir = rig.create(scope, tokens_from(0, 13));
      CHECK(heir.tokens.empty() || heir.tokens.size() == 12);  // found at its snapshot, or not at all
      CHECK(heir.handle->resume() && rig.holds(heir));
    }
  }
  CHECK(evicting >= 2);
}

CASE("sequences change places also where the cold tier on the GPU, and all below it, is full (F26)") {
  const Options options{.host_slots = 8, .seed = 5, .cold_gpu_slots = 8};
  Trio world = three_suspended(options);
  Rig& rig = *world.rig;
  CHECK((pages_by_tier(rig) == std::array<std::size_t, 4>{8, 8, 8, 0}));
  for (int round = 0; round < 2; ++round) {
    for (Tracked& one : world.three) {
      CHECK(one.handle->resume() && rig.holds(one));
      CHECK((pages_by_tier(rig) == std::array<std::size_t, 4>{8, 8, 8, 0}));
      one.handle->suspend();
    }
  }
  all_are_whole(world);
  const int faults = sweep_faults<Trio>([&] { return three_suspended(options); },
                                        [](Trio& one) {
                                          CHECK(one.three[0].handle->resume());
                                          CHECK(one.rig->holds(one.three[0]));
                                          one.three[0].handle->suspend();
                                        },
                                        [](Trio& one) { CHECK(one.rig->stats().held_pages == 24); });
  CHECK(faults >= 2);
}

CASE(
    "without memory for the buffers of a move a sleep to disk is refused, and drops nothing for it (K8, "
    "F18)") {
  Full world = full_disk();
  Rig& rig = *world.rig;
  const std::size_t buffer_bytes = planned(rig, RestoreMode::disk).host_bytes;
  CHECK(buffer_bytes > 0);
  rig.scarce->host_free_bytes = buffer_bytes - 1;
  const Plan plan = planned(rig, RestoreMode::disk);
  CHECK(plan.refusals.size() == 1 && plan.refusals[0].code == "host_memory");
  CHECK(plan.refusals[0].needed_bytes == buffer_bytes && plan.refusals[0].free_bytes == buffer_bytes - 1);
  CHECK_THROWS(torpor::OutOfHostMemory, rig.stage(plan));
  CHECK(world.told().pages == 0);
  is_as_told(world);
  rig.scarce->host_free_bytes = buffer_bytes;
  rig.run(planned(rig, RestoreMode::disk));
  rig.scarce->host_free_bytes = SIZE_MAX / 2;
  rig.wake();
  whole_after(world);
}
