#include "torpor/kv/page_sums.hpp"

#include <algorithm>

namespace torpor::kv {
namespace {

std::vector<PageEnd> ends_of(std::span<const Move> moves, PageEnd Move::* end) {
  std::vector<PageEnd> ends;
  ends.reserve(moves.size());
  for (const Move& move : moves) ends.push_back(move.*end);
  return ends;
}

}  // namespace

void PageSums::record(PageMover& mover, std::span<const Move> leaving, const Limits& limits) {
  add(mover, ends_of(leaving, &Move::from), ends_of(leaving, &Move::to), limits);
}

void PageSums::record(PageMover& mover, std::span<const PageEnd> resting, const Limits& limits) {
  add(mover, resting, resting, limits);
}

bool PageSums::same(PageMover& mover, std::span<const Move> returned, const Limits& limits) const {
  return are(mover, ends_of(returned, &Move::to), ends_of(returned, &Move::from), limits);
}

bool PageSums::same(PageMover& mover, std::span<const PageEnd> resting, const Limits& limits) const {
  return are(mover, resting, resting, limits);
}

void PageSums::add(PageMover& mover, std::span<const PageEnd> pages, std::span<const PageEnd> asleep,
                   const Limits& limits) {
  // Not behind the copies that are on their way out: those only read.
  const std::vector<std::uint64_t> sums = mover.checksums(pages, StreamId::in, limits);
  for (std::size_t i = 0; i < pages.size(); ++i) {
    sums_[static_cast<std::size_t>(asleep[i].tier)].push_back({asleep[i].at, sums[i]});
  }
}

void PageSums::end() {
  for (Sums& of_tier : sums_) {
    if (!std::ranges::is_sorted(of_tier, {}, &Sum::at)) std::ranges::sort(of_tier, {}, &Sum::at);
  }
}

bool PageSums::are(PageMover& mover, std::span<const PageEnd> pages, std::span<const PageEnd> asleep,
                   const Limits& limits) const {
  if (!recorded_ || pages.empty()) return true;
  const std::vector<std::uint64_t> sums = mover.checksums(pages, StreamId::in, limits);
  std::array<std::size_t, tier_count> nexts{};
  for (std::size_t i = 0; i < pages.size(); ++i) {
    const Sums& of_tier = sums_[static_cast<std::size_t>(asleep[i].tier)];
    // Mostly the one behind the last.
    std::size_t& next = nexts[static_cast<std::size_t>(asleep[i].tier)];
    if (next >= of_tier.size() || of_tier[next].at != asleep[i].at) {
      const auto found = std::ranges::lower_bound(of_tier, asleep[i].at, {}, &Sum::at);
      next = static_cast<std::size_t>(found - of_tier.begin());
    }
    if (next >= of_tier.size() || of_tier[next].at != asleep[i].at) return false;
    if (of_tier[next++].value != sums[i]) return false;
  }
  return true;
}

void PageSums::clear() noexcept {
  recorded_ = false;
  for (auto& of_tier : sums_) of_tier.clear();
}

}  // namespace torpor::kv
