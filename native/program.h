// A recorded forward pass: instructions over buffers, grouped into stages that threads run together.
#pragma once
#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "attention.h"
#include "octavo_native.h"
#include "pool.h"
#include "sparse.h"
#include "types.h"

namespace octavo {

const KernelTable* kernels_named(const std::string& name);  // null where this CPU or build has no such table
const char* best_kernels();

class Program : public Job {
 public:
  Program(std::vector<octavo_instr> code, std::vector<int64_t> widths, std::vector<int64_t> quant_widths,
          std::vector<int64_t> external_widths, const KernelTable* kernels);
  int run(Pool& pool, const octavo_run& run);
  void chunk(int stage, int index, int thread) override;
  void opened(int stage) override;

  struct Stage {
    int begin, end;  // instructions; more than one only where a row needs no other row between them
    int plan;        // attention: index of its plan (sparse attention has one of its own)
    bool sparse;     // attention of a sparse layer
  };
  const std::vector<Stage>& stages() const { return stages_; }
  const octavo_instr& first(int stage) const { return code_[(size_t)stages_[(size_t)stage].begin]; }

 private:
  struct Buffer {
    float* data = nullptr;
    int64_t stride = 0;
  };
  struct Best {  // arg max of one row over one chunk of outputs
    float value;
    int32_t index;
  };
  struct PerThread {
    AttnPlan::Scratch attention;
    SparsePlan::SelectScratch sparse;
    std::vector<float> row, logits;
  };

  int plan_of(const octavo_instr& in);
  void reserve(int64_t rows, int threads);
  void plan_step(int threads);
  void look_ahead(int threads, bool wide);
  int linear_chunks(const Weight& w, int threads) const;
  float* at(int64_t buffer, int64_t offset, int64_t row) const;
  void row_instr(const octavo_instr& in, int64_t row, PerThread& t);
  uint8_t* keys_of(int pool, int layer, int kv_heads, int head_dim, int64_t sequence, int64_t slot) const;
  void rope_write(const octavo_instr& in, int64_t row, PerThread& t);
  LinearArgs linear_args(const octavo_instr& in, int64_t row_begin, int64_t row_end) const;
  void linear(const octavo_instr& in, int64_t row_begin, int64_t row_end, int block_begin, int block_end);
  void argmax(const octavo_instr& in, int index, int chunks, PerThread& t);
  void finish_argmax();

  std::vector<octavo_instr> code_;
  std::vector<int64_t> widths_, quant_widths_, external_widths_;
  const KernelTable* k_;
  std::vector<Stage> stages_, wide_stages_;
  const std::vector<Stage>* live_ = &stages_;  // of this run
  std::vector<AttnPlan> plans_;
  std::unique_ptr<SparsePlan> sparse_;
  std::vector<Buffer> buffers_;
  std::vector<QuantRows> quants_;
  std::unique_ptr<void, void (*)(void*)> arena_;
  int64_t capacity_rows_ = 0;
  std::vector<PerThread> threads_;
  std::vector<int> totals_;
  std::vector<const uint8_t*> ahead_;  // [stages, threads]: weights a waiting thread may ask for; empty for long prompts
  std::vector<std::vector<Best>> best_;
  const octavo_run* run_ = nullptr;
  int row_chunk_ = 1;
  std::atomic<int> flags_{0};
  double profile_at_ = 0;
  int profile_stage_ = -1;
};

}  // namespace octavo
