// Which keys each tile of queries reads in one step, and the running of one attention operation.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "octavo_native.h"
#include "types.h"

namespace octavo {

struct AttnOp {  // one OCTAVO_ATTENTION instruction
  int pool, layer, head_dim, heads, kv_heads, window;
  float scale;
};

// Work of all attention operations that share a window and a head grouping, laid out once a step.
// Item = a few consecutive tokens of one sequence x up to 16 queries of one KV head; each item has splits of kSplit
// logical positions. By items where there are many; by (item, split) where there are few, so that a long context of
// one request keeps all threads busy. The bits are the same: splits combine in order either way.
class AttnPlan {
 public:
  AttnPlan(int window, int heads, int kv_heads) : window(window), heads(heads), kv_heads(kv_heads) {}
  const int window, heads, kv_heads;

  void build(const octavo_run& run, int threads);
  int chunks() const { return chunks_; }

  struct Scratch {  // one per thread
    AttnTile tile;
    AttnState state[kTileQueries], part[kTileQueries];
    std::vector<float> acc, part_acc, turned;
  };

  void reserve(int head_dim);
  // Runs chunk `index`: out rows are [token, heads * head_dim]. Returns error flags.
  int run_chunk(const octavo_run& run, const AttnOp& op, const KernelTable& k, const float* q, int64_t ldq, float* out,
                int64_t ldo, int index, Scratch& scratch);
  void reset_counters();

 private:
  struct Item {
    int sequence, token, tokens;      // first token (of the step) and how many
    int kv_head, head, heads;         // query heads of this item
    int split_begin, split_end;
    int partial;                      // first partial slot (by_split only)
  };
  int load(const octavo_run& run, const AttnOp& op, const Item& item, int split, Scratch& s) const;
  void prepare(Scratch& s, int head_dim) const;
  void set_queries(const AttnOp& op, const Item& item, const float* q, int64_t ldq, AttnTile& tile) const;
  int run_split(const octavo_run& run, const AttnOp& op, const KernelTable& k, const float* q, int64_t ldq, float* out,
                int64_t ldo, int index, Scratch& s);
  void store(const AttnOp& op, const KernelTable& k, const Item& item, const AttnState* state, const float* acc,
             float* out, int64_t ldo) const;

  std::vector<Item> items_;
  std::vector<int> split_item_;       // item of a partial slot
  int split_total_ = 0, chunks_ = 0;
  bool by_split_ = false;
  std::vector<float> partial_acc_;    // [partial slot][kTileQueries][head_dim]
  std::vector<AttnState> partial_state_;
  std::unique_ptr<std::atomic<int>[]> finished_;
  size_t finished_capacity_ = 0;
};

}  // namespace octavo
