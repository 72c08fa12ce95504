// The exception tree of the native core. Each becomes one Python exception of torpor.native.errors with the
// same name and attributes. The library never prints, exits or aborts.
#pragma once

#include <algorithm>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace torpor {

class Error : public std::runtime_error {
 public:
  explicit Error(std::string what) : std::runtime_error(whole(std::move(what))) {}

 private:
  // what() ends at a NUL: one in a name that is quoted must not hide the rest.
  static std::string whole(std::string what) {
    std::replace(what.begin(), what.end(), '\0', '?');
    return what;
  }
};

// A device, host or disk that has no room. needed and free are bytes at the moment of the refusal.
class OutOfMemory : public Error {
 public:
  OutOfMemory(const std::string& what, std::size_t needed, std::size_t free)
      : Error(what), needed_bytes(needed), free_bytes(free) {}
  std::size_t needed_bytes;
  std::size_t free_bytes;
};
class OutOfDeviceMemory final : public OutOfMemory {
 public:
  using OutOfMemory::OutOfMemory;
};
class OutOfHostMemory final : public OutOfMemory {
 public:
  using OutOfMemory::OutOfMemory;
};
class OutOfDisk final : public OutOfMemory {
 public:
  using OutOfMemory::OutOfMemory;
};

// What was saved is not what came back (K13). The saved copy is untouched.
class ContentsCorrupt final : public Error {
 public:
  ContentsCorrupt(const std::string& what, std::string owner_tag) : Error(what), tag(std::move(owner_tag)) {}
  std::string tag;
};

// A call to the driver or the kernel that failed for another reason than room. sticky: the context is lost
// for good.
class DeviceError final : public Error {
 public:
  DeviceError(const std::string& what, std::string call_name, int error_code, std::size_t size,
              bool lost = false)
      : Error(what), call(std::move(call_name)), code(error_code), size_bytes(size), sticky(lost) {}
  std::string call;
  int code;
  std::size_t size_bytes;
  bool sticky;
};

// Work on the device that did not end within the deadline (M5), or that a stop flag ended.
class DeviceBusy final : public Error {
 public:
  using Error::Error;
};
class Stopped final : public Error {
 public:
  using Error::Error;
};

// The codec of a cold tier that would not encode or decode a page. The page is where it was.
class CodecRefused : public Error {
 public:
  using Error::Error;
};

// A caller's mistake: a wrong argument, or a call in a state that does not allow it. Nothing was changed.
class Misuse final : public Error {
 public:
  using Error::Error;
};

}  // namespace torpor
