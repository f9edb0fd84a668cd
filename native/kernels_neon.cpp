// AArch64 with the int8 dot product. Compiled with those flags; called only where the CPU has them.
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
#include "kernels.inl"

namespace octavo {
const KernelTable* neon_kernels() {
  static const KernelTable table = OCTAVO_TABLE("neon");
  return &table;
}
}  // namespace octavo
#else
#include "types.h"
namespace octavo {
const KernelTable* neon_kernels() { return nullptr; }
}  // namespace octavo
#endif
