// Packing of weights into the layout of types.h, once at load.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "octavo_native.h"
#include "types.h"

namespace octavo {
namespace {

// Packed weights lie side by side in large slabs of 2 MB pages. A layer's matrix is smaller than such a page; on its own
// it would get small ones, and a step then spends as long on looking up pages as on reading them.
class Slabs {
 public:
  uint8_t* take(size_t bytes) {  // 64-byte aligned, zeroed
    bytes = (bytes + 63) / 64 * 64;
    std::lock_guard<std::mutex> lock(mutex_);
    if (slabs_.empty() || slabs_.back().used + bytes > slabs_.back().size) slabs_.push_back(map(bytes));
    Slab& slab = slabs_.back();
    uint8_t* p = slab.data + slab.used;
    slab.used += bytes;
    slab.live++;
    return p;
  }
  void give(uint8_t* p) {
    if (!p) return;
    std::lock_guard<std::mutex> lock(mutex_);
    for (size_t i = 0; i < slabs_.size(); i++) {
      Slab& slab = slabs_[i];
      if (p < slab.data || p >= slab.data + slab.size) continue;
      if (--slab.live == 0) unmap(slab), slabs_.erase(slabs_.begin() + (std::ptrdiff_t)i);
      return;
    }
  }

 private:
  struct Slab {
    uint8_t* data;
    size_t size, used, live;
    void* mapping;
    size_t mapped;
  };
  static constexpr size_t kHuge = (size_t)2 << 20, kSlab = 16 * kHuge;

#if defined(__linux__) && !defined(__SANITIZE_ADDRESS__)
  static Slab map(size_t bytes) {
    const size_t size = std::max(kSlab, (bytes + kHuge - 1) / kHuge * kHuge), mapped = size + kHuge;
    void* p = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    auto* data = (uint8_t*)(((uintptr_t)p + kHuge - 1) / kHuge * kHuge);
    madvise(data, size, MADV_HUGEPAGE);  // untouched parts of a slab take no memory
    return {data, size, 0, 0, p, mapped};
  }
  static void unmap(const Slab& slab) { munmap(slab.mapping, slab.mapped); }
#else  // one slab for each matrix, so that the sanitizer sees its end
  static Slab map(size_t bytes) {
    void* p = std::aligned_alloc(64, bytes);
    if (!p) throw std::bad_alloc();
    std::memset(p, 0, bytes);
    return {(uint8_t*)p, bytes, 0, 0, p, bytes};
  }
  static void unmap(const Slab& slab) { std::free(slab.mapping); }
#endif

  std::mutex mutex_;
  std::vector<Slab> slabs_;
};

Slabs& slabs() {
  static auto* all = new Slabs;  // never destroyed: weights may outlive static objects
  return *all;
}

// The fifth bit of input i of an output.
void set_high_bit(uint8_t* group, int lane, int i) {
  const int bit = place_of(lane, i);
  group[256 + bit / 8] |= (uint8_t)(1 << (bit % 8));
}

void pack_groups(Weight& w, const uint8_t* codes, const uint16_t* scale, const uint16_t* minimum) {
  const int groups = w.in / kGroup, bytes = code_bytes(w.kind);
  const size_t group_bytes = (size_t)bytes + (w.minimum ? 64 : 32);
  for (int o = 0; o < w.blocks * kBlock; o++) {
    const int lane = o % kBlock;
    uint8_t* to = w.data + (size_t)(o / kBlock) * w.block_bytes;
    for (int g = 0; g < groups; g++, to += group_bytes) {
      if (o >= w.out) {  // padding: code 0 with scale 0
        if (w.kind == kInt8)
          for (int i = 0; i < kGroup; i++) to[place_of(lane, i)] = 128;
        if (w.kind == kInt5)
          for (int i = 0; i < kGroup; i++) set_high_bit(to, lane, i);
        continue;
      }
      const uint8_t* c = codes + ((size_t)o * w.in + (size_t)g * kGroup);
      for (int i = 0; i < kGroup; i++) {
        if (w.kind == kInt5 && (c[i] ^ 16) & 16) set_high_bit(to, lane, i);  // code+16, of which five bits
        if (w.kind != kInt8)
          to[64 * ((i % 16) / 4) + 4 * lane + i % 4] |= (uint8_t)(i < 16 ? c[i] & 15 : (c[i] & 15) << 4);
        else
          to[place_of(lane, i)] = (uint8_t)(c[i] ^ 128);
      }
      std::memcpy(to + bytes + 2 * lane, scale + (size_t)o * groups + g, 2);
      if (w.minimum && minimum) std::memcpy(to + bytes + 32 + 2 * lane, minimum + (size_t)o * groups + g, 2);
    }
  }
}

void pack_bf16(Weight& w, const uint16_t* dense) {
  for (int o = 0; o < w.out; o++) {
    auto* to = (uint16_t*)(w.data + (size_t)(o / kBlock) * w.block_bytes);
    for (int k = 0; k < w.in; k++) to[bf16_place(o % kBlock, k)] = dense[(size_t)o * w.in + k];
  }
}

void pack_fp32(Weight& w, const float* dense) {
  for (int o = 0; o < w.out; o++) {
    float* to = (float*)(w.data + (size_t)(o / kBlock) * w.block_bytes) + o % kBlock;
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
    case kInt4:
    case kInt5:
    case kInt8: w->block_bytes = groups * ((size_t)code_bytes(w->kind) + (w->minimum ? 64 : 32)); break;
    case kBf16: w->block_bytes = (size_t)((in + 1) / 2) * 64; break;
    default: w->block_bytes = (size_t)in * 64; break;
  }
  w->bytes = w->block_bytes * (size_t)w->blocks;
  w->data = slabs().take(w->bytes);
  if (is_quantised(w->kind))
    pack_groups(*w, (const uint8_t*)codes, scale, minimum);
  else if (kind == kBf16)
    pack_bf16(*w, (const uint16_t*)dense);
  else
    pack_fp32(*w, (const float*)dense);
  if (bias) {
    w->bias = (float*)slabs().take((size_t)w->blocks * kBlock * 4);
    std::memcpy(w->bias, bias, (size_t)out * 4);
  }
  return w;
}

extern "C" int64_t octavo_weight_bytes(const void* weight) { return (int64_t)((const Weight*)weight)->bytes; }

extern "C" void octavo_weight_free(void* weight) {
  auto* w = (Weight*)weight;
  if (!w) return;
  slabs().give(w->data);
  slabs().give((uint8_t*)w->bias);
  delete w;
}
