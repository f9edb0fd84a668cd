// Threads that run a program's stages together.
//
// A run is a list of stages; a stage is a number of chunks anybody may take. Each thread begins with a share of its own,
// chunks side by side, so that it reads memory in one direction, and then takes what is left of the others' shares. The
// thread that reports a stage's last chunk opens the next stage, so nobody waits for a thread that is not there: where
// other processes hold a core, the caller does all the work itself. After a run workers spin briefly, give way for about a
// millisecond, then sleep.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace octavo {

class Job {
 public:
  virtual ~Job() = default;
  virtual void chunk(int stage, int index, int thread) = 0;
  virtual void opened(int /*stage*/) {}  // called by one thread whenever a stage is about to begin (profiles)
};

// First of `total` chunks that belong to a thread's share.
inline uint32_t share_begin(uint32_t total, int thread, int threads) {
  return (uint32_t)((uint64_t)total * (uint64_t)thread / (uint64_t)threads);
}

constexpr int kSerial = -1;  // total of a stage that the thread opening it runs at once, alone

class Pool {
 public:
  // `cpus`: cores to use; each worker is pinned to one that neither the caller of a run nor another worker is on.
  // Fewer cores than threads: nobody is pinned.
  Pool(int threads, const std::vector<int>& cpus, double spin_us);
  ~Pool();
  int threads() const { return (int)workers_.size() + 1; }
  // Runs all stages; totals[s] chunks each (kSerial: one, by the opener). One run at a time. A thread that waits in stage
  // s asks for the memory behind ahead[s * threads + thread], where its share of a later stage begins; null: for nothing.
  void run(Job& job, const std::vector<int>& totals, const std::vector<const uint8_t*>& ahead);

 private:
  struct alignas(128) Stage {
    std::atomic<uint64_t> total{0};  // epoch << 32 | number of chunks
    alignas(64) std::atomic<uint32_t> done{0};
  };
  // epoch << 32 | first chunk of a share that nobody has taken; of an earlier epoch: none is taken yet
  struct alignas(128) Share {
    std::atomic<uint64_t> next{0};
  };
  using Ahead = std::atomic<const uint8_t*>;  // asked for, never read: it may outlive what it points to
  struct Stages {
    Stages(size_t count, int threads)
        : stage(new Stage[count]), share(new Share[count * (size_t)threads]), ahead(new Ahead[count * (size_t)threads]()) {}
    std::unique_ptr<Stage[]> stage;
    std::unique_ptr<Share[]> share;  // [count, threads]
    std::unique_ptr<Ahead[]> ahead;  // [count, threads]
  };
  static constexpr uint32_t kIdle = 0xffffffffu;

  void work(uint32_t epoch, uint32_t stage, int thread);
  void open(uint32_t epoch, uint32_t stage, int thread);
  void ask_ahead(uint32_t stage, int turn, int thread);
  void worker(int thread);
  void place();

  std::mutex running_;
  std::unique_ptr<Stages> stages_;
  size_t capacity_ = 0;
  std::vector<std::unique_ptr<Stages>> retired_;
  std::atomic<Stages*> live_{nullptr};
  const std::vector<int>* totals_ = nullptr;
  std::atomic<Job*> job_{nullptr};
  alignas(128) std::atomic<uint64_t> current_{kIdle};  // epoch << 32 | open stage
  uint32_t epoch_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<int> sleepers_{0};
  std::mutex sleep_;
  std::condition_variable wake_;
  const std::vector<int> cpus_;
  int caller_cpu_ = -1;  // the core the workers were placed around
  double spin_us_;
  std::vector<std::thread> workers_;
};

}  // namespace octavo
