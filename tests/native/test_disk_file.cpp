// DiskFile: room that is really taken and given back, bytes that come back, and no name to find them by.
#include <cstring>

#include "device_contract.hpp"
#include "disk_rig.hpp"
#include "process.hpp"

using namespace torpor;
using rig::disk_folder;
using rig::FaultyDisk;

namespace {

constexpr std::size_t block = DiskFile::block_bytes;
constexpr std::size_t mib = std::size_t{1} << 20;

std::shared_ptr<Device> small_device() {
  static int number = 0;
  return make_host_device("disk-test-" + std::to_string(getpid()) + "-" + std::to_string(++number), 64 * mib);
}

std::size_t entries_of(const std::string& folder) {
  std::size_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator(folder)) ++count;
  return count;
}

// A device with `size_bytes` mapped, and a pool.
struct World {
  explicit World(std::size_t size_bytes)
      : device(small_device()),
        reservation(device, round_up(size_bytes, device->granularity_bytes())),
        mapped(map_chunks(device, reservation.base(), reservation.size_bytes())),
        pool(device, 0) {}
  [[nodiscard]] Address at(std::size_t offset) const { return reservation.base() + offset; }

  std::shared_ptr<Device> device;
  Reservation reservation;
  std::vector<Mapping> mapped;
  HostPool pool;
};

}  // namespace

CASE("a disk file takes real room, gives it back at once, and has no name") {
  const std::string folder = disk_folder() + "/torpor-disk-test-" + std::to_string(getpid());
  std::filesystem::create_directory(folder);
  {
    DiskFile file(folder, 8 * mib);
    CHECK(entries_of(folder) == 0);
    CHECK(file.used_bytes() == 0 && file.allocated_bytes() == 0);
    const std::uint64_t first = file.take(3 * mib);
    const std::uint64_t second = file.take(mib + 1);
    CHECK(second == first + 3 * mib);
    CHECK(file.used_bytes() == 4 * mib + block && file.free_bytes() == 4 * mib - block);
    CHECK(file.allocated_bytes() >= 4 * mib + block);
    file.give_back(first, 3 * mib);
    CHECK(file.allocated_bytes() < 2 * mib);
    CHECK(file.take(2 * mib) == first);  // the hole is used again
    CHECK(file.take(mib) == first + 2 * mib);
    file.give_back(second, mib + 1);
    file.give_back(first, 2 * mib);
    file.give_back(first + 2 * mib, mib);
    CHECK(file.used_bytes() == 0 && file.allocated_bytes() == 0);
    CHECK(file.take(8 * mib) == 0);  // holes have joined
  }
  std::filesystem::remove(folder);
}

CASE("over its limit a disk file refuses with numbers and changes nothing") {
  DiskFile file(disk_folder(), 2 * mib);
  const std::uint64_t taken = file.take(mib);
  try {
    (void)file.take(mib + 1);
    check::fail(__FILE__, __LINE__, "not refused");
  } catch (const OutOfDisk& error) {
    CHECK(error.needed_bytes == mib + block && error.free_bytes == mib);
    CHECK(std::string(error.what()).find("raise disk_bytes") != std::string::npos);
  }
  CHECK(file.used_bytes() == mib);
  file.give_back(taken, mib);
  CHECK_THROWS(OutOfDisk, file.take(std::size_t{1} << 62));
  CHECK_THROWS(Misuse, file.take(0));
}

CASE("a disk that is really too small refuses when room is taken, not when it is written") {
  DiskFile file(disk_folder(), std::size_t{1} << 60);
  const std::size_t room = file.free_bytes();
  CHECK(room > 0 && room < std::size_t{1} << 60);
  CHECK_THROWS(OutOfDisk, file.take(room + (std::size_t{1} << 40)));
  CHECK(file.used_bytes() == 0 && file.allocated_bytes() == 0);
}

CASE("a folder that cannot be used is a mistake with a way out, and half blocks are refused") {
  CHECK_THROWS(Misuse, DiskFile("/nowhere/at/all", mib));
  DiskFile file(disk_folder(), mib);
  const std::uint64_t at = file.take(block);
  alignas(block) static std::array<char, 2 * block> memory{};
  const Address base = reinterpret_cast<Address>(memory.data());
  CHECK_THROWS(Misuse, file.write(at + 1, base, block));
  CHECK_THROWS(Misuse, file.write(at, base + 8, block));
  CHECK_THROWS(Misuse, file.read(at, base, block - 8));
}

CASE("device memory comes back byte for byte, in scattered moves of any size (K3)") {
  constexpr std::size_t size = 20 * mib;  // three windows
  World world(size);
  const std::vector<std::uint8_t> bytes = contract::pattern(size, 7);
  contract::write(world.device, world.at(0), bytes);
  DiskFile file(disk_folder(), 64 * mib);
  std::vector<DiskExtent> extents;
  std::vector<DiskMove> moves;
  const std::shared_ptr<DiskFile> shared(&file, [](DiskFile*) {});
  for (std::size_t at = 0, part = 1; at < size; at += part, part = std::min(part * 3 + 5, size - at)) {
    extents.emplace_back(shared, part);
    moves.push_back({world.at(at), extents.back().offset(), part});
    if (at + part >= size) break;
  }
  CHECK(save_to_disk(*world.device, world.pool, file, moves, contract::soon(), nullptr) == size);
  world.device->fill(world.at(0), 0, size, StreamId::in);
  CHECK(load_from_disk(*world.device, world.pool, file, moves, contract::soon(), nullptr) == size);
  CHECK(contract::read(world.device, world.at(0), size) == bytes);
  extents.clear();
  CHECK(file.used_bytes() == 0 && file.allocated_bytes() == 0);
}

CASE("what another use left in a buffer does not get onto the disk with the padding (K1)") {
  World world(2 * mib);
  HostPool pool(world.device, 64 * mib);  // keeps buffers: the second save gets the first one's
  DiskFile file(disk_folder(), 8 * mib);
  const std::uint64_t at = file.take(block);
  world.device->fill(world.at(0), 0xEE, mib, StreamId::in);
  const DiskMove whole{world.at(0), at, block};
  (void)save_to_disk(*world.device, pool, file, std::span(&whole, 1), contract::soon(), nullptr);
  const DiskMove part{world.at(0), at, 10};
  (void)save_to_disk(*world.device, pool, file, std::span(&part, 1), contract::soon(), nullptr);
  alignas(block) static std::array<std::uint8_t, block> read{};
  file.read(at, reinterpret_cast<Address>(read.data()), block);
  CHECK(read[9] == 0xEE && read[10] == 0 && read[block - 1] == 0);
}

CASE("any read or write may fail: the error names the call, and nothing stays in flight (M3)") {
  constexpr std::size_t size = 20 * mib;
  World world(size);
  const std::vector<std::uint8_t> bytes = contract::pattern(size, 8);
  contract::write(world.device, world.at(0), bytes);
  FaultyDisk file(disk_folder(), 64 * mib);
  const DiskMove move{world.at(0), file.take(size), size};
  const auto save = [&] {
    return save_to_disk(*world.device, world.pool, file, std::span(&move, 1), contract::soon(), nullptr);
  };
  const auto load = [&] {
    return load_from_disk(*world.device, world.pool, file, std::span(&move, 1), contract::soon(), nullptr);
  };
  for (std::size_t k = 1; k <= 3; ++k) {
    file.fail_at(k);
    CHECK_THROWS(DeviceError, save());
  }
  file.fail_at(0);
  CHECK(save() == size && file.calls() == 3);
  for (std::size_t k = 1; k <= 3; ++k) {
    file.fail_at(k);
    CHECK_THROWS(DeviceError, load());
  }
  file.fail_at(0);
  CHECK(load() == size);
  CHECK(contract::read(world.device, world.at(0), size) == bytes);
}

CASE("a stop is heard while saving and loading (C6)") {
  World world(2 * mib);
  DiskFile file(disk_folder(), 8 * mib);
  const DiskMove move{world.at(0), file.take(mib), mib};
  const StopFlag stop{true};
  CHECK_THROWS(Stopped,
               save_to_disk(*world.device, world.pool, file, std::span(&move, 1), contract::soon(), &stop));
  CHECK_THROWS(Stopped,
               load_from_disk(*world.device, world.pool, file, std::span(&move, 1), contract::soon(), &stop));
}

CASE("a forked child that drops its extents takes nothing from the parent (F30)") {
  const auto file = std::make_shared<DiskFile>(disk_folder(), 8 * mib);
  auto extent = std::make_unique<DiskExtent>(file, mib);
  process::Child child([&](process::Child&) {
    extent.reset();
    return 0;
  });
  CHECK(process::exited_with(child.end(), 0));
  CHECK(file->used_bytes() == mib && file->allocated_bytes() >= mib);
}
