// Windows, states and full attention in one cache, awake.
#include <algorithm>

#include "kv_hybrid.hpp"

using namespace kv_hybrid;
using torpor::Misuse;

namespace {

std::vector<bool> present(const Tracked& one, std::size_t life_cycle, std::size_t blocks) {
  const auto table = one.handle->table(life_cycle);
  std::vector<bool> row;
  for (std::size_t at = 0; at < blocks; ++at)
    row.push_back(table[static_cast<std::ptrdiff_t>(at)] != no_slot);
  return row;
}

std::size_t locked(const Rig& rig) {
  return rig.kv->stats().locked_pages;
}

}  // namespace

CASE("layers of one kind share a life cycle, equal pages a pool, and every part has an address of its own") {
  Rig rig;
  CHECK(rig.cycles() == 3 && rig.kv->layout().groups().size() == 2);
  CHECK(rig.cycle(0).group == rig.cycle(1).group && rig.cycle(2).group == 1);
  CHECK(rig.cycle(0).page_bytes == kv_rig::page_bytes && rig.cycle(2).page_bytes == state_bytes);
  CHECK(rig.kv->address(0, "k") == rig.kv->address(1, "k"));  // one pool: a slot holds a page of either
  CHECK(rig.kv->address(2, "ssm") != rig.kv->address(0, "k"));
  CHECK(rig.kv->slots(0) * kv_rig::page_bytes + rig.kv->slots(1) * state_bytes == 24 * kv_rig::page_bytes);
  CHECK_THROWS(Misuse, rig.kv->address(2, "k"));
  CHECK_THROWS(Misuse, rig.create("a", {}).handle->table(3));
}

CASE("a window gives stale blocks back, keeps its sinks, and full attention keeps everything (K11)") {
  Rig rig;
  Tracked one = rig.started("a", tokens_from(0, 4));
  for (Token next = 4; next < 30; ++next) {
    CHECK(rig.extend(one, {next}) && rig.holds(one));
    const std::size_t blocks = one.tokens.size() / block + (one.tokens.size() % block != 0 ? 1 : 0);
    CHECK(present(one, 0, blocks) == std::vector<bool>(blocks, true));
    CHECK(locked(rig) <= blocks + 4 + 1);  // a sink, the window's at most three blocks, the state
  }
  CHECK((present(one, 1, 8) == std::vector<bool>{true, false, false, false, false, false, true, true}));
  one.handle->suspend();
  CHECK(one.handle->resume() && rig.holds(one));
  one.handle->close();
  CHECK(locked(rig) == 0 && rig.kv->stats().held_pages == 0);
}

CASE("prefill blocks that the window will have passed are scratch, given back by commit") {
  Rig rig;
  Tracked one = rig.create("a", {});
  CHECK(one.handle->resume() && one.handle->resize(32));
  CHECK(present(one, 1, 8) == std::vector<bool>(8, true));
  CHECK(locked(rig) == 8 + 8 + 1);
  // 8 full and, in the window, the sink and the last 2 hold what must be kept; the state too.
  CHECK(rig.plan(torpor::Action::sleep, torpor::RestoreMode::pinned).keep_bytes ==
        (8 + 3) * kv_rig::page_bytes + state_bytes);
  CHECK(rig.extend(one, tokens_from(0, 32)) && rig.holds(one));
  CHECK(locked(rig) == 8 + 3 + 1);
}

CASE(
    "a prefill in steps may read what is scratch of the whole while the steps need it, also after a "
    "suspend") {
  Rig rig({.gpu_slots = 40});
  Tracked one = rig.create("a", {});
  CHECK(one.handle->resume() && one.handle->resize(40));
  CHECK(rig.extend(one, tokens_from(0, 10)) && rig.holds(one));
  CHECK(one.handle->resize(40));
  one.handle->suspend();
  CHECK(rig.kv->stats().locked_pages == 0);
  CHECK(one.handle->resume() && rig.holds(one));
  CHECK(present(one, 1, 10) == std::vector<bool>(10, true));
  CHECK(rig.extend(one, tokens_from(10, 13)) && rig.holds(one));
}

CASE("a smaller capacity makes blocks that were scratch worth keeping") {
  Rig rig({.gpu_slots = 40});
  Tracked one = rig.create("a", {});
  CHECK(one.handle->resume() && one.handle->resize(40) && one.handle->resize(12));
  // Three blocks full, three in the window of which none is passed at 12 tokens, and the state.
  CHECK(rig.plan(torpor::Action::sleep, torpor::RestoreMode::pinned).keep_bytes ==
        (3 + 2 + 1) * kv_rig::page_bytes + state_bytes);
}

CASE("a state begins as zeros, has one slot whatever the length, and its index keeps its address") {
  Rig rig;
  Tracked one = rig.create("a", {});
  const auto* const index = one.handle->table(2).get();
  CHECK(one.handle->table_entries(2) == 1 && *index == no_slot);
  CHECK(one.handle->resume() && *index != no_slot && rig.holds(one));
  CHECK(rig.extend(one, tokens_from(0, 20)) && rig.holds(one));
  CHECK(rig.kv->pool_stats()[1].locked_pages == 1);
  one.handle->suspend();
  CHECK(*index == no_slot);
  CHECK(one.handle->resume() && one.handle->table(2).get() == index && rig.holds(one));
}

CASE(
    "with states a prefix is found at snapshots alone, exactly, and the heir writes a copy of its own "
    "(K11)") {
  Rig rig;
  Tracked one = rig.started("a", tokens_from(0, 8));
  CHECK(rig.kv->probe("a", tokens_from(0, 20)) == 0);  // every block is known, no state is
  CHECK(one.handle->snapshot() && one.handle->snapshot());
  CHECK(rig.kv->pool_stats()[1].droppable_pages == 1);
  CHECK(rig.extend(one, tokens_from(8, 5)));
  CHECK_THROWS(Misuse, one.handle->snapshot());
  CHECK(rig.extend(one, tokens_from(13, 3)));
  CHECK(rig.kv->probe("a", tokens_from(0, 20)) == 8 && rig.kv->probe("b", tokens_from(0, 20)) == 0);
  CHECK(rig.kv->probe("a", tokens_from(0, 8)) == 0);
  Tracked heir = rig.create("a", tokens_from(0, 20));
  CHECK(heir.tokens.size() == 8 && heir.handle->resume() && rig.holds(heir));
  CHECK(rig.extend(heir, tokens_from(100, 6)) && rig.holds(heir) && rig.holds(one));
  Tracked third = rig.create("a", tokens_from(0, 9));
  CHECK(third.tokens.size() == 8 && third.handle->resume() && rig.holds(third));
  CHECK_THROWS(Misuse, third.handle->commit(Tokens{1}));
}

CASE("a state alone: blocks without pages are known as long as a snapshot lies below them") {
  Rig rig({.kinds = {LayerKind::state}, .gpu_slots = 8});
  Tracked one = rig.started("a", tokens_from(0, 16));
  CHECK(one.handle->snapshot() && rig.extend(one, tokens_from(16, 20)));
  CHECK(rig.kv->probe("a", tokens_from(0, 40)) == 16);
  one.handle->close();
  CHECK(rig.kv->stats().prefix_tokens == 16 && rig.kv->stats().droppable_pages == 1);
  std::vector<Tracked> crowd;
  for (Token first = 0; first < 16; ++first) crowd.push_back(rig.started("b", {first, 1, 1, 1, 1}));
  CHECK(rig.kv->probe("a", tokens_from(0, 40)) == 0);
  crowd.clear();
  CHECK(rig.kv->stats().prefix_tokens == 0);  // nothing is left of anybody
}

CASE("a window's prefix is found where its window is there, not where just older blocks are") {
  Rig rig({.kinds = {LayerKind::full, LayerKind::window}, .gpu_slots = 32});
  Tracked one = rig.create("a", {});
  CHECK(one.handle->resume() && rig.extend(one, tokens_from(0, 40)));  // blocks 1 to 7 were scratch
  CHECK(rig.kv->probe("a", tokens_from(0, 41)) == 40);
  CHECK(rig.kv->probe("a", tokens_from(0, 21)) == 4);  // the sink block alone has its page
  Tracked heir = rig.create("a", tokens_from(0, 41));
  CHECK(heir.handle->resume() && rig.holds(heir));
  CHECK(rig.extend(heir, {77, 78}) && rig.holds(heir) && rig.holds(one));
}

CASE("resume locks no more of a pool than its utilisation limit; resize may") {
  Rig rig({.kinds = {LayerKind::full}, .gpu_slots = 8, .max_utilisation = 0.5});
  Tracked one = rig.started("a", tokens_from(0, 12));
  one.handle->suspend();
  Tracked two = rig.started("b", tokens_from(0, 8));
  CHECK(!one.handle->resume() && one.handle->state() == SequenceState::suspended);
  CHECK(rig.extend(two, tokens_from(8, 12)) && rig.holds(two));
  two.handle->close();
  CHECK(one.handle->resume() && rig.holds(one));
}

CASE("a resume that finds room in one pool and none in another changes nothing") {
  Rig rig({.gpu_slots = 16, .host_slots = 16});
  std::vector<Tracked> crowd;
  for (Token first = 0;; ++first) {
    crowd.push_back(rig.create("c", {first, 1}));
    if (!crowd.back().handle->resume()) break;
  }
  const auto before = rig.kv->pool_stats();
  CHECK(before[1].free_slots == 0 && before[0].free_slots > 0);
  CHECK(!crowd.back().handle->resume());
  const auto after = rig.kv->pool_stats();
  CHECK(after[0].free_slots == before[0].free_slots && after[1].locked_pages == before[1].locked_pages);
  crowd.front().handle->close();
  CHECK(crowd.back().handle->resume());
}

CASE("pages of every kind move to the host for room and come back with their contents") {
  Rig rig({.gpu_slots = 24, .host_slots = 48});
  std::vector<Tracked> all;
  for (Token first = 0; first < 5; ++first) {
    all.push_back(rig.started("a", tokens_from(100 * first, 20)));
    CHECK(rig.holds(all.back()));
    all.back().handle->suspend();
  }
  CHECK(rig.kv->stats().host_pages > 0);
  for (Tracked& one : all) {
    CHECK(one.handle->resume() && rig.holds(one));
    one.handle->suspend();
  }
}

CASE("nothing is left when everything is closed and forgotten") {
  Rig rig({.host_slots = 24});
  for (Token round = 0; round < 20; ++round) {
    Tracked one = rig.started("a", tokens_from(round % 3, 8));
    CHECK(one.handle->snapshot() && rig.extend(one, tokens_from(500, 11)) && rig.holds(one));
    one.handle->suspend();
    Tracked two = rig.started("b", tokens_from(round % 5, 12));
    CHECK(rig.holds(two));
  }
  rig.kv->forget_prefixes();
  const auto end = rig.kv->stats();
  CHECK(end.free_slots == end.slots && end.host_bytes == 0 && end.prefix_tokens == 0 && end.sequences == 0);
}
