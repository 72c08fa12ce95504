// Arrivals: what a sequence that resumes must have on the GPU of one pool group.
#pragma once

#include <cstddef>
#include <vector>

#include "torpor/kv/page.hpp"

namespace torpor::kv {

struct Arrivals {
  std::vector<Page*> pages;  // all that it uses
  std::vector<Page*> away;   // of them on another tier
  std::size_t fresh = 0;     // pages that it has not got yet
  std::size_t to_lock = 0;   // pages that nobody locks yet, fresh ones included
};

// A page to take, and what to put into it.
struct FreshPage {
  std::size_t life_cycle = 0;
  std::size_t block = 0;
  Page* page = nullptr;
  Page* source = nullptr;  // copied; else a state reads zero, and scratch what it likes
  bool scratch = false;
};

}  // namespace torpor::kv
