// P5, the part of the CPU: nanoseconds a page of whole stages of a sleep and of a wake, over a device that
// copies nothing. What is left is the bookkeeping, the preparation of copies for a GPU's driver included.
// `ahead_ns` came before the first copy, and nothing hides it (by the clock: an idle machine tells more).
//
//   p5_bookkeeping PAGES REPEATS [scattered|ordered] [verify]   prints a JSON object a repeat
//
// A page of 16 KiB takes 296 ns on a link of 55.3 GB/s.
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include "device/copy_batch.hpp"
#include "passing_device.hpp"
#include "torpor/kv/kv_manager.hpp"
#include "torpor/ledger.hpp"

namespace {

using namespace torpor;

constexpr std::size_t page_bytes = 512;
constexpr std::size_t block_tokens = 16;
constexpr std::size_t pages_a_sequence = std::size_t{1} << 15;
constexpr std::size_t room_bytes = std::size_t{256} << 20;

// Of this thread's own work: others may use the machine too.
double cpu_seconds() {
  timespec now{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// A host device whose batches are prepared as for a GPU and then forgotten.
class NoCopies final : public PassingDevice {
 public:
  using PassingDevice::PassingDevice;
  double mapping_s = 0;
  std::size_t copies = 0;  // after neighbours were joined

  PhysicalHandle create_physical(std::size_t size) override {
    const double start = cpu_seconds();
    const PhysicalHandle made = PassingDevice::create_physical(size);
    mapping_s += cpu_seconds() - start;
    return made;
  }
  void map_range(Address at, PhysicalHandle handle, std::size_t size) override {
    const double start = cpu_seconds();
    PassingDevice::map_range(at, handle, size);
    mapping_s += cpu_seconds() - start;
  }
  Address create_host(std::size_t size, bool pinned) override {
    const Address base = PassingDevice::create_host(size, pinned);
    host_.add(base, {size, true});
    return base;
  }
  void destroy_host(Address base, std::size_t size) noexcept override {
    host_.remove(base);
    PassingDevice::destroy_host(base, size);
  }
  void copy(std::span<const Copy> batch, StreamId) override { copies += prepare(batch, host_).pinned.size(); }
  std::vector<std::uint64_t> checksum(std::span<const ByteRange> ranges, StreamId, Deadline,
                                      const StopFlag*) override {
    return std::vector<std::uint64_t>(ranges.size());
  }

 private:
  HostRanges host_;
};

struct Sample {
  double stage_s, mapping_s, whole_s, ahead_s;
  std::size_t copies;
};

Sample operation(Ledger& ledger, NoCopies& device, Action kind, bool verify) {
  Request request;
  request.kind = kind;
  request.operation = "bench";
  request.verify = verify;
  if (kind == Action::sleep) request.restore = {{"kv_cache", RestoreMode::pinned}};
  const double start = cpu_seconds();
  const Plan plan = ledger.preflight(request);
  device.mapping_s = 0;
  device.copies = 0;
  const double began = cpu_seconds();
  const StageReport report = ledger.stage(plan, std::chrono::seconds(100));
  const double stage_s = cpu_seconds() - began;
  ledger.commit();
  ledger.publish();
  return {stage_s, device.mapping_s, cpu_seconds() - start, report.parts.ahead_s, device.copies};
}

void print(const char* kind, const Sample& one, std::size_t pages) {
  const auto ns = [pages](double seconds) { return 1e9 * seconds / static_cast<double>(pages); };
  std::printf(
      "{\"stage\": \"%s\", \"page_ns\": %.1f, \"mapping_ns\": %.1f, \"whole_ns\": %.1f, \"ahead_ns\": %.1f, "
      "\"copies\": %zu}\n",
      kind, ns(one.stage_s - one.mapping_s), ns(one.mapping_s), ns(one.whole_s), ns(one.ahead_s), one.copies);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const auto has = [&](const char* word) {
    return std::any_of(argv + 1, argv + argc,
                       [word](const char* one) { return std::strcmp(one, word) == 0; });
  };
  const std::size_t pages = argc > 2 ? std::strtoull(argv[1], nullptr, 10) : 0;
  const std::size_t repeats = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 0;
  if (pages == 0 || repeats == 0) {
    std::fprintf(stderr, "usage: p5_bookkeeping PAGES REPEATS [scattered|ordered] [verify]\n");
    return 2;
  }
  const std::size_t gpu_bytes = round_up(pages * page_bytes * 9 / 8, std::size_t{2} << 20);
  auto device =
      std::make_shared<NoCopies>(make_host_device("p5-" + std::to_string(getpid()), gpu_bytes + room_bytes));
  Ledger ledger(device, 2 * gpu_bytes);
  kv::KvSpec spec;
  spec.layout = kv::Layout::uniform(1, 1, page_bytes / (block_tokens * 4), kv::DType::float16, block_tokens);
  spec.gpu_bytes = gpu_bytes;
  if (!has("ordered")) spec.seed = 7;
  auto kv = kv::KvManager::make(device, ledger.host_pool(), spec);
  ledger.add(kv);
  std::vector<std::shared_ptr<kv::Sequence>> sequences;
  for (std::size_t done = 0; done < pages; done += pages_a_sequence) {
    sequences.push_back(kv->create_sequence("bench " + std::to_string(done), {}));
    if (!sequences.back()->resume() ||
        !sequences.back()->resize(std::min(pages_a_sequence, pages - done) * block_tokens))
      return 1;
  }
  for (std::size_t repeat = 0; repeat < repeats; ++repeat) {
    print("sleep", operation(ledger, *device, Action::sleep, has("verify")), pages);
    print("wake", operation(ledger, *device, Action::wake, has("verify")), pages);
  }
  return 0;
}
