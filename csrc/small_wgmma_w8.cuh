// Engine for Hopper and 8-bit weights: y[m, n] = x[m, k] * weight^T + bias for up to 64 tokens.
//
// It is the wgmma engine (small_wgmma.cuh) for weights that need no table: units, stretches, the ring, the courier and
// the ways out are the same. A byte is converted in registers and a row's scale multiplies the finished sum, so there
// is one accumulator, to which every k16 step adds; each warpgroup converts behind what it has given to the tensor
// cores (w8_operand.cuh).
//
// Group scales multiply the product of their group, which is a second accumulator and is waited for.
//
// Shared memory (offsets in small_wgmma_w8_plan.h):
//   | ring: x, codes | ring: group scales | barriers |
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "copy.cuh"
#include "small_wgmma.cuh"
#include "small_wgmma_finish.cuh"
#include "small_wgmma_w8_load.cuh"
#include "small_wgmma_w8_plan.h"
#include "tma.cuh"
#include "w8_operand.cuh"
#include "wgmma_sm90.cuh"

namespace nf4l {

// What the way out needs to know.
template <class T, int SHAPE, bool GROUPED>
struct SmallWgmmaW8 {
  using Type = T;
  using Args = SmallWgmmaW8Args;
  static constexpr SmallWgmmaW8Shape S = SMALL_WGMMA_W8_SHAPES[SHAPE];
  static constexpr bool ROW_SCALES = !GROUPED, TRANSPOSES = true;
};

// The units of one warp of a consumer, one after the other.
template <class Code, class T, int SHAPE, bool GROUPED>
struct W8Consumer : W8Operand<Code, T, W8Ring<SHAPE, GROUPED>> {
  using Operand = W8Operand<Code, T, W8Ring<SHAPE, GROUPED>>;
  using Operand::at, Operand::lane, Operand::ring, Operand::row_tile, Operand::sums, Operand::used, Operand::words;
  using Operand::convert, Operand::release, Operand::step;
  static constexpr SmallWgmmaW8Shape S = SMALL_WGMMA_W8_SHAPES[SHAPE];
  static constexpr int RESULTS = S.lane_results();
  const int group_shift, x_rows;
  float product[GROUPED ? RESULTS : 1];

  __device__ __forceinline__ void load(int half, int stage, int tile) {
    const uint32_t from = ring.codes(stage, row_tile) + tile * W8_TILE_BYTES + half * TILE_BYTES;
    words[half] = ld_shared_u32x4(from + lane * LANE_BYTES);
  }

  // What the tensor cores add to.
  __device__ __forceinline__ auto& accumulator() {
    if constexpr (GROUPED) return product;
    else return sums;
  }

  // sums (+)= scale * product, for tile `tile` of a unit, the last one of its group.
  __device__ __forceinline__ void fold(int stage, int tile, bool add) {
    const int at_group = row_tile * (S.burst >> group_shift) + (tile >> group_shift);
    const float2 scale = ld_shared_f32x2(ring.scales(stage) + (at_group * TILE_ROWS + lane / 4 * 2) * 4);
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) sums[i] = fmaf(product[i], i & 2 ? scale.y : scale.x, add ? sums[i] : 0.0f);
  }

  // Before the first unit.
  __device__ __forceinline__ void start() {
    mbarrier_wait(ring.full(0), 0);
    load(0, 0, 0);
    load(1, 0, 0);
    convert(0);
    convert(1);
  }

  // One unit, of which two steps are converted; does the same for the next one if there are `more`. The first unit of a
  // row block takes the place of the sums, later ones are added.
  __device__ __forceinline__ void multiply(bool add, bool more) {
    float (&into)[RESULTS] = accumulator();
    const int stage = at.stage;
    const uint64_t x_of_unit = wgmma_descriptor(ring.x(stage));
    at.step();
#pragma unroll
    for (int j = 0; j < S.burst; ++j) {
      const bool last = j + 1 == S.burst;
      const int next_stage = last ? at.stage : stage, next_tile = last ? 0 : j + 1;
      const uint64_t x = x_of_unit + uint32_t(j * x_rows * (TILE_K4 * 2 / 16));
      const int in_group = GROUPED ? j & ((1 << group_shift) - 1) : 0;
      step(into, 0, x, GROUPED ? in_group > 0 : add || j > 0);
      convert(2);
      if (last && more) mbarrier_wait(ring.full(at.stage), at.phase);
      if (!last || more) load(0, next_stage, next_tile);
      step(into, 1, x, true);
      convert(3);
      if (j == 0) {
        release();  // every wgmma of the unit before is complete
        used = stage;
      }
      if (!last || more) load(1, next_stage, next_tile);
      step(into, 2, x, true);
      convert(0);
      step(into, 3, x, true);
      convert(1);
      if (GROUPED && in_group + 1 == 1 << group_shift) fold(stage, j, add || j >= 1 << group_shift);
    }
  }
};

template <class Code, class T, int SHAPE, bool GROUPED>
__global__ void __launch_bounds__(SMALL_WGMMA_W8_SHAPES[SHAPE].threads(), 1)
    small_wgmma_w8_kernel(const __grid_constant__ SmallWgmmaW8Args args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  constexpr SmallWgmmaW8Shape S = SMALL_WGMMA_W8_SHAPES[SHAPE];
  constexpr RegisterShare REGISTERS(S.row_groups);
  grid_launch_dependents();
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const Stretch stretch(args);
  const W8Ring<SHAPE, GROUPED> ring = {smem_address(smem)};
  const Mailbox mailbox = {ring.mailbox()};
  if (warp >= S.row_tiles()) {
    setmaxnreg_dec<REGISTERS.producer>();
    const bool feeds = warp == S.row_tiles(), carries = warp == S.row_tiles() + 1 && lane == 0;
    const W8Producer<SHAPE, GROUPED> producer = {args, stretch, ring, lane};
    if (feeds) {
      producer.init();
      if (args.dependent) producer.start();
      if (lane == 0) mailbox.init(S.row_groups * 4);
    }
    __syncthreads();
    grid_wait();
    if (feeds) producer.run();
    if (carries) mailbox.serve(args, stretch);
  } else {
    setmaxnreg_inc<REGISTERS.consumer>();
    __syncthreads();
    grid_wait();  // slots and y may be in use until then
    W8Consumer<Code, T, SHAPE, GROUPED> consumer = {{ring, warp, lane}, args.group_shift, args.x_rows};
    const Finish<SmallWgmmaW8<T, SHAPE, GROUPED>> finish(args, mailbox);
    consumer.start();
    for (int begin = stretch.begin; begin < stretch.end;) {
      const int row_block = begin / args.bursts, end = min(stretch.end, (row_block + 1) * args.bursts);
      for (int u = begin; u < end; ++u) consumer.multiply(u > begin, u + 1 < stretch.end);
      consumer.finish();
      finish(consumer.sums, row_block, begin, end);
      begin = end;
    }
    finish.end(stretch);
  }
#endif
}

}  // namespace nf4l
