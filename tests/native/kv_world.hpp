// A cache with something of everything, for the tests of sleep and wake.
#pragma once

#include "kv_rig.hpp"

namespace kv_rig {

inline const std::size_t pool_bytes = 8 * page_bytes;

// An active sequence, a suspended one, a prefix on the GPU, and two pages of the suspended one on the host.
struct World {
  std::shared_ptr<Rig> rig;
  Tracked active, suspended;
  std::size_t free_bytes = 0;
};

inline World mixed_world(std::size_t kept_host_bytes = 0) {
  World world;
  world.rig = std::make_shared<Rig>(Options{.host_slots = 12, .seed = 9, .pool_bytes = kept_host_bytes});
  Rig& rig = *world.rig;
  world.suspended = rig.started("s", tokens_from(0, 14));  // 4 pages
  world.suspended.handle->suspend();
  world.active = rig.started("a", tokens_from(0, 10));     // 3 pages
  Tracked passing = rig.started("p", tokens_from(0, 12));  // 3 pages: 2 of the suspended move to the host
  passing.handle->close();
  CHECK(rig.stats().host_pages == 2 && rig.stats().droppable_pages == 3 && rig.stats().free_slots == 0);
  world.free_bytes = rig.free_bytes();
  return world;
}

inline Tokens known(const char* scope) {
  return scope == std::string("p") ? tokens_from(0, 13) : tokens_from(0, 15);
}

inline void is_whole(World& world) {
  Rig& rig = *world.rig;
  CHECK(!rig.kv->parked() && rig.free_bytes() == world.free_bytes);
  CHECK(rig.stats().host_pages == 2 && rig.stats().locked_pages == 3);
  CHECK(rig.kv->probe("p", known("p")) == 12 && rig.kv->probe("s", known("s")) == 12);
  CHECK(rig.kv->probe("a", known("a")) == 8);
  CHECK(rig.holds(world.active));
}

// Also what is on the host, and the prefix; moves pages.
inline void contents_are_whole(World& world) {
  Rig& rig = *world.rig;
  CHECK(rig.holds(world.active));
  CHECK(world.suspended.handle->resume() && rig.holds(world.suspended));
  world.suspended.handle->suspend();
  Tracked heir = rig.create("p", known("p"));
  CHECK(heir.handle->matched_tokens() == 12 && heir.handle->resume() && rig.holds(heir));
}

inline std::vector<std::int32_t> table_of(const Tracked& one) {
  const auto table = one.handle->table();
  return {table.get(), table.get() + one.handle->table_entries()};
}

}  // namespace kv_rig
