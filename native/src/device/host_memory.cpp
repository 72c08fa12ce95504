#include "host_memory.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <limits>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "text.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
// Left to everybody else, so that an allocation that just fits does not push the machine over.
constexpr std::size_t reserve_bytes = std::size_t{128} << 20;
constexpr std::size_t huge_page_bytes = std::size_t{2} << 20;
constexpr std::size_t bytes_per_toucher = std::size_t{32} << 20;

// The number behind `key` in a file of "key value" lines, 0 when it is not there.
std::size_t value_of(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string word;
  while (file >> word) {
    std::size_t value = 0;
    if (word == key && file >> value) return value;
    file.ignore(std::numeric_limits<std::streamsize>::max(), '\n');
  }
  return 0;
}

std::size_t number_in(const std::string& path, std::size_t otherwise) {
  std::ifstream file(path);
  std::size_t value = 0;
  return file >> value ? value : otherwise;  // "max" is no number
}

struct CgroupFiles {
  std::string root;
  const char* limit;
  const char* used;
  const char* cache;  // key in memory.stat: page cache that goes when memory is short
};

// The room under every limit from the process's own group up to the root.
std::size_t cgroup_room_bytes(const CgroupFiles& files, std::string group) {
  std::size_t room = unlimited;
  for (;;) {
    const std::string folder = files.root + (group == "/" ? "" : group);
    const std::size_t limit = number_in(folder + files.limit, unlimited);
    if (limit < (unlimited >> 2)) {
      const std::size_t used = number_in(folder + files.used, 0);
      const std::size_t cache = std::min(used, value_of(folder + "/memory.stat", files.cache));
      room = std::min(room, limit > used - cache ? limit - (used - cache) : 0);
    }
    if (group.empty() || group == "/") return room;
    group.resize(group.rfind('/'));
  }
}

std::size_t cgroups_room_bytes() {
  const CgroupFiles v2{"/sys/fs/cgroup", "/memory.max", "/memory.current", "inactive_file"};
  const CgroupFiles v1{"/sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes",
                       "total_inactive_file"};
  std::size_t room = unlimited;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (second == std::string::npos) continue;
    const std::string controllers = line.substr(first, second - first + 1);  // ":cpu,memory:"
    const std::string group = line.substr(second + 1);
    if (controllers == "::") room = std::min(room, cgroup_room_bytes(v2, group));
    const std::size_t at = controllers.find("memory");
    const bool whole_word =
        at != std::string::npos && !isalpha(controllers[at - 1]) && !isalpha(controllers[at + 6]);
    if (whole_word) room = std::min(room, cgroup_room_bytes(v1, group));
  }
  return room;
}

void touch(Address base, std::size_t size_bytes) noexcept {
  const std::size_t page_bytes = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
  for (std::size_t at = 0; at < size_bytes; at += page_bytes) {
    *reinterpret_cast<volatile std::uint8_t*>(base + at) = 0;
  }
}

void touch_in_parallel(Address base, std::size_t size_bytes) {
  const std::size_t wanted = (size_bytes + bytes_per_toucher - 1) / bytes_per_toucher;
  const std::size_t count =
      std::clamp<std::size_t>(wanted, 1, std::max(1U, std::thread::hardware_concurrency()));
  const std::size_t share_bytes = round_up((size_bytes + count - 1) / count, huge_page_bytes);
  std::vector<std::jthread> helpers;
  for (std::size_t at = share_bytes; at < size_bytes; at += share_bytes) {
    helpers.emplace_back(touch, base + at, std::min(share_bytes, size_bytes - at));
  }
  touch(base, std::min(share_bytes, size_bytes));
}

}  // namespace

std::size_t available_host_bytes() {
  const std::size_t machine = value_of("/proc/meminfo", "MemAvailable:") << 10;
  const std::size_t room = std::min(machine, cgroups_room_bytes());
  return room > reserve_bytes ? room - reserve_bytes : 0;
}

Address allocate_host_pages(std::size_t size_bytes) {
  if (size_bytes == 0) throw Misuse("a host buffer needs at least one byte");
  const std::size_t free_bytes = available_host_bytes();
  const auto refuse = [&](const std::string& why) {
    throw OutOfHostMemory("needed " + bytes_text(size_bytes) + " of host memory, free " +
                              bytes_text(free_bytes) + " " + why +
                              "; free memory on this machine, or choose restore mode none",
                          size_bytes, free_bytes);
  };
  if (size_bytes > free_bytes) refuse("(MemAvailable and the cgroup's limit, less a reserve)");
  // A little more, so that the buffer starts at a huge page; what is too much goes back.
  const std::size_t length = round_up(size_bytes, huge_page_bytes);
  const std::size_t mapped = length + huge_page_bytes;
  void* raw =
      mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (raw == MAP_FAILED) refuse("(mmap: " + errno_text(errno) + ")");
  const Address start = reinterpret_cast<Address>(raw);
  const Address base = round_up(start, huge_page_bytes);
  if (base > start) munmap(raw, base - start);
  const std::size_t tail = start + mapped - (base + length);
  if (tail > 0) munmap(reinterpret_cast<void*>(base + length), tail);
  void* pages = reinterpret_cast<void*>(base);
  madvise(pages, length, MADV_HUGEPAGE);  // a kernel without huge pages refuses, and small ones do as well
  madvise(pages, length, MADV_DONTFORK);  // a fork must neither copy this nor wait for it
  touch_in_parallel(base, length);
  return base;
}

void free_host_pages(Address base, std::size_t size_bytes) noexcept {
  munmap(reinterpret_cast<void*>(base), round_up(size_bytes, huge_page_bytes));
}

}  // namespace torpor
