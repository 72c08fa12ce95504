// A cache whose pages are in several tiers, for tests of what lies below the GPU pool.
#pragma once

#include <array>

#include "kv_world.hpp"

namespace kv_rig {

// Three suspended sequences of eight pages each on a GPU of eight: 8 pages there, 4 on the host, 12 on disk.
struct Trio {
  std::shared_ptr<Rig> rig;
  std::vector<Tracked> three;
  std::size_t free_bytes = 0;
};

inline Trio three_suspended(const Options& options = {.host_slots = 4, .seed = 5, .disk_slots = 24}) {
  Trio world;
  world.rig = std::make_shared<Rig>(options);
  for (const char* scope : {"a", "b", "c"}) {
    world.three.push_back(world.rig->started(scope, tokens_from(0, 30)));
    world.three.back().handle->suspend();
  }
  world.free_bytes = world.rig->free_bytes();
  return world;
}

inline void all_are_whole(Trio& world) {
  CHECK(world.rig->free_bytes() == world.free_bytes && world.rig->stats().held_pages == 24);
  CHECK(world.rig->stats().prefix_tokens == 3 * 28 && world.rig->stats().evicted_pages == 0);
  for (Tracked& one : world.three) {
    CHECK(one.handle->resume() && world.rig->holds(one));
    one.handle->suspend();
  }
}

// By tier, the fastest first.
inline std::array<std::size_t, 4> pages_by_tier(const KvManager& kv) {
  const KvStats now = kv.stats();
  const std::size_t all = now.locked_pages + now.held_pages + now.droppable_pages;
  return {all - now.cold_gpu_pages - now.host_pages - now.disk_pages, now.cold_gpu_pages, now.host_pages,
          now.disk_pages};
}
inline std::array<std::size_t, 4> pages_by_tier(const Rig& rig) {
  return pages_by_tier(*rig.kv);
}

}  // namespace kv_rig
