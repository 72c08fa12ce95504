// One contract for every device: the cases run over each Device that the caller gives. Sizes stay small.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "check.hpp"
#include "torpor/checksum.hpp"
#include "torpor/device.hpp"
#include "torpor/errors.hpp"

namespace contract {

using namespace torpor;
using DevicePtr = std::shared_ptr<Device>;

inline Deadline soon() {
  return Clock::now() + std::chrono::seconds(20);
}

// Bytes that are different at every place, so that a shifted or swapped copy is seen.
inline std::vector<std::uint8_t> pattern(std::size_t size_bytes, std::uint32_t seed) {
  std::vector<std::uint8_t> bytes(size_bytes);
  std::uint32_t state = seed * 2654435761U + 1;
  for (std::uint8_t& byte : bytes) {
    state = state * 1664525U + 1013904223U;
    byte = static_cast<std::uint8_t>(state >> 24);
  }
  return bytes;
}

inline void run_copy(const DevicePtr& device, Copy one, StreamId stream) {
  device->copy(std::span(&one, 1), stream);
  device->wait(stream, soon(), nullptr);
}

inline void write(const DevicePtr& device, Address at, const std::vector<std::uint8_t>& bytes) {
  HostBuffer host(device, bytes.size(), true);
  std::memcpy(reinterpret_cast<void*>(host.base()), bytes.data(), bytes.size());
  run_copy(device, {at, host.base(), bytes.size()}, StreamId::in);
}

inline std::vector<std::uint8_t> read(const DevicePtr& device, Address at, std::size_t size_bytes) {
  HostBuffer host(device, size_bytes, true);
  run_copy(device, {host.base(), at, size_bytes}, StreamId::out);
  std::vector<std::uint8_t> bytes(size_bytes);
  std::memcpy(bytes.data(), reinterpret_cast<const void*>(host.base()), size_bytes);
  return bytes;
}

// A GPU that others use too can move by itself: what we ask is that our own bytes show, within a margin.
inline bool fell_by(const DevicePtr& device, std::size_t before, std::size_t expected) {
  const std::size_t now = device->memory_info().free_bytes;
  const std::size_t margin = device->kind() == DeviceKind::cuda ? std::size_t{4} << 20 : 0;
  return now + expected <= before + margin && now + expected + margin >= before;
}

// A driver takes memory for itself at the first copies of each kind; cases that watch free bytes come after.
inline void warm_up(const DevicePtr& device) {
  const std::size_t size = device->granularity_bytes();
  const Reservation reservation(device, size);
  const Mapping mapping(device, reservation.base(), Physical(device, size));
  write(device, mapping.address(), pattern(size, 0));
  (void)read(device, mapping.address(), size);
  const HostBuffer pageable(device, size, false);
  run_copy(device, {pageable.base(), mapping.address(), size}, StreamId::out);
  device->fill(mapping.address(), 0, size, StreamId::in);
  device->quiesce(soon());
}

inline void names_and_sizes(const DevicePtr& device) {
  const std::size_t grain = device->granularity_bytes();
  CHECK(grain > 0 && (grain & (grain - 1)) == 0);
  CHECK(device->chunk_bytes() >= grain && device->chunk_bytes() % grain == 0);
  CHECK(!device->id().empty());
  const MemoryInfo info = device->memory_info();
  CHECK(info.free_bytes > 0 && info.free_bytes <= info.total_bytes);
  CHECK(round_up(1, grain) == grain && round_up(grain, grain) == grain && round_up(0, grain) == 0);
}

inline void create_commits_and_destroy_gives_back(const DevicePtr& device) {
  const std::size_t size = 16 * device->granularity_bytes();
  const std::size_t before = device->memory_info().free_bytes;
  {
    const Physical physical(device, size);
    CHECK(physical.handle() != 0 && physical.size_bytes() == size);
    CHECK(fell_by(device, before, size));
  }
  CHECK(fell_by(device, before, 0));
}

inline void addresses_survive_a_remap(const DevicePtr& device) {
  const std::size_t size = 4 * device->granularity_bytes();
  const std::size_t before = device->memory_info().free_bytes;
  Reservation reservation(device, size);
  CHECK(reservation.base() % device->granularity_bytes() == 0);
  CHECK(fell_by(device, before, 0));
  const std::vector<std::uint8_t> bytes = pattern(size, 1);
  for (int round = 0; round < 3; ++round) {
    Mapping mapping(device, reservation.base(), Physical(device, size));
    CHECK(mapping.address() == reservation.base());
    write(device, mapping.address(), bytes);
    CHECK(read(device, mapping.address(), size) == bytes);
    mapping.release();
    CHECK(!mapping);
    CHECK(fell_by(device, before, 0));
  }
}

inline void physical_memory_keeps_its_contents_while_unmapped(const DevicePtr& device) {
  const std::size_t size = device->granularity_bytes();
  const Reservation first(device, size);
  const Reservation second(device, size);
  const std::vector<std::uint8_t> bytes = pattern(size, 2);
  const PhysicalHandle handle = device->create_physical(size);
  device->map_range(first.base(), handle, size);
  write(device, first.base(), bytes);
  device->unmap_range(first.base(), size);
  device->map_range(second.base(), handle, size);
  CHECK(read(device, second.base(), size) == bytes);
  device->unmap_range(second.base(), size);
  device->destroy_physical(handle);
}

inline void neighbours_do_not_touch_each_other(const DevicePtr& device) {
  const std::size_t grain = device->granularity_bytes();
  const Reservation reservation(device, 3 * grain);
  std::vector<Mapping> parts;
  for (std::size_t i = 0; i < 3; ++i) {
    parts.emplace_back(device, reservation.base() + i * grain, Physical(device, grain));
    write(device, parts.back().address(), pattern(grain, static_cast<std::uint32_t>(10 + i)));
  }
  parts[1].release();
  CHECK(read(device, parts[0].address(), grain) == pattern(grain, 10));
  CHECK(read(device, parts[2].address(), grain) == pattern(grain, 12));
}

inline void fill_and_copy_on_the_device(const DevicePtr& device) {
  const std::size_t size = 2 * device->granularity_bytes();
  const Reservation reservation(device, 2 * size);
  const std::vector<Mapping> mapped = map_chunks(device, reservation.base(), 2 * size);
  device->fill(reservation.base(), 0xA5, 2 * size, StreamId::in);
  device->wait(StreamId::in, soon(), nullptr);
  CHECK(read(device, reservation.base(), 2 * size) == std::vector<std::uint8_t>(2 * size, 0xA5));
  const std::vector<std::uint8_t> bytes = pattern(size, 3);
  write(device, reservation.base(), bytes);
  run_copy(device, {reservation.base() + size, reservation.base(), size}, StreamId::in);
  CHECK(read(device, reservation.base() + size, size) == bytes);
  device->fill(reservation.base() + 5, 0, 3, StreamId::in);  // odd places and sizes too
  device->wait(StreamId::in, soon(), nullptr);
  std::vector<std::uint8_t> expected = bytes;
  std::fill_n(expected.begin() + 5, 3, std::uint8_t{0});
  CHECK(read(device, reservation.base(), size) == expected);
}

// Many small pieces in one batch, some of them neighbours on both sides, some not, in another order.
inline void a_batch_moves_every_piece_to_its_place(const DevicePtr& device) {
  constexpr std::size_t page = 4096;
  const std::size_t size = device->granularity_bytes();
  const std::size_t pages = std::min<std::size_t>(size / page, 256);
  const Reservation reservation(device, size);
  const Mapping mapping(device, reservation.base(), Physical(device, size));
  HostBuffer host(device, pages * page, true);
  const std::vector<std::uint8_t> bytes = pattern(pages * page, 4);
  std::memcpy(reinterpret_cast<void*>(host.base()), bytes.data(), bytes.size());
  std::vector<Copy> batch;
  std::vector<std::uint8_t> expected(bytes.size());
  for (std::size_t i = 0; i < pages; ++i) {
    const std::size_t to = i < pages / 2 ? i : pages - 1 - (i - pages / 2);
    batch.push_back({mapping.address() + to * page, host.base() + i * page, page});
    std::memcpy(expected.data() + to * page, bytes.data() + i * page, page);
  }
  device->copy(batch, StreamId::in);
  device->wait(StreamId::in, soon(), nullptr);
  CHECK(read(device, mapping.address(), pages * page) == expected);
  device->copy({}, StreamId::in);  // nothing to do is no error
  device->wait(StreamId::in, soon(), nullptr);
}

// Pieces of every size and alignment, in no order, gaps between them: what a gather or scatter kernel may get
// wrong.
inline void scattered_pieces_arrive_whole_and_nothing_beside_them(const DevicePtr& device) {
  constexpr std::array<std::size_t, 9> sizes{1, 3, 4, 16, 100, 4096, 4099, 16 << 10, 40000};
  constexpr std::size_t stride = 41216;  // the largest, an odd gap, and room for a shift
  const std::size_t count = 6 * sizes.size();
  const std::size_t size = round_up(count * stride, device->granularity_bytes());
  const Reservation reservation(device, size);
  const std::vector<Mapping> mapped = map_chunks(device, reservation.base(), size);
  for (const StreamId stream : {StreamId::out, StreamId::in}) {
    const std::vector<std::uint8_t> bytes = pattern(size, 6);
    write(device, reservation.base(),
          stream == StreamId::out ? bytes : std::vector<std::uint8_t>(size, 0xEE));
    HostBuffer host(device, size, true);
    std::vector<std::uint8_t> there = stream == StreamId::out ? std::vector<std::uint8_t>(size, 0xEE) : bytes;
    std::memcpy(reinterpret_cast<void*>(host.base()), there.data(), size);
    std::vector<Copy> batch;
    std::vector<std::uint8_t> expected(size, 0xEE);
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t bytes_here = sizes[i % sizes.size()];
      const std::size_t from = ((i * 5 + 1) % count) * stride + i % 17;
      const std::size_t to = i * stride + (i % 3 == 0 ? i % 17 : (i * 7) % 13);
      const Address on_device = reservation.base();
      batch.push_back(stream == StreamId::out ? Copy{host.base() + to, on_device + from, bytes_here}
                                              : Copy{on_device + to, host.base() + from, bytes_here});
      std::memcpy(expected.data() + to, bytes.data() + from, bytes_here);
    }
    device->copy(batch, stream);
    device->wait(stream, soon(), nullptr);
    if (stream == StreamId::in) {
      CHECK(read(device, reservation.base(), size) == expected);
    } else {
      CHECK(std::memcmp(reinterpret_cast<const void*>(host.base()), expected.data(), size) == 0);
    }
  }
}

inline void too_much_is_refused_with_numbers_and_changes_nothing(const DevicePtr& device) {
  const MemoryInfo before = device->memory_info();
  const std::size_t size =
      round_up(before.total_bytes + device->granularity_bytes(), device->granularity_bytes());
  bool refused = false;
  try {
    const Physical physical(device, size);
  } catch (const OutOfDeviceMemory& error) {
    refused = true;
    CHECK(error.needed_bytes == size);
    CHECK(error.free_bytes <= before.total_bytes);
    CHECK(std::string(error.what()).find("free") != std::string::npos);
  }
  CHECK(refused);
  CHECK(fell_by(device, before.free_bytes, 0));
  const Physical after(device, device->granularity_bytes());
}

inline void map_chunks_is_all_or_nothing(const DevicePtr& device) {
  const std::size_t grain = device->granularity_bytes();
  const std::size_t before = device->memory_info().free_bytes;
  const Reservation reservation(device, 4 * grain);
  {
    const Mapping in_the_way(device, reservation.base() + 3 * grain, Physical(device, grain));
    bool refused = false;
    try {
      (void)map_chunks(device, reservation.base(), 4 * grain);
    } catch (const Error&) {
      refused = true;
    }
    CHECK(refused);
    CHECK(fell_by(device, before, grain));
  }
  CHECK_THROWS(Misuse, map_chunks(device, reservation.base(), grain + 1));
  CHECK_THROWS(Misuse, map_chunks(device, reservation.base(), 0));
  const std::vector<Mapping> all = map_chunks(device, reservation.base(), 4 * grain);
  std::size_t mapped = 0;
  for (const Mapping& one : all) mapped += one.size_bytes();
  CHECK(mapped == 4 * grain);
}

inline void owners_can_be_moved_and_put_everything_back(const DevicePtr& device) {
  const std::size_t grain = device->granularity_bytes();
  const std::size_t before = device->memory_info().free_bytes;
  {
    Reservation first(device, grain);
    const Address base = first.base();
    Reservation second(std::move(first));
    CHECK(first.base() == 0 && second.base() == base);
    Mapping mapping(device, base, Physical(device, grain));
    Mapping other;
    other = std::move(mapping);
    CHECK(!mapping && other && other.address() == base);
    other = Mapping{};  // assigning drops what was there
    CHECK(fell_by(device, before, 0));
    Physical kept(device, grain);
    kept = Physical(device, 2 * grain);
    CHECK(fell_by(device, before, 2 * grain));
  }
  CHECK(fell_by(device, before, 0));
}

inline void host_buffers_are_committed_and_writable(const DevicePtr& device) {
  for (const bool pinned : {false, true}) {
    HostBuffer buffer(device, 3 << 20, pinned);
    CHECK(buffer && buffer.pinned() == pinned && buffer.size_bytes() == 3 << 20);
    std::memset(reinterpret_cast<void*>(buffer.base()), 7, buffer.size_bytes());
    HostBuffer moved(std::move(buffer));
    CHECK(!buffer && moved);
  }
  CHECK_THROWS(OutOfHostMemory, HostBuffer(device, std::size_t{1} << 50, false));
}

inline void a_checksum_sees_every_byte_and_its_place(const DevicePtr& device) {
  const std::size_t size = 2 * device->granularity_bytes();
  const Reservation reservation(device, size);
  const std::vector<Mapping> mapped = map_chunks(device, reservation.base(), size);
  const auto sum = [&](Address at, std::size_t size_bytes) {
    const ByteRange one{at, size_bytes};
    return device->checksum(std::span(&one, 1), StreamId::in, soon(), nullptr).at(0);
  };
  const Address base = reservation.base();
  const std::vector<std::uint8_t> bytes = pattern(size, 5);
  write(device, base, bytes);
  const std::uint64_t whole = sum(base, size);
  CHECK(whole == sum(base, size) && whole != sum(base, size - 1) && whole != sum(base + 8, size - 8));
  for (const std::size_t at : {std::size_t{0}, size / 2 + 3, size - 1}) {
    device->fill(base + at, static_cast<std::uint8_t>(bytes[at] ^ 1U), 1, StreamId::in);
    CHECK(sum(base, size) != whole);
    device->fill(base + at, bytes[at], 1, StreamId::in);
  }
  std::vector<std::uint8_t> swapped = bytes;
  std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + 64);
  write(device, base, swapped);
  CHECK(sum(base, size) != whole);
  write(device, base, bytes);
  // Many ranges, of odd sizes, device and host memory mixed, each counted from its own beginning.
  HostBuffer host(device, size, true);
  std::memcpy(reinterpret_cast<void*>(host.base()), bytes.data(), size);
  const std::vector<ByteRange> ranges{
      {base, size}, {host.base(), size}, {base + 1, 13}, {base, 0}, {host.base() + 1, 13}};
  const auto sums = device->checksum(ranges, StreamId::in, soon(), nullptr);
  CHECK(sums.size() == 5 && sums[0] == whole && sums[1] == whole && sums[2] == sums[4] && sums[3] == 0);
  CHECK(checksum_by_copying(*device, std::span(ranges).first(1), StreamId::out, soon(), nullptr)[0] == whole);
  const StopFlag stop{true};
  CHECK_THROWS(Stopped, device->checksum(ranges, StreamId::in, soon(), &stop));
  CHECK_THROWS(DeviceBusy,
               device->checksum(ranges, StreamId::in, Clock::now() - std::chrono::seconds(1), nullptr));
}

inline void waiting_honours_the_flag_and_rest_comes(const DevicePtr& device) {
  const std::size_t grain = device->granularity_bytes();
  const Reservation reservation(device, grain);
  const Mapping mapping(device, reservation.base(), Physical(device, grain));
  device->fill(mapping.address(), 1, grain, StreamId::in);
  device->quiesce(soon());
  const StopFlag go{false};
  device->fill(mapping.address(), 2, grain, StreamId::out);
  device->wait(StreamId::out, soon(), &go);
  const StopFlag stop{true};
  CHECK_THROWS(Stopped, device->wait(StreamId::out, soon(), &stop));
  device->wait(StreamId::out, soon(), nullptr);
}

inline void run_all(const std::function<DevicePtr()>& make, const std::string& name) {
  using Body = void (*)(const DevicePtr&);
  const std::vector<std::pair<const char*, Body>> bodies{
      {"names and sizes make sense", names_and_sizes},
      {"create commits memory and destroy gives it back", create_commits_and_destroy_gives_back},
      {"addresses survive a remap (S1)", addresses_survive_a_remap},
      {"physical memory keeps its contents while unmapped",
       physical_memory_keeps_its_contents_while_unmapped},
      {"neighbours do not touch each other", neighbours_do_not_touch_each_other},
      {"fill and copy on the device", fill_and_copy_on_the_device},
      {"a batch moves every piece to its place", a_batch_moves_every_piece_to_its_place},
      {"scattered pieces arrive whole, and nothing beside them",
       scattered_pieces_arrive_whole_and_nothing_beside_them},
      {"too much is refused with numbers and changes nothing (M4)",
       too_much_is_refused_with_numbers_and_changes_nothing},
      {"map_chunks is all or nothing", map_chunks_is_all_or_nothing},
      {"owners can be moved and put everything back", owners_can_be_moved_and_put_everything_back},
      {"host buffers are committed and writable", host_buffers_are_committed_and_writable},
      {"a checksum sees every byte and its place (K13)", a_checksum_sees_every_byte_and_its_place},
      {"waiting honours the flag, and rest comes (M5)", waiting_honours_the_flag_and_rest_comes},
  };
  for (const auto& [title, body] : bodies) {
    check::cases().push_back({name + ": " + title, [make, body = body] { body(make()); }});
  }
}

}  // namespace contract
