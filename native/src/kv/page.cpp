#include "torpor/kv/page.hpp"

#include <cassert>

namespace torpor::kv {

void PageList::push_newest(Page& page) noexcept {
  assert(page.list == nullptr);
  page.list = this;
  page.older = newest_;
  page.newer = nullptr;
  (newest_ != nullptr ? newest_->newer : oldest_) = &page;
  newest_ = &page;
  ++size_;
}

void PageList::remove(Page& page) noexcept {
  assert(page.list == this);
  (page.older != nullptr ? page.older->newer : oldest_) = page.newer;
  (page.newer != nullptr ? page.newer->older : newest_) = page.older;
  page.list = nullptr;
  page.older = nullptr;
  page.newer = nullptr;
  --size_;
}

}  // namespace torpor::kv
