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

void TilePlan::begin_items() {
  items_.clear();
  split_total_ = 0;
}

void TilePlan::add_items(int sequence, int token, int tokens, int split_begin, int split_end) {
  const int group = heads / kv_heads, widest = std::min(group, kTileQueries);
  for (int h = 0; h < kv_heads; h++)
    for (int g = 0; g < group; g += widest) {
      items_.push_back({sequence, token, tokens, h, h * group + g, std::min(widest, group - g), split_begin, split_end,
                        split_total_});
      split_total_ += items_.back().slots();
    }
}

void TilePlan::end_items(int threads) {
  by_split_ = (int)items_.size() < 4 * threads && split_total_ > (int)items_.size();
  if (!by_split_) return;
  split_item_.resize((size_t)split_total_);
  for (size_t i = 0; i < items_.size(); i++)
    for (int s = 0; s < items_[i].slots(); s++) split_item_[(size_t)(items_[i].partial + s)] = (int)i;
  if (items_.size() > finished_capacity_) {
    finished_capacity_ = items_.size() * 2;
    finished_ = std::make_unique<std::atomic<int>[]>(finished_capacity_);
  }
}

void TilePlan::reserve(int head_dim) {
  if (!by_split_) return;
  const size_t slots = (size_t)split_total_ * kTileQueries;
  if (partial_state_.size() < slots) partial_state_.resize(slots);
  if (partial_acc_.size() < slots * (size_t)head_dim) partial_acc_.resize(slots * (size_t)head_dim);
}

void TilePlan::reset_counters() {
  if (by_split_)
    for (size_t i = 0; i < items_.size(); i++) finished_[i].store(0, std::memory_order_relaxed);
}

// Room in the thread's own memory, and the queries of the item in its tile.
void TilePlan::prepare(const Rows& rows, const Item& item, Scratch& s) const {
  const size_t need = (size_t)kTileQueries * (size_t)rows.head_dim;
  if (s.acc.size() < need) {
    s.acc.resize(need);
    s.part_acc.resize(need);
    s.turned.resize((size_t)kTurnedKeys * (size_t)rows.head_dim);
  }
  for (int r = 0; r < item.tokens * item.heads; r++)
    s.tile.q[r] = rows.q + (item.token + r / item.heads) * rows.ldq +
                  (int64_t)(item.head + r % item.heads) * rows.head_dim;
}

void TilePlan::store(const Rows& rows, const Item& item, const AttnState* state, const float* acc) const {
  for (int i = 0; i < item.tokens; i++)
    for (int h = 0; h < item.heads; h++) {
      const int r = i * item.heads + h;
      float* to = rows.out + (item.token + i) * rows.ldo + (int64_t)(item.head + h) * rows.head_dim;
      if (state[r].max == -INFINITY)
        std::fill(to, to + rows.head_dim, 0.0f);
      else
        rows.k.finish(state[r], acc + (int64_t)r * rows.head_dim, rows.head_dim, to);
    }
}

void AttnPlan::build(const octavo_run& run, int threads) {
  begin_items();
  const int tile_tokens = std::max(1, kTileQueries / (heads / kv_heads));
  for (int64_t s = 0; s < run.sequences; s++) {
    for (int64_t t = run.q_indptr[s]; t < run.q_indptr[s + 1]; t += tile_tokens) {
      const int count = (int)std::min<int64_t>(tile_tokens, run.q_indptr[s + 1] - t);
      int64_t low = INT64_MAX, high = 0;
      for (int64_t i = t; i < t + count; i++) {
        const Visible v = visible(run, i, s, window);
        if (v.high > v.low) low = std::min(low, v.low), high = std::max(high, v.high);
      }
      const int begin = high > 0 ? (int)(low / kSplit) : 0, end = high > 0 ? (int)((high - 1) / kSplit) + 1 : 0;
      add_items((int)s, (int)t, count, begin, end);
    }
  }
  end_items(threads);
  // A thread walks several splits in a row, so that the keys of the next one are asked for in time.
  chunks_ = by_split_ ? std::min(split_total_, 8 * threads) : (int)items_.size();
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

int AttnPlan::run_chunk(const octavo_run& run, const AttnOp& op, const KernelTable& k, const float* q, int64_t ldq,
                        float* out, int64_t ldo, int index, Scratch& s) {
  const Rows rows{k, op.head_dim, q, ldq, out, ldo};
  const auto keys = [&](const Item& item, int split, Scratch& mine) { return load(run, op, item, split, mine); };
  if (!by_split_) return run_item(rows, items_[(size_t)index], s, keys);
  const int begin = (int)((int64_t)split_total_ * index / chunks_);
  const int end = (int)((int64_t)split_total_ * (index + 1) / chunks_);
  int flags = 0;
  for (int split = begin; split < end; split++) flags |= run_split(rows, split, s, keys);
  return flags;
}

}  // namespace octavo
