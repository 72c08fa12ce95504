// PageMover: pages between slots and cold tiers, in the form that each wants.
//
// Without a codec's work pages go straight between GPU and host memory, as few large copies; everything else
// passes a buffer, window by window. Sources are only read, so that a move that fails has changed nothing.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "torpor/device.hpp"
#include "torpor/disk_file.hpp"
#include "torpor/errors.hpp"
#include "torpor/host_pool.hpp"
#include "torpor/kv/codec.hpp"
#include "torpor/kv/page.hpp"
#include "torpor/transfer.hpp"

namespace torpor::kv {

// Until when, and what may end it.
struct Limits {
  Deadline deadline;
  const StopFlag* stop = nullptr;
};

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
  // What a Flow should be given at a time: little enough that the device never waits for the next ones.
  [[nodiscard]] std::size_t flow_pages() const noexcept {
    return std::max<std::size_t>(1, flow_bytes / std::max<std::size_t>(1, page_bytes_));
  }
  // Makes all copies and waits. Returns the bytes written to their new places. Throws DeviceError,
  // DeviceBusy, Stopped, OutOfHostMemory (the buffer), OutOfDisk, PageRefused; then nothing is in flight any
  // more.
  std::size_t run(std::span<const Move> moves, const Limits& limits);
  // The same for moves that are planned while earlier ones are under way.
  class Flow;
  // Writes the cold form of a page of zeros to each of these places in cold tiers. Throws as run().
  void write_blank(std::span<const PageEnd> places, const Limits& limits);
  // One checksum each of what lies there, in the form that it has there: pages on disk pass a buffer. Throws
  // as run().
  [[nodiscard]] std::vector<std::uint64_t> checksums(std::span<const PageEnd> ends, StreamId stream,
                                                     const Limits& limits);

 private:
  static constexpr std::size_t flow_bytes = std::size_t{16} << 20;
  class Buffer;
  [[nodiscard]] std::size_t cold_stride() const noexcept;  // from one cold page in a buffer to the next
  [[nodiscard]] std::size_t page_stride() const noexcept;  // 0: a page and its cold form are one
  [[nodiscard]] std::size_t window_pages(std::size_t pages) const noexcept;
  [[nodiscard]] bool straight(const Move& move) const noexcept;
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

// No move may need what another has written. Throws as run(); when it goes without finish() nothing is in
// flight any more.
class PageMover::Flow final {
 public:
  // The mover must outlive it.
  Flow(PageMover& mover, const Limits& limits) : mover_(mover), limits_(limits) {}
  // Returns while copies straight between GPU and host memory are under way still; those that pass a buffer
  // are done. Moves in the order of their addresses, on either side, are the quickest: neighbours are joined.
  void add(std::span<const Move> moves);
  // Waits for all. Returns the bytes written to their new places since the start.
  std::size_t finish();
  // Windows of straight copies put under way since the start.
  [[nodiscard]] std::size_t windows() const noexcept;
  // Seconds spent waiting for them.
  [[nodiscard]] double waited_s() const noexcept;

 private:
  void add_alike(std::span<const Move> moves);
  void copy_straight(std::span<const Move> moves);
  // One direction, and the piece of host memory that its last copy has an end in.
  struct Lane {
    Lane(Device& device, StreamId stream, const Limits& limits)
        : transfer(device, stream, limits.deadline, limits.stop) {}
    Transfer transfer;
    std::uint32_t last_piece = 0;
  };
  [[nodiscard]] Lane& lane(bool out);

  PageMover& mover_;
  Limits limits_;
  std::optional<Lane> out_;
  std::optional<Lane> in_;
  std::size_t moved_bytes_ = 0;
};

}  // namespace torpor::kv
