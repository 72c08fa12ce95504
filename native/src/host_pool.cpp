#include "torpor/host_pool.hpp"

#include <algorithm>
#include <utility>

#include "torpor/errors.hpp"

namespace torpor {

HostPool::HostPool(std::shared_ptr<Device> device, std::size_t bound_bytes)
    : device_(std::move(device)), bound_bytes_(bound_bytes) {}

HostBuffer HostPool::acquire(std::size_t size_bytes, bool pinned) {
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    auto best = idle_.end();
    for (auto one = idle_.begin(); one != idle_.end(); ++one) {
      const bool fits =
          one->pinned() == pinned && one->size_bytes() >= size_bytes && one->size_bytes() <= 2 * size_bytes;
      if (fits && (best == idle_.end() || one->size_bytes() < best->size_bytes())) best = one;
    }
    if (best != idle_.end()) {
      HostBuffer buffer = std::move(*best);
      idle_.erase(best);
      idle_bytes_ -= buffer.size_bytes();
      return buffer;
    }
  }
  try {
    return HostBuffer(device_, size_bytes, pinned);
  } catch (const OutOfHostMemory&) {
    if (trim() == 0) throw;
  }
  return HostBuffer(device_, size_bytes, pinned);
}

void HostPool::give_back(HostBuffer buffer) noexcept {
  if (!buffer) return;
  const std::size_t size_bytes = buffer.size_bytes();
  const std::lock_guard<std::mutex> guard(mutex_);
  if (idle_bytes_ + retained_bytes_ + size_bytes > bound_bytes_) return;
  try {
    idle_.push_back(std::move(buffer));
    idle_bytes_ += size_bytes;
  } catch (...) {
    // No room for the entry: then the buffer goes.
  }
}

bool HostPool::retain(std::size_t size_bytes) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (retained_bytes_ + size_bytes > bound_bytes_) return false;
  retained_bytes_ += size_bytes;
  free_idle(bound_bytes_ - retained_bytes_);
  return true;
}

void HostPool::resize(std::size_t bound_bytes) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  bound_bytes_ = bound_bytes;
  free_idle(bound_bytes_ - std::min(bound_bytes_, retained_bytes_));
}

std::size_t HostPool::bound_bytes() const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  return bound_bytes_;
}

void HostPool::release_retained(std::size_t size_bytes) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  retained_bytes_ -= size_bytes;
}

std::size_t HostPool::trim(std::size_t target_bytes) noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  return free_idle(target_bytes);
}

std::size_t HostPool::free_idle(std::size_t target_bytes) noexcept {
  std::size_t freed_bytes = 0;
  while (idle_bytes_ > target_bytes) {
    const std::size_t size_bytes = idle_.front().size_bytes();
    idle_.erase(idle_.begin());
    idle_bytes_ -= size_bytes;
    freed_bytes += size_bytes;
  }
  return freed_bytes;
}

std::size_t HostPool::idle_bytes() const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  return idle_bytes_;
}

std::size_t HostPool::retained_bytes() const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  return retained_bytes_;
}

}  // namespace torpor
