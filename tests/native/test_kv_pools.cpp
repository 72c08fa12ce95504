// Pools that grow and shrink between transactions (K12): what they hold, what the driver sees, what is
// refused.
#include "kv_rig.hpp"
#include "process.hpp"

using namespace kv_rig;
using torpor::Action;
using torpor::Misuse;
using torpor::OutOfDeviceMemory;
using torpor::OutOfHostMemory;
using torpor::RestoreMode;

namespace {

const std::size_t granule_slots = granule_bytes / page_bytes;

std::size_t bytes_of(std::size_t slots) {
  return slots * page_bytes;
}

// Behind the memory of all devices here, by the kernel's word, or by the driver's.
std::size_t committed_bytes() {
  if (test_device::where() != test_device::Where::cuda) return process::committed_bytes();
  static const auto gpu = torpor::make_cuda_device(0);
  const torpor::MemoryInfo info = gpu->memory_info();
  return info.total_bytes - info.free_bytes;
}

// A driver may round.
bool committed(std::size_t expected_bytes) {
  const std::size_t now = committed_bytes();
  if (test_device::where() != test_device::Where::cuda) return now == expected_bytes;
  return now < expected_bytes + granule_bytes && now + granule_bytes > expected_bytes;
}

// Whole again on the GPU, in slots of the pool.
void is_whole(Rig& rig, Tracked& one) {
  CHECK(one.handle->resume() && rig.holds(one));
  one.handle->suspend();
}

}  // namespace

CASE("a pool grows within its addresses, which stay, and more sequences fit (K12, S1)") {
  Rig rig({.gpu_slots = 8, .max_gpu_slots = 24});
  const Address base = rig.kv->address(1, "v");
  const std::size_t free_before = rig.free_bytes();
  const std::size_t committed_before = committed_bytes();
  Tracked one = rig.started("a", tokens_from(0, 26));
  one.handle->suspend();
  rig.kv->resize_pools({bytes_of(24) + 100});  // rounded down
  CHECK(rig.kv->slots() == 24 && rig.kv->address(1, "v") == base);
  CHECK(rig.free_bytes() == free_before - 2 * granule_bytes);
  CHECK(committed(committed_before + 2 * granule_bytes));
  CHECK(one.handle->resume() && rig.holds(one));
  Tracked two = rig.started("b", tokens_from(0, 60));
  CHECK(rig.holds(one) && rig.holds(two));
  rig.sleep(RestoreMode::pinned);
  CHECK(rig.free_bytes() == free_before + granule_bytes);  // all three are gone
  rig.wake();
  CHECK(rig.kv->slots() == 24 && rig.holds(one) && rig.holds(two));
  CHECK(rig.free_bytes() == free_before - 2 * granule_bytes);
}

CASE("a pool that shrinks moves the pages behind its new end, and the memory is free at once (K12, S2)") {
  Rig rig({.gpu_slots = 32, .seed = 11});
  const std::size_t free_before = rig.free_bytes();
  const std::size_t committed_before = committed_bytes();
  Tracked one = rig.started("a", tokens_from(0, 18));
  Tracked two = rig.started("b", tokens_from(0, 22));
  const auto table = one.handle->table();
  CHECK(std::any_of(table.get(), table.get() + 5, [](std::int32_t slot) { return slot >= 16; }));
  one.handle->suspend();
  two.handle->suspend();
  rig.kv->resize_pools(std::vector<std::size_t>{bytes_of(16)});
  CHECK(rig.kv->slots() == 16 && rig.free_bytes() == free_before + 2 * granule_bytes);
  CHECK(committed(committed_before - 2 * granule_bytes));
  CHECK(rig.stats().evicted_pages == 0 && rig.stats().free_slots == 16 - 11);
  CHECK(one.handle->resume() && two.handle->resume() && rig.holds(one) && rig.holds(two));
  CHECK(std::all_of(table.get(), table.get() + 5, [](std::int32_t slot) { return slot < 16; }));
  CHECK(rig.kv->probe("a", tokens_from(0, 19)) == 16);
  rig.sleep(RestoreMode::pinned);
  rig.wake();
  CHECK(rig.kv->slots() == 16 && rig.holds(one) && rig.holds(two));
  one.handle->suspend();
  two.handle->suspend();
  rig.kv->resize_pools(bytes_of(32));
  is_whole(rig, one);
  CHECK(rig.free_bytes() == free_before && rig.kv->slots() == 32);
}

CASE("shrinking lets reusable pages fall or drops them, the least recently used first, never held ones") {
  Rig rig({.gpu_slots = 24, .host_slots = 2, .seed = 2});
  Tracked old = rig.started("old", tokens_from(0, 16));
  old.handle->close();
  Tracked held = rig.started("held", tokens_from(0, 20));
  held.handle->suspend();
  Tracked fresh = rig.started("new", tokens_from(0, 12));
  fresh.handle->close();
  CHECK(rig.stats().free_slots == 24 - 12);
  rig.kv->resize_pools(bytes_of(8));  // 12 pages, 8 slots, 2 places
  CHECK(rig.stats().host_pages == 2 && rig.stats().evicted_pages == 2 && rig.stats().free_slots == 0);
  CHECK(rig.kv->probe("old", tokens_from(0, 17)) == 8 && rig.kv->probe("new", tokens_from(0, 13)) == 12);
  is_whole(rig, held);
  Tracked heir = rig.create("new", tokens_from(0, 13));
  CHECK(heir.handle->resume() && rig.holds(heir));
  heir.handle->close();
  Tracked other = rig.create("old", tokens_from(0, 9));
  CHECK(other.handle->matched_tokens() == 8 && other.handle->resume() && rig.holds(other));
}

CASE("a pool does not shrink below what suspended sequences hold, and says what is needed and there") {
  Rig rig({.gpu_slots = 24, .host_slots = 2, .seed = 2});
  Tracked one = rig.started("a", tokens_from(0, 24));
  one.handle->suspend();
  Tracked two = rig.started("b", tokens_from(0, 24));
  two.handle->suspend();
  const std::size_t free_before = rig.free_bytes();
  try {
    rig.kv->resize_pools(bytes_of(8));
    check::fail(__FILE__, __LINE__, "it shrank");
  } catch (const OutOfDeviceMemory& error) {
    CHECK(error.needed_bytes == bytes_of(12) && error.free_bytes == bytes_of(8));
  }
  CHECK(rig.free_bytes() == free_before && rig.kv->slots() == 24 && rig.stats().host_bytes == 0);
  two.handle->close();
  rig.kv->resize_pools(bytes_of(8));
  is_whole(rig, one);
  Tracked three = rig.create("c", tokens_from(0, 4));
  // A sequence that could never resume again is not made one.
  CHECK(three.handle->resume());
  CHECK(rig.kv->slots() == 8);
  three.handle->suspend();
  Rig large({.gpu_slots = 24, .host_slots = 24});
  Tracked long_one = large.started("a", tokens_from(0, 40));
  long_one.handle->suspend();
  CHECK_THROWS(Misuse, large.kv->resize_pools(bytes_of(8)));
  large.kv->resize_pools(bytes_of(16));
  is_whole(large, long_one);
}

CASE("a prompt finds no more than the slots can hold after the pool has shrunk") {
  Rig rig({.gpu_slots = 16, .host_slots = 16});
  Tracked one = rig.started("a", tokens_from(0, 60));
  one.handle->close();
  CHECK(rig.kv->probe("a", tokens_from(0, 61)) == 60);
  rig.kv->resize_pools(bytes_of(8));
  CHECK(rig.kv->probe("a", tokens_from(0, 61)) == 32);
  Tracked heir = rig.create("a", tokens_from(0, 61));
  CHECK(heir.handle->resume() && rig.holds(heir));
}

CASE("the ceiling of the host tier rises and falls: reusable pages beyond it go, held ones forbid it") {
  Rig rig({.gpu_slots = 8, .host_slots = 0});
  Tracked old = rig.started("old", tokens_from(0, 12));
  old.handle->close();
  Tracked one = rig.started("a", tokens_from(0, 16));
  one.handle->suspend();
  rig.kv->resize_pools(bytes_of(8), bytes_of(8));
  CHECK(rig.stats().host_slots == 8);
  Tracked two = rig.started("b", tokens_from(0, 32));  // all others go down
  CHECK(rig.stats().host_pages == 7 && rig.stats().evicted_pages == 0);
  two.handle->suspend();
  try {
    rig.kv->resize_pools(bytes_of(8), bytes_of(3));
    check::fail(__FILE__, __LINE__, "it shrank");
  } catch (const OutOfHostMemory& error) {
    CHECK(error.needed_bytes == bytes_of(4) && error.free_bytes == bytes_of(3));
  }
  CHECK(rig.stats().host_slots == 8 && rig.stats().host_pages == 7);
  rig.kv->resize_pools(bytes_of(8), bytes_of(5));
  CHECK(rig.stats().host_slots == 5 && rig.stats().host_pages == 5 && rig.stats().evicted_pages == 2);
  CHECK(rig.kv->probe("old", tokens_from(0, 13)) == 4);
  two.handle->close();
  is_whole(rig, one);
}

CASE("maintenance is refused, with a way out, while anything is asleep or under way or in use (K10, K12)") {
  Rig rig({.gpu_slots = 16, .max_gpu_slots = 24});
  const auto region = rig.ledger->create_region({.tag = "weights", .size_bytes = granule_bytes});
  const auto refused = [&] {
    const std::size_t free_before = rig.free_bytes();
    CHECK_THROWS(Misuse, rig.kv->resize_pools(bytes_of(8)));
    CHECK_THROWS(Misuse, rig.kv->rebalance());
    CHECK(rig.kv->slots() == 16 && rig.free_bytes() == free_before);
  };
  Tracked one = rig.started("a", tokens_from(0, 9));
  refused();
  one.handle->suspend();
  rig.stage(rig.plan(Action::sleep, RestoreMode::pinned));
  refused();
  rig.ledger->commit();
  refused();
  rig.ledger->publish();
  refused();
  rig.wake();
  torpor::Request weights_alone;
  weights_alone.kind = Action::sleep;
  weights_alone.operation = "test";
  weights_alone.tags = {"weights"};
  rig.run(rig.ledger->preflight(weights_alone));
  CHECK(!rig.kv->parked());
  refused();
  rig.wake();
  const auto registration = rig.ledger->register_external("transfer", "kv_cache", true);
  refused();
  registration->close();
  CHECK_THROWS(Misuse, rig.kv->resize_pools(bytes_of(32)));  // beyond its addresses
  CHECK_THROWS(Misuse, rig.kv->resize_pools(page_bytes));    // less than a granule
  CHECK_THROWS(Misuse, rig.kv->resize_pools({bytes_of(8), bytes_of(8)}));
  rig.kv->resize_pools(bytes_of(8));
  CHECK(rig.kv->slots() == 8);
  is_whole(rig, one);
  rig.ledger.reset();
  rig.kv->resize_pools(bytes_of(24));  // a cache may live longer than its ledger
  is_whole(rig, one);
}

CASE("growth without device memory is refused with the bytes, and nothing changes (M3)") {
  Rig rig({.gpu_slots = 8, .device_bytes = 2 * granule_bytes, .max_gpu_slots = 24});
  Tracked one = rig.started("a", tokens_from(0, 9));
  one.handle->suspend();
  CHECK_THROWS(OutOfDeviceMemory, rig.kv->resize_pools(bytes_of(24)));
  CHECK(rig.kv->slots() == 8 && rig.free_bytes() == granule_bytes);
  is_whole(rig, one);
  rig.kv->resize_pools(bytes_of(16));
  CHECK(rig.free_bytes() == 0 && rig.kv->slots() == 2 * granule_slots);
  is_whole(rig, one);
}
