#include "torpor/region.hpp"

#include <algorithm>
#include <utility>

#include "torpor/errors.hpp"
#include "torpor/transfer.hpp"

namespace torpor {

namespace {

// Host copies come in pieces: a stop is heard between them, and the pool can hand one on to another region.
constexpr std::size_t piece_bytes = transfer_window_bytes;

std::size_t total_bytes(const std::vector<HostBuffer>& buffers) noexcept {
  std::size_t total = 0;
  for (const HostBuffer& buffer : buffers) total += buffer.size_bytes();
  return total;
}

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

Region::Region(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool, RegionSpec spec)
    : device_(std::move(device)),
      pool_(std::move(pool)),
      spec_(checked(std::move(spec))),
      mapped_bytes_(round_up(spec_.size_bytes, device_->granularity_bytes())),
      reservation_(device_, mapped_bytes_),
      mappings_(map_chunks(device_, reservation_.base(), mapped_bytes_)) {}

Region::~Region() {
  end_retention();
  drop(saved_);
}

void Region::contents_changed() {
  if (parked())
    throw Misuse("region '" + spec_.name + "' of tag '" + spec_.tag + "' is asleep; wake it first");
  end_retention();
  drop(saved_);
}

Usage Region::usage() const {
  const std::size_t mapped = total_bytes(mappings_) + total_bytes(staged_mappings_);
  return {.tag = spec_.tag,
          .name = spec_.name,
          .parked = parked(),
          .mode = parked() ? mode_ : RestoreMode::none,
          .reserved_bytes = mapped_bytes_,
          .device_bytes = mapped,
          .live_bytes = mapped,
          .host_bytes = total_bytes(saved_) + total_bytes(staged_saved_),
          .residual_bytes = parked() && spec_.preserve_always ? mapped : 0};
}

Item Region::item_of(Action action) const {
  Item item;
  item.tag = spec_.tag;
  item.name = spec_.name;
  item.action = action;
  return item;
}

Item Region::plan_sleep(RestoreMode mode) const {
  Item item = item_of(Action::sleep);
  item.mode = mode;
  if (parked()) {
    const bool weaker = preserves(mode_) && !preserves(mode);
    item.noop = !weaker || spec_.preserve_always;
    if (item.noop) item.mode = mode_;
    return item;
  }
  if (spec_.preserve_always) return item;
  item.free_bytes = total_bytes(mappings_);
  if (preserves(mode) && saved_.empty()) {
    item.keep_bytes = spec_.size_bytes;
    item.host_bytes = spec_.size_bytes;
  }
  return item;
}

Item Region::plan_wake() const {
  Item item = item_of(Action::wake);
  item.noop = !parked();
  item.mode = parked() ? mode_ : RestoreMode::none;
  if (item.noop || spec_.preserve_always) return item;
  item.device_bytes = mapped_bytes_;
  item.keep_bytes = preserves(mode_) ? spec_.size_bytes : 0;
  return item;
}

void Region::stage_sleep(const Item& item, UndoStack& undo, StageContext& context) {
  undo.push([this]() noexcept {
    drop(staged_saved_);
    pending_mode_.reset();
  });
  const bool must_copy = !parked() && !spec_.preserve_always && preserves(item.mode) && saved_.empty();
  if (must_copy) copy_out(item.mode, context);
  pending_mode_ = item.mode;
}

// The next piece of host memory is made while the one before is being filled.
void Region::copy_out(RestoreMode mode, StageContext& context) {
  try {
    for (std::size_t at = 0; at < spec_.size_bytes; at += piece_bytes) {
      const std::size_t part_bytes = std::min(piece_bytes, spec_.size_bytes - at);
      staged_saved_.push_back(pool_->acquire(part_bytes, mode == RestoreMode::pinned));
      if (at > 0) device_->wait(StreamId::out, context.deadline, context.stop);
      const Copy one{staged_saved_.back().base(), address() + at, part_bytes};
      device_->copy(std::span(&one, 1), StreamId::out);
      context.moved_bytes += part_bytes;
    }
    device_->wait(StreamId::out, context.deadline, context.stop);
  } catch (...) {
    drain(*device_, StreamId::out);  // the undo frees the pieces: nothing may still be writing there
    throw;
  }
}

std::size_t Region::commit_sleep() {
  if (!pending_mode_) return 0;
  std::size_t freed_bytes = 0;
  if (!staged_saved_.empty()) saved_ = std::exchange(staged_saved_, {});
  end_retention();
  while (!mappings_.empty() && !spec_.preserve_always) {
    const std::size_t size_bytes = mappings_.back().size_bytes();
    mappings_.back().release();
    mappings_.pop_back();
    freed_bytes += size_bytes;
  }
  if (!preserves(*pending_mode_)) drop(saved_);
  mode_ = *pending_mode_;
  parked_.store(true);
  pending_mode_.reset();
  return freed_bytes;
}

void Region::stage_wake(const Item&, UndoStack& undo, StageContext& context) {
  if (spec_.preserve_always) return;
  undo.push([this]() noexcept { staged_mappings_.clear(); });
  staged_mappings_ = map_chunks(device_, address(), mapped_bytes_);
  restore(mode_, context);
}

void Region::restore(RestoreMode mode, StageContext& context) {
  if (preserves(mode)) {
    std::vector<Copy> copies;
    for (std::size_t i = 0; i < saved_.size(); ++i) {
      const std::size_t at = i * piece_bytes;
      copies.push_back({address() + at, saved_[i].base(), std::min(piece_bytes, spec_.size_bytes - at)});
    }
    context.moved_bytes += transfer(*device_, copies, StreamId::in, context.deadline, context.stop);
  } else if (mode == RestoreMode::memset) {
    try {
      device_->fill(address(), 0, mapped_bytes_, StreamId::in);
      device_->wait(StreamId::in, context.deadline, context.stop);
    } catch (...) {
      drain(*device_, StreamId::in);  // the undo unmaps: nothing may still be writing there
      throw;
    }
  }
}

void Region::commit_wake() noexcept {
  if (!spec_.preserve_always) mappings_ = std::exchange(staged_mappings_, {});
  parked_.store(false);
}

void Region::publish() noexcept {
  if (parked() || saved_.empty() || retained_bytes_ > 0) return;
  const std::size_t size_bytes = total_bytes(saved_);
  if (spec_.immutable && pool_->retain(size_bytes)) {
    retained_bytes_ = size_bytes;
  } else {
    drop(saved_);
  }
}

void Region::drop(Copies& host) noexcept {
  for (HostBuffer& buffer : host) pool_->give_back(std::move(buffer));
  host.clear();
}

void Region::end_retention() noexcept {
  if (retained_bytes_ > 0) pool_->release_retained(std::exchange(retained_bytes_, 0));
}

}  // namespace torpor
