// How the checksum of checksum.hpp mixes a lane of 8 bytes with its position: the one definition for the
// CPU's loops and the GPU's kernel.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define TORPOR_EVERYWHERE __host__ __device__
#else
#define TORPOR_EVERYWHERE
#endif

namespace torpor {

// For a fixed position every step can be undone, so that another lane gives another value. `position` counts
// lanes from 1. The factors are odd and of high entropy; any such would do.
TORPOR_EVERYWHERE constexpr std::uint64_t mixed(std::uint64_t lane, std::uint64_t position) noexcept {
  const std::uint64_t once = (lane ^ (position * 0x9E3779B97F4A7C15ULL)) * 0xD6E8FEB86659FD93ULL;
  return (((once << 29) | (once >> 35)) ^ position) * 0xA0761D6478BD642FULL;
}

}  // namespace torpor
