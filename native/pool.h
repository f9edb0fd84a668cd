// Threads that run a program's stages together.
//
// A run is a list of stages; a stage is a number of chunks anybody may take. The thread that finishes a stage's last
// chunk opens the next stage, so nobody waits for a thread that is not there: where other processes hold a core, the
// caller does all the work itself. After a run workers spin briefly, give way for about a millisecond, then sleep.
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

constexpr int kSerial = -1;  // total of a stage that the thread opening it runs at once, alone

class Pool {
 public:
  // `cpus`: cores to use; each worker is pinned to one that neither the caller of a run nor another worker is on.
  // Fewer cores than threads: nobody is pinned.
  Pool(int threads, const std::vector<int>& cpus, double spin_us);
  ~Pool();
  int threads() const { return (int)workers_.size() + 1; }
  // Runs all stages; totals[s] chunks each (kSerial: one, by the opener). One run at a time.
  void run(Job& job, const std::vector<int>& totals);

 private:
  struct alignas(128) Stage {
    std::atomic<uint64_t> next{0};  // epoch << 32 | first chunk nobody has taken
    std::atomic<uint32_t> total{0};
    alignas(64) std::atomic<uint32_t> done{0};
  };
  static constexpr uint32_t kIdle = 0xffffffffu;

  void work(uint32_t epoch, uint32_t stage, int thread);
  void open(uint32_t epoch, uint32_t stage, int thread);
  void worker(int thread);
  void place();

  std::mutex running_;
  std::unique_ptr<Stage[]> stages_;
  size_t capacity_ = 0;
  std::vector<std::unique_ptr<Stage[]>> retired_;
  std::atomic<Stage*> live_{nullptr};
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
