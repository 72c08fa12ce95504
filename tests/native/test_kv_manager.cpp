// Sequences, prefixes and the two tiers, awake.
#include <algorithm>

#include "kv_rig.hpp"

using namespace kv_rig;
using torpor::Misuse;

namespace {

std::vector<std::int32_t> slots_of(const Tracked& one) {
  std::vector<std::int32_t> slots;
  for (std::size_t b = 0; b < one.handle->table_entries(); ++b) {
    const std::int32_t slot = one.handle->table()[static_cast<std::ptrdiff_t>(b)];
    if (slot != no_slot) slots.push_back(slot);
  }
  return slots;
}

}  // namespace

CASE("a new sequence finds the whole blocks of its prompt that are known, and leaves one token to compute") {
  Rig rig;
  Tracked first = rig.started("a", tokens_from(0, 10));
  CHECK(rig.kv->probe("a", tokens_from(0, 10)) == 8);
  CHECK(rig.kv->probe("a", tokens_from(0, 9)) == 8);
  CHECK(rig.kv->probe("a", tokens_from(0, 8)) == 4);
  CHECK(rig.kv->probe("a", tokens_from(0, 4)) == 0);
  CHECK(rig.kv->probe("a", {}) == 0);
  Tracked second = rig.create("a", tokens_from(0, 9));
  CHECK(second.handle->matched_tokens() == 8 && second.handle->history_tokens() == 8);
  CHECK(second.handle->state() == SequenceState::suspended);
  CHECK(second.handle->resume());
  CHECK(rig.holds(second) && rig.holds(first));
  CHECK(rig.stats().hits_tokens == 8 && rig.stats().lookup_tokens == 19);
}

CASE("a scope finds nothing of another scope") {
  Rig rig;
  const Tracked one = rig.started("tenant one", tokens_from(0, 9));
  CHECK(rig.kv->probe("tenant two", tokens_from(0, 9)) == 0);
  CHECK(rig.create("tenant two", tokens_from(0, 9)).handle->matched_tokens() == 0);
}

CASE("the page table has a slot for each block while active, else none, at one address") {
  Rig rig;
  Tracked one = rig.create("a", tokens_from(0, 6));
  const auto* const address = one.handle->table().get();
  CHECK(one.handle->table_entries() == 8 && slots_of(one).empty());
  CHECK(one.handle->resume() && rig.extend(one, tokens_from(0, 6)));
  CHECK(slots_of(one).size() == 2);
  CHECK(one.handle->capacity_tokens() == 8);
  one.handle->suspend();
  CHECK(slots_of(one).empty());
  CHECK(one.handle->resume() && slots_of(one).size() == 2);
  one.handle->close();
  CHECK(slots_of(one).empty());
  CHECK(one.handle->table().get() == address);
}

CASE("sequences share the blocks of their common prefix and never one that either still writes") {
  Rig rig;
  Tracked first = rig.started("a", tokens_from(0, 9));
  Tracked second = rig.started("a", tokens_from(0, 9));
  const auto one = slots_of(first);
  const auto other = slots_of(second);
  CHECK(std::equal(one.begin(), one.begin() + 2, other.begin()));
  CHECK(one[2] != other[2]);
  CHECK(rig.extend(first, {100, 101, 102, 103}) && rig.extend(second, {200, 201, 202, 203}));
  CHECK(rig.holds(first) && rig.holds(second));
  CHECK(rig.stats().free_slots == 8 - 2 - 2 - 2);
}

CASE(
    "equal blocks computed at once stay private: no page table changes, and the copy goes with its "
    "sequence") {
  Rig rig;
  Tracked first = rig.create("a", tokens_from(0, 9));
  Tracked second = rig.create("a", tokens_from(0, 9));
  CHECK(first.handle->resume() && second.handle->resume());
  CHECK(rig.extend(first, tokens_from(0, 9)));
  CHECK(second.handle->resize(9));
  const auto before = slots_of(second);
  CHECK(rig.extend(second, tokens_from(0, 9)));
  CHECK(slots_of(second) == before);
  CHECK(rig.holds(first) && rig.holds(second));
  CHECK(rig.stats().prefix_tokens == 8);
  second.handle->close();
  CHECK(rig.stats().free_slots == 8 - 3 && rig.holds(first));
  first.handle->close();
  CHECK(rig.stats().free_slots == 8 - 2 && rig.stats().droppable_pages == 2);
}

CASE("close keeps committed full blocks as droppable prefixes and frees the rest") {
  Rig rig;
  Tracked one = rig.started("a", tokens_from(0, 10));
  CHECK(one.handle->resize(20));
  CHECK(rig.stats().locked_pages == 5 && rig.stats().free_slots == 3);
  one.handle->close();
  CHECK(rig.stats().droppable_pages == 2 && rig.stats().free_slots == 6 && rig.stats().sequences == 0);
  one.handle->close();
  CHECK(rig.stats().free_slots == 6);
  Tracked again = rig.create("a", tokens_from(0, 10));
  CHECK(again.handle->matched_tokens() == 8 && again.handle->resume() && rig.holds(again));
}

CASE("a handle that goes out of use closes its sequence") {
  Rig rig;
  {
    const Tracked one = rig.started("a", tokens_from(0, 6));
  }
  CHECK(rig.stats().sequences == 0 && rig.stats().free_slots == 7 && rig.stats().droppable_pages == 1);
}

CASE("without a host tier the least recently used prefix is dropped first, deepest block first") {
  Rig rig;
  for (const Token first : {0, 100, 200}) (void)rig.started("a", tokens_from(first, 8));
  CHECK(rig.stats().droppable_pages == 6);
  // A lookup that leads to a sequence is use; a probe is none.
  (void)rig.create("a", tokens_from(0, 9));
  CHECK(rig.kv->probe("a", tokens_from(100, 9)) == 8);
  Tracked big = rig.create("b", {});
  CHECK(big.handle->resume() && big.handle->resize(3 * block));
  CHECK(rig.kv->probe("a", tokens_from(100, 9)) == 4);
  CHECK(rig.kv->probe("a", tokens_from(200, 9)) == 8);
  CHECK(rig.kv->probe("a", tokens_from(0, 9)) == 8);
  CHECK(rig.stats().evicted_pages == 1);
}

CASE(
    "pages of suspended sequences are never dropped: without a host tier the request is refused, unchanged") {
  Rig rig;
  Tracked held = rig.started("a", tokens_from(0, 24));
  held.handle->suspend();
  const Tracked prefix = rig.started("b", tokens_from(0, 5));
  Tracked wanting = rig.create("c", {});
  CHECK(wanting.handle->resume());
  CHECK(!wanting.handle->resize(4));
  CHECK(!wanting.handle->resize(9 * block));
  CHECK(wanting.handle->capacity_tokens() == 0 && slots_of(wanting).empty());
  CHECK(rig.stats().evicted_pages == 0 && rig.stats().held_pages == 6 && rig.stats().free_slots == 0);
  CHECK(held.handle->resume() && rig.holds(held) && rig.holds(prefix));
}

CASE(
    "suspended pages go to the host tier for room and come back byte for byte; host memory is committed on "
    "use") {
  Rig rig({.host_slots = 8, .seed = 5});
  Tracked one = rig.started("a", tokens_from(0, 22));
  one.handle->suspend();
  CHECK(rig.stats().host_bytes == 0);
  Tracked two = rig.started("b", tokens_from(0, 30));
  CHECK(rig.stats().host_pages == 6 && rig.stats().host_bytes >= 6 * page_bytes);
  two.handle->suspend();
  CHECK(one.handle->resume() && rig.holds(one));  // 2 places left, and the 6 that it leaves
  CHECK(rig.stats().moved_in_pages == 6 && rig.stats().host_pages == 6);
  two.handle->close();
  one.handle->close();
  rig.kv->forget_prefixes();
  CHECK(rig.stats().host_bytes == 0 && rig.stats().free_slots == 8);
}

CASE("the host tier never takes more pages than its ceiling, and old prefixes make way in it") {
  Rig rig({.host_slots = 3});
  for (const Token first : {0, 100, 200, 300}) (void)rig.started("a", tokens_from(first, 8));
  CHECK(rig.stats().host_pages == 0 && rig.stats().free_slots == 0);
  Tracked five = rig.started("b", tokens_from(0, 16));  // 4 slots: three old pages fit on the host
  CHECK(rig.stats().host_pages == 3 && rig.stats().evicted_pages == 1);
  CHECK(rig.kv->probe("a", tokens_from(0, 9)) == 4 && rig.kv->probe("a", tokens_from(100, 9)) == 8);
  CHECK(rig.extend(five, tokens_from(500, 8)));
  CHECK(rig.stats().host_pages == 3 && rig.stats().evicted_pages == 3);
  CHECK(rig.kv->probe("a", tokens_from(200, 9)) == 8 && rig.kv->probe("a", tokens_from(0, 9)) == 0);
  five.handle->close();
  Tracked back = rig.create("a", tokens_from(200, 9));
  CHECK(back.handle->resume() && rig.holds(back));
}

CASE("held pages displace prefixes in a full host tier") {
  Rig rig({.host_slots = 2});
  (void)rig.started("a", tokens_from(0, 8));
  Tracked one = rig.started("b", tokens_from(0, 32));  // the two prefixes go to the host
  CHECK(rig.stats().host_pages == 2 && rig.kv->probe("a", tokens_from(0, 9)) == 8);
  one.handle->suspend();
  Tracked two = rig.create("c", {});
  CHECK(two.handle->resume() && two.handle->resize(8));
  CHECK(rig.kv->probe("a", tokens_from(0, 9)) == 0 && rig.stats().host_pages == 2);
  CHECK(!two.handle->resize(12));
  two.handle->close();
  CHECK(one.handle->resume() && rig.holds(one));
}

CASE("where the machine has less memory than the ceiling, prefixes are dropped and held pages stay") {
  Rig rig({.host_slots = 8});
  rig.scarce->host_free_bytes = 0;
  (void)rig.started("a", tokens_from(0, 8));
  Tracked one = rig.started("b", tokens_from(0, 32));
  CHECK(rig.stats().evicted_pages == 2 && rig.stats().host_bytes == 0);
  one.handle->suspend();
  Tracked two = rig.create("c", {});
  CHECK(two.handle->resume() && !two.handle->resize(1));
  CHECK(one.handle->resume() && rig.holds(one));
}

CASE("resize shrinks to whole blocks, not below the history") {
  Rig rig;
  Tracked one = rig.started("a", tokens_from(0, 5));
  CHECK(one.handle->resize(32) && rig.stats().free_slots == 0);
  CHECK(one.handle->resize(5) && one.handle->capacity_tokens() == 8 && rig.stats().free_slots == 6);
  CHECK_THROWS(Misuse, one.handle->resize(4));
  CHECK(rig.holds(one));
}

CASE("calls in the wrong state are misuse and change nothing") {
  Rig rig;
  Tracked one = rig.create("a", tokens_from(0, 5));
  CHECK_THROWS(Misuse, one.handle->resize(4));
  CHECK_THROWS(Misuse, one.handle->commit(Tokens{1}));
  CHECK(one.handle->resume() && one.handle->resume());
  CHECK_THROWS(Misuse, one.handle->commit(Tokens{1}));
  CHECK(one.handle->resize(4));
  CHECK_THROWS(Misuse, one.handle->commit(tokens_from(0, 5)));
  CHECK(one.handle->history_tokens() == 0);
  one.handle->suspend();
  one.handle->suspend();
  one.handle->close();
  CHECK_THROWS(Misuse, one.handle->resume());
  CHECK_THROWS(Misuse, one.handle->suspend());
  CHECK_THROWS(Misuse, one.handle->resize(4));
  CHECK_THROWS(Misuse, one.handle->commit(Tokens{1}));
  CHECK(rig.stats().free_slots == 8);
}

CASE("impossible pools and views are misuse with a word on what to do") {
  const auto device = test_device::make(granule_bytes, 16, 1);
  const auto pool = std::make_shared<torpor::HostPool>(device, 0);
  torpor::kv::KvSpec spec;
  spec.layout = small_layout();
  spec.gpu_bytes = granule_bytes - 1;
  CHECK_THROWS(Misuse, KvManager::make(device, pool, spec));
  spec.gpu_bytes = 32 * granule_bytes;
  CHECK_THROWS(torpor::OutOfDeviceMemory, KvManager::make(device, pool, spec));
  spec.layout = {};
  CHECK_THROWS(Misuse, KvManager::make(device, pool, spec));
  using torpor::kv::DType;
  CHECK_THROWS(Misuse, torpor::kv::Layout::uniform(0, 2, 64, DType::float32, 4));
  CHECK_THROWS(Misuse, torpor::kv::Layout::uniform(std::size_t{1} << 62, 2, 64, DType::float32, 4));
  CHECK_THROWS(Misuse, torpor::kv::Layout::uniform(2, 2, std::size_t{1} << 62, DType::float32, 4));
  CHECK_THROWS(Misuse, torpor::kv::parse_dtype("int8"));
  CHECK_THROWS(Misuse, small_layout().place(0, "q"));
  CHECK_THROWS(Misuse, small_layout().place(2, "k"));
  CHECK(device->memory_info().free_bytes == 16 * granule_bytes);
}

CASE(
    "forget_prefixes leaves no tier that still serves old blocks, and old K and V never come back (F11, "
    "F12)") {
  Rig rig({.host_slots = 8});
  (void)rig.started("a", tokens_from(0, 16));
  Tracked older = rig.started("b", tokens_from(0, 24));  // two pages of the first are on the host
  CHECK(rig.stats().host_pages > 0);
  CHECK(rig.kv->forget_prefixes() == 40);
  CHECK(rig.kv->probe("a", tokens_from(0, 17)) == 0 && rig.kv->probe("b", tokens_from(0, 25)) == 0);
  CHECK(rig.stats().host_pages == 0 && rig.stats().host_bytes == 0 && rig.stats().prefix_tokens == 0);
  CHECK(rig.holds(older) && rig.extend(older, tokens_from(24, 8)));
  CHECK(rig.stats().prefix_tokens == 0);  // computed over the old
  older.handle->close();
  CHECK(rig.stats().free_slots == 8);
  (void)rig.started("b", tokens_from(0, 9));
  CHECK(rig.kv->probe("b", tokens_from(0, 9)) == 8);
}

CASE("a sequence that was created before the reset and computed nothing yet is published as usual") {
  Rig rig;
  Tracked one = rig.create("a", tokens_from(0, 9));
  rig.kv->forget_prefixes();
  CHECK(one.handle->resume() && rig.extend(one, tokens_from(0, 9)));
  CHECK(rig.kv->probe("a", tokens_from(0, 9)) == 8);
}

CASE("a chain whose upper block was dropped is mended by the next commit") {
  Rig rig;
  Tracked owner = rig.create("a", {});
  Tracked twin = rig.create("a", {});
  CHECK(owner.handle->resume() && twin.handle->resume());
  CHECK(rig.extend(owner, tokens_from(0, 4)));
  CHECK(
      rig.extend(twin, tokens_from(0, 8)));  // its first block is private, its second hangs below the owner's
  owner.handle->close();
  CHECK(rig.kv->probe("a", tokens_from(0, 9)) == 8);
  Tracked big = rig.create("b", {});
  CHECK(big.handle->resume() &&
        big.handle->resize(6 * block));  // drops the owner's block, and the chain with it
  CHECK(rig.kv->probe("a", tokens_from(0, 9)) == 0 && rig.holds(twin));
  big.handle->close();
  CHECK(rig.extend(twin, tokens_from(8, 4)));
  CHECK(rig.kv->probe("a", tokens_from(0, 13)) == 12);
  twin.handle->close();
  Tracked heir = rig.create("a", tokens_from(0, 13));
  CHECK(heir.handle->resume() && rig.holds(heir));
}

CASE("more blocks known than the pool has slots are matched up to what a page table can hold") {
  Rig rig({.host_slots = 16});
  Tracked one = rig.started("a", tokens_from(0, 32));
  one.handle->close();
  for (Token part = 0; part < 2; ++part) {
    Tracked next = rig.create("a", tokens_from(0, 33));
    CHECK(next.handle->matched_tokens() == 32 && next.handle->resume() && rig.holds(next));
    CHECK(!next.handle->resize(33));
    next.handle->close();
  }
}

CASE("a seed gives slots in an order of its own, each once") {
  Rig plain;
  Rig random({.seed = 11});
  Tracked one = plain.started("a", tokens_from(0, 32));
  Tracked other = random.started("a", tokens_from(0, 32));
  CHECK(std::ranges::is_sorted(slots_of(one)) && !std::ranges::is_sorted(slots_of(other)));
  auto slots = slots_of(other);
  std::ranges::sort(slots);
  CHECK(slots == slots_of(one));
}

CASE("nothing is left behind when everything is closed and forgotten") {
  Rig rig({.host_slots = 8, .seed = 2});
  const std::size_t host_before = rig.scarce->host_free_bytes;
  for (Token round = 0; round < 30; ++round) {
    Tracked one = rig.started("a", tokens_from(round % 7, 18));
    one.handle->suspend();
    Tracked two = rig.started("b", tokens_from(round % 5, 22));
    CHECK(rig.holds(two));
    two.handle->close();
    CHECK(one.handle->resume() && rig.holds(one));
  }
  rig.kv->forget_prefixes();
  const KvStats end = rig.stats();
  CHECK(end.free_slots == 8 && end.host_pages == 0 && end.host_bytes == 0 && end.sequences == 0);
  CHECK(rig.scarce->host_free_bytes == host_before);
  const auto device = rig.scarce;
  rig.ledger.reset();
  rig.kv.reset();
  CHECK(device->memory_info().free_bytes == device->memory_info().total_bytes);
}
