// PageSums: checksums of the pages that a sleep preserves, kept until the wake compares them (K13).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "torpor/device.hpp"
#include "torpor/kv/page_move.hpp"

namespace torpor::kv {

// A page asleep is known by where it lies on the host, which does not change until the wake is over. Awake it
// may have another slot. Not thread-safe.
class PageSums final {
 public:
  // Of the GPU pages that are about to be saved.
  void record(Device& device, std::span<const PageMove> moves, std::size_t page_bytes, const Limits& limits);
  // Of pages that stay in host memory.
  void record(Device& device, std::span<const ByteRange> pages, const Limits& limits);
  // False when the bytes of a page are not those that were recorded, or none were. True when there is nothing
  // to compare.
  [[nodiscard]] bool same(Device& device, std::span<const PageMove> moves, std::size_t page_bytes,
                          const Limits& limits) const;
  [[nodiscard]] bool same(Device& device, std::span<const ByteRange> pages, const Limits& limits) const;

  void begin() noexcept { recorded_ = true; }
  void clear() noexcept;
  [[nodiscard]] bool recorded() const noexcept { return recorded_; }

 private:
  void add(Address place, std::uint64_t sum) { sums_.insert_or_assign(place, sum); }
  [[nodiscard]] bool is(Address place, std::uint64_t sum) const;

  bool recorded_ = false;
  std::unordered_map<Address, std::uint64_t> sums_;  // by the place on the host
};

}  // namespace torpor::kv
