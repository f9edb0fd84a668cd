// AVX2 + FMA + F16C. Compiled with those flags; called only where the CPU has them.
#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "kernels.inl"

namespace octavo {
const KernelTable* avx2_kernels() {
  static const KernelTable table = OCTAVO_TABLE("avx2");
  return &table;
}
}  // namespace octavo
#else
#include "types.h"
namespace octavo {
const KernelTable* avx2_kernels() { return nullptr; }
}  // namespace octavo
#endif
