// A small KV cache on a host device, and sequences whose pages carry contents that can be checked.
//
// A page of 8 KiB is 4 tokens; a granule of 64 KiB is 8 slots (on a GPU both are larger). Every page is
// filled with a pattern that follows from the scope and all tokens up to its end, so that a page that is
// shared, moved or restored has one right content.
#pragma once

#include <atomic>
#include <cstring>
#include <filesystem>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "check.hpp"
#include "kv_transactions.hpp"
#include "passing_device.hpp"
#include "test_device.hpp"
#include "torpor/errors.hpp"
#include "torpor/kv/kv_manager.hpp"
#include "torpor/ledger.hpp"

namespace kv_rig {

using torpor::Address;
using torpor::kv::KvManager;
using torpor::kv::KvStats;
using torpor::kv::no_slot;
using torpor::kv::Sequence;
using torpor::kv::SequenceState;
using torpor::kv::Token;
using Tokens = std::vector<Token>;

inline const std::size_t granule_bytes = test_device::granule_of(std::size_t{64} << 10);
inline const std::size_t page_bytes = granule_bytes / 8;
constexpr std::size_t block = 4;

inline torpor::kv::Layout small_layout() {
  return torpor::kv::Layout::uniform(2, 2, page_bytes / 128, torpor::kv::DType::float32, block);
}

// Passes everything on, with two differences: chunks of one granule, and as much host memory as it is told.
class ScarceDevice final : public PassingDevice {
 public:
  using PassingDevice::PassingDevice;
  std::atomic<std::size_t> host_free_bytes{SIZE_MAX / 2};
  std::vector<torpor::ByteRange> last_summed;  // what the last checksum was asked for
  std::atomic<std::size_t> maps{0};            // so far
  std::vector<torpor::ByteRange> copied_out;   // where copies off the device went, in order: pages that are
                                               // neighbours on both sides are one copy, of two pools too
  std::size_t kernel_bytes = 0;                // what kernel_copy_bytes() says

  std::size_t chunk_bytes() const noexcept override { return granularity_bytes(); }
  std::size_t kernel_copy_bytes() const noexcept override { return kernel_bytes; }
  std::size_t free_host_bytes() const override {
    return std::min<std::size_t>(host_free_bytes, PassingDevice::free_host_bytes());
  }
  void map_range(Address at, torpor::PhysicalHandle handle, std::size_t size) override {
    PassingDevice::map_range(at, handle, size);
    ++maps;
  }
  Address create_host(std::size_t size, bool pinned) override {
    if (size > host_free_bytes) throw torpor::OutOfHostMemory("scarce", size, host_free_bytes);
    host_free_bytes -= size;
    return PassingDevice::create_host(size, pinned);
  }
  void destroy_host(Address base, std::size_t size) noexcept override {
    host_free_bytes += size;
    PassingDevice::destroy_host(base, size);
  }
  void copy(std::span<const torpor::Copy> batch, torpor::StreamId stream) override {
    PassingDevice::copy(batch, stream);
    if (stream != torpor::StreamId::out) return;
    for (const torpor::Copy& one : batch) copied_out.push_back({one.destination, one.size_bytes});
  }
  std::vector<std::uint64_t> checksum(std::span<const torpor::ByteRange> ranges, torpor::StreamId stream,
                                      torpor::Deadline deadline, const torpor::StopFlag* stop) override {
    last_summed.assign(ranges.begin(), ranges.end());
    return PassingDevice::checksum(ranges, stream, deadline, stop);
  }
};

// Every read and write is counted as a call of the device, and fails when that would.
class CountedDisk final : public torpor::DiskFile {
 public:
  CountedDisk(std::shared_ptr<torpor::Device> device, std::size_t limit_bytes)
      : DiskFile(std::filesystem::temp_directory_path().string(), limit_bytes), device_(std::move(device)) {}
  std::vector<std::uint64_t> written;  // offsets, in order
  std::vector<std::uint64_t> read_from;

  void write(std::uint64_t offset, Address from, std::size_t size_bytes) override {
    count();
    DiskFile::write(offset, from, size_bytes);
    written.push_back(offset);
  }
  void read(std::uint64_t offset, Address to, std::size_t size_bytes) override {
    count();
    DiskFile::read(offset, to, size_bytes);
    read_from.push_back(offset);
  }
  // Twice, and all is as before.
  void flip_byte(std::uint64_t offset) {
    const torpor::HostBuffer buffer(device_, block_bytes, false);
    DiskFile::read(offset, buffer.base(), block_bytes);
    *reinterpret_cast<std::uint8_t*>(buffer.base() + 5) ^= 1U;
    DiskFile::write(offset, buffer.base(), block_bytes);
  }

 private:
  void count() { device_->quiesce(torpor::Clock::now() + std::chrono::seconds(30)); }
  std::shared_ptr<torpor::Device> device_;
};

// One sequence and what its pages must hold.
struct Tracked {
  std::shared_ptr<Sequence> handle;
  std::string scope;
  Tokens tokens;
};

inline std::uint64_t pattern_of(const std::string& scope, std::span<const Token> tokens) {
  std::uint64_t seed = std::hash<std::string>{}(scope);
  for (const Token token : tokens)
    seed = (seed ^ static_cast<std::uint32_t>(token)) * 0x9E3779B97F4A7C15ULL + 1;
  return seed;
}

inline std::uint64_t word_of(std::uint64_t pattern, std::size_t position) {
  return (pattern ^ position) * 0xD6E8FEB86659FD93ULL;
}

inline Tokens tokens_from(Token first, std::size_t count) {
  Tokens tokens(count);
  for (std::size_t i = 0; i < count; ++i) tokens[i] = first + static_cast<Token>(i);
  return tokens;
}

struct Options {
  std::size_t gpu_slots = 8;
  std::size_t host_slots = 0;
  std::optional<std::uint64_t> seed{};
  std::size_t pool_bytes = 0;  // host memory kept between cycles
  std::size_t device_bytes = 16 * granule_bytes;
  std::size_t disk_slots = 0;
  std::size_t disk_limit_bytes = SIZE_MAX;  // of the disk itself
  std::size_t cold_gpu_slots = 0;
  std::size_t max_gpu_slots = 0;
  std::shared_ptr<const torpor::kv::Codec> codec = torpor::kv::make_codec("identity");
};

class Rig : public KvTransactions<Rig> {
 public:
  explicit Rig(const Options& options = {})
      : near(test_device::make(granule_bytes, options.device_bytes / granule_bytes, 1)),
        memory(near),
        scarce(std::make_shared<ScarceDevice>(near)),
        device(torpor::make_faulty_device(scarce)),
        disk(std::make_shared<CountedDisk>(device, options.disk_limit_bytes)),
        ledger(std::make_unique<torpor::Ledger>(
            device,
            torpor::LedgerStorage{std::make_shared<torpor::HostPool>(device, options.pool_bytes), disk})) {
    kv = add_cache(options, "");
  }

  // One more in the same ledger, of the same tag.
  [[nodiscard]] std::shared_ptr<KvManager> add_cache(const Options& options, const std::string& name) {
    torpor::kv::KvSpec spec;
    spec.name = name;
    spec.layout = small_layout();
    spec.gpu_bytes = options.gpu_slots * page_bytes;
    spec.max_gpu_bytes = options.max_gpu_slots * page_bytes;
    spec.seed = options.seed;
    const std::size_t cold_bytes = options.codec->cold_bytes(page_bytes);
    const std::size_t block_bytes = torpor::DiskFile::block_bytes;
    spec.host_bytes = options.host_slots * cold_bytes;
    spec.disk_file = disk;
    spec.disk_bytes = options.disk_slots * torpor::round_up(cold_bytes, block_bytes);
    spec.cold_gpu_bytes = torpor::round_up(options.cold_gpu_slots * cold_bytes, granule_bytes);
    spec.own_codec = options.codec;
    auto made = KvManager::make(device, ledger->host_pool(), spec);
    ledger->add(made);
    return made;
  }

  std::shared_ptr<torpor::Device> near;  // past all wrappers
  mutable test_device::Memory memory;
  std::shared_ptr<ScarceDevice> scarce;
  std::shared_ptr<torpor::FaultyDevice> device;
  std::shared_ptr<CountedDisk> disk;
  std::unique_ptr<torpor::Ledger> ledger;
  std::shared_ptr<KvManager> kv;

  [[nodiscard]] std::size_t free_bytes() const { return device->memory_info().free_bytes; }
  [[nodiscard]] KvStats stats() const { return kv->stats(); }

  [[nodiscard]] Tracked create(const std::string& scope, const Tokens& prompt) {
    Tracked one{kv->create_sequence(scope, prompt), scope, {}};
    one.tokens.assign(prompt.begin(),
                      prompt.begin() + static_cast<std::ptrdiff_t>(one.handle->matched_tokens()));
    return one;
  }

  // Computes these tokens: room, contents, commit. False when there is no room.
  [[nodiscard]] bool extend(Tracked& one, const Tokens& tokens) {
    const std::size_t before = one.tokens.size();
    if (!one.handle->resize(before + tokens.size())) return false;
    one.tokens.insert(one.tokens.end(), tokens.begin(), tokens.end());
    const auto table = one.handle->table();
    for (std::size_t b = before / block; b * block < one.tokens.size(); ++b) {
      write(table[static_cast<std::ptrdiff_t>(b)], pattern(one, b));
    }
    one.handle->commit(tokens);
    return true;
  }

  // A new active sequence with this prompt, computed.
  [[nodiscard]] Tracked started(const std::string& scope, const Tokens& prompt) {
    Tracked one = create(scope, prompt);
    CHECK(one.handle->resume());
    CHECK(extend(one, Tokens(prompt.begin() + static_cast<std::ptrdiff_t>(one.tokens.size()), prompt.end())));
    return one;
  }

  // Of an active sequence: every page of the history holds what it must.
  [[nodiscard]] bool holds(const Tracked& one) const {
    if (one.handle->state() != SequenceState::active) return false;
    if (one.handle->history_tokens() != one.tokens.size()) return false;
    const auto table = one.handle->table();
    for (std::size_t b = 0; b * block < one.tokens.size(); ++b) {
      if (!reads(table[static_cast<std::ptrdiff_t>(b)], pattern(one, b))) return false;
    }
    return true;
  }

  [[nodiscard]] bool all_zero(const Tracked& one) const {
    const auto table = one.handle->table();
    for (std::size_t b = 0; b * block < one.tokens.size(); ++b) {
      const Address at = slot_address(table[static_cast<std::ptrdiff_t>(b)]);
      if (!memory.is_zero(at, page_bytes)) return false;
    }
    return true;
  }

 private:
  [[nodiscard]] static std::uint64_t pattern(const Tracked& one, std::size_t b) {
    return pattern_of(one.scope, std::span(one.tokens).first(std::min((b + 1) * block, one.tokens.size())));
  }
  [[nodiscard]] Address slot_address(std::int32_t slot) const {
    CHECK(slot >= 0 && static_cast<std::size_t>(slot) < kv->slots());
    return kv->address(0, "k") + static_cast<std::size_t>(slot) * page_bytes;
  }
  [[nodiscard]] static std::vector<std::uint64_t> words_of(std::uint64_t pattern) {
    std::vector<std::uint64_t> words(page_bytes / 8);
    for (std::size_t i = 0; i < words.size(); ++i) words[i] = word_of(pattern, i);
    return words;
  }
  void write(std::int32_t slot, std::uint64_t pattern) {
    memory.write(slot_address(slot), words_of(pattern).data(), page_bytes);
  }
  [[nodiscard]] bool reads(std::int32_t slot, std::uint64_t pattern) const {
    return memory.holds(slot_address(slot), words_of(pattern).data(), page_bytes);
  }
};

// Runs `attempt` with the 1st, 2nd, 3rd … device call of it failing, each on a world of its own that `make`
// makes, until one attempt meets no fault. After each fault `unchanged` looks at the world; then `attempt`
// must succeed.
template <typename World>
int sweep_faults(std::function<World()> make, std::function<void(World&)> attempt,
                 std::function<void(World&)> unchanged) {
  for (int k = 1;; ++k) {
    World world = make();
    world.rig->device->fail_at(static_cast<std::uint64_t>(k));
    bool failed = false;
    try {
      attempt(world);
    } catch (const torpor::DeviceError&) {
      failed = true;
    }
    world.rig->device->fail_at(0);
    if (!failed) return k - 1;
    unchanged(world);
    attempt(world);
  }
}

}  // namespace kv_rig
