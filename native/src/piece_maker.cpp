#include "piece_maker.hpp"

#include <algorithm>
#include <utility>

namespace torpor {

PieceMaker::~PieceMaker() {
  for (std::future<HostBuffer>& one : ahead_) {
    try {
      pool_.give_back(one.get());
    } catch (...) {
      continue;  // it could not be made, and nobody wants it any more
    }
  }
}

std::size_t PieceMaker::take_size() noexcept {
  const std::size_t size_bytes = std::min(piece_bytes_, left_bytes_);
  left_bytes_ -= size_bytes;
  return size_bytes;
}

HostBuffer PieceMaker::next() {
  if (ahead_.empty() && left_bytes_ <= piece_bytes_) return pool_.acquire(take_size(), pinned_);
  while (ahead_.size() < ahead_limit && left_bytes_ > 0) {
    ahead_.push_back(std::async(
        std::launch::async, [this, size_bytes = take_size()] { return pool_.acquire(size_bytes, pinned_); }));
  }
  std::future<HostBuffer> first = std::move(ahead_.front());
  ahead_.pop_front();
  return first.get();
}

}  // namespace torpor
