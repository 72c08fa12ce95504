#include "torpor/region.hpp"

#include <algorithm>
#include <utility>

#include "saved_copy.hpp"
#include "torpor/errors.hpp"
#include "torpor/transfer.hpp"

namespace torpor {

namespace {

std::size_t total_bytes(const std::vector<Mapping>& mappings) noexcept {
  std::size_t total = 0;
  for (const Mapping& mapping : mappings) total += mapping.size_bytes();
  return total;
}

RegionSpec checked(RegionSpec spec) {
  if (spec.tag.empty()) throw Misuse("a region needs a tag, e.g. \"weights\"");
  if (spec.size_bytes == 0)
    throw Misuse("region '" + spec.name + "' of tag '" + spec.tag + "' needs a size above 0");
  return spec;
}

}  // namespace

Region::Region(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool, std::shared_ptr<DiskFile> disk,
               RegionSpec spec)
    : device_(std::move(device)),
      pool_(std::move(pool)),
      disk_(std::move(disk)),
      spec_(checked(std::move(spec))),
      mapped_bytes_(round_up(spec_.size_bytes, device_->granularity_bytes())),
      reservation_(device_, mapped_bytes_),
      mappings_(map_chunks(device_, reservation_.base(), mapped_bytes_)) {}

Region::~Region() {
  end_retention();
}

void Region::contents_changed() {
  if (parked())
    throw Misuse("region '" + spec_.name + "' of tag '" + spec_.tag + "' is asleep; wake it first");
  const std::lock_guard<std::mutex> guard(copies_);
  drop_copies();
}

Usage Region::usage() const {
  const std::lock_guard<std::mutex> guard(copies_);
  const std::size_t mapped = total_bytes(mappings_) + total_bytes(staged_mappings_);
  Usage usage{.tag = spec_.tag,
              .name = spec_.name,
              .parked = parked(),
              .mode = parked() ? mode_ : RestoreMode::none,
              .reserved_bytes = mapped_bytes_,
              .device_bytes = mapped,
              .live_bytes = mapped,
              .residual_bytes = parked() && spec_.preserve_always ? mapped : 0};
  for (const auto* copy : {saved_.get(), staged_saved_.get()}) {
    if (copy == nullptr) continue;
    usage.host_bytes += copy->host_bytes();
    usage.disk_bytes += copy->disk_bytes();
  }
  return usage;
}

bool Region::can_verify(Action action) const noexcept {
  return action == Action::sleep || spec_.preserve_always || !sums_.empty();
}

bool Region::has_copy_for(RestoreMode mode) const noexcept {
  const std::lock_guard<std::mutex> guard(copies_);
  return saved_ && saved_->complete() && saved_->on_disk() == (mode == RestoreMode::disk);
}

Item Region::plan_sleep(RestoreMode mode) const {
  Item item = item_of(Action::sleep);
  item.mode = mode;
  if (parked()) {
    const bool weaker = preserves(mode_) && !preserves(mode);
    item.noop = !weaker || (spec_.preserve_always && sums_.empty());
    if (item.noop) item.mode = mode_;
    return item;
  }
  if (spec_.preserve_always) return item;
  item.free_bytes = total_bytes(mappings_);
  if (preserves(mode) && !has_copy_for(mode)) {
    item.keep_bytes = spec_.size_bytes;
    if (mode == RestoreMode::disk) {
      item.disk_bytes = round_up(spec_.size_bytes, DiskFile::block_bytes);
      item.buffer_bytes = disk_buffer_bytes(spec_.size_bytes);
    } else {
      item.host_bytes = spec_.size_bytes;
    }
  }
  return item;
}

std::vector<HostPiece> Region::host_pieces() const {
  const RestoreMode mode = spec_.restore;
  const bool to_host = mode == RestoreMode::cpu || mode == RestoreMode::pinned;
  if (!to_host || spec_.preserve_always || parked() || has_copy_for(mode)) return {};
  std::vector<HostPiece> pieces;
  for (const ByteRange& part : checksum_pieces(0, spec_.size_bytes)) {
    pieces.push_back({part.size_bytes, mode == RestoreMode::pinned});
  }
  return pieces;
}

Item Region::plan_wake() const {
  Item item = item_of(Action::wake);
  item.noop = !parked();
  item.mode = parked() ? mode_ : RestoreMode::none;
  if (item.noop || spec_.preserve_always) return item;
  item.device_bytes = mapped_bytes_;
  item.keep_bytes = preserves(mode_) ? spec_.size_bytes : 0;
  if (mode_ == RestoreMode::disk) item.buffer_bytes = disk_buffer_bytes(spec_.size_bytes);
  return item;
}

Region::Checksums Region::checksums(StreamId stream, const StageContext& context) const {
  const std::vector<ByteRange> pieces = checksum_pieces(address(), spec_.size_bytes);
  return device_->checksum(pieces, stream, context.deadline, context.stop);
}

void Region::stage_sleep(const Item& item, UndoStack& undo, StageContext& context) {
  undo.push([this]() noexcept {
    staged_saved_.reset();
    staged_sums_.clear();
    pending_mode_.reset();
  });
  if (!parked() && preserves(item.mode)) {
    if (!spec_.preserve_always) {
      save(item.mode, context);
    } else if (context.verify && spec_.immutable) {
      staged_sums_ = checksums(StreamId::out, context);
    }
  }
  pending_mode_ = item.mode;
}

// A copy that is there already serves again (M9); with checksums only when it is known to hold these very
// bytes.
void Region::save(RestoreMode mode, StageContext& context) {
  if (context.verify) staged_sums_ = checksums(StreamId::out, context);
  const bool serves = has_copy_for(mode) && (!context.verify || sums_ == staged_sums_);
  if (!serves) {
    staged_saved_ = std::make_unique<SavedCopy>(pool_, disk_, spec_.size_bytes, mode);
    staged_saved_->save_rest(address(), context);
  } else if (!context.verify) {
    staged_sums_ = sums_;
  }
}

std::size_t Region::commit_sleep() {
  if (!pending_mode_) return 0;
  const RestoreMode mode = *pending_mode_;
  std::size_t freed_bytes = 0;
  end_retention();
  if (staged_saved_) saved_ = std::move(staged_saved_);
  if (saved_ && !saved_->complete()) saved_.reset();  // a backup that was not finished
  if (!parked() && !staging_done_) {
    sums_ = std::exchange(staged_sums_, {});
    staging_done_ = true;
  }
  while (!mappings_.empty() && !spec_.preserve_always) {
    const std::size_t size_bytes = mappings_.back().size_bytes();
    mappings_.back().release();
    mappings_.pop_back();
    freed_bytes += size_bytes;
  }
  if (!preserves(mode)) drop_copies();
  mode_ = mode;
  parked_.store(true);
  pending_mode_.reset();
  staging_done_ = false;
  return freed_bytes;
}

void Region::stage_wake(const Item&, UndoStack& undo, StageContext& context) {
  if (spec_.preserve_always) return verify(context);
  undo.push([this]() noexcept { staged_mappings_.clear(); });
  staged_mappings_ = map_chunks(device_, address(), mapped_bytes_);
  restore(context);
  verify(context);
}

void Region::restore(StageContext& context) {
  if (preserves(mode_)) {
    context.moved_bytes += saved_->restore(address(), context);
  } else if (mode_ == RestoreMode::memset || spec_.zero_on_wake) {
    zero_range(*device_, address(), mapped_bytes_, context.deadline, context.stop);
  }
}

void Region::verify(const StageContext& context) const {
  if (sums_.empty() || checksums(StreamId::in, context) == sums_) return;
  throw ContentsCorrupt("the contents of tag '" + spec_.tag + "', region '" + spec_.name +
                            "', are not what went to sleep; " +
                            (spec_.preserve_always ? "" : "the saved copy is kept: try the wake again, or ") +
                            "put the tag to sleep with restore mode none and load it anew",
                        spec_.tag);
}

void Region::commit_wake() noexcept {
  if (!spec_.preserve_always) mappings_ = std::exchange(staged_mappings_, {});
  parked_.store(false);
}

bool Region::prefill_piece(StageContext& context, std::size_t& room_bytes) {
  const std::lock_guard<std::mutex> guard(copies_);
  const bool wanted = spec_.immutable && !spec_.preserve_always && preserves(spec_.restore);
  if (!wanted || parked() || (saved_ && saved_->complete())) return false;
  const bool to_disk = spec_.restore == RestoreMode::disk;
  if (to_disk && !disk_) return false;
  if (!saved_) {
    if (spec_.size_bytes > room_bytes || (!to_disk && !pool_->retain(spec_.size_bytes))) return false;
    retained_bytes_ = to_disk ? 0 : spec_.size_bytes;
    room_bytes -= spec_.size_bytes;
    saved_ = std::make_unique<SavedCopy>(pool_, disk_, spec_.size_bytes, spec_.restore);
  }
  try {
    saved_->save_piece(address(), context);
  } catch (...) {
    drop_copies();
    throw;
  }
  return !saved_->complete();
}

std::size_t Region::drop_backup() noexcept {
  const std::lock_guard<std::mutex> guard(copies_);
  if (parked() || pending_mode_ || !saved_) return 0;
  const std::size_t host_bytes = saved_->host_bytes();
  drop_copies();
  return host_bytes;
}

void Region::publish() noexcept {
  const std::lock_guard<std::mutex> guard(copies_);
  if (parked() || !saved_ || retained_bytes_ > 0) return;
  const std::size_t host_bytes = saved_->host_bytes();
  const bool keeps = spec_.immutable && (saved_->on_disk() || pool_->retain(host_bytes));
  if (!keeps) drop_copies();
  if (keeps) retained_bytes_ = host_bytes;
}

void Region::drop_copies() noexcept {
  end_retention();
  saved_.reset();
  sums_.clear();
}

void Region::end_retention() noexcept {
  if (retained_bytes_ > 0) pool_->release_retained(std::exchange(retained_bytes_, 0));
}

}  // namespace torpor
