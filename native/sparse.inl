// Included by kernels.inl inside its namespace. Sparse layers: how much a page matters to a query (`ops/page_selector.py`, PageBounds).
namespace {

// Largest vote of any KV head; low and high [kv_heads, head_dim] are the sums over a group's queries of their negative
// and positive parts, page is [2, kv_heads, head_dim]: minima and maxima of the page's keys.
float page_vote(const float* low, const float* high, const float* page, int kv_heads, int head_dim) {
  float best = -INFINITY;
  const int64_t maxima = (int64_t)kv_heads * head_dim;
  for (int h = 0; h < kv_heads; h++) {
    F below = f_set(0.0f), above = f_set(0.0f);
    const int64_t at = (int64_t)h * head_dim;
    for_lanes(head_dim, [&](int d, int l) {
      below = f_fma(load_lanes(low + at + d, l), load_lanes(page + at + d, l), below);
      above = f_fma(load_lanes(high + at + d, l), load_lanes(page + maxima + at + d, l), above);
    });
    const float vote = f_sum(f_add(below, above));
    best = vote > best ? vote : best;
  }
  return best;
}

}  // namespace
