// What tiers do to the machine: memory, descriptors, mappings, forks, and bytes that are promised.
#include "kv_trio.hpp"
#include "process.hpp"

using namespace kv_rig;
using torpor::Action;
using torpor::RestoreMode;

namespace {

const Options all_tiers{.host_slots = 4, .seed = 5, .disk_slots = 24, .cold_gpu_slots = 8};
constexpr std::size_t mib = std::size_t{1} << 20;
const std::size_t device_bytes = 16 * granule_bytes;
const int cycles =
    test_device::where() == test_device::Where::host ? 1000 : 200;  // elsewhere pages are larger

}  // namespace

CASE(
    "many cycles over all tiers leave device, host, disk, descriptors and mappings where they were "
    "(M2, "
    "F17, F18)") {
  Trio world = three_suspended(all_tiers);
  Rig& rig = *world.rig;
  const auto cycle = [&](int number) {
    rig.sleep(number % 2 == 0 ? RestoreMode::pinned : RestoreMode::disk);
    rig.wake();
  };
  for (int number = 0; number < 10; ++number) cycle(number);  // what is made on first use is there now
  const std::size_t files = process::open_files();
  const std::size_t mappings = process::mappings();
  const std::size_t resident_bytes = process::bytes_no_fork_copies();
  const std::size_t host_bytes = rig.scarce->host_free_bytes;
  const std::size_t disk_bytes = rig.disk->allocated_bytes();
  for (int number = 0; number < cycles; ++number) cycle(number);
  CHECK(rig.free_bytes() == world.free_bytes && rig.scarce->host_free_bytes == host_bytes);
  CHECK(rig.disk->allocated_bytes() == disk_bytes && process::open_files() == files);
  CHECK(process::bytes_no_fork_copies() == resident_bytes);
  CHECK(process::mappings() <
        mappings + 50);  // a sanitizer's own grow; one leaked in each cycle would be as many
  all_are_whole(world);
}

CASE("many discards of all tiers leave no more mappings or bytes than before (M2, K6)") {
  Trio world = three_suspended(all_tiers);
  Rig& rig = *world.rig;
  const auto cycle = [&](int number) {
    rig.sleep(number % 2 == 0 ? RestoreMode::none : RestoreMode::memset);
    CHECK(rig.disk->used_bytes() == 0 && rig.stats().host_bytes == 0);
    rig.wake();
  };
  for (int number = 0; number < 10; ++number) cycle(number);
  const std::size_t mappings = process::mappings();
  const std::size_t resident_bytes = process::bytes_no_fork_copies();
  const std::size_t host_bytes = rig.scarce->host_free_bytes;
  for (int number = 0; number < cycles; ++number) cycle(number);
  CHECK(rig.free_bytes() == world.free_bytes && rig.scarce->host_free_bytes == host_bytes);
  CHECK(process::bytes_no_fork_copies() == resident_bytes && process::mappings() < mappings + 50);
}

CASE(
    "a fork finds nothing of the host memory to copy, and what the child does is nothing to the parent "
    "(F30)") {
  Options options = all_tiers;
  options.pool_bytes = 64 * mib;
  Trio world = three_suspended(options);
  Rig& rig = *world.rig;
  rig.sleep(RestoreMode::pinned);
  const auto pool = rig.ledger->host_pool();
  torpor::HostBuffer kept = pool->acquire(48 * mib, true);
  const torpor::Address base = kept.base();
  pool->give_back(std::move(kept));
  const process::Mapped here = process::mapped_within(base, base + 48 * mib);
  CHECK(here.none_is_forked && process::bytes_no_fork_copies() >= 48 * mib);
  process::Child child([&](process::Child&) {
    if (process::bytes_no_fork_copies() != 0) return 1;
    if (process::mapped_within(base, base + 48 * mib).mappings != 0) return 2;
    world = Trio{};  // everything is destroyed in the child
    return 0;
  });
  CHECK(process::exited_with(child.end(), 0));
  CHECK(process::bytes_no_fork_copies() >= 48 * mib && rig.free_bytes() == device_bytes);
  rig.wake();
  all_are_whole(world);
}

CASE("the bytes that a sleep of two pools promises can be had at once after its commit (F9, M1)") {
  for (const RestoreMode mode : {RestoreMode::none, RestoreMode::pinned, RestoreMode::disk}) {
    Trio world = three_suspended(all_tiers);
    Rig& rig = *world.rig;
    const auto plan = rig.plan(Action::sleep, mode);
    CHECK(plan.free_bytes == 2 * pool_bytes);
    rig.stage(plan);
    const std::size_t free_before = rig.free_bytes();
    CHECK(rig.ledger->commit().freed_bytes == plan.free_bytes);
    {
      const torpor::Physical all(rig.device, free_before + plan.free_bytes);
      CHECK(rig.free_bytes() == 0);
      // Host and disk too: what a discard gives back is not held until the publish.
      if (mode == RestoreMode::none) CHECK(rig.stats().host_bytes == 0 && rig.disk->allocated_bytes() == 0);
    }
    rig.ledger->publish();
    rig.wake();
    if (preserves(mode)) all_are_whole(world);
  }
}
