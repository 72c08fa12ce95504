// A preserving sleep that finds too little room: refused, or reusable pages are dropped (K8, K9).
#include "kv_hybrid.hpp"
#include "kv_world.hpp"

using namespace kv_rig;
using torpor::Action;
using torpor::Overflow;
using torpor::Plan;
using torpor::RestoreMode;

namespace {

Plan evicting(const torpor::Ledger& ledger, RestoreMode mode) {
  torpor::Request request;
  request.kind = Action::sleep;
  request.operation = "test";
  request.restore = {{"kv_cache", mode}};
  request.overflow = Overflow::evict;
  return const_cast<torpor::Ledger&>(ledger).preflight(request);
}

// A suspended sequence of 3 pages, then two prefixes of 2 and of 3, the older one first: 8 pages on the GPU.
struct Crowd {
  std::shared_ptr<Rig> rig;
  Tracked held;
  std::size_t free_bytes = 0;
};

Crowd crowd(Options options) {
  Crowd world;
  options.seed = 9;
  world.rig = std::make_shared<Rig>(options);
  Rig& rig = *world.rig;
  world.held = rig.started("h", tokens_from(0, 10));
  world.held.handle->suspend();
  rig.started("old", tokens_from(0, 8)).handle->close();
  rig.started("new", tokens_from(0, 12)).handle->close();
  CHECK(rig.stats().free_slots == 0 && rig.stats().droppable_pages == 5);
  world.free_bytes = rig.free_bytes();
  return world;
}

std::size_t found(const Rig& rig, const char* scope) {
  return rig.kv->probe(scope, tokens_from(0, 15));
}

void is_whole(Crowd& world) {
  Rig& rig = *world.rig;
  CHECK(!rig.kv->parked() && rig.free_bytes() == world.free_bytes && rig.stats().evicted_pages == 0);
  CHECK(found(rig, "h") == 8 && found(rig, "old") == 8 && found(rig, "new") == 12);
}

void held_is_whole(Crowd& world) {
  CHECK(world.held.handle->resume() && world.rig->holds(world.held));
  world.held.handle->suspend();
}

}  // namespace

CASE("live pages that the host tier has no room for are refused by default, with the bytes (K9)") {
  Crowd world = crowd({.host_slots = 5});
  Rig& rig = *world.rig;
  const Plan plan = rig.plan(Action::sleep, RestoreMode::pinned);
  CHECK(plan.refusals.size() == 1 && plan.refusals[0].code == "host_memory" && plan.evicts.pages == 0);
  CHECK(plan.refusals[0].needed_bytes == 8 * page_bytes && plan.refusals[0].free_bytes == 5 * page_bytes);
  CHECK(plan.refusals[0].reason.find("overflow evict") != std::string::npos);
  CHECK_THROWS(torpor::OutOfHostMemory, rig.stage(plan));
  is_whole(world);
}

CASE("without a host tier a temporary one holds all live pages, and is gone after the wake (K8)") {
  Crowd world = crowd({});
  Rig& rig = *world.rig;
  rig.sleep(RestoreMode::pinned);
  CHECK(rig.stats().host_bytes >= 8 * page_bytes);
  rig.wake();
  CHECK(rig.stats().host_bytes == 0);
  is_whole(world);
  held_is_whole(world);
}

CASE("overflow evict drops the oldest prefixes until the rest fits, and says what was lost (K9)") {
  Crowd world = crowd({.host_slots = 5});
  Rig& rig = *world.rig;
  const Plan plan = evicting(*rig.ledger, RestoreMode::pinned);
  // The last block of a chain is older than its first: both of `old`, and the third of `new`.
  CHECK(plan.refusals.empty() && plan.evicts.pages == 3 && plan.evicts.prefix_tokens == 12);
  CHECK(plan.keep_bytes == 5 * page_bytes && plan.items[0].evicts.pages == 3);
  is_whole(world);  // a plan drops nothing
  CHECK(rig.ledger->stage(plan, std::chrono::seconds(20)).evicted.pages == 0);
  const std::uint64_t before = rig.stats().evicted_pages;
  const auto report = rig.ledger->commit();
  CHECK(report.evicted.pages == 3 && report.evicted.prefix_tokens == 12 && report.freed_bytes == pool_bytes);
  CHECK(rig.stats().evicted_pages == before + 3);
  rig.ledger->publish();
  CHECK(rig.ledger->status().evicted.prefix_tokens == 12);
  CHECK(found(rig, "old") == 0 && found(rig, "new") == 8);
  rig.wake();
  CHECK(found(rig, "h") == 8 && rig.stats().free_slots == 3);
  held_is_whole(world);
  Tracked heir = rig.create("new", tokens_from(0, 15));
  CHECK(heir.handle->matched_tokens() == 8 && heir.handle->resume() && rig.holds(heir));
}

CASE("what fits is not dropped, whatever the overflow says (K9)") {
  Crowd world = crowd({.host_slots = 8});
  const Plan plain = world.rig->plan(Action::sleep, RestoreMode::pinned);
  const Plan plan = evicting(*world.rig->ledger, RestoreMode::pinned);
  CHECK(plan.evicts.pages == 0 && plan.digest == plain.digest);
  world.rig->run(plan);
  world.rig->wake();
  is_whole(world);
}

CASE("the choice is a part of the plan's digest (K9, M7)") {
  Crowd five = crowd({.host_slots = 5});
  Crowd four = crowd({.host_slots = 4});
  Crowd also = crowd({.host_slots = 5});
  const auto digest = [](const Crowd& world) {
    return evicting(*world.rig->ledger, RestoreMode::pinned).digest;
  };
  CHECK(digest(five) != digest(four) && digest(five) == digest(also));
}

CASE("held pages are never dropped: when they alone do not fit the sleep is refused with the bytes (K9)") {
  Crowd world = crowd({.host_slots = 2});
  Rig& rig = *world.rig;
  const Plan plan = evicting(*rig.ledger, RestoreMode::pinned);
  CHECK(plan.refusals.size() == 1 && plan.refusals[0].code == "host_memory");
  CHECK(plan.refusals[0].needed_bytes == 3 * page_bytes && plan.refusals[0].free_bytes == 2 * page_bytes);
  CHECK_THROWS(torpor::OutOfHostMemory, rig.stage(plan));
  is_whole(world);
  held_is_whole(world);
}

CASE("a machine without memory makes a sleep drop too, and held pages alone are refused (K9, F18)") {
  // The smallest piece; one of 256 pages is a whole number of these.
  constexpr std::size_t least_bytes = std::size_t{2} << 20;
  const std::size_t room_bytes = 256 * page_bytes;
  Options options{.gpu_slots = 520, .device_bytes = 128 * granule_bytes};
  Rig rig(options);
  Tracked held = rig.started("h", tokens_from(0, 10));
  held.handle->suspend();
  for (int i = 0; i < 4; ++i) rig.started("p", tokens_from(10'000 * i, 400)).handle->close();
  CHECK(rig.stats().droppable_pages == 400);
  rig.scarce->host_free_bytes = room_bytes + 4096;
  const Plan plan = evicting(*rig.ledger, RestoreMode::pinned);
  CHECK(rig.plan(Action::sleep, RestoreMode::pinned).refusals.size() == 1);
  CHECK(plan.refusals.empty() && plan.evicts.pages > 100 && plan.evicts.pages < 200);
  CHECK(plan.host_bytes == room_bytes);
  rig.run(plan);
  rig.wake();
  CHECK(held.handle->resume() && rig.holds(held));
  held.handle->suspend();
  rig.scarce->host_free_bytes = 4096;
  const Plan none = evicting(*rig.ledger, RestoreMode::pinned);
  CHECK(none.refusals.size() == 1 && none.refusals[0].code == "host_memory");
  CHECK(none.refusals[0].needed_bytes == least_bytes && none.refusals[0].free_bytes == 4096);
}

CASE("a full disk tier makes a sleep to disk drop its own oldest pages first (K9)") {
  Rig rig({.gpu_slots = 8, .seed = 3, .disk_slots = 8});
  rig.started("old", tokens_from(0, 32)).handle->close();
  Tracked held = rig.started("h", tokens_from(0, 12));  // 3 of `old` fall to the disk
  held.handle->suspend();
  CHECK(rig.stats().disk_pages == 3);
  const Plan refused = rig.plan(Action::sleep, RestoreMode::disk);
  CHECK(refused.refusals.size() == 1 && refused.refusals[0].code == "disk");
  CHECK(refused.refusals[0].needed_bytes == 8 * page_bytes);
  const Plan plan = evicting(*rig.ledger, RestoreMode::disk);
  // The three on the disk leave three places.
  CHECK(plan.refusals.empty() && plan.evicts.pages == 3 && plan.keep_bytes == 8 * page_bytes);
  rig.run(plan);
  CHECK(rig.stats().disk_pages == 0 && found(rig, "old") == 12);
  rig.wake();
  CHECK(found(rig, "old") == 12 && held.handle->resume() && rig.holds(held));
  Tracked heir = rig.create("old", tokens_from(0, 30));
  CHECK(heir.handle->matched_tokens() == 20 && heir.handle->resume() && rig.holds(heir));
}

CASE(
    "an abort drops nothing, and any call that fails in an evicting sleep leaves it whole or goes on (M3, "
    "F26)") {
  const int faults = sweep_faults<Crowd>(
      [] {
        Crowd world = crowd({.host_slots = 5});
        world.rig->stage(evicting(*world.rig->ledger, RestoreMode::pinned));
        world.rig->ledger->abort();
        is_whole(world);
        return world;
      },
      [](Crowd& world) {
        Rig& rig = *world.rig;
        if (rig.ledger->status().phase == torpor::LedgerPhase::idle) {
          rig.stage(evicting(*rig.ledger, RestoreMode::pinned));
        }
        CHECK(rig.ledger->commit().evicted.prefix_tokens == 12);
        rig.ledger->publish();
        rig.device->fail_at(0);
        rig.wake();
        CHECK(found(rig, "old") == 0 && found(rig, "new") == 8 && rig.free_bytes() == world.free_bytes);
        held_is_whole(world);
      },
      [](Crowd& world) {
        if (world.rig->ledger->status().phase == torpor::LedgerPhase::idle) is_whole(world);
      });
  CHECK(faults >= 4);
}

CASE("a discarding sleep succeeds on a machine without any host memory left (K8)") {
  Crowd world = crowd({.host_slots = 8});
  world.rig->scarce->host_free_bytes = 0;
  CHECK(world.rig->plan(Action::sleep, RestoreMode::none).host_bytes == 0);
  world.rig->sleep(RestoreMode::none);
  CHECK(world.rig->kv->parked() && found(*world.rig, "new") == 0);
}
