// Pages on their way while the next ones are planned: windows of copies, slots as their memory comes, and the
// order of pages by where they lie.
#include <random>

#include "check.hpp"
#include "passing_device.hpp"
#include "test_device.hpp"
#include "torpor/errors.hpp"
#include "torpor/kv/gpu_pool.hpp"
#include "torpor/kv/page_mover.hpp"
#include "torpor/kv/page_order.hpp"

using namespace torpor;
using kv::GpuPool;
using kv::Move;
using kv::Page;
using kv::PageMover;
using kv::PageOrder;
using kv::Tier;
using test_device::fresh_name;

namespace {

constexpr Address gpu = Address{1} << 44;
constexpr Address host = Address{1} << 40;
constexpr std::size_t mib = std::size_t{1} << 20;
constexpr std::size_t granule = std::size_t{64} << 10;

// Writes down what it is asked for, and copies nothing: addresses may be any. It never catches up by itself:
// what is not waited for is under way.
class Notes final : public PassingDevice {
 public:
  Notes() : PassingDevice(make_host_device(fresh_name(), 16 * granule, granule)) {}
  std::vector<Copy> copies;
  std::size_t under_way = 0;
  std::size_t most_under_way = 0;
  std::size_t fails_in = 0;

  void copy(std::span<const Copy> batch, StreamId) override {
    if (fails_in > 0 && --fails_in == 0) throw DeviceError("as asked", "copy", 1, 0);
    copies.insert(copies.end(), batch.begin(), batch.end());
    most_under_way = std::max(most_under_way, ++under_way);
    ++marked_;
  }
  Mark mark(StreamId) override { return marked_; }
  void wait_for(Mark mark, StreamId, Deadline, const StopFlag*) override { under_way = marked_ - mark; }
  void wait(StreamId, Deadline, const StopFlag*) override { under_way = 0; }

 private:
  Mark marked_ = 0;
};

struct Mover {
  std::shared_ptr<Notes> device = std::make_shared<Notes>();
  PageMover mover{device, std::make_shared<HostPool>(device, 0), nullptr, kv::make_codec("identity"), mib};
  kv::Limits limits{Clock::now() + std::chrono::seconds(20)};
};

Move out(std::size_t slot, std::size_t place, std::uint32_t piece = 0) {
  return {nullptr, {Tier::gpu, gpu + slot * mib, 0}, {Tier::host, host + place * mib, piece}};
}

}  // namespace

CASE("a flow has windows of 64 MiB under way while it is given more, two and the one that begins") {
  Mover one;
  PageMover::Flow flow(one.mover, one.limits);
  for (std::size_t i = 0; i < 64 * 5; ++i) {
    const Move next = out(2 * i, i);
    flow.add({&next, 1});
    CHECK(flow.windows() == (i + 1) / 64);
  }
  CHECK(one.device->under_way == 1 && one.device->most_under_way == 2);
  CHECK(flow.finish() == 320 * mib && one.device->under_way == 0);
  CHECK(one.device->copies.size() == 320);
}

CASE("a flow that ends by a fault, or is given up, leaves nothing under way (M3)") {
  Mover one;
  {
    PageMover::Flow flow(one.mover, one.limits);
    for (std::size_t i = 0; i < 64; ++i) {
      const Move next = out(i, i);
      flow.add({&next, 1});
    }
    CHECK(one.device->under_way == 1);
  }
  CHECK(one.device->under_way == 0);
  std::vector<Move> moves;
  for (std::size_t i = 0; i < 200; ++i) moves.push_back(out(i, i));
  one.device->fails_in = 3;
  CHECK_THROWS(DeviceError, one.mover.run(moves, one.limits));
  CHECK(one.device->under_way == 0);
}

CASE(
    "neighbours on both sides go as one copy, whatever their order, but never across pieces of host memory") {
  Mover one;
  const std::vector<Move> moves{out(7, 3, 1), out(4, 0), out(6, 2), out(5, 1), out(9, 8, 1)};
  CHECK(one.mover.run(moves, one.limits) == 5 * mib);
  CHECK(one.device->copies.size() == 3);
  CHECK(one.device->copies[0].source == gpu + 4 * mib && one.device->copies[0].destination == host);
  CHECK(one.device->copies[0].size_bytes == 3 * mib);
  CHECK(one.device->copies[1].source == gpu + 7 * mib && one.device->copies[1].size_bytes == mib);
}

CASE("a pool that is mapped in part gives slots that have memory, all of them once it is whole") {
  for (const bool seeded : {false, true}) {
    const auto device = make_host_device(fresh_name(), 4 * granule, granule);
    GpuPool pool(device, granule / 4, 3 * granule, seeded ? std::optional<std::uint64_t>(3) : std::nullopt,
                 {.chunk_bytes = granule});
    while (pool.release_one() > 0) continue;
    CHECK(pool.ready_slots() == 0 && pool.free_slots() == 12);
    std::vector<bool> taken(12);
    const auto take = [&](std::size_t below) {
      const auto slot = static_cast<std::size_t>(pool.take());
      CHECK(slot < below && !taken[slot]);
      taken[slot] = true;
      *reinterpret_cast<char*>(pool.address(static_cast<std::int32_t>(slot))) = 1;  // there is memory
    };
    CHECK(pool.map_next() && pool.ready_slots() == 4);
    for (int i = 0; i < 3; ++i) take(4);
    CHECK(pool.map_next() && pool.ready_slots() == 5);
    for (int i = 0; i < 5; ++i) take(8);
    CHECK(pool.ready_slots() == 0 && pool.map_next() && !pool.map_next());
    for (int i = 0; i < 4; ++i) take(12);
    CHECK(pool.free_slots() == 0);
    pool.give_back_all();
    pool.drop_mappings();
    CHECK(pool.ready_slots() == 0 && device->memory_info().free_bytes == 4 * granule);
    pool.map();
    CHECK(pool.ready_slots() == 12 && pool.mapped_bytes() == 3 * granule);
  }
}

CASE("pages come in the order of their numbers, many or few of those that there could be") {
  std::vector<Page> pages(100);
  std::mt19937_64 random(1);
  for (const std::size_t limit : {std::size_t{100}, std::size_t{1} << 40}) {
    std::vector<std::size_t> numbers(100);
    for (std::size_t i = 0; i < 100; ++i) numbers[i] = i * (limit / 100);
    std::ranges::shuffle(numbers, random);
    PageOrder order(100, limit);
    for (std::size_t i = 0; i < 100; ++i) {
      pages[i].slot = static_cast<std::int32_t>(numbers[i] / (limit / 100));
      if (pages[i].slot != 50) order.add(numbers[i], pages[i]);
    }
    const std::vector<Page*> found = order.take();
    CHECK(found.size() == 99 && std::ranges::is_sorted(found, {}, &Page::slot));
  }
  CHECK(PageOrder(0, 0).take().empty());
}
