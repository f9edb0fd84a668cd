// Sixteen float lanes with one meaning on every instruction set, so that all of them give the same bits.
//
// F is 16 lanes. `sum(F)` adds in one fixed order: lanes l and l+8 first, then neighbours: ((0+1)+(2+3))+((4+5)+(6+7)).
// Multiply-add is always fused. Nothing here may be contracted or reassociated: compile with -ffp-contract=off.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

inline float half_to_float_bits(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = (h >> 10) & 31, mantissa = h & 1023u, bits;
  if (exponent == 31) {
    bits = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent) {
    bits = sign | ((exponent + 112) << 23) | (mantissa << 13);
  } else {  // zero or subnormal: exact in float
    float f = (float)mantissa * 5.9604644775390625e-8f;
    std::memcpy(&bits, &f, 4);
    bits |= sign;
  }
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline float bf16_to_float(uint16_t b) {
  uint32_t bits = (uint32_t)b << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

inline uint16_t float_to_bf16(float x) {  // to nearest, ties to even; NaN kept
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return (uint16_t)(nan ? (bits >> 16) | 64u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

inline float fma1(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

#if defined(__AVX512F__)
// ---------------------------------------------------------------------------------------------------- AVX-512
struct F {
  __m512 v;
};
inline F f_set(float x) { return {_mm512_set1_ps(x)}; }
inline F f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline F f_load_n(const float* p, int n) { return {_mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), p)}; }
inline void f_store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
inline void f_store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, (__mmask16)((1u << n) - 1), a.v); }
inline F f_add(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F f_sub(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F f_mul(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F f_div(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F f_max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F f_min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
inline F f_fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F f_abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F f_bf16(const uint16_t* p) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16))};
}
inline void f_bf16_pairs(const uint8_t* p, F* even, F* odd) {  // elements 2l and 2l+1 for lane l
  const __m512i both = _mm512_loadu_si512(p);
  even->v = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  odd->v = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000u)));
}
inline F f_half(const uint8_t* p) { return {_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}; }
// 2^n for the integral value n stored in t's low bits after adding 1.5 * 2^23
inline F f_exp2_bits(F t) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_castps_si512(t.v), _mm512_set1_epi32(127)), 23))};
}
inline F f_zero_below(F x, F limit, F y) {  // x < limit ? 0 : y
  return {_mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_GE_OQ), y.v)};
}
inline void f_to_int8(F a, int8_t* p) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a.v))); }
inline void f_halves(F a, __m256* lo, __m256* hi) {
  *lo = _mm512_castps512_ps256(a.v);
  *hi = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(a.v), 1));
}
inline __m256 f_fold(F a) {
  __m256 lo, hi;
  f_halves(a, &lo, &hi);
  return _mm256_add_ps(lo, hi);
}
#elif defined(__AVX2__)
// ------------------------------------------------------------------------------------------------------- AVX2
struct F {
  __m256 a, b;
};
inline F f_set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline F f_load_n(const float* p, int n) {
  alignas(32) float t[16] = {0};
  std::memcpy(t, p, (size_t)n * 4);
  return f_load(t);
}
inline void f_store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
inline void f_store_n(float* p, F x, int n) {
  alignas(32) float t[16];
  f_store(t, x);
  std::memcpy(p, t, (size_t)n * 4);
}
inline F f_add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F f_sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F f_mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F f_div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F f_max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F f_min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline F f_fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F f_abs(F x) {
  __m256 m = _mm256_castsi256_ps(_mm256_set1_epi32(0x7fffffff));
  return {_mm256_and_ps(x.a, m), _mm256_and_ps(x.b, m)};
}
inline __m256 bf16_half(const uint16_t* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
inline F f_bf16(const uint16_t* p) { return {bf16_half(p), bf16_half(p + 8)}; }
inline void f_bf16_pairs(const uint8_t* p, F* even, F* odd) {  // elements 2l and 2l+1 for lane l
  const __m256i a = _mm256_loadu_si256((const __m256i*)p), b = _mm256_loadu_si256((const __m256i*)(p + 32));
  const __m256i mask = _mm256_set1_epi32((int)0xffff0000u);
  *even = {_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  *odd = {_mm256_castsi256_ps(_mm256_and_si256(a, mask)), _mm256_castsi256_ps(_mm256_and_si256(b, mask))};
}
inline F f_half(const uint8_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 16)))};
}
inline __m256 exp2_half(__m256 t) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_castps_si256(t), _mm256_set1_epi32(127)), 23));
}
inline F f_exp2_bits(F t) { return {exp2_half(t.a), exp2_half(t.b)}; }
inline F f_zero_below(F x, F limit, F y) {
  return {_mm256_and_ps(_mm256_cmp_ps(x.a, limit.a, _CMP_GE_OQ), y.a),
          _mm256_and_ps(_mm256_cmp_ps(x.b, limit.b, _CMP_GE_OQ), y.b)};
}
inline void f_to_int8(F x, int8_t* p) {
  __m256i w = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b));  // a0-3 b0-3 a4-7 b4-7
  w = _mm256_permute4x64_epi64(w, 0xd8);
  _mm_storeu_si128((__m128i*)p, _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
inline __m256 f_fold(F x) { return _mm256_add_ps(x.a, x.b); }
#elif defined(__aarch64__) && !defined(OCTAVO_GENERIC)
// ------------------------------------------------------------------------------------------------------- NEON
struct F {
  float32x4_t v[4];
};
#define OCTAVO_EACH(expr) \
  F r;                    \
  for (int i = 0; i < 4; i++) r.v[i] = (expr); \
  return r;
inline F f_set(float x) { OCTAVO_EACH(vdupq_n_f32(x)) }
inline F f_load(const float* p) { OCTAVO_EACH(vld1q_f32(p + 4 * i)) }
inline F f_load_n(const float* p, int n) {
  float t[16] = {0};
  std::memcpy(t, p, (size_t)n * 4);
  return f_load(t);
}
inline void f_store(float* p, F x) {
  for (int i = 0; i < 4; i++) vst1q_f32(p + 4 * i, x.v[i]);
}
inline void f_store_n(float* p, F x, int n) {
  float t[16];
  f_store(t, x);
  std::memcpy(p, t, (size_t)n * 4);
}
inline F f_add(F x, F y) { OCTAVO_EACH(vaddq_f32(x.v[i], y.v[i])) }
inline F f_sub(F x, F y) { OCTAVO_EACH(vsubq_f32(x.v[i], y.v[i])) }
inline F f_mul(F x, F y) { OCTAVO_EACH(vmulq_f32(x.v[i], y.v[i])) }
inline F f_div(F x, F y) { OCTAVO_EACH(vdivq_f32(x.v[i], y.v[i])) }
inline F f_max(F x, F y) { OCTAVO_EACH(vmaxq_f32(x.v[i], y.v[i])) }
inline F f_min(F x, F y) { OCTAVO_EACH(vminq_f32(x.v[i], y.v[i])) }
inline F f_fma(F x, F y, F z) { OCTAVO_EACH(vfmaq_f32(z.v[i], x.v[i], y.v[i])) }
inline F f_abs(F x) { OCTAVO_EACH(vabsq_f32(x.v[i])) }
inline F f_bf16(const uint16_t* p) { OCTAVO_EACH(vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p + 4 * i), 16))) }
inline void f_bf16_pairs(const uint8_t* p, F* even, F* odd) {  // elements 2l and 2l+1 for lane l
  for (int i = 0; i < 4; i++) {
    const uint32x4_t both = vreinterpretq_u32_u8(vld1q_u8(p + 16 * i));
    even->v[i] = vreinterpretq_f32_u32(vshlq_n_u32(both, 16));
    odd->v[i] = vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)));
  }
}
inline F f_half(const uint8_t* p) { OCTAVO_EACH(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t*)p + 4 * i)))) }
inline F f_exp2_bits(F t) {
  OCTAVO_EACH(vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vreinterpretq_s32_f32(t.v[i]), vdupq_n_s32(127)), 23)))
}
inline F f_zero_below(F x, F limit, F y) {
  OCTAVO_EACH(vreinterpretq_f32_u32(vandq_u32(vcgeq_f32(x.v[i], limit.v[i]), vreinterpretq_u32_f32(y.v[i]))))
}
inline void f_to_int8(F x, int8_t* p) {
  int16x8_t a = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v[0])), vqmovn_s32(vcvtnq_s32_f32(x.v[1])));
  int16x8_t b = vcombine_s16(vqmovn_s32(vcvtnq_s32_f32(x.v[2])), vqmovn_s32(vcvtnq_s32_f32(x.v[3])));
  vst1q_s8(p, vcombine_s8(vqmovn_s16(a), vqmovn_s16(b)));
}
#undef OCTAVO_EACH
#else
// -------------------------------------------------------------------------------------------------- plain C++
struct F {
  float v[16];
};
#define OCTAVO_EACH(expr) \
  F r;                    \
  for (int i = 0; i < 16; i++) r.v[i] = (expr); \
  return r;
inline F f_set(float x) { OCTAVO_EACH(x) }
inline F f_load(const float* p) { OCTAVO_EACH(p[i]) }
inline F f_load_n(const float* p, int n) { OCTAVO_EACH(i < n ? p[i] : 0.0f) }
inline void f_store(float* p, F x) { std::memcpy(p, x.v, 64); }
inline void f_store_n(float* p, F x, int n) { std::memcpy(p, x.v, (size_t)n * 4); }
inline F f_add(F x, F y) { OCTAVO_EACH(x.v[i] + y.v[i]) }
inline F f_sub(F x, F y) { OCTAVO_EACH(x.v[i] - y.v[i]) }
inline F f_mul(F x, F y) { OCTAVO_EACH(x.v[i] * y.v[i]) }
inline F f_div(F x, F y) { OCTAVO_EACH(x.v[i] / y.v[i]) }
inline F f_max(F x, F y) { OCTAVO_EACH(x.v[i] > y.v[i] ? x.v[i] : y.v[i]) }
inline F f_min(F x, F y) { OCTAVO_EACH(x.v[i] < y.v[i] ? x.v[i] : y.v[i]) }
inline F f_fma(F x, F y, F z) { OCTAVO_EACH(fma1(x.v[i], y.v[i], z.v[i])) }
inline F f_abs(F x) { OCTAVO_EACH(std::fabs(x.v[i])) }
inline F f_bf16(const uint16_t* p) { OCTAVO_EACH(bf16_to_float(p[i])) }
inline void f_bf16_pairs(const uint8_t* p, F* even, F* odd) {  // elements 2l and 2l+1 for lane l
  for (int i = 0; i < 16; i++) {
    uint16_t pair[2];
    std::memcpy(pair, p + 4 * i, 4);
    even->v[i] = bf16_to_float(pair[0]), odd->v[i] = bf16_to_float(pair[1]);
  }
}
inline F f_half(const uint8_t* p) {
  uint16_t h[16];
  std::memcpy(h, p, 32);
  OCTAVO_EACH(half_to_float_bits(h[i]))
}
inline F f_exp2_bits(F t) {
  F r;
  for (int i = 0; i < 16; i++) {
    uint32_t b;
    std::memcpy(&b, &t.v[i], 4);
    b = (b + 127u) << 23;
    std::memcpy(&r.v[i], &b, 4);
  }
  return r;
}
inline F f_zero_below(F x, F limit, F y) { OCTAVO_EACH(x.v[i] >= limit.v[i] ? y.v[i] : 0.0f) }
inline void f_to_int8(F x, int8_t* p) {
  for (int i = 0; i < 16; i++) p[i] = (int8_t)std::nearbyintf(x.v[i]);
}
#undef OCTAVO_EACH
#endif

#if defined(__AVX2__) || defined(__AVX512F__)
inline float sum8(__m256 s) {
  s = _mm256_hadd_ps(s, s);
  s = _mm256_hadd_ps(s, s);
  return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
}
inline float f_sum(F x) { return sum8(f_fold(x)); }
inline float f_maximum(F x) {
#if defined(__AVX512F__)
  __m256 lo, hi;
  f_halves(x, &lo, &hi);
  const __m256 m = _mm256_max_ps(lo, hi);
#else
  const __m256 m = _mm256_max_ps(x.a, x.b);
#endif
  __m128 n = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
  n = _mm_max_ps(n, _mm_movehl_ps(n, n));
  return _mm_cvtss_f32(_mm_max_ss(n, _mm_movehdup_ps(n)));
}
// Element d … d+7 of eight rows, turned: to[i * 16 + j] is element d + i of row j.
template <bool Bf16>
inline void turn8(const void* const* rows, int d, float* to) {
  __m256 a[8], b[8];
  for (int j = 0; j < 8; j++) {
    if (Bf16) {
      const __m128i h = _mm_loadu_si128((const __m128i*)((const uint16_t*)rows[j] + d));
      a[j] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
    } else {
      a[j] = _mm256_loadu_ps((const float*)rows[j] + d);
    }
  }
  for (int j = 0; j < 8; j += 2) {
    b[j] = _mm256_unpacklo_ps(a[j], a[j + 1]);
    b[j + 1] = _mm256_unpackhi_ps(a[j], a[j + 1]);
  }
  for (int j = 0; j < 8; j += 4) {
    a[j] = _mm256_shuffle_ps(b[j], b[j + 2], 0x44);
    a[j + 1] = _mm256_shuffle_ps(b[j], b[j + 2], 0xee);
    a[j + 2] = _mm256_shuffle_ps(b[j + 1], b[j + 3], 0x44);
    a[j + 3] = _mm256_shuffle_ps(b[j + 1], b[j + 3], 0xee);
  }
  for (int i = 0; i < 4; i++) {
    _mm256_storeu_ps(to + 16 * i, _mm256_permute2f128_ps(a[i], a[i + 4], 0x20));
    _mm256_storeu_ps(to + 16 * (i + 4), _mm256_permute2f128_ps(a[i], a[i + 4], 0x31));
  }
}
#else
inline float f_sum(F x) {
  float t[16], s[8];
  f_store(t, x);
  for (int i = 0; i < 8; i++) s[i] = t[i] + t[i + 8];
  return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}
inline float f_maximum(F x) {
  float t[16];
  f_store(t, x);
  float m = t[0];
  for (int i = 1; i < 16; i++) m = t[i] > m ? t[i] : m;
  return m;
}
#endif

// e^x, about 1 ulp; x is clamped to [-87.3, 88.3].
inline F f_exp(F x) {
  x = f_min(f_max(x, f_set(-87.3f)), f_set(88.3f));
  const F magic = f_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  F t = f_fma(x, f_set(1.44269504088896341f), magic);
  F n = f_sub(t, magic);
  F r = f_fma(n, f_set(-0.693359375f), x);
  r = f_fma(n, f_set(2.12194440e-4f), r);
  F p = f_set(1.9875691500e-4f);
  p = f_fma(p, r, f_set(1.3981999507e-3f));
  p = f_fma(p, r, f_set(8.3334519073e-3f));
  p = f_fma(p, r, f_set(4.1665795894e-2f));
  p = f_fma(p, r, f_set(1.6666665459e-1f));
  p = f_fma(p, r, f_set(5.0000001201e-1f));
  p = f_fma(p, f_mul(r, r), f_add(r, f_set(1.0f)));
  // t's low bits hold n + 0x4B400000; shifting left by 23 keeps only n + 127
  return f_mul(p, f_exp2_bits(t));
}

}  // namespace
