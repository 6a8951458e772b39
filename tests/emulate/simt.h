// A block of threads on the CPU, as far as the fused kernels need one: every thread is a fiber, barriers and warp
// instructions switch between them. One block runs at a time. Reads of global memory are checked against what is
// registered, so a kernel that reads one byte too far is found.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

struct Dim {
  unsigned x = 0, y = 0, z = 0;
};

namespace simt {

constexpr int LANES = 32;
constexpr size_t STACK = 256 << 10;

struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;
};

struct Warp {
  Barrier barrier;
  // What lanes hand to each other; two turns, so that a fast lane does not overwrite what a slow one still reads.
  uint64_t slot[2][LANES][8];
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  Dim thread;
  Warp* warp = nullptr;
  int lane = 0;
  unsigned turn = 0;
  bool done = false;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier barrier;
  Barrier named[16];
  int votes = 0;  // of __syncthreads_or
  ucontext_t scheduler;
  Fiber* running = nullptr;
  std::function<void()> body;
  Dim index, grid;
};

inline Block block;

inline void yield() { swapcontext(&block.running->context, &block.scheduler); }

inline void wait(Barrier& barrier) {
  const unsigned mine = barrier.generation;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    ++barrier.generation;
  }
  while (barrier.generation == mine) yield();
}

inline void wait_named(int id, int threads) {
  block.named[id].expected = threads;
  wait(block.named[id]);
}

// Whether any thread of the block says yes.
inline bool wait_any(bool mine) {
  block.votes += mine;
  wait(block.barrier);
  const bool any = block.votes > 0;
  wait(block.barrier);
  block.votes = 0;
  wait(block.barrier);
  return any;
}

// Gives this lane's `count` words to the warp and returns everyone's.
inline const uint64_t (*exchange(const uint64_t* words, int count))[8] {
  Fiber& me = *block.running;
  auto& slot = me.warp->slot[me.turn++ % 2];
  std::memcpy(slot[me.lane], words, count * sizeof(uint64_t));
  wait(me.warp->barrier);
  return slot;
}

inline void entry() {
  block.body();
  block.running->done = true;
  yield();
}

// Runs `body` once for each of `threads` threads of one block.
inline void run_block(Dim index, Dim grid, int threads, std::function<void()> body) {
  block.body = std::move(body);
  block.index = index;
  block.grid = grid;
  block.barrier = {threads, 0, 0};
  for (Barrier& named : block.named) named = {};
  block.warps.assign(threads / LANES, Warp{});
  block.fibers.resize(threads);
  for (int i = 0; i < threads; ++i) {
    Fiber& fiber = block.fibers[i];
    fiber.stack.resize(STACK);
    fiber.thread = {unsigned(i), 0, 0};
    fiber.warp = &block.warps[i / LANES];
    fiber.warp->barrier.expected = LANES;
    fiber.lane = i % LANES;
    fiber.turn = 0;
    fiber.done = false;
    getcontext(&fiber.context);
    fiber.context.uc_stack = {fiber.stack.data(), 0, STACK};
    fiber.context.uc_link = nullptr;
    makecontext(&fiber.context, entry, 0);
  }
  for (int left = threads; left > 0;) {
    for (Fiber& fiber : block.fibers) {
      if (fiber.done) continue;
      block.running = &fiber;
      swapcontext(&block.scheduler, &fiber.context);
      left -= fiber.done;
    }
  }
}

// ---- global memory --------------------------------------------------------------------------------------------------

struct Range {
  const char* begin;
  size_t size;
};
inline std::vector<Range> readable;

inline void check_read(const void* p, size_t size) {
  const char* at = static_cast<const char*>(p);
  for (const Range& range : readable) {
    if (at >= range.begin && at + size <= range.begin + range.size) return;
  }
  std::printf("thread %u of block %u, %u reads %zu bytes outside of every tensor\n", block.running->thread.x,
              block.index.x, block.index.y, size);
  std::exit(1);
}

}  // namespace simt
