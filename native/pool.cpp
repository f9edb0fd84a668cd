#include "pool.h"

#include <chrono>
#include <string>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace octavo {
namespace {

// Between two runs of one decode step lies some Python, up to a millisecond: for so long a worker stays awake, giving its
// core to whoever asks. Woken from sleep it would miss the first stages of every run.
constexpr double kPatience = 12;  // times the hard spin

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void pin(std::thread& thread, int cpu) {
#if defined(__linux__)
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET((size_t)cpu, &set);
  pthread_setaffinity_np(thread.native_handle(), sizeof(set), &set);  // refused in some containers: then not pinned
#else
  (void)thread, (void)cpu;
#endif
}

int cpu_here() {
#if defined(__linux__)
  return sched_getcpu();
#else
  return -1;
#endif
}

}  // namespace

Pool::Pool(int threads, const std::vector<int>& cpus, double spin_us) : cpus_(cpus), spin_us_(spin_us) {
  for (int i = 1; i < threads; i++) {
    workers_.emplace_back([this, i] { worker(i); });
#if defined(__linux__)
    pthread_setname_np(workers_.back().native_handle(), ("octavo-" + std::to_string(i)).c_str());
#endif
  }
}

// The caller is not ours to pin: wherever it runs, the workers take other cores. A worker pinned to the core the caller
// happens to be on would halve the speed for as long as the system leaves the caller there.
void Pool::place() {
  const int here = cpu_here();
  if (here == caller_cpu_ || cpus_.size() <= workers_.size()) return;
  caller_cpu_ = here;
  size_t next = 0;
  for (auto& worker : workers_) {
    if (cpus_[next] == here) next++;
    if (next < cpus_.size()) pin(worker, cpus_[next++]);
  }
}

Pool::~Pool() {
  stop_.store(true);
  {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  for (auto& t : workers_) t.join();
}

void Pool::run(Job& job, const std::vector<int>& totals, const std::vector<const uint8_t*>& ahead) {
  std::lock_guard<std::mutex> one(running_);
  place();
  if (totals.size() > capacity_) {  // a late worker may still look at the old array: it is kept
    if (stages_) retired_.push_back(std::move(stages_));
    capacity_ = totals.size() * 2;
    stages_ = std::make_unique<Stages>(capacity_, threads());
    live_.store(stages_.get(), std::memory_order_release);
  }
  const uint32_t epoch = ++epoch_;
  const uint64_t tag = (uint64_t)epoch << 32;
  totals_ = &totals;
  job_.store(&job, std::memory_order_relaxed);
  for (size_t s = 0; s < totals.size(); s++) {
    Stage& st = stages_->stage[s];
    st.done.store(0, std::memory_order_relaxed);
    st.total.store(tag | (totals[s] < 0 ? 0 : (uint32_t)totals[s]), std::memory_order_release);
  }
  for (size_t i = 0; i < totals.size() * (size_t)threads(); i++) {  // mostly the same as last time: then nothing is written
    const uint8_t* p = i < ahead.size() ? ahead[i] : nullptr;
    if (stages_->ahead[i].load(std::memory_order_relaxed) != p) stages_->ahead[i].store(p, std::memory_order_relaxed);
  }
  open(epoch, 0, 0);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(sleep_);
    wake_.notify_all();
  }
  for (;;) {
    const uint64_t now = current_.load(std::memory_order_acquire);
    if ((uint32_t)now == kIdle) break;
    work(epoch, (uint32_t)now, 0);
    for (int turn = 0; current_.load(std::memory_order_acquire) == now; turn++) {
      ask_ahead((uint32_t)now, turn, 0);
      relax();
      if (turn % 4096 == 4095) std::this_thread::yield();  // whoever holds the last chunk may need this core
    }
  }
}

void Pool::open(uint32_t epoch, uint32_t stage, int thread) {
  const std::vector<int>& totals = *totals_;
  Job* job = job_.load(std::memory_order_relaxed);
  while (stage < totals.size() && totals[stage] <= 0) {
    job->opened((int)stage);
    if (totals[stage] == kSerial) job->chunk((int)stage, 0, thread);
    stage++;
  }
  job->opened((int)stage);
  const uint32_t next = stage < totals.size() ? stage : kIdle;
  current_.store((uint64_t)epoch << 32 | next);
}

// A worker may come late, with the epoch of a run that is over: everything it would take carries a later epoch by then,
// or is an empty share.
void Pool::work(uint32_t epoch, uint32_t stage, int thread) {
  Stages& all = *live_.load(std::memory_order_acquire);
  Stage& st = all.stage[stage];
  const uint64_t tagged = st.total.load(std::memory_order_acquire);
  if ((uint32_t)(tagged >> 32) != epoch) return;
  const auto total = (uint32_t)tagged;
  const int threads = this->threads();
  uint32_t did = 0;
  for (int k = 0; k < threads; k++) {
    const int owner = (thread + k) % threads;
    const uint32_t begin = share_begin(total, owner, threads), end = share_begin(total, owner + 1, threads);
    std::atomic<uint64_t>& next = all.share[(size_t)stage * (size_t)threads + (size_t)owner].next;
    uint64_t v = next.load(std::memory_order_acquire);
    for (;;) {
      const auto age = (int32_t)((uint32_t)(v >> 32) - epoch);
      const uint32_t index = age < 0 ? begin : (uint32_t)v;
      if (age > 0 || index >= end) break;
      if (!next.compare_exchange_weak(v, (uint64_t)epoch << 32 | (index + 1), std::memory_order_acq_rel)) continue;
      job_.load(std::memory_order_relaxed)->chunk((int)stage, (int)index, thread);
      did++;
      v = next.load(std::memory_order_acquire);
    }
  }
  if (did && st.done.fetch_add(did, std::memory_order_acq_rel) + did == total) open(epoch, stage + 1, thread);
}

// One turn of a wait: a few lines more. What a thread can ask for while others finish is a small part of its share.
void Pool::ask_ahead(uint32_t stage, int turn, int thread) {
  constexpr int kLines = 8, kTurns = 48;
  if (turn >= kTurns) return;
  const Stages& all = *live_.load(std::memory_order_acquire);
  const uint8_t* p = all.ahead[(size_t)stage * (size_t)threads() + (size_t)thread].load(std::memory_order_relaxed);
  if (!p) return;
  p += turn * kLines * 64;
  for (int i = 0; i < kLines; i++) __builtin_prefetch(p + i * 64, 0, 2);
}

void Pool::worker(int thread) {
  using Clock = std::chrono::steady_clock;
  auto busy = Clock::now();
  uint64_t seen = kIdle;
  int spins = 0, turn = 0;
  for (;;) {
    const uint64_t now = current_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_relaxed)) return;
    if ((uint32_t)now != kIdle) {
      work((uint32_t)(now >> 32), (uint32_t)now, thread);
      if (now != seen) {
        seen = now;
        spins = turn = 0;
        continue;
      }
      ask_ahead((uint32_t)now, turn++, thread);
    }
    relax();
    if (++spins < 64) continue;
    spins = 0;
    if ((uint32_t)now != kIdle) {
      busy = Clock::now();
      if (seen == now) std::this_thread::yield();
      continue;
    }
    const double idle_us = std::chrono::duration<double, std::micro>(Clock::now() - busy).count();
    if (idle_us < spin_us_) continue;
    if (idle_us < kPatience * spin_us_) {
      std::this_thread::yield();
      continue;
    }
    std::unique_lock<std::mutex> lock(sleep_);
    sleepers_.fetch_add(1);
    wake_.wait(lock, [&] { return stop_.load() || (uint32_t)current_.load() != kIdle; });
    sleepers_.fetch_sub(1);
    lock.unlock();
    busy = Clock::now();
  }
}

}  // namespace octavo
