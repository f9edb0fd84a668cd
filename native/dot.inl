// Integer products of one packed group: R rows x 16 outputs x 32 inputs, exact in int32.
//
//   dot4<R>(nibbles, q, stride, out)   codes 0..15 times int8
//   dot5<R>(codes, q, stride, sum, out) codes -16..15 (stored + 16: nibbles, then high bits) times int8
//   dot8<R>(bytes, q, stride, sum, out) codes int8 (stored + 128) times int8
// out[r] is an I: sixteen int32 lanes. q is row 0's group, further rows are `stride` bytes apart.
namespace {

#if defined(__AVX512VNNI__)
struct I {
  __m512i v;
};
inline F i_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
inline __m512i spread(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
template <int R>
inline void dot4(const uint8_t* w, const int8_t* q, int64_t stride, I* out) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int r = 0; r < R; r++) out[r].v = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    __m512i packed = _mm512_loadu_si512(w + 64 * j);
    __m512i lo = _mm512_and_si512(packed, mask), hi = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      out[r].v = _mm512_dpbusd_epi32(out[r].v, lo, spread(q + r * stride + 4 * j));
      out[r].v = _mm512_dpbusd_epi32(out[r].v, hi, spread(q + r * stride + 16 + 4 * j));
    }
  }
}
template <int R>
inline void dot5(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t* sum, int64_t sum_stride, I* out) {
  const __m512i mask = _mm512_set1_epi8(15), sixteen = _mm512_set1_epi8(16);
  for (int r = 0; r < R; r++) out[r].v = _mm512_set1_epi32(-16 * sum[r * sum_stride]);
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m512i packed = _mm512_loadu_si512(w + 64 * j);
    uint64_t above[2];
    std::memcpy(above, w + 256 + 8 * j, 8);
    std::memcpy(above + 1, w + 288 + 8 * j, 8);
    __m512i lo = _mm512_and_si512(packed, mask), hi = _mm512_and_si512(_mm512_srli_epi16(packed, 4), mask);
    lo = _mm512_mask_add_epi8(lo, (__mmask64)above[0], lo, sixteen);
    hi = _mm512_mask_add_epi8(hi, (__mmask64)above[1], hi, sixteen);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      out[r].v = _mm512_dpbusd_epi32(out[r].v, lo, spread(q + r * stride + 4 * j));
      out[r].v = _mm512_dpbusd_epi32(out[r].v, hi, spread(q + r * stride + 16 + 4 * j));
    }
  }
}
template <int R>
inline void dot8(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t* sum, int64_t sum_stride, I* out) {
  for (int r = 0; r < R; r++) out[r].v = _mm512_set1_epi32(-128 * sum[r * sum_stride]);
#pragma GCC unroll 8
  for (int j = 0; j < 8; j++) {
    __m512i x = _mm512_loadu_si512(w + 64 * j);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) out[r].v = _mm512_dpbusd_epi32(out[r].v, x, spread(q + r * stride + 4 * j));
  }
}
#elif defined(__AVX2__)
// Pairs of products stay in int16: a code has four bits, so eight of them add up to at most 8 * 2 * 15 * 127 = 30480.
struct I {
  __m256i a, b;
};
inline F i_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
inline __m256i spread(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm256_set1_epi32(x);
}
// a += b, done here and now: left to itself GCC computes all products of a group first and spills them.
inline void add16(__m256i& a, __m256i b) {
  a = _mm256_add_epi16(a, b);
  asm volatile("" : "+x"(a));
}

template <int R>
inline void dot4(const uint8_t* w, const int8_t* q, int64_t stride, I* out) {
  const __m256i mask = _mm256_set1_epi8(15);
  __m256i a[R], b[R];
  for (int r = 0; r < R; r++) a[r] = b[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
  for (int j = 0; j < 4; j++) {
    const __m256i w0 = _mm256_loadu_si256((const __m256i*)(w + 64 * j));
    const __m256i w1 = _mm256_loadu_si256((const __m256i*)(w + 64 * j + 32));
    const __m256i lo0 = _mm256_and_si256(w0, mask), lo1 = _mm256_and_si256(w1, mask);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m256i x = spread(q + r * stride + 4 * j);
      add16(a[r], _mm256_maddubs_epi16(lo0, x));
      add16(b[r], _mm256_maddubs_epi16(lo1, x));
    }
    const __m256i hi0 = _mm256_and_si256(_mm256_srli_epi16(w0, 4), mask);
    const __m256i hi1 = _mm256_and_si256(_mm256_srli_epi16(w1, 4), mask);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m256i y = spread(q + r * stride + 16 + 4 * j);
      add16(a[r], _mm256_maddubs_epi16(hi0, y));
      add16(b[r], _mm256_maddubs_epi16(hi1, y));
    }
  }
  const __m256i ones = _mm256_set1_epi16(1);
#pragma GCC unroll 8
  for (int r = 0; r < R; r++) out[r] = {_mm256_madd_epi16(a[r], ones), _mm256_madd_epi16(b[r], ones)};
}
// 32 bits, one for each byte: 16 where it is set, else 0.
inline __m256i sixteens(const uint8_t* bits) {
  int32_t x;
  std::memcpy(&x, bits, 4);
  const __m256i order = _mm256_setr_epi8(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1,  //
                                         2, 2, 2, 2, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3);
  const __m256i bit = _mm256_set1_epi64x((long long)0x8040201008040201ull);
  const __m256i seen = _mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(x), order), bit);
  return _mm256_and_si256(_mm256_cmpeq_epi8(seen, bit), _mm256_set1_epi8(16));
}
// Five bits: pairs of four products add up to at most 4 * 2 * 31 * 127 = 31496, so low and high nibbles are apart.
template <int R>
inline void dot5(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t* sum, int64_t sum_stride, I* out) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  for (int r = 0; r < R; r++) out[r].a = out[r].b = _mm256_set1_epi32(-16 * sum[r * sum_stride]);
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    __m256i a[R], b[R];
    for (int r = 0; r < R; r++) a[r] = b[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
      __m256i w0 = _mm256_loadu_si256((const __m256i*)(w + 64 * j));
      __m256i w1 = _mm256_loadu_si256((const __m256i*)(w + 64 * j + 32));
      if (h) w0 = _mm256_srli_epi16(w0, 4), w1 = _mm256_srli_epi16(w1, 4);
      const uint8_t* bits = w + 256 + 32 * h + 8 * j;
      w0 = _mm256_or_si256(_mm256_and_si256(w0, mask), sixteens(bits));
      w1 = _mm256_or_si256(_mm256_and_si256(w1, mask), sixteens(bits + 4));
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m256i x = spread(q + r * stride + 16 * h + 4 * j);
        add16(a[r], _mm256_maddubs_epi16(w0, x));
        add16(b[r], _mm256_maddubs_epi16(w1, x));
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      out[r].a = _mm256_add_epi32(out[r].a, _mm256_madd_epi16(a[r], ones));
      out[r].b = _mm256_add_epi32(out[r].b, _mm256_madd_epi16(b[r], ones));
    }
  }
}
// code + 128 = 16 hi + lo, both products as above, minus 128 times the sum of the row's codes.
template <int R>
inline void dot8(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t* sum, int64_t sum_stride, I* out) {
  const __m256i mask = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), sixteen = _mm256_set1_epi16(16);
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    __m256i a[R], b[R];
    for (int r = 0; r < R; r++) a[r] = b[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < 8; j++) {
      const __m256i x = _mm256_loadu_si256((const __m256i*)(w + 64 * j + 32 * h));
      const __m256i lo = _mm256_and_si256(x, mask), hi = _mm256_and_si256(_mm256_srli_epi16(x, 4), mask);
#pragma GCC unroll 8
      for (int r = 0; r < R; r++) {
        const __m256i y = spread(q + r * stride + 4 * j);
        add16(a[r], _mm256_maddubs_epi16(lo, y));
        add16(b[r], _mm256_maddubs_epi16(hi, y));
      }
      }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m256i d = _mm256_sub_epi32(
          _mm256_add_epi32(_mm256_madd_epi16(a[r], ones), _mm256_madd_epi16(b[r], sixteen)),
          _mm256_set1_epi32(128 * sum[r * sum_stride]));
      (h ? out[r].b : out[r].a) = d;
    }
    asm volatile("" ::: "memory");  // reload the row's codes for the other half: kept, they would be spilled
  }
}
#elif defined(__ARM_FEATURE_DOTPROD) && !defined(OCTAVO_GENERIC)
struct I {
  int32x4_t v[4];
};
inline F i_float(I x) {
  F r;
  for (int i = 0; i < 4; i++) r.v[i] = vcvtq_f32_s32(x.v[i]);
  return r;
}
inline int8x16_t spread(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return vreinterpretq_s8_s32(vdupq_n_s32(x));
}
template <int R>
inline void dot4(const uint8_t* w, const int8_t* q, int64_t stride, I* out) {
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 4; i++) out[r].v[i] = vdupq_n_s32(0);
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 4; i++) {
      uint8x16_t packed = vld1q_u8(w + 64 * j + 16 * i);
      int8x16_t lo = vreinterpretq_s8_u8(vandq_u8(packed, vdupq_n_u8(15)));
      int8x16_t hi = vreinterpretq_s8_u8(vshrq_n_u8(packed, 4));
      for (int r = 0; r < R; r++) {
        out[r].v[i] = vdotq_s32(out[r].v[i], lo, spread(q + r * stride + 4 * j));
        out[r].v[i] = vdotq_s32(out[r].v[i], hi, spread(q + r * stride + 16 + 4 * j));
      }
    }
}
// 16 bits, one for each byte: 16 where it is set, else 0.
inline uint8x16_t sixteens(const uint8_t* bits) {
  const uint8x8_t bit = vcreate_u8(0x8040201008040201ull);
  const uint8x16_t spread_out = vcombine_u8(vdup_n_u8(bits[0]), vdup_n_u8(bits[1]));
  return vandq_u8(vtstq_u8(spread_out, vcombine_u8(bit, bit)), vdupq_n_u8(16));
}
template <int R>
inline void dot5(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t* sum, int64_t sum_stride, I* out) {
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 4; i++) out[r].v[i] = vdupq_n_s32(-16 * sum[r * sum_stride]);
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 4; i++) {
      const uint8x16_t packed = vld1q_u8(w + 64 * j + 16 * i);
      const uint8_t* bits = w + 256 + 8 * j + 2 * i;
      const int8x16_t lo = vreinterpretq_s8_u8(vorrq_u8(vandq_u8(packed, vdupq_n_u8(15)), sixteens(bits)));
      const int8x16_t hi = vreinterpretq_s8_u8(vorrq_u8(vshrq_n_u8(packed, 4), sixteens(bits + 32)));
      for (int r = 0; r < R; r++) {
        out[r].v[i] = vdotq_s32(out[r].v[i], lo, spread(q + r * stride + 4 * j));
        out[r].v[i] = vdotq_s32(out[r].v[i], hi, spread(q + r * stride + 16 + 4 * j));
      }
    }
}
template <int R>
inline void dot8(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t*, int64_t, I* out) {
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 4; i++) out[r].v[i] = vdupq_n_s32(0);
  for (int j = 0; j < 8; j++)
    for (int i = 0; i < 4; i++) {
      int8x16_t x = vreinterpretq_s8_u8(veorq_u8(vld1q_u8(w + 64 * j + 16 * i), vdupq_n_u8(128)));
      for (int r = 0; r < R; r++) out[r].v[i] = vdotq_s32(out[r].v[i], x, spread(q + r * stride + 4 * j));
    }
}
#else
struct I {
  int32_t v[16];
};
inline F i_float(I x) {
  float t[16];
  for (int i = 0; i < 16; i++) t[i] = (float)x.v[i];
  return f_load(t);
}
template <int R>
inline void dot4(const uint8_t* w, const int8_t* q, int64_t stride, I* out) {
  for (int r = 0; r < R; r++)
    for (int o = 0; o < 16; o++) {
      int32_t total = 0;
      for (int j = 0; j < 4; j++)
        for (int i = 0; i < 4; i++) {
          int packed = w[64 * j + 4 * o + i];
          total += (packed & 15) * q[r * stride + 4 * j + i] + (packed >> 4) * q[r * stride + 16 + 4 * j + i];
        }
      out[r].v[o] = total;
    }
}
template <int R>
inline void dot5(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t*, int64_t, I* out) {
  for (int r = 0; r < R; r++)
    for (int o = 0; o < 16; o++) {
      int32_t total = 0;
      for (int j = 0; j < 4; j++)
        for (int i = 0; i < 4; i++) {
          const int packed = w[64 * j + 4 * o + i], bit = 4 * o + i;
          const int lo = (packed & 15) + 16 * (w[256 + 8 * j + bit / 8] >> (bit % 8) & 1) - 16;
          const int hi = (packed >> 4) + 16 * (w[288 + 8 * j + bit / 8] >> (bit % 8) & 1) - 16;
          total += lo * q[r * stride + 4 * j + i] + hi * q[r * stride + 16 + 4 * j + i];
        }
      out[r].v[o] = total;
    }
}
template <int R>
inline void dot8(const uint8_t* w, const int8_t* q, int64_t stride, const int32_t*, int64_t, I* out) {
  for (int r = 0; r < R; r++)
    for (int o = 0; o < 16; o++) {
      int32_t total = 0;
      for (int j = 0; j < 8; j++)
        for (int i = 0; i < 4; i++) total += ((int)w[64 * j + 4 * o + i] - 128) * q[r * stride + 4 * j + i];
      out[r].v[o] = total;
    }
}
#endif

}  // namespace
