// The GPU's own work: copies of many small pieces in one launch, and checksums where the bytes are.
//
// Tables of work lie in page-locked host memory that the GPU reads in place. A block takes one entry at a time.
#include <cstdint>

#include "checksum_mix.hpp"
#include "work.hpp"

namespace {

using torpor::kernels::CopyPiece;
using torpor::kernels::SumPiece;

// Several loads are under way before the first store: a load from host memory takes more than a microsecond.
template <typename Word, int in_flight>
__device__ void copy_words(std::uint64_t to, std::uint64_t from, std::uint64_t size_bytes) {
  auto* target = reinterpret_cast<Word*>(to);
  const auto* source = reinterpret_cast<const Word*>(from);
  const std::uint64_t words = size_bytes / sizeof(Word);
  const std::uint64_t stride = blockDim.x;
  std::uint64_t at = threadIdx.x;
  for (; at + (in_flight - 1) * stride < words; at += in_flight * stride) {
    Word held[in_flight];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) held[i] = source[at + i * stride];
#pragma unroll
    for (int i = 0; i < in_flight; ++i) target[at + i * stride] = held[i];
  }
  for (; at < words; at += stride) target[at] = source[at];
}

__device__ std::uint64_t lane_at(const unsigned char* bytes, unsigned count) {
  std::uint64_t lane = 0;
  for (unsigned i = 0; i < count; ++i) lane |= static_cast<std::uint64_t>(bytes[i]) << (8 * i);
  return lane;
}

__device__ std::uint64_t part_of(const SumPiece& piece) {
  const std::uint64_t lanes = piece.size_bytes / 8;
  const std::uint64_t first = piece.position / 8 + 1;
  std::uint64_t sum = 0;
  if (piece.at % 16 == 0) {
    const auto* pairs = reinterpret_cast<const ulonglong2*>(piece.at);
#pragma unroll 4
    for (std::uint64_t i = threadIdx.x; i < lanes / 2; i += blockDim.x) {
      const ulonglong2 pair = pairs[i];
      sum += torpor::mixed(pair.x, first + 2 * i) + torpor::mixed(pair.y, first + 2 * i + 1);
    }
    if (lanes % 2 == 1 && threadIdx.x == 0) {
      sum += torpor::mixed(reinterpret_cast<const std::uint64_t*>(piece.at)[lanes - 1], first + lanes - 1);
    }
  } else {
    const auto* bytes = reinterpret_cast<const unsigned char*>(piece.at);
    for (std::uint64_t i = threadIdx.x; i < lanes; i += blockDim.x) {
      sum += torpor::mixed(lane_at(bytes + 8 * i, 8), first + i);
    }
  }
  const unsigned rest = piece.size_bytes % 8;
  if (rest > 0 && threadIdx.x == 0) {
    sum += torpor::mixed(lane_at(reinterpret_cast<const unsigned char*>(piece.at) + 8 * lanes, rest), first + lanes);
  }
  return sum;
}

}  // namespace

extern "C" __global__ void torpor_copy(const CopyPiece* pieces, unsigned count) {
  for (unsigned i = blockIdx.x; i < count; i += gridDim.x) {
    const CopyPiece piece = pieces[i];
    const std::uint64_t alignment = piece.to | piece.from | piece.size_bytes;
    if (alignment % 16 == 0) {
      copy_words<uint4, 4>(piece.to, piece.from, piece.size_bytes);
    } else if (alignment % 4 == 0) {
      copy_words<std::uint32_t, 4>(piece.to, piece.from, piece.size_bytes);
    } else {
      copy_words<std::uint8_t, 4>(piece.to, piece.from, piece.size_bytes);
    }
  }
}

// sums[i] becomes the checksum of pieces[i]. Blocks of whole warps, 1,024 threads at most.
extern "C" __global__ void torpor_checksum(const SumPiece* pieces, unsigned count, std::uint64_t* sums) {
  __shared__ std::uint64_t of_warp[32];
  for (unsigned i = blockIdx.x; i < count; i += gridDim.x) {
    std::uint64_t sum = part_of(pieces[i]);
    for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(0xFFFFFFFFU, sum, step);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (unsigned warp = 1; warp < blockDim.x / 32; ++warp) sum += of_warp[warp];
      sums[i] = sum;
    }
    __syncthreads();  // before the next piece writes of_warp
  }
}
