#include "program.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace octavo {
namespace {

bool by_rows(int64_t op) {
  return op != OCTAVO_LINEAR && op != OCTAVO_ATTENTION && op != OCTAVO_ARGMAX && op != OCTAVO_SELECT;
}

bool by_rows_or_linear(int64_t op) { return op == OCTAVO_LINEAR || by_rows(op); }

// Long prompts: a thread takes so many rows through everything between two attentions, so that what one operation
// writes is still in its cache when the next reads it, and threads meet once a layer. Few rows are better shared out
// by outputs: a weight is then read once.
constexpr int kWideRows = 24, kWideChunks = 4;  // rows of a chunk; chunks a thread there must be

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

size_t padded(size_t bytes) { return (bytes + 127) / 64 * 64; }

AttnOp attn_op(const octavo_instr& in) {
  return {(int)in.i[2], (int)in.i[3], (int)in.i[4], (int)in.i[5], (int)in.i[6], (int)in.i[7], (float)in.f[0]};
}

constexpr int kSparsePool = 2;

SparseOp sparse_op(const octavo_instr& in) {
  return {(int)in.i[3], (int)in.i[4], (int)in.i[5], (int)in.i[6], (float)in.f[0]};
}

}  // namespace

Program::Program(std::vector<octavo_instr> code, std::vector<int64_t> widths, std::vector<int64_t> quant_widths,
                 std::vector<int64_t> external_widths, const KernelTable* kernels)
    : code_(std::move(code)),
      widths_(std::move(widths)),
      quant_widths_(std::move(quant_widths)),
      external_widths_(std::move(external_widths)),
      k_(kernels),
      arena_(nullptr, std::free) {
  for (int i = 0; i < (int)code_.size(); i++) {
    const octavo_instr& in = code_[(size_t)i];
    const Stage stage{i, i + 1, plan_of(in), in.op == OCTAVO_ATTENTION && in.i[2] == kSparsePool};
    const auto add = [&](std::vector<Stage>& stages, bool (*row_alone)(int64_t)) {
      if (row_alone(in.op) && !stages.empty() && row_alone(code_[(size_t)stages.back().begin].op))
        stages.back().end = i + 1;
      else
        stages.push_back(stage);
    };
    add(stages_, by_rows);
    add(wide_stages_, by_rows_or_linear);
  }
  best_.resize(std::max(stages_.size(), wide_stages_.size()));
}

// Index of the attention plan an instruction uses; -1 for none. Layers of one shape share a plan.
int Program::plan_of(const octavo_instr& in) {
  if (in.op == OCTAVO_SELECT || (in.op == OCTAVO_ATTENTION && in.i[2] == kSparsePool)) {
    const SparseOp op = sparse_op(in);
    if (!sparse_) sparse_ = std::make_unique<SparsePlan>(op.heads, op.kv_heads);
    if (sparse_->heads != op.heads || sparse_->kv_heads != op.kv_heads) throw std::invalid_argument("heads");
    return -1;
  }
  if (in.op != OCTAVO_ATTENTION) return -1;
  const AttnOp op = attn_op(in);
  for (size_t p = 0; p < plans_.size(); p++)
    if (plans_[p].window == op.window && plans_[p].heads == op.heads && plans_[p].kv_heads == op.kv_heads)
      return (int)p;
  plans_.emplace_back(op.window, op.heads, op.kv_heads);
  return (int)plans_.size() - 1;
}

// Buffers grow to the largest step seen; nothing is allocated in later steps.
void Program::reserve(int64_t rows, int threads) {
  if ((int)threads_.size() < threads) threads_.resize((size_t)threads);
  if (rows > capacity_rows_) {
    const size_t n = (size_t)std::max<int64_t>(rows, std::min<int64_t>(2 * capacity_rows_, 512));
    size_t bytes = 0;
    for (int64_t w : widths_) bytes += padded(n * (size_t)w * 4);
    for (int64_t w : quant_widths_) bytes += padded(n * (size_t)w) + 3 * padded(n * (size_t)w / kGroup * 4);
    arena_.reset(std::aligned_alloc(64, bytes + 64));
    if (!arena_) throw std::bad_alloc();
    auto* p = (uint8_t*)arena_.get();
    auto take = [&](size_t size) {
      uint8_t* at = p;
      p += padded(size);
      return at;
    };
    buffers_.assign(widths_.size() + external_widths_.size(), {});
    quants_.clear();
    for (size_t i = 0; i < widths_.size(); i++) buffers_[i] = {(float*)take(n * (size_t)widths_[i] * 4), widths_[i]};
    for (int64_t w : quant_widths_) {
      const size_t groups = n * (size_t)w / kGroup * 4;
      QuantRows q{};
      q.code = (int8_t*)take(n * (size_t)w);
      q.scale = (float*)take(groups);
      q.scaled_sum = (float*)take(groups);
      q.sum = (int32_t*)take(groups);
      q.in = (int)w;
      quants_.push_back(q);
    }
    capacity_rows_ = (int64_t)n;
  }
  for (size_t i = 0; i < external_widths_.size(); i++)
    buffers_[widths_.size() + i] = {(float*)run_->external[i], external_widths_[i]};
}

// About eight chunks a thread: enough to even out a busy core, long enough runs for the memory's prefetchers.
int Program::linear_chunks(const Weight& w, int threads) const {
  const int wanted = threads == 1 ? 1 : 8 * threads;
  return std::min(w.blocks, wanted);
}

void Program::plan_step(int threads) {
  const int64_t n = run_->tokens;
  const bool wide = n >= (int64_t)kWideRows * kWideChunks * threads && !run_->profile;  // profiles tell operations apart
  live_ = wide ? &wide_stages_ : &stages_;
  row_chunk_ = wide ? kWideRows : (int)std::max<int64_t>(1, n / (threads * 4));
  totals_.assign(live_->size(), 0);
  for (auto& plan : plans_) plan.build(*run_, threads);
  if (sparse_) {
    if (!run_->sparse) throw std::invalid_argument("no sparse state");
    sparse_->build(*run_, threads);
  }
  for (size_t s = 0; s < live_->size(); s++) {
    const Stage& stage = (*live_)[s];
    const octavo_instr& in = code_[(size_t)stage.begin];
    if (in.op == OCTAVO_LINEAR && !wide) {
      totals_[s] = linear_chunks(*(const Weight*)in.w, threads);
    } else if (in.op == OCTAVO_ARGMAX) {
      totals_[s] = linear_chunks(*(const Weight*)in.w, threads);
      best_[s].resize((size_t)totals_[s] * (size_t)n);
    } else if (in.op == OCTAVO_SELECT) {
      totals_[s] = sparse_->select_chunks();
    } else if (stage.sparse) {
      sparse_->reserve((int)in.i[4]);
      totals_[s] = sparse_->attend_chunks();
    } else if (in.op == OCTAVO_ATTENTION) {
      AttnPlan& plan = plans_[(size_t)stage.plan];
      plan.reserve((int)in.i[4]);
      totals_[s] = plan.chunks();
    } else {
      totals_[s] = (threads == 1 || n <= 2) && !wide ? kSerial : (int)((n + row_chunk_ - 1) / row_chunk_);
    }
  }
  look_ahead(threads, wide);
}

// Behind each stage, the next matrix that is shared out by outputs: there a thread's share begins with these bytes.
void Program::look_ahead(int threads, bool wide) {
  ahead_.clear();
  if (wide || threads == 1) return;
  ahead_.assign(live_->size() * (size_t)threads, nullptr);
  for (size_t s = live_->size(); s-- > 1;) {
    const octavo_instr& in = code_[(size_t)(*live_)[s].begin];
    const bool matrix = in.op == OCTAVO_LINEAR || in.op == OCTAVO_ARGMAX;
    for (int t = 0; t < threads; t++) {
      const size_t at = s * (size_t)threads + (size_t)t, before = at - (size_t)threads;
      ahead_[before] = ahead_[at];
      if (!matrix) continue;
      const auto& w = *(const Weight*)in.w;
      const int64_t first = share_begin((uint32_t)totals_[s], t, threads);
      if (first < totals_[s]) ahead_[before] = w.data + w.block_bytes * (size_t)(w.blocks * first / totals_[s]);
    }
  }
}

int Program::run(Pool& pool, const octavo_run& run) {
  if (run.tokens <= 0) return OCTAVO_OK;
  run_ = &run;
  flags_.store(0);
  reserve(run.tokens, pool.threads());
  plan_step(pool.threads());
  profile_stage_ = -1;
  pool.run(*this, totals_, ahead_);
  finish_argmax();
  run_ = nullptr;
  return flags_.load();
}

// A stage opens when the one before it is complete: counters of its attention plan are free again.
void Program::opened(int stage) {
  if (stage < (int)live_->size()) {
    const Stage& next = (*live_)[(size_t)stage];
    if (next.plan >= 0) plans_[(size_t)next.plan].reset_counters();
    if (next.sparse) sparse_->reset_counters();
    if (code_[(size_t)next.begin].op == OCTAVO_SELECT) sparse_->reset_select();
  }
  if (!run_->profile) return;
  const double now = seconds();
  if (profile_stage_ >= 0) run_->profile[profile_stage_] += now - profile_at_;
  profile_stage_ = stage;
  profile_at_ = now;
}

void Program::chunk(int s, int index, int thread) {
  const Stage& stage = (*live_)[(size_t)s];
  const octavo_instr& in = code_[(size_t)stage.begin];
  PerThread& t = threads_[(size_t)thread];
  const int total = totals_[(size_t)s];
  if (in.op == OCTAVO_LINEAR && live_ == &stages_) {
    const int64_t blocks = ((const Weight*)in.w)->blocks;
    linear(in, 0, run_->tokens, (int)(blocks * index / total), (int)(blocks * (index + 1) / total));
  } else if (in.op == OCTAVO_ARGMAX) {
    argmax(in, index, total, t);
    const size_t n = (size_t)run_->tokens;
    for (size_t r = 0; r < n; r++) {
      Best b{};
      int at = 0;
      const Weight& w = *(const Weight*)in.w;
      const int begin = (int)((int64_t)w.blocks * index / total) * kBlock;
      const int end = std::min(w.out, (int)((int64_t)w.blocks * (index + 1) / total) * kBlock);
      const int64_t ld = (int64_t)((w.blocks + total - 1) / total) * kBlock;
      k_->argmax(t.logits.data() + (int64_t)r * ld, end - begin, &b.value, &at);
      b.index = begin + at;
      best_[(size_t)s][(size_t)index * n + r] = b;
    }
  } else if (in.op == OCTAVO_SELECT) {
    sparse_->select(*run_, sparse_op(in), *k_, at(in.src, in.src_offset, 0), buffers_[(size_t)in.src].stride,
                    (const int64_t*)in.w, index, t.sparse);
  } else if (stage.sparse) {
    const int flags = sparse_->attend(
        *run_, sparse_op(in), *k_, at(in.src, in.src_offset, 0), buffers_[(size_t)in.src].stride,
        at(in.dst, in.dst_offset, 0), buffers_[(size_t)in.dst].stride, index, t.attention);
    if (flags) flags_.fetch_or(flags);
  } else if (in.op == OCTAVO_ATTENTION) {
    const int flags = plans_[(size_t)stage.plan].run_chunk(
        *run_, attn_op(in), *k_, at(in.src, in.src_offset, 0), buffers_[(size_t)in.src].stride,
        at(in.dst, in.dst_offset, 0), buffers_[(size_t)in.dst].stride, index, t.attention);
    if (flags) flags_.fetch_or(flags);
  } else {
    const int64_t begin = total == kSerial ? 0 : (int64_t)index * row_chunk_;
    const int64_t end = total == kSerial ? run_->tokens : std::min(run_->tokens, begin + row_chunk_);
    for (int i = stage.begin; i < stage.end;) {
      if (code_[(size_t)i].op == OCTAVO_LINEAR) {
        const octavo_instr& product = code_[(size_t)i++];
        linear(product, begin, end, 0, ((const Weight*)product.w)->blocks);
        continue;
      }
      int last = i;
      while (last < stage.end && code_[(size_t)last].op != OCTAVO_LINEAR) last++;
      for (int64_t row = begin; row < end; row++)
        for (int j = i; j < last; j++) row_instr(code_[(size_t)j], row, t);
      i = last;
    }
  }
}

float* Program::at(int64_t buffer, int64_t offset, int64_t row) const {
  const Buffer& b = buffers_[(size_t)buffer];
  return b.data + row * b.stride + offset;
}

void Program::row_instr(const octavo_instr& in, int64_t row, PerThread& t) {
  const int width = (int)in.width;
  switch (in.op) {
    case OCTAVO_EMBED: {
      const auto& w = *(const Weight*)in.w;
      const int64_t id = run_->token_ids[row];
      if (id < 0 || id >= w.out) flags_.fetch_or(OCTAVO_BAD_TOKEN);
      k_->embed(w, id < 0 || id >= w.out ? 0 : id, (float)in.f[0], at(in.dst, in.dst_offset, row));
      break;
    }
    case OCTAVO_COPY:
      std::memcpy(at(in.dst, in.dst_offset, row), at(in.src, in.src_offset, row), (size_t)width * 4);
      break;
    case OCTAVO_RMS_NORM: {
      const int part = in.i[0] ? (int)in.i[0] : width;
      for (int i = 0; i < width; i += part)
        k_->rms_norm(at(in.src, in.src_offset + i, row), (const float*)in.w, (float)in.f[0], part,
                     at(in.dst, in.dst_offset + i, row));
      break;
    }
    case OCTAVO_QUANTIZE: {
      const QuantRows& q = quants_[(size_t)in.dst];
      const int64_t g = row * (q.in / kGroup);
      k_->quantize(at(in.src, in.src_offset, row), q.in, q.code + row * q.in, q.scale + g, q.scaled_sum + g, q.sum + g);
      break;
    }
    case OCTAVO_ROPE_WRITE: rope_write(in, row, t); break;
    case OCTAVO_GATED:
      k_->gated(at(in.src, in.src_offset, row), at(in.src, in.src_offset + width, row), width, (int)in.i[0],
                at(in.dst, in.dst_offset, row));
      break;
    case OCTAVO_ADD:
      k_->add(at(in.src, in.src_offset, row), at(in.src2, in.src2_offset, row), width, at(in.dst, in.dst_offset, row));
      break;
    case OCTAVO_SCALE:
      k_->scale(at(in.src, in.src_offset, row), (float)in.f[0], width, at(in.dst, in.dst_offset, row));
      break;
    case OCTAVO_SOFTCAP:
      std::memcpy(at(in.dst, in.dst_offset, row), at(in.src, in.src_offset, row), (size_t)width * 4);
      k_->softcap(at(in.dst, in.dst_offset, row), (float)in.f[0], width);
      break;
    default: break;
  }
}

// Where the key of KV head 0 of a token goes; null where the row has no page.
uint8_t* Program::keys_of(int pool, int layer, int kv_heads, int head_dim, int64_t sequence, int64_t slot) const {
  const int64_t ps = run_->page_size, entry = slot / ps;
  if (slot < 0 || entry >= run_->table_width[pool]) return nullptr;
  const int64_t page = run_->table[pool][run_->rows[sequence] * run_->table_width[pool] + entry];
  if (page < 0 || page >= run_->kv_pages[pool]) return nullptr;
  const int64_t at = page * run_->kv_page_elements[pool] + ((int64_t)layer * 2 * kv_heads * ps + slot % ps) * head_dim;
  return (uint8_t*)run_->kv[pool] + at * (run_->kv_bf16 ? 2 : 4);
}

void Program::rope_write(const octavo_instr& in, int64_t row, PerThread& t) {
  const int pool = (int)in.i[2], hd = (int)in.i[4], q_heads = (int)in.i[5], kv_heads = (int)in.i[6];
  const auto* table = (const int64_t*)in.w;  // {positions, r, cos, sin}
  const int half = (int)table[1];
  int64_t position = run_->positions[row];
  if (position < 0 || position >= table[0]) flags_.fetch_or(OCTAVO_BAD_POSITION), position = 0;
  const float* cos = (const float*)table[2] + position * half;
  const float* sin = (const float*)table[3] + position * half;
  if (in.dst >= 0)
    for (int h = 0; h < q_heads; h++)
      k_->rope(at(in.src, in.src_offset + (int64_t)h * hd, row), cos, sin, half, hd,
               at(in.dst, in.dst_offset + (int64_t)h * hd, row));
  const int64_t sequence =
      std::upper_bound(run_->q_indptr, run_->q_indptr + run_->sequences + 1, row) - run_->q_indptr - 1;
  const int64_t slot = run_->write_slots[row], ps = run_->page_size;
  uint8_t* keys = pool == kSparsePool ? SparsePlan::slot_of(*run_, {(int)in.i[3], hd, q_heads, kv_heads, 0}, sequence, slot)
                                      : keys_of(pool, (int)in.i[3], kv_heads, hd, sequence, slot);
  if (!keys) {
    flags_.fetch_or(OCTAVO_BAD_PAGE);
    return;
  }
  if ((int)t.row.size() < hd) t.row.resize((size_t)hd);
  const int64_t values = (int64_t)kv_heads * ps * hd;
  for (int h = 0; h < kv_heads; h++) {
    const int64_t to = (int64_t)h * ps * hd;
    const float* v = at(in.i[0], in.i[1] + (int64_t)h * hd, row);
    if (run_->kv_bf16) {
      auto* kv = (uint16_t*)keys + to;
      k_->rope(at(in.src2, in.src2_offset + (int64_t)h * hd, row), cos, sin, half, hd, t.row.data());
      k_->store_bf16(t.row.data(), hd, kv);
      k_->store_bf16(v, hd, kv + values);
    } else {
      auto* kv = (float*)keys + to;
      k_->rope(at(in.src2, in.src2_offset + (int64_t)h * hd, row), cos, sin, half, hd, kv);
      std::memcpy(kv + values, v, (size_t)hd * 4);
    }
  }
}

// Rows [row_begin, row_end) of a linear instruction but for where its result goes.
LinearArgs Program::linear_args(const octavo_instr& in, int64_t row_begin, int64_t row_end) const {
  LinearArgs a{};
  a.w = (const Weight*)in.w;
  a.rows = (int)(row_end - row_begin);
  if (is_quantised(a.w->kind)) {
    a.q = quants_[(size_t)in.src];
    const int64_t groups = row_begin * (a.q.in / kGroup);
    a.q.code += row_begin * a.q.in;
    a.q.scale += groups;
    a.q.scaled_sum += groups;
    a.q.sum += groups;
  } else {
    a.x = at(in.src, in.src_offset, row_begin);
    a.ldx = buffers_[(size_t)in.src].stride;
  }
  return a;
}

// Outputs [block_begin, block_end) x 16 of rows [row_begin, row_end).
void Program::linear(const octavo_instr& in, int64_t row_begin, int64_t row_end, int block_begin, int block_end) {
  LinearArgs a = linear_args(in, row_begin, row_end);
  a.out = at(in.dst, in.dst_offset, row_begin);
  a.ldo = buffers_[(size_t)in.dst].stride;
  if (in.src2 >= 0) {
    a.residual = at(in.src2, in.src2_offset, row_begin);
    a.ldr = buffers_[(size_t)in.src2].stride;
  }
  k_->linear(a, block_begin, block_end);
}

// Logits of one chunk of outputs stay in the thread's own memory.
void Program::argmax(const octavo_instr& in, int index, int chunks, PerThread& t) {
  const auto& w = *(const Weight*)in.w;
  const int64_t ld = (int64_t)((w.blocks + chunks - 1) / chunks) * kBlock;
  if ((int64_t)t.logits.size() < ld * run_->tokens) t.logits.resize((size_t)(ld * run_->tokens));
  LinearArgs a = linear_args(in, 0, run_->tokens);
  const int begin = (int)((int64_t)w.blocks * index / chunks);
  a.out = t.logits.data() - (int64_t)begin * kBlock;
  a.ldo = ld;
  k_->linear(a, begin, (int)((int64_t)w.blocks * (index + 1) / chunks));
}

void Program::finish_argmax() {
  const size_t n = (size_t)run_->tokens;
  for (size_t s = 0; s < live_->size(); s++) {
    const octavo_instr& in = code_[(size_t)(*live_)[s].begin];
    if (in.op != OCTAVO_ARGMAX) continue;
    auto* out = (int64_t*)buffers_[(size_t)in.dst].data;
    for (size_t r = 0; r < n; r++) {
      Best best = best_[s][r];
      for (size_t c = 1; c < (size_t)totals_[s]; c++) {
        const Best& b = best_[s][c * n + r];
        if (b.value > best.value) best = b;
      }
      out[r] = best.index;
    }
  }
}

}  // namespace octavo
