// The two places of sampling that look at a whole vocabulary row: where top-p cuts, and which id a number draws.
// Everything that decides is a sum of integers, so the results are those of the torch operations (ops/processors.py).
#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "octavo_native.h"

namespace {

constexpr int kBins = 4096, kShift = 18;  // the leading bits of a float in [0, 1]: 0x3f800000 >> 18 is below 4096

int64_t mass(float probability) { return (int64_t)(probability * 1099511627776.0f); }  // units of 2^-40

int bin(float probability) {
  uint32_t bits;
  std::memcpy(&bits, &probability, 4);
  return (int)std::min<uint32_t>(bits >> kShift, kBins - 1);
}

// Largest probability v with mass(>= v) >= wanted, 0 where all together have less.
float cut(const float* probability, int64_t n, double top_p, std::vector<int64_t>& bins, std::vector<float>& tied) {
  std::fill(bins.begin(), bins.end(), 0);
  int64_t total = 0;
  for (int64_t i = 0; i < n; i++) {
    const int64_t m = mass(probability[i]);
    bins[(size_t)bin(probability[i])] += m;
    total += m;
  }
  int64_t left = std::max<int64_t>(1, (int64_t)std::ceil(top_p * (double)total));
  int at = kBins - 1;
  for (; at > 0 && bins[(size_t)at] < left; at--) left -= bins[(size_t)at];
  if (bins[(size_t)at] < left) return 0.0f;
  tied.clear();
  for (int64_t i = 0; i < n; i++)
    if (bin(probability[i]) == at) tied.push_back(probability[i]);
  std::sort(tied.begin(), tied.end(), std::greater<float>());
  for (const float v : tied)
    if ((left -= mass(v)) <= 0) return v;
  return 0.0f;
}

int64_t draw(const float* probability, int64_t n, double uniform) {
  int64_t total = 0, below = 0;
  for (int64_t i = 0; i < n; i++) total += mass(probability[i]);
  const int64_t point = std::min((int64_t)std::floor(uniform * (double)total), total - 1);
  for (int64_t i = 0; i < n; i++)
    if ((below += mass(probability[i])) > point) return i;
  return n - 1;
}

}  // namespace

extern "C" {

int octavo_top_p(const float* probability, int64_t rows, int64_t vocab, const float* p, float* last) {
  try {
    std::vector<int64_t> bins(kBins);
    std::vector<float> tied;
    for (int64_t r = 0; r < rows; r++) last[r] = cut(probability + r * vocab, vocab, (double)p[r], bins, tied);
  } catch (const std::bad_alloc&) {
    return -1;
  }
  return OCTAVO_OK;
}

void octavo_draw(const float* probability, int64_t rows, int64_t vocab, const double* uniform, int64_t* ids) {
  for (int64_t r = 0; r < rows; r++) ids[r] = draw(probability + r * vocab, vocab, uniform[r]);
}

}  // extern "C"
