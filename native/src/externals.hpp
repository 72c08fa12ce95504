// The list of what is registered from outside with a ledger. Shared with the Registration objects.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

namespace torpor {

class Externals final {
 public:
  std::uint64_t add(const std::string& name, const std::string& tag, bool moves_kv) {
    const std::lock_guard<std::mutex> guard(mutex_);
    entries_.push_back({++last_id_, name, tag, moves_kv});
    return last_id_;
  }
  void remove(std::uint64_t id) noexcept {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::erase_if(entries_, [id](const Entry& entry) { return entry.id == id; });
  }
  // Names of what cannot follow a remap of the tag.
  [[nodiscard]] std::vector<std::string> blocking(const std::string& tag) const {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::string> names;
    for (const Entry& entry : entries_) {
      if (entry.moves_kv && entry.tag == tag) names.push_back(entry.name);
    }
    return names;
  }

  // Of all, in the order of registration.
  [[nodiscard]] std::vector<std::string> names() const {
    const std::lock_guard<std::mutex> guard(mutex_);
    std::vector<std::string> names;
    names.reserve(entries_.size());
    for (const Entry& entry : entries_) names.push_back(entry.name);
    return names;
  }

 private:
  struct Entry {
    std::uint64_t id;
    std::string name;
    std::string tag;
    bool moves_kv;
  };
  mutable std::mutex mutex_;
  std::uint64_t last_id_ = 0;
  std::vector<Entry> entries_;
};

}  // namespace torpor
