// Arena: its part in the ledger's transaction.
#include <algorithm>
#include <utility>

#include "saved_copy.hpp"
#include "torpor/arena.hpp"
#include "torpor/disk_file.hpp"
#include "torpor/errors.hpp"
#include "torpor/transfer.hpp"

namespace torpor {

namespace {

std::size_t bytes_of(const auto& runs) noexcept {
  std::size_t total = 0;
  for (const auto& run : runs) total += run.size_bytes;
  return total;
}

}  // namespace

std::vector<Arena::Run> Arena::runs() const {
  std::vector<Run> found;
  for (const auto& [at, size_bytes] : used_) {
    if (!found.empty() && found.back().at + found.back().size_bytes == at) {
      found.back().size_bytes += size_bytes;
    } else {
      found.push_back({at, size_bytes, nullptr});
    }
  }
  return found;
}

Usage Arena::usage() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  Usage usage{.tag = spec_.tag,
              .name = spec_.name,
              .parked = parked_,
              .mode = parked_ ? mode_ : RestoreMode::none,
              .reserved_bytes = reservation_.size_bytes(),
              .device_bytes = parked_ ? 0 : mapped_bytes_};
  for (const auto& [at, size_bytes] : used_) usage.live_bytes += size_bytes;
  if (parked_) usage.live_bytes = 0;
  for (const Saved* saved : {&saved_, &staged_saved_}) {
    for (const Run& run : saved->runs) {
      if (!run.copy) continue;
      usage.host_bytes += run.copy->host_bytes();
      usage.disk_bytes += run.copy->disk_bytes();
    }
  }
  return usage;
}

bool Arena::can_verify(Action action) const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  return action == Action::sleep || !saved_.sums.empty();
}

Item Arena::plan_sleep(RestoreMode mode) const {
  const std::lock_guard<std::mutex> guard(mutex_);
  Item item = item_of(Action::sleep);
  item.mode = mode;
  if (parked_) {
    item.noop = !preserves(mode_) || preserves(mode);
    if (item.noop) item.mode = mode_;
    return item;
  }
  item.free_bytes = mapped_bytes_;
  if (!preserves(mode)) return item;
  for (const Run& run : runs()) {
    item.keep_bytes += run.size_bytes;
    if (mode == RestoreMode::disk) item.disk_bytes += round_up(run.size_bytes, DiskFile::block_bytes);
  }
  if (mode != RestoreMode::disk) item.host_bytes = item.keep_bytes;
  return item;
}

Item Arena::plan_wake() const {
  const std::lock_guard<std::mutex> guard(mutex_);
  Item item = item_of(Action::wake);
  item.noop = !parked_;
  if (item.noop) return item;
  item.mode = mode_;
  item.device_bytes = mapped_bytes_;
  item.keep_bytes = bytes_of(saved_.runs);
  return item;
}

std::vector<std::uint64_t> Arena::checksums(const std::vector<Run>& runs, StreamId stream,
                                            const StageContext& context) const {
  std::vector<ByteRange> ranges;
  for (const Run& run : runs) {
    const std::vector<ByteRange> pieces = checksum_pieces(run.at, run.size_bytes);
    ranges.insert(ranges.end(), pieces.begin(), pieces.end());
  }
  return device_->checksum(ranges, stream, context.deadline, context.stop);
}

// From here to the end of the operation no block is handed out, so that what is saved is all there is.
void Arena::stage_sleep(const Item& item, UndoStack& undo, StageContext& context) {
  undo.push([this]() noexcept {
    const std::lock_guard<std::mutex> guard(mutex_);
    staged_ = false;
    staged_saved_ = {};
    pending_mode_.reset();
  });
  bool saves = false;
  {
    const std::lock_guard<std::mutex> guard(mutex_);
    staged_ = true;
    saves = !parked_ && preserves(item.mode);
    if (saves) staged_saved_.runs = runs();
  }
  if (saves) save(item.mode, context);
  const std::lock_guard<std::mutex> guard(mutex_);
  pending_mode_ = item.mode;
}

void Arena::save(RestoreMode mode, StageContext& context) {
  std::vector<std::uint64_t> sums;
  if (context.verify) sums = checksums(staged_saved_.runs, StreamId::out, context);
  for (Run& run : staged_saved_.runs) {
    auto copy = std::make_unique<SavedCopy>(pool_, disk_, run.size_bytes, mode);
    copy->save_rest(run.at, context);
    const std::lock_guard<std::mutex> guard(mutex_);
    run.copy = std::move(copy);
  }
  const std::lock_guard<std::mutex> guard(mutex_);
  staged_saved_.sums = std::move(sums);
}

std::size_t Arena::commit_sleep() {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!pending_mode_) return 0;
  if (!parked_ && !saved_taken_over_) {
    saved_ = std::exchange(staged_saved_, {});
    saved_taken_over_ = true;
  }
  std::size_t freed_bytes = 0;
  while (!mappings_.empty()) {
    const std::size_t size_bytes = mappings_.back().size_bytes();
    mappings_.back().release();
    mappings_.pop_back();
    freed_bytes += size_bytes;
  }
  if (!preserves(*pending_mode_)) saved_ = {};
  mode_ = *pending_mode_;
  parked_ = true;
  staged_ = false;
  saved_taken_over_ = false;
  pending_mode_.reset();
  return freed_bytes;
}

void Arena::stage_wake(const Item&, UndoStack& undo, StageContext& context) {
  undo.push([this]() noexcept { staged_mappings_.clear(); });
  if (mapped_bytes_ == 0) return;
  staged_mappings_ = map_chunks(device_, address(), mapped_bytes_);
  restore(context);
  if (saved_.sums.empty() || checksums(saved_.runs, StreamId::in, context) == saved_.sums) return;
  throw ContentsCorrupt(
      "the blocks of tag '" + spec_.tag + "', arena '" + spec_.name +
          "', are not what went to sleep; the saved copy is kept: try the wake again, or put "
          "the tag to sleep with restore mode none and make its contents anew",
      spec_.tag);
}

void Arena::restore(StageContext& context) {
  if (mode_ == RestoreMode::memset) {
    zero_range(*device_, address(), mapped_bytes_, context.deadline, context.stop);
  }
  for (const Run& run : saved_.runs) context.moved_bytes += run.copy->restore(run.at, context);
}

void Arena::commit_wake() noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  mappings_ = std::exchange(staged_mappings_, {});
  parked_ = false;
}

void Arena::publish() noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  if (!parked_) saved_ = {};
}

}  // namespace torpor
