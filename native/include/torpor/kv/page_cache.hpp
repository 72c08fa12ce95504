// PageCache: every page, the tier it is in, who uses it, and the moves between the tiers.
//
// What KvManager builds on: the pages of one size. Knows nothing of sequences, prefixes or locks; whoever
// knows pages by their contents is asked through a PageWatcher before one is dropped. A move is all or
// nothing: a device call that fails leaves the pages of that move where they were. Not thread-safe; KvManager
// has the lock.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "torpor/device.hpp"
#include "torpor/kv/cold_pool.hpp"
#include "torpor/kv/disk_store.hpp"
#include "torpor/kv/gpu_pool.hpp"
#include "torpor/kv/host_store.hpp"
#include "torpor/kv/page.hpp"
#include "torpor/kv/page_mover.hpp"
#include "torpor/kv/records.hpp"

namespace torpor::kv {

struct CacheLimits {
  std::size_t page_bytes;
  std::size_t gpu_bytes;
  std::size_t host_bytes;
  std::optional<std::uint64_t> seed;
  std::size_t disk_bytes = 0;            // ceiling of the disk tier; 0 = none
  std::shared_ptr<DiskFile> disk{};      // for that tier, and for sleeps to disk
  std::size_t cold_gpu_bytes = 0;        // of the cold tier on the GPU; 0 = none
  std::shared_ptr<const Codec> codec{};  // empty = identity
  PoolRoom room{};                       // of the GPU pool
};

// Counted since the start.
struct CacheCounters {
  std::uint64_t evicted_pages = 0;     // dropped for room
  std::uint64_t forgotten_pages = 0;   // dropped because all prefixes were
  std::uint64_t moved_out_pages = 0;   // from the GPU into a cold tier
  std::uint64_t moved_down_pages = 0;  // from one cold tier into a colder one
  std::uint64_t moved_in_pages = 0;    // from a cold tier to the GPU
};

// Who finds pages by their contents.
class PageWatcher {
 public:
  // This droppable page must go, for room. Forget it, and what cannot be found without it, and unlink() each.
  virtual void drop(Page& page) noexcept = 0;
  // It is in another tier now.
  virtual void moved(const Page& page) noexcept = 0;

 protected:
  ~PageWatcher() = default;
};

class PageCache final {
 public:
  // The watcher must live as long as the cache.
  PageCache(std::shared_ptr<Device> device, const std::shared_ptr<HostPool>& pool, const CacheLimits& limits,
            PageWatcher& watcher);

  // --- who uses a page ---
  void hold(Page& page) noexcept;     // a sequence begins to use it
  void release(Page& page) noexcept;  // a sequence ends to; the last one leaves it droppable, or frees it
  void lock(Page& page) noexcept;     // an active sequence needs it in its slot
  void unlock(Page& page) noexcept;
  // The watcher has forgotten it, for room or with all prefixes: it is freed unless a sequence uses it. Trims
  // nothing.
  enum class Why : std::uint8_t { room, all_forgotten };
  void unlink(Page& page, Why why) noexcept;
  // Scratch pages keep their slots like others, but no sleep saves what is in them.
  void set_scratch(Page& page, bool scratch) noexcept;
  // Below priority_levels. The page counts as used now.
  void set_priority(Page& page, std::uint8_t priority) noexcept;
  // Never lowers it.
  void raise_priority(Page& page, std::uint8_t priority) noexcept {
    if (page.priority < priority) set_priority(page, priority);
  }

  // --- room and moves ---
  // Frees GPU slots until n are free. Pages fall from tier to tier, droppable ones first, by priority and
  // then the longest unused; droppable ones that find no room in any tier are dropped, held ones never are.
  // `arriving`: pages that bring_in() fetches next. The places that they leave are room already, which until
  // then is taken beyond a ceiling.
  // False when that is not enough; then nothing changed. A throw of a device or disk changes nothing either,
  // but that the cold tier on the GPU may have given pages to a colder one: its places are fixed.
  [[nodiscard]] bool make_room(std::size_t n, const Limits& limits, std::span<Page* const> arriving = {});
  // Whether make_room() would do, if the machine gives the tiers what is below their ceilings.
  [[nodiscard]] bool could_make_room(std::size_t n, std::span<Page* const> arriving = {}) const;
  // Brings pages of cold tiers to the GPU. There must be room. PageRefused when the codec cannot decode one.
  void bring_in(std::span<Page* const> pages, const Limits& limits);
  // A new page, held and locked once. There must be a free slot. bad_alloc: then nothing changed.
  [[nodiscard]] Page& take_locked(std::uint16_t life_cycle = 0, std::uint8_t priority = default_priority);

  // --- the whole cache at once ---
  // The bytes of every page are gone, and the room that they took in cold tiers is given back. All prefixes
  // are forgotten already: what is left are pages that sequences use. For a parked pool, or one that is being
  // parked.
  void discard() noexcept;

  // --- sleep and wake; page_parking.cpp ---
  // What a sleep saves: the pages on the GPU, in either tier, that have contents and are not scratch.
  [[nodiscard]] std::size_t pages_to_save() const noexcept;
  // Of a parked cache: how many it has saved, and of them in this tier.
  [[nodiscard]] std::size_t saved_pages() const noexcept;
  [[nodiscard]] std::size_t saved_pages(Tier tier) const noexcept { return saved_in_[index(tier)]; }
  // Places that a sleep may still take there: what the tier's ceiling leaves, or as many as it likes where no
  // such tier was asked for and a temporary one serves.
  [[nodiscard]] std::size_t save_room(Tier to) const noexcept;
  // Droppable pages of a tier in the order of eviction.
  [[nodiscard]] std::vector<Page*> first_to_evict(Tier tier) const;
  // Host memory that these pages pass through on their way there or back.
  [[nodiscard]] std::size_t buffer_bytes(Tier saved, std::size_t pages) const noexcept;
  // Pages that a sleep or a wake moves, in the order in which they get their new room.
  struct Travellers {
    Tier tier = Tier::host;  // a sleep: that most are saved to; a wake: that they belong to
    std::vector<Page*> pages;
    std::size_t spilled = 0;  // of a sleep: so many of the first go to the disk tier instead
    std::size_t next = 0;     // the first without its room
    [[nodiscard]] bool done() const noexcept { return next == pages.size(); }
  };
  // Commits room in host memory or on disk for every one of them. Not for those in `without`; of the others
  // so many go to the disk tier instead, the ones in use last. OutOfHostMemory, OutOfDisk; then nothing
  // changed.
  [[nodiscard]] Travellers plan_save(Tier to, std::size_t spilled = 0, std::span<Page* const> without = {});
  // Gives the next ones, `limit` at most, a place of their own beside their slot, and puts the moves to make
  // into `moves`, instead of what was there.
  void save_next(Travellers& leaving, std::size_t limit, std::vector<Move>& moves);
  // After the last of them: so a wake finds them in the order of their places, without looking at every page,
  // as long as none of them gives its saved place back.
  void keep_order(Travellers& saved) noexcept;
  // The pages on the GPU leave their saved places: a save was taken back, or a restore is published.
  void drop_saved() noexcept;
  // The pages on the GPU leave their slots: the pools are being parked, or a restore was taken back.
  void leave_slots() noexcept;
  // The pages of one tier that have no room there: saved ones, and those that a discard has left without
  // contents. Commits the room; the tiers of the GPU must be mapped, the pool of slots in part at least.
  // OutOfHostMemory, OutOfDisk.
  [[nodiscard]] Travellers plan_restore(Tier tier);
  // What brings pages back.
  struct Restore {
    std::vector<Move> moves;
    std::vector<PageEnd> blanks;  // to be written anew
  };
  // Gives the next ones, `limit` at most and of the GPU as many as there is memory for, a slot or place, and
  // puts what is to be done into `todo`, instead of what was there.
  void restore_next(Travellers& returning, std::size_t limit, Restore& todo);
  // Of a cache whose pages a discard has left without contents: what plan_restore commits.
  [[nodiscard]] std::size_t bytes_to_remake(Tier tier) const noexcept;
  // Drops those of these pages that are droppable still, with all that cannot be found without them.
  void evict(std::span<Page* const> pages) noexcept;
  // Maps the pool of that tier, all or nothing; may throw. Tiers outside the GPU have nothing to map.
  void map(Tier tier);
  // One more chunk of the pool of slots; false when all of it is mapped. May throw; then nothing changed.
  bool map_next() { return gpu_.map_next(); }
  void drop_mappings() noexcept;
  // Unmaps and frees one chunk and returns its bytes, 0 when nothing is mapped. May throw; then nothing
  // changed.
  [[nodiscard]] std::size_t release_one();
  [[nodiscard]] std::size_t mapped_bytes() const noexcept;
  [[nodiscard]] std::size_t device_bytes() const noexcept;    // of both pools when mapped
  [[nodiscard]] std::size_t reserved_bytes() const noexcept;  // addresses of both

  // --- maintenance; page_resize.cpp ---
  struct Clearing;
  // Makes copies of pages so that the first `slots` slots of the GPU will do: first of those that have to
  // fall into colder tiers, by make_room's rules, then of those in the slots behind, in the slots before.
  // nullptr when there is no room; then, and on a throw, nothing changed. No page is locked.
  [[nodiscard]] std::unique_ptr<Clearing> stage_clearing(std::size_t slots, const Limits& limits);
  // Nothing changed, unless a device call fails now: then pages that had to go are gone where they had to go.
  void undo_clearing(Clearing& staged, const Limits& limits) noexcept;
  // The copies are the pages.
  void commit_clearing(Clearing& staged) noexcept;
  // After the memory of the GPU pool has changed, and what lay in it beyond is cleared. used: an entry for
  // each slot, whatever it says.
  void settle_pool(std::vector<bool>& used) noexcept;
  // Pages that sequences hold: in the tier; with a place there once what is staged is done; and how many more
  // can fall below the GPU when all else there makes way.
  [[nodiscard]] std::size_t held_in(Tier tier) const noexcept { return held(tier).size(); }
  [[nodiscard]] std::size_t held_places(Tier tier, const Clearing* staged) const noexcept;
  [[nodiscard]] std::size_t room_below() const noexcept;
  // Drops reusable pages of the tier, the first to leave it first, until it is below its ceiling.
  void drop_beyond(Tier tier) noexcept;

  [[nodiscard]] std::size_t pages_in(Tier tier) const noexcept;
  [[nodiscard]] std::size_t pages_with(Status status) const noexcept;
  [[nodiscard]] const CacheCounters& counters() const noexcept { return counters_; }
  [[nodiscard]] std::size_t page_bytes() const noexcept { return page_bytes_; }
  [[nodiscard]] GpuPool& gpu() noexcept { return gpu_; }
  [[nodiscard]] const GpuPool& gpu() const noexcept { return gpu_; }
  // Where the pages of a tier outside the GPU lie, those without contents left out; none for the GPU's tiers.
  [[nodiscard]] std::vector<PageEnd> resting(Tier tier) const;
  [[nodiscard]] HostStore& host() noexcept { return host_; }
  [[nodiscard]] const HostStore& host() const noexcept { return host_; }
  [[nodiscard]] const DiskStore* disk() const noexcept { return disk_ ? &*disk_ : nullptr; }
  [[nodiscard]] const ColdPool* cold_gpu() const noexcept { return cold_gpu_ ? &*cold_gpu_ : nullptr; }
  // nullptr when there is no such tier, or `tier` is not cold.
  [[nodiscard]] const ColdStore* store(Tier tier) const noexcept;
  // Gives back what cold tiers have committed and do not use.
  void trim() noexcept;
  [[nodiscard]] PageMover& mover() noexcept { return mover_; }
  [[nodiscard]] const PageMover& mover() const noexcept { return mover_; }

 private:
  struct Fall {
    Page* page;
    Tier to;
  };
  struct Eviction {
    std::vector<Fall> falls;
    std::vector<Page*> drops;
  };
  // Pages that must leave their tiers, in the order of eviction.
  struct Falling {
    std::vector<Page*> droppable;
    std::vector<Page*> held;
  };
  struct Room {
    std::size_t places = 0;
    bool displaces = false;  // may be made larger at the cost of pages that are there
  };
  using Rooms = std::array<Room, tier_count>;
  // --- page_eviction.cpp ---
  [[nodiscard]] Rooms rooms(std::span<Page* const> arriving) const noexcept;
  // nullopt when the GPU cannot get n free slots with that much room.
  [[nodiscard]] std::optional<Eviction> plan_eviction(std::size_t n, const Rooms& rooms) const;
  [[nodiscard]] Falling victims(Tier tier, std::size_t limit) const;
  void settle(Tier tier, const Room& room, Falling& falling, Eviction& plan) const;
  // --- page_tiers.cpp ---
  // Moves those of `arriving` that lie in the cold tier on the GPU to the host, for their places. False when
  // the machine has no room.
  [[nodiscard]] bool step_aside(std::span<Page* const> arriving, const Limits& limits);
  // Whether these would not all find a place in the cold tier on the GPU.
  [[nodiscard]] bool crowds_cold_gpu(const Eviction& plan) const noexcept;
  // Empty, or the tier that had less than its room.
  [[nodiscard]] std::optional<Tier> ensure_places(std::span<const Fall> falls);
  // Less than the ceiling is to be had there: what is committed.
  [[nodiscard]] Room committed_room(Tier tier, const Room& wanted) const noexcept;
  // Runs it, again and again while a codec refuses a page: that one stays where it is, another has to go.
  void past_refusals(const std::function<void()>& attempt);
  // Takes places and makes the copies; all of them or, on a throw, none.
  [[nodiscard]] std::vector<Place> copy_down(std::span<const Fall> falls, const Limits& limits);
  void settle_fall(const Fall& one, Place place) noexcept;
  void fall(std::span<const Fall> falls, const Limits& limits);
  void drop_all(std::span<Page* const> pages) noexcept;
  [[nodiscard]] bool evict_for(std::size_t n, const Limits& limits, std::span<Page* const> arriving);
  // --- page_resize.cpp ---
  [[nodiscard]] std::optional<Eviction> plan_clearing(std::size_t slots);
  void plan_relocations(Clearing& staged, std::size_t slots);
  void copy_relocations(Clearing& staged, const Limits& limits);
  // Files the page in the list that its status and tier ask for, as the newest.
  void file(Page& page) noexcept;
  void set_status(Page& page) noexcept;
  void free_page(Page& page) noexcept;
  void give_back(Place& place) noexcept;
  void set_tier(Page& page, Tier tier) noexcept;
  [[nodiscard]] ColdStore* store(Tier tier) noexcept;
  [[nodiscard]] PageEnd end_at(std::int32_t slot) const noexcept {
    return {Tier::gpu, gpu_.address(slot), 0};
  }
  [[nodiscard]] PageEnd end_at(Place place) const noexcept {
    return {place.tier, store(place.tier)->at(place), place.piece};
  }
  [[nodiscard]] std::vector<Page*> pages_leaving_gpu(std::span<Page* const> without);
  void give_back_saved(Page& page) noexcept;
  [[nodiscard]] EvictionQueue& droppable(Tier tier) noexcept { return droppable_[index(tier)]; }
  [[nodiscard]] const EvictionQueue& droppable(Tier tier) const noexcept { return droppable_[index(tier)]; }
  [[nodiscard]] EvictionQueue& held(Tier tier) noexcept { return held_[index(tier)]; }
  [[nodiscard]] const EvictionQueue& held(Tier tier) const noexcept { return held_[index(tier)]; }
  [[nodiscard]] static constexpr std::size_t index(Tier tier) noexcept {
    return static_cast<std::size_t>(tier);
  }

  std::shared_ptr<Device> device_;
  std::shared_ptr<HostPool> pool_;
  std::size_t page_bytes_;
  GpuPool gpu_;
  std::optional<ColdPool> cold_gpu_;
  HostStore host_;
  std::optional<DiskStore> disk_;
  PageMover mover_;
  PageWatcher& watcher_;
  Records<Page> pages_;
  std::array<EvictionQueue, tier_count> droppable_;  // by tier
  std::array<EvictionQueue, tier_count> held_;
  std::size_t locked_ = 0;
  std::size_t scratch_ = 0;
  std::array<std::size_t, tier_count> in_tier_{};
  std::array<std::size_t, tier_count> saved_in_{};  // pages with a saved copy, by its tier
  std::vector<Page*> saved_order_;                  // empty, or all pages with a saved copy
  CacheCounters counters_;
};

}  // namespace torpor::kv
