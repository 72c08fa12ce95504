// Partial last blocks, and the feed of events.
#include <array>
#include <map>
#include <set>

#include "kv_hybrid.hpp"

using namespace kv_hybrid;
using torpor::kv::EventKind;

namespace {

const std::vector<LayerKind> attention{LayerKind::full, LayerKind::window};

}  // namespace

CASE("a partial last block is shared as a copy: the heir writes its own page, the owner's stays") {
  Rig rig({.kinds = attention, .gpu_slots = 32, .partial_blocks = true});
  Tracked one = rig.started("a", tokens_from(0, 10));
  CHECK(rig.kv->probe("a", tokens_from(0, 8)) ==
        7);  // the second block is whole, the prompt's last token is not it
  CHECK(rig.kv->probe("a", tokens_from(0, 20)) == 8);
  one.handle->close();
  CHECK(rig.kv->probe("a", tokens_from(0, 20)) == 10 && rig.kv->probe("b", tokens_from(0, 20)) == 0);
  Tracked heir = rig.create("a", tokens_from(0, 20));
  Tracked twin = rig.create("a", tokens_from(0, 10));
  CHECK(heir.handle->matched_tokens() == 10 && heir.handle->history_tokens() == 10);
  CHECK(twin.handle->matched_tokens() == 9);
  CHECK(heir.handle->resume() && twin.handle->resume() && rig.holds(heir) && rig.holds(twin));
  CHECK(heir.handle->table(0)[2] != twin.handle->table(0)[2]);
  CHECK(heir.handle->table(0)[1] == twin.handle->table(0)[1]);
  CHECK(rig.extend(heir, {70, 71, 72}) && rig.extend(twin, {80, 81, 82}));
  CHECK(rig.holds(heir) && rig.holds(twin));
  Tracked third = rig.create("a", tokens_from(0, 12));
  CHECK(third.handle->matched_tokens() == 10 && third.handle->resume() && rig.holds(third));
}

CASE("partial blocks are neither kept nor matched where they were not asked for, nor with states") {
  Rig plain({.kinds = attention});
  plain.started("a", tokens_from(0, 10)).handle->close();
  CHECK(plain.kv->probe("a", tokens_from(0, 20)) == 8 && plain.kv->stats().droppable_pages == 4);
  Rig hybrid({.partial_blocks = true});
  hybrid.started("a", tokens_from(0, 10)).handle->close();
  CHECK(hybrid.kv->probe("a", tokens_from(0, 20)) == 0);
}

CASE("a partial block that is borrowed and never computed on is not published twice") {
  Rig rig({.kinds = attention, .partial_blocks = true});
  rig.started("a", tokens_from(0, 10)).handle->close();
  const auto before = rig.kv->stats();
  for (int round = 0; round < 3; ++round) {
    Tracked heir = rig.create("a", tokens_from(0, 20));
    if (round > 0) CHECK(heir.handle->resume());
    heir.handle->close();
  }
  CHECK(rig.kv->stats().prefix_tokens == before.prefix_tokens &&
        rig.kv->stats().free_slots == before.free_slots);
}

CASE("a suspended heir holds the page it will copy through a sleep (K3)") {
  Rig rig({.kinds = attention, .partial_blocks = true});
  rig.started("a", tokens_from(0, 10)).handle->close();
  Tracked heir = rig.create("a", tokens_from(0, 20));
  rig.sleep(torpor::RestoreMode::pinned);
  rig.wake();
  CHECK(heir.handle->resume() && rig.holds(heir));
}

CASE("any device call that fails while a partial block is copied leaves the heir suspended (M3)") {
  struct World {
    std::shared_ptr<Rig> rig;
    Tracked heir;
  };
  const int faults = kv_rig::sweep_faults<World>(
      [] {
        World world{std::make_shared<Rig>(Options{.kinds = attention, .partial_blocks = true}), {}};
        world.rig->started("a", tokens_from(0, 10)).handle->close();
        world.heir = world.rig->create("a", tokens_from(0, 20));
        return world;
      },
      [](World& world) { CHECK(world.heir.handle->resume() && world.rig->holds(world.heir)); },
      [](World& world) {
        CHECK(world.heir.handle->state() == SequenceState::suspended &&
              world.rig->kv->stats().locked_pages == 0);
        CHECK(world.rig->kv->probe("a", tokens_from(0, 20)) == 10);
      });
  CHECK(faults >= 2);
}

CASE("whoever follows the events knows what is known, and which tier it is in") {
  using torpor::kv::Tier;
  constexpr std::array tiers{Tier::gpu, Tier::cold_gpu, Tier::host, Tier::disk};
  Rig rig({.kinds = {LayerKind::full},
           .gpu_slots = 8,
           .host_slots = 4,
           .event_count = 4096,
           .disk_slots = 4,
           .cold_gpu_slots = 8});
  std::set<std::uint64_t> known;
  std::map<std::uint64_t, Tier> tier;
  std::set<Tier> seen;
  std::set<Tier> gone_from;
  std::uint64_t next = 0;
  const auto follow = [&] {
    const auto batch = rig.kv->events(next);
    CHECK(batch.lost == 0);
    for (const auto& event : batch.events) {
      CHECK(event.number == ++next);
      if (event.kind == EventKind::stored) CHECK(known.insert(event.block).second);
      if (event.kind == EventKind::removed) {
        CHECK(known.erase(event.block) == 1 && event.tier == tier[event.block]);
        gone_from.insert(event.tier);
      }
      tier[event.block] = event.tier;
      seen.insert(event.tier);
    }
    CHECK(batch.next == next);
  };
  for (Token first = 0; first < 40; ++first) {
    rig.started("a", tokens_from(100 * (first % 17), 9)).handle->close();
    follow();
    CHECK(known.size() * block == rig.kv->stats().prefix_tokens);
    for (Token other = 0; other < 17; ++other) {
      const Tokens prompt = tokens_from(100 * other, 9);
      const auto hashes = rig.kv->block_hashes("a", prompt);
      std::size_t matched = 0;
      while (matched < hashes.size() && known.contains(hashes[matched])) ++matched;
      CHECK(rig.kv->probe("a", prompt) == matched * block);
    }
  }
  CHECK(seen == std::set(tiers.begin(), tiers.end()) && gone_from.contains(Tier::disk));
  CHECK(rig.kv->block_hashes("a", tokens_from(0, 8)) != rig.kv->block_hashes("b", tokens_from(0, 8)));
  rig.kv->forget_prefixes();
  follow();
  CHECK(known.empty());
}

CASE("the ring of events is bounded, and says when some were lost") {
  Rig rig({.kinds = {LayerKind::full}, .gpu_slots = 8, .event_count = 4});
  CHECK(rig.kv->events(0).lost == 0 && rig.kv->events(0).events.empty());
  Tracked one = rig.started("a", tokens_from(0, 16));
  CHECK(rig.kv->events(0).events.size() == 4 && rig.kv->events(0).lost == 0);
  CHECK(rig.extend(one, tokens_from(16, 4)));
  const auto late = rig.kv->events(0);
  CHECK(late.lost == 1 && late.events.size() == 4 && late.events[0].number == 2 && late.next == 5);
  CHECK(rig.kv->events(1).lost == 0 && rig.kv->events(1).events.size() == 4);
  CHECK(rig.kv->events(5).events.empty() && rig.kv->events(5).lost == 0);
  CHECK(rig.kv->events(99).lost == 1 && rig.kv->events(99).events.size() == 4);
  rig.kv->forget_prefixes();
  CHECK(rig.kv->events(0).lost == 6 && rig.kv->events(3).lost == 3 && rig.kv->events(0).next == 10);
  Rig none({.kinds = {LayerKind::full}, .gpu_slots = 8, .event_count = 0});
  (void)none.started("a", tokens_from(0, 16));
  CHECK(none.kv->events(0).lost == 4 && none.kv->events(0).events.empty());
}
