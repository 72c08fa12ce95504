// Real child processes for tests: forked, spoken to over pipes, killed for good.
#pragma once

#include <dirent.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <string>

#include "check.hpp"

namespace process {

// Runs `body` in a child; its int result is the exit status, 99 when it throws.
class Child final {
 public:
  explicit Child(const std::function<int(Child&)>& body) {
    if (pipe(to_child_) != 0 || pipe(to_parent_) != 0) check::fail(__FILE__, __LINE__, "pipe failed");
    std::fflush(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    in_child_ = true;
    int status = 99;
    try {
      status = body(*this);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "in the child: %s\n", error.what());
    }
    _exit(status);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) (void)end(SIGKILL);
    for (const int file : {to_child_[0], to_child_[1], to_parent_[0], to_parent_[1]}) close(file);
  }

  // One byte to the other side; and waiting for one.
  void tell() const {
    const char word = 1;
    if (write(in_child_ ? to_parent_[1] : to_child_[1], &word, 1) != 1)
      check::fail(__FILE__, __LINE__, "write failed");
  }
  void listen() const {
    char word = 0;
    if (read(in_child_ ? to_child_[0] : to_parent_[0], &word, 1) != 1)
      check::fail(__FILE__, __LINE__, "read failed");
  }
  // Sends a signal (0: none) and waits for the end; the raw wait status.
  int end(int signal = 0) {
    if (signal != 0) kill(pid_, signal);
    int status = 0;
    waitpid(pid_, &status, 0);
    pid_ = 0;
    return status;
  }

 private:
  int to_child_[2]{};
  int to_parent_[2]{};
  pid_t pid_ = 0;
  bool in_child_ = false;
};

inline bool exited_with(int status, int code) {
  return WIFEXITED(status) && WEXITSTATUS(status) == code;
}
inline bool killed_by(int status, int signal) {
  return WIFSIGNALED(status) && WTERMSIG(status) == signal;
}

// Reads one byte in a child, with the default handler: true when that is a SIGSEGV.
inline bool faults(std::uintptr_t at) {
  Child child([at](Child&) {
    signal(SIGSEGV, SIG_DFL);
    [[maybe_unused]] const unsigned char byte = *reinterpret_cast<volatile const unsigned char*>(at);
    return 0;
  });
  return killed_by(child.end(), SIGSEGV);
}

inline std::size_t open_files() {
  std::size_t count = 0;
  DIR* folder = opendir("/proc/self/fd");
  while (readdir(folder) != nullptr) ++count;
  closedir(folder);
  return count;
}

// Of the kernel's lists of this process's mappings: those within a range, the resident bytes of them, and
// whether a fork leaves all of them out ("dc").
struct Mapped {
  std::size_t mappings = 0;
  std::size_t resident_bytes = 0;
  bool none_is_forked = true;
};
inline Mapped mapped_within(std::uintptr_t begin, std::uintptr_t end) {
  std::ifstream smaps("/proc/self/smaps");
  Mapped found;
  bool within = false;
  for (std::string line; std::getline(smaps, line);) {
    if (line.find('-') < line.find(' ')) {  // "7f00…-7f01… rw-p …"; the others are "Name: value"
      const std::uintptr_t from = std::stoull(line, nullptr, 16);
      within = from >= begin && from < end;
      found.mappings += within ? 1 : 0;
    }
    if (within && line.starts_with("Rss:")) found.resident_bytes += std::stoull(line.substr(4)) << 10;
    if (within && line.starts_with("VmFlags:"))
      found.none_is_forked = found.none_is_forked && line.find(" dc") != std::string::npos;
  }
  return found;
}

// Resident bytes that a fork does not copy ("dc"): host buffers of ours, and no sanitizer's shadow.
inline std::size_t bytes_no_fork_copies() {
  std::ifstream smaps("/proc/self/smaps");
  std::size_t total = 0;
  std::size_t resident = 0;
  for (std::string line; std::getline(smaps, line);) {
    if (line.starts_with("Rss:")) resident = std::stoull(line.substr(4)) << 10;
    if (line.starts_with("VmFlags:") && line.find(" dc") != std::string::npos) total += resident;
  }
  return total;
}

inline std::size_t mappings() {
  std::ifstream maps("/proc/self/maps");
  std::size_t count = 0;
  for (std::string line; std::getline(maps, line);) ++count;
  return count;
}

// What the kernel has committed to the pages behind this process's memfds.
inline std::size_t committed_bytes() {
  std::size_t total = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code gone;
    const std::string target = std::filesystem::read_symlink(entry.path(), gone).string();
    struct stat found{};
    if (target.find("torpor-pages") != std::string::npos && stat(entry.path().c_str(), &found) == 0) {
      total += static_cast<std::size_t>(found.st_blocks) * 512;
    }
  }
  return total;
}

}  // namespace process
