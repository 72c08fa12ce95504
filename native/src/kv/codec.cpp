#include "torpor/kv/codec.hpp"

#include <cstdint>
#include <cstring>

#include "torpor/errors.hpp"

namespace torpor::kv {
namespace {

class Identity final : public Codec {
 public:
  [[nodiscard]] std::string name() const override { return "identity"; }
  [[nodiscard]] bool identity() const noexcept override { return true; }
  [[nodiscard]] std::size_t cold_bytes(std::size_t page_bytes) const noexcept override { return page_bytes; }
  void encode(std::span<const std::byte> page, std::span<std::byte> cold) const override {
    std::memcpy(cold.data(), page.data(), page.size());
  }
  void decode(std::span<const std::byte> cold, std::span<std::byte> page) const override {
    std::memcpy(page.data(), cold.data(), page.size());
  }
};

// FNV-1a over words; the rest of a page that is not whole words goes byte by byte.
std::uint64_t checksum(std::span<const std::byte> bytes) noexcept {
  constexpr std::uint64_t prime = 0x100000001B3;
  std::uint64_t sum = 0xCBF29CE484222325;
  std::size_t at = 0;
  for (; at + 8 <= bytes.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, bytes.data() + at, 8);
    sum = (sum ^ word) * prime;
    sum ^= sum >> 32;
  }
  for (; at < bytes.size(); ++at) sum = (sum ^ static_cast<std::uint64_t>(bytes[at])) * prime;
  return sum;
}

class Checked final : public Codec {
 public:
  [[nodiscard]] std::string name() const override { return "checked"; }
  [[nodiscard]] std::size_t cold_bytes(std::size_t page_bytes) const noexcept override {
    return page_bytes + header_bytes;
  }
  void encode(std::span<const std::byte> page, std::span<std::byte> cold) const override {
    std::memset(cold.data(), 0, header_bytes);
    const std::uint64_t sum = checksum(page);
    std::memcpy(cold.data(), &magic, sizeof magic);
    std::memcpy(cold.data() + sizeof magic, &sum, sizeof sum);
    std::memcpy(cold.data() + header_bytes, page.data(), page.size());
  }
  void decode(std::span<const std::byte> cold, std::span<std::byte> page) const override {
    std::uint64_t header[2] = {};
    std::memcpy(header, cold.data(), sizeof header);
    if (header[0] != magic || header[1] != checksum(cold.subspan(header_bytes))) {
      throw CodecRefused(
          "a cold page is not what was written: its checksum differs; forget the prefixes of this "
          "cache, and check the memory or disk of that tier");
    }
    std::memcpy(page.data(), cold.data() + header_bytes, page.size());
  }

 private:
  static constexpr std::size_t header_bytes = 64;
  static constexpr std::uint64_t magic = 0x746F72706F723031;
};

}  // namespace

std::shared_ptr<const Codec> make_codec(const std::string& name) {
  if (name == "identity") return std::make_shared<Identity>();
  if (name == "checked") return std::make_shared<Checked>();
  throw Misuse("unknown codec '" + name + "'; choose identity or checked");
}

}  // namespace torpor::kv
