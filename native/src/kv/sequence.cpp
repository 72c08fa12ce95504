#include "torpor/kv/sequence.hpp"

#include <mutex>
#include <utility>

#include "torpor/kv/kv_manager.hpp"

namespace torpor::kv {

const char* to_string(SequenceState state) noexcept {
  switch (state) {
    case SequenceState::suspended:
      return "suspended";
    case SequenceState::active:
      return "active";
    case SequenceState::closed:
      return "closed";
  }
  return "?";
}

Sequence::Sequence(std::shared_ptr<KvManager> manager, std::shared_ptr<SequenceRecord> record) noexcept
    : manager_(std::move(manager)), record_(std::move(record)) {}

Sequence::~Sequence() {
  close();
}

SequenceState Sequence::state() const {
  const std::lock_guard guard(manager_->mutex_);
  return record_->state;
}

std::size_t Sequence::history_tokens() const {
  const std::lock_guard guard(manager_->mutex_);
  return record_->history.size();
}

std::size_t Sequence::capacity_tokens() const {
  const std::lock_guard guard(manager_->mutex_);
  return record_->blocks * manager_->layout().tokens_per_block();
}

bool Sequence::contents_lost() const {
  const std::lock_guard guard(manager_->mutex_);
  return record_->contents_lost;
}

// Strands and their tables are there from the beginning to the end: no lock needed.
std::shared_ptr<std::int32_t[]> Sequence::table(std::size_t life_cycle) const {
  return manager_->strand(*record_, life_cycle).table;
}

std::size_t Sequence::table_entries(std::size_t life_cycle) const {
  return manager_->strand(*record_, life_cycle).entries;
}

bool Sequence::resume() {
  const std::lock_guard guard(manager_->mutex_);
  return manager_->resume(*record_);
}

void Sequence::suspend() {
  const std::lock_guard guard(manager_->mutex_);
  manager_->suspend(*record_);
}

bool Sequence::resize(std::size_t capacity_tokens) {
  const std::lock_guard guard(manager_->mutex_);
  return manager_->resize(*record_, capacity_tokens);
}

void Sequence::commit(std::span<const Token> tokens) {
  const std::lock_guard guard(manager_->mutex_);
  manager_->commit(*record_, tokens);
}

bool Sequence::snapshot() {
  const std::lock_guard guard(manager_->mutex_);
  return manager_->snapshot(*record_);
}

void Sequence::close() noexcept {
  const std::lock_guard guard(manager_->mutex_);
  manager_->close(*record_);
}

}  // namespace torpor::kv
