// Which keys each tile of queries reads in one step, and the running of one attention operation.
#pragma once
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "octavo_native.h"
#include "types.h"

namespace octavo {

struct AttnOp {  // one OCTAVO_ATTENTION instruction
  int pool, layer, head_dim, heads, kv_heads, window;
  float scale;
};

// What the plans of dense and sparse layers share.
// Item = a few consecutive tokens of one sequence x up to 16 queries of one KV head; each item has splits of kSplit
// logical positions. By items where there are many; by (item, split) where there are few, so that a long context of
// one request keeps all threads busy. The bits are the same: splits combine in order either way.
class TilePlan {
 public:
  TilePlan(int heads, int kv_heads) : heads(heads), kv_heads(kv_heads) {}
  const int heads, kv_heads;

  struct Scratch {  // one per thread
    AttnTile tile;
    AttnState state[kTileQueries], part[kTileQueries];
    std::vector<float> acc, part_acc, turned;
  };

  void reserve(int head_dim);
  void reset_counters();

 protected:
  struct Item {
    int sequence, token, tokens;      // first token (of the step) and how many
    int kv_head, head, heads;         // query heads of this item
    int split_begin, split_end;
    int partial;                      // first partial slot (by_split only)
    int slots() const { return split_end > split_begin ? split_end - split_begin : 1; }
  };
  // Where an operation's queries are and its results go; out rows are [token, heads * head_dim].
  struct Rows {
    const KernelTable& k;
    int head_dim;
    const float* q;
    int64_t ldq;
    float* out;
    int64_t ldo;
  };

  void begin_items();
  // One item for every KV head, and as many query heads as a tile takes, of the tokens [token, token + tokens).
  void add_items(int sequence, int token, int tokens, int split_begin, int split_end);
  void end_items(int threads);
  // Both return the flags of `load(item, split, scratch)`, which fills the tile with the keys of one split.
  template <class Load>
  int run_item(const Rows& rows, const Item& item, Scratch& s, Load load);
  template <class Load>
  int run_split(const Rows& rows, int index, Scratch& s, Load load);

  std::vector<Item> items_;
  int split_total_ = 0;
  bool by_split_ = false;

 private:
  void prepare(const Rows& rows, const Item& item, Scratch& s) const;
  void store(const Rows& rows, const Item& item, const AttnState* state, const float* acc) const;

  std::vector<int> split_item_;       // item of a partial slot
  std::vector<float> partial_acc_;    // [partial slot][kTileQueries][head_dim]
  std::vector<AttnState> partial_state_;
  std::unique_ptr<std::atomic<int>[]> finished_;
  size_t finished_capacity_ = 0;
};

template <class Load>
int TilePlan::run_item(const Rows& rows, const Item& item, Scratch& s, Load load) {
  const int queries = item.tokens * item.heads;
  const size_t hd = (size_t)rows.head_dim;
  prepare(rows, item, s);
  int flags = 0;
  for (int r = 0; r < queries; r++) s.state[r] = {-INFINITY, 0.0f};
  for (int split = item.split_begin; split < item.split_end; split++) {
    flags |= load(item, split, s);
    rows.k.attend(s.tile, s.turned.data(), s.part, s.part_acc.data());
    for (int r = 0; r < queries; r++)
      rows.k.combine(s.state + r, s.acc.data() + (size_t)r * hd, s.part[r], s.part_acc.data() + (size_t)r * hd,
                     rows.head_dim);
  }
  store(rows, item, s.state, s.acc.data());
  return flags;
}

// One split of one item; whoever finishes an item's last split combines all of them.
template <class Load>
int TilePlan::run_split(const Rows& rows, int index, Scratch& s, Load load) {
  const int which = split_item_[(size_t)index];
  const Item& item = items_[(size_t)which];
  const int queries = item.tokens * item.heads, splits = item.split_end - item.split_begin;
  const size_t hd = (size_t)rows.head_dim, need = (size_t)kTileQueries * hd;
  AttnState* state = partial_state_.data() + (size_t)index * kTileQueries;
  float* acc = partial_acc_.data() + (size_t)index * need;
  int flags = 0;
  if (splits > 0) {
    prepare(rows, item, s);
    flags |= load(item, item.split_begin + index - item.partial, s);
    rows.k.attend(s.tile, s.turned.data(), state, acc);
  } else {
    for (int r = 0; r < queries; r++) state[r] = {-INFINITY, 0.0f};
  }
  if (finished_[(size_t)which].fetch_add(1, std::memory_order_acq_rel) + 1 < item.slots()) return flags;
  state = partial_state_.data() + (size_t)item.partial * kTileQueries;
  acc = partial_acc_.data() + (size_t)item.partial * need;
  for (int p = 1; p < splits; p++)
    for (int r = 0; r < queries; r++)
      rows.k.combine(state + r, acc + (size_t)r * hd, state[p * kTileQueries + r],
                     acc + (size_t)p * need + (size_t)r * hd, rows.head_dim);
  store(rows, item, state, acc);
  return flags;
}

// Work of all attention operations that share a window and a head grouping, laid out once a step.
class AttnPlan : public TilePlan {
 public:
  AttnPlan(int window, int heads, int kv_heads) : TilePlan(heads, kv_heads), window(window) {}
  const int window;

  void build(const octavo_run& run, int threads);
  int chunks() const { return chunks_; }
  // Runs chunk `index`: out rows are [token, heads * head_dim]. Returns error flags.
  int run_chunk(const octavo_run& run, const AttnOp& op, const KernelTable& k, const float* q, int64_t ldq, float* out,
                int64_t ldo, int index, Scratch& scratch);

 private:
  int load(const octavo_run& run, const AttnOp& op, const Item& item, int split, Scratch& s) const;

  int chunks_ = 0;
};

}  // namespace octavo
