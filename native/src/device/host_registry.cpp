#include "host_registry.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdint>
#include <cstdlib>

#include "text.hpp"
#include "torpor/errors.hpp"

namespace torpor {

namespace {

constexpr std::uint64_t magic = 0x31736b6f6f626d74;  // "tmbooks1"
constexpr std::size_t record_count = 512;
constexpr off_t books_lock = 0;    // byte that serialises changes
constexpr off_t record_locks = 1;  // byte record_locks + i is locked while record i's owner lives

[[noreturn]] void fail(const std::string& what, const char* call) {
  const int code = errno;
  throw DeviceError(what + ": " + errno_text(code), call, code, 0);
}

bool lock_byte(int file, off_t byte, short type, bool wait) noexcept {
  struct flock lock{};
  lock.l_type = type;
  lock.l_whence = SEEK_SET;
  lock.l_start = byte;
  lock.l_len = 1;
  while (fcntl(file, wait ? F_OFD_SETLKW : F_OFD_SETLK, &lock) != 0) {
    if (errno != EINTR) return false;
  }
  return true;
}

// A directory of this user alone. Another user could have made it first in /tmp, so what is there is checked.
std::string private_directory() {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  const bool usable = runtime != nullptr && *runtime == '/' && access(runtime, W_OK | X_OK) == 0;
  const std::string path =
      usable ? std::string(runtime) + "/torpor" : "/tmp/torpor-" + std::to_string(geteuid());
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    fail(
        "cannot make " + path + " for the books of host devices; set XDG_RUNTIME_DIR to a writable directory",
        "mkdir");
  }
  struct stat found{};
  if (lstat(path.c_str(), &found) != 0) fail("cannot look at " + path, "lstat");
  if (!S_ISDIR(found.st_mode) || found.st_uid != geteuid() || (found.st_mode & 0077) != 0) {
    throw Misuse(
        path + " must be a directory that belongs to you with mode 0700; remove it, or set XDG_RUNTIME_DIR");
  }
  return path;
}

void check_name(const std::string& name) {
  const std::string allowed = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._:-";
  if (name.empty() || name.size() > 100 || name.find_first_not_of(allowed) != std::string::npos) {
    throw Misuse("'" + name +
                 "' cannot name a host device; use 1 to 100 letters, digits, '.', '_', ':' or '-'");
  }
}

}  // namespace

struct HostRegistry::Books {
  struct Record {
    std::uint64_t live;
    std::uint64_t used_bytes;
  };
  std::uint64_t magic;
  std::uint64_t capacity_bytes;
  std::array<Record, record_count> records;
};

class HostRegistry::Locked final {
 public:
  explicit Locked(HostRegistry& registry) : registry_(registry), guard_(registry.mutex_) {
    if (registry_.foreign())
      throw Misuse("a device does not survive a fork; make one of your own in the child");
    if (!lock_byte(registry_.file_, books_lock, F_WRLCK, true))
      fail("cannot lock " + registry_.path_, "fcntl");
  }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;
  ~Locked() { lock_byte(registry_.file_, books_lock, F_UNLCK, false); }

 private:
  HostRegistry& registry_;
  std::lock_guard<std::mutex> guard_;
};

HostRegistry::HostRegistry(const std::string& name, std::size_t capacity_bytes)
    : name_(name), owner_pid_(getpid()) {
  check_name(name);
  path_ = private_directory() + "/device-" + name + ".books";
  open_books();
  try {
    attach(capacity_bytes);
  } catch (...) {
    if (books_ != nullptr) munmap(books_, sizeof(Books));
    close(file_);
    throw;
  }
}

void HostRegistry::open_books() {
  // The last one to leave unlinks the file; whoever opened it in that moment must open again.
  for (;;) {
    file_ = open(path_.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (file_ < 0) fail("cannot open " + path_, "open");
    struct stat found{};
    const bool locked = lock_byte(file_, books_lock, F_WRLCK, true);
    if (locked && fstat(file_, &found) == 0 && found.st_nlink > 0) return;
    const int code = errno;
    close(file_);
    errno = code;
    if (!locked) fail("cannot lock " + path_, "fcntl");
  }
}

// Comes with the lock of the books held by open_books, and gives it back.
void HostRegistry::attach(std::size_t capacity_bytes) {
  if (ftruncate(file_, sizeof(Books)) != 0) fail("cannot size " + path_, "ftruncate");
  void* mapped = mmap(nullptr, sizeof(Books), PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
  if (mapped == MAP_FAILED) fail("cannot map " + path_, "mmap");
  books_ = static_cast<Books*>(mapped);
  (void)used_bytes();
  bool alone = true;
  std::size_t vacant = record_count;
  for (std::size_t i = record_count; i-- > 0;) {
    if (books_->records[i].live != 0) alone = false;
    if (books_->records[i].live == 0) vacant = i;
  }
  if (alone) {
    books_->magic = magic;
    books_->capacity_bytes = capacity_bytes;
  }
  if (books_->magic != magic) throw Misuse(path_ + " is not the books of a host device; remove it");
  if (books_->capacity_bytes != capacity_bytes) {
    throw Misuse("host device '" + name_ + "' is in use with a capacity of " +
                 bytes_text(books_->capacity_bytes) + ", not " + bytes_text(capacity_bytes) +
                 "; give the same capacity or another name");
  }
  if (vacant == record_count) {
    throw Misuse("host device '" + name_ + "' has " + std::to_string(record_count) +
                 " users already; end some");
  }
  if (!lock_byte(file_, record_locks + static_cast<off_t>(vacant), F_WRLCK, false)) {
    fail("cannot lock a record in " + path_, "fcntl");
  }
  record_ = vacant;
  books_->records[record_] = {1, 0};
  lock_byte(file_, books_lock, F_UNLCK, false);
}

HostRegistry::~HostRegistry() {
  // In a forked child the open file, its locks and the books still belong to the parent: only let go.
  if (!foreign() && lock_byte(file_, books_lock, F_WRLCK, true)) {
    books_->records[record_] = {0, 0};
    (void)used_bytes();
    bool last = true;
    for (const Books::Record& record : books_->records) last = last && record.live == 0;
    if (last) unlink(path_.c_str());
  }
  munmap(books_, sizeof(Books));
  close(file_);
}

std::size_t HostRegistry::used_bytes() noexcept {
  std::size_t used = 0;
  for (std::size_t i = 0; i < record_count; ++i) {
    Books::Record& record = books_->records[i];
    if (record.live == 0) continue;
    const off_t byte = record_locks + static_cast<off_t>(i);
    const bool own = i == record_;
    if (!own && lock_byte(file_, byte, F_WRLCK, false)) {  // nobody holds it: its owner is dead
      record = {0, 0};
      lock_byte(file_, byte, F_UNLCK, false);
      continue;
    }
    used += record.used_bytes;
  }
  return used;
}

bool HostRegistry::foreign() const noexcept {
  return getpid() != owner_pid_;
}

void HostRegistry::take(std::size_t size_bytes) {
  const Locked locked(*this);
  const std::size_t used = used_bytes();
  const std::size_t free_bytes = books_->capacity_bytes > used ? books_->capacity_bytes - used : 0;
  if (size_bytes > free_bytes) {
    throw OutOfDeviceMemory("needed " + bytes_text(size_bytes) + ", free " + bytes_text(free_bytes) +
                                " on host device '" + name_ +
                                "'; put something on it to sleep, or give it more",
                            size_bytes, free_bytes);
  }
  books_->records[record_].used_bytes += size_bytes;
}

void HostRegistry::give(std::size_t size_bytes) noexcept {
  try {
    const Locked locked(*this);
    books_->records[record_].used_bytes -= size_bytes;
  } catch (...) {
    // Only a kernel without locks gets here; the record goes with the process at the latest.
  }
}

MemoryInfo HostRegistry::info() {
  const Locked locked(*this);
  const std::size_t used = used_bytes();
  const std::size_t capacity = books_->capacity_bytes;
  return {.free_bytes = capacity > used ? capacity - used : 0, .total_bytes = capacity};
}

}  // namespace torpor
