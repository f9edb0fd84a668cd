// AVX-512 F/BW/VL/DQ with VNNI. Compiled with those flags; called only where the CPU has them.
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)
#include "kernels.inl"

namespace octavo {
const KernelTable* avx512_kernels() {
  static const KernelTable table = OCTAVO_TABLE("avx512");
  return &table;
}
}  // namespace octavo
#else
#include "types.h"
namespace octavo {
const KernelTable* avx512_kernels() { return nullptr; }
}  // namespace octavo
#endif
