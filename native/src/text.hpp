// Words for error messages.
#pragma once

#include <cstddef>
#include <string>

namespace torpor {

class Device;

// "512 B", "1.5 MiB", "12.0 GiB".
[[nodiscard]] std::string bytes_text(std::size_t size_bytes);
// "GPU 1", or "host device 'name'".
[[nodiscard]] std::string device_text(const Device& device);
// "Cannot allocate memory (errno 12)".
[[nodiscard]] std::string errno_text(int code);

}  // namespace torpor
