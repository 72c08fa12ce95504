// The books of one named host device, shared by all processes of a user that play on it.
//
// A small file in a directory that only this user can enter: a header with the capacity, then one record per
// attached device. Byte-range locks that belong to the open file (OFD locks) say who lives: the kernel frees
// the lock of a process that dies, however it dies, and the next one to look strikes its record.
#pragma once

#include <cstddef>
#include <mutex>
#include <string>

#include "torpor/device.hpp"

namespace torpor {

class HostRegistry final {
 public:
  // Misuse when live processes gave this name another capacity, or when the name cannot be a file's name.
  HostRegistry(const std::string& name, std::size_t capacity_bytes);
  HostRegistry(const HostRegistry&) = delete;
  HostRegistry& operator=(const HostRegistry&) = delete;
  ~HostRegistry();

  // Takes the bytes out of the shared capacity at once, or throws OutOfDeviceMemory and takes nothing.
  void take(std::size_t size_bytes);
  void give(std::size_t size_bytes) noexcept;
  [[nodiscard]] MemoryInfo info();
  // True in a process that forked off the owner: everything here is still the parent's.
  [[nodiscard]] bool foreign() const noexcept;

 private:
  struct Books;
  class Locked;

  void open_books();
  void attach(std::size_t capacity_bytes);
  [[nodiscard]] std::size_t used_bytes() noexcept;  // strikes the dead; needs the lock

  std::string name_;
  std::string path_;
  std::mutex mutex_;  // an OFD lock does not keep the threads of one process apart
  int file_ = -1;
  Books* books_ = nullptr;
  std::size_t record_ = static_cast<std::size_t>(-1);
  const int owner_pid_;
};

}  // namespace torpor
