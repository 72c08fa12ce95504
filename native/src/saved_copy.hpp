// SavedCopy: a region's contents outside the device: pieces of host memory, or of a disk file.
//
// Grows piece by piece, so that a stop is heard between them and a backup can be made in the background. What
// it holds goes back to where it came from when it is dropped.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "torpor/disk_file.hpp"
#include "torpor/host_pool.hpp"
#include "torpor/participant.hpp"

namespace torpor {

class PieceMaker;  // piece_maker.hpp

class SavedCopy final {
 public:
  SavedCopy() = default;
  SavedCopy(std::shared_ptr<HostPool> pool, std::shared_ptr<DiskFile> disk, std::size_t contents_bytes,
            RestoreMode mode);
  SavedCopy(SavedCopy&& other) noexcept = default;
  SavedCopy& operator=(SavedCopy&& other) noexcept;
  SavedCopy(const SavedCopy&) = delete;
  SavedCopy& operator=(const SavedCopy&) = delete;
  ~SavedCopy() { drop(); }

  [[nodiscard]] bool empty() const noexcept { return host_.empty() && extents_.empty(); }
  [[nodiscard]] bool on_disk() const noexcept { return !extents_.empty(); }
  [[nodiscard]] bool complete() const noexcept { return saved_bytes_ == contents_bytes_ && !empty(); }
  [[nodiscard]] std::size_t saved_bytes() const noexcept { return saved_bytes_; }
  [[nodiscard]] std::size_t host_bytes() const noexcept;
  [[nodiscard]] std::size_t disk_bytes() const noexcept;

  // Saves the next piece, of at most 64 MiB, of what begins at `from`, and waits for it. On a throw nothing
  // is in flight.
  void save_piece(Address from, StageContext& context);
  // All that is left. While a piece is being copied the memory for the next one is made.
  void save_rest(Address from, StageContext& context);
  // Returns the bytes copied.
  std::size_t restore(Address to, StageContext& context) const;
  void drop() noexcept;

 private:
  [[nodiscard]] std::size_t next_bytes() const noexcept;
  // `before` stands for the piece before this one, which may still be under way.
  void begin_piece(Address from, StageContext& context, PieceMaker& maker,
                   std::optional<Device::Mark>& before);

  std::shared_ptr<HostPool> pool_;
  std::shared_ptr<DiskFile> disk_;  // null: in host memory
  std::size_t contents_bytes_ = 0;
  bool pinned_ = false;
  std::size_t saved_bytes_ = 0;
  std::vector<HostBuffer> host_;
  std::vector<DiskExtent> extents_;
};

// The ranges that checksums of contents are taken over, the same awake and asleep.
[[nodiscard]] std::vector<ByteRange> checksum_pieces(Address at, std::size_t size_bytes);

}  // namespace torpor
