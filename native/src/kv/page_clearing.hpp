// PageCache::Clearing: copies that let a GPU pool do without its last slots, before any page counts as moved.
#pragma once

#include <cstdint>
#include <vector>

#include "torpor/kv/page_cache.hpp"

namespace torpor::kv {

struct PageCache::Clearing {
  struct Relocation {
    Page* page;
    std::int32_t to;
    Page* over;  // has that slot still, and leaves the GPU; nullptr: the slot is free
  };
  Eviction leaving;
  std::vector<Place> places;  // of what falls, by leaving.falls
  std::vector<Relocation> relocations;
  HostBuffer safe;           // what lay in the slots of `over`, one page after the other
  bool overwritten = false;  // some of those slots may hold the new page
};

}  // namespace torpor::kv
