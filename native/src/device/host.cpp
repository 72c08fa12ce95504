// The host device: a GPU's memory played by RAM.
//
// Physical memory is a memfd whose pages fallocate commits at once, so that no later touch meets a full
// machine. Mapped means MAP_FIXED over a reservation of PROT_NONE; unmapped means PROT_NONE again, so that
// the address stays taken and a stray access is a SIGSEGV. Destroying punches the pages out before closing:
// they are gone even where a forked child still holds the file.
#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "host_memory.hpp"
#include "host_registry.hpp"
#include "host_reservation.hpp"
#include "text.hpp"
#include "torpor/checksum.hpp"
#include "torpor/device.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

// 64 MiB of the usual 2 MiB. A device of small granules has small chunks, so that tests see several of them
// cheaply.
constexpr std::size_t granules_per_chunk = 32;

constexpr std::chrono::microseconds rest_polling{100};

void* pointer(Address at) noexcept {
  return reinterpret_cast<void*>(at);
}

// Taken, but with nothing behind it. False where the kernel refuses; errno says why.
bool empty_range(Address at, std::size_t size_bytes) noexcept {
  return mmap(pointer(at), size_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
              0) != MAP_FAILED;
}

[[noreturn]] void fail(const std::string& what, const char* call, std::size_t size_bytes) {
  const int code = errno;
  throw DeviceError(what + ": " + errno_text(code), call, code, size_bytes);
}

class HostDevice final : public Device {
 public:
  HostDevice(const std::string& name, std::size_t capacity_bytes, std::size_t granularity_bytes)
      : name_(name), granularity_bytes_(granularity_bytes), registry_(name, capacity_bytes) {}

  DeviceKind kind() const noexcept override { return DeviceKind::host; }
  std::string id() const override { return "host:" + name_; }
  int ordinal() const noexcept override { return 0; }
  std::size_t granularity_bytes() const noexcept override { return granularity_bytes_; }
  std::size_t chunk_bytes() const noexcept override { return granules_per_chunk * granularity_bytes_; }
  bool can_pin() const noexcept override { return false; }
  MemoryInfo memory_info() override { return registry_.info(); }

  Address reserve_range(std::size_t size_bytes) override;
  void unreserve_range(Address base, std::size_t size_bytes) noexcept override;
  PhysicalHandle create_physical(std::size_t size_bytes) override;
  void destroy_physical(PhysicalHandle handle) noexcept override;
  void map_range(Address at, PhysicalHandle handle, std::size_t size_bytes) override;
  void unmap_range(Address at, std::size_t size_bytes) override;
  Address create_host(std::size_t size_bytes, bool pinned) override;
  void destroy_host(Address base, std::size_t size_bytes) noexcept override;

  void copy(std::span<const Copy> batch, StreamId stream) override;
  void fill(Address at, std::uint8_t value, std::size_t size_bytes, StreamId stream) override;
  void wait(StreamId stream, Deadline deadline, const StopFlag* stop) override;
  std::vector<std::uint64_t> checksum(std::span<const ByteRange> ranges, StreamId stream, Deadline deadline,
                                      const StopFlag* stop) override;
  void quiesce(Deadline deadline) override;
  void begin_work() noexcept override { ++working_; }
  void end_work() noexcept override { --working_; }

 private:
  // Counts as work in flight while it lives.
  struct Working {
    explicit Working(HostDevice& device) noexcept : device_(device) { device_.begin_work(); }
    Working(const Working&) = delete;
    Working& operator=(const Working&) = delete;
    ~Working() { device_.end_work(); }
    HostDevice& device_;
  };
  struct Pages {
    int file;
    std::size_t size_bytes;
    Address mapped_at;  // 0 while not mapped
  };
  struct Mapped {
    std::size_t size_bytes;
    PhysicalHandle handle;
  };
  using Ranges = std::map<Address, std::size_t>;

  void check_size(std::size_t size_bytes, const char* call) const;
  [[nodiscard]] bool is_mapped(Address at, std::size_t size_bytes) const;
  [[nodiscard]] static bool lies_within_one(const Ranges& ranges, Address at, std::size_t size_bytes);
  void check_copy(const Copy& one) const;

  const std::string name_;
  const std::size_t granularity_bytes_;
  HostRegistry registry_;
  HostReservation host_memory_;
  std::atomic<std::size_t> working_{0};
  mutable std::mutex mutex_;
  PhysicalHandle next_handle_ = 1;
  Ranges reserved_;
  std::map<Address, Mapped> mapped_;
  Ranges host_;
  std::unordered_map<PhysicalHandle, Pages> pages_;
};

void HostDevice::check_size(std::size_t size_bytes, const char* call) const {
  if (size_bytes > 0 && size_bytes % granularity_bytes_ == 0) return;
  throw Misuse(std::string(call) + ": " + std::to_string(size_bytes) +
               " bytes is not a positive multiple of the " + "granularity, " +
               std::to_string(granularity_bytes_) + "; round up");
}

bool HostDevice::lies_within_one(const Ranges& ranges, Address at, std::size_t size_bytes) {
  auto after = ranges.upper_bound(at);
  if (after == ranges.begin()) return false;
  --after;
  return at + size_bytes <= after->first + after->second;
}

bool HostDevice::is_mapped(Address at, std::size_t size_bytes) const {
  const Address end = at + size_bytes;
  while (at < end) {
    auto after = mapped_.upper_bound(at);
    if (after == mapped_.begin()) return false;
    --after;
    const Address border = after->first + after->second.size_bytes;
    if (at >= border) return false;
    at = border;
  }
  return true;
}

Address HostDevice::reserve_range(std::size_t size_bytes) {
  check_size(size_bytes, "reserve_range");
  const std::size_t length = size_bytes + granularity_bytes_;
  void* raw = mmap(nullptr, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED)
    fail("cannot reserve " + bytes_text(size_bytes) + " of addresses", "mmap", size_bytes);
  const Address start = reinterpret_cast<Address>(raw);
  const Address base = round_up(start, granularity_bytes_);
  if (base > start) munmap(raw, base - start);
  munmap(pointer(base + size_bytes), start + length - (base + size_bytes));
  const std::lock_guard<std::mutex> guard(mutex_);
  reserved_.emplace(base, size_bytes);
  return base;
}

void HostDevice::unreserve_range(Address base, std::size_t size_bytes) noexcept {
  if (registry_.foreign()) return;
  const std::lock_guard<std::mutex> guard(mutex_);
  reserved_.erase(base);
  munmap(pointer(base), size_bytes);
}

PhysicalHandle HostDevice::create_physical(std::size_t size_bytes) {
  check_size(size_bytes, "create_physical");
  registry_.take(size_bytes);
  const std::size_t room_bytes = available_host_bytes();
  const int file = room_bytes < size_bytes ? -1 : memfd_create("torpor-pages", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(size_bytes)) != 0 ||
      fallocate(file, 0, 0, static_cast<off_t>(size_bytes)) != 0) {
    const int code = errno;
    if (file >= 0) close(file);
    registry_.give(size_bytes);
    if (room_bytes >= size_bytes && code != ENOMEM && code != ENOSPC) {
      errno = code;
      fail("cannot commit " + bytes_text(size_bytes) + " for host device '" + name_ + "'", "fallocate",
           size_bytes);
    }
    throw OutOfDeviceMemory("needed " + bytes_text(size_bytes) + ", but the machine under host device '" +
                                name_ + "' has only " + bytes_text(room_bytes) +
                                " to commit; give the device less capacity",
                            size_bytes, room_bytes);
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  const PhysicalHandle handle = next_handle_++;
  pages_.emplace(handle, Pages{file, size_bytes, 0});
  return handle;
}

void HostDevice::destroy_physical(PhysicalHandle handle) noexcept {
  if (registry_.foreign()) return;
  std::size_t size_bytes = 0;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    const auto found = pages_.find(handle);
    if (found == pages_.end()) return;
    const Pages pages = found->second;
    if (pages.mapped_at != 0) {
      // Where the kernel has no room for that, no touch may bring pages back that nobody counts.
      const Address at = pages.mapped_at;
      if (!empty_range(at, pages.size_bytes)) mprotect(pointer(at), pages.size_bytes, PROT_NONE);
      mapped_.erase(pages.mapped_at);
    }
    fallocate(pages.file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0,
              static_cast<off_t>(pages.size_bytes));
    close(pages.file);
    size_bytes = pages.size_bytes;
    pages_.erase(found);
  }
  registry_.give(size_bytes);  // after the pages are gone: whoever sees them free can have them
}

void HostDevice::map_range(Address at, PhysicalHandle handle, std::size_t size_bytes) {
  check_size(size_bytes, "map_range");
  if (registry_.foreign())
    throw Misuse("a device does not survive a fork; make one of your own in the child");
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = pages_.find(handle);
  if (found == pages_.end()) throw Misuse("map_range: no such physical memory");
  Pages& pages = found->second;
  if (pages.size_bytes != size_bytes)
    throw Misuse("map_range: map the whole of a physical memory, or nothing");
  if (pages.mapped_at != 0) throw Misuse("map_range: this physical memory is mapped already; unmap it first");
  if (at % granularity_bytes_ != 0 || !lies_within_one(reserved_, at, size_bytes)) {
    throw Misuse("map_range: the address is not a multiple of the granularity within one reservation");
  }
  const auto next = mapped_.lower_bound(at);
  const bool meets_next = next != mapped_.end() && next->first < at + size_bytes;
  if (meets_next || is_mapped(at, 1))
    throw Misuse("map_range: something is mapped there already; unmap it first");
  if (mmap(pointer(at), size_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, pages.file, 0) ==
      MAP_FAILED) {
    fail("cannot map " + bytes_text(size_bytes), "mmap", size_bytes);
  }
  pages.mapped_at = at;
  mapped_.emplace(at, Mapped{size_bytes, handle});
}

void HostDevice::unmap_range(Address at, std::size_t size_bytes) {
  if (registry_.foreign())
    throw Misuse("a device does not survive a fork; make one of your own in the child");
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = mapped_.find(at);
  if (found == mapped_.end() || found->second.size_bytes != size_bytes) {
    throw Misuse("unmap_range: no mapping of that address and size");
  }
  if (!empty_range(at, size_bytes)) fail("cannot unmap " + bytes_text(size_bytes), "mmap", size_bytes);
  pages_.at(found->second.handle).mapped_at = 0;
  mapped_.erase(found);
}

Address HostDevice::create_host(std::size_t size_bytes, bool) {
  const Address base = host_memory_.commit(size_bytes);
  const std::lock_guard<std::mutex> guard(mutex_);
  host_.emplace(base, size_bytes);
  return base;
}

void HostDevice::destroy_host(Address base, std::size_t) noexcept {
  if (registry_.foreign()) return;  // MADV_DONTFORK: there is nothing here to free
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    host_.erase(base);
  }
  host_memory_.release(base);
}

void HostDevice::check_copy(const Copy& one) const {
  const auto known = [&](Address at) {
    return is_mapped(at, one.size_bytes) || lies_within_one(host_, at, one.size_bytes);
  };
  if (!known(one.destination) || !known(one.source)) {
    throw Misuse("copy: each side must be mapped device memory, or lie within one host buffer");
  }
  if (!is_mapped(one.destination, one.size_bytes) && !is_mapped(one.source, one.size_bytes)) {
    throw Misuse("copy: one side must be device memory");
  }
}

void HostDevice::copy(std::span<const Copy> batch, StreamId) {
  const Working working(*this);
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const Copy& one : batch) check_copy(one);
  }
  for (const Copy& one : batch) std::memmove(pointer(one.destination), pointer(one.source), one.size_bytes);
}

void HostDevice::fill(Address at, std::uint8_t value, std::size_t size_bytes, StreamId) {
  const Working working(*this);
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (!is_mapped(at, size_bytes)) throw Misuse("fill: the range must be mapped device memory");
  }
  std::memset(pointer(at), value, size_bytes);
}

// The work was done when it was submitted; how long that took is what the deadline and the flag are asked
// about.
void HostDevice::wait(StreamId, Deadline deadline, const StopFlag* stop) {
  if (stop != nullptr && stop->load()) throw Stopped("stopped before the copies were done");
  if (Clock::now() > deadline) throw DeviceBusy("copies on " + id() + " did not end within the deadline");
}

std::vector<std::uint64_t> HostDevice::checksum(std::span<const ByteRange> ranges, StreamId,
                                                Deadline deadline, const StopFlag* stop) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    for (const ByteRange& range : ranges) {
      if (is_mapped(range.at, range.size_bytes) || lies_within_one(host_, range.at, range.size_bytes))
        continue;
      throw Misuse("checksum: a range must be mapped device memory, or lie within one host buffer");
    }
  }
  const Working working(*this);
  return checksum_in_place(ranges, deadline, stop);
}

void HostDevice::quiesce(Deadline deadline) {
  for (;;) {
    if (Clock::now() > deadline) {
      throw DeviceBusy(device_text(*this) +
                       " did not come to rest within the deadline: " + std::to_string(working_.load()) +
                       " pieces of work are in flight; wait for them, or give more time");
    }
    if (working_.load() == 0) return;
    std::this_thread::sleep_for(rest_polling);
  }
}

}  // namespace

std::shared_ptr<Device> make_host_device(const std::string& name, std::size_t capacity_bytes,
                                         std::size_t granularity_bytes) {
  const std::size_t page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  if (granularity_bytes == 0 || granularity_bytes % page_bytes != 0) {
    throw Misuse("granularity_bytes must be a positive multiple of the page size, " +
                 std::to_string(page_bytes));
  }
  if (capacity_bytes < granularity_bytes) {
    throw Misuse("capacity_bytes must be at least the granularity, " + std::to_string(granularity_bytes));
  }
  return std::make_shared<HostDevice>(name, capacity_bytes, granularity_bytes);
}

}  // namespace torpor
