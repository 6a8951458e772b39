// Engine for Hopper: y[m, n] = x[m, k] * weight^T + bias for 9..64 tokens, where mma.sync has too little to do for each
// weight that is decoded.
//
// The weight is the 64-row operand of wgmma m64nNk16, in registers, and the tokens are its N columns. So each weight is
// decoded once, by table look-up (decode.cuh), and x is read from shared memory by the tensor cores themselves.
//
// A block is one warpgroup that copies and two or four that multiply. Units are (row block, burst of four tiles of 64
// inputs), in one line over the whole weight, and each block of the grid walks a contiguous stretch of it, so that all
// end together whatever the shape. A unit travels through a ring in shared memory:
//
//     producer     wait empty | x: TMA, 4 boxes [tokens][64] | codes, scales: a bulk copy a row tile | -> full
//                                                                                                        |
//     consumers    wait full | scales to float32 | tile 0   1   2   3 | -> empty                    <----'
//
//     a tile       fence | 4 wgmma, one a k16 step | commit | decode the next tile | wait | sum += scale * product
//
// The look-ups of the next tile run while the tensor cores work on this one: registers `a` hold two tiles. With two
// accumulators the wait is for the tile before, and its scaling overlaps too. ptxas gives up asynchrony altogether (C7514)
// when an accumulator is in use across the loop's back edge, so the last tile of a unit is always waited for.
//
// Scaling after the product costs less than scaling weights, and only the centroids are rounded to 16 bits, never the
// scales. Four k groups (16 tokens) divide the bursts of the same rows among them, each with a ring of its own.
//
// Shared memory (offsets in small_wgmma_plan.h):
//   | pair table 64 KB | rings: x, codes | scale codes | sums of k groups | nested_code | scales | barriers | nested_absmax |
//
// Only the copies of x, and what follows from them, wait for the kernel before: tables and the first weights do not.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "decode.cuh"
#include "four_bit.cuh"
#include "scale.cuh"
#include "small_wgmma_finish.cuh"
#include "small_wgmma_load.cuh"
#include "small_wgmma_plan.h"
#include "tma.cuh"
#include "wgmma_sm90.cuh"

namespace nf4l {

// Registers of a thread: the block starts with an equal share for all, and the producer gives most of its own away.
struct RegisterShare {
  int producer, consumer;

  NF4L_HD constexpr explicit RegisterShare(int consumers)
      : producer(consumers == 2 ? 40 : 32),
        consumer(((65536 / ((consumers + 1) * WARPGROUP) / 8 * 8 * (consumers + 1)) - producer) / consumers / 8 * 8) {}
};

// Block scales of the unit in hand, float32, in a buffer of the warp's own: [step][16], element 2 g + h of a step is row
// g + 8 h of its tile.
template <int SHAPE>
struct WarpScales {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  const Ring<SHAPE>& ring;
  const float *nested_code, *nested_absmax;  // shared memory; NULL with plain absmax
  const float nested_offset;
  const int group_shift, eight_rows;  // 64-input blocks of eight rows
  const uint32_t buffer;
  const int row_tile;  // of the warp's first tile, in a row block
  int block;           // of (row g of the row tile, tile 0), counted from the first second-level group at hand

  // Lane (g, t) decodes those of rows g and g + 8 for steps t, t + 4, ...; the unit begins with k tile `first`.
  __device__ __forceinline__ void decode(int stage, int first, int last_tile, int lane) const {
    const int g = lane / 4, t = lane % 4;
    constexpr int EACH = (S.steps() + 3) / 4;
    float2 scale[EACH];
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int step = t + 4 * i, tile = step / S.stack, stacked = step % S.stack;
      const uint32_t codes = ring.scales(stage, row_tile + stacked * 4);
      if (nested_code) {
        const uint32_t at = codes + 8 * g + (S.burst == BURST ? tile : first % BURST + tile);
        const uint32_t low = ld_shared_u8(at), high = ld_shared_u8(at + 4);
        // A tile beyond the last takes its place in the table of groups: its products are zero.
        const int group = block + stacked * 8 * eight_rows + min(first + tile, last_tile);
        scale[i].x = nested_scale(nested_code[low], nested_absmax[group >> group_shift], nested_offset);
        scale[i].y = nested_scale(nested_code[high], nested_absmax[(group + eight_rows) >> group_shift], nested_offset);
      } else {
        scale[i] = ld_shared_f32x2(codes + (tile * TILE_ROWS + 2 * g) * 4);
      }
    }
    __syncwarp();  // those of the unit before have been read
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      if (t + 4 * i < S.steps()) st_shared_f32x2(buffer + ((t + 4 * i) * TILE_ROWS + 2 * g) * 4, scale[i]);
    }
    __syncwarp();
  }

  // Of rows g and g + 8.
  __device__ __forceinline__ float2 read(int step, int lane) const {
    return ld_shared_f32x2(buffer + (step * TILE_ROWS + lane / 4 * 2) * 4);
  }
};

// The units of one warp of a consumer, one after the other. A unit is walked in steps, one for each 64 x 64 tile: k tile
// by k tile, and the stacked row tiles of each.
template <class T, int SHAPE>
struct Consumer {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  static constexpr int STEPS = S.steps(), RESULTS = S.tokens / 2;
  const SmallWgmmaArgs& args;
  const Ring<SHAPE>& ring;
  WarpScales<SHAPE> scales;
  const int row_tile, lane;  // row_tile: of the warp's first tile, in a row block
  const uint32_t table, lane_address;
  Unit unit;
  RingPosition<S.stages> at{0};
  static constexpr int AHEAD = S.accumulators - 1, TURNS = AHEAD > 1 ? S.accumulators : 2;
  uint32_t a[TURNS][4][4];   // fragments of the next step, this one, and those before it that are under way
  uint4 codes;               // of the next step
  float product[S.accumulators][RESULTS];
  float sum[S.stack * RESULTS];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < S.stack * RESULTS; ++i) sum[i] = 0.0f;
  }

  __device__ __forceinline__ uint4 load_codes(int stage, int step) const {
    const int tile = step / S.stack, stacked = step % S.stack;
    return ld_shared_u32x4(ring.codes(stage, row_tile + stacked * 4) + tile * TILE_BYTES + lane * LANE_BYTES);
  }

  // The codes of a step into its half of `a`.
  __device__ __forceinline__ void decode(int step) {
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      a[step % TURNS][i / 4][i % 4] = PairTable::decode_in_order(table, word[i / 4], lane_address, i % 4);
    }
  }

  // Before the first unit.
  __device__ __forceinline__ void start() {
    mbarrier_wait(ring.full(0), 0);
    codes = load_codes(0, 0);
    decode(0);
    codes = load_codes(0, 1);
  }

  // sum += scale * product of a step.
  __device__ __forceinline__ void fold(int step, float2 scale) {
    const float(&d)[RESULTS] = product[step % S.accumulators];
    float* const to = sum + step % S.stack * RESULTS;
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) to[i] = fmaf(d[i], i & 2 ? scale.y : scale.x, to[i]);
  }

  // One unit, of which step 0 is decoded and the codes of step 1 are loaded; does the same for the next one if there are
  // `more`.
  __device__ __forceinline__ void multiply(bool more) {
    const int stage = at.stage;
    const uint64_t x = wgmma_descriptor(ring.x(stage));
    at.step();
    float2 scale[S.accumulators] = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      float2& mine = scale[i % S.accumulators];
      if (i > 0) mine = scales.read(i, lane);
      wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        const int k16 = i / S.stack * (S.tokens * 128 / 16) + 2 * s;
        wgmma_m64k16<T>(product[i % S.accumulators], a[i % TURNS][s], x + k16, s != 0);
      }
      wgmma_commit_group();
      if (i == 0) {
        scales.decode(stage, unit.burst * S.burst, args.k_tiles - 1, lane);
        mine = scales.read(0, lane);
      }
      if (i == STEPS - 2 && more) mbarrier_wait(ring.full(at.stage), at.phase);
      const uint4 after_next = i < STEPS - 2 ? load_codes(stage, i + 2) : load_codes(at.stage, i + 2 - STEPS);
      if (AHEAD > 0) wgmma_wait_group<AHEAD>();  // the registers of the next step are free
      decode(i + 1);
      codes = after_next;
      if (AHEAD == 0) wgmma_wait_group<0>();
      if (i >= AHEAD) fold(i - AHEAD, scale[(i - AHEAD) % S.accumulators]);
    }
    wgmma_wait_group<0>();
#pragma unroll
    for (int i = STEPS - AHEAD; i < STEPS; ++i) fold(i, scale[i % S.accumulators]);
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty(stage));
    const int row_block = unit.row_block;
    unit.step(args, S.k_groups);
    scales.block += (unit.row_block - row_block) * S.block_rows() * args.blocks_per_row;
  }
};

// Fills what the whole block reads and nobody before it wrote, then feeds the rings.
template <int SHAPE>
__device__ __forceinline__ void produce(const SmallWgmmaArgs& args, const SmallWgmmaMaps& maps, const Stretch& stretch,
                                        const SmallWgmmaShared& map, const NestedGroups& second, char* smem, int warp,
                                        int lane) {
  constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  const bool nested = args.nested_code != nullptr, feeds = warp < S.k_groups && lane == 0;
  const Ring<SHAPE> ring(smem_address(smem), map, nested, feeds ? warp : 0);
  const Producer<SHAPE> producer = {args, maps, stretch, ring, warp};
  const Mailbox mailbox = {smem_address(smem + map.barriers) + S.k_groups * S.stages * 16};
  if (feeds) {
    if (warp == 0) mailbox.init(S.row_groups * 4);
    producer.init_barriers();
    producer.fill();
  }
  if (nested) {
    const int thread = warp * WARP + lane;
    for (int i = thread; i < 256; i += WARPGROUP) {
      cp_async_4(smem_address(smem + map.nested_code) + 4 * i, args.nested_code + i, true);
    }
    second.load_async(args, smem_address(smem + map.nested_absmax), thread, WARPGROUP);
    cp_async_wait_all();
  }
  __syncthreads();
  grid_wait();
  if (feeds) producer.run();
  // With four k groups there is no idle warp, and the courier starts when all copies have.
  if (warp == S.k_groups % 4) {
    __syncwarp();
    mailbox.serve(args, stretch, lane);
  }
}

// Multiplies and finishes, row block by row block.
template <class T, int SHAPE>
__device__ __forceinline__ void consume(const SmallWgmmaArgs& args, const Stretch& stretch, const SmallWgmmaShared& map,
                                        const NestedGroups& second, char* smem, int warp, int lane) {
  constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  const bool nested = args.nested_code != nullptr;
  const float nested_offset = nested ? __ldg(args.nested_offset) : 0.0f;
  PairTable::fill<S.consumers() * 4>(smem, args.codebook, warp, lane);
  __syncthreads();
  grid_wait();  // slots, flags and y may be in use until then

  const int k_group = warp / (S.row_groups * 4);
  const int row_tile = warp % (S.row_groups * 4) / 4 * (S.stack * 4) + warp % 4;
  const Ring<SHAPE> ring(smem_address(smem), map, nested, k_group);
  const Unit first(args, stretch.begin + k_group);
  const int row = (first.row_block - stretch.first_row_block) * S.block_rows() + row_tile * TILE_ROWS + lane / 4;
  const WarpScales<SHAPE> scales = {
      ring,
      nested ? reinterpret_cast<const float*>(smem + map.nested_code) : nullptr,
      reinterpret_cast<const float*>(smem + map.nested_absmax),
      nested_offset,
      args.log2_group,
      8 * args.blocks_per_row,
      smem_address(smem + map.scales) + warp * (S.steps() * TILE_ROWS * 4),
      row_tile,
      second.offset + row * args.blocks_per_row};
  Consumer<T, SHAPE> consumer = {args, ring, scales, row_tile, lane, smem_address(smem), PairTable::lane_address(lane), first};
  const Mailbox mailbox = {smem_address(smem + map.barriers) + S.k_groups * S.stages * 16};
  const Finish<T, SHAPE> finish(args, mailbox, reinterpret_cast<float*>(smem + map.sums), k_group);

  int u = stretch.begin + k_group;
  if (u < stretch.end) consumer.start();
  consumer.clear();
  for (int begin = stretch.begin; begin < stretch.end;) {
    const int row_block = begin / args.bursts, end = min(stretch.end, (row_block + 1) * args.bursts);
    for (; u < end; u += S.k_groups) consumer.multiply(u + S.k_groups < stretch.end);
    finish(consumer.sum, row_block, begin, end);
    consumer.clear();
    begin = end;
  }
}

template <class T, int SHAPE>
__global__ void __launch_bounds__(SMALL_WGMMA_SHAPES[SHAPE].threads(), 1)
    small_wgmma_kernel(const __grid_constant__ SmallWgmmaArgs args, const __grid_constant__ SmallWgmmaMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  constexpr RegisterShare REGISTERS(S.consumers());
  grid_launch_dependents();
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const Stretch stretch(args);
  const NestedGroups second(args, stretch.first_row_block * S.block_rows(), stretch.row_blocks * S.block_rows());
  const bool nested = args.nested_code != nullptr;
  const SmallWgmmaShared map(S, nested, nested ? second.count : 0);
  if (warp >= S.consumers() * 4) {
    setmaxnreg_dec<REGISTERS.producer>();
    produce<SHAPE>(args, maps, stretch, map, second, smem, warp - S.consumers() * 4, lane);
  } else {
    setmaxnreg_inc<REGISTERS.consumer>();
    consume<T, SHAPE>(args, stretch, map, second, smem, warp, lane);
  }
#endif
}

}  // namespace nf4l
