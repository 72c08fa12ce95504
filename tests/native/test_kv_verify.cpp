// K13 for the KV cache: pages of every tier are checked before a wake is over.
#include <array>
#include <cstdio>
#include <functional>
#include <set>
#include <string>
#include <vector>

#include "kv_trio.hpp"

using namespace kv_rig;
using torpor::Action;
using torpor::ContentsCorrupt;
using torpor::RestoreMode;

namespace {

torpor::Plan verified(Rig& rig, Action kind, RestoreMode mode = RestoreMode::pinned) {
  torpor::Request request{.kind = kind, .operation = "op", .tags = {}, .restore = {}};
  if (kind == Action::sleep) request.restore = {{"kv_cache", mode}};
  request.verify = true;
  return rig.ledger->preflight(request);
}

}  // namespace

CASE("a verified sleep and wake bring everything back, again and again (K13, K3)") {
  World world = mixed_world();
  for (int round = 0; round < 3; ++round) {
    world.rig->run(verified(*world.rig, Action::sleep));
    world.rig->run(verified(*world.rig, Action::wake));
    is_whole(world);
  }
  contents_are_whole(world);
}

CASE("a flipped byte of a saved page fails the wake, names the tag, and the cache stays asleep (K13)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.device->corrupt_copy(1);
  rig.run(verified(rig, Action::sleep));
  for (int attempt = 0; attempt < 2; ++attempt) {
    const auto plan = verified(rig, Action::wake);
    CHECK(plan.refusals.empty());
    try {
      (void)rig.ledger->stage(plan, std::chrono::seconds(20));
      check::fail(__FILE__, __LINE__, "not noticed");
    } catch (const ContentsCorrupt& error) {
      CHECK(error.tag == "kv_cache");
    }
    CHECK(rig.kv->parked() && rig.free_bytes() == world.free_bytes + pool_bytes);
  }
  rig.sleep(RestoreMode::none);  // the way out that the message names
  rig.wake();
  CHECK(!rig.kv->parked() && world.active.handle->contents_lost());
}

CASE("a page that goes wrong on the way back fails the wake, and the next one is right (K13, F26)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.run(verified(rig, Action::sleep));
  rig.device->corrupt_copy(1);
  CHECK_THROWS(ContentsCorrupt, rig.ledger->stage(verified(rig, Action::wake), std::chrono::seconds(20)));
  rig.run(verified(rig, Action::wake));
  is_whole(world);
  contents_are_whole(world);
}

CASE("a page of the host tier that changes while asleep is noticed too (K13)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.run(verified(rig, Action::sleep));
  CHECK(rig.scarce->last_summed.size() == 2);  // the two pages of the host tier
  *reinterpret_cast<std::uint8_t*>(rig.scarce->last_summed[1].at + 11) ^= 1U;
  CHECK_THROWS(ContentsCorrupt, rig.ledger->stage(verified(rig, Action::wake), std::chrono::seconds(20)));
}

namespace {

// Bytes that lie somewhere while all is asleep, in one way; flipped twice, all is as before.
struct Saved {
  RestoreMode mode;
  std::function<std::vector<std::uint64_t>(Rig&)> places;  // where pages went, or lay already
  std::function<void(Rig&, std::uint64_t)> flip;
  std::size_t host_slots;          // with 4 they are full already, and a sleep goes on to the disk
  std::vector<std::string> tiers;  // whose pages are among them
};

void flip_memory(Rig&, std::uint64_t at) {
  *reinterpret_cast<std::uint8_t*>(at + 11) ^= 1U;
}

void flip_disk(Rig& rig, std::uint64_t at) {
  rig.disk->flip_byte(at);
}

// Every page of them, not every copy or range: one copy can take the pages of two pools.
std::vector<std::uint64_t> pages_in(const std::vector<torpor::ByteRange>& ranges) {
  std::vector<std::uint64_t> places;
  for (const torpor::ByteRange& range : ranges)
    for (std::size_t done = 0; done < range.size_bytes; done += page_bytes) places.push_back(range.at + done);
  return places;
}

const std::vector<Saved> saved{
    {RestoreMode::pinned,
     [](Rig& rig) { return pages_in(rig.scarce->copied_out); },
     flip_memory,
     28,
     {"gpu", "cold_gpu"}},
    {RestoreMode::disk, [](Rig& rig) { return rig.disk->written; }, flip_disk, 4, {"gpu", "cold_gpu"}},
    {RestoreMode::pinned,
     [](Rig& rig) { return pages_in(rig.scarce->last_summed); },
     flip_memory,
     4,
     {"host"}},
    {RestoreMode::pinned, [](Rig& rig) { return rig.disk->read_from; }, flip_disk, 4, {"disk"}},
};

// The tier that a verified wake names when it refuses; "" when it does not.
std::string refused_tier(Rig& rig) {
  try {
    rig.stage(verified(rig, Action::wake));
  } catch (const ContentsCorrupt& error) {
    CHECK(error.tag == "kv_cache");
    const std::string message = error.what();
    for (const char* tier : {"gpu", "cold_gpu", "host", "disk"})
      if (message.find(std::string("tier ") + tier + " ") != std::string::npos) return tier;
    check::fail(__FILE__, __LINE__, "no tier is named: " + message);
  }
  rig.ledger->abort();
  return "";
}

std::string hex(std::uint64_t at) {
  std::array<char, 20> text{};
  std::snprintf(text.data(), text.size(), "%llx", static_cast<unsigned long long>(at));
  return text.data();
}

// All that a reader needs who cannot run it again: what went where, and what was said of each byte.
std::string account(Rig& rig, const Saved& one, const std::string& tried) {
  std::string told = std::string("restore mode ") + torpor::to_string(one.mode) + "; tiers that lie there:";
  for (const std::string& tier : one.tiers) told += " " + tier;
  told += "; pool at " + hex(rig.kv->address(0, "k")) + ", pages of " + std::to_string(page_bytes) +
          " bytes; copied out to";
  for (const torpor::ByteRange& range : rig.scarce->copied_out)
    told += " " + hex(range.at) + "+" + std::to_string(range.size_bytes);
  told += "; written at";
  for (const std::uint64_t at : rig.disk->written) told += " " + hex(at);
  return told + "; flipped, and the tier named by two wakes:" + tried;
}

}  // namespace

CASE("a flipped byte in any tier fails the wake before anything opens; put right, all is whole (K13)") {
  for (const Saved& one : saved) {
    Trio world =
        three_suspended({.host_slots = one.host_slots, .seed = 5, .disk_slots = 24, .cold_gpu_slots = 8});
    Rig& rig = *world.rig;
    const auto tiers = pages_by_tier(rig);
    rig.scarce->copied_out.clear();
    rig.disk->written.clear();
    rig.disk->read_from.clear();
    rig.run(verified(rig, Action::sleep, one.mode));
    // Which page lies where follows from the driver's addresses: all are tried, until every tier was named.
    std::set<std::string> named;
    std::string tried;
    const std::vector<std::uint64_t> places = one.places(rig);
    for (std::size_t i = 0; i < places.size() && named.size() < one.tiers.size(); ++i) {
      one.flip(rig, places[i]);
      const std::string tier = refused_tier(rig);
      const std::string again = refused_tier(rig);
      tried += " " + hex(places[i]) + " '" + tier + "' '" + again + "'";
      if (tier.empty() || again != tier) check::fail(__FILE__, __LINE__, account(rig, one, tried));
      CHECK(rig.kv->parked() && rig.free_bytes() == 16 * granule_bytes && pages_by_tier(rig) == tiers);
      named.insert(tier);
      one.flip(rig, places[i]);
    }
    if (named != std::set<std::string>(one.tiers.begin(), one.tiers.end()))
      check::fail(__FILE__, __LINE__, account(rig, one, tried));
    rig.run(verified(rig, Action::wake));
    CHECK(pages_by_tier(rig) == tiers);
    all_are_whole(world);
  }
}

CASE("without recorded checksums a verified wake is refused by name; a discarding sleep needs none (K13)") {
  World world = mixed_world();
  Rig& rig = *world.rig;
  rig.sleep(RestoreMode::pinned);
  CHECK(verified(rig, Action::wake).refusals.at(0).tag == "kv_cache");
  rig.wake();
  rig.run(verified(rig, Action::sleep, RestoreMode::none));
  rig.run(verified(rig, Action::wake));
  CHECK(!rig.kv->parked());
}

CASE("any device call of a verified sleep or wake may fail, and nothing is lost (M3, K13)") {
  for (const Action kind : {Action::sleep, Action::wake}) {
    int faults = 0;
    for (std::uint64_t k = 1;; ++k) {
      World world = mixed_world();
      Rig& rig = *world.rig;
      if (kind == Action::wake) rig.run(verified(rig, Action::sleep));
      const auto plan = verified(rig, kind);
      const std::size_t free_before = rig.free_bytes();
      rig.device->fail_at(k);
      bool failed = false;
      try {
        (void)rig.ledger->stage(plan, std::chrono::seconds(20));
      } catch (const torpor::DeviceError&) {
        failed = true;
      }
      rig.device->fail_at(0);
      if (failed) {
        CHECK(rig.free_bytes() == free_before && rig.kv->parked() == (kind == Action::wake));
        (void)rig.ledger->stage(plan, std::chrono::seconds(20));
      }
      (void)rig.ledger->commit();
      rig.ledger->publish();
      if (kind == Action::sleep) rig.run(verified(rig, Action::wake));
      is_whole(world);
      contents_are_whole(world);
      if (!failed) break;
      ++faults;
    }
    CHECK(faults >= 5);
  }
}
