// How caches wake (K6): cold tiers first, all caches of a ledger in one transaction, each page in its tier.
#include <algorithm>

#include "kv_trio.hpp"

using namespace kv_rig;
using torpor::Action;
using torpor::LedgerPhase;
using torpor::RestoreMode;

namespace {

// Two caches in one ledger, each with pages in every tier; the second is behind the first in every wake.
struct Pair {
  std::shared_ptr<Rig> rig;
  std::array<std::shared_ptr<KvManager>, 2> caches;
  std::array<std::vector<Tracked>, 2> sequences;
  std::array<std::array<std::size_t, 4>, 2> tiers{};
  std::size_t awake_bytes = 0;
  std::size_t host_bytes = 0;  // free ones, asleep
  std::size_t disk_bytes = 0;

  // The rig looks at one cache at a time.
  void look_at(std::size_t which) const { rig->kv = caches[which]; }
};

Pair two_asleep(RestoreMode mode, const Options& options) {
  Pair pair;
  pair.rig = std::make_shared<Rig>(options);
  Rig& rig = *pair.rig;
  pair.caches = {rig.kv, rig.add_cache(options, "second")};
  for (std::size_t i = 0; i < 2; ++i) {
    pair.look_at(i);
    for (const char* scope : {"a", "b", "c"}) {
      pair.sequences[i].push_back(rig.started(scope, tokens_from(static_cast<Token>(100 * i), 30)));
      if (scope != std::string("c") || i == 1) pair.sequences[i].back().handle->suspend();
    }
    pair.tiers[i] = pages_by_tier(rig);
  }
  pair.awake_bytes = rig.free_bytes();
  rig.sleep(mode);
  pair.host_bytes = rig.scarce->host_free_bytes;
  pair.disk_bytes = rig.disk->used_bytes();
  return pair;
}

const std::size_t device_bytes = 16 * granule_bytes;

void all_asleep(const Pair& pair) {
  const Rig& rig = *pair.rig;
  CHECK(rig.ledger->status().phase == LedgerPhase::idle && !rig.ledger->status().mutated);
  CHECK(rig.free_bytes() == device_bytes && rig.scarce->host_free_bytes == pair.host_bytes);
  CHECK(rig.disk->used_bytes() == pair.disk_bytes);
  for (std::size_t i = 0; i < 2; ++i) {
    CHECK(pair.caches[i]->parked() && pages_by_tier(*pair.caches[i]) == pair.tiers[i]);
    for (const Tracked& one : pair.sequences[i]) {
      CHECK(table_of(one) == std::vector<std::int32_t>(one.handle->table_entries(), no_slot));
    }
  }
}

void all_awake(Pair& pair, RestoreMode mode) {
  Rig& rig = *pair.rig;
  CHECK(rig.free_bytes() == pair.awake_bytes);
  for (std::size_t i = 0; i < 2; ++i) {
    pair.look_at(i);
    CHECK(!rig.kv->parked() && pages_by_tier(rig) == pair.tiers[i]);
    Tracked& last = pair.sequences[i].back();
    if (preserves(mode) && last.handle->state() == SequenceState::active) CHECK(rig.holds(last));
    last.handle->suspend();
    for (Tracked& one : pair.sequences[i]) {
      CHECK(one.handle->resume() && one.handle->contents_lost() != preserves(mode));
      CHECK(preserves(mode) ? rig.holds(one) : mode == RestoreMode::none || rig.all_zero(one));
      one.handle->suspend();
    }
  }
}

const Options all_tiers{.host_slots = 4, .seed = 5, .disk_slots = 24, .cold_gpu_slots = 8};

}  // namespace

CASE("two caches wake with each page in the tier it was in, whatever the mode (K6)") {
  for (const RestoreMode mode :
       {RestoreMode::none, RestoreMode::memset, RestoreMode::pinned, RestoreMode::disk}) {
    Pair pair = two_asleep(mode, all_tiers);
    CHECK(std::ranges::none_of(pair.tiers[0], [](std::size_t pages) { return pages == 0; }));
    pair.rig->wake();
    all_awake(pair, mode);
  }
}

CASE("any call that fails in the wake of two caches rolls both back, and the retry works (K6, M3, F6, F26)") {
  for (const RestoreMode mode : {RestoreMode::memset, RestoreMode::pinned, RestoreMode::disk}) {
    std::size_t most_mapped = 0;
    const int faults = sweep_faults<Pair>([&] { return two_asleep(mode, all_tiers); },
                                          [&](Pair& pair) {
                                            pair.rig->scarce->maps = 0;
                                            pair.rig->wake();
                                            pair.rig->device->fail_at(0);  // the rest is no part of the wake
                                            all_awake(pair, mode);
                                          },
                                          [&](Pair& pair) {
                                            all_asleep(pair);
                                            most_mapped =
                                                std::max<std::size_t>(most_mapped, pair.rig->scarce->maps);
                                          });
    // Both pools of the first cache were mapped, and one of the second at least, when the second failed.
    CHECK(faults >= 10 && most_mapped >= 3);
  }
}

CASE("host memory is there for all caches before any takes device memory (K6)") {
  Pair pair = two_asleep(RestoreMode::memset, {.host_slots = 24, .seed = 5});
  Rig& rig = *pair.rig;
  const auto plan = rig.plan(Action::wake);
  CHECK(plan.host_bytes > 0 && plan.disk_bytes == 0);
  rig.device->fail_at(0);  // begins a new log
  rig.run(plan);
  const std::vector<std::string> log = rig.device->log();
  const auto first_device = std::ranges::find(log, "create_physical");
  CHECK(first_device != log.end() && std::count(log.begin(), first_device, "create_host") >= 2);
  CHECK(std::count(first_device, log.end(), "create_host") == 0);
  all_awake(pair, RestoreMode::memset);
}

CASE("a wake without the host memory for pages made anew takes nothing at all, and works later (K6, M4)") {
  Pair pair = two_asleep(RestoreMode::none, {.host_slots = 24, .seed = 5});
  Rig& rig = *pair.rig;
  const std::size_t needed = rig.plan(Action::wake).host_bytes;
  const std::size_t all = rig.scarce->host_free_bytes.exchange(needed - 1);
  pair.host_bytes = needed - 1;
  rig.device->fail_at(0);
  CHECK_THROWS(torpor::OutOfHostMemory, rig.stage(rig.plan(Action::wake)));
  CHECK(std::ranges::count(rig.device->log(), "create_physical") == 0);
  all_asleep(pair);
  rig.scarce->host_free_bytes = all;
  rig.wake();
  all_awake(pair, RestoreMode::none);
}

CASE("a wake of much maps memory while pages are under way; a fault in the last of it takes all back (M3)") {
  constexpr std::size_t mib = std::size_t{1} << 20;
  constexpr std::size_t blocks = 16;
  Rig rig({.gpu_slots = 84 * mib / page_bytes, .seed = 2, .device_bytes = 88 * mib});
  std::vector<Tracked> all;
  while (all.size() * blocks * page_bytes < 72 * mib) {  // more than one window
    const auto number = static_cast<Token>(all.size());
    all.push_back(rig.started(std::to_string(number), tokens_from(number, blocks * block)));
  }
  rig.sleep(RestoreMode::pinned);
  const std::size_t free_asleep = rig.free_bytes();
  const auto plan = rig.plan(Action::wake);
  rig.device->fail_at(0);
  const torpor::StageReport report = rig.ledger->stage(plan, std::chrono::seconds(20));
  const auto& [planning_s, mapping_s, copying_s, waiting_s, ahead_s] = report.parts;
  CHECK(planning_s > 0 && mapping_s > 0 && copying_s > 0);
  CHECK(planning_s + mapping_s + copying_s < report.seconds);
  CHECK(waiting_s > 0 && waiting_s <= copying_s && ahead_s > 0 && ahead_s < planning_s + mapping_s);
  const std::vector<std::string> calls = rig.device->log();
  const auto first_copy = std::ranges::find(calls, "copy") - calls.begin();
  const auto last_map = std::ranges::find(calls.rbegin(), calls.rend(), "map_range").base() - calls.begin();
  CHECK(first_copy < last_map);
  rig.ledger->abort();

  rig.scarce->kernel_bytes = page_bytes + 1;  // a kernel copies such pages: the pool has its memory first
  rig.device->fail_at(0);
  rig.stage(plan);
  const std::vector<std::string> others = rig.device->log();
  CHECK(std::ranges::find(others.rbegin(), others.rend(), "map_range").base() <=
        std::ranges::find(others, "copy"));
  rig.ledger->abort();
  rig.scarce->kernel_bytes = 0;

  rig.device->fail_at(static_cast<std::uint64_t>(last_map));
  CHECK_THROWS(torpor::DeviceError, rig.stage(plan));
  CHECK(rig.kv->parked() && rig.free_bytes() == free_asleep);
  rig.device->fail_at(0);
  rig.wake();
  for (const Tracked& one : all) CHECK(rig.holds(one));
}
