// The compiled kernels as nvcc made them, or nothing when the core was built without it.
#pragma once

#include <cstddef>
#include <span>

namespace torpor::kernels {

[[nodiscard]] std::span<const std::byte> image() noexcept;

}  // namespace torpor::kernels
