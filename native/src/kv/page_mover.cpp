#include "torpor/kv/page_mover.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

namespace torpor::kv {
namespace {

// Large enough that a disk runs at its full rate, small enough that a stop is heard soon.
constexpr std::size_t window_limit_bytes = std::size_t{4} << 20;

bool on_device(Tier tier) noexcept {
  return tier == Tier::gpu || tier == Tier::cold_gpu;
}

std::byte* bytes_at(std::uint64_t address) noexcept {
  return reinterpret_cast<std::byte*>(static_cast<std::uintptr_t>(address));
}

}  // namespace

// Of a window: the cold forms, as a disk wants them, and behind them the pages when a codec has work to do.
class PageMover::Buffer final {
 public:
  Buffer(PageMover& mover, std::size_t pages)
      : pool_(*mover.pool_),
        cold_stride_(mover.cold_stride()),
        page_stride_(mover.page_stride()),
        pages_(mover.window_pages(pages)),
        memory_(pool_.acquire(mover.buffer_bytes(pages), true)) {}
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  Buffer(Buffer&&) = delete;
  Buffer& operator=(Buffer&&) = delete;
  ~Buffer() { pool_.give_back(std::move(memory_)); }

  [[nodiscard]] std::size_t pages() const noexcept { return pages_; }
  [[nodiscard]] std::size_t cold_stride() const noexcept { return cold_stride_; }
  [[nodiscard]] Address cold(std::size_t i) const noexcept { return memory_.base() + i * cold_stride_; }
  // Without a codec's work a page and its cold form are one.
  [[nodiscard]] Address page(std::size_t i) const noexcept {
    return page_stride_ == 0 ? cold(i) : memory_.base() + pages_ * cold_stride_ + i * page_stride_;
  }

 private:
  HostPool& pool_;
  std::size_t cold_stride_;
  std::size_t page_stride_;
  std::size_t pages_;
  HostBuffer memory_;
};

PageMover::PageMover(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool,
                     std::shared_ptr<DiskFile> file, std::shared_ptr<const Codec> codec,
                     std::size_t page_bytes)
    : device_(std::move(device)),
      pool_(std::move(pool)),
      file_(std::move(file)),
      codec_(std::move(codec)),
      page_bytes_(page_bytes),
      cold_bytes_(codec_->cold_bytes(page_bytes)) {}

std::size_t PageMover::cold_stride() const noexcept {
  return round_up(cold_bytes_, DiskFile::block_bytes);
}

std::size_t PageMover::page_stride() const noexcept {
  return codec_->identity() ? 0 : round_up(page_bytes_, DiskFile::block_bytes);
}

std::size_t PageMover::window_pages(std::size_t pages) const noexcept {
  const std::size_t stride = std::max<std::size_t>(1, cold_stride() + page_stride());
  return std::min(pages, std::max<std::size_t>(1, window_limit_bytes / stride));
}

std::size_t PageMover::buffer_bytes(std::size_t pages) const noexcept {
  return window_pages(pages) * (cold_stride() + page_stride());
}

// No buffer: device memory at one end, no disk at the other, and the same form at both.
bool PageMover::straight(const Move& move) const noexcept {
  if (move.from.tier == Tier::disk || move.to.tier == Tier::disk) return false;
  if (!on_device(move.from.tier) && !on_device(move.to.tier)) return false;
  return codec_->identity() || (move.from.tier != Tier::gpu && move.to.tier != Tier::gpu);
}

std::size_t PageMover::run(std::span<const Move> moves, const Limits& limits) {
  Flow all(*this, limits);
  all.add(moves);
  return all.finish();
}

void PageMover::copy_buffered(std::span<const Move> moves, const Limits& limits) {
  const Buffer buffer(*this, moves.size());
  const bool encodes = moves.front().from.tier == Tier::gpu && !codec_->identity();
  const bool decodes = moves.front().to.tier == Tier::gpu && !codec_->identity();
  for (std::size_t first = 0; first < moves.size(); first += buffer.pages()) {
    if (limits.stop != nullptr && limits.stop->load()) throw Stopped("a move of pages was stopped");
    if (Clock::now() > limits.deadline) throw DeviceBusy("a move of pages did not end within its deadline");
    const auto window = moves.subspan(first, std::min(buffer.pages(), moves.size() - first));
    load(window, buffer, limits);
    if (encodes) encode(window, buffer);
    if (decodes) decode(window, buffer);
    store(window, buffer, limits);
  }
}

void PageMover::load(std::span<const Move> window, const Buffer& buffer, const Limits& limits) {
  const Tier tier = window.front().from.tier;
  if (tier == Tier::disk) return disk(window, buffer, false);
  if (tier == Tier::host) {
    for (std::size_t i = 0; i < window.size(); ++i) {
      std::memcpy(bytes_at(buffer.cold(i)), bytes_at(window[i].from.at), cold_bytes_);
    }
    return;
  }
  std::vector<Copy> copies;
  copies.reserve(window.size());
  for (std::size_t i = 0; i < window.size(); ++i) {
    const bool page = tier == Tier::gpu;
    copies.push_back({page ? buffer.page(i) : buffer.cold(i), static_cast<Address>(window[i].from.at),
                      page ? page_bytes_ : cold_bytes_});
  }
  transfer(*device_, copies, StreamId::out, limits.deadline, limits.stop);
}

void PageMover::store(std::span<const Move> window, const Buffer& buffer, const Limits& limits) {
  const Tier tier = window.front().to.tier;
  if (tier == Tier::disk) return disk(window, buffer, true);
  if (tier == Tier::host) {
    for (std::size_t i = 0; i < window.size(); ++i) {
      std::memcpy(bytes_at(window[i].to.at), bytes_at(buffer.cold(i)), cold_bytes_);
    }
    return;
  }
  std::vector<Copy> copies;
  copies.reserve(window.size());
  for (std::size_t i = 0; i < window.size(); ++i) {
    const bool page = tier == Tier::gpu;
    copies.push_back({static_cast<Address>(window[i].to.at), page ? buffer.page(i) : buffer.cold(i),
                      page ? page_bytes_ : cold_bytes_});
  }
  transfer(*device_, copies, StreamId::in, limits.deadline, limits.stop);
}

void PageMover::encode(std::span<const Move> window, const Buffer& buffer) const {
  for (std::size_t i = 0; i < window.size(); ++i) {
    try {
      codec_->encode({bytes_at(buffer.page(i)), page_bytes_}, {bytes_at(buffer.cold(i)), cold_bytes_});
    } catch (const CodecRefused& refusal) {
      throw PageRefused(refusal.what(), window[i].page);
    }
  }
}

void PageMover::decode(std::span<const Move> window, const Buffer& buffer) const {
  for (std::size_t i = 0; i < window.size(); ++i) {
    try {
      codec_->decode({bytes_at(buffer.cold(i)), cold_bytes_}, {bytes_at(buffer.page(i)), page_bytes_});
    } catch (const CodecRefused& refusal) {
      throw PageRefused(refusal.what(), window[i].page);
    }
  }
}

// Neighbours in the file that are neighbours in the buffer go as one.
void PageMover::disk(std::span<const Move> window, const Buffer& buffer, bool writes) {
  const std::size_t stride = buffer.cold_stride();
  const auto at = [&](std::size_t i) { return writes ? window[i].to.at : window[i].from.at; };
  for (std::size_t i = 0; writes && i < window.size() && stride > cold_bytes_; ++i) {
    // What another use left in the buffer must not get onto the disk.
    std::memset(bytes_at(buffer.cold(i) + cold_bytes_), 0, stride - cold_bytes_);
  }
  for (std::size_t first = 0; first < window.size();) {
    std::size_t end = first + 1;
    while (end < window.size() && at(end) == at(end - 1) + stride) ++end;
    const std::size_t size_bytes = (end - first) * stride;
    if (writes) {
      file_->write(at(first), buffer.cold(first), size_bytes);
    } else {
      file_->read(at(first), buffer.cold(first), size_bytes);
    }
    first = end;
  }
}

void PageMover::write_blank(std::span<const PageEnd> places, const Limits& limits) {
  if (places.empty()) return;
  const Buffer buffer(*this, 1);
  std::memset(bytes_at(buffer.page(0)), 0, codec_->identity() ? cold_bytes_ : page_bytes_);
  std::vector<Move> one{{nullptr, {}, {}}};
  if (!codec_->identity()) encode(one, buffer);
  for (const PageEnd& place : places) {
    if (limits.stop != nullptr && limits.stop->load()) throw Stopped("stopped while pages were made anew");
    one[0].to = place;
    store(one, buffer, limits);
  }
}

std::vector<std::uint64_t> PageMover::checksums(std::span<const PageEnd> ends, StreamId stream,
                                                const Limits& limits) {
  std::vector<std::uint64_t> sums(ends.size());
  const auto sum = [&](std::span<const ByteRange> ranges, std::span<const std::size_t> which) {
    if (ranges.empty()) return;
    const auto found = device_->checksum(ranges, stream, limits.deadline, limits.stop);
    for (std::size_t i = 0; i < which.size(); ++i) sums[which[i]] = found[i];
  };
  std::vector<ByteRange> ranges;
  std::vector<std::size_t> in_place;
  std::vector<std::size_t> on_disk;
  for (std::size_t i = 0; i < ends.size(); ++i) {
    const bool disk = ends[i].tier == Tier::disk;
    (disk ? on_disk : in_place).push_back(i);
    const std::size_t size_bytes = ends[i].tier == Tier::gpu ? page_bytes_ : cold_bytes_;
    if (!disk) ranges.push_back({static_cast<Address>(ends[i].at), size_bytes});
  }
  sum(ranges, in_place);
  if (on_disk.empty()) return sums;
  const Buffer buffer(*this, on_disk.size());
  for (std::size_t first = 0; first < on_disk.size(); first += buffer.pages()) {
    const auto which = std::span(on_disk).subspan(first, std::min(buffer.pages(), on_disk.size() - first));
    std::vector<Move> window;
    ranges.clear();
    for (const std::size_t i : which) {
      ranges.push_back({buffer.cold(window.size()), cold_bytes_});
      window.push_back({nullptr, ends[i], {}});
    }
    disk(window, buffer, false);
    sum(ranges, which);
  }
  return sums;
}

}  // namespace torpor::kv
