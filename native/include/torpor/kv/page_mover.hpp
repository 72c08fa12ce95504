// PageMover: pages between slots and cold tiers, in the form that each wants.
//
// Without a codec's work pages go straight between GPU and host memory, as few large copies; everything else
// passes a buffer, window by window. Sources are only read, so that a move that fails has changed nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "torpor/device.hpp"
#include "torpor/disk_file.hpp"
#include "torpor/errors.hpp"
#include "torpor/host_pool.hpp"
#include "torpor/kv/codec.hpp"
#include "torpor/kv/page.hpp"
#include "torpor/kv/page_move.hpp"

namespace torpor::kv {

// One end of a move. On gpu the page itself, elsewhere its cold form.
struct PageEnd {
  Tier tier = Tier::gpu;
  std::uint64_t at = 0;     // address; on disk: offset in the file
  std::uint32_t piece = 0;  // a copy never crosses from one piece into the next
};

struct Move {
  const Page* page = nullptr;  // for PageRefused
  PageEnd from;
  PageEnd to;
};

// CodecRefused, with the page.
class PageRefused final : public CodecRefused {
 public:
  PageRefused(const std::string& what, const Page* refused) : CodecRefused(what), page(refused) {}
  const Page* page;
};

class PageMover final {
 public:
  // file may be empty; then no move begins or ends on disk.
  PageMover(std::shared_ptr<Device> device, std::shared_ptr<HostPool> pool, std::shared_ptr<DiskFile> file,
            std::shared_ptr<const Codec> codec, std::size_t page_bytes);

  [[nodiscard]] std::size_t cold_bytes() const noexcept { return cold_bytes_; }
  [[nodiscard]] const Codec& codec() const noexcept { return *codec_; }
  // Of host memory, for moves of so many pages that pass through a buffer.
  [[nodiscard]] std::size_t buffer_bytes(std::size_t pages) const noexcept;
  // Makes all copies and waits. Returns the bytes written to their new places. Throws DeviceError,
  // DeviceBusy, Stopped, OutOfHostMemory (the buffer), OutOfDisk, PageRefused; then nothing is in flight any
  // more.
  std::size_t run(std::span<const Move> moves, const Limits& limits);
  // Writes the cold form of a page of zeros to each of these places in cold tiers. Throws as run().
  void write_blank(std::span<const PageEnd> places, const Limits& limits);
  // One checksum each of what lies there, in the form that it has there: pages on disk pass a buffer. Throws
  // as run().
  [[nodiscard]] std::vector<std::uint64_t> checksums(std::span<const PageEnd> ends, StreamId stream,
                                                     const Limits& limits);

 private:
  class Buffer;
  [[nodiscard]] std::size_t cold_stride() const noexcept;  // from one cold page in a buffer to the next
  [[nodiscard]] std::size_t page_stride() const noexcept;  // 0: a page and its cold form are one
  [[nodiscard]] std::size_t window_pages(std::size_t pages) const noexcept;
  [[nodiscard]] bool straight(const Move& move) const noexcept;
  void copy_straight(std::span<const Move> moves, const Limits& limits);
  void copy_buffered(std::span<const Move> moves, const Limits& limits);
  void load(std::span<const Move> window, const Buffer& buffer, const Limits& limits);
  void store(std::span<const Move> window, const Buffer& buffer, const Limits& limits);
  void encode(std::span<const Move> window, const Buffer& buffer) const;
  void decode(std::span<const Move> window, const Buffer& buffer) const;
  void disk(std::span<const Move> window, const Buffer& buffer, bool writes);

  std::shared_ptr<Device> device_;
  std::shared_ptr<HostPool> pool_;
  std::shared_ptr<DiskFile> file_;
  std::shared_ptr<const Codec> codec_;
  std::size_t page_bytes_;
  std::size_t cold_bytes_;
};

}  // namespace torpor::kv
