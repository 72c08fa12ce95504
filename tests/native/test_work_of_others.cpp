// Work of other threads that a sleep waits for (M5), on the host device, which counts it. A GPU's driver sees
// it by itself: what a kernel does there is in tests/gpu/.
#include "ledger_rig.hpp"

using namespace rig;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

}  // namespace

CASE("a sleep waits for work of another thread that holds an event, and nothing moves under it (M5, F16)") {
  Rig rig;
  const auto region = rig.region("weights", chunk);
  std::atomic<bool> holding{false};
  std::atomic<bool> done{false};
  std::thread worker([&] {
    DeviceEvent event(rig.faulty);
    holding = true;
    const auto end = Clock::now() + std::chrono::milliseconds(200);
    auto* bytes = reinterpret_cast<volatile std::uint8_t*>(region->address());
    while (Clock::now() < end) bytes[7] = bytes[7];  // would fault if it were unmapped
    rig.write(*region, 5);
    done = true;
  });
  while (!holding) std::this_thread::yield();
  (void)rig.stage(Action::sleep);
  CHECK(done);
  worker.join();
  (void)rig.finish();
  (void)rig.wake();
  CHECK(rig.holds(*region, 5));  // what the work wrote was saved, not what was there before
}

CASE("past its deadline the sleep is refused as busy, and all is as before (M5, F16)") {
  Rig rig;
  (void)rig.region("weights", chunk);
  const std::size_t free_awake = rig.free_bytes();
  DeviceEvent event(rig.faulty);
  const Plan plan = rig.plan(Action::sleep);
  const auto start = Clock::now();
  CHECK_THROWS(DeviceBusy, rig.ledger->stage(plan, std::chrono::milliseconds(100)));
  CHECK(Clock::now() - start >= std::chrono::milliseconds(100));
  CHECK(rig.all_hold() && rig.free_bytes() == free_awake && rig.phase() == LedgerPhase::idle);
  event.complete();
  event.complete();  // a second time does nothing
  (void)rig.ledger->stage(plan, patience);
  (void)rig.finish();
}

CASE("a copy in flight on another thread is waited for as well (M5)") {
  const auto device = make_host_device(fresh_name(), 64 * mib, grain);
  const Reservation reservation(device, 32 * mib);
  const std::vector<Mapping> mapped = map_chunks(device, reservation.base(), 32 * mib);
  std::atomic<bool> started{false};
  std::atomic<bool> ended{false};
  std::thread copier([&] {
    const std::vector<Copy> batch(64, Copy{reservation.base(), reservation.base() + 16 * mib, 16 * mib});
    started = true;
    device->copy(batch, StreamId::in);
    ended = true;
  });
  while (!started) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const bool was_running = !ended;
  device->quiesce(Clock::now() + patience);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(was_running && ended);
  copier.join();
}
