// The faulty device: wraps another and makes chosen calls fail or dawdle. A failed call never reaches the
// inner one. New memory comes dirty.
#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <thread>

#include "torpor/device.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

constexpr int injected_code = 999;  // the driver's "unknown error"
constexpr std::uint8_t injected_byte = 0xA5;
constexpr std::chrono::seconds corruption_patience{30};

class Faulty final : public FaultyDevice {
 public:
  explicit Faulty(std::shared_ptr<Device> inner) : inner_(std::move(inner)) {}

  DeviceKind kind() const noexcept override { return inner_->kind(); }
  std::string id() const override { return inner_->id(); }
  int ordinal() const noexcept override { return inner_->ordinal(); }
  std::size_t granularity_bytes() const noexcept override { return inner_->granularity_bytes(); }
  std::size_t chunk_bytes() const noexcept override { return inner_->chunk_bytes(); }
  bool can_pin() const noexcept override { return inner_->can_pin(); }
  std::string kernels() const override { return inner_->kernels(); }
  std::size_t kernel_copy_bytes() const noexcept override { return inner_->kernel_copy_bytes(); }
  MemoryInfo memory_info() override { return inner_->memory_info(); }
  std::size_t free_host_bytes() const override { return inner_->free_host_bytes(); }

  Address reserve_range(std::size_t size_bytes) override {
    count("reserve_range", size_bytes);
    return inner_->reserve_range(size_bytes);
  }
  void unreserve_range(Address base, std::size_t size_bytes) noexcept override {
    inner_->unreserve_range(base, size_bytes);
  }
  PhysicalHandle create_physical(std::size_t size_bytes) override {
    count("create_physical", size_bytes);
    const PhysicalHandle handle = inner_->create_physical(size_bytes);
    const std::lock_guard<std::mutex> guard(mutex_);
    fresh_.insert(handle);
    return handle;
  }
  void destroy_physical(PhysicalHandle handle) noexcept override { inner_->destroy_physical(handle); }
  void map_range(Address at, PhysicalHandle handle, std::size_t size_bytes) override {
    count("map_range", size_bytes);
    inner_->map_range(at, handle, size_bytes);
    if (is_fresh(handle)) soil(at, size_bytes);
  }
  void unmap_range(Address at, std::size_t size_bytes) override {
    count("unmap_range", size_bytes);
    inner_->unmap_range(at, size_bytes);
  }
  Address create_host(std::size_t size_bytes, bool pinned) override {
    count("create_host", size_bytes);
    return inner_->create_host(size_bytes, pinned);
  }
  void destroy_host(Address base, std::size_t size_bytes) noexcept override {
    inner_->destroy_host(base, size_bytes);
  }

  void copy(std::span<const Copy> batch, StreamId stream) override {
    count("copy", batch.size());
    inner_->copy(batch, stream);
    if (!batch.empty() && corrupts()) flip_byte(batch.back(), stream);
  }
  void fill(Address at, std::uint8_t value, std::size_t size_bytes, StreamId stream) override {
    count("fill", size_bytes);
    inner_->fill(at, value, size_bytes, stream);
  }
  void wait(StreamId stream, Deadline deadline, const StopFlag* stop) override {
    count("wait", 0);
    inner_->wait(stream, deadline, stop);
  }
  std::vector<std::uint64_t> checksum(std::span<const ByteRange> ranges, StreamId stream, Deadline deadline,
                                      const StopFlag* stop) override {
    count("checksum", ranges.size());
    return inner_->checksum(ranges, stream, deadline, stop);
  }
  void quiesce(Deadline deadline) override {
    count("quiesce", 0);
    inner_->quiesce(deadline);
  }
  void begin_work() noexcept override { inner_->begin_work(); }
  void end_work() noexcept override { inner_->end_work(); }

  void fail_at(std::uint64_t k, bool forever) noexcept override {
    const std::lock_guard<std::mutex> guard(mutex_);
    fail_in_ = k;
    forever_ = forever;
    log_.clear();
  }
  void delay(const std::string& call, double seconds) override {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (seconds > 0) {
      delays_s_[call] = seconds;
    } else {
      delays_s_.erase(call);
    }
  }
  void corrupt_copy(std::uint64_t k) noexcept override {
    const std::lock_guard<std::mutex> guard(mutex_);
    corrupt_in_ = k;
  }
  std::uint64_t calls() const noexcept override {
    const std::lock_guard<std::mutex> guard(mutex_);
    return calls_;
  }
  std::vector<std::string> log() const override {
    const std::lock_guard<std::mutex> guard(mutex_);
    return log_;
  }

 private:
  [[nodiscard]] bool corrupts() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (corrupt_in_ == 0) return false;
    --corrupt_in_;
    return corrupt_in_ == 0;
  }
  [[nodiscard]] bool is_fresh(PhysicalHandle handle) {
    const std::lock_guard<std::mutex> guard(mutex_);
    return fresh_.erase(handle) > 0;
  }
  // New memory of a GPU may hold anything, that of the host device is zero: who counts on it is found here.
  // Mapped again elsewhere it keeps what is in it.
  void soil(Address at, std::size_t size_bytes) {
    inner_->fill(at, injected_byte, size_bytes, StreamId::in);
    inner_->wait(StreamId::in, Clock::now() + corruption_patience, nullptr);
  }
  void flip_byte(const Copy& copied, StreamId stream) {
    inner_->wait(stream, Clock::now() + corruption_patience, nullptr);
    const Address at = copied.destination + copied.size_bytes / 2;
    if (stream == StreamId::out || kind() == DeviceKind::host) {
      *reinterpret_cast<std::uint8_t*>(at) ^= 0x10U;
    } else {
      inner_->fill(at, injected_byte, 1, stream);
    }
  }
  void count(const char* call, std::size_t size_bytes) {
    double delay_s = 0;
    bool fails = false;
    {
      const std::lock_guard<std::mutex> guard(mutex_);
      ++calls_;
      log_.emplace_back(call);
      for (const char* name : {call, ""}) {
        const auto found = delays_s_.find(name);
        if (found != delays_s_.end()) delay_s = std::max(delay_s, found->second);
      }
      if (fail_in_ > 0) {
        fails = fail_in_ == 1;
        if (!fails || !forever_) --fail_in_;
      }
    }
    if (delay_s > 0) std::this_thread::sleep_for(std::chrono::duration<double>(delay_s));
    if (fails) throw DeviceError(std::string("injected fault in ") + call, call, injected_code, size_bytes);
  }

  const std::shared_ptr<Device> inner_;
  mutable std::mutex mutex_;
  std::uint64_t calls_ = 0;
  std::uint64_t fail_in_ = 0;
  bool forever_ = false;
  std::uint64_t corrupt_in_ = 0;
  std::map<std::string, double> delays_s_;
  std::set<PhysicalHandle> fresh_;  // never mapped yet
  std::vector<std::string> log_;
};

}  // namespace

std::shared_ptr<FaultyDevice> make_faulty_device(std::shared_ptr<Device> inner) {
  if (inner == nullptr) throw Misuse("a faulty device needs a device to wrap");
  return std::make_shared<Faulty>(std::move(inner));
}

}  // namespace torpor
