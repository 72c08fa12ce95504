// C functions that a framework's pluggable allocator calls, one pair for each arena.
//
// Such a callback has no argument that says whose it is, so that each arena gets a pair of functions of its
// own from a fixed table: the one place with state of the whole process. A pair is never used for another
// arena, since the framework may call it for as long as the process lives.
#pragma once

#include <memory>
#include <string>

#include "torpor/arena.hpp"

namespace torpor {

struct AllocatorHook {
  // Exported names: void* (std::size_t size_bytes, int device, stream) and
  // void (void* block, std::size_t size_bytes, int device, stream).
  std::string allocate;
  std::string free;
};

// The arena lives as long as the process from here on. Misuse when all pairs are taken.
[[nodiscard]] AllocatorHook hook_of(std::shared_ptr<Arena> arena);
// Why the last allocation of the arena's hook returned null; empty when none did.
[[nodiscard]] std::string hook_error(const Arena& arena);

}  // namespace torpor
