// The tiers below the GPU pool: what falls where, what comes back, and what a failure leaves.
#include "kv_trio.hpp"

using namespace kv_rig;
using torpor::CodecRefused;
using torpor::DiskFile;

namespace {

// A codec whose cold pages are larger, and that refuses when it is told to.
class Padding final : public torpor::kv::Codec {
 public:
  mutable std::atomic<int> refuse_encodes{0};  // so many of the next ones
  mutable std::atomic<int> refuse_decodes{0};
  [[nodiscard]] std::string name() const override { return "padding"; }
  [[nodiscard]] std::size_t cold_bytes(std::size_t bytes) const noexcept override { return bytes + 1000; }
  void encode(std::span<const std::byte> page, std::span<std::byte> cold) const override {
    if (refuses(refuse_encodes)) throw CodecRefused("encode was told to refuse");
    std::memset(cold.data(), 0xEE, 1000);
    for (std::size_t i = 0; i < page.size(); ++i) cold[1000 + i] = page[i] ^ std::byte{0x5A};
  }
  void decode(std::span<const std::byte> cold, std::span<std::byte> page) const override {
    if (refuses(refuse_decodes)) throw CodecRefused("decode was told to refuse");
    for (std::size_t i = 0; i < page.size(); ++i) page[i] = cold[1000 + i] ^ std::byte{0x5A};
  }

 private:
  static bool refuses(std::atomic<int>& left) {
    if (left <= 0) return false;
    --left;
    return true;
  }
};

}  // namespace

CASE("pages fall from the GPU to the host and on to the disk, and come back byte for byte") {
  Trio world = three_suspended();
  Rig& rig = *world.rig;
  CHECK(pages_by_tier(rig) == std::array<std::size_t, 4>{8, 0, 4, 12});
  CHECK(rig.disk->allocated_bytes() >= 12 * page_bytes && rig.stats().disk_bytes == rig.disk->used_bytes());
  CHECK(rig.stats().moved_down_pages > 0);
  all_are_whole(world);
  all_are_whole(world);
  for (Tracked& one : world.three) one.handle->close();
  rig.kv->forget_prefixes();
  CHECK(rig.disk->used_bytes() == 0 && rig.disk->allocated_bytes() == 0 && rig.stats().host_bytes == 0);
}

CASE("what fits nowhere is refused while it is held, and dropped, the oldest first, when nobody uses it") {
  Trio world = three_suspended({.host_slots = 4, .seed = 5, .disk_slots = 12});
  Rig& rig = *world.rig;
  Tracked fourth = rig.create("d", tokens_from(0, 6));
  CHECK(fourth.handle->resume());
  CHECK(!fourth.handle->resize(4));  // not one place is left
  CHECK(pages_by_tier(rig) == std::array<std::size_t, 4>{8, 0, 4, 12});
  world.three[0].handle->close();  // seven droppable pages on disk; the eighth was not full
  CHECK(rig.extend(fourth, tokens_from(0, 20)));
  CHECK(rig.stats().evicted_pages > 0 && rig.kv->probe("a", tokens_from(0, 30)) < 28);
  CHECK(rig.kv->probe("b", tokens_from(0, 30)) == 28 && rig.kv->probe("c", tokens_from(0, 30)) == 28);
  CHECK(rig.holds(fourth));
}

CASE("without a host tier pages go straight to the disk") {
  Trio world = three_suspended({.seed = 2, .disk_slots = 24});
  CHECK(pages_by_tier(*world.rig) == std::array<std::size_t, 4>{8, 0, 0, 16});
  all_are_whole(world);
}

CASE("a full disk is no error: what is held stays where it was") {
  // The file may have room for 128 pages; the tier wants more.
  const std::size_t limit_bytes = 128 * page_bytes;
  Rig rig({.gpu_slots = 8, .seed = 1, .disk_slots = 1000, .disk_limit_bytes = limit_bytes});
  Tracked one = rig.started("a", tokens_from(0, 30));
  one.handle->suspend();
  std::vector<Tracked> more;
  bool refused = false;
  for (Token i = 0; i < 40 && !refused; ++i) {
    Tracked next = rig.create(std::string("b").append(std::to_string(i)), tokens_from(i, 30));
    CHECK(next.handle->resume());
    refused = !next.handle->resize(30);
    if (refused) break;
    CHECK(rig.extend(next, tokens_from(i, 30)));
    next.handle->suspend();
    more.push_back(next);
  }
  CHECK(refused && more.size() >= 10 && rig.disk->used_bytes() <= limit_bytes);
  more.back().handle->close();  // its last page goes, its prefix may be dropped
  for (Tracked* back : {&more[0], &more[5]}) {
    if (!back->handle->resume()) continue;
    CHECK(rig.holds(*back));
    back->handle->suspend();
  }
  more.clear();
  CHECK(one.handle->resume() && rig.holds(one));
}

CASE("any device call, read or write of a cascade that fails leaves every page where it was (M3, F26)") {
  const int faults = sweep_faults<Trio>([] { return three_suspended(); },
                                        [](Trio& world) {
                                          CHECK(world.three[0].handle->resume());
                                          CHECK(world.rig->holds(world.three[0]));
                                        },
                                        [](Trio& world) {
                                          CHECK(world.three[0].handle->state() == SequenceState::suspended);
                                          const std::size_t on_disk = world.rig->stats().disk_pages;
                                          // The first move, down, may have been finished before the second,
                                          // up, failed: then it stands.
                                          CHECK(on_disk == 12 || world.rig->stats().free_slots > 0);
                                          all_are_whole(world);
                                        });
  CHECK(faults >= 8);
}

CASE("a cold tier on the GPU takes what falls first, and gives it on to the host") {
  Trio world = three_suspended({.host_slots = 16, .seed = 5, .cold_gpu_slots = 8});
  Rig& rig = *world.rig;
  CHECK(rig.stats().cold_gpu_slots == 8);
  CHECK(pages_by_tier(rig) == std::array<std::size_t, 4>{8, 8, 8, 0});
  all_are_whole(world);
  all_are_whole(world);
}

CASE("any call that fails with a cold tier on the GPU loses nothing, and the retry works (M3)") {
  const int faults = sweep_faults<Trio>(
      [] { return three_suspended({.host_slots = 4, .seed = 5, .disk_slots = 16, .cold_gpu_slots = 8}); },
      [](Trio& world) {
        CHECK(world.three[0].handle->resume());
        CHECK(world.rig->holds(world.three[0]));
      },
      [](Trio& world) { all_are_whole(world); });
  CHECK(faults >= 8);
}

CASE("a codec of another size holds pages in every cold tier") {
  for (const auto& codec : {std::shared_ptr<const torpor::kv::Codec>(std::make_shared<Padding>()),
                            torpor::kv::make_codec("checked")}) {
    Trio world =
        three_suspended({.host_slots = 4, .seed = 5, .disk_slots = 16, .cold_gpu_slots = 6, .codec = codec});
    CHECK(world.rig->stats().cold_gpu_pages > 0 && world.rig->stats().disk_pages > 0);
    all_are_whole(world);
    all_are_whole(world);
  }
}

CASE("a page that the codec refuses to encode stays where it was, and another one goes") {
  const auto codec = std::make_shared<Padding>();
  Rig rig({.host_slots = 16, .seed = 5, .codec = codec});
  Tracked one = rig.started("a", tokens_from(0, 30));  // 8 pages
  one.handle->suspend();
  Tracked two = rig.create("b", tokens_from(0, 6));
  CHECK(two.handle->resume());
  codec->refuse_encodes = 1;
  CHECK(rig.extend(two, tokens_from(0, 6)));
  CHECK(rig.stats().host_pages == 2 && rig.holds(two));
  codec->refuse_encodes = 1000;
  CHECK(!two.handle->resize(12));
  CHECK(rig.stats().host_pages == 2 && rig.holds(two));
  codec->refuse_encodes = 0;
  two.handle->close();
  CHECK(one.handle->resume() && rig.holds(one));
}

CASE("a prefix that the codec refuses is dropped for room: nobody uses it") {
  const auto codec = std::make_shared<Padding>();
  Rig rig({.host_slots = 16, .seed = 5, .codec = codec});
  rig.started("a", tokens_from(0, 32)).handle->close();
  codec->refuse_encodes = 1000;
  Tracked two = rig.started("b", tokens_from(0, 8));
  CHECK(rig.holds(two) && rig.stats().host_pages == 0 && rig.stats().evicted_pages > 0);
}

CASE("a page that the codec refuses to decode stays in its tier, and the next try brings it") {
  const auto codec = std::make_shared<Padding>();
  Trio world = three_suspended({.host_slots = 4, .seed = 5, .disk_slots = 20, .codec = codec});
  codec->refuse_decodes = 1;
  CHECK_THROWS(CodecRefused, world.three[0].handle->resume());
  CHECK(world.three[0].handle->state() == SequenceState::suspended);
  all_are_whole(world);
}

CASE("a damaged cold page is refused by the checked codec, and never used") {
  Rig rig({.seed = 3, .disk_slots = 16, .codec = torpor::kv::make_codec("checked")});
  Tracked one = rig.started("a", tokens_from(0, 30));
  one.handle->suspend();
  Tracked two = rig.started("b", tokens_from(0, 30));
  two.handle->close();
  CHECK(rig.stats().disk_pages == 8);
  // Another writes over the first page on the disk.
  const torpor::HostBuffer junk(rig.device, std::size_t{2} << 20, false);
  rig.disk->write(0, junk.base(), DiskFile::block_bytes);
  CHECK_THROWS(CodecRefused, one.handle->resume());
  CHECK(one.handle->state() == SequenceState::suspended && rig.stats().held_pages == 8);
}

CASE("a sleep and a wake leave every page in the tier it was in, in each mode (K3, K5, K6)") {
  for (const auto& codec : {torpor::kv::make_codec("identity"), torpor::kv::make_codec("checked")}) {
    for (const auto mode :
         {torpor::RestoreMode::pinned, torpor::RestoreMode::disk, torpor::RestoreMode::memset}) {
      Trio world = three_suspended(
          {.host_slots = 4, .seed = 5, .disk_slots = 24, .cold_gpu_slots = 8, .codec = codec});
      Rig& rig = *world.rig;
      const auto before = pages_by_tier(rig);
      const std::size_t disk_before = rig.disk->used_bytes();
      const auto plan = rig.plan(torpor::Action::sleep, mode);
      const std::size_t cold_bytes = codec->cold_bytes(page_bytes);
      // Both pools of the GPU, and nothing of what is elsewhere already (K4).
      CHECK(plan.keep_bytes == (preserves(mode) ? (8 + before[1]) * cold_bytes : 0));
      // The host tier is full: what it has no room for goes on to the disk, through a buffer on the host.
      CHECK(plan.items[0].host_bytes == 0 && (plan.host_bytes > 0) == preserves(mode));
      CHECK(plan.disk_bytes == 0 || preserves(mode));
      rig.run(plan);
      CHECK(rig.free_bytes() == 16 * granule_bytes && pages_by_tier(rig) == before);
      rig.wake();
      CHECK(pages_by_tier(rig) == before && rig.free_bytes() == world.free_bytes);
      CHECK(rig.disk->used_bytes() == disk_before);  // anew after a discard
      if (preserves(mode)) {
        all_are_whole(world);
        continue;
      }
      for (Tracked& one : world.three) {
        CHECK(one.handle->resume() && rig.all_zero(one) && one.handle->contents_lost());
        one.handle->suspend();
      }
    }
  }
}

CASE("any call that fails in a sleep to disk or its wake loses nothing in any tier (M3, F6, F26)") {
  const int faults = sweep_faults<Trio>(
      [] { return three_suspended({.host_slots = 4, .seed = 5, .disk_slots = 24, .cold_gpu_slots = 8}); },
      [](Trio& world) {
        Rig& rig = *world.rig;
        if (!rig.kv->parked()) {
          if (rig.ledger->status().phase == torpor::LedgerPhase::idle)
            rig.stage(rig.plan(torpor::Action::sleep, torpor::RestoreMode::disk));
          rig.ledger->commit();
          rig.ledger->publish();
        }
        if (rig.ledger->status().phase != torpor::LedgerPhase::idle) rig.ledger->publish();
        rig.wake();
        CHECK(rig.free_bytes() == world.free_bytes);
      },
      [](Trio& world) {
        Rig& rig = *world.rig;
        CHECK(pages_by_tier(rig)[1] == 8);
        if (rig.kv->parked()) CHECK(rig.free_bytes() == 16 * granule_bytes);
        if (!rig.kv->parked() && rig.ledger->status().phase == torpor::LedgerPhase::idle)
          all_are_whole(world);
      });
  CHECK(faults >= 10);
}

CASE("prefixes of a higher priority outlive newer ones of a lower, on every tier") {
  Rig rig({.host_slots = 8, .seed = 4});
  const auto keep = [&](const char* scope, std::size_t priority) {
    const auto handle = rig.kv->create_sequence(scope, tokens_from(0, 17), priority);
    CHECK(handle->resume() && handle->resize(17));
    handle->commit(tokens_from(0, 17));
    handle->close();
  };
  keep("high", 3);  // four pages each
  keep("usual", torpor::kv::default_priority);
  keep("low", 0);
  keep("low too", 0);
  CHECK(rig.kv->probe("high", tokens_from(0, 17)) == 16 && rig.stats().host_pages == 8);
  keep("usual again", 1);  // 16 places are taken
  CHECK(rig.kv->probe("high", tokens_from(0, 17)) == 16 && rig.kv->probe("usual", tokens_from(0, 17)) == 16);
  CHECK(rig.kv->probe("low", tokens_from(0, 17)) == 0);
  const std::size_t low_too = rig.kv->probe("low too", tokens_from(0, 17));
  // Whoever finds a page raises it.
  CHECK(rig.kv->create_sequence("low too", tokens_from(0, 17), 3)->matched_tokens() == low_too &&
        low_too > 0);
  for (const char* scope : {"x", "y", "z"}) keep(scope, 2);
  CHECK(rig.kv->probe("low too", tokens_from(0, 17)) == low_too);
  CHECK(rig.kv->probe("high", tokens_from(0, 17)) == 16);
  CHECK(rig.kv->probe("usual", tokens_from(0, 17)) + rig.kv->probe("usual again", tokens_from(0, 17)) == 0);
  CHECK_THROWS(torpor::Misuse, rig.kv->create_sequence("x", {}, 4));
}

namespace {

// Droppable pages without a prefix tree: one node each.
struct Shelf final : torpor::kv::PageWatcher {
  std::vector<torpor::kv::Page*> dropped;
  torpor::kv::PageCache* cache = nullptr;
  void drop(torpor::kv::Page& page) noexcept override {
    dropped.push_back(&page);
    page.node = nullptr;
    cache->unlink(page, torpor::kv::PageCache::Why::room);
  }
  void moved(const torpor::kv::Page&) noexcept override {}
};

}  // namespace

CASE("pages leave by priority, then the least recently used first") {
  const auto device = test_device::make(granule_bytes, 16, 1);
  const auto pool = std::make_shared<torpor::HostPool>(device, 0);
  Shelf shelf;
  torpor::kv::PageCache cache(
      device, pool, {.page_bytes = page_bytes, .gpu_bytes = 8 * page_bytes, .host_bytes = 0, .seed = {}},
      shelf);
  shelf.cache = &cache;
  shelf.dropped.reserve(8);
  torpor::kv::Node node;
  std::vector<torpor::kv::Page*> pages;
  for (int i = 0; i < 8; ++i) {
    pages.push_back(&cache.take_locked());
    pages.back()->node = &node;
    cache.set_priority(*pages.back(), static_cast<std::uint8_t>(i % 3));
  }
  for (torpor::kv::Page* page : pages) {
    cache.unlock(*page);
    cache.release(*page);
  }
  cache.set_priority(*pages[0], 3);  // was the very first
  const torpor::kv::Limits limits{torpor::Clock::now() + std::chrono::seconds(5), nullptr};
  CHECK(cache.make_room(8, limits));
  // Level 0: 3, 6. Level 1: 1, 4, 7. Level 2: 2, 5. Level 3: 0.
  const std::vector<torpor::kv::Page*> order{pages[3], pages[6], pages[1], pages[4],
                                             pages[7], pages[2], pages[5], pages[0]};
  CHECK(shelf.dropped == order && cache.gpu().free_slots() == 8);
}
