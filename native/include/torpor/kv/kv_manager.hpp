// KvManager: the paged KV cache of one rank: sequences over a PageCache, and its sleep and wake.
//
// One lock. It is given up while a sleep or wake copies; then, and until the transaction is over, sequences
// can be read and closed (closing takes effect afterwards) and everything else is Misuse.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "torpor/host_pool.hpp"
#include "torpor/kv/layout.hpp"
#include "torpor/kv/page_cache.hpp"
#include "torpor/kv/sequence.hpp"
#include "torpor/participant.hpp"

namespace torpor::kv {

struct KvSpec {
  Layout layout;
  std::size_t gpu_bytes = 0;
  std::size_t host_bytes = 0;  // ceiling of the host tier; 0 = none
  std::string tag = "kv_cache";
  std::string name;
  RestoreMode restore = RestoreMode::none;
  std::optional<std::uint64_t> seed;
  std::chrono::seconds move_timeout{60};  // of the moves that sequences ask for
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
  [[nodiscard]] std::size_t slots() const noexcept { return cache_.gpu().slots(); }
  // Address of slot 0's part of this layer and role; slots are page_bytes apart. Never changes (S1).
  [[nodiscard]] Address address(std::size_t layer, Role role) const;

  // How many leading tokens of this prompt a new sequence would find. Changes nothing, not even the order of
  // use.
  [[nodiscard]] std::size_t probe(const std::string& scope, std::span<const Token> prompt) const;
  [[nodiscard]] std::shared_ptr<Sequence> create_sequence(const std::string& scope,
                                                          std::span<const Token> prompt);
  // Returns how many tokens were known.
  std::size_t forget_prefixes();
  [[nodiscard]] KvStats stats() const;

  [[nodiscard]] const std::string& tag() const noexcept override { return spec_.tag; }
  [[nodiscard]] const std::string& name() const noexcept override { return spec_.name; }
  [[nodiscard]] bool parked() const noexcept override { return parked_; }
  [[nodiscard]] RestoreMode default_mode() const noexcept override { return spec_.restore; }
  [[nodiscard]] Usage usage() const override;
  [[nodiscard]] Item plan_sleep(RestoreMode mode) const override;
  [[nodiscard]] Item plan_wake() const override;
  void stage_sleep(const Item& item, UndoStack& undo, StageContext& context) override;
  void stage_wake(const Item& item, UndoStack& undo, StageContext& context) override;
  std::size_t commit_sleep() override;
  void commit_wake() noexcept override;
  void publish() noexcept override;

 private:
  friend class Sequence;
  enum class Stage : std::uint8_t { none, sleep, sleep_committing, wake, wake_committed };

  // --- kv_manager.cpp, kv_sequences.cpp; the lock is held ---
  void require_open(const SequenceRecord& record, const char* call) const;
  // Ends a committed wake that nobody published yet; Misuse while something is staged.
  void require_settled(const char* call);
  [[nodiscard]] std::vector<Node*> match(const std::string& scope, std::span<const Token> prompt) const;
  [[nodiscard]] std::shared_ptr<Sequence> open(std::shared_ptr<SequenceRecord> record);
  [[nodiscard]] bool resume(SequenceRecord& record);
  void suspend(SequenceRecord& record);
  [[nodiscard]] bool resize(SequenceRecord& record, std::size_t capacity_tokens);
  [[nodiscard]] bool grow(SequenceRecord& record, std::size_t blocks);
  void commit(SequenceRecord& record, std::span<const Token> tokens);
  void publish_blocks(SequenceRecord& record);
  void close(SequenceRecord& record) noexcept;
  void let_go(SequenceRecord& record, std::size_t first_block) noexcept;
  void begin_epoch() noexcept;
  std::size_t forget_all() noexcept;
  void drop(Page& page) noexcept override;
  void moved(const Page& page) noexcept override;
  [[nodiscard]] std::size_t blocks_for(std::size_t tokens) const noexcept;
  [[nodiscard]] kv::Limits call_limits() const { return {Clock::now() + spec_.move_timeout, nullptr}; }

  // --- kv_sleep.cpp; the lock is held ---
  [[nodiscard]] Item item_of(Action action, RestoreMode mode) const;
  void write_tables() noexcept;
  void clear_tables() noexcept;
  void close_pending() noexcept;
  void lose_contents(bool zero) noexcept;
  void publish_wake() noexcept;
  void undo_sleep() noexcept;
  void undo_wake() noexcept;

  const std::shared_ptr<Device> device_;
  const KvSpec spec_;
  const std::shared_ptr<HostPool> host_pool_;
  mutable std::mutex mutex_;
  PrefixTree prefixes_;
  PageCache cache_;
  std::map<std::uint64_t, std::shared_ptr<SequenceRecord>> sequences_;  // not closed
  std::vector<std::shared_ptr<SequenceRecord>> pending_;                // closed while something was staged;
                                                                        // capacity: all open sequences
  std::uint64_t last_id_ = 0;
  std::uint64_t epoch_ = 0;
  std::uint64_t lookup_tokens_ = 0;
  std::uint64_t hits_tokens_ = 0;
  Stage stage_ = Stage::none;
  RestoreMode staged_mode_ = RestoreMode::none;
  RestoreMode mode_ = RestoreMode::none;  // in force while parked
  std::atomic<bool> parked_{false};
};

}  // namespace torpor::kv
