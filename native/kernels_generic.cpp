// Plain C++: runs everywhere, and is what the other instruction sets are compared with bit by bit.
#define OCTAVO_GENERIC 1
#include "kernels.inl"

namespace octavo {
const KernelTable* generic_kernels() {
  static const KernelTable table = OCTAVO_TABLE("generic");
  return &table;
}
}  // namespace octavo
