// Arena: blocks for code that allocates by itself, and its sleep in the ledger's transaction.
#include <cstdlib>

#include "ledger_rig.hpp"
#include "process.hpp"
#include "torpor/allocator_hook.hpp"
#include "torpor/arena.hpp"

using namespace rig;

extern "C" void* torpor_allocate_0(std::size_t, int, void*);
extern "C" void torpor_free_0(void*, std::size_t, int, void*);

namespace {

// Of the device: less than the 32 MiB that an arena grows by where so much is there.
const std::size_t room = test_device::where() == test_device::Where::host ? capacity : 14 * grain;
const std::size_t unit = room / 512;  // of blocks that share a chunk

constexpr std::array all_modes{RestoreMode::none, RestoreMode::memset, RestoreMode::cpu, RestoreMode::pinned,
                               RestoreMode::disk};

struct Block {
  Address at;
  std::size_t size_bytes;
  int seed;
};

const std::uint8_t* contents_of(const Block& block) {
  return expected_bytes(block.size_bytes, block.seed).data();
}

struct ArenaRig : Rig {
  explicit ArenaRig(std::size_t reserve_bytes = room) : Rig(0, room) {
    arena = std::make_shared<Arena>(faulty, ledger->host_pool(), disk,
                                    ArenaSpec{.tag = "cuda_graph", .reserve_bytes = reserve_bytes});
    ledger->add(arena);
  }
  Block& block(std::size_t size_bytes) {
    blocks.push_back({arena->allocate(size_bytes), size_bytes, static_cast<int>(blocks.size()) + 1});
    fill(blocks.back());
    return blocks.back();
  }
  void fill(const Block& block) const { memory.write(block.at, contents_of(block), block.size_bytes); }
  [[nodiscard]] bool block_holds(const Block& block) const {
    return memory.holds(block.at, contents_of(block), block.size_bytes);
  }
  [[nodiscard]] bool blocks_hold() const {
    return std::ranges::all_of(blocks, [this](const Block& block) { return block_holds(block); });
  }
  [[nodiscard]] bool blocks_are_zero() const {
    return std::ranges::all_of(
        blocks, [this](const Block& block) { return memory.is_zero(block.at, block.size_bytes); });
  }

  std::shared_ptr<Arena> arena;
  std::vector<Block> blocks;
};

// Three blocks with a hole between the second and the third.
void fill_rig(ArenaRig& rig) {
  rig.block(3 * grain + 7);
  rig.block(100);
  const Address hole = rig.arena->allocate(grain);
  rig.block(chunk);
  rig.arena->free(hole);
}

Modes mode_of(RestoreMode mode) {
  return {{"cuda_graph", mode}};
}

}  // namespace

CASE("blocks do not overlap, are aligned, take memory as they come and give whole pieces back") {
  ArenaRig rig;
  CHECK(rig.free_bytes() == room && rig.arena->mapped_bytes() == 0);
  for (const std::size_t size_bytes : {std::size_t{1}, grain, std::size_t{513}, chunk + 1})
    rig.block(size_bytes);
  CHECK(rig.blocks_hold());
  for (const Block& one : rig.blocks) CHECK(one.at % Arena::alignment_bytes == 0);
  CHECK(rig.free_bytes() == room - rig.arena->mapped_bytes());
  CHECK(rig.arena->used_bytes() >= chunk + 1 + grain + 514 &&
        rig.arena->used_bytes() <= rig.arena->mapped_bytes());
  while (!rig.blocks.empty()) {
    rig.arena->free(rig.blocks.front().at);
    rig.blocks.erase(rig.blocks.begin());
    CHECK(rig.blocks_hold());
  }
  CHECK(rig.arena->used_bytes() == 0 && rig.free_bytes() == room);
}

CASE("a hole is used again, the smallest that fits first") {
  ArenaRig rig;
  const Address large = rig.arena->allocate(4 * unit);
  const Address wall = rig.arena->allocate(512);
  const Address small = rig.arena->allocate(2 * unit);
  (void)rig.arena->allocate(512);
  rig.arena->free(large);
  rig.arena->free(small);
  CHECK(rig.arena->allocate(unit) == small);
  CHECK(rig.arena->allocate(4 * unit) == large);
  rig.arena->free(wall);
  CHECK_THROWS(Misuse, rig.arena->free(wall));
  CHECK_THROWS(Misuse, rig.arena->free(large + 512));
}

CASE("any sequence of blocks keeps what they hold, and memory is what the books say") {
  ArenaRig rig;
  std::srand(7);
  for (int step = 0; step < 3000; ++step) {
    const bool takes = rig.blocks.empty() || (rig.blocks.size() < 40 && std::rand() % 2 == 0);
    if (takes) {
      rig.blocks.push_back(
          {rig.arena->allocate(static_cast<std::size_t>(std::rand()) % (3 * unit) + 1), 0, step});
      rig.blocks.back().size_bytes = 64;
      rig.fill(rig.blocks.back());
    } else {
      const auto one = rig.blocks.begin() + std::rand() % static_cast<int>(rig.blocks.size());
      CHECK(rig.block_holds(*one));
      rig.arena->free(one->at);
      rig.blocks.erase(one);
    }
    if (step % 500 == 250) {
      (void)rig.sleep(mode_of(RestoreMode::cpu));
      CHECK(rig.free_bytes() == room);
      (void)rig.wake();
      CHECK(rig.blocks_hold());
    }
    CHECK(rig.free_bytes() == room - rig.arena->mapped_bytes());
  }
}

CASE("no room on the device or among the addresses is said with numbers, and nothing is lost") {
  ArenaRig rig(64 * chunk);  // more addresses than the device has memory
  rig.block(chunk);
  CHECK(rig.arena->mapped_bytes() == chunk);  // it would have liked more
  CHECK_THROWS(OutOfDeviceMemory, rig.arena->allocate(64 * chunk));
  CHECK_THROWS(OutOfDeviceMemory, rig.arena->allocate(17 * chunk));
  const Physical taken(rig.host, rig.free_bytes() - grain);
  CHECK(rig.arena->allocate(grain) != 0);  // the last that there is
  CHECK_THROWS(OutOfDeviceMemory, rig.arena->allocate(chunk));
  CHECK_THROWS(Misuse, rig.arena->allocate(0));
  CHECK_THROWS(OutOfDeviceMemory, rig.arena->allocate(~std::size_t{0}));
  CHECK(rig.blocks_hold());
}

CASE(
    "asleep in every mode it has no memory, and awake blocks are what the mode says, at their addresses (S1, "
    "M1)") {
  for (const RestoreMode mode : all_modes) {
    ArenaRig rig;
    rig.verify = preserves(mode);
    fill_rig(rig);
    const std::size_t mapped = rig.arena->mapped_bytes();
    const CommitReport slept = rig.sleep(mode_of(mode));
    CHECK(slept.freed_bytes == mapped && rig.free_bytes() == room && rig.arena->mapped_bytes() == 0);
    CHECK(test_device::is_bare(rig.blocks[0].at));
    CHECK_THROWS(Misuse, rig.arena->allocate(1));
    if (preserves(mode)) {
      // Only blocks in use are saved, by whole pieces of the disk where they go there.
      const std::size_t kept = rig.host_bytes() + rig.disk_bytes();
      CHECK(kept >= chunk + 3 * grain && kept < chunk + 4 * grain);
    }
    const CommitReport woken = rig.wake();
    CHECK(woken.device_bytes == mapped && rig.free_bytes() == room - mapped);
    CHECK(rig.host_bytes() == 0 && rig.disk_bytes() == 0);
    if (preserves(mode)) CHECK(rig.blocks_hold());
    if (mode == RestoreMode::memset) CHECK(rig.blocks_are_zero());
    rig.block(2 * grain);
    CHECK(rig.block_holds(rig.blocks.back()));
  }
}

CASE("a block may be given back asleep and between the phases, and its place is used again after the wake") {
  ArenaRig rig;
  fill_rig(rig);
  (void)rig.stage(Action::sleep, mode_of(RestoreMode::pinned));
  CHECK_THROWS(Misuse, rig.arena->allocate(1));
  rig.arena->free(rig.blocks[1].at);
  (void)rig.finish();
  rig.arena->free(rig.blocks[0].at);
  rig.blocks.erase(rig.blocks.begin(), rig.blocks.begin() + 2);
  (void)rig.wake();
  CHECK(rig.blocks_hold());
  rig.block(3 * grain);
  CHECK(rig.blocks_hold());
}

CASE("a weaker mode asleep lets the saved contents go, a stronger one changes nothing (C1)") {
  ArenaRig rig;
  fill_rig(rig);
  (void)rig.sleep(mode_of(RestoreMode::pinned));
  (void)rig.sleep(mode_of(RestoreMode::none));
  CHECK(rig.host_bytes() == 0);
  (void)rig.sleep(mode_of(RestoreMode::pinned));
  CHECK(rig.host_bytes() == 0);
  (void)rig.wake();
  CHECK(rig.arena->parked() == false);
}

CASE("any device call of its sleep and its wake may fail: all is as before, and the retry is right (M3)") {
  for (const RestoreMode mode : {RestoreMode::memset, RestoreMode::pinned, RestoreMode::disk}) {
    for (const Action kind : {Action::sleep, Action::wake}) {
      int faults = 0;
      for (std::uint64_t k = 1;; ++k) {
        ArenaRig rig;
        rig.verify = preserves(mode);
        fill_rig(rig);
        const std::size_t awake = rig.free_bytes();
        if (kind == Action::wake) (void)rig.sleep(mode_of(mode));
        const std::size_t before = rig.free_bytes();
        bool failed = false;
        rig.faulty->fail_at(k);
        try {
          (void)rig.stage(kind, mode_of(mode));
        } catch (const DeviceError&) {
          failed = true;
          CHECK(rig.phase() == LedgerPhase::idle && rig.free_bytes() == before);
          if (kind == Action::sleep) CHECK(rig.blocks_hold() && rig.arena->allocate(1) != 0);
          (void)rig.stage(kind, mode_of(mode));
        }
        for (int attempt = 0;; ++attempt) {
          try {
            (void)rig.finish();
            break;
          } catch (const DeviceError&) {
            failed = true;
            CHECK(kind == Action::sleep && attempt == 0);
          }
        }
        rig.faulty->fail_at(0);
        if (kind == Action::sleep) (void)rig.wake();
        CHECK(rig.free_bytes() == awake);
        if (preserves(mode)) CHECK(rig.blocks_hold());
        if (!failed) break;
        ++faults;
      }
      CHECK(faults >= 2);
    }
  }
}

CASE("a flipped byte of what was saved fails the wake and names the tag (K13)") {
  ArenaRig rig;
  rig.verify = true;
  fill_rig(rig);
  rig.faulty->corrupt_copy(2);
  (void)rig.sleep(mode_of(RestoreMode::pinned));
  CHECK_THROWS(ContentsCorrupt, rig.stage(Action::wake));
  CHECK(rig.free_bytes() == room && rig.arena->parked());
}

CASE("a framework's callbacks reach their arena, get null where there is no memory, and never throw") {
  ArenaRig rig(4 * chunk);
  ArenaRig other;
  const AllocatorHook names = hook_of(rig.arena);
  CHECK(names.allocate == hook_of(rig.arena).allocate && names.free != hook_of(other.arena).free);
  CHECK(names.allocate == "torpor_allocate_0");
  void* block = torpor_allocate_0(grain, 0, nullptr);
  CHECK(reinterpret_cast<Address>(block) == rig.arena->address() && rig.arena->used_bytes() == grain);
  torpor_free_0(block, grain, 0, nullptr);
  torpor_free_0(block, grain, 0, nullptr);  // a second time: nothing to do, and nowhere to say so
  torpor_free_0(nullptr, 0, 0, nullptr);
  CHECK(rig.arena->used_bytes() == 0);
  CHECK(torpor_allocate_0(5 * chunk, 0, nullptr) == nullptr);
  CHECK(hook_error(*rig.arena).find("reserve_bytes") != std::string::npos &&
        hook_error(*other.arena).empty());
}
