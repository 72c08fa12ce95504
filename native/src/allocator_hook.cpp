#include "torpor/allocator_hook.hpp"

#include <array>
#include <atomic>
#include <exception>
#include <mutex>

#include "torpor/errors.hpp"

namespace torpor {

namespace {

constexpr std::size_t hook_count = 16;

struct Hook {
  std::atomic<Arena*> arena{nullptr};
  std::shared_ptr<Arena> owner;
  std::string error;
};

struct Hooks {
  std::mutex mutex;  // over owner and error of all
  std::array<Hook, hook_count> all;
};

// Never destroyed: callbacks come at the process's end, too.
Hooks& hooks() noexcept {
  static Hooks* const table = new Hooks;
  return *table;
}

using Block = void*;

// No exception may leave a callback: null tells the framework that there is no memory.
Block allocate(std::size_t index, std::size_t size_bytes) noexcept {
  Hook& hook = hooks().all[index];
  try {
    return reinterpret_cast<void*>(hook.arena.load()->allocate(size_bytes));
  } catch (const std::exception& error) {
    try {
      const std::lock_guard<std::mutex> guard(hooks().mutex);
      hook.error = error.what();
    } catch (...) {
      return nullptr;
    }
    return nullptr;
  }
}

void free_block(std::size_t index, void* block) noexcept {
  try {
    if (block != nullptr) hooks().all[index].arena.load()->free(reinterpret_cast<Address>(block));
  } catch (...) {
    return;  // not a block of ours: nothing that a callback could do about it
  }
}

}  // namespace

AllocatorHook hook_of(std::shared_ptr<Arena> arena) {
  const std::lock_guard<std::mutex> guard(hooks().mutex);
  for (std::size_t i = 0; i < hook_count; ++i) {
    Hook& hook = hooks().all[i];
    if (hook.owner && hook.owner != arena) continue;
    hook.arena.store(arena.get());
    hook.owner = std::move(arena);
    return {"torpor_allocate_" + std::to_string(i), "torpor_free_" + std::to_string(i)};
  }
  throw Misuse(
      "all " + std::to_string(hook_count) +
      " allocator hooks of this process are taken, and each is for good; share an arena between users");
}

std::string hook_error(const Arena& arena) {
  const std::lock_guard<std::mutex> guard(hooks().mutex);
  for (const Hook& hook : hooks().all) {
    if (hook.owner.get() == &arena) return hook.error;
  }
  return {};
}

}  // namespace torpor

// A stream tells a caching allocator which blocks it may reuse; whole segments, as asked for here, need none.
#define TORPOR_HOOK(index)                                                                 \
  extern "C" __attribute__((visibility("default"))) torpor::Block torpor_allocate_##index( \
      std::size_t size_bytes, int /*device*/, void* /*stream*/) {                          \
    return torpor::allocate(index, size_bytes);                                            \
  }                                                                                        \
  extern "C" __attribute__((visibility("default"))) void torpor_free_##index(              \
      void* block, std::size_t /*size_bytes*/, int /*device*/, void* /*stream*/) {         \
    torpor::free_block(index, block);                                                      \
  }
TORPOR_HOOK(0)
TORPOR_HOOK(1)
TORPOR_HOOK(2)
TORPOR_HOOK(3)
TORPOR_HOOK(4)
TORPOR_HOOK(5)
TORPOR_HOOK(6)
TORPOR_HOOK(7)
TORPOR_HOOK(8)
TORPOR_HOOK(9)
TORPOR_HOOK(10)
TORPOR_HOOK(11)
TORPOR_HOOK(12)
TORPOR_HOOK(13)
TORPOR_HOOK(14)
TORPOR_HOOK(15)
#undef TORPOR_HOOK
