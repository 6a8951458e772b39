// The 8-bit small-batch engine's way in: a ring of shared memory for each warp, which the warp itself keeps full. The
// engine, with the story of both files, is small_w8.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "layout.h"
#include "nf4linear.h"
#include "small_batch_load.cuh"
#include "small_w8_plan.h"
#include "tma.cuh"

namespace nf4l {

struct SmallW8Args {
  const uint8_t* codes;  // [row_tiles][k_tiles][2][512]
  const float* scales;   // of rows: raw maxima [n]; of groups: [row_tiles][k_tiles >> group_shift][16]
  const char* x;         // [m] rows of k 16-bit values, 16-byte aligned
  int64_t x_row_bytes;
  const void* bias;  // [n] or NULL
  void* y;
  int64_t token_stride, row_stride;  // of y
  float* partials;                   // [slices][groups][lane_results][32]
  unsigned* arrivals;                // [parts], zero before and after
  int m, n, row_tiles, k_tiles;      // k tiles of 64 inputs
  int group_shift;                   // log2 of the k tiles under one group scale
  int groups, base_groups, extra_groups, slice_tiles;
  int stages;
  bool dependent;  // launched before the previous kernel ended
};

// Counters and partial sums are left to the launcher.
inline SmallW8Args small_w8_args(const SmallW8Plan& plan, const nf4l_weight& w, const nf4l_linear_args& l) {
  SmallW8Args a = {};
  a.codes = w.qweight;
  a.n = int(w.n);
  a.row_tiles = int(ceil_div(w.n, TILE_ROWS));
  a.k_tiles = int(w.k / TILE_K4);
  a.scales = static_cast<const float*>(w.scales);
  a.group_shift = w.blocksize == 128;
  a.stages = plan.stages;
  a.x = static_cast<const char*>(l.x);
  a.x_row_bytes = l.x_stride * 2;
  a.bias = l.bias;
  a.y = l.y;
  const bool transposed = l.flags & NF4L_TRANSPOSED_OUTPUT;
  a.token_stride = transposed ? 1 : w.n;
  a.row_stride = transposed ? l.m : 1;
  a.m = int(l.m);
  a.groups = plan.groups;
  a.base_groups = plan.base_groups;
  a.extra_groups = plan.extra_groups;
  a.slice_tiles = plan.slice_tiles;
  a.dependent = l.flags & NF4L_DEPENDENT_LAUNCH;
  return a;
}

// Copies to shared memory by the copy engine, a burst of a row tile at once, or by each lane for itself: 16 bytes that
// it alone will read. Only Hopper and later have the engine.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr bool LANE_COPIES = true;
#else
constexpr bool LANE_COPIES = false;
#endif

// The weight of a warp's stretch, `stages` bursts ahead of its use. Stage s is refilled as soon as the warp has used
// it, so the ring needs no barrier between warps.
template <int R, bool GROUPED, int WARPS>
struct W8Stream {
  const SmallW8Args& args;
  const BlockWork& work;
  const int lane;
  uint32_t stages, barriers;  // of the warp, in shared memory
  int stage_bytes;
  int unit, end;  // of the next burst to be copied; end of the stretch
  int group, burst;
  int stage = 0;  // of the burst in hand
  uint32_t phase = 0;

  __device__ __forceinline__ W8Stream(const SmallW8Args& a, const BlockWork& w, uint32_t rings, uint32_t all_barriers,
                                      int begin, int end_, int warp, int lane_)
      : args(a), work(w), lane(lane_), unit(begin), end(end_) {
    stage_bytes = R * BURST * W8_TILE_BYTES + (GROUPED ? R * (BURST >> a.group_shift) * (TILE_ROWS * 4) : 0);
    stages = rings + warp * a.stages * stage_bytes;
    barriers = all_barriers + warp * (SmallW8Shared::MOST_STAGES * 8);
  }

  __device__ __forceinline__ uint4 get(int r, int j, int half) const {
    return ld_shared_u32x4(stages + stage * stage_bytes + (r * BURST + j) * W8_TILE_BYTES + half * TILE_BYTES +
                           lane * LANE_BYTES);
  }
  // Of rows g and g + 8, for tile j of the burst.
  __device__ __forceinline__ float2 scales(int r, int j) const {
    const int at = (r * BURST + j) >> args.group_shift;
    return ld_shared_f32x2(stages + stage * stage_bytes + R * BURST * W8_TILE_BYTES + at * (TILE_ROWS * 4) +
                           lane / 4 * 8);
  }

  // Before anything else: as many bursts as there are stages, lane s that of stage s.
  __device__ __forceinline__ void start() {
    if constexpr (LANE_COPIES) {
      group = unit / work.bursts, burst = unit - group * work.bursts;
      for (int s = 0; s < args.stages; ++s) copy(s);
    } else {
      if (lane < args.stages) {
        mbarrier_init(barriers + 8 * lane, 1);
        fence_mbarrier_init();
        if (unit + lane < end) {
          const int g = (unit + lane) / work.bursts;
          issue(lane, g, unit + lane - g * work.bursts);
        }
      }
      __syncwarp();
      unit += args.stages;
      group = unit / work.bursts, burst = unit - group * work.bursts;
    }
  }

  // Waits for the burst in hand.
  __device__ __forceinline__ void wait() const {
    if constexpr (LANE_COPIES) {
      cp_async_wait_group(args.stages - 1);
      __syncwarp();  // lanes also read each other's scales
    } else {
      mbarrier_wait(barriers + 8 * stage, phase);
    }
  }

  // The burst in hand has been used.
  __device__ __forceinline__ void next() {
    __syncwarp();
    copy(stage);
    if (++stage == args.stages) {
      stage = 0;
      phase ^= 1;
    }
  }

 private:
  // Issues the next burst, if there is one, into stage s.
  __device__ __forceinline__ void copy(int s) {
    if (unit < end) {
      if (LANE_COPIES || lane == 0) issue(s, group, burst);
      ++unit;
      if (++burst == work.bursts) {
        burst = 0;
        ++group;
      }
    }
    if constexpr (LANE_COPIES) cp_async_commit_group();  // an empty one, too: they are counted
  }

  // Tiles and rows that do not exist keep what is there: every code stands for a number, and its activations are zero.
  __device__ __forceinline__ void issue(int s, int in_group, int in_burst) const {
    const int tile = work.first_tile + in_burst * BURST, tiles = min(work.tiles - in_burst * BURST, BURST);
    const int row_tile = (work.first_group + in_group) * R, row_tiles = min(args.row_tiles - row_tile, R);
    const int groups = GROUPED ? args.k_tiles >> args.group_shift : 0;  // of one row tile
    const int burst_groups = GROUPED ? tiles >> args.group_shift : 0,
              all_groups = GROUPED ? BURST >> args.group_shift : 0;
    const uint32_t to = stages + s * stage_bytes, scales_to = to + R * BURST * W8_TILE_BYTES;
    const uint32_t barrier = barriers + 8 * s;
    if constexpr (!LANE_COPIES) {
      mbarrier_arrive_expect_tx(barrier, row_tiles * (tiles * W8_TILE_BYTES + burst_groups * (TILE_ROWS * 4)));
    }
#pragma unroll
    for (int r = 0; r < R; ++r) {
      if (r >= row_tiles) break;
      const uint8_t* from = args.codes + (int64_t(row_tile + r) * args.k_tiles + tile) * W8_TILE_BYTES;
      const float* scales_from =
          GROUPED ? args.scales + (int64_t(row_tile + r) * groups + (tile >> args.group_shift)) * TILE_ROWS : nullptr;
      const uint32_t code_to = to + r * BURST * W8_TILE_BYTES, scale_to = scales_to + r * all_groups * (TILE_ROWS * 4);
      if constexpr (LANE_COPIES) {
#pragma unroll
        for (int i = 0; i < 2 * BURST; ++i) {
          const int at = i * TILE_BYTES + lane * LANE_BYTES;
          if (i < 2 * tiles) cp_async_16(code_to + at, from + at, true);
        }
        if (GROUPED && lane < burst_groups * 4) cp_async_16(scale_to + lane * 16, scales_from + lane * 4, true);
      } else {
        const uint64_t policy = createpolicy_evict_first();
        cp_async_bulk(code_to, from, tiles * W8_TILE_BYTES, barrier, policy);
        if (GROUPED) cp_async_bulk(scale_to, scales_from, burst_groups * (TILE_ROWS * 4), barrier, policy);
      }
    }
  }
};

}  // namespace nf4l
