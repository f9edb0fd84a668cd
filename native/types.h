// Data shared by the executor and the kernels of every instruction set.
//
// Packed weights (all instruction sets read the same bytes). Outputs come in blocks of 16, inputs in groups of 32:
//   int4  per (block, group): 4 x 64 bytes of nibbles; vector j holds for 16 outputs the four inputs 4j..4j+3 in the
//         low nibbles and 16+4j..16+4j+3 in the high ones; then 16 fp16 scales, then 16 fp16 minima      = 320 bytes
//   int5  per (block, group): nibbles as int4 of code+16, then 64 bytes of high bits, bit k for what is byte k in int8;
//         then 16 fp16 scales                                                                             = 352 bytes
//   int8  per (block, group): 8 x 64 bytes; vector j holds for 16 outputs the inputs 4j..4j+3 as code+128;
//         then 16 fp16 scales, then 16 fp16 minima                                                        = 576 bytes
//         (the minima are left out when the matrix has none                                               = 544 bytes)
//   bf16  per (block, pair of inputs): for 16 outputs the inputs 2k and 2k+1 side by side (an odd last one beside 0)
//   fp32  per block: in_features x 16 float
#pragma once
#include <cstddef>
#include <cstdint>

namespace octavo {

constexpr int kBlock = 16;       // outputs of one packed block
constexpr int kGroup = 32;       // inputs that share a scale
constexpr int kSplit = 128;      // positions of one attention block: partial results combine in this grain
constexpr int kTurnedKeys = 32;  // keys whose scores are computed together
constexpr int kAhead = 32;       // rows asked for ahead of their use
constexpr int kTileQueries = 16; // most queries (tokens x heads of one KV head) of one attention tile

enum Kind : int { kInt4 = 0, kInt8 = 1, kBf16 = 2, kFp32 = 3, kInt5 = 4 };

// Bytes of the codes of one packed (block, group), and whether they are codes at all.
constexpr int code_bytes(Kind kind) { return kind == kInt4 ? 256 : kind == kInt5 ? 320 : 512; }
// Place of an input of one output: the byte in int8, the bit among the high bits of int5.
constexpr int place_of(int lane, int i) { return 64 * (i / 4) + 4 * lane + i % 4; }
// Place of an input of one output among the bf16 of a block.
constexpr size_t bf16_place(int lane, int k) { return (size_t)(k / 2) * 32 + 2 * (size_t)lane + (size_t)(k % 2); }
constexpr bool is_quantised(Kind kind) { return kind == kInt4 || kind == kInt5 || kind == kInt8; }

struct Weight {
  Kind kind;
  int out, in;
  bool minimum;            // int8 only: minima are stored
  int blocks;              // ceil(out / 16)
  size_t block_bytes;      // bytes of one packed block
  uint8_t* data;           // 64-byte aligned
  float* bias;             // [blocks * 16] or null
  size_t bytes;
};

// Activations of n rows in groups of 32: code int8, scale, scale * sum of codes, and the sum of codes itself.
struct QuantRows {
  int8_t* code;    // [n, in]
  float* scale;    // [n, in / 32]
  float* scaled_sum;
  int32_t* sum;
  int in;
};

struct LinearArgs {
  const Weight* w;
  int rows;
  QuantRows q;          // int4, int5, int8
  const float* x;       // bf16, fp32: [rows, ldx]
  int64_t ldx;
  float* out;           // [rows, ldo]
  int64_t ldo;
  const float* residual;  // added to the result, or null
  int64_t ldr;
};

// One attention tile: queries of consecutive tokens of one sequence that share a KV head.
struct AttnTile {
  int queries;                              // tokens x group
  int head_dim;
  bool bf16;                                // element type of the pages
  float scale;
  const float* q[kTileQueries];             // rotated query vectors
  int low[kTileQueries], high[kTileQueries];  // visible logical indices of the shared part: low <= i < high
  // keys of this split: shared ones at logical index first + i
  int first, shared;                        // logical index of shared key 0 (relative to the split), their number
  // behind them stand kAhead rows that are read next, or any addresses: they are asked for, never read
  const void* k[kSplit + kAhead];
  const void* v[kSplit + kAhead];
  // own keys of a query (mask bits), already clipped to this split; index relative to the split
  int own[kTileQueries], own_first[kTileQueries];
  const void* ok[kTileQueries][64];
  const void* ov[kTileQueries][64];
};

// What follows the keys is the values; what follows the values the caller may know.
inline void look_ahead(AttnTile& t) {
  for (int i = 0; i < kAhead && t.shared > 0; i++) {
    const int last = t.shared - 1;
    t.k[t.shared + i] = t.v[i < last ? i : last];
    t.v[t.shared + i] = t.v[last];
  }
}

// Unnormalised softmax state of one query: out = acc / sum once all splits are combined.
struct AttnState {
  float max, sum;
};

struct KernelTable {
  const char* name;
  void (*linear)(const LinearArgs&, int block_begin, int block_end);
  void (*quantize)(const float* x, int in, int8_t* code, float* scale, float* scaled_sum, int32_t* sum);
  void (*rms_norm)(const float* x, const float* w, float eps, int n, float* out);
  void (*gated)(const float* gate, const float* up, int n, int activation, float* out);
  void (*rope)(const float* x, const float* cos, const float* sin, int rotary_half, int head_dim, float* out);
  void (*add)(const float* a, const float* b, int n, float* out);
  void (*scale)(const float* a, float factor, int n, float* out);
  void (*softcap)(float* x, float cap, int n);
  void (*store_bf16)(const float* x, int n, uint16_t* out);
  void (*embed)(const Weight& w, int64_t id, float scale, float* out);
  // Partial result of one split: state[q] and acc[q * head_dim ...] are written, not updated. `turned` is scratch of
  // kTurnedKeys * head_dim floats.
  void (*attend)(const AttnTile&, float* turned, AttnState* state, float* acc);
  void (*combine)(AttnState* into, float* into_acc, const AttnState& part, const float* part_acc, int head_dim);
  void (*finish)(const AttnState&, const float* acc, int head_dim, float* out);
  // Largest value and the lowest index that has it.
  void (*argmax)(const float* x, int n, float* value, int* index);
  // sparse.inl
  float (*page_vote)(const float* low, const float* high, const float* page, int kv_heads, int head_dim);
};

const KernelTable* generic_kernels();
const KernelTable* avx2_kernels();    // null where not compiled in
const KernelTable* avx512_kernels();
const KernelTable* avx512bf16_kernels();
const KernelTable* neon_kernels();

}  // namespace octavo
