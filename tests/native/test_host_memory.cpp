// What the machine can still give (read from the kernel's files, here written by the test), and how a device
// takes it: within one range of addresses.
#include <sys/resource.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.hpp"
#include "device/host_memory.hpp"
#include "device/host_reservation.hpp"
#include "process.hpp"
#include "torpor/errors.hpp"

namespace {

namespace fs = std::filesystem;
constexpr std::size_t mib = std::size_t{1} << 20;

class Groups {
 public:
  Groups() {
    std::string name = (fs::temp_directory_path() / "torpor-cgroup-XXXXXX").string();
    root_ = mkdtemp(name.data());
    fs::create_directories(root_ / "outer" / "inner");
  }
  Groups(const Groups&) = delete;
  Groups& operator=(const Groups&) = delete;
  Groups(Groups&&) = delete;
  Groups& operator=(Groups&&) = delete;
  ~Groups() { fs::remove_all(root_); }
  void write(const std::string& file, const std::string& text) const { std::ofstream(root_ / file) << text; }
  [[nodiscard]] std::size_t room() const {
    return torpor::cgroup_room_bytes({root_.string(), "/memory.max", "/memory.current", ""}, "/outer/inner");
  }

 private:
  fs::path root_;
};

std::string bytes(std::size_t count) {
  return std::to_string(count) + "\n";
}

}  // namespace

CASE("page cache of a group counts as free, active or not") {
  const Groups groups;
  groups.write("outer/memory.max", bytes(1000 * mib));
  groups.write("outer/memory.current", bytes(950 * mib));
  groups.write("outer/memory.stat",
               "anon 1\ninactive_file " + bytes(300 * mib) + "active_file " + bytes(500 * mib));
  CHECK(groups.room() == 850 * mib);
}

CASE("the tightest limit on the way up counts, and a group without one does not") {
  const Groups groups;
  CHECK(groups.room() > (std::size_t{1} << 60));
  groups.write("outer/memory.max", bytes(700 * mib));
  groups.write("outer/memory.current", bytes(100 * mib));
  groups.write("outer/inner/memory.max", "max\n");
  groups.write("outer/inner/memory.current", bytes(90 * mib));
  CHECK(groups.room() == 600 * mib);
  groups.write("outer/inner/memory.max", bytes(95 * mib));
  CHECK(groups.room() == 5 * mib);
  groups.write("outer/inner/memory.current", bytes(99 * mib));
  CHECK(groups.room() == 0);
}

CASE(
    "host buffers lie in one range, the lowest free addresses first, and the kernel gets back what is "
    "released") {
  torpor::HostReservation memory;
  CHECK(memory.range().size_bytes == 0);
  const torpor::Address first = memory.commit(4 * mib);
  const torpor::Address second = memory.commit(3 * mib);  // whole huge pages
  const torpor::Address third = memory.commit(4 * mib);
  const torpor::ByteRange range = memory.range();
  CHECK(first == range.at && second == first + 4 * mib && third == second + 4 * mib);
  CHECK(range.size_bytes >= std::size_t{1} << 30 && range.at % (2 * mib) == 0);
  const auto resident = [&] { return process::mapped_within(range.at, range.at + range.size_bytes); };
  CHECK(resident().resident_bytes == 12 * mib && resident().none_is_forked);
  *reinterpret_cast<volatile unsigned char*>(second) = 7;
  memory.release(second);
  CHECK(resident().resident_bytes == 8 * mib && process::faults(second));
  CHECK(memory.commit(6 * mib) == third + 4 * mib);
  CHECK(memory.commit(2 * mib) == second && *reinterpret_cast<volatile unsigned char*>(second) == 0);
  CHECK(memory.committed_bytes() == 16 * mib);
}

CASE("a range that everything was given back to is one hole and one mapping again") {
  torpor::HostReservation memory;
  std::vector<torpor::Address> taken;
  for (int i = 0; i < 300; ++i) {
    // A walk that leaves holes of all sizes.
    if (taken.size() > 3 && i % 3 != 0) {
      const auto victim =
          taken.begin() + static_cast<std::ptrdiff_t>(static_cast<std::size_t>(i * 7) % taken.size());
      memory.release(*victim);
      taken.erase(victim);
    } else {
      taken.push_back(memory.commit(static_cast<std::size_t>(1 + i % 5) * mib));
    }
  }
  for (const torpor::Address base : taken) memory.release(base);
  const torpor::ByteRange range = memory.range();
  const auto now = process::mapped_within(range.at, range.at + range.size_bytes);
  CHECK(now.mappings == 1 && now.resident_bytes == 0 && memory.committed_bytes() == 0);
  CHECK(memory.commit(64 * mib) == range.at);
}

CASE("where addresses are limited the range is smaller, and what does not fit in it is refused (M3)") {
  process::Child child([](process::Child&) {
    std::ifstream statm("/proc/self/statm");
    std::size_t pages = 0;
    statm >> pages;
    rlimit limit{};
    limit.rlim_cur = limit.rlim_max = pages * static_cast<std::size_t>(sysconf(_SC_PAGESIZE)) + 200 * mib;
    if (setrlimit(RLIMIT_AS, &limit) != 0) return 1;
    torpor::HostReservation memory;
    const torpor::Address base = memory.commit(4 * mib);
    if (memory.range().size_bytes > 200 * mib) return 2;
    try {
      (void)memory.commit(memory.range().size_bytes);
      return 3;
    } catch (const torpor::OutOfHostMemory&) {
      // As it should; what follows must still work.
    }
    memory.release(base);
    return memory.commit(4 * mib) == base ? 0 : 4;
  });
  CHECK(process::exited_with(child.end(), 0));
}

CASE("a buffer that the machine has no room for is refused with both numbers, and nothing is taken (M3)") {
  torpor::HostReservation memory;
  try {
    (void)memory.commit(std::size_t{1} << 50);
    check::fail(__FILE__, __LINE__, "not refused");
  } catch (const torpor::OutOfHostMemory& error) {
    CHECK(error.needed_bytes == std::size_t{1} << 50 && error.free_bytes < error.needed_bytes);
  }
  CHECK(memory.committed_bytes() == 0);
  CHECK_THROWS(torpor::Misuse, memory.commit(0));
}
