// Codec: what a page looks like in a cold tier. Works on host memory; pages on their way through one that is
// not the identity pass a buffer.
//
// A codec may refuse either way with CodecRefused; then the page stays where it was.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string>

namespace torpor::kv {

class Codec {
 public:
  Codec() = default;
  Codec(const Codec&) = delete;
  Codec& operator=(const Codec&) = delete;
  Codec(Codec&&) = delete;
  Codec& operator=(Codec&&) = delete;
  virtual ~Codec() = default;
  [[nodiscard]] virtual std::string name() const = 0;
  // The cold form is the page itself: it is copied and encode and decode are never called.
  [[nodiscard]] virtual bool identity() const noexcept { return false; }
  // Of every cold page of this cache.
  [[nodiscard]] virtual std::size_t cold_bytes(std::size_t page_bytes) const noexcept = 0;
  // Writes all of `cold`.
  virtual void encode(std::span<const std::byte> page, std::span<std::byte> cold) const = 0;
  // Writes all of `page`, or throws.
  virtual void decode(std::span<const std::byte> cold, std::span<std::byte> page) const = 0;
};

// "identity": the bytes as they are. "checked": the bytes behind a header with their checksum, so that a page
// that was damaged on its way is refused instead of used; costs 64 bytes a page and the work of one CPU core.
// Misuse that lists the names for any other.
[[nodiscard]] std::shared_ptr<const Codec> make_codec(const std::string& name);

}  // namespace torpor::kv
