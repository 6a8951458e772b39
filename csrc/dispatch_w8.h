// Which engine takes a linear call with 8-bit weights: launch tables as data, and the pure function that reads them.
// Plain C++.
//
// Times are microseconds on an H200, cold L2, "plain | dependent" launches, bfloat16 (docs/kernel-log.md has the
// sweeps).
#ifndef NF4LINEAR_DISPATCH_W8_H
#define NF4LINEAR_DISPATCH_W8_H

#include <stdint.h>

#include <initializer_list>

#include "dequantize_cost.h"
#include "device_info.h"
#include "gemm_w8_plan.h"
#include "layout.h"
#include "nf4linear.h"
#include "small_w8_plan.h"
#include "small_wgmma_w8_plan.h"

namespace nf4l {

// The first row that fits a call wins. Figures: a 4096x4096 weight, and others where it says so.
struct SmallW8Row {
  int64_t m_first, m_last;
  int shape;            // in SMALL_W8_SHAPES
  int64_t whole_tiles;  // 64-input tiles up to which the inputs stay in one slice
  int64_t slice_tiles;  // tiles of a slice beyond that
};
constexpr SmallW8Row SMALL_W8_TABLE[] = {
    // m    shape                 whole slice
    {1, 1, small_w8_shape(1, 1), ANY, ANY},  // 8.1 | 6.9, 28672x4096 32.0 | 30.2, 57344x8192 115.7 | 115.6
    {2, 8, small_w8_shape(1, 8), 128, 64},   // 8.2 | 7.5, 8192x8192 20.3 | 19.4 (two slices: 21.1 | 20.0)
    {9, 16, small_w8_shape(1, 16), 64, 64},  // 9.0 | 8.3, 28672x4096 33.5 | 32.4 (two slices: 38.3 | 36.8)
    {17, 32, small_w8_shape(2, 32), 0, 32},
};

// Rows for Hopper, which come before the others.
struct SmallWgmmaW8Row {
  int64_t m_first, m_last;
  int64_t k_first;
  int64_t weights_first, weights_last;  // n * k
  int shape;                            // in SMALL_WGMMA_W8_SHAPES
};
// Weights below those of the rows are left to dequantize + GEMM (33 tokens: 896x896 8.0 | 6.5 for 6.1).
constexpr SmallWgmmaW8Row SMALL_WGMMA_W8_TABLE[] = {
    // m    k       n * k               shape                              (the other engine, or another shape)
    {2, 8, 16'384, 100'000'000, ANY, small_wgmma_w8_shape(16, 2, 4)},    // 8192x28672 61.2 | 58.8 (64.3 | 63.1)
    {9, 16, 8'192, 50'000'000, ANY, small_wgmma_w8_shape(16, 2, 4)},     // 57344x8192 117 | 116 (129 | 129)
    {17, 32, 0, 0, 20'000'000, small_wgmma_w8_shape(32, 2, 2)},          // 10.0 | 8.9 (bursts of four: 10.4 | 9.6)
    {17, 32, 0, 20'000'000, ANY, small_wgmma_w8_shape(32, 2, 4)},        // 28672x4096 36.2 | 33.7 (42.8 | 40.9)
    {33, 64, 0, 1'000'000, 20'000'000, small_wgmma_w8_shape(64, 2, 2)},  // 10.9 | 9.9 (bursts of four: 11.3 | 10.9)
    {33, 64, 0, 20'000'000, ANY, small_wgmma_w8_shape(64, 2, 4)},        // 28672x4096 38.8 | 37.5 (42.9 | 41.1)
};

// More tokens than 64: the shape and cut that should take least, in nanoseconds. Of 184 launches (512 to 8192 rows, 65
// to 3072 tokens) the estimate is off by 10 % in the mean, by 30 at most.
struct GemmW8Cost {
  int shape;      // in GEMM_W8_SHAPES
  int k_tile_ns;  // of one output tile
};
constexpr GemmW8Cost GEMM_W8_COSTS[] = {
    {gemm_w8_shape(128, 2), 465},
    {gemm_w8_shape(192, 2), 490},
    {gemm_w8_shape(216, 2), 540},
    {gemm_w8_shape(256, 2), 627},
};
constexpr int64_t GEMM_W8_START_NS = 3000, GEMM_W8_TILE_NS = 2000;  // of a call, and of an output tile beside that
// Of tiles shared by blocks, for each token: sums left and waited for, and for every two sharers what adding takes.
constexpr int64_t GEMM_W8_CUT_NS = 45, GEMM_W8_TWO_SHARERS_NS = 7;

constexpr int64_t estimated_ns(const GemmW8Plan& plan, int64_t k_tile_ns) {
  const GemmCut& cut = plan.cut;
  const int64_t wave = cut.k_tiles * k_tile_ns + GEMM_W8_TILE_NS;
  const int64_t whole = GEMM_W8_START_NS + ceil_div(cut.whole_tiles, cut.blocks) * wave;
  const int64_t line = cut.deal.base + (cut.deal.extra > 0);
  if (line == 0) return whole;
  const int64_t sums = GEMM_W8_CUT_NS + GEMM_W8_TWO_SHARERS_NS * cut.k_tiles / (2 * line);
  return whole + line * k_tile_ns + GEMM_W8_SHAPES[plan.shape].tokens * sums;
}

// One of the three, or none.
struct W8Launch {
  enum { none, small, wgmma, gemm } engine = none;
  SmallW8Plan small_plan = {};
  SmallWgmmaW8Plan wgmma_plan = {};
  GemmW8Plan gemm_plan = {};
};

// Plans for one call: each is true if it fits, and then the launch is complete.
struct W8Picker {
  const DeviceInfo& device;
  const nf4l_weight& w;
  const nf4l_linear_args& a;
  W8Launch launch = {};

  bool small(int shape, int64_t slices) {
    const EightBitProblem problem = {w.n, w.k, int(w.blocksize / TILE_K4)};
    if (!plan_small_w8(problem, shape, int(slices), device.sms, device.shared_bytes, launch.small_plan)) return false;
    launch.engine = W8Launch::small;
    return true;
  }

  bool wgmma(int shape, int least_units) {
    if (!device.wgmma) return false;
    if (!plan_small_wgmma_w8(w.n, w.k, shape, least_units, device.sms, device.shared_bytes, launch.wgmma_plan))
      return false;
    launch.engine = W8Launch::wgmma;
    return true;
  }

  bool gemm(int shape, bool cut) {
    if (!device.wgmma || w.blocksize > 0) return false;
    if (!plan_gemm_w8(a.m, w.n, w.k, shape, cut, device.sms, device.shared_bytes, launch.gemm_plan)) return false;
    launch.engine = W8Launch::gemm;
    return true;
  }

  // What the tuning flags ask for: a shape of the small-batch engine and slices, behind those one of the wgmma engine
  // and the fewest units of a block, behind those one of the prefill engine and 1 to keep output tiles whole.
  bool tuned(int shape, int cut) {
    if (shape < SMALL_W8_SHAPE_COUNT) return a.m <= SMALL_W8_SHAPES[shape].tokens && small(shape, cut > 0 ? cut : 1);
    shape -= SMALL_W8_SHAPE_COUNT;
    if (shape < SMALL_WGMMA_W8_SHAPE_COUNT) return a.m <= SMALL_WGMMA_W8_SHAPES[shape].tokens && wgmma(shape, cut);
    shape -= SMALL_WGMMA_W8_SHAPE_COUNT;
    return shape < GEMM_W8_SHAPE_COUNT && gemm(shape, cut != 1);
  }

  // None where dequantize + GEMM should take less, as with few rows, whose sums many blocks share (256 tokens:
  // 1024x4096 17.3 for 13.6). Where they are level, one launch is preferred to two, as with 4 bits.
  bool cheapest_gemm() {
    int64_t best = INT64_MAX;
    int shape = -1;
    bool cut = false;
    for (const GemmW8Cost& cost : GEMM_W8_COSTS) {
      for (const bool cuts : {false, true}) {
        if (!gemm(cost.shape, cuts)) continue;
        const int64_t ns = estimated_ns(launch.gemm_plan, cost.k_tile_ns);
        if (ns < best) best = ns, shape = cost.shape, cut = cuts;
      }
    }
    launch.engine = W8Launch::none;
    return shape >= 0 && double(best) <= dequantize_gemm_ns(a.m, w.n, w.k, 3) && gemm(shape, cut);
  }

  bool from_wgmma_table() {
    const int64_t weights = w.n * w.k;
    for (const SmallWgmmaW8Row& row : SMALL_WGMMA_W8_TABLE) {
      if (a.m < row.m_first || a.m > row.m_last || w.k < row.k_first) continue;
      if (weights < row.weights_first || weights > row.weights_last) continue;
      return wgmma(row.shape, least_units(SMALL_WGMMA_W8_SHAPES[row.shape].burst, w.k));
    }
    return false;
  }

  bool from_small_table() {
    for (const SmallW8Row& row : SMALL_W8_TABLE) {
      if (a.m < row.m_first || a.m > row.m_last) continue;
      return small(row.shape, wanted_slices(row, SMALL_W8_SHAPES[row.shape], device.sms, w.n, w.k / TILE_K4));
    }
    return false;
  }
};

// The launch for a call with activations of 16 bits in 16-byte aligned rows.
inline W8Launch pick_w8(const DeviceInfo& device, const nf4l_weight& w, const nf4l_linear_args& a) {
  W8Picker picker = {device, w, a};
  if (w.k % TILE_K4) return picker.launch;
  if (const int shape = a.flags >> NF4L_TUNE_SHAPE_SHIFT & 255) {
    picker.tuned(shape - 1, a.flags >> NF4L_TUNE_SLICES_SHIFT & 255);
  } else if (a.m > 64) {
    picker.cheapest_gemm();
  } else if (!picker.from_wgmma_table()) {
    picker.from_small_table();
  }
  return picker.launch;
}

}  // namespace nf4l

#endif
