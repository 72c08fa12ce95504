// PageOrder: many pages in the order of numbers that they have: where they lie.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torpor/kv/page.hpp"

namespace torpor::kv {

// Numbers are distinct and below a limit. Where most of them occur a table serves, else they are sorted: the
// cost follows the pages, never the limit.
class PageOrder final {
 public:
  PageOrder(std::size_t expected_pages, std::size_t limit);
  void add(std::size_t number, Page& page) {
    if (dense_) {
      pages_[number] = &page;
    } else {
      numbered_.push_back({number, &page});
    }
  }
  // Once.
  [[nodiscard]] std::vector<Page*> take();

 private:
  struct Numbered {
    std::size_t number;
    Page* page;
  };
  bool dense_;
  std::vector<Page*> pages_;  // dense: by number
  std::vector<Numbered> numbered_;
};

}  // namespace torpor::kv
