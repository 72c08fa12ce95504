#include "torpor/device.hpp"
#include "torpor/errors.hpp"

namespace torpor {

std::shared_ptr<Device> make_cuda_device(int) {
  throw DeviceError("no CUDA driver here", "dlopen", 0, 0);
}

int cuda_device_count() noexcept {
  return 0;
}

}  // namespace torpor
