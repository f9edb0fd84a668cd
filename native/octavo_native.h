// C interface of the module: plain pointers and numbers, called from Python through ctypes.
#pragma once
#include <stdint.h>

#if defined(__cplusplus)
extern "C" {
#endif
#if defined(__GNUC__)
#pragma GCC visibility push(default)
#endif

#define OCTAVO_ABI 4  // raised whenever a structure or a call below changes

enum {
  OCTAVO_EMBED,       // dst <- rows of w for the token ids, times f0
  OCTAVO_COPY,        // dst <- src
  OCTAVO_RMS_NORM,    // dst <- norm(src) * w; f0 eps; i0 head size (0: the whole row)
  OCTAVO_QUANTIZE,    // quant buffer dst <- src
  OCTAVO_LINEAR,      // dst <- src w^T (+ bias) (+ src2); src is a quant buffer for int4, int5 and int8 weights
                      // (pools: 0 full, 1 sliding window, 2 sparse, whose layer counts among the sparse ones)
  OCTAVO_ROPE_WRITE,  // dst <- rotated src (q; -1: none); k src2, v buffer i0 offset i1; i2 pool, i3 layer,
                      // i4 head size, i5 q heads, i6 kv heads; w cos|sin table, i7 its r
  OCTAVO_ATTENTION,   // dst <- attention of src; i2 pool, i3 layer, i4 head size, i5 heads, i6 kv heads, i7 window
  OCTAVO_GATED,       // dst <- act(src[:width]) * src[width:]; i0 activation (0 silu, 1 gelu tanh)
  OCTAVO_ADD,         // dst <- src + src2
  OCTAVO_SCALE,       // dst <- f0 * src
  OCTAVO_SOFTCAP,     // dst <- f0 * tanh(src / f0)
  OCTAVO_ARGMAX,      // dst (int64) <- lowest index of the largest src w^T
  OCTAVO_SELECT       // sparse layer: pages for src (q, not yet rotated), mapped and swapped in; i3 layer, i4 head size,
                      // i5 heads, i6 kv heads; w cos|sin table. Comes before the layer's ROPE_WRITE
};

enum { OCTAVO_OK = 0, OCTAVO_BAD_PAGE = 1, OCTAVO_BAD_TOKEN = 2, OCTAVO_BAD_POSITION = 4 };

typedef struct {
  int64_t op, dst, dst_offset, src, src_offset, src2, src2_offset, width;
  const void* w;
  int64_t i[8];
  double f[2];
} octavo_instr;

// State of sparse rows (`ops/meta.py`: SparseView).
typedef struct {
  void *slots, *host;  // [slot_count + 1, layers, ...], [host_pages + 1, host_page_layers, ...]
  const float* bounds;                                    // [layers, host_pages + 1, 2, kv heads, head size]
  const int32_t *row_slots, *host_table, *backed;         // [rows, device_pages], [rows, width], [rows]
  int32_t *slot_map, *column_of, *order;                  // [layers, rows, width | device_pages | device_pages]
  const int64_t* host_layer;                              // [layers]
  int64_t* counts;                                        // [3]: hits, pages loaded, new pages
  int64_t slot_count, host_pages, layers, host_page_layers, rows, width, device_pages;  // counts without the spare
  int64_t topk_pages, recent_tokens, dense_limit_tokens;
  int64_t decodes;  // leading sequences of the step that select; the others see everything
} octavo_sparse;

typedef struct {
  int64_t tokens, sequences;
  const int64_t *token_ids, *positions, *write_slots, *rows, *kv_start, *mask, *q_indptr;  // mask may be null
  void* kv[2];                // pools full, swa; null where there is none
  int64_t kv_pages[2], kv_page_elements[2];
  const int32_t* table[2];
  int64_t table_width[2], table_rows[2];
  int64_t page_size, kv_bf16;
  const octavo_sparse* sparse;  // null where there are no sparse layers
  void* const* external;      // pointers of the external buffers, in their order
  double* profile;            // seconds by stage are added, or null
} octavo_run;

int octavo_abi(void);
const char* octavo_best_isa(void);
int octavo_has_isa(const char* name);

void* octavo_pool(int threads, const int* cpus, int cpu_count, double spin_us);
void octavo_pool_free(void* pool);

// codes, scale, minimum for int4 (0), int8 (1) and int5 (4, codes -16..15); dense for bf16 (2) and fp32 (3); bias [out] or null.
void* octavo_weight(int kind, int64_t out, int64_t in, const void* codes, const uint16_t* scale,
                    const uint16_t* minimum, const void* dense, const float* bias);
int64_t octavo_weight_bytes(const void* weight);
void octavo_weight_free(void* weight);

// widths: columns of internal float buffers, of quant buffers, of external buffers (row strides in elements)
void* octavo_program(const octavo_instr* code, int64_t count, const int64_t* widths, int64_t buffers,
                     const int64_t* quant_widths, int64_t quants, const int64_t* external_widths, int64_t externals,
                     const char* isa);
int64_t octavo_program_stages(const void* program);
// Operation of a stage (its first instruction's) and the weight bytes it reads.
int64_t octavo_program_stage(const void* program, int64_t stage, int64_t* weight_bytes);
void octavo_program_free(void* program);
int octavo_program_run(void* program, void* pool, const octavo_run* run);

// Probabilities float [rows, vocab]. last [rows]: the least probability that top-p keeps. ids [rows]: drawn by the
// inverse CDF at uniform [rows] in [0, 1). Sums are integers in units of 2^-40, as in ops/processors.py.
int octavo_top_p(const float* probability, int64_t rows, int64_t vocab, const float* p, float* last);
void octavo_draw(const float* probability, int64_t rows, int64_t vocab, const double* uniform, int64_t* ids);

// Chains of `rows` decode rows, row r's tokens at indptr[r] … indptr[r + 1]: root, then drafted [rows, stride].
// lay: tokens and KV slots of the forward, the roots `last` [rows] at slots `start` [rows]. keep: `sampled` has the target's
// token at each; kept [rows, 1 + width] gets how many drafted ones are accepted and the run, its last token repeated;
// seq_lens and last_tokens at row_ids [rows] are brought up to date. Nothing goes past the context.
void octavo_lay_chains(int64_t rows, const int64_t* indptr, const int64_t* start, const int64_t* last,
                       const int64_t* drafted, int64_t stride, int64_t* tokens, int64_t* slots);
void octavo_keep_chains(int64_t rows, const int64_t* indptr, const int64_t* row_ids, const int64_t* start,
                        const int64_t* drafted, int64_t stride, const int64_t* sampled, int64_t width,
                        int64_t context_tokens, int64_t* seq_lens, int64_t* last_tokens, int64_t* kept);

// Memory of a mapped file that may be cut while it is read or written: a bus error in it becomes an empty page. Returns
// an id, or -1 (no room, or a system without bus errors). `lost`: pages of the system replaced since the start or the last
// reset, `first` the offset in bytes of the first of them (-1: none). Map the file anew before a reset.
int octavo_guard(void* begin, int64_t bytes);
int64_t octavo_guard_lost(int id, int64_t* first);
void octavo_guard_reset(int id);
void octavo_guard_end(int id);

// Reads `bytes` of memory with all threads; seconds. For benchmarks.
double octavo_read_memory(void* pool, const void* data, int64_t bytes);

#if defined(__GNUC__)
#pragma GCC visibility pop
#endif
#if defined(__cplusplus)
}
#endif
