// Packing of weights into the layout of types.h, once at load.
#include <cstdlib>
#include <cstring>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "octavo_native.h"
#include "types.h"

namespace octavo {
namespace {

uint8_t* allocate(size_t bytes) {
  const size_t huge = (size_t)2 << 20, align = bytes >= huge ? huge : 64;
  const size_t rounded = (bytes + 4096 + align - 1) / align * align;  // slack: prefetches run past the end
  void* p = std::aligned_alloc(align, rounded);
  if (!p) throw std::bad_alloc();
#if defined(__linux__)
  if (align == huge) madvise(p, rounded, MADV_HUGEPAGE);
#endif
  std::memset(p, 0, rounded);
  return (uint8_t*)p;
}

void pack_groups(Weight& w, const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum) {
  const int groups = w.in / kGroup, code_bytes = w.kind == kInt4 ? 256 : 512;
  const size_t group_bytes = (size_t)code_bytes + (w.minimum ? 64 : 32);
  for (int o = 0; o < w.blocks * kBlock; o++) {
    const int lane = o % kBlock;
    uint8_t* to = w.data + (size_t)(o / kBlock) * w.block_bytes;
    for (int g = 0; g < groups; g++, to += group_bytes) {
      if (o >= w.out) {  // padding: code 0 with scale 0
        if (w.kind == kInt8)
          for (int i = 0; i < kGroup; i++) to[64 * (i / 4) + 4 * lane + i % 4] = 128;
        continue;
      }
      const uint8_t* c = codes + ((size_t)o * w.in + (size_t)g * kGroup);
      for (int i = 0; i < kGroup; i++) {
        if (w.kind == kInt4)
          to[64 * ((i % 16) / 4) + 4 * lane + i % 4] |= (uint8_t)(i < 16 ? c[i] & 15 : (c[i] & 15) << 4);
        else
          to[64 * (i / 4) + 4 * lane + i % 4] = (uint8_t)(c[i] ^ 128);
      }
      std::memcpy(to + code_bytes + 2 * lane, scale + (size_t)o * groups + g, 2);
      if (w.minimum && minimum) std::memcpy(to + code_bytes + 32 + 2 * lane, minimum + (size_t)o * groups + g, 2);
    }
  }
}

template <class T>
void pack_dense(Weight& w, const T* dense) {
  for (int o = 0; o < w.out; o++) {
    T* to = (T*)(w.data + (size_t)(o / kBlock) * w.block_bytes) + o % kBlock;
    for (int k = 0; k < w.in; k++) to[(size_t)k * kBlock] = dense[(size_t)o * w.in + k];
  }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

extern "C" void* octavo_weight(int kind, int64_t out, int64_t in, const void* codes, const uint16_t* scale,
                               const uint16_t* minimum, const void* dense, const float* bias) {
  auto* w = new Weight{};
  w->kind = (Kind)kind;
  w->out = (int)out;
  w->in = (int)in;
  w->minimum = kind == kInt4 || (kind == kInt8 && minimum);
  w->blocks = (int)((out + kBlock - 1) / kBlock);
  const size_t groups = (size_t)in / kGroup;
  switch (w->kind) {
    case kInt4: w->block_bytes = groups * 320; break;
    case kInt8: w->block_bytes = groups * (w->minimum ? 576 : 544); break;
    case kBf16: w->block_bytes = (size_t)in * 32; break;
    default: w->block_bytes = (size_t)in * 64; break;
  }
  w->bytes = w->block_bytes * (size_t)w->blocks;
  w->data = allocate(w->bytes);
  if (kind == kInt4 || kind == kInt8)
    pack_groups(*w, (const uint8_t*)codes, scale, minimum);
  else if (kind == kBf16)
    pack_dense(*w, (const uint16_t*)dense);
  else
    pack_dense(*w, (const float*)dense);
  if (bias) {
    w->bias = (float*)allocate((size_t)w->blocks * kBlock * 4);
    std::memcpy(w->bias, bias, (size_t)out * 4);
  }
  return w;
}

extern "C" int64_t octavo_weight_bytes(const void* weight) { return (int64_t)((const Weight*)weight)->bytes; }

extern "C" void octavo_weight_free(void* weight) {
  auto* w = (Weight*)weight;
  if (!w) return;
  std::free(w->data);
  std::free(w->bias);
  delete w;
}
