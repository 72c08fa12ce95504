// Restore mode disk: contents in a file without a name, really written, really gone when they are not needed.
#include "ledger_rig.hpp"
#include "process.hpp"

using namespace rig;

namespace {

const Modes to_disk{{"weights", RestoreMode::disk}};

}  // namespace

CASE("a region's bytes come back from the disk to the same address, and no host memory is kept (K3, S1)") {
  Rig rig;
  const auto region = rig.region("weights", 2 * chunk + 5);
  const Address address = region->address();
  const Plan plan = rig.plan(Action::sleep, to_disk);
  CHECK(plan.disk_bytes == 2 * chunk + DiskFile::block_bytes && plan.items[0].host_bytes == 0);
  CHECK(plan.keep_bytes == 2 * chunk + 5);
  CHECK(rig.stage(Action::sleep, to_disk).moved_bytes == 2 * chunk + 5);
  CHECK(rig.finish().freed_bytes == 2 * chunk + grain);
  CHECK(rig.host_bytes() == 0 && rig.disk_bytes() == plan.disk_bytes);
  CHECK(rig.disk->allocated_bytes() >= plan.disk_bytes);  // as the file system counts
  CHECK(test_device::is_bare(address) && rig.free_bytes() == capacity);
  (void)rig.wake();
  CHECK(region->address() == address && rig.all_hold());
  CHECK(rig.disk_bytes() == 0 && rig.disk->allocated_bytes() == 0);
}

CASE("a region of several pieces goes through the disk whole, and a stop between them is heard (C6)") {
  constexpr std::size_t size = (std::size_t{64} << 20) + 7;
  Rig rig(0, round_up(size, chunk));
  (void)rig.region("weights", size);
  rig.faulty->fail_at(0);
  rig.faulty->delay("wait", 0.1);
  std::thread stopper([&] {
    until_called(*rig.faulty, "wait");
    rig.ledger->stop();
  });
  CHECK_THROWS(Stopped, rig.stage(Action::sleep, to_disk));
  stopper.join();
  rig.faulty->delay("wait", 0);
  CHECK(rig.disk->used_bytes() == 0 && rig.disk->allocated_bytes() == 0);
  (void)rig.sleep(to_disk);
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("a disk without room refuses in preflight with numbers, and a ledger without a disk says so (M4)") {
  Rig rig;
  (void)rig.region("weights", chunk);
  const std::uint64_t taken = rig.disk->take(disk_limit - grain);
  const Plan plan = rig.plan(Action::sleep, to_disk);
  CHECK(plan.refusals.size() == 1 && plan.refusals[0].code == "disk");
  CHECK(plan.refusals[0].needed_bytes == chunk && plan.refusals[0].free_bytes == grain);
  CHECK_THROWS(OutOfDisk, rig.ledger->stage(plan, patience));
  rig.disk->give_back(taken, disk_limit - grain);
  (void)rig.sleep(to_disk);
  Ledger bare(rig.faulty, 0);
  (void)bare.create_region({.tag = "weights", .size_bytes = grain});
  const Plan refused =
      bare.preflight({.kind = Action::sleep, .operation = "op", .tags = {}, .restore = to_disk});
  CHECK(refused.refusals.at(0).code == "refused");
  CHECK(refused.refusals[0].reason.find("disk_path") != std::string::npos);
}

CASE("the room goes between preflight and stage: the sleep is undone and typed (M3)") {
  Rig rig;
  (void)rig.region("weights", grain, {.name = "a"});
  (void)rig.region("weights", 2 * grain, {.name = "b"});
  const Plan plan = rig.plan(Action::sleep, to_disk);
  (void)rig.disk->take(disk_limit - 2 * grain);
  CHECK_THROWS(OutOfDisk, rig.ledger->stage(plan, patience));
  CHECK(rig.disk_bytes() == 0 && rig.all_hold() && rig.phase() == LedgerPhase::idle);
}

CASE("any read or write of the disk may fail: before the decision nothing has changed (M3, F26)") {
  Rig rig;
  (void)rig.region("weights", chunk);
  (void)rig.region("workspace", grain + 3);
  const Modes modes{{"weights", RestoreMode::disk}, {"workspace", RestoreMode::disk}};
  const std::size_t free_awake = rig.free_bytes();
  for (std::size_t k = 1; k <= 2; ++k) {
    rig.disk->fail_at(k);
    CHECK_THROWS(DeviceError, rig.stage(Action::sleep, modes));
    CHECK(rig.disk->used_bytes() == 0 && rig.free_bytes() == free_awake && rig.all_hold());
  }
  rig.disk->fail_at(0);
  (void)rig.sleep(modes);
  CHECK(rig.disk->calls() == 2);
  const std::size_t kept = rig.disk->used_bytes();
  for (std::size_t k = 1; k <= 2; ++k) {
    rig.disk->fail_at(k);
    CHECK_THROWS(DeviceError, rig.stage(Action::wake));
    CHECK(rig.disk->used_bytes() == kept && rig.free_bytes() == capacity);
    CHECK(test_device::is_bare(rig.regions[0]->address()));
  }
  rig.disk->fail_at(0);
  (void)rig.wake();
  CHECK(rig.all_hold() && rig.disk->allocated_bytes() == 0);
}

CASE("a weaker mode for what sleeps on a disk drops the file's room at commit, not before (C1)") {
  Rig rig;
  const auto region = rig.region("weights", chunk);
  (void)rig.sleep(to_disk);
  (void)rig.stage(Action::sleep, {{"weights", RestoreMode::memset}});
  CHECK(rig.disk_bytes() == chunk);
  (void)rig.finish();
  CHECK(rig.disk->allocated_bytes() == 0);
  (void)rig.wake();
  CHECK(rig.is_zero(*region));
}

CASE("an immutable region is written to the disk once, and a host mode saves it anew (M9)") {
  Rig rig(4 * chunk);
  const auto weights = rig.region("weights", chunk, {.immutable = true});
  (void)rig.sleep(to_disk);
  (void)rig.wake();
  CHECK(rig.disk_bytes() == chunk);
  CHECK(rig.stage(Action::sleep, to_disk).moved_bytes == 0);
  (void)rig.finish();
  (void)rig.wake();
  CHECK(rig.all_hold());
  CHECK(rig.stage(Action::sleep, {{"weights", RestoreMode::cpu}}).moved_bytes == chunk);
  (void)rig.finish();
  CHECK(rig.disk->allocated_bytes() == 0 && rig.host_bytes() == chunk);
  (void)rig.wake();
  CHECK(rig.all_hold());
  weights->contents_changed();
  CHECK(rig.host_bytes() == 0);
}

CASE("zero_on_wake reads zero after a wake from none, and keeps what is preserved (S4)") {
  Rig rig;
  const auto region = rig.region("workspace", chunk + 5, {.zero_on_wake = true});
  (void)rig.sleep({{"workspace", RestoreMode::cpu}});
  (void)rig.wake();
  CHECK(rig.all_hold());
  rig.faulty->fail_at(0);
  (void)rig.sleep({{"workspace", RestoreMode::none}});
  (void)rig.wake();
  CHECK(rig.is_zero(*region));
  const std::vector<std::string> log = rig.faulty->log();
  CHECK(std::count(log.begin(), log.end(), "fill") ==
        1);  // fresh host pages are zero anyway: a GPU's are not
}
