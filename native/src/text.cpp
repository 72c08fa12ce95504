#include "text.hpp"

#include <array>
#include <cstdio>
#include <system_error>

#include "torpor/device.hpp"

namespace torpor {

std::string bytes_text(std::size_t size_bytes) {
  constexpr std::array<const char*, 5> units{"B", "KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(size_bytes);
  std::size_t unit = 0;
  while (value >= 1024.0 && unit + 1 < units.size()) {
    value /= 1024.0;
    ++unit;
  }
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), unit == 0 ? "%.0f %s" : "%.1f %s", value, units[unit]);
  return text.data();
}

std::string device_text(const Device& device) {
  if (device.kind() == DeviceKind::cuda) return "GPU " + std::to_string(device.ordinal());
  return "host device '" + device.id().substr(device.id().find(':') + 1) + "'";
}

std::string errno_text(int code) {
  return std::generic_category().message(code) + " (errno " + std::to_string(code) + ")";
}

}  // namespace torpor
