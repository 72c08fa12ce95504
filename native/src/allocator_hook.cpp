#include "torpor/allocator_hook.hpp"

#include <array>
#include <atomic>
#include <exception>
#include <mutex>

#include "torpor/errors.hpp"

namespace torpor {

namespace {

constexpr std::size_t hook_count = 64;

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
// clang-format off
TORPOR_HOOK(0) TORPOR_HOOK(1) TORPOR_HOOK(2) TORPOR_HOOK(3) TORPOR_HOOK(4) TORPOR_HOOK(5) TORPOR_HOOK(6) TORPOR_HOOK(7)
TORPOR_HOOK(8) TORPOR_HOOK(9) TORPOR_HOOK(10) TORPOR_HOOK(11) TORPOR_HOOK(12) TORPOR_HOOK(13) TORPOR_HOOK(14) TORPOR_HOOK(15)
TORPOR_HOOK(16) TORPOR_HOOK(17) TORPOR_HOOK(18) TORPOR_HOOK(19) TORPOR_HOOK(20) TORPOR_HOOK(21) TORPOR_HOOK(22) TORPOR_HOOK(23)
TORPOR_HOOK(24) TORPOR_HOOK(25) TORPOR_HOOK(26) TORPOR_HOOK(27) TORPOR_HOOK(28) TORPOR_HOOK(29) TORPOR_HOOK(30) TORPOR_HOOK(31)
TORPOR_HOOK(32) TORPOR_HOOK(33) TORPOR_HOOK(34) TORPOR_HOOK(35) TORPOR_HOOK(36) TORPOR_HOOK(37) TORPOR_HOOK(38) TORPOR_HOOK(39)
TORPOR_HOOK(40) TORPOR_HOOK(41) TORPOR_HOOK(42) TORPOR_HOOK(43) TORPOR_HOOK(44) TORPOR_HOOK(45) TORPOR_HOOK(46) TORPOR_HOOK(47)
TORPOR_HOOK(48) TORPOR_HOOK(49) TORPOR_HOOK(50) TORPOR_HOOK(51) TORPOR_HOOK(52) TORPOR_HOOK(53) TORPOR_HOOK(54) TORPOR_HOOK(55)
TORPOR_HOOK(56) TORPOR_HOOK(57) TORPOR_HOOK(58) TORPOR_HOOK(59) TORPOR_HOOK(60) TORPOR_HOOK(61) TORPOR_HOOK(62) TORPOR_HOOK(63)
// clang-format on
#undef TORPOR_HOOK
