// Records: objects at stable addresses that are used again and again.
#pragma once

#include <algorithm>
#include <cstddef>
#include <deque>
#include <vector>

namespace torpor::kv {

template <typename T>
class Records final {
 public:
  // May throw bad_alloc; then nothing changed. The record is as its last user left it.
  [[nodiscard]] T& take() {
    if (spare_.empty()) {
      // Room in the list of spares for every record there is: give_back() must not allocate.
      if (spare_.capacity() <= all_.size()) spare_.reserve(std::max<std::size_t>(16, 2 * all_.size()));
      return all_.emplace_back();
    }
    T& record = *spare_.back();
    spare_.pop_back();
    return record;
  }
  void give_back(T& record) noexcept { spare_.push_back(&record); }
  [[nodiscard]] std::size_t in_use() const noexcept { return all_.size() - spare_.size(); }
  // Spare ones too.
  [[nodiscard]] std::deque<T>& all() noexcept { return all_; }
  [[nodiscard]] const std::deque<T>& all() const noexcept { return all_; }

 private:
  std::deque<T> all_;
  std::vector<T*> spare_;
};

}  // namespace torpor::kv
