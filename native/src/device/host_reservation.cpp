#include "host_reservation.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "host_memory.hpp"
#include "text.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;
constexpr std::size_t bytes_per_toucher = std::size_t{4} << 20;
constexpr int no_access = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

void* pointer(Address at) noexcept {
  return reinterpret_cast<void*>(at);
}

std::size_t page_bytes() noexcept {
  return static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
}

// Twice what the machine has: holes between buffers must not be what runs out.
std::size_t wanted_bytes() noexcept {
  return round_up(2 * static_cast<std::size_t>(sysconf(_SC_PHYS_PAGES)) * page_bytes(), huge_page_bytes);
}

// A kernel that does not know one of these does as well without.
void advise(Address base, std::size_t length) noexcept {
  madvise(pointer(base), length, MADV_DONTFORK);
  madvise(pointer(base), length, MADV_DONTDUMP);
  madvise(pointer(base), length, MADV_HUGEPAGE);
}

void touch(Address base, std::size_t length) noexcept {
  for (std::size_t at = 0; at < length; at += page_bytes()) {
    *reinterpret_cast<volatile std::uint8_t*>(base + at) = 0;
  }
}

void touch_in_parallel(Address base, std::size_t length) {
  const std::size_t wanted = (length + bytes_per_toucher - 1) / bytes_per_toucher;
  const std::size_t count =
      std::clamp<std::size_t>(wanted, 1, std::max(1U, std::thread::hardware_concurrency()));
  const std::size_t share_bytes = round_up((length + count - 1) / count, huge_page_bytes);
  std::vector<std::jthread> helpers;
  for (std::size_t at = share_bytes; at < length; at += share_bytes) {
    helpers.emplace_back(touch, base + at, std::min(share_bytes, length - at));
  }
  touch(base, std::min(share_bytes, length));
}

[[noreturn]] void refuse(std::size_t size_bytes, std::size_t free_bytes, const std::string& why) {
  throw OutOfHostMemory("needed " + bytes_text(size_bytes) + " of host memory, free " +
                            bytes_text(free_bytes) + " (" + why +
                            "); free memory on this machine, or choose restore mode none",
                        size_bytes, free_bytes);
}

}  // namespace

HostReservation::HostReservation() : owner_pid_(getpid()) {}

HostReservation::~HostReservation() {
  // In a child of a fork there is nothing here.
  if (range_.size_bytes > 0 && getpid() == owner_pid_) munmap(pointer(range_.at), range_.size_bytes);
}

// Where addresses are limited too (ulimit -v) it makes do with fewer.
void HostReservation::reserve(std::size_t least_bytes) {
  for (std::size_t length = std::max(wanted_bytes(), least_bytes);;
       length = std::max(round_up(length / 2, huge_page_bytes), least_bytes)) {
    // A little more, so that it can begin at a huge page; what is too much goes back.
    void* const raw = mmap(nullptr, length + huge_page_bytes, PROT_NONE, no_access, -1, 0);
    if (raw == MAP_FAILED) {
      if (length == least_bytes) refuse(least_bytes, 0, "no addresses for it: " + errno_text(errno));
      continue;
    }
    const auto start = reinterpret_cast<Address>(raw);
    const Address base = round_up(start, huge_page_bytes);
    if (base > start) munmap(raw, base - start);
    if (const std::size_t tail = start + huge_page_bytes - base; tail > 0)
      munmap(pointer(base + length), tail);
    advise(base, length);
    holes_.emplace(base, length);
    range_ = {base, length};
    return;
  }
}

Address HostReservation::take(std::size_t length) {
  const auto hole = std::ranges::find_if(holes_, [&](const auto& one) { return one.second >= length; });
  if (hole == holes_.end()) return 0;
  const Address base = hole->first;
  taken_.emplace(base, length);
  auto rest = holes_.extract(hole);
  rest.key() += length;
  rest.mapped() -= length;
  if (rest.mapped() > 0) holes_.insert(std::move(rest));
  taken_bytes_ += length;
  return base;
}

// Moves the entry over, and allocates nothing.
void HostReservation::give_back(Address base) noexcept {
  auto entry = taken_.extract(base);
  taken_bytes_ -= entry.mapped();
  auto hole = holes_.insert(std::move(entry)).position;
  if (const auto next = std::next(hole); next != holes_.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    holes_.erase(next);
  }
  if (hole == holes_.begin()) return;
  const auto before = std::prev(hole);
  if (before->first + before->second != hole->first) return;
  before->second += hole->second;
  holes_.erase(hole);
}

Address HostReservation::commit(std::size_t size_bytes) {
  if (size_bytes == 0) throw Misuse("a host buffer needs at least one byte");
  const std::size_t free_bytes = available_host_bytes();
  if (size_bytes > free_bytes) {
    refuse(size_bytes, free_bytes, "MemAvailable and the cgroup's limit, less a reserve");
  }
  const std::size_t length = round_up(size_bytes, huge_page_bytes);
  Address base = 0;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (range_.size_bytes == 0) reserve(length);
    base = take(length);
  }
  if (base == 0) refuse(size_bytes, free_bytes, "but no addresses for it within this device's range");
  if (mprotect(pointer(base), length, PROT_READ | PROT_WRITE) != 0) {
    const std::string why = "mprotect: " + errno_text(errno);
    const std::lock_guard<std::mutex> guard(mutex_);
    give_back(base);
    refuse(size_bytes, free_bytes, why);
  }
  touch_in_parallel(base, length);
  return base;
}

void HostReservation::release(Address base) noexcept {
  if (getpid() != owner_pid_) return;
  const std::lock_guard<std::mutex> guard(mutex_);
  const auto found = taken_.find(base);
  if (found == taken_.end()) return;
  const std::size_t length = found->second;
  // A new mapping over it, as at the beginning: neighbours without access become one again.
  if (mmap(pointer(base), length, PROT_NONE, no_access | MAP_FIXED, -1, 0) == MAP_FAILED) {
    madvise(pointer(base), length, MADV_DONTNEED);
    mprotect(pointer(base), length, PROT_NONE);
  } else {
    advise(base, length);
  }
  give_back(base);
}

ByteRange HostReservation::range() const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  return range_;
}

std::size_t HostReservation::committed_bytes() const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  return taken_bytes_;
}

}  // namespace torpor
