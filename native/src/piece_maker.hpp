// PieceMaker: host memory in pieces, the next ones being made while the caller copies into the last.
//
// Making page-locked memory takes longer than copying into it: pages are cleared, then registered with the
// driver. Two pieces at a time overlap the one with the other, and both with the copy.
#pragma once

#include <cstddef>
#include <deque>
#include <future>

#include "torpor/host_pool.hpp"

namespace torpor {

class PieceMaker final {
 public:
  // Of total_bytes in all; the pool must outlive it. Nothing is made before the first next().
  PieceMaker(HostPool& pool, bool pinned, std::size_t total_bytes, std::size_t piece_bytes) noexcept
      : pool_(pool), pinned_(pinned), left_bytes_(total_bytes), piece_bytes_(piece_bytes) {}
  PieceMaker(const PieceMaker&) = delete;
  PieceMaker& operator=(const PieceMaker&) = delete;
  PieceMaker(PieceMaker&&) = delete;
  PieceMaker& operator=(PieceMaker&&) = delete;
  // What was made and not asked for goes back to the pool.
  ~PieceMaker();

  // The next piece, the last one as small as what is left. Throws what HostPool::acquire does.
  [[nodiscard]] HostBuffer next();

 private:
  static constexpr std::size_t ahead_limit = 3;
  [[nodiscard]] std::size_t take_size() noexcept;

  HostPool& pool_;
  bool pinned_;
  std::size_t left_bytes_;
  std::size_t piece_bytes_;
  std::deque<std::future<HostBuffer>> ahead_;
};

}  // namespace torpor
