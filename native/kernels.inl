// The kernels, written once over simd.h and dot.inl and compiled once per instruction set.
// Row invariance: every output element is one fixed sequence of operations over its inputs; rows, blocks of
// outputs and threads only choose which elements are computed when.
#include <cstdlib>

#include "simd.h"
#include "dot.inl"
#include "types.h"

namespace octavo {
namespace {

// ------------------------------------------------------------------------------------------------ linear layers

inline void store_block(const LinearArgs& a, int block, int row, F value) {
  if (a.w->bias) value = f_add(value, f_load(a.w->bias + block * kBlock));
  float* out = a.out + row * a.ldo + block * kBlock;
  const int left = a.w->out - block * kBlock;
  if (left >= kBlock) {
    if (a.residual) value = f_add(f_load(a.residual + row * a.ldr + block * kBlock), value);
    f_store(out, value);
  } else {
    if (a.residual) value = f_add(f_load_n(a.residual + row * a.ldr + block * kBlock, left), value);
    f_store_n(out, value, left);
  }
}

// y += d * (scale * sum(q x)) + m * (scale * sum(x)), group after group
template <int R, Kind Codes, bool Minimum>
inline void quant_tile(const LinearArgs& a, int block, int row) {
  constexpr int kCodes = code_bytes(Codes), kBytes = kCodes + (Minimum ? 64 : 32);
  const uint8_t* w = a.w->data + (size_t)block * a.w->block_bytes;
  const int groups = a.w->in / kGroup;
  const int64_t stride = a.q.in;
  const int8_t* q = a.q.code + row * stride;
  const float* scale = a.q.scale + (int64_t)row * groups;
  const float* total = a.q.scaled_sum + (int64_t)row * groups;
  const int32_t* sum = a.q.sum + (int64_t)row * groups;
  F acc[R];
  for (int r = 0; r < R; r++) acc[r] = f_set(0.0f);
  for (int g = 0; g < groups; g++, w += kBytes, q += kGroup) {
#if defined(__x86_64__)
    // One or two rows wait for memory: straight into the first level. More rows compute meanwhile, and the first level
    // has too few lines under way to use that time: further ahead, into the second.
    for (int p = 0; p < kBytes; p += 64) {
      if (R < 3)
        __builtin_prefetch(w + 2560 + p, 0, 0);
      else
        __builtin_prefetch(w + 8192 + p, 0, 2);
    }
#endif
    I dot[R];
    if (Codes == kInt4)
      dot4<R>(w, q, stride, dot);
    else if (Codes == kInt5)
      dot5<R>(w, q, stride, sum + g, groups, dot);
    else
      dot8<R>(w, q, stride, sum + g, groups, dot);
    const F d = f_half(w + kCodes);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r] = f_fma(d, f_mul(i_float(dot[r]), f_set(scale[r * groups + g])), acc[r]);
    if (Minimum) {
      const F m = f_half(w + kCodes + 32);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) acc[r] = f_fma(m, f_set(total[r * groups + g]), acc[r]);
    }
  }
  for (int r = 0; r < R; r++) store_block(a, block, row + r, acc[r]);
}

template <int R>
inline void fp32_tile(const LinearArgs& a, int block, int row) {
  const uint8_t* w = a.w->data + (size_t)block * a.w->block_bytes;
  const float* x = a.x + row * a.ldx;
  F acc[R];
  for (int r = 0; r < R; r++) acc[r] = f_set(0.0f);
  for (int k = 0; k < a.w->in; k++, w += 64) {
    const F d = f_load((const float*)w);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) acc[r] = f_fma(d, f_set(x[r * a.ldx + k]), acc[r]);
  }
  for (int r = 0; r < R; r++) store_block(a, block, row + r, acc[r]);
}

// Inputs of bf16 weights are rounded to bf16, two side by side. Of a pair the second product is added first, then the
// first, each fused: what the dot product of a processor with AVX-512 BF16 does (but for results below 2^-126, which it
// takes for zero).
#if defined(__AVX512BF16__)
using Rounded = uint16_t;
inline Rounded rounded(float x) { return float_to_bf16(x); }
#else
using Rounded = float;
inline Rounded rounded(float x) { return bf16_to_float(float_to_bf16(x)); }
#endif

template <int R>
inline void bf16_tile(const LinearArgs& a, int block, int row) {  // a.x: rounded rows, an even number of columns
  const uint8_t* w = a.w->data + (size_t)block * a.w->block_bytes;
  const int64_t ldx = a.ldx;
  const Rounded* x = (const Rounded*)(const void*)a.x + row * ldx;
  F acc[R];
  for (int r = 0; r < R; r++) acc[r] = f_set(0.0f);
  for (int k = 0; k < a.w->in; k += 2, w += 64, x += 2) {
#if defined(__x86_64__)
    if (R < 3)  // as for codes
      __builtin_prefetch(w + 2560, 0, 0);
    else
      __builtin_prefetch(w + 8192, 0, 2);
#endif
#if defined(__AVX512BF16__)
    const auto d = (__m512bh)_mm512_loadu_si512(w);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      int32_t pair;
      std::memcpy(&pair, x + r * ldx, 4);
      acc[r].v = _mm512_dpbf16_ps(acc[r].v, d, (__m512bh)_mm512_set1_epi32(pair));
    }
#else
    F even, odd;
    f_bf16_pairs(w, &even, &odd);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
      acc[r] = f_fma(even, f_set(x[r * ldx]), f_fma(odd, f_set(x[r * ldx + 1]), acc[r]));
#endif
  }
  for (int r = 0; r < R; r++) store_block(a, block, row + r, acc[r]);
}

struct Int4Tile {
  template <int R>
  static void run(const LinearArgs& a, int block, int row) {
    quant_tile<R, kInt4, true>(a, block, row);
  }
};
struct Int5Tile {
  template <int R>
  static void run(const LinearArgs& a, int block, int row) {
    quant_tile<R, kInt5, false>(a, block, row);
  }
};
struct Int8Tile {
  template <int R>
  static void run(const LinearArgs& a, int block, int row) {
    quant_tile<R, kInt8, false>(a, block, row);
  }
};
struct Int8MinimumTile {
  template <int R>
  static void run(const LinearArgs& a, int block, int row) {
    quant_tile<R, kInt8, true>(a, block, row);
  }
};
struct Bf16Tile {
  template <int R>
  static void run(const LinearArgs& a, int block, int row) {
    bf16_tile<R>(a, block, row);
  }
};
struct Fp32Tile {
  template <int R>
  static void run(const LinearArgs& a, int block, int row) {
    fp32_tile<R>(a, block, row);
  }
};

// Rows in tiles of at most kTileRows; the last tiles are evened out (5 = 3 + 2 costs less than 4 + 1).
#if !defined(OCTAVO_TILE)
#define OCTAVO_TILE 6
#endif
constexpr int kTileRows = OCTAVO_TILE;

// Long prompts: the codes of so many rows stay in the first-level cache while a chunk's weights pass by.
constexpr int kRowsTogether = 2 * kTileRows;

template <class Tile>
inline void over_rows(const LinearArgs& a, int block_begin, int block_end) {
  for (int begin = 0; begin < a.rows; begin += kRowsTogether) {
    const int end = a.rows - begin < kRowsTogether ? a.rows : begin + kRowsTogether;
    for (int block = block_begin; block < block_end; block++) {
      int row = begin;
      while (row < end) {
        const int left = end - row;
        int take = left >= 2 * kTileRows ? kTileRows : left > kTileRows ? (left + 1) / 2 : left;
        switch (take) {
          case 1: Tile::template run<1>(a, block, row); break;
          case 2: Tile::template run<2>(a, block, row); break;
          case 3: Tile::template run<3>(a, block, row); break;
          case 4: Tile::template run<4>(a, block, row); break;
          case 5: Tile::template run<5>(a, block, row); break;
          default: Tile::template run<6>(a, block, row); break;
        }
        row += take;
      }
    }
  }
}

// Memory of one thread. No container: what a header instantiates here is compiled for this instruction set, and the
// linker may keep that copy for everybody.
struct Scratch {
  Rounded* data = nullptr;
  size_t size = 0;
  ~Scratch() { std::free(data); }
  Rounded* of(size_t n) {
    if (n > size) {
      std::free(data);
      data = (Rounded*)std::malloc(n * sizeof(Rounded));
      size = data ? n : 0;
      if (!data) std::abort();
    }
    return data;
  }
};

// Rows are rounded once for all blocks of a call.
void linear_bf16(const LinearArgs& a, int block_begin, int block_end) {
  static thread_local Scratch scratch;
  const int in = a.w->in, padded = (in + 1) / 2 * 2;
  Rounded* x = scratch.of((size_t)(kRowsTogether * padded));
  for (int begin = 0; begin < a.rows; begin += kRowsTogether) {
    LinearArgs some = a;
    some.rows = a.rows - begin < kRowsTogether ? a.rows - begin : kRowsTogether;
    for (int row = 0; row < some.rows; row++) {
      for (int k = 0; k < in; k++) x[row * padded + k] = rounded(a.x[(begin + row) * a.ldx + k]);
      if (padded > in) x[row * padded + in] = 0;
    }
    some.x = (const float*)(const void*)x;
    some.ldx = padded;
    some.out = a.out + begin * a.ldo;
    if (a.residual) some.residual = a.residual + begin * a.ldr;
    over_rows<Bf16Tile>(some, block_begin, block_end);
  }
}

void linear(const LinearArgs& a, int block_begin, int block_end) {
  switch (a.w->kind) {
    case kInt4: over_rows<Int4Tile>(a, block_begin, block_end); break;
    case kInt5: over_rows<Int5Tile>(a, block_begin, block_end); break;
    case kInt8:
      if (a.w->minimum)
        over_rows<Int8MinimumTile>(a, block_begin, block_end);
      else
        over_rows<Int8Tile>(a, block_begin, block_end);
      break;
    case kBf16: linear_bf16(a, block_begin, block_end); break;
    default: over_rows<Fp32Tile>(a, block_begin, block_end); break;
  }
}

// ----------------------------------------------------------------------------------------------- row operations

template <class Step>
inline void for_lanes(int n, Step step) {  // step(index, lanes)
  int i = 0;
  for (; i + 16 <= n; i += 16) step(i, 16);
  if (i < n) step(i, n - i);
}
inline F load_lanes(const float* p, int n) { return n == 16 ? f_load(p) : f_load_n(p, n); }
inline void store_lanes(float* p, F x, int n) {
  if (n == 16)
    f_store(p, x);
  else
    f_store_n(p, x, n);
}

void quantize(const float* x, int in, int8_t* code, float* scale, float* scaled_sum, int32_t* sum) {
  for (int g = 0; g < in / kGroup; g++, x += kGroup, code += kGroup) {
    const F a = f_load(x), b = f_load(x + 16);
    const float top = f_maximum(f_max(f_abs(a), f_abs(b)));
    const float d = top / 127.0f;
    const F inverse = f_set(top > 0.0f ? 127.0f / top : 0.0f), limit = f_set(127.0f), floor = f_set(-127.0f);
    const F magic = f_set(12582912.0f);  // adding it rounds to the nearest integer, ties to even
    const F low = f_sub(f_add(f_max(f_min(f_mul(a, inverse), limit), floor), magic), magic);
    const F high = f_sub(f_add(f_max(f_min(f_mul(b, inverse), limit), floor), magic), magic);
    f_to_int8(low, code);
    f_to_int8(high, code + 16);
    const int32_t total = (int32_t)f_sum(f_add(low, high));  // whole numbers: exact
    scale[g] = d;
    sum[g] = total;
    scaled_sum[g] = d * (float)total;
  }
}

void rms_norm(const float* x, const float* w, float eps, int n, float* out) {
  F squares = f_set(0.0f);
  for_lanes(n, [&](int i, int l) {
    const F v = load_lanes(x + i, l);
    squares = f_fma(v, v, squares);
  });
  const F inverse = f_set(1.0f / std::sqrt(f_sum(squares) / (float)n + eps));
  for_lanes(n, [&](int i, int l) {
    store_lanes(out + i, f_mul(f_mul(load_lanes(x + i, l), inverse), load_lanes(w + i, l)), l);
  });
}

inline F sigmoid(F x) { return f_div(f_set(1.0f), f_add(f_set(1.0f), f_exp(f_sub(f_set(0.0f), x)))); }
inline F tanh_lanes(F x) {  // 1 - 2 / (1 + e^2x)
  return f_sub(f_set(1.0f), f_div(f_set(2.0f), f_add(f_set(1.0f), f_exp(f_add(x, x)))));
}

void gated(const float* gate, const float* up, int n, int activation, float* out) {
  for_lanes(n, [&](int i, int l) {
    const F g = load_lanes(gate + i, l);
    F act;
    if (activation == 0) {
      act = f_mul(g, sigmoid(g));
    } else {
      const F cube = f_mul(f_mul(g, g), g);
      const F inner = f_mul(f_set(0.7978845608028654f), f_fma(f_set(0.044715f), cube, g));
      act = f_mul(f_mul(f_set(0.5f), g), f_add(f_set(1.0f), tanh_lanes(inner)));
    }
    store_lanes(out + i, f_mul(act, load_lanes(up + i, l)), l);
  });
}

void rope(const float* x, const float* cos, const float* sin, int half, int head_dim, float* out) {
  for_lanes(half, [&](int i, int l) {
    const F a = load_lanes(x + i, l), b = load_lanes(x + half + i, l);
    const F c = load_lanes(cos + i, l), s = load_lanes(sin + i, l);
    store_lanes(out + i, f_sub(f_mul(a, c), f_mul(b, s)), l);
    store_lanes(out + half + i, f_add(f_mul(b, c), f_mul(a, s)), l);
  });
  for (int i = 2 * half; i < head_dim; i++) out[i] = x[i];
}

void add(const float* a, const float* b, int n, float* out) {
  for_lanes(n, [&](int i, int l) { store_lanes(out + i, f_add(load_lanes(a + i, l), load_lanes(b + i, l)), l); });
}

void scale(const float* a, float factor, int n, float* out) {
  for_lanes(n, [&](int i, int l) { store_lanes(out + i, f_mul(load_lanes(a + i, l), f_set(factor)), l); });
}

void softcap(float* x, float cap, int n) {
  const F c = f_set(cap);
  for_lanes(n, [&](int i, int l) { store_lanes(x + i, f_mul(c, tanh_lanes(f_div(load_lanes(x + i, l), c))), l); });
}

void store_bf16(const float* x, int n, uint16_t* out) {
  for (int i = 0; i < n; i++) out[i] = float_to_bf16(x[i]);
}

void embed(const Weight& w, int64_t id, float factor, float* out) {
  const uint8_t* block = w.data + (size_t)(id / kBlock) * w.block_bytes;
  const int lane = (int)(id % kBlock);
  if (w.kind == kBf16 || w.kind == kFp32) {
    for (int k = 0; k < w.in; k++)
      out[k] = factor * (w.kind == kFp32 ? ((const float*)block)[k * 16 + lane]
                                         : bf16_to_float(((const uint16_t*)block)[bf16_place(lane, k)]));
    return;
  }
  const int codes = code_bytes(w.kind), bytes = codes + (w.minimum ? 64 : 32);
  for (int g = 0; g < w.in / kGroup; g++, block += bytes) {
    uint16_t h[2] = {0, 0};
    std::memcpy(h, block + codes + 2 * lane, 2);
    if (w.minimum) std::memcpy(h + 1, block + codes + 32 + 2 * lane, 2);
    const float d = half_to_float_bits(h[0]), m = half_to_float_bits(h[1]);
    for (int i = 0; i < kGroup; i++) {
      int code;
      if (w.kind != kInt8) {
        const int packed = block[64 * ((i % 16) / 4) + 4 * lane + i % 4];
        code = i < 16 ? packed & 15 : packed >> 4;
        if (w.kind == kInt5) {
          const int bit = place_of(lane, i);
          code += 16 * (block[256 + bit / 8] >> (bit % 8) & 1) - 16;
        }
      } else {
        code = (int)block[place_of(lane, i)] - 128;
      }
      out[g * kGroup + i] = factor * (d * (float)code + m);
    }
  }
}

void argmax(const float* x, int n, float* value, int* index) {
  F best = f_set(-INFINITY);
  for_lanes(n, [&](int i, int l) {
    if (l == 16) best = f_max(f_load(x + i), best);
  });
  float top = f_maximum(best);
  for (int i = n / 16 * 16; i < n; i++) top = x[i] > top ? x[i] : top;
  int at = 0;
  while (at < n - 1 && x[at] != top) at++;
  *value = x[at];
  *index = at;
}

// ---------------------------------------------------------------------------------------------------- attention

template <bool Bf16>
inline F load_kv(const void* p, int d) {
  return Bf16 ? f_bf16((const uint16_t*)p + d) : f_load((const float*)p + d);
}
template <bool Bf16>
inline F load_kv_n(const void* p, int d, int lanes) {
  if (!Bf16) return load_lanes((const float*)p + d, lanes);
  uint16_t t[16] = {0};
  std::memcpy(t, (const uint16_t*)p + d, (size_t)lanes * 2);
  return f_bf16(t);
}

// Keys kKeys at a time, turned so that a vector holds one element of the head for sixteen keys: a score is then one
// chain of multiply-adds over the head in its order, whatever the vector width and however many queries share the work.
constexpr int kKeys = kTurnedKeys;

// Asks for one line of memory, into the second-level cache: the first level has room for few lines under way (24 on Zen 4),
// with which scattered pages arrive at little more than half the speed. Askings that come faster than memory answers are
// dropped by some processors: they are spread over the arithmetic on the rows before, one line to a few cycles.
inline void ask(const void* p, int byte) { __builtin_prefetch((const void*)((uintptr_t)p + (uintptr_t)byte), 0, 2); }

// Reads one byte of each line of n rows in their order: what was asked for is there, and the processor's own prefetcher
// follows the rest, which it does not where sixteen rows are read side by side.
inline void touch(const void* const* rows, int n, int bytes) {
#if defined(__GNUC__)
  for (int i = 0; i < n; i++)
    for (int b = 0; b < bytes; b += 64) {
      const uint8_t byte = *((const uint8_t*)rows[i] + b);
      asm volatile("" ::"r"(byte));
    }
#endif
}

template <bool Bf16>
inline void turn_keys(const void* const* k, int keys, int head_dim, float* to) {  // to[group][d][16]
  for (int g = 0; g < keys; g += 16, to += 16 * head_dim) {
    const void* rows[16];
    for (int j = 0; j < 16; j++) rows[j] = k[g + j < keys ? g + j : keys - 1];
    int d = 0;
#if defined(__AVX2__)
    for (; d + 8 <= head_dim; d += 8) {
      turn8<Bf16>(rows, d, to + 16 * d);
      turn8<Bf16>(rows + 8, d, to + 16 * d + 8);
    }
#endif
    for (; d < head_dim; d++)
      for (int j = 0; j < 16; j++)
        to[16 * d + j] = Bf16 ? bf16_to_float(((const uint16_t*)rows[j])[d]) : ((const float*)rows[j])[d];
  }
}

// With thirty-two registers of sixteen lanes tiles may be larger: an accumulator waits four cycles for its next multiply-add.
#if defined(__AVX512F__)
constexpr bool kManyRegisters = true;
#else
constexpr bool kManyRegisters = false;
#endif

// R queries with G groups of sixteen turned keys. Meanwhile the first bytes of the 16 G rows of `ahead`, as many as a
// row has, are asked for.
template <int R, int G, bool Bf16>
inline void score_tile(const float* const* q, const float* turned, int head_dim, float* out, int64_t ldo,
                       const void* const* ahead) {
  F s[R][G];
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) s[r][g] = f_set(0.0f);
  const float* t = turned;
  auto step = [&](int d) {
    F x[G];
#pragma GCC unroll 2
    for (int g = 0; g < G; g++) x[g] = f_load(t + (int64_t)g * 16 * head_dim);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const F y = f_set(q[r][d]);
#pragma GCC unroll 2
      for (int g = 0; g < G; g++) s[r][g] = f_fma(y, x[g], s[r][g]);
    }
    t += 16;
  };
  int d = 0;
  if (ahead) {
    const int part = head_dim / 16, lines = Bf16 ? (part + 1) / 2 : part;  // a line is 16 floats
    for (int row = 0; row < 16; row++)
      for (int i = 0; i < part; i++, d++) {
        if (i < lines) {
          ask(ahead[row], 64 * i);
          if (G == 2) ask(ahead[16 + row], 64 * i);
        }
        step(d);
      }
  }
  for (; d < head_dim; d++) step(d);
  for (int r = 0; r < R; r++)
    for (int g = 0; g < G; g++) f_store(out + r * ldo + 16 * g, s[r][g]);
}

// Writes scores of keys 0 … keys-1 and, up to the next multiple of sixteen, some that mean nothing. With Ahead, k has
// kAhead rows behind its keys that are asked for.
template <bool Bf16, bool Ahead>
inline void scores(const float* const* q, int queries, const void* const* k, int keys, int head_dim, float* turned,
                   float* out, int64_t ldo) {
  for (int i = 0; i < keys; i += kKeys) {
    const int strip = keys - i < kKeys ? keys - i : kKeys, groups = (strip + 15) / 16;
    if (Ahead) touch(k + i, strip, head_dim * (Bf16 ? 2 : 4));
    turn_keys<Bf16>(k + i, strip, head_dim, turned);
    for (int r = 0; r < queries;) {
      const int left = queries - r, take = left >= 6 ? 6 : left >= 4 ? 4 : left;
      float* to = out + r * ldo + i;
      const void* const* next = Ahead && r == 0 ? k + i + strip : nullptr;
      if (groups == 2 && take <= (kManyRegisters ? 6 : 2)) {
        switch (take) {
          case 6: score_tile<kManyRegisters ? 6 : 1, 2, Bf16>(q + r, turned, head_dim, to, ldo, next); break;
          case 4: score_tile<kManyRegisters ? 4 : 1, 2, Bf16>(q + r, turned, head_dim, to, ldo, next); break;
          case 3: score_tile<kManyRegisters ? 3 : 1, 2, Bf16>(q + r, turned, head_dim, to, ldo, next); break;
          case 2: score_tile<2, 2, Bf16>(q + r, turned, head_dim, to, ldo, next); break;
          default: score_tile<1, 2, Bf16>(q + r, turned, head_dim, to, ldo, next); break;
        }
      } else {
        const float* t = turned;
        for (int g = 0; g < groups; g++, t += 16 * head_dim, to += 16, next = next ? next + 16 : next) {
          switch (take) {
            case 6: score_tile<6, 1, Bf16>(q + r, t, head_dim, to, ldo, next); break;
            case 4: score_tile<4, 1, Bf16>(q + r, t, head_dim, to, ldo, next); break;
            case 3: score_tile<3, 1, Bf16>(q + r, t, head_dim, to, ldo, next); break;
            case 2: score_tile<2, 1, Bf16>(q + r, t, head_dim, to, ldo, next); break;
            default: score_tile<1, 1, Bf16>(q + r, t, head_dim, to, ldo, next); break;
          }
        }
      }
      r += take;
    }
  }
}

// acc[r][d] = fma(p[r][i], v[i][d], acc[r][d]) for i in order, D vectors of 16 at a time
template <int R, int D, bool Bf16, bool Ahead>
inline void values_tile(const float* const* p, const void* const* v, int keys, int d, float* acc, int64_t lda) {
  F s[R][D];
  for (int r = 0; r < R; r++)
    for (int j = 0; j < D; j++) s[r][j] = f_load(acc + r * lda + d + 16 * j);
  for (int i = 0; i < keys; i++) {
    F x[D];
#pragma GCC unroll 4
    for (int j = 0; j < D; j++) x[j] = load_kv<Bf16>(v[i], d + 16 * j);
    if (Ahead && (!Bf16 || d % 32 == 0))
      for (int j = 0; j < D; j += Bf16 ? 2 : 1) ask(v[keys + i], (d + 16 * j) * (Bf16 ? 2 : 4));
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const F w = f_set(p[r][i]);
#pragma GCC unroll 4
      for (int j = 0; j < D; j++) s[r][j] = f_fma(w, x[j], s[r][j]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int j = 0; j < D; j++) f_store(acc + r * lda + d + 16 * j, s[r][j]);
}

// R x D vectors of accumulators, D of values and one weight fit the registers (AVX2 has sixteen, a vector is two there):
// an accumulator in memory would cost its store-to-load delay per key.
template <int R, bool Bf16, bool Ahead>
inline void values_rows(const float* const* p, const void* const* v, int keys, int head_dim, float* acc, int64_t lda) {
  constexpr int D = R == 1 || kManyRegisters ? 4 : R == 2 ? 2 : 1;
  int d = 0;
  for (; d + 16 * D <= head_dim; d += 16 * D) values_tile<R, D, Bf16, Ahead>(p, v, keys, d, acc, lda);
  if (D > 1)
    for (; d + 16 <= head_dim; d += 16) values_tile<R, 1, Bf16, Ahead>(p, v, keys, d, acc, lda);
  const int left = head_dim - d;
  if (!left) return;
  for (int r = 0; r < R; r++) {
    F s = f_load_n(acc + r * lda + d, left);
    for (int i = 0; i < keys; i++) s = f_fma(f_set(p[r][i]), load_kv_n<Bf16>(v[i], d, left), s);
    f_store_n(acc + r * lda + d, s, left);
  }
}

template <bool Bf16, bool Ahead>
inline void values_some(int take, const float* const* p, const void* const* v, int keys, int head_dim, float* acc) {
  switch (take) {
    case 6: values_rows<6, Bf16, Ahead>(p, v, keys, head_dim, acc, head_dim); break;
    case 4: values_rows<4, Bf16, Ahead>(p, v, keys, head_dim, acc, head_dim); break;
    case 3: values_rows<3, Bf16, Ahead>(p, v, keys, head_dim, acc, head_dim); break;
    case 2: values_rows<2, Bf16, Ahead>(p, v, keys, head_dim, acc, head_dim); break;
    default: values_rows<1, Bf16, Ahead>(p, v, keys, head_dim, acc, head_dim); break;
  }
}

// Keys in strips that stay in the first-level cache while all queries pass over them; the order per query is the same.
constexpr int kStrip = 32;

template <bool Bf16, bool Ahead>
inline void values(const float* const* p, int queries, const void* const* v, int keys, int head_dim, float* acc) {
  for (int i = 0; i < keys; i += kStrip) {
    const int strip = keys - i < kStrip ? keys - i : kStrip;
    if (Ahead) touch(v + i, strip, head_dim * (Bf16 ? 2 : 4));
    for (int r = 0; r < queries;) {
      const int left = queries - r, take = left >= 6 ? 6 : left >= 4 ? 4 : left;
      const float* at[6];
      for (int s = 0; s < take; s++) at[s] = p[r + s] + i;
      float* to = acc + (int64_t)r * head_dim;
      if (Ahead && r == 0)
        values_some<Bf16, true>(take, at, v + i, strip, head_dim, to);
      else
        values_some<Bf16, false>(take, at, v + i, strip, head_dim, to);
      r += take;
    }
  }
}

// s: scores of positions begin … end-1 (multiples of 16), -inf where not visible; becomes e^(s - max), exact zeros
// where not visible. Positions outside the range are not visible: they would add exact zeros.
inline AttnState softmax_split(float* s, int begin, int end, float scale_factor) {
  F top = f_set(-INFINITY);
  for (int i = begin; i < end; i += 16) {
    const F x = f_mul(f_load(s + i), f_set(scale_factor));
    f_store(s + i, x);
    top = f_max(x, top);
  }
  const float m = f_maximum(top);
  F total = f_set(0.0f);
  for (int i = begin; i < end; i += 16) {
    const F x = f_sub(f_load(s + i), f_set(m));
    const F e = f_zero_below(x, f_set(-87.0f), f_exp(x));
    f_store(s + i, e);
    total = f_add(total, e);
  }
  return {m, f_sum(total)};
}

template <bool Bf16>
void attend_as(const AttnTile& t, float* turned, AttnState* state, float* acc) {
  alignas(64) float s[kTileQueries][kSplit];
  alignas(64) float raw[kTileQueries * (kSplit + 16)];
  const float* p[kTileQueries];
  int begin = t.first, end = t.first + t.shared;
  for (int r = 0; r < t.queries; r++)
    if (t.own[r]) {
      begin = begin == end || t.own_first[r] < begin ? t.own_first[r] : begin;
      end = t.own_first[r] + t.own[r] > end ? t.own_first[r] + t.own[r] : end;
    }
  begin = begin / 16 * 16;
  end = (end + 15) / 16 * 16;
  scores<Bf16, true>(t.q, t.queries, t.k, t.shared, t.head_dim, turned, raw, kSplit + 16);
  for (int r = 0; r < t.queries; r++) {
    for (int i = begin; i < end; i += 16) f_store(s[r] + i, f_set(-INFINITY));
    const int low = t.low[r] > t.first ? t.low[r] : t.first;
    const int high = t.high[r] < t.first + t.shared ? t.high[r] : t.first + t.shared;
    if (low < high) std::memcpy(s[r] + low, raw + r * (kSplit + 16) + low - t.first, (size_t)(high - low) * 4);
    if (t.own[r]) {
      float own[64];
      scores<Bf16, false>(t.q + r, 1, t.ok[r], t.own[r], t.head_dim, turned, own, 64);
      for (int i = 0; i < t.own[r]; i++) s[r][t.own_first[r] + i] = own[i];
    }
    if (high <= low && !t.own[r]) {  // nothing of this split is visible to this query
      state[r] = {-INFINITY, 0.0f};
      for (int i = begin; i < end; i += 16) f_store(s[r] + i, f_set(0.0f));
    } else {
      state[r] = softmax_split(s[r], begin, end, t.scale);
    }
    p[r] = s[r] + t.first;
  }
  std::memset(acc, 0, sizeof(float) * (size_t)t.queries * (size_t)t.head_dim);
  values<Bf16, true>(p, t.queries, t.v, t.shared, t.head_dim, acc);
  for (int r = 0; r < t.queries; r++) {
    const float* own = s[r] + t.own_first[r];
    if (t.own[r]) values<Bf16, false>(&own, 1, t.ov[r], t.own[r], t.head_dim, acc + (int64_t)r * t.head_dim);
  }
}

void attend(const AttnTile& t, float* turned, AttnState* state, float* acc) {
  if (t.bf16)
    attend_as<true>(t, turned, state, acc);
  else
    attend_as<false>(t, turned, state, acc);
}

inline float exp_one(float x) {  // e^x for x <= 0
  float t[16];
  f_store(t, f_zero_below(f_set(x), f_set(-87.0f), f_exp(f_set(x))));
  return t[0];
}

// Splits are combined in the order of their positions; an empty one changes nothing.
void combine(AttnState* into, float* into_acc, const AttnState& part, const float* part_acc, int head_dim) {
  if (part.max == -INFINITY) return;
  if (into->max == -INFINITY) {
    *into = part;
    std::memcpy(into_acc, part_acc, sizeof(float) * (size_t)head_dim);
    return;
  }
  const float m = part.max > into->max ? part.max : into->max;
  const float a = exp_one(into->max - m), b = exp_one(part.max - m);
  into->sum = fma1(into->sum, a, part.sum * b);
  into->max = m;
  for_lanes(head_dim, [&](int d, int l) {
    const F y = f_mul(load_lanes(part_acc + d, l), f_set(b));
    store_lanes(into_acc + d, f_fma(load_lanes(into_acc + d, l), f_set(a), y), l);
  });
}

void finish(const AttnState& state, const float* acc, int head_dim, float* out) {
  const F total = f_set(state.sum);
  for_lanes(head_dim, [&](int d, int l) { store_lanes(out + d, f_div(load_lanes(acc + d, l), total), l); });
}

}  // namespace

#include "sparse.inl"

#define OCTAVO_TABLE(label)                                                                                       \
  {                                                                                                               \
    label, linear, quantize, rms_norm, gated, rope, add, scale, softcap, store_bf16, embed, attend, combine, finish, \
        argmax, page_vote                                                                                         \
  }

}  // namespace octavo
