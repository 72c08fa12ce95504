// DiskFile: room on a disk for contents that sleep, in a file that has no name.
//
// The file is unlinked when it is made, so that it goes with the process however that ends. Reading and
// writing pass the page cache by (direct I/O) where the file system can; memory, offsets and sizes are whole
// blocks for that. Room is really allocated when it is taken, and really given back. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "torpor/device.hpp"
#include "torpor/host_pool.hpp"

namespace torpor {

class DiskFile {
 public:
  static constexpr std::size_t block_bytes = 4096;

  // An unlinked file in the folder, of at most limit_bytes. Misuse for a folder that cannot be used.
  DiskFile(const std::string& folder, std::size_t limit_bytes);
  DiskFile(const DiskFile&) = delete;
  DiskFile& operator=(const DiskFile&) = delete;
  DiskFile(DiskFile&&) = delete;
  DiskFile& operator=(DiskFile&&) = delete;
  virtual ~DiskFile();

  // Takes whole blocks and returns where they begin. OutOfDisk over the limit, or when the disk is full.
  [[nodiscard]] std::uint64_t take(std::size_t size_bytes);
  // The blocks are free on the disk at once. Does nothing in a process that forked off.
  void give_back(std::uint64_t offset, std::size_t size_bytes) noexcept;

  // offset, memory and size: multiples of block_bytes. DeviceError with the call's name; OutOfDisk.
  // Virtual for tests that let one fail.
  virtual void write(std::uint64_t offset, Address from, std::size_t size_bytes);
  virtual void read(std::uint64_t offset, Address to, std::size_t size_bytes);

  [[nodiscard]] std::size_t limit_bytes() const noexcept { return limit_bytes_; }
  [[nodiscard]] std::size_t used_bytes() const noexcept;
  // What could be taken now, by the limit and by the file system.
  [[nodiscard]] std::size_t free_bytes() const noexcept;
  // What the file system says the file occupies.
  [[nodiscard]] std::size_t allocated_bytes() const noexcept;
  [[nodiscard]] bool direct() const noexcept { return direct_; }

 private:
  [[nodiscard]] std::size_t disk_room_bytes() const noexcept;
  void allocate(std::uint64_t offset, std::size_t size_bytes) const;

  const std::string folder_;
  const std::size_t limit_bytes_;
  const int owner_pid_;
  int file_ = -1;
  bool direct_ = false;
  mutable std::mutex mutex_;
  std::map<std::uint64_t, std::size_t> holes_;  // given back, before the end
  std::uint64_t end_ = 0;
  std::size_t used_bytes_ = 0;
};

// Owns a range of a DiskFile.
class DiskExtent final {
 public:
  DiskExtent() = default;
  DiskExtent(std::shared_ptr<DiskFile> file, std::size_t size_bytes);
  DiskExtent(DiskExtent&& other) noexcept;
  DiskExtent& operator=(DiskExtent&& other) noexcept;
  DiskExtent(const DiskExtent&) = delete;
  DiskExtent& operator=(const DiskExtent&) = delete;
  ~DiskExtent();
  [[nodiscard]] DiskFile& file() const noexcept { return *file_; }
  [[nodiscard]] std::uint64_t offset() const noexcept { return offset_; }
  [[nodiscard]] std::size_t size_bytes() const noexcept { return size_bytes_; }  // in whole blocks
  [[nodiscard]] explicit operator bool() const noexcept { return file_ != nullptr; }

 private:
  std::shared_ptr<DiskFile> file_;
  std::uint64_t offset_ = 0;
  std::size_t size_bytes_ = 0;
};

// Device memory and its place in the file. offset: a multiple of a block; the last block's rest is padding.
struct DiskMove {
  Address device;
  std::uint64_t offset;
  std::size_t size_bytes;
};

// Both go through two aligned pinned buffers of the pool: the device fills (empties) one while the disk works
// on the other. They return the bytes moved, without padding. On a throw (OutOfDisk, OutOfHostMemory,
// DeviceError, DeviceBusy, Stopped) nothing is in flight any more.
// Host memory for those two, for so many bytes in a row.
[[nodiscard]] std::size_t disk_buffer_bytes(std::size_t size_bytes) noexcept;
std::size_t save_to_disk(Device& device, HostPool& pool, DiskFile& file, std::span<const DiskMove> moves,
                         Deadline deadline, const StopFlag* stop);
std::size_t load_from_disk(Device& device, HostPool& pool, DiskFile& file, std::span<const DiskMove> moves,
                           Deadline deadline, const StopFlag* stop);

}  // namespace torpor
