#include "torpor/kv/page_sums.hpp"

namespace torpor::kv {
namespace {

std::vector<std::uint64_t> sums_of(Device& device, StreamId stream, std::span<const PageMove> moves,
                                   std::size_t page_bytes, const Limits& limits) {
  std::vector<ByteRange> pages;
  pages.reserve(moves.size());
  for (const PageMove& move : moves) pages.push_back({move.gpu, page_bytes});
  return device.checksum(pages, stream, limits.deadline, limits.stop);
}

}  // namespace

void PageSums::record(Device& device, std::span<const PageMove> moves, std::size_t page_bytes,
                      const Limits& limits) {
  if (moves.empty()) return;
  const std::vector<std::uint64_t> sums = sums_of(device, StreamId::out, moves, page_bytes, limits);
  for (std::size_t i = 0; i < moves.size(); ++i) add(moves[i].host, sums[i]);
}

void PageSums::record(Device& device, std::span<const ByteRange> pages, const Limits& limits) {
  if (pages.empty()) return;
  const auto sums = device.checksum(pages, StreamId::out, limits.deadline, limits.stop);
  for (std::size_t i = 0; i < pages.size(); ++i) add(pages[i].at, sums[i]);
}

bool PageSums::is(Address place, std::uint64_t sum) const {
  const auto found = sums_.find(place);
  return found != sums_.end() && found->second == sum;
}

bool PageSums::same(Device& device, std::span<const PageMove> moves, std::size_t page_bytes,
                    const Limits& limits) const {
  if (!recorded_ || moves.empty()) return true;
  const std::vector<std::uint64_t> sums = sums_of(device, StreamId::in, moves, page_bytes, limits);
  for (std::size_t i = 0; i < moves.size(); ++i) {
    if (!is(moves[i].host, sums[i])) return false;
  }
  return true;
}

bool PageSums::same(Device& device, std::span<const ByteRange> pages, const Limits& limits) const {
  if (!recorded_ || pages.empty()) return true;
  const auto sums = device.checksum(pages, StreamId::in, limits.deadline, limits.stop);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    if (!is(pages[i].at, sums[i])) return false;
  }
  return true;
}

void PageSums::clear() noexcept {
  recorded_ = false;
  sums_.clear();
}

}  // namespace torpor::kv
