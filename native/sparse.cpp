#include "sparse.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace octavo {
namespace {

constexpr int kPartColumns = 64;  // pages scored by one chunk

int64_t element_bytes(const octavo_run& run) { return run.kv_bf16 ? 2 : 4; }

// Bytes of one layer's part of a page (keys and values of all KV heads): contiguous in a slot and in a host page.
int64_t part_bytes(const octavo_run& run, const SparseOp& op) {
  return 2 * (int64_t)op.kv_heads * run.page_size * op.head_dim * element_bytes(run);
}

uint8_t* slot_part(const octavo_run& run, const SparseOp& op, int64_t slot) {
  return (uint8_t*)run.sparse->slots + (slot * run.sparse->layers + op.layer) * part_bytes(run, op);
}

uint8_t* host_part(const octavo_run& run, const SparseOp& op, int64_t page) {
  const octavo_sparse& v = *run.sparse;
  return (uint8_t*)v.host + (page * v.host_page_layers + v.host_layer[op.layer]) * part_bytes(run, op);
}

// slot_map, column_of and order of one row in one layer
struct RowState {
  int32_t *place_of, *column_of, *order;
};

RowState row_state(const octavo_sparse& v, int layer, int64_t row) {
  const int64_t at = layer * v.rows + row;
  return {v.slot_map + at * v.width, v.column_of + at * v.device_pages, v.order + at * v.device_pages};
}

// Slot of a column of a row, -1 where it has none.
int64_t slot_at(const octavo_sparse& v, int layer, int64_t row, int64_t column) {
  const int32_t place = row_state(v, layer, row).place_of[column];
  if (place < 0 || place >= v.device_pages) return -1;
  const int32_t slot = v.row_slots[row * v.device_pages + place];
  return slot < v.slot_count ? slot : -1;
}

int64_t host_page(const octavo_sparse& v, int64_t row, int64_t column) {
  const int32_t page = v.host_table[row * v.width + column];
  return page < v.host_pages ? page : -1;
}

// Larger scores first, of equal ones the lower page: ascending keys. What is not a number comes last.
uint64_t sort_key(float score, int column) {
  uint32_t bits;
  if (std::isnan(score)) score = -INFINITY;
  score += 0.0f;  // -0 and 0 are equal
  std::memcpy(&bits, &score, 4);
  bits = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (uint64_t)~bits << 32 | (uint32_t)column;
}

}  // namespace

void SparsePlan::build(const octavo_run& run, int threads) {
  const octavo_sparse& v = *run.sparse;
  const int64_t p = run.page_size, decodes = run.q_indptr[v.decodes];
  tokens_.assign((size_t)run.tokens, {});
  parts_.clear();
  part_count_.assign((size_t)run.sequences, 0);
  columns_ = 1;
  for (int64_t s = 0; s < run.sequences; s++) {
    int furthest = 0;  // end of the columns that some token must choose from
    for (int64_t t = run.q_indptr[s]; t < run.q_indptr[s + 1]; t++) {
      Token& token = tokens_[(size_t)t];
      const int64_t at = run.positions[t];
      if (run.mask) {
        token.shared = run.kv_start[s];
        token.high = token.shared + __builtin_popcountll((unsigned long long)run.mask[t]);
      } else {
        token.shared = token.high = run.write_slots[t] + 1;
      }
      token.high = std::min(token.high, v.width * p);  // a slot behind the table has no page: rope_write says so
      token.shared = std::min(token.shared, token.high);
      token.last = (int)((token.high - 1) / p);
      if (s >= v.decodes) continue;
      token.recent = (int)std::min<int64_t>(std::max<int64_t>(0, at - v.recent_tokens + 1) / p, token.last + 1);
      const int candidates = at + 1 <= v.dense_limit_tokens ? 0 : std::max(0, token.recent - 1);
      if (!candidates) token.recent = std::min(token.recent, 1);
      if (at + 1 <= v.dense_limit_tokens) token.recent = 0;
      token.chosen = (int)std::min<int64_t>(candidates, v.topk_pages);
      token.skipped = (int64_t)(candidates - token.chosen) * p;
      if (candidates > token.chosen) furthest = std::max(furthest, token.recent);
      columns_ = std::max<int64_t>(columns_, token.last + 1);
    }
    const int first = (int)parts_.size();
    for (int c = 1; c < furthest; c += kPartColumns) parts_.push_back({(int)s, c, std::min(c + kPartColumns, furthest)});
    if ((int)parts_.size() == first) parts_.push_back({(int)s, 0, 0});
    part_count_[(size_t)s] = (int)parts_.size() - first;
  }
  scores_.resize((size_t)(decodes * columns_));
  lists_.resize((size_t)(decodes * columns_));
  if ((size_t)run.sequences > scored_capacity_) {
    scored_capacity_ = (size_t)run.sequences * 2;
    scored_ = std::make_unique<std::atomic<int>[]>(scored_capacity_);
  }

  const int tile = std::max(1, kTileQueries / (heads / kv_heads));
  begin_items();
  for (int64_t s = 0; s < run.sequences; s++) {
    const int64_t most = s < v.decodes ? 1 : tile;  // a decoding token has a list of pages of its own
    for (int64_t t = run.q_indptr[s]; t < run.q_indptr[s + 1]; t += most) {
      const int count = (int)std::min<int64_t>(most, run.q_indptr[s + 1] - t);
      int64_t high = 0;
      for (int64_t i = t; i < t + count; i++) high = std::max(high, tokens_[(size_t)i].high - tokens_[(size_t)i].skipped);
      add_items((int)s, (int)t, count, 0, high > 0 ? (int)((high - 1) / kSplit) + 1 : 0);
    }
  }
  end_items(threads);
}

void SparsePlan::reset_select() {
  for (size_t i = 0; i < part_count_.size(); i++) scored_[i].store(0, std::memory_order_relaxed);
}

// ------------------------------------------------------------------------------------------------- selection

// The query heads of one KV head vote together: low and high are their rotated queries' negative and positive parts.
void SparsePlan::turn(const octavo_run& run, const SparseOp& op, const KernelTable& k, const float* q,
                      const int64_t* rope, int64_t token, SelectScratch& s) const {
  const int hd = op.head_dim, group = heads / kv_heads, half = (int)rope[1];
  const size_t size = (size_t)kv_heads * (size_t)hd;
  const int64_t position = std::min(std::max<int64_t>(run.positions[token], 0), rope[0] - 1);
  const float* cos = (const float*)rope[2] + position * half;
  const float* sin = (const float*)rope[3] + position * half;
  if (s.turned.size() < (size_t)hd) s.turned.resize((size_t)hd);
  s.low.assign(size, 0.0f);
  s.high.assign(size, 0.0f);
  for (int h = 0; h < heads; h++) {
    k.rope(q + (int64_t)h * hd, cos, sin, half, hd, s.turned.data());
    float* low = s.low.data() + (int64_t)(h / group) * hd;
    float* high = s.high.data() + (int64_t)(h / group) * hd;
    for (int d = 0; d < hd; d++) {
      low[d] += std::min(s.turned[(size_t)d], 0.0f);
      high[d] += std::max(s.turned[(size_t)d], 0.0f);
    }
  }
}

void SparsePlan::select(const octavo_run& run, const SparseOp& op, const KernelTable& k, const float* q, int64_t ldq,
                        const int64_t* rope, int index, SelectScratch& s) {
  const octavo_sparse& v = *run.sparse;
  const Part& part = parts_[(size_t)index];
  const int64_t row = run.rows[part.sequence], begin = run.q_indptr[part.sequence], end = run.q_indptr[part.sequence + 1];
  const int64_t size = 2 * (int64_t)kv_heads * op.head_dim;
  const float* sums = v.bounds + (int64_t)op.layer * (v.host_pages + 1) * size;
  if (part.begin < part.end)
    for (int64_t t = begin; t < end; t++) {
      const int last = std::min(part.end, tokens_[(size_t)t].recent);
      turn(run, op, k, q + t * ldq, rope, t, s);
      float* scores = scores_.data() + t * columns_;
      for (int c = part.begin; c < last; c++) {
        const int64_t page = host_page(v, row, c);
        if (c + 4 < last && t == begin) {
          const int64_t later = std::max<int64_t>(host_page(v, row, c + 4), 0);
          for (int64_t i = 0; i < size; i += 16) __builtin_prefetch(sums + later * size + i, 0, 2);
        }
        scores[c] = page < 0 ? -INFINITY
                             : k.page_vote(s.low.data(), s.high.data(), sums + page * size, kv_heads, op.head_dim);
      }
    }
  if (scored_[(size_t)part.sequence].fetch_add(1, std::memory_order_acq_rel) + 1 < part_count_[(size_t)part.sequence])
    return;
  s.needed.assign((size_t)v.width, 0);
  if (part.sequence < v.decodes)
    for (int64_t t = begin; t < end; t++) choose(t, v.width, s);
  map(run, op, part.sequence, s);
}

// The counted pages of one token: its list, and marks in s.needed.
void SparsePlan::choose(int64_t t, int64_t width, SelectScratch& s) {
  const Token& token = tokens_[(size_t)t];
  const float* scores = scores_.data() + t * columns_;
  int32_t* list = lists_.data() + t * columns_;
  int32_t* at = list;
  if (token.recent > 0) *at++ = 0;
  if (token.skipped > 0) {
    s.keys.clear();
    for (int c = 1; c < token.recent; c++) s.keys.push_back(sort_key(scores[c], c));
    std::nth_element(s.keys.begin(), s.keys.begin() + token.chosen - 1, s.keys.end());
    for (int i = 0; i < token.chosen; i++) at[i] = (int32_t)(uint32_t)s.keys[(size_t)i];
    std::sort(at, at + token.chosen);
    at += token.chosen;
  } else {
    for (int c = 1; c < token.recent; c++) *at++ = c;
  }
  for (int c = token.recent; c <= token.last; c++) *at++ = c;
  for (const int32_t* c = list; c < at; c++)
    if (*c < width) s.needed[(size_t)*c] = 1;
}

// Hits stay; columns without a place take the least recently used places that are backed up and not needed, columns
// to be written first. Order afterwards: stale, loaded, hit.
void SparsePlan::map(const octavo_run& run, const SparseOp& op, int sequence, SelectScratch& s) {
  const octavo_sparse& v = *run.sparse;
  const int64_t row = run.rows[sequence], p = run.page_size, start = run.kv_start[sequence];
  const RowState state = row_state(v, op.layer, row);
  const int places = (int)v.device_pages;
  int64_t last_slot = 0;
  for (int64_t t = run.q_indptr[sequence]; t < run.q_indptr[sequence + 1]; t++)
    last_slot = std::max(last_slot, run.write_slots[t]);
  const int64_t first_written = start / p, last_written = std::min(last_slot / p, v.width - 1);
  for (int64_t c = first_written; c <= last_written; c++) s.needed[(size_t)c] = 2;

  s.wanted.clear();
  for (int64_t c = first_written; c <= last_written; c++)
    if (state.place_of[c] < 0 && host_page(v, row, c) >= 0) s.wanted.push_back((int32_t)c);
  const int forced = (int)s.wanted.size();
  for (int64_t c = 0; c < v.width; c++)
    if (s.needed[(size_t)c] == 1 && state.place_of[c] < 0 && host_page(v, row, c) >= 0) s.wanted.push_back((int32_t)c);

  s.rank.resize((size_t)places);
  s.victims.clear();
  const int32_t backed = v.backed[row];
  for (int i = 0; i < places; i++) {
    const int32_t place = state.order[i], column = state.column_of[place];
    const int use = column < 0 ? 0 : s.needed[(size_t)column];
    s.rank[(size_t)place] = column >= backed || use == 2 ? 2 : (uint8_t)use;  // 1: may go for a written column only
    if (s.rank[(size_t)place] == 0) s.victims.push_back(place);
  }
  const int free = (int)s.victims.size();
  if (free < forced)
    for (int i = 0; i < places; i++)
      if (s.rank[(size_t)state.order[i]] == 1) s.victims.push_back(state.order[i]);
  const int take = std::max(std::min((int)s.wanted.size(), free), std::min(forced, (int)s.victims.size()));

  // rank from here on: 0 stale, 1 loaded, 2 hit
  int64_t counts[3] = {0, 0, 0};
  for (int i = 0; i < places; i++) {
    const int32_t column = state.column_of[i];
    s.rank[(size_t)i] = column >= 0 && s.needed[(size_t)column] ? 2 : 0;
    counts[0] += s.rank[(size_t)i] == 2;
  }
  for (int j = 0; j < take; j++) {
    const int32_t place = s.victims[(size_t)j], column = s.wanted[(size_t)j];
    if (state.column_of[place] >= 0) state.place_of[state.column_of[place]] = -1;
    state.place_of[column] = place;
    state.column_of[place] = column;
    s.rank[(size_t)place] = 1;
    const int32_t slot = v.row_slots[row * v.device_pages + place];
    counts[column * p < start ? 1 : 2]++;
    if (column * p < start && slot >= 0 && slot < v.slot_count)
      std::memcpy(slot_part(run, op, slot), host_part(run, op, host_page(v, row, column)), (size_t)part_bytes(run, op));
  }
  for (int i = 0; i < 3; i++) __atomic_fetch_add(v.counts + i, counts[i], __ATOMIC_RELAXED);
  s.order.clear();
  for (int rank = 0; rank < 3; rank++)
    for (int i = 0; i < places; i++)
      if (s.rank[(size_t)state.order[i]] == rank) s.order.push_back(state.order[i]);
  std::copy(s.order.begin(), s.order.end(), state.order);
}

uint8_t* SparsePlan::slot_of(const octavo_run& run, const SparseOp& op, int64_t sequence, int64_t token_slot) {
  const octavo_sparse& v = *run.sparse;
  const int64_t p = run.page_size, column = token_slot / p;
  if (token_slot < 0 || column >= v.width) return nullptr;
  const int64_t slot = slot_at(v, op.layer, run.rows[sequence], column);
  if (slot < 0) return nullptr;
  return slot_part(run, op, slot) + token_slot % p * op.head_dim * element_bytes(run);
}

// ------------------------------------------------------------------------------------------------- attention

// Fills the tile with the keys of one split: pages in their slots, or in the host tier where they have none.
int SparsePlan::load(const octavo_run& run, const SparseOp& op, const Item& item, int split, Scratch& s) const {
  const octavo_sparse& v = *run.sparse;
  AttnTile& t = s.tile;
  const int64_t base = (int64_t)split * kSplit, hd = op.head_dim, p = run.page_size, element = element_bytes(run);
  const int64_t values = (int64_t)op.kv_heads * p * hd * element, head_at = item.kv_head * p * hd * element;
  const int64_t row = run.rows[item.sequence];
  const int32_t* list = item.sequence < v.decodes ? lists_.data() + (int64_t)item.token * columns_ : nullptr;
  int flags = 0;
  auto page = [&](int64_t column) -> const uint8_t* {  // keys of this KV head
    int64_t from = column < v.width ? slot_at(v, op.layer, row, column) : -1;
    if (from >= 0) return slot_part(run, op, from) + head_at;
    from = column < v.width ? host_page(v, row, column) : -1;
    if (from < 0) flags |= OCTAVO_BAD_PAGE, from = 0;
    return host_part(run, op, from) + head_at;
  };
  int64_t first = kSplit, last = 0;
  for (int i = 0; i < item.tokens; i++) {
    const Token& token = tokens_[(size_t)(item.token + i)];
    const int64_t shared = token.shared - token.skipped, end = token.high - token.skipped;
    const int high = (int)std::min<int64_t>(std::max<int64_t>(shared - base, 0), kSplit);
    if (high > 0) first = 0, last = std::max<int64_t>(last, high);
    for (int h = 0; h < item.heads; h++) {
      const int r = i * item.heads + h;
      t.low[r] = 0;
      t.high[r] = high;
      t.own[r] = t.own_first[r] = 0;
    }
    if (!run.mask || end <= shared || end <= base || shared >= base + kSplit) continue;
    int64_t logical = shared;
    for (auto bits = (unsigned long long)run.mask[item.token + i]; bits; bits &= bits - 1, logical++) {
      if (logical < base || logical >= base + kSplit) continue;
      const int64_t slot = run.kv_start[item.sequence] + __builtin_ctzll(bits);
      const uint8_t* k = page(slot / p) + slot % p * hd * element;
      for (int h = 0; h < item.heads; h++) {
        const int r = i * item.heads + h;
        if (!t.own[r]) t.own_first[r] = (int)(logical - base);
        t.ok[r][t.own[r]] = k;
        t.ov[r][t.own[r]++] = k + values;
      }
    }
  }
  t.first = first < last ? (int)first : 0;
  t.shared = first < last ? (int)(last - first) : 0;
  const uint8_t* k = nullptr;
  for (int i = 0; i < t.shared; i++) {
    const int64_t logical = base + i, offset = logical % p;
    k = !k || offset == 0 ? page(list ? list[logical / p] : logical / p) + offset * hd * element : k + hd * element;
    t.k[i] = k;
    t.v[i] = k + values;
  }
  look_ahead(t);
  t.queries = item.tokens * item.heads;
  t.head_dim = op.head_dim;
  t.bf16 = run.kv_bf16 != 0;
  t.scale = op.scale;
  return flags;
}

int SparsePlan::attend(const octavo_run& run, const SparseOp& op, const KernelTable& k, const float* q, int64_t ldq,
                       float* out, int64_t ldo, int index, Scratch& s) {
  const Rows rows{k, op.head_dim, q, ldq, out, ldo};
  const auto keys = [&](const Item& item, int split, Scratch& mine) { return load(run, op, item, split, mine); };
  return by_split_ ? run_split(rows, index, s, keys) : run_item(rows, items_[(size_t)index], s, keys);
}

}  // namespace octavo
