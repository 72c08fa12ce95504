#include "saved_copy.hpp"

#include <algorithm>
#include <span>
#include <utility>

#include "piece_maker.hpp"
#include "torpor/transfer.hpp"

namespace torpor {

namespace {

// Host copies come in pieces: a stop is heard between them, and the pool can hand one on to another region.
constexpr std::size_t piece_bytes = transfer_window_bytes;

}  // namespace

SavedCopy::SavedCopy(std::shared_ptr<HostPool> pool, std::shared_ptr<DiskFile> disk,
                     std::size_t contents_bytes, RestoreMode mode)
    : pool_(std::move(pool)),
      disk_(mode == RestoreMode::disk ? std::move(disk) : nullptr),
      contents_bytes_(contents_bytes),
      pinned_(mode == RestoreMode::pinned) {}

SavedCopy& SavedCopy::operator=(SavedCopy&& other) noexcept {
  drop();
  pool_ = std::move(other.pool_);
  disk_ = std::move(other.disk_);
  contents_bytes_ = other.contents_bytes_;
  pinned_ = other.pinned_;
  saved_bytes_ = std::exchange(other.saved_bytes_, 0);
  host_ = std::exchange(other.host_, {});
  extents_ = std::exchange(other.extents_, {});
  return *this;
}

std::size_t SavedCopy::host_bytes() const noexcept {
  std::size_t total = 0;
  for (const HostBuffer& buffer : host_) total += buffer.size_bytes();
  return total;
}

std::size_t SavedCopy::disk_bytes() const noexcept {
  std::size_t total = 0;
  for (const DiskExtent& extent : extents_) total += extent.size_bytes();
  return total;
}

std::size_t SavedCopy::next_bytes() const noexcept {
  return std::min(piece_bytes, contents_bytes_ - saved_bytes_);
}

void SavedCopy::begin_piece(Address from, StageContext& context, PieceMaker& maker,
                            std::optional<Device::Mark>& before) {
  const std::size_t part_bytes = next_bytes();
  const Address source = from + saved_bytes_;
  if (disk_) {
    extents_.emplace_back(disk_, part_bytes);
    const DiskMove move{source, extents_.back().offset(), part_bytes};
    (void)save_to_disk(*context.device, *pool_, *disk_, std::span(&move, 1), context.deadline, context.stop);
  } else {
    host_.push_back(maker.next());
    const Copy one{host_.back().base(), source, part_bytes};
    context.device->copy(std::span(&one, 1), StreamId::out);
    const Device::Mark here = context.device->mark(StreamId::out);
    if (before) context.device->wait_for(*before, StreamId::out, context.deadline, context.stop);
    before = here;
  }
  saved_bytes_ += part_bytes;
  context.moved_bytes += part_bytes;
}

void SavedCopy::save_piece(Address from, StageContext& context) {
  std::optional<Device::Mark> before;
  PieceMaker maker(*pool_, pinned_, next_bytes(), piece_bytes);
  try {
    begin_piece(from, context, maker, before);
    if (!disk_) context.device->wait(StreamId::out, context.deadline, context.stop);
  } catch (...) {
    drain(*context.device, StreamId::out);
    throw;
  }
}

void SavedCopy::save_rest(Address from, StageContext& context) {
  std::optional<Device::Mark> before;
  PieceMaker maker(*pool_, pinned_, contents_bytes_ - saved_bytes_, piece_bytes);
  try {
    while (saved_bytes_ < contents_bytes_) begin_piece(from, context, maker, before);
    if (!disk_) context.device->wait(StreamId::out, context.deadline, context.stop);
  } catch (...) {
    drain(*context.device, StreamId::out);  // whoever drops this frees the pieces: nothing may write there
    throw;
  }
}

std::size_t SavedCopy::restore(Address to, StageContext& context) const {
  std::vector<DiskMove> from_disk;
  std::vector<Copy> from_host;
  const std::size_t pieces = std::max(host_.size(), extents_.size());
  for (std::size_t i = 0; i < pieces; ++i) {
    const std::size_t at = i * piece_bytes;
    const std::size_t part_bytes = std::min(piece_bytes, contents_bytes_ - at);
    if (disk_) {
      from_disk.push_back({to + at, extents_[i].offset(), part_bytes});
    } else {
      from_host.push_back({to + at, host_[i].base(), part_bytes});
    }
  }
  if (!disk_) return transfer(*context.device, from_host, StreamId::in, context.deadline, context.stop);
  return load_from_disk(*context.device, *pool_, *disk_, from_disk, context.deadline, context.stop);
}

void SavedCopy::drop() noexcept {
  for (HostBuffer& buffer : host_) pool_->give_back(std::move(buffer));
  host_.clear();
  extents_.clear();
  saved_bytes_ = 0;
}

std::vector<ByteRange> checksum_pieces(Address at, std::size_t size_bytes) {
  std::vector<ByteRange> ranges;
  for (std::size_t done = 0; done < size_bytes; done += piece_bytes) {
    ranges.push_back({at + done, std::min(piece_bytes, size_bytes - done)});
  }
  return ranges;
}

}  // namespace torpor
