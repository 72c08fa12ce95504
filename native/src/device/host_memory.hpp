// What the machine's memory has room for.
#pragma once

#include <cstddef>
#include <string>

namespace torpor {

// What can still be committed without the kernel killing somebody: MemAvailable, and what the cgroups of this
// process (version 1 or 2, up to the root) leave.
[[nodiscard]] std::size_t available_host_bytes();

// How a version of cgroups names its files. prefix: of the keys in memory.stat that count the children too.
struct CgroupFiles {
  std::string root;
  const char* limit;
  const char* used;
  const char* prefix;
};
// The room under every limit from this group up to the root; the page cache counts as free.
[[nodiscard]] std::size_t cgroup_room_bytes(const CgroupFiles& files, std::string group);

}  // namespace torpor
