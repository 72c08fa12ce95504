// The KV cache asleep: what each mode keeps, and what sequences may do meanwhile.
#include <algorithm>
#include <thread>

#include "kv_world.hpp"

using namespace kv_rig;
using torpor::Action;
using torpor::Misuse;
using torpor::RestoreMode;

CASE(
    "a preserving sleep gives the whole pool back and wakes with every byte, prefix and tier as it was (K3, "
    "K6)") {
  for (const RestoreMode mode : {RestoreMode::cpu, RestoreMode::pinned, RestoreMode::disk}) {
    World world = mixed_world();
    Rig& rig = *world.rig;
    const auto plan = rig.plan(Action::sleep, mode);
    CHECK(plan.free_bytes == pool_bytes && plan.keep_bytes == 8 * page_bytes);
    rig.run(plan);
    CHECK(rig.kv->parked() && rig.free_bytes() == world.free_bytes + pool_bytes);
    CHECK(rig.ledger->memory()[0].device_bytes == 0 && rig.ledger->memory()[0].mode == mode);
    CHECK(rig.kv->probe("p", known("p")) == 12);
    rig.wake();
    is_whole(world);
    contents_are_whole(world);
  }
}

CASE("after wake pages lie in other slots, page tables say which, and addresses are the same (S1, S2)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  const auto before = table_of(world.active);
  const Address address = rig.kv->address(1, "v");
  const auto* const table = world.active.handle->table().get();
  rig.sleep(RestoreMode::pinned);
  CHECK(table_of(world.active) == std::vector<std::int32_t>(8, no_slot));
  rig.wake();
  CHECK(rig.holds(world.active) && table_of(world.active) != before);
  CHECK(rig.kv->address(1, "v") == address && world.active.handle->table().get() == table);
}

CASE("only live pages are saved, and host memory is asked for by a preserving sleep alone (K4, K8)") {
  Rig rig({.gpu_slots = 64});
  Tracked one = rig.started("a", tokens_from(0, 6));
  CHECK(rig.plan(Action::sleep, RestoreMode::none).keep_bytes == 0);
  CHECK(rig.plan(Action::sleep, RestoreMode::none).host_bytes == 0);
  const std::size_t host_before = rig.scarce->host_free_bytes;
  const auto plan = rig.plan(Action::sleep, RestoreMode::pinned);
  CHECK(plan.free_bytes == 64 * page_bytes && plan.keep_bytes == 2 * page_bytes);
  rig.run(plan);
  CHECK(host_before - rig.scarce->host_free_bytes == plan.host_bytes);
  CHECK(rig.plan(Action::wake).keep_bytes == 2 * page_bytes);
  rig.wake();
  CHECK(rig.holds(one) && rig.scarce->host_free_bytes == host_before);
}

CASE("an empty cache keeps nothing in any mode") {
  for (const RestoreMode mode : {RestoreMode::none, RestoreMode::memset, RestoreMode::pinned}) {
    Rig rig;
    const std::size_t before = rig.free_bytes();
    CHECK(rig.plan(Action::sleep, mode).keep_bytes == 0);
    rig.sleep(mode);
    CHECK(rig.free_bytes() == before + pool_bytes);
    rig.wake();
    CHECK(rig.free_bytes() == before && rig.stats().free_slots == 8);
  }
}

CASE("a discarding sleep forgets prefixes on every tier and gives host memory back (K1, F11)") {
  for (const RestoreMode mode : {RestoreMode::none, RestoreMode::memset}) {
    World world = mixed_world();
    Rig& rig = *world.rig;
    CHECK(rig.stats().host_bytes > 0);
    rig.sleep(mode);
    CHECK(rig.stats().host_bytes == 0 && rig.free_bytes() == world.free_bytes + pool_bytes);
    for (const char* scope : {"a", "s", "p"}) CHECK(rig.kv->probe(scope, known(scope)) == 0);
    rig.wake();
    for (const char* scope : {"a", "s", "p"}) CHECK(rig.kv->probe(scope, known(scope)) == 0);
    CHECK(rig.free_bytes() == world.free_bytes);
  }
}

CASE("with a host pool the discarded host tier returns to it, not to the machine (K1, M8)") {
  World world = mixed_world(std::size_t{4} << 20);
  Rig& rig = *world.rig;
  const std::size_t committed = rig.stats().host_bytes;
  rig.sleep(RestoreMode::none);
  CHECK(rig.stats().host_bytes == 0 && rig.ledger->host_pool()->idle_bytes() == committed);
}

CASE(
    "pages held through a discard are valid and empty: zero after memset, in the tier they were in (K2, K5, "
    "K6)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.sleep(RestoreMode::memset);
  CHECK(world.active.handle->contents_lost() && world.suspended.handle->contents_lost());
  rig.wake();
  CHECK(rig.stats().locked_pages == 3 && rig.stats().held_pages == 4 && rig.stats().host_pages == 2);
  CHECK(rig.stats().free_slots == 3);
  CHECK(rig.all_zero(world.active));
  CHECK(world.suspended.handle->resume() && rig.all_zero(world.suspended));
}

CASE("a memset wake leaves no old byte in any slot (S4)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.sleep(RestoreMode::memset);
  rig.wake();
  CHECK(rig.memory.is_zero(rig.kv->address(0, "k"), pool_bytes));
}

CASE("a sequence that went through a discard goes on, and its blocks never become prefixes (F11)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.sleep(RestoreMode::none);
  rig.wake();
  CHECK(world.active.handle->history_tokens() == 10);
  CHECK(rig.extend(world.active, tokens_from(10, 8)));
  CHECK(rig.stats().prefix_tokens == 0);
  world.active.handle->close();
  Tracked fresh = rig.started("a", tokens_from(0, 10));
  CHECK(!fresh.handle->contents_lost() && fresh.handle->matched_tokens() == 0);
  CHECK(rig.kv->probe("a", known("a")) == 8);
}

CASE("sleep of a sleeping cache: weaker lets go of what was kept, stronger keeps what is in force (C1)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.sleep(RestoreMode::pinned);
  auto again = rig.plan(Action::sleep, RestoreMode::cpu);
  CHECK(again.items[0].noop && again.items[0].mode == RestoreMode::pinned && again.keep_bytes == 0);
  rig.run(again);
  CHECK(rig.kv->probe("p", known("p")) == 12);
  auto weaker = rig.plan(Action::sleep, RestoreMode::memset);
  CHECK(!weaker.items[0].noop && weaker.free_bytes == 0);
  rig.stage(weaker);
  rig.ledger->abort();
  CHECK(rig.kv->probe("p", known("p")) == 12);
  rig.run(weaker);
  CHECK(rig.stats().host_bytes == 0 && rig.kv->probe("p", known("p")) == 0);
  auto stronger = rig.plan(Action::sleep, RestoreMode::pinned);
  CHECK(stronger.items[0].noop && stronger.items[0].mode == RestoreMode::memset && stronger.keep_bytes == 0);
  rig.run(stronger);
  rig.wake();
  CHECK(rig.plan(Action::wake).items[0].noop);
  rig.wake();
  CHECK(rig.all_zero(world.active) && rig.free_bytes() == world.free_bytes);
}

CASE("while asleep sequences can be created and closed; what needs the GPU is refused (F19, K12)") {
  for (const RestoreMode mode : {RestoreMode::none, RestoreMode::pinned}) {
    World world = mixed_world();
    Rig& rig = *world.rig;
    rig.sleep(mode);
    Tracked fresh = rig.create("p", known("p"));
    CHECK(fresh.handle->matched_tokens() == (preserves(mode) ? 12 : 0));
    CHECK(!fresh.handle->resume() && fresh.handle->state() == SequenceState::suspended);
    CHECK(!world.active.handle->resize(20));
    CHECK_THROWS(Misuse, world.active.handle->commit(Tokens{1}));
    (void)rig.create("a", known("a"));  // created and closed
    world.suspended.handle->close();
    CHECK(rig.stats().free_slots == 0);
    rig.wake();
    CHECK(rig.free_bytes() == world.free_bytes);
    CHECK(fresh.handle->resume());
    if (preserves(mode)) CHECK(rig.holds(fresh) && rig.holds(world.active));
    world.active.handle->close();
    fresh.handle->close();
    rig.kv->forget_prefixes();
    CHECK(rig.stats().free_slots == 8 && rig.stats().host_bytes == 0);
  }
}

CASE(
    "prefixes forgotten while asleep do not come back with the wake, and their host memory goes at once "
    "(C10)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  world.suspended.handle->close();
  rig.sleep(RestoreMode::pinned);
  CHECK(rig.kv->forget_prefixes() > 0);
  CHECK(rig.kv->probe("p", known("p")) == 0);
  world.active.handle->suspend();
  rig.wake();
  CHECK(rig.kv->probe("s", known("s")) == 0 && rig.stats().free_slots == 5);
  CHECK(world.active.handle->resume() && rig.holds(world.active));
}

CASE("between stage and commit sequences can be read and closed, and nothing else") {
  for (const bool abort : {true, false}) {
    World world = mixed_world();
    Rig& rig = *world.rig;
    rig.stage(rig.plan(Action::sleep, RestoreMode::pinned));
    CHECK_THROWS(Misuse, rig.kv->create_sequence("p", known("p")));
    CHECK_THROWS(Misuse, rig.kv->forget_prefixes());
    CHECK_THROWS(Misuse, world.suspended.handle->resume());
    CHECK_THROWS(Misuse, world.active.handle->suspend());
    CHECK_THROWS(Misuse, world.active.handle->resize(20));
    CHECK_THROWS(Misuse, world.active.handle->commit(Tokens{1}));
    CHECK(rig.kv->probe("p", known("p")) == 12 && rig.stats().locked_pages == 3);
    world.active.handle->close();
    CHECK(world.active.handle->state() == SequenceState::closed && rig.stats().sequences == 1);
    if (abort) {
      rig.ledger->abort();
    } else {
      rig.ledger->commit();
      rig.ledger->publish();
      rig.wake();
    }
    CHECK(rig.stats().locked_pages == 0 && rig.stats().free_slots == 1);
    CHECK(rig.kv->probe("a", known("a")) == 8);
    contents_are_whole(world = World{world.rig, rig.started("a", tokens_from(0, 10)), world.suspended, 0});
  }
}

CASE("a sequence closed between stage and commit of a wake leaves its prefix") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.sleep(RestoreMode::pinned);
  rig.stage(rig.plan(Action::wake));
  CHECK(table_of(world.active) != std::vector<std::int32_t>(8, no_slot));
  world.active.handle->close();
  CHECK(table_of(world.active) == std::vector<std::int32_t>(8, no_slot));
  rig.ledger->commit();
  Tracked heir = rig.create("a", known("a"));  // before publish: the saved copies go, the cache is awake
  CHECK(heir.handle->matched_tokens() == 8 && heir.handle->resume() && rig.holds(heir));
  rig.ledger->publish();
  CHECK(rig.holds(heir));
}

CASE("fifty cycles in changing modes leave device and host memory where they were (M2, F17, F18)") {
  Rig rig({.host_slots = 12, .seed = 21});
  const std::size_t before = rig.free_bytes();
  const std::size_t host_before = rig.scarce->host_free_bytes;
  const std::vector<RestoreMode> modes{RestoreMode::pinned, RestoreMode::none, RestoreMode::cpu,
                                       RestoreMode::memset, RestoreMode::disk};
  for (int cycle = 0; cycle < 50; ++cycle) {
    const RestoreMode mode = modes[static_cast<std::size_t>(cycle) % modes.size()];
    Tracked one = rig.started("a", tokens_from(cycle % 3, 13));
    rig.sleep(mode);
    CHECK(rig.free_bytes() == before + pool_bytes);
    rig.wake();
    if (preserves(mode)) CHECK(rig.holds(one));
  }
  rig.kv->forget_prefixes();
  CHECK(rig.free_bytes() == before && rig.scarce->host_free_bytes == host_before);
  CHECK(rig.stats().free_slots == 8);
}

CASE("the digest tells what there is, and nothing of slots or addresses (M7)") {
  Rig one({.seed = 1});
  Rig other({.seed = 2});
  const Tracked a = one.started("a", tokens_from(0, 9));
  Tracked b = other.started("a", tokens_from(0, 9));
  const auto digest = [](Rig& rig) { return rig.plan(Action::sleep, RestoreMode::pinned).digest; };
  CHECK(digest(one) == digest(other));
  b.handle->suspend();
  CHECK(digest(one) != digest(other));
  CHECK(b.handle->resume() && digest(one) == digest(other));
  CHECK(other.extend(b, {5}) && digest(one) != digest(other));
}

CASE("one thread uses sequences while another sleeps, wakes and looks") {
  Rig rig({.host_slots = 8, .seed = 6});
  std::atomic<bool> done{false};
  std::atomic<int> served{0};
  std::thread user([&] {
    while (!done) {
      try {
        Tracked one = rig.create("a", tokens_from(served % 5, 11));
        if (!one.handle->resume()) continue;
        if (one.handle->resize(12)) one.handle->commit(Tokens{1, 2, 3});
        one.handle->suspend();
        if (one.handle->resume()) ++served;
        one.handle->close();
      } catch (const Misuse&) {  // a sleep or wake was under way
      }
      std::this_thread::yield();
    }
  });
  for (int cycle = 0; cycle < 40; ++cycle) {
    rig.sleep(cycle % 2 == 0 ? RestoreMode::pinned : RestoreMode::none);
    CHECK(rig.kv->probe("a", tokens_from(0, 11)) <= 8 && rig.stats().sequences <= 1);
    rig.wake();
    const int before = served;
    const auto patience = torpor::Clock::now() + std::chrono::seconds(10);
    while (served == before && torpor::Clock::now() < patience) std::this_thread::yield();
    CHECK(served > before);
  }
  done = true;
  user.join();
  rig.kv->forget_prefixes();
  CHECK(rig.stats().free_slots == 8 && rig.stats().sequences == 0);
}

CASE("pages that came back from the host before a sleep are saved like any other (K3)") {
  Rig rig({.host_slots = 16, .seed = 4});
  Tracked one = rig.started("a", tokens_from(0, 14));
  one.handle->suspend();
  Tracked two = rig.started("b", tokens_from(0, 30));
  two.handle->suspend();
  CHECK(one.handle->resume() && rig.stats().moved_in_pages > 0);
  rig.sleep(RestoreMode::pinned);
  rig.wake();
  CHECK(rig.holds(one));
  one.handle->suspend();
  CHECK(two.handle->resume() && rig.holds(two));
}

CASE("a wake brings back the pages of its own sleep, whatever one that was taken back had saved (K2, M3)") {
  Rig rig({.host_slots = 16, .seed = 4});
  Tracked one = rig.started("a", tokens_from(0, 30));
  rig.stage(rig.plan(torpor::Action::sleep, RestoreMode::pinned));
  rig.ledger->abort();
  one.handle->suspend();
  Tracked two = rig.started("b", tokens_from(0, 30));  // as many pages as had been saved
  rig.sleep(RestoreMode::memset);
  rig.wake();
  CHECK(rig.all_zero(two));
  two.handle->suspend();
  CHECK(one.handle->resume() && rig.all_zero(one));
}
