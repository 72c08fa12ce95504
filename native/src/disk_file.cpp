// The unlinked file, its room, and reading and writing it.
#include "torpor/disk_file.hpp"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iterator>
#include <utility>

#include "text.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

// A file without a name; where the file system has no such thing, one whose name is taken away at once.
int open_unlinked(const std::string& folder) {
  const int file = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  std::string name = folder + "/torpor-XXXXXX";
  const int named = mkostemp(name.data(), O_CLOEXEC);
  if (named >= 0) unlink(name.c_str());
  return named;
}

[[noreturn]] void no_room(const std::string& folder, std::size_t needed_bytes, std::size_t free_bytes) {
  throw OutOfDisk("needed " + bytes_text(needed_bytes) + " on the disk under '" + folder + "', free " +
                      bytes_text(free_bytes) +
                      "; free room there, raise disk_bytes, or choose another restore mode",
                  needed_bytes, free_bytes);
}

void check_blocks(const char* call, std::uint64_t offset, Address memory, std::size_t size_bytes) {
  if (offset % DiskFile::block_bytes == 0 && memory % DiskFile::block_bytes == 0 &&
      size_bytes % DiskFile::block_bytes == 0) {
    return;
  }
  throw Misuse(std::string(call) + ": memory, offset and size must be whole blocks of " +
               std::to_string(DiskFile::block_bytes) + " bytes");
}

}  // namespace

DiskFile::DiskFile(const std::string& folder, std::size_t limit_bytes)
    : folder_(folder), limit_bytes_(limit_bytes), owner_pid_(getpid()), file_(open_unlinked(folder)) {
  if (file_ < 0) {
    throw Misuse("cannot make a file in '" + folder + "': " + errno_text(errno) +
                 "; choose a folder that exists and that this user can write to");
  }
  const int flags = fcntl(file_, F_GETFL);
  direct_ = fcntl(file_, F_SETFL, flags | O_DIRECT) == 0;
}

DiskFile::~DiskFile() {
  close(file_);
}

std::size_t DiskFile::disk_room_bytes() const noexcept {
  struct statvfs now{};
  if (fstatvfs(file_, &now) != 0) return 0;
  return static_cast<std::size_t>(now.f_bavail) * now.f_frsize;
}

std::size_t DiskFile::free_bytes() const noexcept {
  const std::size_t used = used_bytes();
  return std::min(limit_bytes_ - std::min(limit_bytes_, used), disk_room_bytes());
}

std::size_t DiskFile::used_bytes() const noexcept {
  const std::lock_guard<std::mutex> guard(mutex_);
  return used_bytes_;
}

std::size_t DiskFile::allocated_bytes() const noexcept {
  struct stat now{};
  return fstat(file_, &now) == 0 ? static_cast<std::size_t>(now.st_blocks) * 512 : 0;
}

void DiskFile::allocate(std::uint64_t offset, std::size_t size_bytes) const {
  // Asked first: some file systems fill the disk before they notice that it is too small.
  const std::size_t room_bytes = disk_room_bytes();
  if (size_bytes > room_bytes) no_room(folder_, size_bytes, room_bytes);
  if (fallocate(file_, 0, static_cast<off_t>(offset), static_cast<off_t>(size_bytes)) == 0) return;
  const int code = errno;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(size_bytes));
  if (code == ENOSPC || code == EDQUOT || code == EFBIG) no_room(folder_, size_bytes, disk_room_bytes());
  // Some file systems allocate at the first write only; that write then says when there is no room.
  if (code == EOPNOTSUPP) return;
  throw DeviceError(
      "cannot allocate " + bytes_text(size_bytes) + " under '" + folder_ + "': " + errno_text(code),
      "fallocate", code, size_bytes);
}

std::uint64_t DiskFile::take(std::size_t size_bytes) {
  const std::size_t length = round_up(size_bytes, block_bytes);
  if (length == 0) throw Misuse("take: at least one byte of a disk file");
  const std::lock_guard<std::mutex> guard(mutex_);
  const std::size_t below_limit = limit_bytes_ - std::min(limit_bytes_, used_bytes_);
  if (length > below_limit) no_room(folder_, length, std::min(below_limit, disk_room_bytes()));
  const auto hole = std::ranges::find_if(holes_, [&](const auto& one) { return one.second >= length; });
  const std::uint64_t offset = hole == holes_.end() ? end_ : hole->first;
  allocate(offset, length);
  if (hole == holes_.end()) {
    end_ += length;
  } else if (hole->second == length) {
    holes_.erase(hole);
  } else {
    auto rest = holes_.extract(hole);  // moves the entry: no allocation that could fail half-way
    rest.key() += length;
    rest.mapped() -= length;
    holes_.insert(std::move(rest));
  }
  used_bytes_ += length;
  return offset;
}

void DiskFile::give_back(std::uint64_t offset, std::size_t size_bytes) noexcept {
  if (getpid() != owner_pid_ || size_bytes == 0) return;  // the file is still the parent's
  std::size_t length = round_up(size_bytes, block_bytes);
  const std::lock_guard<std::mutex> guard(mutex_);
  used_bytes_ -= length;
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(length));
  const auto after = holes_.lower_bound(offset);
  if (after != holes_.end() && after->first == offset + length) {
    length += after->second;
    holes_.erase(after);
  }
  const auto next = holes_.lower_bound(offset);
  if (next != holes_.begin() && std::prev(next)->first + std::prev(next)->second == offset) {
    const auto before = std::prev(next);
    offset = before->first;
    length += before->second;
    holes_.erase(before);
  }
  if (offset + length == end_) {
    end_ = offset;
    if (ftruncate(file_, static_cast<off_t>(end_)) != 0) return;  // punched already: only the size stays
    return;
  }
  try {
    holes_.emplace(offset, length);
  } catch (...) {
    // No memory for the entry: these offsets are not used again, and their room is free on the disk.
  }
}

void DiskFile::write(std::uint64_t offset, Address from, std::size_t size_bytes) {
  check_blocks("write", offset, from, size_bytes);
  while (size_bytes > 0) {
    const ssize_t done =
        pwrite(file_, reinterpret_cast<const void*>(from), size_bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      const int code = done < 0 ? errno : EIO;
      if (code == ENOSPC || code == EDQUOT) no_room(folder_, size_bytes, disk_room_bytes());
      throw DeviceError(
          "cannot write " + bytes_text(size_bytes) + " under '" + folder_ + "': " + errno_text(code),
          "pwrite", code, size_bytes);
    }
    const auto part_bytes = static_cast<std::size_t>(done);
    offset += part_bytes;
    from += part_bytes;
    size_bytes -= part_bytes;
  }
}

void DiskFile::read(std::uint64_t offset, Address to, std::size_t size_bytes) {
  check_blocks("read", offset, to, size_bytes);
  while (size_bytes > 0) {
    const ssize_t done = pread(file_, reinterpret_cast<void*>(to), size_bytes, static_cast<off_t>(offset));
    if (done < 0 && errno == EINTR) continue;
    if (done <= 0) {
      const int code = done < 0 ? errno : EIO;  // the end of the file came too early
      throw DeviceError(
          "cannot read " + bytes_text(size_bytes) + " under '" + folder_ + "': " + errno_text(code), "pread",
          code, size_bytes);
    }
    const auto part_bytes = static_cast<std::size_t>(done);
    offset += part_bytes;
    to += part_bytes;
    size_bytes -= part_bytes;
  }
}

DiskExtent::DiskExtent(std::shared_ptr<DiskFile> file, std::size_t size_bytes)
    : file_(std::move(file)),
      offset_(file_->take(size_bytes)),
      size_bytes_(round_up(size_bytes, DiskFile::block_bytes)) {}

DiskExtent::DiskExtent(DiskExtent&& other) noexcept
    : file_(std::move(other.file_)),
      offset_(std::exchange(other.offset_, 0)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

DiskExtent& DiskExtent::operator=(DiskExtent&& other) noexcept {
  DiskExtent gone(std::move(*this));
  file_ = std::move(other.file_);
  offset_ = std::exchange(other.offset_, 0);
  size_bytes_ = std::exchange(other.size_bytes_, 0);
  return *this;
}

DiskExtent::~DiskExtent() {
  if (file_) file_->give_back(offset_, size_bytes_);
}

}  // namespace torpor
