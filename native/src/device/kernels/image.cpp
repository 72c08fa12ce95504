#include "image.hpp"

#ifdef TORPOR_FATBIN
// The assembler takes the file in as it is. A module must start at a multiple of 8 bytes.
asm(".section .rodata\n"
    ".balign 64\n"
    "torpor_fatbin_begin:\n"
    ".incbin \"" TORPOR_FATBIN
    "\"\n"
    "torpor_fatbin_end:\n"
    ".byte 0\n"
    ".previous\n");
extern "C" const std::byte torpor_fatbin_begin[];
extern "C" const std::byte torpor_fatbin_end[];
#endif

namespace torpor::kernels {

std::span<const std::byte> image() noexcept {
#ifdef TORPOR_FATBIN
  return {torpor_fatbin_begin, torpor_fatbin_end};
#else
  return {};
#endif
}

}  // namespace torpor::kernels
