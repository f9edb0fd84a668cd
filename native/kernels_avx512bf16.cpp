// As kernels_avx512.cpp, and bf16 dot products. Compiled with those flags; called only where the CPU has them.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__) && \
    defined(__AVX512BF16__)
#include "kernels.inl"

namespace octavo {
const KernelTable* avx512bf16_kernels() {
  static const KernelTable table = OCTAVO_TABLE("avx512bf16");
  return &table;
}
}  // namespace octavo
#else
#include "types.h"
namespace octavo {
const KernelTable* avx512bf16_kernels() { return nullptr; }
}  // namespace octavo
#endif
