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
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "torpor/device.hpp"
#include "torpor/kv/gpu_pool.hpp"
#include "torpor/kv/host_store.hpp"
#include "torpor/kv/page.hpp"
#include "torpor/kv/page_move.hpp"
#include "torpor/kv/records.hpp"

namespace torpor::kv {

struct CacheLimits {
  std::size_t page_bytes;
  std::size_t gpu_bytes;
  std::size_t host_bytes;
  std::optional<std::uint64_t> seed;
};

// Counted since the start.
struct CacheCounters {
  std::uint64_t evicted_pages = 0;    // dropped for room
  std::uint64_t forgotten_pages = 0;  // dropped because all prefixes were
  std::uint64_t moved_out_pages = 0;  // GPU to host
  std::uint64_t moved_in_pages = 0;   // host to GPU
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
  PageCache(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool, const CacheLimits& limits,
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

  // --- room and moves ---
  // Frees GPU slots until n are free: the longest unused pages go to the host tier, droppable ones first;
  // droppable ones that find no room there are dropped. False when that is not enough; then nothing changed.
  [[nodiscard]] bool make_room(std::size_t n, const Limits& limits);
  // Whether make_room(n) would do, if the machine gives the host tier what is below its ceiling.
  [[nodiscard]] bool could_make_room(std::size_t n) const;
  // Brings pages of the host tier to the GPU. There must be room.
  void bring_in(std::span<Page* const> pages, const Limits& limits);
  // A new page, held and locked once. There must be a free slot. bad_alloc: then nothing changed.
  [[nodiscard]] Page& take_locked(std::uint16_t life_cycle = 0);

  // --- the whole cache at once ---
  // The bytes of every page are gone; `zero`: they will read zero. All prefixes are forgotten already: what
  // is left are pages that sequences use. For a parked pool, or one that is being parked.
  void discard(bool zero) noexcept;

  // --- sleep and wake ---
  // What a sleep saves: the pages of the GPU tier that are not scratch.
  [[nodiscard]] std::size_t saved_pages() const noexcept { return pages_in(Tier::gpu) - scratch_; }
  // Gives every one of them a host place of its own beside its slot, and returns the copies to make.
  // OutOfHostMemory; then nothing changed.
  [[nodiscard]] std::vector<PageMove> plan_save();
  // The pages of the GPU tier leave their host places: a save was taken back, or a restore is published.
  void drop_saved() noexcept;
  // The pages of the GPU tier leave their slots: the pool is being parked, or a restore was taken back.
  void leave_slots() noexcept;
  // Gives every page of the GPU tier a slot, and returns the copies to make for those that were saved.
  [[nodiscard]] std::vector<PageMove> plan_restore();

  [[nodiscard]] std::size_t pages_in(Tier tier) const noexcept;
  [[nodiscard]] std::size_t pages_with(Status status) const noexcept;
  [[nodiscard]] const CacheCounters& counters() const noexcept { return counters_; }
  [[nodiscard]] std::size_t page_bytes() const noexcept { return page_bytes_; }
  [[nodiscard]] GpuPool& gpu() noexcept { return gpu_; }
  [[nodiscard]] const GpuPool& gpu() const noexcept { return gpu_; }
  // Where the pages of the host tier lie, those without contents left out.
  [[nodiscard]] std::vector<ByteRange> host_tier();
  [[nodiscard]] HostStore& host() noexcept { return host_; }
  [[nodiscard]] const HostStore& host() const noexcept { return host_; }

 private:
  struct Eviction {
    std::vector<Page*> move;  // to the host
    std::vector<Page*> drop;
    std::size_t displace = 0;  // droppable host pages that must go first
  };
  // nullopt when the GPU cannot get n free slots with that much room on the host.
  [[nodiscard]] std::optional<Eviction> plan_eviction(std::size_t n, std::size_t host_room,
                                                      std::size_t displaceable) const;
  [[nodiscard]] std::optional<Eviction> settle_eviction(std::size_t n);
  void move_out(std::span<Page* const> pages, const Limits& limits);
  // Files the page in the list that its status and tier ask for, as the newest.
  void file(Page& page) noexcept;
  void set_status(Page& page) noexcept;
  void free_page(Page& page) noexcept;
  void give_back_place(Page& page) noexcept;
  void set_tier(Page& page, Tier tier) noexcept;
  [[nodiscard]] PageMove as_move(std::int32_t slot, Place place) const noexcept;
  std::size_t fill_and_move(std::span<Page* const> pages, std::span<const std::int32_t> slots,
                            const Limits& limits);
  [[nodiscard]] std::vector<Page*> gpu_pages();
  [[nodiscard]] PageList& droppable(Tier tier) noexcept { return droppable_[static_cast<std::size_t>(tier)]; }
  [[nodiscard]] PageList& held(Tier tier) noexcept { return held_[static_cast<std::size_t>(tier)]; }

  std::shared_ptr<Device> device_;
  std::size_t page_bytes_;
  GpuPool gpu_;
  HostStore host_;
  PageWatcher& watcher_;
  Records<Page> pages_;
  std::array<PageList, 2> droppable_;  // by tier
  std::array<PageList, 2> held_;
  std::size_t locked_ = 0;
  std::size_t scratch_ = 0;
  std::array<std::size_t, 2> in_tier_{};
  CacheCounters counters_;
};

}  // namespace torpor::kv
