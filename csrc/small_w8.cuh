// Engine: y[m, n] = x[m, k] * weight^T + bias for few tokens and 8-bit weights, where the time is that of reading the
// weight once.
//
// It is the small-batch engine (small_batch.cuh) with another way in: row groups, units, stretches, tails and slices
// are the same. An 8-bit weight is converted in registers (convert8.cuh), so shared memory has nothing to do but to
// feed the tensor cores, and holds what is on its way: each warp keeps a ring of bursts full by bulk copies and waits
// for nobody else.
//
//   a unit   wait for the burst in hand | 4 tiles of 64 inputs: read 2 x 16 bytes a lane, convert, 4 mma for 8 tokens |
//            refill the stage
//
// One scale a row multiplies the finished sum. Group scales multiply the product of their group, like block scales.
//
// Shared memory (offsets in small_w8_plan.h):
//   | activations of the slice | tails | barriers | rings |
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert8.cuh"
#include "copy.cuh"
#include "mma_sm80.cuh"
#include "small_batch.cuh"
#include "small_w8_load.cuh"
#include "small_w8_plan.h"

namespace nf4l {

// Row scales, bias and output of row group `group`.
template <class T, int R, int TOKENS, bool GROUPED>
__device__ __forceinline__ void store_scaled(const SmallW8Args& a, const Results<R, TOKENS>& sum, int group, int lane) {
  sum.template store<T>(a, a.token_stride, a.row_stride, group, lane, [&](int row) {
    const float scale = GROUPED ? 1.0f : __ldg(a.scales + row) * INV_127;
    const float bias = a.bias ? to_float(static_cast<const T*>(a.bias)[row]) : 0.0f;
    return [scale, bias](float v) { return fmaf(v, scale, bias); };
  });
}

// The units of one warp, one after the other.
template <class Code, class T, int R, int TOKENS, int WARPS, bool GROUPED>
struct W8Walk {
  using Sum = Results<R, TOKENS>;
  const SmallW8Args& args;
  const BlockWork& work;
  const int lane;
  W8Stream<R, GROUPED, WARPS>& weights;
  const Activations<TOKENS, WARPS * WARP>& activations;
  float* const tail;  // where this warp leaves one
  int group, burst;   // of the next unit, in the block
  bool inside;        // the stretch began inside `group`, so another warp owns it
  uint32_t b[Sum::COLUMN_TILES][8] = {};
  Sum sum, odd;  // the latter of every other k16 step: a product need not wait for the one before

  __device__ __forceinline__ void clear() {
    sum.clear();
    odd.clear();
  }
  __device__ __forceinline__ void fold() {
#pragma unroll
    for (int i = 0; i < R * Sum::COLUMN_TILES * 4; ++i) (&sum.value[0][0][0])[i] += (&odd.value[0][0][0])[i];
    odd.clear();
  }

  __device__ __forceinline__ void unit() {
    const int tile = burst * BURST, tiles = work.tiles - tile;
    weights.wait();
#pragma unroll
    for (int j = 0; j < BURST; ++j) {
      if (GROUPED && j >= tiles) break;  // its scales were never copied, and zero times NaN is NaN
      activations.fragments(b, tile + j, lane);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        uint32_t a[16];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 codes = weights.get(r, j, half);
          const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
          for (int i = 0; i < 8; ++i) a[8 * half + i] = Convert8<T>::template pair_of<Code>(word[i / 2], i % 2);
        }
        if (GROUPED) {
          sum.template multiply<T>(r, a, b, weights.scales(r, j));
        } else {
          accumulate(r, a);
        }
      }
    }
    weights.next();
    if (++burst == work.bursts) next_group();
  }

  __device__ __forceinline__ void accumulate(int r, const uint32_t (&a)[16]) {
#pragma unroll
    for (int c = 0; c < Sum::COLUMN_TILES; ++c) {
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        mma_m16n8k16<T>((s % 2 ? odd : sum).value[r][c], a + 4 * s, b[c][2 * s], b[c][2 * s + 1]);
      }
    }
  }

  __device__ __forceinline__ void next_group() {
    fold();
    if (inside) sum.put(tail);
    else finish();
    sum.clear();
    inside = false;
    burst = 0;
    ++group;
  }

  // The sum of a whole row group over the slice.
  __device__ __forceinline__ void finish() {
    const int whole_group = work.first_group + group;
    if (gridDim.y == 1) store_scaled<T, R, TOKENS, GROUPED>(args, sum, whole_group, lane);
    else sum.put_partial(args.partials + (int64_t(blockIdx.y) * args.groups + whole_group) * (Sum::COUNT * WARP), lane);
  }
};

template <class Code, class T, int R, int TOKENS, int WARPS, bool GROUPED>
__global__ void __launch_bounds__(WARPS* WARP, 1) small_w8_kernel(const __grid_constant__ SmallW8Args args) {
  extern __shared__ __align__(1024) char smem[];
  constexpr SmallBatchShape SHAPE = {R, TOKENS, WARPS};
  grid_launch_dependents();
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const BlockWork work(args);
  const int begin = work.units * warp / WARPS, end = work.units * (warp + 1) / WARPS;
  const SmallW8Shared map(SHAPE, GROUPED ? 1 << args.group_shift : 0, args.slice_tiles, args.stages);

  using X = Activations<TOKENS, WARPS * WARP>;
  const uint32_t x_smem = smem_address(smem + map.activations);
  W8Stream<R, GROUPED, WARPS> weights(args, work, smem_address(smem + map.rings), smem_address(smem + map.barriers),
                                      begin, end, warp, lane);
  if constexpr (LANE_COPIES) {
    if (args.dependent) grid_wait();
    X::load_async(args, work, x_smem);
    cp_async_commit_group();
    weights.start();
    cp_async_wait_group(args.stages);
  } else {
    // What is asked for later arrives later, and without x nothing begins: it goes first, where it need not be waited
    // for.
    if (!args.dependent) X::load_async(args, work, x_smem);
    weights.start();
    if (args.dependent) {
      grid_wait();
      X::load_async(args, work, x_smem);
    }
    cp_async_wait_all();
  }
  __syncthreads();

  const int group = begin / work.bursts, burst = begin - group * work.bursts;
  const X activations(x_smem, lane);
  float* const tails = reinterpret_cast<float*>(smem + map.tails) + lane;
  constexpr int TAIL = SHAPE.lane_results() * WARP;
  W8Walk<Code, T, R, TOKENS, WARPS, GROUPED> walk = {args,  work,  lane,      weights, activations, tails + warp * TAIL,
                                                     group, burst, burst != 0};
  walk.clear();
  for (int u = begin; u < end; ++u) walk.unit();
  walk.fold();

  close_stretch<WARPS>(walk, warp, tails);
  if (gridDim.y > 1) {
    using Sum = Results<R, TOKENS>;
    const auto store = [&](const Sum& sum, int row_group) {
      store_scaled<T, R, TOKENS, GROUPED>(args, sum, row_group, lane);
    };
    add_slices<Sum, WARPS>(args, work, reinterpret_cast<bool*>(smem + map.flag), warp, lane, store);
  }
}

}  // namespace nf4l
