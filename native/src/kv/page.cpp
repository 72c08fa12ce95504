#include "torpor/kv/page.hpp"

#include <cassert>

namespace torpor::kv {

const char* to_string(Tier tier) noexcept {
  constexpr std::array<const char*, tier_count> names{"gpu", "cold_gpu", "host", "disk"};
  return names[static_cast<std::size_t>(tier)];
}

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

std::size_t EvictionQueue::size() const noexcept {
  std::size_t pages = 0;
  for (const PageList& level : levels_) pages += level.size();
  return pages;
}

Page* EvictionQueue::first_from(std::size_t level) const noexcept {
  while (level < levels_.size() && levels_[level].oldest() == nullptr) ++level;
  return level < levels_.size() ? levels_[level].oldest() : nullptr;
}

}  // namespace torpor::kv
