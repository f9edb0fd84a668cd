// Sparse layers (HiSparse): selection of pages, slots in order of use, swap-in, attention over the counted pages.
// The same rules as `ops/torch_sparse.py` and `ops/torch_slots.py`, with the same results for the state.
#pragma once
#include <atomic>
#include <memory>
#include <vector>

#include "attention.h"
#include "octavo_native.h"
#include "types.h"

namespace octavo {

struct SparseOp {  // what one sparse layer is
  int layer, head_dim, heads, kv_heads;
  float scale;
};

// Work of all sparse layers of a step. What a token counts of a layer is decided layer by layer; how many pages that
// are follows from its position, so items and splits are laid out once a step.
class SparsePlan : public TilePlan {
 public:
  using TilePlan::TilePlan;

  void build(const octavo_run& run, int threads);

  struct SelectScratch {  // one per thread
    std::vector<float> turned, low, high;
    std::vector<uint64_t> keys;
    std::vector<uint8_t> needed, rank;
    std::vector<int32_t> order, victims, wanted;
  };

  // Stage 1: chunks score pages; whoever ends the last chunk of a sequence selects, maps and swaps in.
  int select_chunks() const { return (int)parts_.size(); }
  void select(const octavo_run& run, const SparseOp& op, const KernelTable& k, const float* q, int64_t ldq,
              const int64_t* rope, int index, SelectScratch& s);
  void reset_select();

  // Where a token's keys of KV head 0 go (values are kv_heads * page_size * head_dim elements behind); null: no place.
  static uint8_t* slot_of(const octavo_run& run, const SparseOp& op, int64_t sequence, int64_t token_slot);

  // Stage 2: out rows are [token, heads * head_dim]. Returns error flags.
  int attend_chunks() const { return by_split_ ? split_total_ : (int)items_.size(); }
  int attend(const octavo_run& run, const SparseOp& op, const KernelTable& k, const float* q, int64_t ldq, float* out,
             int64_t ldo, int index, Scratch& s);

 private:
  struct Token {            // what a position counts; prompt tokens skip nothing
    int recent, last;       // pages recent … last count in any case, and page 0
    int chosen;             // how many of the candidates 1 … recent - 1 count
    int64_t skipped;        // keys of the candidates that do not
    int64_t shared, high;   // keys below the step's own by mask, all keys; as if nothing were skipped
  };
  struct Part {
    int sequence, begin, end;  // candidate columns to score
  };

  void turn(const octavo_run& run, const SparseOp& op, const KernelTable& k, const float* q, const int64_t* rope,
            int64_t token, SelectScratch& s) const;
  void choose(int64_t token, int64_t width, SelectScratch& s);
  void map(const octavo_run& run, const SparseOp& op, int sequence, SelectScratch& s);
  int load(const octavo_run& run, const SparseOp& op, const Item& item, int split, Scratch& s) const;

  std::vector<Token> tokens_;
  std::vector<Part> parts_;
  std::vector<int> part_count_;          // by sequence
  std::vector<float> scores_;            // [decoding token, columns]
  std::vector<int32_t> lists_;           // [decoding token, columns]: counted pages, ascending
  int64_t columns_ = 0;                  // of both
  std::unique_ptr<std::atomic<int>[]> scored_;
  size_t scored_capacity_ = 0;
};

}  // namespace octavo
