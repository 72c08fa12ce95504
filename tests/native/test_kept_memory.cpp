// What is kept between cycles for speed (M8, M9).
#include "ledger_rig.hpp"
#include "process.hpp"

using namespace rig;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

std::size_t anonymous_bytes() {
  return process::bytes_no_fork_copies();
}

bool about(std::size_t value, std::size_t expected) {
  return value + mib > expected && value < expected + mib;
}

}  // namespace

CASE("a pool grows to its bound, shrinks when told, and the kernel sees both (M8)") {
  const auto device = test_device::make(grain, capacity / grain, chunk_grains);
  HostPool pool(device, 16 * mib);
  const std::size_t before = anonymous_bytes();
  for (int round = 0; round < 2; ++round) {
    std::vector<HostBuffer> buffers;
    for (int i = 0; i < 6; ++i) buffers.push_back(pool.acquire(4 * mib, true));
    CHECK(about(anonymous_bytes() - before, 24 * mib));
    for (HostBuffer& buffer : buffers) pool.give_back(std::move(buffer));
    CHECK(pool.idle_bytes() == 16 * mib && about(anonymous_bytes() - before, 16 * mib));
  }
  pool.resize(8 * mib);
  CHECK(pool.idle_bytes() == 8 * mib && about(anonymous_bytes() - before, 8 * mib));
  pool.resize(32 * mib);
  CHECK(pool.bound_bytes() == 32 * mib && pool.idle_bytes() == 8 * mib);
  CHECK(pool.trim() == 8 * mib && about(anonymous_bytes() - before, 0));
}

CASE("a backup made while awake leaves nothing to copy for the sleep, and the bytes are right (M9)") {
  constexpr std::size_t size = (std::size_t{64} << 20) + 7;
  for (const RestoreMode mode : {RestoreMode::pinned, RestoreMode::disk}) {
    Rig rig(80 * mib, 80 * mib);
    (void)rig.region("weights", size, {.restore = mode, .immutable = true});
    CHECK(rig.ledger->prefill_backups(patience) == size);
    CHECK(rig.ledger->prefill_backups(patience) == 0);
    CHECK((mode == RestoreMode::disk ? rig.disk_bytes() : rig.host_bytes()) >= size);
    const Plan plan = rig.plan(Action::sleep);
    CHECK(plan.keep_bytes == 0 && plan.host_bytes == 0 && plan.disk_bytes == 0);
    CHECK(rig.stage(Action::sleep).moved_bytes == 0);
    (void)rig.finish();
    CHECK(rig.ledger->prefill_backups(patience) == 0);  // asleep: nothing to make
    (void)rig.wake();
    CHECK(rig.all_hold());
  }
}

CASE("only immutable regions that a sleep would preserve get a backup, and only within the bound (M8)") {
  Rig rig(2 * chunk);
  (void)rig.region("changing", chunk);
  (void)rig.region("discarded", chunk, {.restore = RestoreMode::none, .immutable = true});
  (void)rig.region("too large", 3 * chunk, {.immutable = true});
  const auto fits = rig.region("weights", chunk, {.immutable = true});
  CHECK(rig.ledger->prefill_backups(patience) == chunk && rig.host_bytes() == chunk);
  rig.write(*fits, 8);
  fits->contents_changed();
  CHECK(rig.host_bytes() == 0 && rig.ledger->host_pool()->retained_bytes() == 0);
  (void)rig.sleep();
  (void)rig.wake();
  CHECK(rig.holds(*fits, 8));
}

CASE("any device call of a backup may fail: the region is as before, and the next sleep is right (M3)") {
  std::size_t faults = 0;
  for (std::uint64_t k = 1;; ++k) {
    Rig rig(4 * chunk);
    (void)rig.region("weights", chunk, {.immutable = true});
    rig.faulty->fail_at(k);
    bool failed = false;
    try {
      (void)rig.ledger->prefill_backups(patience);
    } catch (const DeviceError&) {
      failed = true;
    }
    rig.faulty->fail_at(0);
    if (failed) CHECK(rig.host_bytes() == 0 && rig.ledger->host_pool()->retained_bytes() == 0);
    (void)rig.sleep();
    (void)rig.wake();
    CHECK(rig.all_hold());
    if (!failed) break;
    ++faults;
  }
  CHECK(faults == 3);  // create_host, copy, wait
}

CASE("an operation goes before a backup that is being made, and finds nothing half done (M9)") {
  constexpr std::size_t size = 3 * (std::size_t{64} << 20);
  Rig rig(size + mib, size + chunk);
  (void)rig.region("weights", size, {.immutable = true});
  rig.faulty->fail_at(0);
  rig.faulty->delay("copy", 0.2);
  std::size_t saved_bytes = 0;
  std::thread background([&] { saved_bytes = rig.ledger->prefill_backups(patience); });
  until_called(*rig.faulty, "copy");
  (void)rig.stage(Action::sleep);
  background.join();
  CHECK(saved_bytes < size);
  (void)rig.finish();
  rig.faulty->delay("copy", 0);
  CHECK(rig.ledger->host_pool()->retained_bytes() == 0);
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("on request a ledger gives back backups and idle memory, but never what sleeps (M8)") {
  Rig rig(8 * chunk);
  (void)rig.region("weights", 2 * chunk, {.immutable = true});
  (void)rig.region("workspace", chunk);
  (void)rig.sleep();
  CHECK(rig.ledger->trim_host() == 0 && rig.host_bytes() == 3 * chunk);
  (void)rig.wake();
  CHECK(rig.host_bytes() == 2 * chunk && rig.ledger->host_pool()->idle_bytes() == chunk);
  CHECK(rig.ledger->trim_host(2 * chunk) == chunk && rig.host_bytes() == 2 * chunk);
  CHECK(rig.ledger->trim_host() == 2 * chunk);
  CHECK(rig.host_bytes() == 0 && rig.ledger->host_pool()->retained_bytes() == 0);
  (void)rig.sleep();
  (void)rig.wake();
  CHECK(rig.all_hold());
}

CASE("the bytes that a plan promises can be had at once after the commit (F9, M1)") {
  Rig rig;
  (void)rig.region("weights", 3 * chunk);
  (void)rig.region("scales", grain, {.preserve_always = true});
  const Plan plan = rig.plan(Action::sleep);
  (void)rig.ledger->stage(plan, patience);
  const std::size_t free_before = rig.free_bytes();
  CHECK(rig.ledger->commit().freed_bytes == plan.free_bytes);
  const Physical all(rig.host, free_before + plan.free_bytes);
  CHECK(rig.free_bytes() == 0);
  rig.ledger->publish();
}

CASE("a ledger lists who is registered with it (K10)") {
  Rig rig;
  const auto first = rig.ledger->register_external("transfer engine", "kv_cache", true);
  const auto second = rig.ledger->register_external("usage counter", "kv_cache", false);
  CHECK((rig.ledger->registrations() == std::vector<std::string>{"transfer engine", "usage counter"}));
  first->close();
  first->close();
  CHECK((rig.ledger->registrations() == std::vector<std::string>{"usage counter"}));
}
