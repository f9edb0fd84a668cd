// Every kernel table this CPU can run against the plain C++ one: the same bits for random inputs. And the thread pool, and
// the guard of mapped files. Built by CMake as `octavo_kernel_test`; under qemu-user it is the test of the NEON kernels.
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "octavo_native.h"
#include "program.h"

using namespace octavo;

namespace {

std::mt19937 generator(1);
int failures = 0;

float normal() { return std::normal_distribution<float>()(generator); }
int below(int n) { return (int)(generator() % (unsigned)n); }
uint16_t half(float x) {  // enough for normal numbers of moderate size
  uint32_t b;
  std::memcpy(&b, &x, 4);
  return (uint16_t)(((b >> 16) & 0x8000u) | (uint16_t)((((b >> 23) & 255u) - 112u) << 10) | ((b >> 13) & 1023u));
}

std::vector<float> floats(int n, float size = 1.0f) {
  std::vector<float> v((size_t)n);
  for (auto& x : v) x = normal() * size;
  return v;
}

template <class T>
void same(const char* table, const char* what, const std::vector<T>& a, const std::vector<T>& b) {
  if (a.size() == b.size() && !std::memcmp(a.data(), b.data(), a.size() * sizeof(T))) return;
  std::printf("FAILED %s: %s\n", table, what);
  failures++;
}

struct Quantised {
  std::vector<int8_t> code;
  std::vector<float> scale, scaled_sum;
  std::vector<int32_t> sum;
};

Quantised quantise(const KernelTable& k, const std::vector<float>& x, int rows, int in) {
  const size_t n = (size_t)rows * (size_t)in, g = n / kGroup;
  Quantised q{std::vector<int8_t>(n), std::vector<float>(g), std::vector<float>(g), std::vector<int32_t>(g)};
  for (int r = 0; r < rows; r++)
    k.quantize(x.data() + r * in, in, q.code.data() + r * in, q.scale.data() + r * in / kGroup,
               q.scaled_sum.data() + r * in / kGroup, q.sum.data() + r * in / kGroup);
  return q;
}

void test_linear(const KernelTable& plain, const KernelTable& fast) {
  for (int round = 0; round < 75; round++) {
    const int kind = round % 5, out = 1 + below(60);
    const bool quantised = is_quantised((Kind)kind);
    const int in = quantised ? 32 * (1 + below(8)) : 1 + below(200);
    const int rows = 1 + below(13), groups = in / kGroup;
    std::vector<uint8_t> codes((size_t)out * in);
    for (auto& c : codes) c = (uint8_t)(kind == kInt4 ? below(16) : kind == kInt5 ? below(32) - 16 : below(256));
    std::vector<uint16_t> scale((size_t)out * groups), minimum(scale.size()), bf16((size_t)out * in);
    for (auto& s : scale) s = half(normal() + 3.0f);
    for (auto& m : minimum) m = half(normal() - 4.0f);
    std::vector<float> dense = floats(out * in), bias = floats(out);
    for (size_t i = 0; i < dense.size(); i++) plain.store_bf16(&dense[i], 1, &bf16[i]);
    const bool with_minimum = kind == kInt4 || (kind != kInt5 && below(2));
    void* w = octavo_weight(kind, out, in, codes.data(), scale.data(), with_minimum ? minimum.data() : nullptr,
                            kind == 2 ? (const void*)bf16.data() : (const void*)dense.data(),
                            below(2) ? bias.data() : nullptr);
    const std::vector<float> x = floats(rows * in, 5.0f), residual = floats(rows * out);
    std::vector<float> results[2], rows_of_table[2];
    for (int t = 0; t < 2; t++) {
      const KernelTable& k = t ? fast : plain;
      LinearArgs a{};
      a.w = (const Weight*)w;
      a.rows = rows;
      Quantised q;
      if (quantised) {
        q = quantise(k, x, rows, in);
        a.q = {q.code.data(), q.scale.data(), q.scaled_sum.data(), q.sum.data(), in};
      }
      a.x = x.data();
      a.ldx = in;
      results[t].resize((size_t)rows * out);
      a.out = results[t].data();
      a.ldo = out;
      if (round % 3 == 0) a.residual = residual.data(), a.ldr = out;
      k.linear(a, 0, a.w->blocks);
      rows_of_table[t].resize((size_t)in);
      k.embed(*a.w, below(1) + out - 1, 1.5f, rows_of_table[t].data());
    }
    same(fast.name, "linear", results[0], results[1]);
    same(fast.name, "embed", rows_of_table[0], rows_of_table[1]);
    octavo_weight_free(w);
  }
}

void test_rows(const KernelTable& plain, const KernelTable& fast) {
  for (int round = 0; round < 100; round++) {
    const int n = 1 + below(100), half_width = 1 + below(n);
    std::vector<float> x = floats(2 * n, 6.0f), w = floats(2 * n);
    if (round == 0) x.assign(x.size(), 0.0f);
    std::vector<float> got[2];
    std::vector<uint16_t> narrow[2];
    for (int t = 0; t < 2; t++) {
      const KernelTable& k = t ? fast : plain;
      std::vector<float> y((size_t)(8 * n));
      k.rms_norm(x.data(), w.data(), 1e-5f, n, y.data());
      k.gated(x.data(), x.data() + n, n, 0, y.data() + n);
      k.gated(x.data(), x.data() + n, n, 1, y.data() + 2 * n);
      k.add(x.data(), w.data(), n, y.data() + 3 * n);
      k.scale(x.data(), 0.3f, n, y.data() + 4 * n);
      k.rope(x.data(), w.data(), w.data() + n, half_width / 2, n, y.data() + 5 * n);
      std::memcpy(y.data() + 6 * n, x.data(), (size_t)n * 4);
      k.softcap(y.data() + 6 * n, 3.0f, n);
      int index = 0;
      k.argmax(x.data(), n, y.data() + 7 * n, &index);
      y[(size_t)(7 * n)] += (float)index;
      narrow[t].resize((size_t)n);
      k.store_bf16(x.data(), n, narrow[t].data());
      got[t] = y;
    }
    same(fast.name, "rows", got[0], got[1]);
    same(fast.name, "bf16", narrow[0], narrow[1]);
  }
}

void test_attention(const KernelTable& plain, const KernelTable& fast) {
  static AttnTile tile;
  for (int round = 0; round < 80; round++) {
    const int hd = 1 + below(140), queries = 1 + below(kTileQueries), first = below(40), shared = below(kSplit - first);
    const bool bf16 = round % 2;
    std::vector<float> wide = floats(2 * kSplit * hd, 2.0f), q = floats(queries * hd);
    std::vector<uint16_t> narrow(wide.size());
    plain.store_bf16(wide.data(), (int)wide.size(), narrow.data());
    auto key = [&](int i) { return bf16 ? (const void*)(narrow.data() + i * hd) : (const void*)(wide.data() + i * hd); };
    tile.queries = queries;
    tile.head_dim = hd;
    tile.bf16 = bf16;
    tile.scale = 0.2f;
    tile.first = first;
    tile.shared = shared;
    for (int i = 0; i < shared; i++) tile.k[i] = key(i), tile.v[i] = key(kSplit + i);
    for (int r = 0; r < queries; r++) {
      tile.q[r] = q.data() + r * hd;
      tile.low[r] = first + below(shared + 1);
      tile.high[r] = tile.low[r] + below(first + shared - tile.low[r] + 1);
      tile.own_first[r] = first + shared;
      tile.own[r] = round % 3 ? 0 : below(std::min(64, kSplit - first - shared) + 1);
      for (int i = 0; i < tile.own[r]; i++) tile.ok[r][i] = key(kSplit - 1 - i), tile.ov[r][i] = key(2 * kSplit - 1 - i);
    }
    std::vector<float> got[2];
    for (int t = 0; t < 2; t++) {
      const KernelTable& k = t ? fast : plain;
      std::vector<AttnState> state((size_t)queries), other((size_t)queries);
      std::vector<float> acc((size_t)(queries * hd)), part(acc.size()), out(acc.size());
      std::vector<float> turned((size_t)(kTurnedKeys * hd));
      k.attend(tile, turned.data(), state.data(), acc.data());
      std::swap(tile.q[0], tile.q[queries - 1]);
      k.attend(tile, turned.data(), other.data(), part.data());
      std::swap(tile.q[0], tile.q[queries - 1]);
      for (int r = 0; r < queries; r++) {
        k.combine(&state[(size_t)r], acc.data() + r * hd, other[(size_t)r], part.data() + r * hd, hd);
        if (state[(size_t)r].sum > 0) k.finish(state[(size_t)r], acc.data() + r * hd, hd, out.data() + r * hd);
      }
      for (auto& s : state) out.push_back(s.max), out.push_back(s.sum);
      got[t] = out;
    }
    same(fast.name, "attention", got[0], got[1]);
  }
}

void test_votes(const KernelTable& plain, const KernelTable& fast) {
  std::vector<float> got[2];
  for (int round = 0; round < 60; round++) {
    const int hd = 1 + below(140), kv_heads = 1 + below(4), n = hd * kv_heads;
    std::vector<float> low = floats(n), high = floats(n), page = floats(2 * n, 3.0f);
    for (int t = 0; t < 2; t++)
      got[t].push_back((t ? fast : plain).page_vote(low.data(), high.data(), page.data(), kv_heads, hd));
  }
  same(fast.name, "page votes", got[0], got[1]);
}

// Stages of changing sizes: every chunk is run once, and only when the stage before it is complete.
class Counted : public Job {
 public:
  explicit Counted(const std::vector<int>& totals) : first_(totals.size()) {
    int n = 0;
    for (size_t s = 0; s < totals.size(); s++) first_[s] = n, n += totals[s] < 0 ? 1 : totals[s];
    hits_ = std::vector<std::atomic<int>>((size_t)n);
  }
  void chunk(int stage, int index, int) override {
    for (int i = 0; i < first_[(size_t)stage]; i++) early_ += hits_[(size_t)i].load() != 1;
    hits_[(size_t)(first_[(size_t)stage] + index)]++;
  }
  bool right() const {
    for (auto& h : hits_)
      if (h.load() != 1) return false;
    return early_.load() == 0;
  }

 private:
  std::vector<int> first_;
  std::vector<std::atomic<int>> hits_;
  std::atomic<int> early_{0};
};

void test_pool() {
  for (int threads : {1, 2, 3, 5}) {
    Pool pool(threads, {}, 20.0);
    for (int run = 0; run < 300; run++) {
      std::vector<int> totals((size_t)(1 + below(run % 40 == 39 ? 60 : 9)));
      for (auto& t : totals) t = below(6) == 0 ? kSerial : below(8);
      Counted job(totals);
      pool.run(job, totals, {});
      if (!job.right()) {
        std::printf("FAILED pool: %d threads, run %d\n", threads, run);
        failures++;
        return;
      }
    }
  }
  std::printf("pool: every chunk once, in the order of stages\n");
}

// A mapped file that is cut: reads and writes behind its end go on, on empty pages, in every thread; bus errors elsewhere
// are still whoever's they were.
sigjmp_buf elsewhere;
void on_other(int) { siglongjmp(elsewhere, 1); }

void expect(bool good, const char* what) {
  if (good) return;
  std::printf("FAILED guard: %s\n", what);
  failures++;
}

uint8_t* mapped(int* file, int64_t bytes) {
  char name[] = "/tmp/octavo-guard-XXXXXX";
  *file = mkstemp(name);
  unlink(name);
  if (*file < 0 || ftruncate(*file, bytes) != 0) std::abort();
  auto* data = (uint8_t*)mmap(nullptr, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *file, 0);
  if (data == MAP_FAILED) std::abort();
  std::memset(data, 7, (size_t)bytes);
  return data;
}

void test_guard() {
  struct sigaction other = {}, at_start = {}, now = {};
  other.sa_handler = on_other;
  sigaction(SIGBUS, &other, &at_start);
  const int64_t page = sysconf(_SC_PAGESIZE), bytes = 64 * page;
  int file, unguarded_file;
  uint8_t *data = mapped(&file, bytes), *unguarded = mapped(&unguarded_file, page);
  const int id = octavo_guard(data, bytes);
  expect(id >= 0, "an id");
  int64_t first = 0;
  expect(octavo_guard_lost(id, &first) == 0 && first == -1, "nothing lost at first");
  if (ftruncate(file, 16 * page) != 0 || ftruncate(unguarded_file, 0) != 0) std::abort();
  std::vector<std::thread> threads;
  std::atomic<int> wrong{0};
  for (int t = 0; t < 4; t++)
    threads.emplace_back([&, t] {
      for (int64_t p = t; p < 64; p += 4)
        if (data[p * page + 5] != (p < 16 ? 7 : 0)) wrong++;
    });
  for (auto& t : threads) t.join();
  expect(wrong == 0, "what is there is read, the rest is empty");
  expect(octavo_guard_lost(id, &first) == 48 && first == 16 * page, "48 pages from the 16th on");
  data[40 * page] = 9;
  expect(data[40 * page] == 9, "an empty page can be written");
  if (ftruncate(file, bytes) != 0) std::abort();
  mmap(data, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, 0);
  octavo_guard_reset(id);
  expect(octavo_guard_lost(id, &first) == 0 && data[15 * page] == 7 && data[40 * page] == 0, "mapped anew");
  volatile bool jumped = false;
  if (sigsetjmp(elsewhere, 1))
    jumped = true;
  else
    unguarded[0] = 1;
  expect(jumped, "a bus error elsewhere goes to the handler from before");
  octavo_guard_end(id);
  sigaction(SIGBUS, nullptr, &now);
  expect(now.sa_handler == on_other, "the handler from before is back");
  sigaction(SIGBUS, &at_start, nullptr);
  munmap(data, (size_t)bytes);
  munmap(unguarded, (size_t)page);
  close(file);
  close(unguarded_file);
}

}  // namespace

int main() {
  test_pool();
  test_guard();
  const KernelTable& plain = *generic_kernels();
  int tables = 0;
  for (const char* name : {"generic", "avx2", "avx512", "avx512bf16", "neon"}) {
    const KernelTable* fast = kernels_named(name);
    if (!fast) continue;
    test_linear(plain, *fast);
    test_rows(plain, *fast);
    test_attention(plain, *fast);
    test_votes(plain, *fast);
    std::printf("%s: %s\n", name, failures ? "differs" : "the bits of plain C++");
    tables++;
  }
  if (tables < 2) std::printf("only plain C++ runs here\n");
  return failures ? 1 : 0;
}
