// PageSums: checksums of the pages that a sleep preserves, kept until the wake compares them (K13).
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "torpor/device.hpp"
#include "torpor/kv/page_mover.hpp"

namespace torpor::kv {

// A page asleep is known by where it lies outside the GPU, which does not change until the wake is over.
// Awake it may have another slot. Not thread-safe.
class PageSums final {
 public:
  // Of pages that are about to leave the GPU: what they hold, under the place that they go to.
  void record(PageMover& mover, std::span<const Move> leaving, const Limits& limits);
  // Of pages that stay in host memory or on disk.
  void record(PageMover& mover, std::span<const PageEnd> resting, const Limits& limits);
  // False when the bytes of a page are not those that were recorded, or none were. True when there is nothing
  // to compare. Of pages that have come back; of those that stayed.
  [[nodiscard]] bool same(PageMover& mover, std::span<const Move> returned, const Limits& limits) const;
  [[nodiscard]] bool same(PageMover& mover, std::span<const PageEnd> resting, const Limits& limits) const;

  void begin() noexcept { recorded_ = true; }
  // After the last record(), before the first comparison.
  void end();
  void clear() noexcept;
  [[nodiscard]] bool recorded() const noexcept { return recorded_; }

 private:
  struct Sum {
    std::uint64_t at;  // where it lies asleep
    std::uint64_t value;
  };
  using Sums = std::vector<Sum>;
  void add(PageMover& mover, std::span<const PageEnd> pages, std::span<const PageEnd> asleep,
           const Limits& limits);
  [[nodiscard]] bool are(PageMover& mover, std::span<const PageEnd> pages, std::span<const PageEnd> asleep,
                         const Limits& limits) const;

  bool recorded_ = false;
  std::array<Sums, tier_count> sums_;  // by tier, in the order of addresses
};

}  // namespace torpor::kv
