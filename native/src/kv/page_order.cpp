#include "torpor/kv/page_order.hpp"

#include <algorithm>
#include <utility>

namespace torpor::kv {
namespace {

constexpr std::size_t dense_share = 8;  // a table's empty entry costs about an eighth of a page sorted

}  // namespace

PageOrder::PageOrder(std::size_t expected_pages, std::size_t limit)
    : dense_(expected_pages >= limit / dense_share) {
  if (dense_) {
    pages_.resize(limit);
  } else {
    numbered_.reserve(expected_pages);
  }
}

std::vector<Page*> PageOrder::take() {
  if (dense_) {
    std::erase(pages_, nullptr);
    return std::move(pages_);
  }
  std::ranges::sort(numbered_, {}, &Numbered::number);
  pages_.reserve(numbered_.size());
  for (const Numbered& one : numbered_) pages_.push_back(one.page);
  return std::move(pages_);
}

}  // namespace torpor::kv
