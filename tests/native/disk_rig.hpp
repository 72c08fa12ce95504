// A folder for disk files, and a disk that fails when it is told to.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "torpor/disk_file.hpp"
#include "torpor/errors.hpp"

namespace rig {

inline std::string disk_folder() {
  return std::filesystem::temp_directory_path().string();
}

// The k-th read or write from now throws DeviceError; 0 = none.
class FaultyDisk final : public torpor::DiskFile {
 public:
  using DiskFile::DiskFile;
  void write(std::uint64_t offset, torpor::Address from, std::size_t size_bytes) override {
    count("pwrite");
    DiskFile::write(offset, from, size_bytes);
  }
  void read(std::uint64_t offset, torpor::Address to, std::size_t size_bytes) override {
    count("pread");
    DiskFile::read(offset, to, size_bytes);
  }
  void fail_at(std::size_t k) {
    fail_in_ = k;
    calls_ = 0;
  }
  [[nodiscard]] std::size_t calls() const noexcept { return calls_; }

 private:
  void count(const char* call) {
    ++calls_;
    if (fail_in_ == 0) return;
    --fail_in_;
    if (fail_in_ == 0) {
      throw torpor::DeviceError(std::string("injected fault in ") + call, call, 5, 0);
    }
  }
  std::size_t fail_in_ = 0;
  std::size_t calls_ = 0;
};

}  // namespace rig
