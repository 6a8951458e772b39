// Which engine takes a linear call: the launch table, as data, and the pure function that reads it.
//
// Plain C++, tested on the host against a checked-in table. Times are microseconds on an H200, cold L2, plain launches,
// bfloat16 (docs/kernel-log.md has the sweeps).
#ifndef NF4LINEAR_DISPATCH_H
#define NF4LINEAR_DISPATCH_H

#include <stdint.h>

#include "nf4linear.h"
#include "small_batch_plan.h"
#include "validate.h"

namespace nf4l {

struct DeviceInfo {
  int arch;          // 80, 86, 89, 90, ...
  int sms;
  int shared_bytes;  // most that one block may use
};

enum class Engine { nothing, gemm, small_batch };  // nothing: no tokens; gemm: dequantize, then the framework's

constexpr int64_t ANY = INT64_MAX;

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

// GPUs with 99 KB of shared memory a block (86, 89, 120) keep to one row tile, whose tails are smaller; their rows, and
// those of 80 and 100, are set by the same arithmetic and not measured.
constexpr LaunchRow LAUNCH_TABLE[] = {
    // arch      m      n * k        shape                    whole slice
    {80, 999, 1, 1, 40'000'000, small_batch_shape(1, 1), ANY, ANY},   // 4096x4096 6.1 (two row tiles: 6.5)
    {80, 999, 1, 1, ANY, small_batch_shape(2, 1), ANY, ANY},          // 4096x14336 13.1 (one: 13.9), 57344x8192 66.7 (73.2)
    {86, 89, 2, 8, ANY, small_batch_shape(1, 8), 24, 24},
    {86, 89, 9, 16, ANY, small_batch_shape(1, 16), 8, 8},
    {120, 129, 2, 8, ANY, small_batch_shape(1, 8), 24, 24},
    {120, 129, 9, 16, ANY, small_batch_shape(1, 16), 8, 8},
    {80, 119, 2, 8, 90'000'000, small_batch_shape(1, 8), 128, 64},    // 4096x4096 6.5 (two: 7.2), 8192x8192 15.6 (15.9)
    {80, 119, 2, 8, ANY, small_batch_shape(2, 8), 64, 112},           // 28672x4096 22.6 (one: 23.3), 8192x28672 41.1 (44.7)
    {80, 119, 9, 16, 32'000'000, small_batch_shape(1, 16), 64, 64},   // 4096x4096 8.1 (two: 8.7), 6144x4096 9.8 (10.3)
    {80, 119, 9, 16, ANY, small_batch_shape(2, 16), 0, 40},           // 28672x4096 27.7 (one: 28.9), 8192x8192 17.9 (19.7)
    {80, 119, 17, 32, ANY, small_batch_shape(1, 32), 0, 32},          // 28672x4096 42.2, 8192x8192 27.2
};

struct Launch {
  Engine engine = Engine::gemm;
  SmallBatchPlan small_batch = {};
};

// Slices of the inputs that a row asks for.
inline int wanted_slices(const LaunchRow& row, int sms, int64_t n, int64_t k_tiles) {
  const int64_t slices = k_tiles <= row.whole_tiles ? 1 : ceil_div(k_tiles, row.slice_tiles);
  // Few rows leave SMs without work: cut the inputs further, sixteen tiles a slice at least.
  const int64_t groups = ceil_div(n, TILE_ROWS * SMALL_BATCH_SHAPES[row.shape].row_tiles);
  const int64_t idle = sms / groups, most = k_tiles / 16;
  return int(slices < idle && slices < most ? (idle < most ? idle : most) : slices);
}

// The engine for a call; arguments are checked already (validate.h).
inline Launch pick(const DeviceInfo& device, const nf4l_weight& w, const nf4l_linear_args& a) {
  Launch launch;
  if (a.m == 0) {
    launch.engine = Engine::nothing;
    return launch;
  }
  const bool four_bit = w.format == NF4L_NF4 || w.format == NF4L_FP4;
  if (!four_bit || w.layout != NF4L_TILE16X64 || a.dtype == NF4L_F32) return launch;
  if (!aligned(a.x, 16) || (a.m > 1 && a.x_stride % 8)) return launch;  // activations are copied 16 bytes at a time
  const int64_t k_tiles = w.k / TILE_K4;
  int log2_group = 0;
  while (TILE_K4 << log2_group < w.blocksize * NESTED_BLOCKSIZE) ++log2_group;
  const FourBitProblem problem = {w.n, w.k, w.kb_full, log2_group, w.nested_code != nullptr};
  const auto plan = [&](int shape, int slices) {
    return plan_small_batch(problem, shape, slices, device.sms, device.shared_bytes, launch.small_batch);
  };
  bool fits = false;
  if (const int shape = a.flags >> NF4L_TUNE_SHAPE_SHIFT & 255) {
    const int slices = a.flags >> NF4L_TUNE_SLICES_SHIFT & 255;
    fits = shape <= SMALL_BATCH_SHAPE_COUNT && a.m <= SMALL_BATCH_SHAPES[shape - 1].tokens &&
           plan(shape - 1, slices > 0 ? slices : 1);
  } else {
    for (const LaunchRow& row : LAUNCH_TABLE) {
      if (device.arch < row.arch_first || device.arch > row.arch_last) continue;
      if (a.m < row.m_first || a.m > row.m_last || w.n * w.k > row.weights_last) continue;
      fits = plan(row.shape, wanted_slices(row, device.sms, w.n, k_tiles));
      break;
    }
  }
  if (fits) launch.engine = Engine::small_batch;
  return launch;
}

}  // namespace nf4l

#endif
