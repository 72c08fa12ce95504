#include "torpor/kv/events.hpp"

#include <algorithm>

namespace torpor::kv {

const char* to_string(EventKind kind) noexcept {
  switch (kind) {
    case EventKind::stored:
      return "stored";
    case EventKind::removed:
      return "removed";
    case EventKind::moved:
      return "moved";
  }
  return "?";
}

Event& EventLog::add(EventKind kind, const Node& node, Tier tier) noexcept {
  ++last_;
  Event& event = ring_.empty() ? unseen_ : ring_[last_ % ring_.size()];
  event = {.number = last_,
           .kind = kind,
           .block = node.hash,
           .parent = node.parent->hash,
           .tokens = static_cast<std::uint32_t>(node.tokens.size()),
           .tier = tier};
  return event;
}

void EventLog::moved(const Page& page) noexcept {
  if (page.node == nullptr) return;
  add(EventKind::moved, *page.node, page.tier).life_cycle = page.life_cycle;
}

EventLog::Batch EventLog::after(std::uint64_t number) const {
  Batch batch;
  batch.next = last_;
  const std::uint64_t oldest = last_ > ring_.size() ? last_ - ring_.size() : 0;
  // A number that was never given is another cache's: what it missed is not known.
  const bool never_given = number > last_;
  if (never_given) number = 0;
  batch.lost = std::max<std::uint64_t>(oldest - std::min(number, oldest), never_given ? 1 : 0);
  for (std::uint64_t next = std::max(number, oldest); next < last_; ++next) {
    batch.events.push_back(ring_[(next + 1) % ring_.size()]);
  }
  return batch;
}

}  // namespace torpor::kv
