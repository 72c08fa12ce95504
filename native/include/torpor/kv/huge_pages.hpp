// HugePages: an allocator for large tables that are read at random, where small pages would cost a miss of
// the address cache at every step.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>

namespace torpor::kv {

template <typename T>
struct HugePages {
  using value_type = T;
  static constexpr std::size_t page_bytes = std::size_t{2} << 20;

  HugePages() = default;
  template <typename U>
  explicit HugePages(const HugePages<U>&) noexcept {}

  [[nodiscard]] T* allocate(std::size_t count) {
    const std::size_t size_bytes = count * sizeof(T);
    void* const memory = ::operator new(size_bytes, alignment(count));
    // A wish: without it all works, slower.
    if (size_bytes >= page_bytes) (void)madvise(memory, size_bytes, MADV_HUGEPAGE);
    return static_cast<T*>(memory);
  }
  void deallocate(T* memory, std::size_t count) noexcept {
    ::operator delete(static_cast<void*>(memory), alignment(count));
  }
  friend bool operator==(const HugePages&, const HugePages&) noexcept { return true; }

 private:
  [[nodiscard]] static std::align_val_t alignment(std::size_t count) noexcept {
    return std::align_val_t{count * sizeof(T) >= page_bytes ? page_bytes : alignof(T)};
  }
};

}  // namespace torpor::kv
