#include "parallel.h"

#include <atomic>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#endif

namespace nf4l::cpu {

namespace {

// libgomp's entry for `#pragma omp parallel`; LLVM's and Intel's runtimes export it as well.
using GompParallel = void (*)(void (*body)(void*), void* data, unsigned threads, unsigned flags);

struct Runtime {
  GompParallel parallel = nullptr;
};

std::atomic<bool> forked{false};

Runtime find_runtime() {
  Runtime runtime;
#if defined(__unix__) || defined(__APPLE__)
  runtime.parallel = reinterpret_cast<GompParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
  pthread_atfork(nullptr, nullptr, [] { forked = true; });
#endif
  return runtime;
}

// What one thread starts with: pieces that lie together, so that it asks for memory in one stream.
struct alignas(64) Share {
  std::atomic<int64_t> next;
  int64_t end;
};

struct Region {
  static constexpr int MOST_SHARES = 64;  // more threads than that have to share them

  Region(Task task, void* context, int64_t count, int64_t grain, int threads)
      : task(task), context(context), grain(grain), shares(threads < MOST_SHARES ? threads : MOST_SHARES) {
    const int64_t pieces = (count + grain - 1) / grain;
    for (int i = 0; i < shares; ++i) {
      const int64_t begin = pieces * i / shares * grain, end = pieces * (i + 1) / shares * grain;
      share[i].next.store(begin, std::memory_order_relaxed);
      share[i].end = end < count ? end : count;
    }
  }

  // Correct for any number of threads the runtime grants: who has finished a share goes on with the next one's rest.
  static void run(void* self) {
    Region& region = *static_cast<Region*>(self);
    const int first = region.arrived.fetch_add(1, std::memory_order_relaxed) % region.shares;
    for (int i = 0; i < region.shares; ++i) region.finish(region.share[(first + i) % region.shares]);
  }

  void finish(Share& own) const {
    for (;;) {
      const int64_t begin = own.next.fetch_add(grain, std::memory_order_relaxed);
      if (begin >= own.end) return;
      task(context, begin, begin + grain < own.end ? begin + grain : own.end);
    }
  }

  const Task task;
  void* const context;
  const int64_t grain;
  const int shares;
  std::atomic<int> arrived{0};
  Share share[MOST_SHARES];
};

}  // namespace

void parallel_for(int64_t count, int64_t grain, int threads, Task task, void* context) {
  static const Runtime runtime = find_runtime();
  if (count <= 0) return;
  if (threads <= 1 || count <= grain || !runtime.parallel || forked) return task(context, 0, count);
  Region region(task, context, count, grain, threads);
  // Always the whole team, even for few pieces: libgomp tears down and rebuilds its pool when the size changes.
  runtime.parallel(&Region::run, &region, static_cast<unsigned>(threads), 0);
}

}  // namespace nf4l::cpu
