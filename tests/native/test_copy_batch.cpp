// How a batch is prepared for a driver, and what the host pool keeps.
#include "check.hpp"
#include "device/copy_batch.hpp"
#include "ledger_rig.hpp"

using namespace torpor;

namespace {

constexpr Address device_base = Address{1} << 44;
constexpr Address host_base = Address{1} << 40;
constexpr std::size_t gib = HostRanges::piece_bytes;

bool same(const Copy& one, const Copy& other) {
  return one.destination == other.destination && one.source == other.source &&
         one.size_bytes == other.size_bytes;
}

}  // namespace

CASE("neighbours on both sides become one copy, others stay apart") {
  HostRanges host;
  host.add(host_base, {1 << 20, true});
  const std::vector<Copy> batch{{device_base, host_base, 100},
                                {device_base + 100, host_base + 100, 50},
                                {device_base + 150, host_base + 200, 10},
                                {device_base + 160, host_base + 210, 0}};
  const Batches batches = prepare(batch, host);
  CHECK(batches.pageable.empty() && batches.pinned.size() == 2);
  CHECK(same(batches.pinned[0], {device_base, host_base, 150}));
  CHECK(same(batches.pinned[1], {device_base + 150, host_base + 200, 10}));
}

CASE("who asks for many addresses gets what one alone would, in ranges, between them and beyond") {
  HostRanges host;
  host.add(host_base, {4096, true});
  host.add(host_base + 4096, {4096, false});
  host.add(host_base + 16384, {100, true});
  HostRanges::Reader many(host);
  for (std::size_t i = 0, at = 0; i < 2000; ++i, at = (at * 31 + 977) % 20000) {
    const Address asked = i % 5 == 0 ? device_base + at : i % 7 == 0 ? at : host_base + at;
    const auto found = many.room_at(asked);
    const auto alone = host.room_at(asked);
    CHECK(found.has_value() == alone.has_value());
    CHECK(found.has_value() ==
          (asked >= host_base && asked < device_base && (at < 8192 || (at >= 16384 && at < 16484))));
    if (found) CHECK(found->size_bytes == alone->size_bytes && found->pinned == alone->pinned);
    if (found && at < 8192) CHECK(found->size_bytes == 4096 - at % 4096 && found->pinned == (at < 4096));
  }
}

CASE("no copy crosses the border of a registered piece, in either direction") {
  HostRanges host;
  host.add(host_base, {3 * gib, true});
  const std::vector<Copy> out{{host_base + gib - 10, device_base, gib + 30}};
  const Batches batches = prepare(out, host);
  CHECK(batches.pinned.size() == 3);
  CHECK(same(batches.pinned[0], {host_base + gib - 10, device_base, 10}));
  CHECK(same(batches.pinned[1], {host_base + gib, device_base + 10, gib}));
  CHECK(same(batches.pinned[2], {host_base + 2 * gib, device_base + 10 + gib, 20}));
  const std::vector<Copy> in{{device_base, host_base + 2 * gib - 1, 2}};
  CHECK(prepare(in, host).pinned.size() == 2);
}

CASE("adjacent buffers stay two copies, and pageable memory is kept apart") {
  HostRanges host;
  host.add(host_base, {4096, true});
  host.add(host_base + 4096, {4096, false});
  const std::vector<Copy> batch{{device_base, host_base, 4096}, {device_base + 4096, host_base + 4096, 4096}};
  const Batches batches = prepare(batch, host);
  CHECK(batches.pinned.size() == 1 && batches.pageable.size() == 1);
  CHECK(same(batches.pageable[0], batch[1]));
}

CASE("copies within the device pass whole, and copies that leave their buffer are refused") {
  HostRanges host;
  host.add(host_base, {4096, true});
  const std::vector<Copy> within{{device_base, device_base + 5 * gib, 4 * gib}};
  CHECK(prepare(within, host).pinned.size() == 1);
  const std::vector<Copy> beyond{{device_base, host_base + 4000, 200}};
  CHECK_THROWS(Misuse, prepare(beyond, host));
  const std::vector<Copy> both{{host_base, host_base + 100, 100}};
  CHECK_THROWS(Misuse, prepare(both, host));
  CHECK(host.remove(host_base).size_bytes == 4096 && host.remove(host_base).size_bytes == 0);
}

CASE("the pool hands a kept buffer out again, and keeps no more than its bound (M8)") {
  rig::Rig rig;
  const auto calls = [&] { return rig.faulty->calls(); };
  HostPool pool(rig.faulty, 3 * rig::grain);
  HostBuffer first = pool.acquire(2 * rig::grain, true);
  const Address base = first.base();
  pool.give_back(std::move(first));
  CHECK(pool.idle_bytes() == 2 * rig::grain);
  const std::uint64_t before = calls();
  HostBuffer again = pool.acquire(rig::grain, true);
  CHECK(again.base() == base && calls() == before && pool.idle_bytes() == 0);
  HostBuffer other = pool.acquire(2 * rig::grain, true);
  pool.give_back(std::move(again));
  pool.give_back(std::move(other));  // would be over the bound
  CHECK(pool.idle_bytes() == 2 * rig::grain);
  CHECK(pool.acquire(2 * rig::grain, false).base() != base);  // pinned is another kind
  CHECK(pool.acquire(rig::grain / 2, true).base() != base);   // far too large for that
  CHECK(!pool.retain(4 * rig::grain) && pool.retain(2 * rig::grain));
  CHECK(pool.idle_bytes() == 0 && pool.retained_bytes() == 2 * rig::grain);  // idle ones made way
  pool.release_retained(2 * rig::grain);
  pool.give_back(pool.acquire(rig::grain, true));
  CHECK(pool.trim() == rig::grain && pool.idle_bytes() == 0);
}
