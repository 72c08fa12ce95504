// A ledger over a small faulty host device, with regions whose contents are known.
#pragma once

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.hpp"
#include "disk_rig.hpp"
#include "test_device.hpp"
#include "torpor/device.hpp"
#include "torpor/errors.hpp"
#include "torpor/ledger.hpp"

namespace rig {

using namespace torpor;
using test_device::fresh_name;

inline const std::size_t grain = test_device::granule_of(std::size_t{16} << 10);
// What the device maps at once: as the host device has it, or as little as still is a chunk.
inline const std::size_t chunk_grains = test_device::where() == test_device::Where::host ? 32 : 2;
inline const std::size_t chunk = chunk_grains * grain;
inline const std::size_t capacity = 16 * chunk;
constexpr std::size_t disk_limit = std::size_t{256} << 20;
constexpr std::chrono::seconds patience{20};
using Modes = std::map<std::string, RestoreMode>;

inline std::uint8_t expected_byte(std::size_t at, int seed) {
  return static_cast<std::uint8_t>((at * 31 + at / 257 + static_cast<std::size_t>(seed) * 97) % 251 + 1);
}

// Made once for each size and seed.
inline const std::vector<std::uint8_t>& expected_bytes(std::size_t size_bytes, int seed) {
  static std::map<std::pair<std::size_t, int>, std::vector<std::uint8_t>> known;
  std::vector<std::uint8_t>& bytes = known[{size_bytes, seed}];
  for (std::size_t at = bytes.size(); at < size_bytes; ++at) bytes.push_back(expected_byte(at, seed));
  return bytes;
}

// Waits until the device has been asked for that call (since fail_at): then a delayed one is under way.
inline void until_called(const FaultyDevice& device, const std::string& call) {
  const auto give_up = Clock::now() + patience;
  for (;;) {
    const std::vector<std::string> log = device.log();
    if (std::find(log.begin(), log.end(), call) != log.end()) return;
    if (Clock::now() > give_up) check::fail(__FILE__, __LINE__, "never called: " + call);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

struct Rig {
  explicit Rig(std::size_t host_pool_bytes = 0, std::size_t capacity_bytes = capacity)
      : host(test_device::make(grain, capacity_bytes / grain, chunk_grains)),
        memory(host),
        faulty(make_faulty_device(host)),
        disk(std::make_shared<FaultyDisk>(disk_folder(), disk_limit)),
        ledger(std::make_unique<Ledger>(
            faulty, LedgerStorage{std::make_shared<HostPool>(faulty, host_pool_bytes), disk})) {}

  std::shared_ptr<Region> region(const std::string& tag, std::size_t size_bytes, RegionSpec more = {}) {
    more.tag = tag;
    more.size_bytes = size_bytes;
    regions.push_back(ledger->create_region(std::move(more)));
    write(*regions.back(), static_cast<int>(regions.size()));
    return regions.back();
  }
  void write(const Region& region, int seed) const {
    memory.write(region.address(), expected_bytes(region.size_bytes(), seed).data(), region.size_bytes());
  }
  [[nodiscard]] bool holds(const Region& region, int seed) const {
    return memory.holds(region.address(), expected_bytes(region.size_bytes(), seed).data(),
                        region.size_bytes());
  }
  [[nodiscard]] bool is_zero(const Region& region) const {
    return memory.is_zero(region.address(), region.size_bytes());
  }
  // Region i was written with seed i + 1.
  [[nodiscard]] bool all_hold() const {
    for (std::size_t i = 0; i < regions.size(); ++i) {
      if (!holds(*regions[i], static_cast<int>(i) + 1)) return false;
    }
    return true;
  }

  [[nodiscard]] Plan plan(Action kind, const Modes& modes = {}, std::vector<std::string> tags = {}) const {
    Request request{.kind = kind, .operation = "op", .tags = std::nullopt, .restore = modes};
    request.verify = verify;
    if (!tags.empty()) request.tags = std::move(tags);
    return ledger->preflight(std::move(request));
  }
  StageReport stage(Action kind, const Modes& modes = {}, std::vector<std::string> tags = {}) const {
    return ledger->stage(plan(kind, modes, std::move(tags)), patience);
  }
  CommitReport finish() const {
    const CommitReport report = ledger->commit();
    ledger->publish();
    return report;
  }
  CommitReport sleep(const Modes& modes = {}, std::vector<std::string> tags = {}) const {
    (void)stage(Action::sleep, modes, std::move(tags));
    return finish();
  }
  CommitReport wake(std::vector<std::string> tags = {}) const {
    (void)stage(Action::wake, {}, std::move(tags));
    return finish();
  }

  [[nodiscard]] std::size_t free_bytes() const { return host->memory_info().free_bytes; }
  [[nodiscard]] std::size_t host_bytes() const {
    std::size_t total = 0;
    for (const Usage& usage : ledger->memory()) total += usage.host_bytes;
    return total;
  }
  [[nodiscard]] std::size_t disk_bytes() const {
    std::size_t total = 0;
    for (const Usage& usage : ledger->memory()) total += usage.disk_bytes;
    return total;
  }
  [[nodiscard]] LedgerPhase phase() const { return ledger->status().phase; }

  std::shared_ptr<Device> host;  // what the faulty one wraps
  mutable test_device::Memory memory;
  std::shared_ptr<FaultyDevice> faulty;
  std::shared_ptr<FaultyDisk> disk;
  std::unique_ptr<Ledger> ledger;
  std::vector<std::shared_ptr<Region>> regions;
  bool verify = false;  // of every plan from here on
};

}  // namespace rig
