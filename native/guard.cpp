// Mapped files that somebody may cut. An access behind the new end is a bus error and would end the process; here the
// missing page of the system is replaced by an empty one, counted, and the access goes on. Its caller asks afterwards
// what was lost. Nothing is jumped out of: worker threads, and whoever else reads the mapping, end their work as usual,
// on zeros. Bus errors anywhere else go to whoever handled them before.
#include <atomic>
#include <cerrno>
#include <mutex>

#include "octavo_native.h"

#if defined(__unix__) || defined(__APPLE__)
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr int kRegions = 16;

struct Region {
  std::atomic<uintptr_t> begin{0}, end{0};  // nothing is guarded where end is 0
  std::atomic<int64_t> lost{0}, first{-1};
};

Region regions[kRegions];
std::mutex changes;
int guarded = 0;
bool installed = false;
uintptr_t system_page = 4096;
struct sigaction before;

void note(Region& region, uintptr_t page) {
  const uintptr_t begin = region.begin.load(std::memory_order_relaxed);
  const int64_t offset = page > begin ? (int64_t)(page - begin) : 0;
  int64_t first = region.first.load(std::memory_order_relaxed);
  while ((first < 0 || offset < first) && !region.first.compare_exchange_weak(first, offset)) {
  }
  region.lost.fetch_add(1, std::memory_order_release);
}

bool replaced(uintptr_t address) {
  for (Region& region : regions) {
    const uintptr_t end = region.end.load(std::memory_order_acquire);
    if (!end || address >= end || address < region.begin.load(std::memory_order_relaxed)) continue;
    const uintptr_t page = address & ~(system_page - 1);
    void* got = mmap((void*)page, system_page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (got == MAP_FAILED) return false;
    note(region, page);
    return true;
  }
  return false;
}

void pass_on(int signal, siginfo_t* info, void* context) {
  const bool sent = info->si_code <= 0;  // by kill or raise: no access comes again
  if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(signal, info, context);
  if (before.sa_handler == SIG_IGN && sent) return;
  if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(signal);
  struct sigaction plain = {};
  plain.sa_handler = SIG_DFL;
  sigaction(signal, &plain, nullptr);
  if (sent) raise(signal);
}

void on_bus_error(int signal, siginfo_t* info, void* context) {
  const int error = errno;
  if (info->si_code != BUS_ADRERR || !replaced((uintptr_t)info->si_addr)) pass_on(signal, info, context);
  errno = error;
}

// Once: who takes the signal later must pass on what is not its own, as we do.
bool install() {
  if (installed) return true;
  struct sigaction ours = {};
  ours.sa_sigaction = on_bus_error;
  ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&ours.sa_mask);
  system_page = (uintptr_t)sysconf(_SC_PAGESIZE);
  installed = sigaction(SIGBUS, &ours, &before) == 0;
  return installed;
}

void uninstall() {
  struct sigaction now = {};
  if (!installed || sigaction(SIGBUS, nullptr, &now) != 0) return;
  if (!(now.sa_flags & SA_SIGINFO) || now.sa_sigaction != on_bus_error) return;  // somebody passes on to us
  sigaction(SIGBUS, &before, nullptr);
  installed = false;
}

}  // namespace

extern "C" {

int octavo_guard(void* begin, int64_t bytes) {
  std::lock_guard<std::mutex> lock(changes);
  for (int id = 0; id < kRegions; id++) {
    Region& region = regions[id];
    if (region.end.load() || bytes <= 0) continue;
    if (!install()) return -1;
    region.lost.store(0);
    region.first.store(-1);
    region.begin.store((uintptr_t)begin);
    region.end.store((uintptr_t)begin + (uintptr_t)bytes, std::memory_order_release);
    guarded++;
    return id;
  }
  return -1;
}

int64_t octavo_guard_lost(int id, int64_t* first) {
  if (id < 0 || id >= kRegions) return 0;
  const int64_t lost = regions[id].lost.load(std::memory_order_acquire);
  *first = regions[id].first.load();
  return lost;
}

void octavo_guard_reset(int id) {
  if (id < 0 || id >= kRegions) return;
  regions[id].lost.store(0);
  regions[id].first.store(-1);
}

void octavo_guard_end(int id) {
  std::lock_guard<std::mutex> lock(changes);
  if (id < 0 || id >= kRegions || !regions[id].end.load()) return;
  regions[id].end.store(0);
  if (--guarded == 0) uninstall();
}

}  // extern "C"

#else

extern "C" {
int octavo_guard(void*, int64_t) { return -1; }
int64_t octavo_guard_lost(int, int64_t*) { return 0; }
void octavo_guard_reset(int) {}
void octavo_guard_end(int) {}
}

#endif
