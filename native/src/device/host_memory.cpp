#include "host_memory.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>

namespace torpor {

namespace {

constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
// Left to everybody else, so that an allocation that just fits does not push the machine over.
constexpr std::size_t reserve_bytes = std::size_t{128} << 20;

// Files of the kernel are read by plain calls: the numbers of a C++ stream go through the process's locale,
// and libraries loaded beside us (CUDA's among them) can break that for everyone.
std::string text_of(const std::string& path) {
  std::string text;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "re"), &std::fclose);
  if (!file) return text;
  std::array<char, 4096> part{};
  while (const std::size_t got = std::fread(part.data(), 1, part.size(), file.get()))
    text.append(part.data(), got);
  return text;
}

std::size_t leading_number(const char* text, std::size_t otherwise) noexcept {
  char* end = nullptr;
  const std::size_t value = std::strtoull(text, &end, 10);
  return end == text ? otherwise : value;  // "max" is no number
}

// The number behind `key` in a file of "key value" lines, `otherwise` when it is not there.
std::size_t value_of(const std::string& path, const std::string& key, std::size_t otherwise) {
  std::string text = text_of(path);
  text.insert(text.begin(), '\n');
  const std::size_t at = text.find("\n" + key + " ");
  return at == std::string::npos ? otherwise : leading_number(text.c_str() + at + 1 + key.size(), otherwise);
}

std::size_t number_in(const std::string& path, std::size_t otherwise) {
  return leading_number(text_of(path).c_str(), otherwise);
}

}  // namespace

std::size_t cgroup_room_bytes(const CgroupFiles& files, std::string group) {
  std::size_t room = unlimited;
  for (;;) {
    const std::string folder = files.root + (group == "/" ? "" : group);
    const std::size_t limit = number_in(folder + files.limit, unlimited);
    if (limit < (unlimited >> 2)) {
      const std::size_t used = number_in(folder + files.used, 0);
      std::size_t cache = 0;  // page cache of both lists: it goes when memory is short
      for (const char* list : {"inactive_file", "active_file"}) {
        cache += value_of(folder + "/memory.stat", std::string(files.prefix) + list, 0);
      }
      const std::size_t held = used - std::min(used, cache);
      room = std::min(room, limit > held ? limit - held : 0);
    }
    if (group.empty() || group == "/") return room;
    group.resize(group.rfind('/'));
  }
}

namespace {

std::size_t cgroups_room_bytes() {
  const CgroupFiles v2{"/sys/fs/cgroup", "/memory.max", "/memory.current", ""};
  const CgroupFiles v1{"/sys/fs/cgroup/memory", "/memory.limit_in_bytes", "/memory.usage_in_bytes", "total_"};
  std::size_t room = unlimited;
  const std::string groups = text_of("/proc/self/cgroup");
  for (std::size_t from = 0, to = 0; (to = groups.find('\n', from)) != std::string::npos; from = to + 1) {
    const std::string line = groups.substr(from, to - from);
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

}  // namespace

std::size_t available_host_bytes() {
  const std::size_t machine = value_of("/proc/meminfo", "MemAvailable:", unlimited >> 10) << 10;
  const std::size_t room = std::min(machine, cgroups_room_bytes());
  return room > reserve_bytes ? room - reserve_bytes : 0;
}

}  // namespace torpor
