// What others may see of the ledger while a step runs.
#include <algorithm>

#include "torpor/ledger.hpp"

namespace torpor {

std::vector<std::string> Ledger::tags() const {
  const std::lock_guard<std::mutex> guard(state_);
  return tags_;
}

std::vector<std::string> Ledger::parked_tags() const {
  const std::lock_guard<std::mutex> guard(state_);
  return parked_tags_;
}

LedgerStatus Ledger::status() const {
  const std::lock_guard<std::mutex> guard(state_);
  LedgerStatus now = status_;
  now.parked_tags = parked_tags_;
  return now;
}

std::vector<Usage> Ledger::memory() const {
  const std::unique_lock<std::mutex> working(work_, std::try_to_lock);
  if (working.owns_lock()) remember();
  const std::lock_guard<std::mutex> guard(state_);
  return memory_;
}

void Ledger::set_phase(LedgerPhase phase) {
  remember();
  {
    const std::lock_guard<std::mutex> guard(state_);
    status_.phase = phase;
    if (phase == LedgerPhase::idle) status_.mutated = false;
  }
  if (phase == LedgerPhase::idle) idle_again_.notify_all();
}

void Ledger::remember() const {
  std::vector<Usage> memory;
  std::vector<std::string> tags;
  std::vector<std::string> parked;
  for (const auto& one : participants_) {
    memory.push_back(one->usage());
    if (tags.empty() || tags.back() != one->tag()) tags.push_back(one->tag());
    const bool news = parked.empty() || parked.back() != one->tag();
    if (one->parked() && news) parked.push_back(one->tag());
  }
  const std::lock_guard<std::mutex> guard(state_);
  memory_ = std::move(memory);
  tags_ = std::move(tags);
  parked_tags_ = std::move(parked);
}

}  // namespace torpor
