// KvManager: the paged KV cache of one rank: sequences over one PageCache a pool group, the prefixes that
// they share, and its sleep and wake.
//
// One lock. It is given up while a sleep or wake copies; then, and until the transaction is over, sequences
// can be read and closed (closing takes effect afterwards) and everything else is Misuse.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "torpor/host_pool.hpp"
#include "torpor/kv/arrivals.hpp"
#include "torpor/kv/drops.hpp"
#include "torpor/kv/events.hpp"
#include "torpor/kv/layout.hpp"
#include "torpor/kv/page_cache.hpp"
#include "torpor/kv/page_sums.hpp"
#include "torpor/kv/prefix_match.hpp"
#include "torpor/kv/sequence.hpp"
#include "torpor/participant.hpp"

namespace torpor::kv {

struct KvSpec {
  Layout layout;
  std::size_t gpu_bytes = 0;
  std::size_t max_gpu_bytes = 0;  // addresses for resize_pools, for each pool group; 0 = as many as gpu_bytes
  std::size_t host_bytes = 0;  // ceiling of the host tier; 0 = none. Divided over the groups like gpu_bytes
  std::string tag = "kv_cache";
  std::string name;
  RestoreMode restore = RestoreMode::none;
  std::optional<std::uint64_t> seed;
  std::size_t sequence_tokens = 4096;      // what a usual sequence has: divides gpu_bytes (Layout::divide)
  std::size_t max_sequence_tokens = 0;     // 0: what fits the pools of full attention; without such, 2^20
  double max_utilisation = 1.0;            // of each pool: resume() locks no more
  bool partial_blocks = false;             // match and keep the last block in part
  std::size_t event_count = 1024;          // kept for readers
  std::chrono::seconds move_timeout{60};   // of the moves that sequences ask for
  std::size_t disk_bytes = 0;              // ceiling of the disk tier; 0 = none. Divided like host_bytes
  std::string disk_path;                   // folder of its file; "" = disk_file, or no disk
  std::shared_ptr<DiskFile> disk_file;     // of that tier and of sleeps to disk, instead of a new one
  std::size_t cold_gpu_bytes = 0;          // of the cold tier on the GPU; 0 = none. Divided likewise
  std::string codec = "identity";          // of cold pages (codec.hpp)
  std::shared_ptr<const Codec> own_codec;  // instead of one of those
};

struct KvStats {
  std::size_t slots, free_slots;
  std::size_t locked_pages, held_pages, droppable_pages;  // in all tiers
  std::size_t host_pages, host_bytes;                     // bytes: committed, saved pages too
  std::size_t host_slots;                                 // places of the host tier, used ones included
  std::size_t sequences;
  std::size_t prefix_tokens;                      // known to the prefix tree now
  std::uint64_t lookup_tokens, hits_tokens;       // of all prompts so far
  std::uint64_t evicted_pages, forgotten_pages;   // dropped for room; dropped with all prefixes
  std::uint64_t moved_out_pages, moved_in_pages;  // between the tiers, for room
  std::uint64_t moved_down_pages;                 // from one cold tier into a colder one
  std::size_t cold_gpu_pages, cold_gpu_slots;
  std::size_t disk_pages, disk_bytes, disk_slots;  // as those of the host
};

struct PoolStats {
  std::size_t page_bytes, slots, free_slots;
  std::size_t locked_pages, held_pages, droppable_pages, host_pages;
  std::size_t size_bytes, reserved_bytes;  // on the GPU: memory when awake; addresses
  std::size_t host_slots;                  // the ceiling of its part of the host tier
};

class KvManager final : public Participant,
                        private PageWatcher,
                        public std::enable_shared_from_this<KvManager> {
 public:
  // Reserves and maps the pool. Misuse, OutOfDeviceMemory.
  [[nodiscard]] static std::shared_ptr<KvManager> make(std::shared_ptr<Device> device,
                                                       std::shared_ptr<HostPool> host_pool, KvSpec spec);
  // Use make().
  KvManager(std::shared_ptr<Device> device, std::shared_ptr<HostPool> host_pool, KvSpec spec);

  [[nodiscard]] const Layout& layout() const noexcept { return spec_.layout; }
  [[nodiscard]] Device& device() const noexcept { return *device_; }
  [[nodiscard]] std::size_t slots(std::size_t group = 0) const;
  // Address of this buffer in slot 0 of its group; slots are page_bytes apart. Never changes (S1).
  [[nodiscard]] Address address(std::size_t layer, const std::string& role) const;

  // How many leading tokens of this prompt a new sequence would find. Changes nothing, not even the order of
  // use.
  [[nodiscard]] std::size_t probe(const std::string& scope, std::span<const Token> prompt) const;
  // priority: of the pages that it computes, below priority_levels; pages that it finds, or finds to be known
  // already, are raised to it and never lowered. Misuse for another number.
  [[nodiscard]] std::shared_ptr<Sequence> create_sequence(const std::string& scope,
                                                          std::span<const Token> prompt,
                                                          std::size_t priority = default_priority);
  // Chained hash of each whole block, as events name blocks.
  [[nodiscard]] std::vector<std::uint64_t> block_hashes(const std::string& scope,
                                                        std::span<const Token> tokens) const;
  [[nodiscard]] EventLog::Batch events(std::uint64_t after) const;
  // Returns how many tokens were known.
  std::size_t forget_prefixes();
  [[nodiscard]] KvStats stats() const;                      // over all pool groups
  [[nodiscard]] std::vector<PoolStats> pool_stats() const;  // by pool group

  // --- maintenance; kv_maintenance.cpp. Every sequence is suspended. Misuse while anything of the ledger is
  // parked or an operation is under way (K12), or memory of the tag is registered (K10). All or nothing: a
  // throw leaves sizes, pages and free bytes as they were. Addresses never change (S1); pages get other slots
  // (S2), and views end where they did: take them anew after growth. ---
  // The bytes of each pool group on the GPU, rounded down to whole granules; a pool that shrinks gives whole
  // chunks, so that it may keep more. Pages behind its new end move, into colder tiers where the rest is too
  // small; reusable ones that find no room there are dropped. What one pool gives goes to those that grow as
  // it is. host_bytes: the ceiling of the host tier for all groups, divided as gpu_bytes are now; reusable
  // pages beyond it are dropped. Misuse: a size that holds no page, or is beyond max_gpu_bytes, or a sequence
  // that could never resume. OutOfDeviceMemory, OutOfHostMemory: pages that are held need more; or the device
  // has less.
  void resize_pools(const std::vector<std::size_t>& gpu_bytes, std::optional<std::size_t> host_bytes = {});
  // The same for all pools together, divided as at the start.
  void resize_pools(std::size_t gpu_bytes, std::optional<std::size_t> host_bytes = {});
  // Moves whole chunks between the pool groups until they are as near as they get to these shares of the
  // bytes that there are. Empty: to what the pages of each group take, those in colder tiers too.
  void rebalance(const std::vector<double>& shares = {});

  void joins(const std::weak_ptr<Maintenance>& ledger) override;
  [[nodiscard]] const std::string& tag() const noexcept override { return spec_.tag; }
  [[nodiscard]] const std::string& name() const noexcept override { return spec_.name; }
  [[nodiscard]] bool parked() const noexcept override { return parked_; }
  [[nodiscard]] RestoreMode default_mode() const noexcept override { return spec_.restore; }
  [[nodiscard]] std::vector<HostPiece> host_pieces() const override;
  [[nodiscard]] bool supports(RestoreMode mode) const noexcept override {
    return mode != RestoreMode::disk || spec_.disk_file != nullptr;
  }
  [[nodiscard]] Usage usage() const override;
  [[nodiscard]] Item plan_sleep(RestoreMode mode) const override;
  [[nodiscard]] Item plan_sleep_within(RestoreMode mode, const SaveRoom& room) const override;
  [[nodiscard]] Item plan_wake() const override;
  [[nodiscard]] Evicted evicted() const noexcept override;
  [[nodiscard]] bool can_verify(Action action) const noexcept override;
  void stage_sleep(const Item& item, UndoStack& undo, StageContext& context) override;
  void prepare_wake(const Item& item, UndoStack& undo, StageContext& context) override;
  void stage_wake(const Item& item, UndoStack& undo, StageContext& context) override;
  std::size_t commit_sleep() override;
  void commit_wake() noexcept override;
  void publish() noexcept override;

 private:
  friend class Sequence;
  enum class Stage : std::uint8_t { none, sleep, sleep_committing, wake, wake_committed };

  // --- kv_manager.cpp, kv_sequences.cpp, kv_resume.cpp; the lock is held ---
  void require_open(const SequenceRecord& record, const char* call) const;
  // Ends a committed wake that nobody published yet; Misuse while something is staged.
  void require_settled(const char* call);
  [[nodiscard]] const Strand& strand(const SequenceRecord& record, std::size_t life_cycle) const;
  [[nodiscard]] PrefixMatch match(const std::string& scope, std::span<const Token> prompt) const;
  void adopt(SequenceRecord& record, const PrefixMatch& known) const;
  [[nodiscard]] std::shared_ptr<Sequence> open(std::shared_ptr<SequenceRecord> record);
  [[nodiscard]] bool resume(SequenceRecord& record);
  [[nodiscard]] std::vector<FreshPage> fresh_pages_of(const SequenceRecord& record) const;
  [[nodiscard]] std::vector<Arrivals> arrivals_of(const SequenceRecord& record,
                                                  std::span<const FreshPage> fresh) const;
  [[nodiscard]] bool passes_utilisation(const std::vector<Arrivals>& arrivals) const noexcept;
  [[nodiscard]] bool gather(const std::vector<Arrivals>& arrivals);
  void take(std::vector<FreshPage>& fresh, std::uint8_t priority);
  void fill(std::span<const FreshPage> fresh);
  void give_back(std::span<const FreshPage> fresh) noexcept;
  void suspend(SequenceRecord& record);
  [[nodiscard]] bool resize(SequenceRecord& record, std::size_t capacity_tokens);
  [[nodiscard]] bool grow(SequenceRecord& record, std::size_t blocks);
  void commit(SequenceRecord& record, std::span<const Token> tokens);
  void publish_blocks(SequenceRecord& record);
  void publish_partial(SequenceRecord& record) noexcept;
  [[nodiscard]] std::vector<Page*> pages_to_publish(const SequenceRecord& record, std::size_t block) const;
  void mark_scratch(SequenceRecord& record) noexcept;
  void mark_scratch_computed(SequenceRecord& record) noexcept;
  void pass_windows(SequenceRecord& record) noexcept;
  [[nodiscard]] bool snapshot(SequenceRecord& record);
  void close(SequenceRecord& record) noexcept;
  void let_go(SequenceRecord& record, std::size_t first_block) noexcept;
  void let_go_all(SequenceRecord& record) noexcept;
  void let_go_page(const SequenceRecord& record, Page& page) noexcept;
  void begin_epoch() noexcept;
  std::size_t forget_all() noexcept;
  void drop(Page& page) noexcept override;
  void moved(const Page& page) noexcept override;
  [[nodiscard]] std::size_t blocks_for(std::size_t tokens) const noexcept;
  [[nodiscard]] bool stale(std::size_t life_cycle, std::size_t block, std::size_t tokens) const noexcept {
    return cycle(life_cycle).stale(block, tokens, spec_.layout.tokens_per_block());
  }
  [[nodiscard]] const LifeCycle& cycle(std::size_t life_cycle) const noexcept {
    return spec_.layout.life_cycles()[life_cycle];
  }
  [[nodiscard]] PageCache& cache_of(std::size_t life_cycle) noexcept {
    return caches_[cycle(life_cycle).group];
  }
  [[nodiscard]] PageCache& cache_of(const Page& page) noexcept { return cache_of(page.life_cycle); }
  [[nodiscard]] kv::Limits call_limits() const { return {Clock::now() + spec_.move_timeout, nullptr}; }

  // --- kv_maintenance.cpp; the lock is held, but in maintain() ---
  void maintain(const char* call, const std::function<void()>& work);
  void require_maintainable(const std::string& call);
  [[nodiscard]] std::vector<std::size_t> sizes_of(const std::vector<std::size_t>& gpu_bytes) const;
  [[nodiscard]] std::vector<std::size_t> by_shares(std::vector<double> shares) const;
  [[nodiscard]] std::vector<std::size_t> slots_for_sequences() const;
  void reshape(const std::vector<std::size_t>& sizes, std::optional<std::size_t> host_bytes);
  void require_sequences_fit(const std::vector<std::size_t>& sizes) const;
  void set_host_ceilings(std::optional<std::size_t> host_bytes, const std::vector<std::size_t>& sizes,
                         UndoStack& undo);
  void require_host_fits(std::size_t group, const PageCache::Clearing* staged) const;
  [[noreturn]] void refuse_shrinking(std::size_t group, std::size_t slots) const;

  // --- kv_sleep.cpp, kv_wake.cpp; the lock is held ---
  [[nodiscard]] Item item_of(Action action, RestoreMode mode) const;
  void write_tables() noexcept;
  void clear_tables() noexcept;
  void close_pending() noexcept;
  void trim() noexcept;
  [[nodiscard]] Item sleep_item(RestoreMode mode, const std::optional<SaveRoom>& evicts_within) const;
  [[nodiscard]] std::size_t saved_bytes() const noexcept;
  // The ceilings of this pool group: its share of the whole.
  [[nodiscard]] CacheLimits limits_of(std::size_t group, std::size_t gpu_bytes, std::size_t groups) const;
  void lose_contents() noexcept;
  // Not held in these three, but between the copies.
  void save(PageCache& cache, PageCache::Travellers& leaving, StageContext& context);
  void restore(Tier tier, StageContext& context);
  struct Arriving;
  void begin_restore(PageCache& cache, Tier tier, Arriving& arriving, StageContext& context);
  void publish_wake() noexcept;
  void undo_sleep() noexcept;
  void undo_wake() noexcept;

  // --- kv_overflow.cpp; the lock is held ---
  struct Saving {
    std::size_t host = 0;  // places
    std::size_t disk = 0;
    std::size_t homeless = 0;  // pages that find none
  };
  struct Excess {
    std::size_t group;
    Tier tier;
  };
  [[nodiscard]] Saving saving(std::size_t group, Tier to, const Drops& drops) const noexcept;
  [[nodiscard]] SaveRoom to_commit(Tier to, const Drops& drops) const noexcept;
  [[nodiscard]] std::optional<Excess> excess(Tier to, const Drops& drops, const SaveRoom& room) const;
  [[nodiscard]] Drops choose_drops(Tier to, const SaveRoom& room) const;
  [[nodiscard]] std::optional<Refusal> refuse_without_room(Tier to, const Drops& drops, bool evicts) const;
  void add_saving(Item& item, Tier to, const Drops& drops) const;
  [[nodiscard]] PageCache::Travellers plan_save(std::size_t group, Tier to);
  void evict(std::size_t group, std::span<Page* const> pages) noexcept;
  void evict_chosen() noexcept;

  const std::shared_ptr<Device> device_;
  const KvSpec spec_;
  const std::shared_ptr<HostPool> host_pool_;
  mutable std::mutex mutex_;
  std::weak_ptr<Maintenance> ledger_;
  EventLog events_;
  PrefixTree prefixes_;
  std::deque<PageCache> caches_;  // by pool group
  std::size_t max_blocks_ = 0;    // of a sequence: what its tables have room for
  std::map<std::uint64_t, std::shared_ptr<SequenceRecord>> sequences_;  // not closed
  std::vector<std::shared_ptr<SequenceRecord>> pending_;                // closed while something was staged;
                                                                        // capacity: all open sequences
  std::uint64_t last_id_ = 0;
  std::uint64_t epoch_ = 0;
  std::uint64_t lookup_tokens_ = 0;
  std::uint64_t hits_tokens_ = 0;
  PageSums sums_;               // of a sleep with checksums, until its wake is over
  std::optional<Drops> drops_;  // of the staged sleep: dropped at its commit
  Evicted evicted_;             // by the last sleep
  Stage stage_ = Stage::none;
  RestoreMode staged_mode_ = RestoreMode::none;
  RestoreMode mode_ = RestoreMode::none;  // in force while parked
  std::atomic<bool> parked_{false};
};

}  // namespace torpor::kv
