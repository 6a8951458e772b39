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

struct Region {
  Task task;
  void* context;
  int64_t count, grain;
  std::atomic<int64_t> next{0};

  // Correct for any number of threads the runtime grants.
  static void run(void* self) {
    Region& region = *static_cast<Region*>(self);
    for (;;) {
      const int64_t begin = region.next.fetch_add(region.grain, std::memory_order_relaxed);
      if (begin >= region.count) return;
      const int64_t end = begin + region.grain < region.count ? begin + region.grain : region.count;
      region.task(region.context, begin, end);
    }
  }
};

}  // namespace

void parallel_for(int64_t count, int64_t grain, int threads, Task task, void* context) {
  static const Runtime runtime = find_runtime();
  if (count <= 0) return;
  if (threads <= 1 || count <= grain || !runtime.parallel || forked) return task(context, 0, count);
  Region region{task, context, count, grain};
  // Always the whole team, even for few pieces: libgomp tears down and rebuilds its pool when the size changes.
  runtime.parallel(&Region::run, &region, static_cast<unsigned>(threads), 0);
}

}  // namespace nf4l::cpu
