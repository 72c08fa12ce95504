// Entries of the tables that the kernels read: the same layout for the CPU that writes them.
#pragma once

#include <cstdint>

namespace torpor::kernels {

struct CopyPiece {
  std::uint64_t to;
  std::uint64_t from;
  std::uint64_t size_bytes;
};

struct SumPiece {
  std::uint64_t at;
  std::uint64_t size_bytes;  // a multiple of 8 but for a range's last piece
  std::uint64_t position;    // in its range, a multiple of 8
};

}  // namespace torpor::kernels
