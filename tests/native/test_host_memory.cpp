// What the machine can still give: read from the kernel's files, here written by the test.
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "check.hpp"
#include "device/host_memory.hpp"

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

TEST_MAIN()
