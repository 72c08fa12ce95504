// The host device against the kernel's own numbers, real processes, and signals.
#include <sys/stat.h>

#include <filesystem>

#include "check.hpp"
#include "process.hpp"
#include "torpor/device.hpp"
#include "torpor/errors.hpp"

using namespace torpor;
using process::Child;
using process::committed_bytes;

namespace {

constexpr std::size_t mib = std::size_t{1} << 20;

std::string fresh_name() {
  static int number = 0;
  return "host-test-" + std::to_string(getpid()) + "-" + std::to_string(++number);
}

std::size_t shared_memory_bytes() {
  std::ifstream file("/proc/meminfo");
  for (std::string word; file >> word;) {
    std::size_t kib = 0;
    if (word == "Shmem:" && file >> kib) return kib << 10;
  }
  return 0;
}

std::size_t free_bytes(const std::shared_ptr<Device>& device) {
  return device->memory_info().free_bytes;
}

void set_byte(Address at, int value) {
  *reinterpret_cast<volatile unsigned char*>(at) = static_cast<unsigned char>(value);
}
int byte_at(Address at) {
  return *reinterpret_cast<volatile const unsigned char*>(at);
}

}  // namespace

CASE("create commits pages in the kernel, and releasing gives them back (M1)") {
  const auto device = make_host_device(fresh_name(), 64 * mib);
  CHECK(committed_bytes() == 0);
  const Reservation reservation(device, 32 * mib);
  CHECK(committed_bytes() == 0);
  Mapping mapping(device, reservation.base(), Physical(device, 32 * mib));
  CHECK(committed_bytes() == 32 * mib);
  mapping.release();
  CHECK(committed_bytes() == 0);
}

CASE("the machine's shared memory falls by what is released (M1)") {
  // Others use the machine too, so a disturbed try is repeated; memory that is not released fails them all.
  const auto device = make_host_device(fresh_name(), 128 * mib);
  const Reservation reservation(device, 96 * mib);
  bool seen = false;
  for (int round = 0; round < 20 && !seen; ++round) {
    const std::size_t before = shared_memory_bytes();
    std::vector<Mapping> mapped = map_chunks(device, reservation.base(), 96 * mib);
    const std::size_t during = shared_memory_bytes();
    mapped.clear();
    const std::size_t after = shared_memory_bytes();
    seen = during >= before + 92 * mib && after + 92 * mib <= during;
  }
  CHECK(seen);
}

CASE("released memory is gone even where a forked child still holds the file") {
  const auto device = make_host_device(fresh_name(), 64 * mib);
  const Reservation reservation(device, 16 * mib);
  Mapping mapping(device, reservation.base(), Physical(device, 16 * mib));
  Child child([](Child& self) {
    const bool there = committed_bytes() == 16 * mib;
    self.tell();
    self.listen();
    return there && committed_bytes() == 0 ? 0 : 1;
  });
  child.listen();
  mapping.release();
  child.tell();
  CHECK(process::exited_with(child.end(), 0));
}

CASE("an access while parked is a segmentation fault, and the address stays taken") {
  const auto device = make_host_device(fresh_name(), 64 * mib);
  const Reservation reservation(device, 4 * mib);
  CHECK(process::faults(reservation.base()));
  Mapping mapping(device, reservation.base(), Physical(device, 4 * mib));
  CHECK(!process::faults(reservation.base() + 3));
  mapping.release();
  CHECK(process::faults(reservation.base() + 3));
  const auto other = make_host_device(fresh_name(), 64 * mib);
  const Reservation elsewhere(other, 4 * mib);
  CHECK(elsewhere.base() + 4 * mib <= reservation.base() || reservation.base() + 4 * mib <= elsewhere.base());
}

CASE("processes that give one name share its capacity") {
  const std::string name = fresh_name();
  Child child([&name](Child& self) {
    const auto device = make_host_device(name, 64 * mib);
    const Physical physical(device, 40 * mib);
    self.tell();
    self.listen();
    return 0;
  });
  child.listen();
  {
    const auto device = make_host_device(name, 64 * mib);
    CHECK(free_bytes(device) == 24 * mib);
    CHECK_THROWS(OutOfDeviceMemory, Physical(device, 26 * mib));
    const Physical rest(device, 24 * mib);
    CHECK(free_bytes(device) == 0);
    child.tell();
    CHECK(process::exited_with(child.end(), 0));
    CHECK(free_bytes(device) == 40 * mib);
  }
}

CASE("the record of a killed process is reaped, and its memory can be had (M6)") {
  const std::string name = fresh_name();
  const auto device = make_host_device(name, 64 * mib);
  for (int round = 0; round < 3; ++round) {
    Child child([&name](Child& self) {
      const auto own = make_host_device(name, 64 * mib);
      const Physical physical(own, 64 * mib);
      self.tell();
      self.listen();
      return 0;
    });
    child.listen();
    CHECK(free_bytes(device) == 0);
    CHECK(process::killed_by(child.end(SIGKILL), SIGKILL));
    CHECK(free_bytes(device) == 64 * mib);
    const Physical physical(device, 64 * mib);
  }
}

CASE("processes that race for the last bytes get each of them once (F23)") {
  const std::string name = fresh_name();
  const auto device = make_host_device(name, 32 * mib);
  const auto grab = [&name](Child& self) {
    const auto own = make_host_device(name, 32 * mib);
    std::vector<Physical> got;
    self.listen();
    try {
      for (;;) got.emplace_back(own, 2 * mib);
    } catch (const OutOfDeviceMemory&) {
      // The end of the race.
    }
    self.tell();
    self.listen();
    return static_cast<int>(got.size());
  };
  Child first(grab);
  Child second(grab);
  first.tell();
  second.tell();
  first.listen();
  second.listen();
  CHECK(free_bytes(device) == 0);
  first.tell();
  second.tell();
  CHECK(WEXITSTATUS(first.end()) + WEXITSTATUS(second.end()) == 16);
  CHECK(free_bytes(device) == 32 * mib);
}

CASE("another capacity for a live name is refused, and allowed once nobody uses it") {
  const std::string name = fresh_name();
  auto device = make_host_device(name, 64 * mib);
  CHECK_THROWS(Misuse, make_host_device(name, 32 * mib));
  const auto second = make_host_device(name, 64 * mib);
  const Physical physical(second, 2 * mib);
  CHECK(free_bytes(device) == 62 * mib);
  const auto other = make_host_device(fresh_name(), 32 * mib);
  CHECK(free_bytes(other) == 32 * mib);
}

CASE("a name is free again when its last user has gone") {
  const std::string name = fresh_name();
  make_host_device(name, 64 * mib).reset();
  CHECK(free_bytes(make_host_device(name, 32 * mib)) == 32 * mib);
}

CASE("the books lie in a directory of this user alone, and go with the last user") {
  const auto folder = std::filesystem::temp_directory_path() / ("torpor-" + fresh_name());
  std::filesystem::create_directory(folder);
  Child child([&folder](Child&) {
    setenv("XDG_RUNTIME_DIR", folder.c_str(), 1);
    const std::filesystem::path books = folder / "torpor" / "device-private.books";
    auto device = make_host_device("private", 8 * mib);
    struct stat found{};
    if (stat((folder / "torpor").c_str(), &found) != 0 || (found.st_mode & 0777) != 0700) return 1;
    if (!std::filesystem::exists(books)) return 2;
    device.reset();
    if (std::filesystem::exists(books)) return 3;
    std::filesystem::permissions(folder / "torpor", std::filesystem::perms::all);
    try {
      (void)make_host_device("private", 8 * mib);
      return 4;
    } catch (const Misuse&) {
      return 0;
    }
  });
  const int status = child.end();
  std::filesystem::remove_all(folder);
  CHECK(process::exited_with(status, 0));
}

CASE("a forked child can neither use nor free what its parent made (M2, F30)") {
  const auto device = make_host_device(fresh_name(), 64 * mib);
  auto reservation = std::make_unique<Reservation>(device, 4 * mib);
  auto mapping = std::make_unique<Mapping>(device, reservation->base(), Physical(device, 4 * mib));
  // Large, so that what the child maps for itself does not happen to fill the whole gap.
  auto buffer = std::make_unique<HostBuffer>(device, 32 * mib, true);
  set_byte(mapping->address(), 42);
  set_byte(buffer->base(), 43);
  CHECK(process::faults(buffer->base()));  // MADV_DONTFORK
  Child child([&](Child&) {
    bool refused = false;
    try {
      const Physical physical(device, 2 * mib);
    } catch (const Misuse&) {
      refused = true;
    }
    mapping.reset();
    reservation.reset();
    buffer.reset();
    return refused ? 0 : 1;
  });
  CHECK(process::exited_with(child.end(), 0));
  CHECK(byte_at(mapping->address()) == 42);
  CHECK(byte_at(buffer->base()) == 43);
  CHECK(committed_bytes() == 4 * mib);
  CHECK(free_bytes(device) == 60 * mib);
}

CASE("calls that make no sense are named, and change nothing") {
  const auto device = make_host_device(fresh_name(), 64 * mib);
  const Reservation reservation(device, 8 * mib);
  Mapping mapping(device, reservation.base(), Physical(device, 4 * mib));
  const Physical spare(device, 2 * mib);
  HostBuffer buffer(device, 2 * mib, false);
  const Address base = reservation.base();
  CHECK_THROWS(Misuse, Physical(device, 5));
  CHECK_THROWS(Misuse, Reservation(device, 0));
  CHECK_THROWS(Misuse, device->map_range(base, spare.handle(), 2 * mib));            // taken
  CHECK_THROWS(Misuse, device->map_range(base + 2 * mib, spare.handle(), 2 * mib));  // taken, in the middle
  CHECK_THROWS(Misuse, device->map_range(base + 4096, spare.handle(), 2 * mib));     // crooked
  CHECK_THROWS(Misuse, device->map_range(base + 8 * mib, spare.handle(), 2 * mib));  // outside
  CHECK_THROWS(Misuse, device->map_range(base + 4 * mib, spare.handle(), 4 * mib));  // not its size
  CHECK_THROWS(Misuse, device->map_range(base + 4 * mib, 12345, 2 * mib));           // no such handle
  CHECK_THROWS(Misuse, device->unmap_range(base, 2 * mib));                          // not its size
  CHECK_THROWS(Misuse, device->unmap_range(base + 4 * mib, 4 * mib));                // nothing there
  const auto copy = [&](Address to, Address from, std::size_t size_bytes) {
    const Copy one{to, from, size_bytes};
    device->copy(std::span(&one, 1), StreamId::out);
  };
  CHECK_THROWS(Misuse, copy(buffer.base(), base + 3 * mib, 2 * mib));   // half of it is not mapped
  CHECK_THROWS(Misuse, copy(buffer.base() + 1, base, 2 * mib));         // past the buffer's end
  CHECK_THROWS(Misuse, copy(buffer.base(), buffer.base() + mib, mib));  // no side is the device
  CHECK_THROWS(Misuse, device->fill(base + 3 * mib, 0, 2 * mib, StreamId::in));
  copy(buffer.base(), base + 2 * mib, 2 * mib);
  CHECK(free_bytes(device) == 58 * mib);
}

CASE("a physical memory that could not be unmapped takes its mapping along") {
  const auto device = make_host_device(fresh_name(), 64 * mib);
  const auto faulty = make_faulty_device(device);
  const Reservation reservation(faulty, 2 * mib);
  {
    const Mapping mapping(faulty, reservation.base(), Physical(faulty, 2 * mib));
    faulty->fail_at(1, true);
  }
  faulty->fail_at(0);
  CHECK(free_bytes(device) == 64 * mib);
  CHECK(committed_bytes() == 0);
  CHECK(process::faults(reservation.base()));
  const Mapping again(device, reservation.base(), Physical(device, 2 * mib));
  CHECK(byte_at(reservation.base()) == 0);
}
