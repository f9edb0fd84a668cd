#include "attention.h"

#include <algorithm>
#include <cmath>

namespace octavo {
namespace {

// Logical index of a key: its slot below kv_start; kv_start + rank among the set mask bits above. Along a path of a
// tree the rank is the depth, so a drafted row walks exactly the keys, in the blocks, of the plain row it stands for.
struct Visible {
  int64_t low, shared, high;  // low <= logical < high; below `shared` logical index and slot are the same
};

Visible visible(const octavo_run& run, int64_t token, int64_t sequence, int window) {
  Visible v{};
  if (run.mask) {
    v.shared = run.kv_start[sequence];
    v.high = v.shared + __builtin_popcountll((unsigned long long)run.mask[token]);
  } else {
    v.shared = v.high = run.write_slots[token] + 1;
  }
  v.low = window > 0 ? std::max<int64_t>(0, run.positions[token] - window + 1) : 0;
  return v;
}

}  // namespace

void AttnPlan::build(const octavo_run& run, int threads) {
  items_.clear();
  const int group = heads / kv_heads;
  const int widest = std::min(group, kTileQueries), tile_tokens = std::max(1, kTileQueries / group);
  int splits = 0;
  for (int64_t s = 0; s < run.sequences; s++) {
    for (int64_t t = run.q_indptr[s]; t < run.q_indptr[s + 1]; t += tile_tokens) {
      const int count = (int)std::min<int64_t>(tile_tokens, run.q_indptr[s + 1] - t);
      int64_t low = INT64_MAX, high = 0;
      for (int64_t i = t; i < t + count; i++) {
        const Visible v = visible(run, i, s, window);
        if (v.high > v.low) low = std::min(low, v.low), high = std::max(high, v.high);
      }
      const int begin = high > 0 ? (int)(low / kSplit) : 0, end = high > 0 ? (int)((high - 1) / kSplit) + 1 : 0;
      for (int h = 0; h < kv_heads; h++)
        for (int g = 0; g < group; g += widest) {
          const int take = std::min(widest, group - g);
          items_.push_back({(int)s, (int)t, count, h, h * group + g, take, begin, end, splits});
          splits += std::max(1, end - begin);
        }
    }
  }
  by_split_ = (int)items_.size() < 4 * threads && splits > (int)items_.size();
  split_total_ = splits;
  // A thread walks several splits in a row, so that the keys of the next one are asked for in time.
  chunks_ = by_split_ ? std::min(splits, 8 * threads) : (int)items_.size();
  if (by_split_) {
    split_item_.resize((size_t)splits);
    for (size_t i = 0; i < items_.size(); i++)
      for (int s = 0; s < std::max(1, items_[i].split_end - items_[i].split_begin); s++)
        split_item_[(size_t)(items_[i].partial + s)] = (int)i;
    if (items_.size() > finished_capacity_) {
      finished_capacity_ = items_.size() * 2;
      finished_ = std::make_unique<std::atomic<int>[]>(finished_capacity_);
    }
  }
}

void AttnPlan::reserve(int head_dim) {
  if (!by_split_) return;
  const size_t slots = (size_t)split_total_ * kTileQueries;
  if (partial_state_.size() < slots) partial_state_.resize(slots);
  if (partial_acc_.size() < slots * (size_t)head_dim) partial_acc_.resize(slots * (size_t)head_dim);
}

void AttnPlan::reset_counters() {
  if (by_split_)
    for (size_t i = 0; i < items_.size(); i++) finished_[i].store(0, std::memory_order_relaxed);
}

// Fills the tile with the keys of one split. Page-table entries outside the visible range are not read.
int AttnPlan::load(const octavo_run& run, const AttnOp& op, const Item& item, int split, Scratch& s) const {
  AttnTile& t = s.tile;
  const int64_t base = (int64_t)split * kSplit, hd = op.head_dim, ps = run.page_size;
  const int64_t element = run.kv_bf16 ? 2 : 4, values = (int64_t)op.kv_heads * ps * hd;
  const int64_t head_at = ((int64_t)op.layer * 2 * op.kv_heads + item.kv_head) * ps * hd;
  const uint8_t* pages = (const uint8_t*)run.kv[op.pool];
  const int64_t row = run.rows[item.sequence];
  const int32_t* table = run.table[op.pool] + row * run.table_width[op.pool];
  int flags = 0;
  auto key = [&](int64_t slot) -> const uint8_t* {
    const int64_t at = slot / ps;
    int64_t page = at < run.table_width[op.pool] ? table[at] : -1;
    if (page < 0 || page >= run.kv_pages[op.pool]) flags |= OCTAVO_BAD_PAGE, page = 0;
    return pages + (page * run.kv_page_elements[op.pool] + head_at + (slot % ps) * hd) * element;
  };
  int64_t first = kSplit, last = 0, shared_end = 0;
  for (int i = 0; i < item.tokens; i++) {
    const int64_t token = item.token + i;
    const Visible v = visible(run, token, item.sequence, op.window);
    shared_end = std::max(shared_end, v.shared);
    const int low = (int)std::min<int64_t>(std::max<int64_t>(v.low - base, 0), kSplit);
    const int high = (int)std::min<int64_t>(std::max<int64_t>(v.shared - base, 0), kSplit);
    if (low < high) first = std::min<int64_t>(first, low), last = std::max<int64_t>(last, high);
    for (int h = 0; h < item.heads; h++) {
      const int r = i * item.heads + h;
      t.low[r] = low;
      t.high[r] = high;
      t.own[r] = t.own_first[r] = 0;
    }
    if (!run.mask || v.high <= v.shared || v.high <= base || v.shared >= base + kSplit) continue;
    int64_t logical = v.shared;
    for (unsigned long long bits = (unsigned long long)run.mask[token]; bits; bits &= bits - 1, logical++) {
      if (logical < base || logical >= base + kSplit || logical < v.low) continue;
      const uint8_t* k = key(run.kv_start[item.sequence] + __builtin_ctzll(bits));
      for (int h = 0; h < item.heads; h++) {
        const int r = i * item.heads + h;
        if (!t.own[r]) t.own_first[r] = (int)(logical - base);
        t.ok[r][t.own[r]] = k;
        t.ov[r][t.own[r]++] = k + values * element;
      }
    }
  }
  t.first = first < last ? (int)first : 0;
  t.shared = first < last ? (int)(last - first) : 0;
  const int64_t from = base + t.first, row_bytes = hd * element, value_bytes = values * element;
  for (int i = 0; i < t.shared;) {  // page by page
    const uint8_t* k = key(from + i);
    const int end = (int)std::min<int64_t>(t.shared, i + ps - (from + i) % ps);
    for (; i < end; i++, k += row_bytes) t.k[i] = k, t.v[i] = k + value_bytes;
  }
  look_ahead(t);
  if (t.shared && t.first + t.shared == kSplit && split + 1 < item.split_end) {
    const int64_t next = base + kSplit, known = std::min<int64_t>(kAhead, shared_end - next);
    for (int64_t i = 0; i < known;) {
      const uint8_t* k = key(next + i);
      const int64_t end = std::min<int64_t>(known, i + ps - (next + i) % ps);
      for (; i < end; i++, k += row_bytes) t.v[t.shared + i] = k;
    }
  }
  t.queries = item.tokens * item.heads;
  t.head_dim = op.head_dim;
  t.bf16 = run.kv_bf16 != 0;
  t.scale = op.scale;
  return flags;
}

void AttnPlan::store(const AttnOp& op, const KernelTable& k, const Item& item, const AttnState* state,
                     const float* acc, float* out, int64_t ldo) const {
  for (int i = 0; i < item.tokens; i++)
    for (int h = 0; h < item.heads; h++) {
      const int r = i * item.heads + h;
      float* to = out + (item.token + i) * ldo + (int64_t)(item.head + h) * op.head_dim;
      if (state[r].max == -INFINITY)
        std::fill(to, to + op.head_dim, 0.0f);
      else
        k.finish(state[r], acc + (int64_t)r * op.head_dim, op.head_dim, to);
    }
}

void AttnPlan::prepare(Scratch& s, int head_dim) const {
  const size_t need = (size_t)kTileQueries * (size_t)head_dim;
  if (s.acc.size() >= need) return;
  s.acc.resize(need);
  s.part_acc.resize(need);
  s.turned.resize((size_t)kTurnedKeys * (size_t)head_dim);
}

void AttnPlan::set_queries(const AttnOp& op, const Item& item, const float* q, int64_t ldq, AttnTile& tile) const {
  for (int r = 0; r < item.tokens * item.heads; r++)
    tile.q[r] = q + (item.token + r / item.heads) * ldq + (int64_t)(item.head + r % item.heads) * op.head_dim;
}

int AttnPlan::run_chunk(const octavo_run& run, const AttnOp& op, const KernelTable& k, const float* q, int64_t ldq,
                        float* out, int64_t ldo, int index, Scratch& s) {
  prepare(s, op.head_dim);
  int flags = 0;
  if (by_split_) {
    const int begin = (int)((int64_t)split_total_ * index / chunks_);
    const int end = (int)((int64_t)split_total_ * (index + 1) / chunks_);
    for (int split = begin; split < end; split++) flags |= run_split(run, op, k, q, ldq, out, ldo, split, s);
    return flags;
  }
  const Item& item = items_[(size_t)index];
  const int queries = item.tokens * item.heads, hd = op.head_dim;
  set_queries(op, item, q, ldq, s.tile);
  for (int r = 0; r < queries; r++) s.state[r] = {-INFINITY, 0.0f};
  for (int split = item.split_begin; split < item.split_end; split++) {
    flags |= load(run, op, item, split, s);
    k.attend(s.tile, s.turned.data(), s.part, s.part_acc.data());
    for (int r = 0; r < queries; r++)
      k.combine(s.state + r, s.acc.data() + (size_t)r * hd, s.part[r], s.part_acc.data() + (size_t)r * hd, hd);
  }
  store(op, k, item, s.state, s.acc.data(), out, ldo);
  return flags;
}

// One split of one item; whoever finishes an item's last split combines all of them.
int AttnPlan::run_split(const octavo_run& run, const AttnOp& op, const KernelTable& k, const float* q, int64_t ldq,
                        float* out, int64_t ldo, int index, Scratch& s) {
  const int hd = op.head_dim, which = split_item_[(size_t)index];
  const size_t need = (size_t)kTileQueries * (size_t)hd;
  const Item& item = items_[(size_t)which];
  const int queries = item.tokens * item.heads;
  const int split = item.split_begin + index - item.partial, splits = item.split_end - item.split_begin;
  AttnState* state = partial_state_.data() + (size_t)index * kTileQueries;
  float* acc = partial_acc_.data() + (size_t)index * need;
  int flags = 0;
  if (splits > 0) {
    set_queries(op, item, q, ldq, s.tile);
    flags |= load(run, op, item, split, s);
    k.attend(s.tile, s.turned.data(), state, acc);
  } else {
    for (int r = 0; r < queries; r++) state[r] = {-INFINITY, 0.0f};
  }
  if (finished_[(size_t)which].fetch_add(1, std::memory_order_acq_rel) + 1 < std::max(1, splits)) return flags;
  state = partial_state_.data() + (size_t)item.partial * kTileQueries;
  acc = partial_acc_.data() + (size_t)item.partial * need;
  for (int p = 1; p < splits; p++)
    for (int r = 0; r < queries; r++)
      k.combine(state + r, acc + (size_t)r * hd, state[p * kTileQueries + r], acc + (size_t)p * need + (size_t)r * hd, hd);
  store(op, k, item, state, acc, out, ldo);
  return flags;
}

}  // namespace octavo
