// Which device the rigs make, by TORPOR_TEST_DEVICE:
//
//   host   (or nothing) a host device: its memory is read and written in place
//   far    the same with the granules of a GPU, and out of the CPU's reach, as a GPU's is
//   cuda   GPU 0; of it as much as a test asks for, kept by books of its own
//
// Sizes follow from the granule, so that a test has as many granules and pages wherever it runs.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "passing_device.hpp"
#include "process.hpp"
#include "torpor/errors.hpp"

namespace test_device {

using torpor::Address;

enum class Where : std::uint8_t { host, far, cuda };

inline Where where() {
  const char* const said = std::getenv("TORPOR_TEST_DEVICE");
  const std::string name = said == nullptr ? "host" : said;
  if (name == "host") return Where::host;
  if (name == "far") return Where::far;
  if (name == "cuda") return Where::cuda;
  check::fail(__FILE__, __LINE__, "TORPOR_TEST_DEVICE is '" + name + "', not host, far or cuda");
}

// What a host device gets, or a GPU's.
inline std::size_t granule_of(std::size_t host_bytes) {
  return where() == Where::host ? host_bytes : std::size_t{2} << 20;
}

// Of a larger device a part with books of its own: others may use the rest, and what a driver takes for
// itself is not seen.
class Part final : public PassingDevice {
 public:
  Part(std::shared_ptr<torpor::Device> whole, std::size_t capacity_bytes, std::size_t chunk_bytes)
      : PassingDevice(std::move(whole)), capacity_bytes_(capacity_bytes), chunk_bytes_(chunk_bytes) {}

  std::size_t chunk_bytes() const noexcept override { return chunk_bytes_; }
  torpor::MemoryInfo memory_info() override {
    const std::lock_guard<std::mutex> guard(mutex_);
    return {capacity_bytes_ - taken_bytes_, capacity_bytes_};
  }
  torpor::PhysicalHandle create_physical(std::size_t size) override {
    const std::lock_guard<std::mutex> guard(mutex_);
    const std::size_t free_bytes = capacity_bytes_ - taken_bytes_;
    if (size > free_bytes) throw torpor::OutOfDeviceMemory("more than free", size, free_bytes);
    const torpor::PhysicalHandle handle = PassingDevice::create_physical(size);
    sizes_[handle] = size;
    taken_bytes_ += size;
    return handle;
  }
  void destroy_physical(torpor::PhysicalHandle handle) noexcept override {
    PassingDevice::destroy_physical(handle);
    const std::lock_guard<std::mutex> guard(mutex_);
    taken_bytes_ -= sizes_[handle];
    sizes_.erase(handle);
  }

 private:
  const std::size_t capacity_bytes_;
  const std::size_t chunk_bytes_;
  std::mutex mutex_;
  std::size_t taken_bytes_ = 0;
  std::map<torpor::PhysicalHandle, std::size_t> sizes_;
};

// A host device whose addresses mean nothing to the CPU: a test that would not run on a GPU ends at its first
// look. As a driver may, it gives each range the addresses behind the one before: pages of two pools can be
// neighbours.
class Far final : public PassingDevice {
 public:
  using PassingDevice::PassingDevice;
  torpor::DeviceKind kind() const noexcept override { return torpor::DeviceKind::cuda; }
  bool can_pin() const noexcept override { return true; }
  Address reserve_range(std::size_t size) override {
    const Address there = PassingDevice::reserve_range(size);
    const std::lock_guard<std::mutex> guard(mutex_);
    const Address base = next_;
    next_ += size;
    ranges_[base] = {there, size};
    return base;
  }
  void unreserve_range(Address base, std::size_t size) noexcept override {
    PassingDevice::unreserve_range(near(base), size);
    const std::lock_guard<std::mutex> guard(mutex_);
    ranges_.erase(base);
  }
  void map_range(Address at, torpor::PhysicalHandle handle, std::size_t size) override {
    PassingDevice::map_range(near(at), handle, size);
  }
  void unmap_range(Address at, std::size_t size) override { PassingDevice::unmap_range(near(at), size); }
  void copy(std::span<const torpor::Copy> batch, torpor::StreamId stream) override {
    std::vector<torpor::Copy> copies;
    for (torpor::Copy rest : batch) {
      while (rest.size_bytes > 0) {
        const torpor::ByteRange to = found(rest.destination);
        const torpor::ByteRange from = found(rest.source);
        const std::size_t part = std::min({rest.size_bytes, to.size_bytes, from.size_bytes});
        copies.push_back({to.at, from.at, part});
        rest = {rest.destination + part, rest.source + part, rest.size_bytes - part};
      }
    }
    PassingDevice::copy(copies, stream);
  }
  void fill(Address at, std::uint8_t value, std::size_t size, torpor::StreamId stream) override {
    PassingDevice::fill(near(at), value, size, stream);
  }
  std::vector<std::uint64_t> checksum(std::span<const torpor::ByteRange> ranges, torpor::StreamId stream,
                                      torpor::Deadline deadline, const torpor::StopFlag* stop) override {
    std::vector<torpor::ByteRange> there(ranges.begin(), ranges.end());
    for (torpor::ByteRange& one : there) one.at = near(one.at);
    return PassingDevice::checksum(there, stream, deadline, stop);
  }

 private:
  static constexpr Address first = Address{1} << 62;  // no address of a process
  // Where it really is, and how much of it from there on. Addresses of the process are what they are.
  torpor::ByteRange found(Address at) {
    if (at < first) return {at, ~std::size_t{0}};
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto behind = ranges_.upper_bound(at);
    if (behind == ranges_.begin()) throw torpor::Misuse("no range has this address");
    const auto& [base, range] = *std::prev(behind);
    if (at - base >= range.size_bytes) throw torpor::Misuse("no range has this address any more");
    return {range.at + (at - base), range.size_bytes - (at - base)};
  }
  Address near(Address at) { return found(at).at; }

  std::mutex mutex_;
  Address next_ = first;
  std::map<Address, torpor::ByteRange> ranges_;
};

// Of a host device that no other test has.
inline std::string fresh_name() {
  static std::atomic<int> count{0};
  return "test-" + std::to_string(getpid()) + "-" + std::to_string(count++);
}

// granule_bytes: of a host device; capacity and chunks are in granules of the device that there is.
inline std::shared_ptr<torpor::Device> make(std::size_t granule_bytes, std::size_t capacity_granules,
                                            std::size_t chunk_granules) {
  const std::size_t granule = granule_of(granule_bytes);
  const std::size_t capacity_bytes = capacity_granules * granule;
  const auto host = [&] { return torpor::make_host_device(fresh_name(), capacity_bytes, granule); };
  if (where() == Where::host) return host();
  std::shared_ptr<torpor::Device> whole;
  if (where() == Where::far) {
    whole = std::make_shared<Far>(host());
  } else {
    static const std::shared_ptr<torpor::Device> cuda = torpor::make_cuda_device(0);
    whole = cuda;
  }
  return std::make_shared<Part>(whole, capacity_bytes, chunk_granules * granule);
}

// What lies in a device's memory, read and written by the CPU wherever it is.
class Memory final {
 public:
  // Past all wrappers of a rig: what a test looks at is no call of the code under test.
  explicit Memory(std::shared_ptr<torpor::Device> device) : device_(std::move(device)) {}
  void write(Address at, const void* bytes, std::size_t size_bytes) {
    if (where() == Where::host) {
      std::memcpy(reinterpret_cast<void*>(at), bytes, size_bytes);
      return;
    }
    const Address buffer = room_for(size_bytes);
    std::memcpy(reinterpret_cast<void*>(buffer), bytes, size_bytes);
    move({at, buffer, size_bytes}, torpor::StreamId::in);
  }
  // Good until the next call.
  [[nodiscard]] const std::uint8_t* read(Address at, std::size_t size_bytes) {
    if (where() == Where::host) return reinterpret_cast<const std::uint8_t*>(at);
    const Address buffer = room_for(size_bytes);
    move({buffer, at, size_bytes}, torpor::StreamId::out);
    return reinterpret_cast<const std::uint8_t*>(buffer);
  }
  [[nodiscard]] bool holds(Address at, const void* bytes, std::size_t size_bytes) {
    return std::memcmp(read(at, size_bytes), bytes, size_bytes) == 0;
  }
  [[nodiscard]] bool is_zero(Address at, std::size_t size_bytes) {
    const std::uint8_t* const bytes = read(at, size_bytes);
    return std::all_of(bytes, bytes + size_bytes, [](std::uint8_t byte) { return byte == 0; });
  }
  void flip(Address at, std::uint8_t bits) {
    const auto byte = static_cast<std::uint8_t>(*read(at, 1) ^ bits);
    write(at, &byte, 1);
  }

 private:
  Address room_for(std::size_t size_bytes) {
    if (buffer_.size_bytes() < size_bytes) {
      buffer_ = {};
      buffer_ = torpor::HostBuffer(device_, torpor::round_up(size_bytes, std::size_t{2} << 20), true);
    }
    return buffer_.base();
  }
  void move(const torpor::Copy& one, torpor::StreamId stream) {
    const torpor::Deadline soon = torpor::Clock::now() + std::chrono::seconds(20);
    device_->quiesce(soon);  // what the code under test has begun may be on the other stream
    device_->copy({&one, 1}, stream);
    device_->wait(stream, soon, nullptr);
  }
  std::shared_ptr<torpor::Device> device_;
  torpor::HostBuffer buffer_;
};

// Whether nothing lies under that address of a device. Of one out of the CPU's reach its books alone tell.
inline bool is_bare(Address at) {
  return where() != Where::host || process::faults(at);
}

}  // namespace test_device
