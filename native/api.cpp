// The C interface of octavo_native.h and the choice of kernels.
#include <chrono>
#include <cstring>
#include <exception>

#include "octavo_native.h"
#include "program.h"

namespace octavo {
namespace {

bool cpu_runs(const std::string& name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (name == "avx2")
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (name == "avx512")
    return cpu_runs("avx2") && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
           __builtin_cpu_supports("avx512vnni");
  if (name == "avx512bf16") return cpu_runs("avx512") && __builtin_cpu_supports("avx512bf16");
#endif
  return name == "generic" || name == "neon";
}

const KernelTable* compiled(const std::string& name) {
  if (name == "avx512bf16") return avx512bf16_kernels();
  if (name == "avx512") return avx512_kernels();
  if (name == "avx2") return avx2_kernels();
  if (name == "neon") return neon_kernels();
  if (name == "generic") return generic_kernels();
  return nullptr;
}

class Reader : public Job {
 public:
  Reader(const uint8_t* data, int64_t bytes) : data_(data), bytes_(bytes) {}
  void chunk(int, int index, int) override {
    const auto* p = (const uint64_t*)(data_ + bytes_ / kChunks * index);
    uint64_t a = 0, b = 0, c = 0, d = 0;
    for (int64_t i = 0; i + 4 <= bytes_ / kChunks / 8; i += 4) a ^= p[i], b ^= p[i + 1], c ^= p[i + 2], d ^= p[i + 3];
    sink_.fetch_xor(a ^ b ^ c ^ d);
  }
  static constexpr int kChunks = 64;

 private:
  const uint8_t* data_;
  int64_t bytes_;
  std::atomic<uint64_t> sink_{0};
};

}  // namespace

const KernelTable* kernels_named(const std::string& name) { return cpu_runs(name) ? compiled(name) : nullptr; }

const char* best_kernels() {
  for (const char* name : {"avx512bf16", "avx512", "avx2", "neon"})
    if (kernels_named(name)) return name;
  return "generic";
}

}  // namespace octavo

using namespace octavo;

extern "C" {

int octavo_abi(void) { return OCTAVO_ABI; }
const char* octavo_best_isa(void) { return best_kernels(); }
int octavo_has_isa(const char* name) { return kernels_named(name) != nullptr; }

void* octavo_pool(int threads, const int* cpus, int cpu_count, double spin_us) {
  try {
    return new Pool(threads < 1 ? 1 : threads, std::vector<int>(cpus, cpus + cpu_count), spin_us);
  } catch (const std::exception&) {
    return nullptr;
  }
}
void octavo_pool_free(void* pool) { delete (Pool*)pool; }

void* octavo_program(const octavo_instr* code, int64_t count, const int64_t* widths, int64_t buffers,
                     const int64_t* quant_widths, int64_t quants, const int64_t* external_widths, int64_t externals,
                     const char* isa) {
  const KernelTable* kernels = kernels_named(isa);
  if (!kernels) return nullptr;
  try {
    return new Program({code, code + count}, {widths, widths + buffers}, {quant_widths, quant_widths + quants},
                       {external_widths, external_widths + externals}, kernels);
  } catch (const std::exception&) {
    return nullptr;
  }
}
int64_t octavo_program_stages(const void* program) { return (int64_t)((const Program*)program)->stages().size(); }
int64_t octavo_program_stage(const void* program, int64_t stage, int64_t* weight_bytes) {
  const octavo_instr& in = ((const Program*)program)->first((int)stage);
  const bool reads = in.op == OCTAVO_LINEAR || in.op == OCTAVO_ARGMAX;
  *weight_bytes = reads ? (int64_t)((const Weight*)in.w)->bytes : 0;
  return in.op;
}
void octavo_program_free(void* program) { delete (Program*)program; }

int octavo_program_run(void* program, void* pool, const octavo_run* run) {
  try {
    return ((Program*)program)->run(*(Pool*)pool, *run);
  } catch (const std::exception&) {
    return -1;
  }
}

double octavo_read_memory(void* pool, const void* data, int64_t bytes) {
  Reader reader((const uint8_t*)data, bytes);
  const auto begin = std::chrono::steady_clock::now();
  ((Pool*)pool)->run(reader, {Reader::kChunks}, {});
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

}  // extern "C"
