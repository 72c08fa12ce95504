// HostReservation: the machine's memory behind one device's host buffers, all within one range of addresses.
//
// The range has no access and takes no memory; buffers are committed in it and given back to the machine, the
// lowest free addresses first, so that what is used lies together and grows and shrinks at its end. Nothing
// of the range is inherited by a fork: a child neither copies it nor waits for that (F30). Thread-safe.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>

#include "torpor/device.hpp"

namespace torpor {

class HostReservation final {
 public:
  // Reserves with the first buffer.
  HostReservation();
  HostReservation(const HostReservation&) = delete;
  HostReservation& operator=(const HostReservation&) = delete;
  HostReservation(HostReservation&&) = delete;
  HostReservation& operator=(HostReservation&&) = delete;
  ~HostReservation();

  // Memory on huge pages, touched by several threads when it is large. OutOfHostMemory when the machine, this
  // process's cgroups or the range have not that much; Misuse for 0 bytes.
  [[nodiscard]] Address commit(std::size_t size_bytes);
  // What commit gave; the memory is the machine's again at once.
  void release(Address base) noexcept;

  // Of addresses; 0 bytes before the first buffer.
  [[nodiscard]] ByteRange range() const noexcept;
  [[nodiscard]] std::size_t committed_bytes() const noexcept;

 private:
  using Ranges = std::map<Address, std::size_t>;
  void reserve(std::size_t least_bytes);
  // The lock is held in both. 0: no hole is that large.
  [[nodiscard]] Address take(std::size_t length);
  void give_back(Address base) noexcept;

  const int owner_pid_;
  mutable std::mutex mutex_;
  ByteRange range_{0, 0};
  Ranges holes_;  // no two of them touch
  Ranges taken_;
  std::size_t taken_bytes_ = 0;
};

}  // namespace torpor
