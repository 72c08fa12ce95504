// The ledger's manners: refusals, one operation at a time, deadlines, registrations, digests.
#include "ledger_rig.hpp"

using namespace rig;

CASE("unknown tags and modes are refused by name, and nothing is touched") {
  Rig rig;
  (void)rig.region("weights", grain);
  const Plan plan = rig.plan(Action::sleep, {{"kv", RestoreMode::none}}, {"weights", "weigths"});
  CHECK(plan.refusals.size() == 2);
  CHECK(plan.refusals[0].code == "unknown_tag" && plan.refusals[0].tag == "kv");
  CHECK(plan.refusals[1].reason == "there is no tag 'weigths'; the tags here are: weights");
  CHECK_THROWS(Misuse, rig.ledger->stage(plan, patience));
  CHECK_THROWS(Misuse, parse_restore_mode("tape"));
  CHECK_THROWS(Misuse, parse_action("nap"));
  CHECK(rig.faulty->calls() > 0 && !rig.regions[0]->parked());
}

CASE("two participants of one tag need names of their own") {
  Rig rig;
  (void)rig.region("weights", grain);
  const std::size_t free_before = rig.free_bytes();
  CHECK_THROWS(Misuse, rig.ledger->create_region({.tag = "weights", .size_bytes = grain}));
  CHECK(rig.free_bytes() == free_before);
  (void)rig.region("weights", grain, {.name = "second"});
}

CASE("steps out of order are mistakes that change nothing") {
  Rig rig;
  (void)rig.region("weights", grain);
  CHECK_THROWS(Misuse, rig.ledger->commit());
  rig.ledger->publish();  // nothing to publish, like a repeated one
  const Plan plan = rig.plan(Action::sleep);
  (void)rig.ledger->stage(plan, patience);
  CHECK_THROWS(Misuse, rig.ledger->stage(plan, patience));
  CHECK_THROWS(Misuse, rig.ledger->publish());
  CHECK_THROWS(Misuse, rig.ledger->create_region({.tag = "more", .size_bytes = grain}));
  CHECK(rig.plan(Action::sleep).refusals.front().code == "conflict");
  const CommitReport first = rig.ledger->commit();
  const CommitReport again = rig.ledger->commit();
  CHECK(again.freed_bytes == first.freed_bytes && again.seconds == first.seconds);
  CHECK(rig.ledger->status().mutated);
  CHECK_THROWS(Misuse, rig.ledger->abort());
  rig.ledger->publish();
  CHECK(!rig.ledger->status().mutated && rig.ledger->status().operation == "op");
}

CASE("a device that does not come to rest in time is busy, and nothing was unmapped (M5, F16)") {
  Rig rig;
  (void)rig.region("weights", grain);
  rig.faulty->delay("quiesce", 0.15);
  CHECK_THROWS(DeviceBusy, rig.ledger->stage(rig.plan(Action::sleep), std::chrono::milliseconds(50)));
  CHECK(rig.all_hold() && rig.phase() == LedgerPhase::idle);
}

CASE("a stage that runs out of time while copying is undone (C6)") {
  Rig rig;
  (void)rig.region("weights", grain);
  const std::size_t free_before = rig.free_bytes();
  rig.faulty->delay("copy", 0.15);
  CHECK_THROWS(DeviceBusy, rig.ledger->stage(rig.plan(Action::sleep), std::chrono::milliseconds(50)));
  CHECK(rig.all_hold() && rig.free_bytes() == free_before && rig.host_bytes() == 0);
  rig.faulty->delay("copy", 0);
  (void)rig.sleep();
  rig.faulty->delay("map_range", 0.15);
  CHECK_THROWS(DeviceBusy, rig.ledger->stage(rig.plan(Action::wake), std::chrono::milliseconds(50)));
  CHECK(rig.free_bytes() == capacity && rig.host_bytes() == grain);
  rig.faulty->delay("map_range", 0);
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("stop ends a running stage, and status and memory answer meanwhile (C6)") {
  Rig rig;
  (void)rig.region("weights", grain);
  rig.faulty->fail_at(0);
  rig.faulty->delay("copy", 1.0);
  bool stopped = false;
  std::thread stage([&] {
    try {
      (void)rig.stage(Action::sleep);
    } catch (const Stopped&) {
      stopped = true;
    }
  });
  until_called(*rig.faulty, "copy");
  const auto start = Clock::now();
  CHECK(rig.phase() == LedgerPhase::idle && rig.ledger->status().operation == "op");
  CHECK(rig.ledger->memory().size() == 1);
  CHECK(rig.plan(Action::sleep).refusals.front().code == "conflict");
  rig.ledger->stop();
  CHECK(Clock::now() - start < std::chrono::milliseconds(700));  // none of these waited for the copy
  stage.join();
  CHECK(stopped && rig.all_hold() && rig.phase() == LedgerPhase::idle);
  rig.faulty->delay("copy", 0);
  (void)rig.sleep();  // an old stop does not haunt the next operation
}

CASE("somebody who only reads the memory table is no conflict for a preflight") {
  Rig rig;
  (void)rig.region("weights", grain);
  std::atomic<bool> done{false};
  std::thread reader([&] {
    while (!done) (void)rig.ledger->memory();
  });
  int refused = 0;
  for (int i = 0; i < 3000; ++i) refused += rig.plan(Action::sleep).refusals.empty() ? 0 : 1;
  done = true;
  reader.join();
  CHECK(refused == 0);
}

CASE("registered memory forbids the sleep of its tag by name, and only that (K10)") {
  Rig rig;
  (void)rig.region("kv_cache", grain);
  (void)rig.region("weights", grain);
  const auto moves = rig.ledger->register_external("transfer engine", "kv_cache", true);
  (void)rig.ledger->register_external("usage counter", "kv_cache", false);
  const Plan plan = rig.plan(Action::sleep);
  CHECK(plan.refusals.size() == 1 && plan.refusals[0].code == "external_registration");
  CHECK(plan.refusals[0].reason.find("transfer engine") != std::string::npos);
  CHECK(plan.refusals[0].reason.find("usage counter") == std::string::npos);
  (void)rig.sleep({}, {"weights"});
  moves->close();
  (void)rig.sleep();
  (void)rig.ledger->register_external("late", "kv_cache", true);
  CHECK(rig.plan(Action::sleep).refusals.empty());  // asleep already: nothing would move
  (void)rig.wake();
  CHECK(rig.plan(Action::sleep).refusals.size() == 1);  // the handle was dropped, the registration stands
}

CASE("a registration that came after preflight is seen by stage, and one during an operation waits (K10)") {
  Rig rig;
  (void)rig.region("kv_cache", grain);
  const Plan plan = rig.plan(Action::sleep);
  const auto early = rig.ledger->register_external("early", "kv_cache", true);
  CHECK_THROWS(Misuse, rig.ledger->stage(plan, patience));
  early->close();
  (void)rig.ledger->stage(plan, patience);
  std::atomic<bool> registered{false};
  std::thread late([&] {
    (void)rig.ledger->register_external("late", "kv_cache", true);
    registered = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  CHECK(!registered);
  (void)rig.finish();
  late.join();
  CHECK(registered && rig.regions[0]->parked());
}

CASE("digests are equal where logically the same would happen, whatever the sizes and addresses (M7)") {
  const auto digest = [](std::size_t size_bytes, RestoreMode mode, bool parked = false) {
    Rig rig;
    (void)rig.region("weights", size_bytes);
    (void)rig.region("workspace", grain);
    if (parked) (void)rig.sleep({}, {"workspace"});
    return rig.plan(Action::sleep, {{"weights", mode}}).digest;
  };
  const std::string one = digest(grain, RestoreMode::cpu);
  CHECK(one.size() == 32 && one == digest(3 * grain, RestoreMode::cpu));
  CHECK(one != digest(grain, RestoreMode::pinned));
  CHECK(one != digest(grain, RestoreMode::cpu, true));
}

CASE("undo steps run last one first, and dismissed ones not at all") {
  std::string order;
  {
    UndoStack undo;
    undo.push([&]() noexcept { order += 'a'; });
    undo.push([&]() noexcept { order += 'b'; });
    CHECK(undo.size() == 2);
  }
  CHECK(order == "ba");
  UndoStack undo;
  undo.push([&]() noexcept { order += 'c'; });
  undo.dismiss();
  undo.unwind();
  CHECK(order == "ba" && undo.size() == 0);
}
