// Which engine takes a linear call: the launch table, as data, and the pure function that reads it.
//
// Plain C++, tested on the host against a checked-in table. Times are microseconds on an H200, cold L2, plain launches,
// bfloat16 (docs/kernel-log.md has the sweeps).
#ifndef NF4LINEAR_DISPATCH_H
#define NF4LINEAR_DISPATCH_H

#include <stdint.h>

#include "device_info.h"
#include "dequantize_cost.h"
#include "dispatch_w8.h"
#include "gemm_mma_plan.h"
#include "gemm_wgmma_choice.h"
#include "gemm_wgmma_plan.h"
#include "nf4linear.h"
#include "small_batch_plan.h"
#include "small_wgmma_plan.h"
#include "validate.h"

namespace nf4l {

// nothing: no tokens; gemm: dequantize, then the framework's; gemm_wgmma, gemm_mma: the prefill engines; *_w8: those
// for 8-bit weights
enum class Engine { nothing, gemm, small_batch, small_wgmma, gemm_wgmma, gemm_mma, small_w8, small_wgmma_w8, gemm_w8 };

// The first row that fits a call wins.
struct LaunchRow {
  int arch_first, arch_last;
  int64_t m_first, m_last;
  int64_t weights_last;    // largest n * k
  int shape;               // in SMALL_BATCH_SHAPES
  // Activations are shared by nobody: every block reads its own copy from L2 before it can start. A slice of the inputs
  // makes that copy smaller, and costs a sum over slices at the end.
  int64_t whole_tiles;     // 64-input tiles up to which the inputs stay in one slice
  int64_t slice_tiles;     // tiles of a slice beyond that
};

// Figures are those of the experiment that the engine was made from (docs/kernel-log.md).
// GPUs with 99 KB of shared memory a block (86, 89, 120) keep to one row tile, whose tails are smaller; their rows, and
// those of 80 and 100, are set by the same arithmetic and not measured.
constexpr LaunchRow LAUNCH_TABLE[] = {
    // arch      m      n * k        shape                    whole slice
    {80, 999, 1, 1, 40'000'000, small_batch_shape(1, 1), ANY, ANY},   // 4096x4096 6.1 (two row tiles: 6.5)
    {80, 999, 1, 1, ANY, small_batch_shape(2, 1), ANY, ANY},          // 4096x14336 13.1 (one: 13.9)
    {86, 89, 2, 8, ANY, small_batch_shape(1, 8), 24, 24},
    {86, 89, 9, 16, ANY, small_batch_shape(1, 16), 8, 8},
    {120, 129, 2, 8, ANY, small_batch_shape(1, 8), 24, 24},
    {120, 129, 9, 16, ANY, small_batch_shape(1, 16), 8, 8},
    {80, 119, 2, 8, 40'000'000, small_batch_shape(1, 8), 128, 64},    // 4096x4096 6.5 (two: 7.0), 6144x4096 8.0
    {80, 119, 2, 8, 90'000'000, small_batch_shape(2, 8), 64, 64},     // 4096x14336 14.4 (one slice: 15.2)
    {80, 119, 2, 8, ANY, small_batch_shape(2, 8), 64, 112},           // 28672x4096 22.6 (one: 23.3)
    {80, 119, 9, 16, 32'000'000, small_batch_shape(1, 16), 64, 64},   // 4096x4096 8.1 (two: 8.7), 6144x4096 9.8 (10.3)
    {80, 119, 9, 16, ANY, small_batch_shape(2, 16), 0, 40},           // 8192x8192 17.9 (one: 19.7)
    {80, 119, 17, 32, ANY, small_batch_shape(1, 32), 0, 32},          // 4096x4096 10.5 (wgmma: 11.6), 28672x4096 44.0
};

// Rows for GPUs with wgmma, which come before the others.
struct WgmmaRow {
  int64_t m_first, m_last;
  int64_t k_first, k_last;
  int64_t weights_first, weights_last;  // n * k
  int shape;                            // in SMALL_WGMMA_SHAPES
};

// Up to 32 tokens, smaller weights, and small ones with long rows (17 tokens: 1024x8192 8.3 for 7.9) or short ones
// (4096x1024 6.5 for 5.4), leave too few bursts a block: its start and the sums between blocks weigh more than what is
// gained. With more tokens it is up against two launches (96: 896x896 7.0 for 6.3; 128: 2048x1024 7.8 for 7.5).
constexpr WgmmaRow WGMMA_TABLE[] = {
    // m    k            n * k                    shape                      (the other engine, or another shape)
    {9, 16, 12'288, ANY, 40'000'000, 100'000'000, small_wgmma_shape(16, 4)},  // 4096x14336 16.7 (18.1)
    {9, 16, 0, ANY, 100'000'000, ANY, small_wgmma_shape(16, 4)},              // 28672x4096 25.5 (27.8)
    {17, 32, 2048, 4096, 4'000'000, 15'000'000, small_wgmma_shape(32, 2)},    // 2048x4096 7.0 (8.1)
    {17, 32, 0, ANY, 20'000'000, 32'000'000, small_wgmma_shape(32, 3)},       // 6144x4096 12.1 (12.7)
    {17, 32, 0, ANY, 15'000'000, 70'000'000, small_wgmma_shape(32, 2)},       // 4096x4096 10.0 (11.1)
    {17, 32, 0, ANY, 70'000'000, ANY, small_wgmma_shape(32, 4)},              // 57344x8192 93.7 (105)
    {33, 64, 0, ANY, 20'000'000, 32'000'000, small_wgmma_shape(64, 3)},       // 6144x4096 14.8 (15.0)
    {33, 64, 0, ANY, 750'000, ANY, small_wgmma_shape(64, 2)},                 // 896x896 5.8 (6.3), 4096x4096 11.4
    {65, 96, 0, ANY, 1'000'000, ANY, small_wgmma_shape(96, 2)},               // 512x2048 6.8 (7.9), 4096x4096 13.2
    {97, 128, 1536, ANY, 1'000'000, ANY, small_wgmma_shape(128, 2)},          // 512x2048 7.6 (8.1), 4096x4096 15.1
    {97, 128, 0, ANY, 4'000'000, ANY, small_wgmma_shape(128, 2)},             // 4096x1024 8.8 (9.6)
};

// What the prefill engine takes. With many tokens, to decode a weight once costs less than to decode it for each 344 of
// them; before that, where its output tiles make waves that are far from full. With few rows that is level beyond 2048
// tokens, or faster (3072: 1024x4096 42.6 for 40.1, 2048x4096 76.2 for 75.9, 3072x4096 118 for 113).
constexpr int64_t GEMM_FIRST_TOKENS = 129, GEMM_LAST_TOKENS = 8192, GEMM_FIRST_WEIGHTS = 4'000'000;
constexpr int64_t GEMM_FEW_ROWS = 4096, GEMM_LAST_TOKENS_OF_FEW_ROWS = 2048;

// The prefill engine's estimate is of short calls. Long ones take some 7 % more: the clock falls.
constexpr int64_t at_the_power_cap(int64_t ns) { return ns > 40'000 ? ns + (ns - 40'000) / 14 : ns; }

// Rows of the mma.sync prefill engine, for GPUs without wgmma. They are measured on an H200 that runs the code of
// sm_80, against dequantize + GEMM, whose GEMM has wgmma there and is nearly twice as fast as the engine can be; on
// GPUs where both use mma.sync the engine should stand better. GPUs of 100 .. 119 have a far faster GEMM, and no
// figures. From 17 tokens on where the launch table has nothing: 32 tokens of small batch need more than 99 KB.
struct MmaRow {
  int64_t m_first, m_last;
  int64_t n_first, k_first, k_last;
  int64_t weights_first;  // smallest n * k
};
constexpr MmaRow MMA_TABLE[] = {
    // m     n     k          n * k         (dequantize + GEMM)
    {17, 48, 1024, 0, 4096, 4'000'000},      // 48 tokens: 1024x4096 11.1 (12.7), 2048x4096 11.7 (14.7)
    {17, 128, 4096, 1024, ANY, 16'000'000},  // 24: 4096x4096 14.6 (22.2), 128: 22.6 (26.0), 6144x4096 32.6 (33.1)
};

struct Launch {
  Engine engine = Engine::gemm;
  SmallBatchPlan small_batch = {};
  SmallWgmmaPlan small_wgmma = {};
  GemmLaunches gemm_wgmma = {};
  GemmMmaPlan gemm_mma = {};
  SmallW8Plan small_w8 = {};
  SmallWgmmaW8Plan small_wgmma_w8 = {};
  GemmW8Plan gemm_w8 = {};
};

inline FourBitProblem four_bit_problem(const nf4l_weight& w) {
  const int log2_group = log2_of(w.blocksize / TILE_K4 * NESTED_BLOCKSIZE);
  return {w.n, w.k, w.kb_full, log2_group, w.nested_code != nullptr};
}

// The plans below are made for one call: each is true if it fits, and then the launch is complete.
struct Picker {
  const DeviceInfo& device;
  const nf4l_weight& w;
  const nf4l_linear_args& a;
  Launch& launch;
  const FourBitProblem problem = four_bit_problem(w);

  bool small_batch(int shape, int slices) {
    if (!plan_small_batch(problem, shape, slices, device.sms, device.shared_bytes, launch.small_batch)) return false;
    launch.engine = Engine::small_batch;
    return true;
  }

  bool small_wgmma(int shape, int least_units) {
    if (!device.wgmma || !aligned(w.scales, 16)) return false;  // scales are copied 16 bytes at a time
    const int sms = device.sms, shared = device.shared_bytes;
    if (!plan_small_wgmma(problem, shape, least_units, sms, shared, launch.small_wgmma)) return false;
    launch.engine = Engine::small_wgmma;
    return true;
  }

  bool gemm_wgmma(int shape, int slices) {
    const int sms = device.sms, shared = device.shared_bytes;
    if (!device.wgmma) return false;
    if (!plan_gemm(a.m, w.n, w.k, GEMM_FOUR_BIT, shape, slices, sms, shared, launch.gemm_wgmma.last)) return false;
    launch.engine = Engine::gemm_wgmma;
    return true;
  }

  bool gemm_mma(int shape, bool cut) {
    if (!plan_gemm_mma(problem, a.m, shape, cut, device.sms, device.shared_bytes, launch.gemm_mma)) return false;
    launch.engine = Engine::gemm_mma;
    return true;
  }

  bool from_gemm_costs() {
    const int64_t last_tokens = w.n < GEMM_FEW_ROWS ? GEMM_LAST_TOKENS_OF_FEW_ROWS : GEMM_LAST_TOKENS;
    if (!device.wgmma || a.m < GEMM_FIRST_TOKENS || a.m > last_tokens || w.n * w.k < GEMM_FIRST_WEIGHTS) return false;
    const GemmProblem all = {a.m, w.n, w.k, GEMM_FOUR_BIT, device.sms, device.shared_bytes};
    const int64_t ns = plan_gemm_launches(all, launch.gemm_wgmma);
    if (ns == INT64_MAX || double(at_the_power_cap(ns)) > dequantize_gemm_ns(a.m, w.n, w.k, 2.5)) return false;
    launch.engine = Engine::gemm_wgmma;
    return true;
  }

  bool from_mma_table() {
    if (device.wgmma || (device.arch >= 100 && device.arch < 120)) return false;
    for (const MmaRow& row : MMA_TABLE) {
      if (a.m < row.m_first || a.m > row.m_last || w.n < row.n_first || w.n * w.k < row.weights_first) continue;
      if (w.k < row.k_first || w.k > row.k_last) continue;
      if (!plan_best_gemm_mma(problem, a.m, device.sms, device.shared_bytes, launch.gemm_mma)) return false;
      launch.engine = Engine::gemm_mma;
      return true;
    }
    return false;
  }

  // What the tuning flags ask for: a shape of one engine, or behind those one of the next.
  bool tuned(int shape, int cut) {
    if (shape < SMALL_BATCH_SHAPE_COUNT) {
      return a.m <= SMALL_BATCH_SHAPES[shape].tokens && small_batch(shape, cut > 0 ? cut : 1);
    }
    shape -= SMALL_BATCH_SHAPE_COUNT;
    if (shape < SMALL_WGMMA_SHAPE_COUNT) return a.m <= SMALL_WGMMA_SHAPES[shape].tokens && small_wgmma(shape, cut);
    shape -= SMALL_WGMMA_SHAPE_COUNT;
    if (shape < GEMM_SHAPE_COUNT) return gemm_wgmma(shape, cut > 0 ? cut : 1);
    shape -= GEMM_SHAPE_COUNT;
    return shape < GEMM_MMA_SHAPE_COUNT && gemm_mma(shape, cut != 1);
  }

  bool from_wgmma_table() {
    const int64_t weights = w.n * w.k;
    for (const WgmmaRow& row : WGMMA_TABLE) {
      if (a.m < row.m_first || a.m > row.m_last || w.k < row.k_first || w.k > row.k_last) continue;
      if (weights < row.weights_first || weights > row.weights_last) continue;
      return small_wgmma(row.shape, least_units(SMALL_WGMMA_SHAPES[row.shape].burst, w.k));
    }
    return false;
  }

  bool from_launch_table() {
    for (const LaunchRow& row : LAUNCH_TABLE) {
      if (device.arch < row.arch_first || device.arch > row.arch_last) continue;
      if (a.m < row.m_first || a.m > row.m_last || w.n * w.k > row.weights_last) continue;
      return small_batch(row.shape, wanted_slices(row, SMALL_BATCH_SHAPES[row.shape], device.sms, w.n, w.k / TILE_K4));
    }
    return false;
  }
};

// The engine for a call; arguments are checked already (validate.h).
inline Launch pick(const DeviceInfo& device, const nf4l_weight& w, const nf4l_linear_args& a) {
  Launch launch;
  if (a.m == 0) {
    launch.engine = Engine::nothing;
    return launch;
  }
  if (a.dtype == NF4L_F32) return launch;
  if (!aligned(a.x, 16) || (a.m > 1 && a.x_stride % 8)) return launch;  // activations are copied 16 bytes at a time
  if (w.layout == NF4L_TILE16X32) {
    const W8Launch picked = pick_w8(device, w, a);
    if (picked.engine == W8Launch::small) launch.engine = Engine::small_w8;
    if (picked.engine == W8Launch::wgmma) launch.engine = Engine::small_wgmma_w8;
    if (picked.engine == W8Launch::gemm) launch.engine = Engine::gemm_w8;
    launch.small_w8 = picked.small_plan;
    launch.small_wgmma_w8 = picked.wgmma_plan;
    launch.gemm_w8 = picked.gemm_plan;
  }
  // Engines for 4-bit weights write y as it is.
  if (w.layout != NF4L_TILE16X64 || a.flags & NF4L_TRANSPOSED_OUTPUT) return launch;
  Picker picker = {device, w, a, launch};
  if (const int shape = a.flags >> NF4L_TUNE_SHAPE_SHIFT & 255) {
    picker.tuned(shape - 1, a.flags >> NF4L_TUNE_SLICES_SHIFT & 255);
  } else if (!picker.from_wgmma_table() && !picker.from_gemm_costs() && !picker.from_launch_table()) {
    picker.from_mma_table();
  }
  return launch;
}

}  // namespace nf4l

#endif
