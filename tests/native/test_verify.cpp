// K13: what was preserved is checked by checksums before a wake is over, and a difference fails it.
#include "ledger_rig.hpp"
#include "process.hpp"

using namespace rig;

namespace {

constexpr std::array preserving{RestoreMode::cpu, RestoreMode::pinned, RestoreMode::disk};

// A ledger with two regions, whose operations record checksums.
struct Verified : Rig {
  Verified() {
    (void)region("weights", chunk + 5);
    (void)region("workspace", grain + 3);
    verify = true;
    faulty->fail_at(0);
  }
};

Modes both(RestoreMode mode) {
  return {{"weights", mode}, {"workspace", mode}};
}

std::string corrupt_tag(const Rig& rig) {
  try {
    (void)rig.stage(Action::wake);
  } catch (const ContentsCorrupt& error) {
    CHECK(std::string(error.what()).find("restore mode none") != std::string::npos);
    return error.tag;
  }
  return "";
}

std::size_t count_of(const std::vector<std::string>& log, const std::string& call) {
  return static_cast<std::size_t>(std::count(log.begin(), log.end(), call));
}

}  // namespace

CASE("with verify, both ways take checksums of every region, and what is whole wakes (K13)") {
  for (const RestoreMode mode : preserving) {
    Verified rig;
    (void)rig.sleep(both(mode));
    CHECK(count_of(rig.faulty->log(), "checksum") == 2);
    (void)rig.wake();
    CHECK(count_of(rig.faulty->log(), "checksum") == 4 && rig.all_hold());
  }
}

CASE("without verify no checksum is taken") {
  Verified rig;
  rig.verify = false;
  (void)rig.sleep();
  (void)rig.wake();
  CHECK(count_of(rig.faulty->log(), "checksum") == 0 && rig.all_hold());
}

CASE("a flipped byte of a saved copy fails the wake, names the tag, and the model stays asleep (K13)") {
  for (const RestoreMode mode : preserving) {
    for (const std::uint64_t broken : {1U, 2U}) {  // the copy of weights, or that of workspace
      Verified rig;
      rig.faulty->corrupt_copy(broken);
      (void)rig.sleep(both(mode));
      const std::size_t kept = rig.host_bytes() + rig.disk_bytes();
      for (int attempt = 0; attempt < 2; ++attempt) {
        CHECK(corrupt_tag(rig) == (broken == 1 ? "weights" : "workspace"));
        CHECK(rig.phase() == LedgerPhase::idle && !rig.ledger->status().mutated);
        CHECK(rig.free_bytes() == capacity && test_device::is_bare(rig.regions[0]->address()));
        CHECK(rig.host_bytes() + rig.disk_bytes() == kept && rig.ledger->parked_tags().size() == 2);
      }
      // The way out that the message names.
      rig.verify = false;
      (void)rig.sleep(both(RestoreMode::none));
      (void)rig.wake();
      CHECK(rig.ledger->parked_tags().empty());
    }
  }
}

CASE(
    "an immutable region that stays mapped is checked where it lies; one that may be written is not (K13, "
    "S3)") {
  for (const bool immutable : {true, false}) {
    Rig rig;
    const auto scales = rig.region("scales", grain, {.immutable = immutable, .preserve_always = true});
    const auto weights = rig.region("weights", chunk);
    rig.verify = true;
    (void)rig.sleep();
    rig.memory.flip(scales->address() + 99, 1);
    if (immutable) {
      CHECK(corrupt_tag(rig) == "scales" && rig.ledger->parked_tags().size() == 2);
      CHECK(rig.free_bytes() == capacity - grain);  // weights stay asleep, and scales where they were
      // The way out that the message names.
      rig.verify = false;
      (void)rig.sleep({{"scales", RestoreMode::none}});
    }
    (void)rig.wake();
    rig.memory.flip(scales->address() + 99, 1);
    CHECK(rig.ledger->parked_tags().empty() && rig.all_hold());
    rig.verify = true;
    (void)rig.sleep();
    (void)rig.wake();
    CHECK(rig.all_hold());
  }
}

CASE("a byte that goes wrong on the way back fails the wake, and the next one is right (K13, F26)") {
  Verified rig;
  (void)rig.sleep();
  rig.faulty->corrupt_copy(1);
  CHECK(corrupt_tag(rig) == "weights");
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("checksums that were recorded are compared by every wake, asked or not (K13)") {
  Verified rig;
  rig.faulty->corrupt_copy(1);
  (void)rig.sleep();
  rig.verify = false;
  CHECK(corrupt_tag(rig) == "weights");
}

CASE("a wake that is to be verified is refused by name where no checksums were recorded (K13)") {
  Verified rig;
  rig.verify = false;
  (void)rig.sleep({{"weights", RestoreMode::cpu}, {"workspace", RestoreMode::none}});
  rig.verify = true;
  const Plan plan = rig.plan(Action::wake);
  CHECK(plan.refusals.size() == 1 && plan.refusals[0].code == "refused" && plan.refusals[0].tag == "weights");
  CHECK_THROWS(Misuse, rig.ledger->stage(plan, patience));
  (void)rig.wake({"workspace"});  // nothing was preserved there: nothing to compare
  rig.verify = false;
  (void)rig.wake();
  CHECK(rig.holds(*rig.regions[0], 1));
}

CASE("a backup that no longer holds the region's bytes is not trusted with verify on (K13, M9)") {
  Rig rig(4 * chunk);
  const auto weights = rig.region("weights", chunk, {.immutable = true});
  rig.verify = true;
  (void)rig.sleep();
  (void)rig.wake();
  CHECK(rig.stage(Action::sleep).moved_bytes == 0);  // the same bytes: saved once
  rig.ledger->abort();
  rig.write(*weights, 9);  // and nobody called contents_changed
  CHECK(rig.stage(Action::sleep).moved_bytes == chunk);
  (void)rig.finish();
  CHECK(rig.host_bytes() == chunk && rig.ledger->host_pool()->retained_bytes() == 0);
  (void)rig.wake();
  CHECK(rig.holds(*weights, 9));
}

CASE("a participant that cannot take checksums is refused by name, not skipped (K13)") {
  struct Plain final : Participant {
    std::string tag_ = "kv_cache";
    std::string name_;
    const std::string& tag() const noexcept override { return tag_; }
    const std::string& name() const noexcept override { return name_; }
    bool parked() const noexcept override { return false; }
    RestoreMode default_mode() const noexcept override { return RestoreMode::pinned; }
    Usage usage() const override { return {}; }
    Item plan_sleep(RestoreMode mode) const override {
      Item item;
      item.tag = tag_;
      item.mode = mode;
      return item;
    }
    Item plan_wake() const override { return {}; }
    void stage_sleep(const Item&, UndoStack&, StageContext&) override {}
    void stage_wake(const Item&, UndoStack&, StageContext&) override {}
    std::size_t commit_sleep() override { return 0; }
    void commit_wake() noexcept override {}
    void publish() noexcept override {}
  };
  Rig rig;
  rig.ledger->add(std::make_shared<Plain>());
  CHECK(rig.plan(Action::sleep).refusals.empty());
  CHECK(rig.plan(Action::sleep, {{"kv_cache", RestoreMode::disk}}).refusals.at(0).code == "refused");
  rig.verify = true;
  CHECK(rig.plan(Action::sleep).refusals.at(0).tag == "kv_cache");
  CHECK(rig.plan(Action::sleep, {{"kv_cache", RestoreMode::none}}).refusals.empty());
}

CASE("any device call of a verified sleep or wake may fail, checksums too (M3, K13)") {
  for (const Action kind : {Action::sleep, Action::wake}) {
    std::size_t faults = 0;
    bool done = false;
    for (std::uint64_t k = 1; !done; ++k) {
      Verified rig;
      const std::size_t free_awake = rig.free_bytes();
      if (kind == Action::wake) (void)rig.sleep();
      const std::size_t free_before = rig.free_bytes();
      const std::size_t host_before = rig.host_bytes();
      const Plan plan = rig.plan(kind);
      rig.faulty->fail_at(k);
      try {
        (void)rig.ledger->stage(plan, patience);
        done = true;
      } catch (const DeviceError&) {
        ++faults;
        rig.faulty->fail_at(0);
        CHECK(rig.free_bytes() == free_before && rig.host_bytes() == host_before);
        (void)rig.ledger->stage(plan, patience);
      }
      rig.faulty->fail_at(0);
      (void)rig.finish();
      if (kind == Action::sleep) (void)rig.wake();
      CHECK(rig.all_hold() && rig.free_bytes() == free_awake && rig.host_bytes() == 0);
    }
    CHECK(faults >= 9);
  }
}
