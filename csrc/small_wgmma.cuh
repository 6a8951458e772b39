// Engine for Hopper: y[m, n] = x[m, k] * weight^T + bias for 9..128 tokens, where mma.sync has too little to do for
// each weight that is decoded.
//
// The weight is the 64-row operand of wgmma m64nNk16, in registers, and the tokens are its N columns. So each weight is
// decoded once, by table look-up (decode.cuh), and x is read from shared memory by the tensor cores themselves.
//
// A block is one warpgroup that copies and two to four that multiply, 64 rows each. Units are (row block, burst of four
// or two tiles of 64 inputs), in one line over the whole weight, and each block of the grid walks a contiguous stretch
// of it, so that all end together whatever the shape. A unit travels through a ring in shared memory:
//
//     producer     wait empty | three boxes by TMA: x [burst][x_rows][64], codes, scales of all row tiles     | -> full
//                                                                                                               |
//     consumers    wait full | scales to float32 | tile 0   1   2   3 | -> empty                           <----'
//
//     a tile       fence | 4 wgmma, one a k16 step | commit | decode the next tile | wait | sum += scale * product
//
// The look-ups of the next tile run while the tensor cores work on this one: registers `a` hold two tiles. With two
// accumulators the wait is for the tile before, and its scaling overlaps too. ptxas gives up asynchrony altogether
// (C7514) when an accumulator is in use across the loop's back edge, so the last tile of a unit is always waited for.
//
// Scaling after the product costs less than scaling weights, and only the centroids are rounded to 16 bits, never the
// scales.
//
// Shared memory (offsets in small_wgmma_plan.h):
//   | pair table 64 KB | ring: x, codes | scale codes | nested_code | scales | barriers | nested_absmax |
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

// Block scales of the unit in hand, float32, in a buffer of the warp's own: [TILES][16], element 2 g + h of a tile is
// row g + 8 h.
template <int TILES>
struct WarpScales {
  const SmallWgmmaArgs& args;
  uint32_t buffer, nested_code, nested_absmax;
  float nested_offset;
  int block;  // of (row g of the row tile, tile 0), counted from the first second-level group at hand

  // `codes` of this row tile, whose unit begins with `tile`. Lane (g, t) decodes those of rows g and g + 8 for its tile
  // t.
  __device__ __forceinline__ void decode(uint32_t codes, int tile, int lane) const {
    const int g = lane / 4, t = lane % TILES;
    float2 scale;
    if (args.nested_code) {
      const uint32_t at_tile = codes + 8 * g + (TILES == BURST ? t : (tile + t) % BURST);  // codes cover four tiles
      const uint32_t low = ld_shared_u8(at_tile), high = ld_shared_u8(at_tile + 4);
      // A tile beyond the last takes its place in the table of groups: its products are zero.
      const int at = block + min(tile + t, args.k_tiles - 1), at_high = at + 8 * args.blocks_per_row;
      scale.x = nested_scale(ld_shared_f32(nested_code + 4 * low),
                             ld_shared_f32(nested_absmax + 4 * (at >> args.log2_group)), nested_offset);
      scale.y = nested_scale(ld_shared_f32(nested_code + 4 * high),
                             ld_shared_f32(nested_absmax + 4 * (at_high >> args.log2_group)), nested_offset);
    } else {
      scale = ld_shared_f32x2(codes + (t * TILE_ROWS + 2 * g) * 4);
    }
    __syncwarp();  // those of the unit before have been read
    st_shared_f32x2(buffer + (t * TILE_ROWS + 2 * g) * 4, scale);
    __syncwarp();
  }

  // Of rows g and g + 8.
  __device__ __forceinline__ float2 read(int j, int lane) const {
    return ld_shared_f32x2(buffer + (j * TILE_ROWS + lane / 4 * 2) * 4);
  }
};

// The units of one warp of a consumer, one after the other.
template <class T, int SHAPE>
struct Consumer {
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  static constexpr int RESULTS = S.lane_results(), AHEAD = S.accumulators - 1;
  // Tiles between the reading of codes and their use: with more tokens there are no registers for two.
  static constexpr int CODES_AHEAD = S.tokens <= 64 ? 2 : 1;
  const SmallWgmmaArgs& args;
  const Ring<SHAPE>& ring;
  WarpScales<S.burst> scales;
  const int row_tile, lane;  // row_tile: of the warp, in a row block
  const uint32_t table, lane_address;
  Unit unit;
  RingPosition<S.stages> at{0};
  uint32_t a[2][4][4];  // fragments of this tile and the next, by turns
  uint4 codes;          // of the next tile
  float product[S.accumulators][RESULTS];
  float sum[RESULTS];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) sum[i] = 0.0f;
  }

  __device__ __forceinline__ uint4 load_codes(int stage, int tile) const {
    return ld_shared_u32x4(ring.codes(stage, row_tile) + tile * TILE_BYTES + lane * LANE_BYTES);
  }

  // `codes` into tile j's half of `a`.
  __device__ __forceinline__ void decode(int j) {
    const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      a[j % 2][i / 4][i % 4] = PairTable::decode_in_order(table, word[i / 4], lane_address, i % 4);
    }
  }

  // Before the first unit.
  __device__ __forceinline__ void start() {
    mbarrier_wait(ring.full(0), 0);
    codes = load_codes(0, 0);
    decode(0);
    if (CODES_AHEAD == 2) codes = load_codes(0, 1);
  }

  // sum += scale * product of tile j.
  __device__ __forceinline__ void fold(int j, float2 scale) {
    const float(&d)[RESULTS] = product[j % S.accumulators];
#pragma unroll
    for (int i = 0; i < RESULTS; ++i) sum[i] = fmaf(d[i], i & 2 ? scale.y : scale.x, sum[i]);
  }

  // One unit, of which tile 0 is decoded and the next codes are loaded; does the same for the next one if there are
  // `more`. Whatever a tile needs is asked for before, so that nothing but wgmma is waited for between them.
  __device__ __forceinline__ void multiply(bool more) {
    const int stage = at.stage;
    const uint64_t x = wgmma_descriptor(ring.x(stage));
    at.step();
    float2 scale[2];
#pragma unroll
    for (int j = 0; j < S.burst; ++j) {
      if (j > 0) scale[j % 2] = scales.read(j, lane);
      wgmma_fence();
      const uint64_t x_tile = x + uint32_t(j * args.x_rows * (TILE_K4 * 2 / 16));
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        wgmma_m64k16<T>(product[j % S.accumulators], a[j % 2][s], x_tile + 2 * s, s != 0);
      }
      wgmma_commit_group();
      if (j == 0) {
        scales.decode(ring.scales(stage, row_tile), unit.burst * S.burst, lane);
        scale[0] = scales.read(0, lane);
      }
      if (j == S.burst - CODES_AHEAD && more) mbarrier_wait(ring.full(at.stage), at.phase);
      const int then = j + CODES_AHEAD;
      const uint4 loaded = then < S.burst ? load_codes(stage, then) : load_codes(at.stage, then - S.burst);
      if (AHEAD > 0) wgmma_wait_group<AHEAD>();  // the registers of the next tile are free
      if (CODES_AHEAD == 1) codes = loaded;
      decode(j + 1);
      if (CODES_AHEAD == 2) codes = loaded;
      if (AHEAD == 0 || j == S.burst - 1) {
        if (j >= AHEAD && AHEAD > 0) fold(j - 1, scale[(j - 1) % 2]);
        wgmma_wait_group<0>();
        fold(j, scale[j % 2]);
      } else if (j > 0) {
        fold(j - 1, scale[(j - 1) % 2]);
      }
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(ring.empty(stage));
    const int row_block = unit.row_block;
    unit.step(args);
    scales.block += (unit.row_block - row_block) * S.block_rows() * args.blocks_per_row;
  }
};

// What the way out needs to know.
template <class T, int SHAPE>
struct SmallWgmma {
  using Type = T;
  using Args = SmallWgmmaArgs;
  static constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  static constexpr bool ROW_SCALES = false, TRANSPOSES = false;
};

// One warp feeds the ring; the others fetch second-level scales meanwhile, and one thread of them is the courier.
template <int SHAPE>
__device__ __forceinline__ void produce(const SmallWgmmaArgs& args, const SmallWgmmaMaps& maps, const Stretch& stretch,
                                        char* smem, int warp, int lane) {
  constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  const bool nested = args.nested_code != nullptr;
  const SmallWgmmaShared map(S, nested, 0);
  const Ring<SHAPE> ring(smem_address(smem), map, nested);
  const Producer<SHAPE> producer = {args, maps, stretch, ring};
  const Mailbox mailbox = {smem_address(smem + map.barriers) + S.stages * 16};
  if (warp == 0) {
    producer.init();
    producer.fill();
    __syncthreads();
    producer.run();
    return;
  }
  const bool carries = warp == 1 && lane == 0;
  if (nested) {
    constexpr int THREADS = WARPGROUP - WARP;
    const int thread = (warp - 1) * WARP + lane;
    const NestedGroups second = stretch.nested_groups<SHAPE>(args);
    second.load_async(args, smem_address(smem + map.nested_absmax), thread, THREADS);
    for (int i = thread; i < 256; i += THREADS) {
      cp_async_4(smem_address(smem + map.nested_code) + 4 * i, args.nested_code + i, true);
    }
  }
  if (carries) mailbox.init(S.row_groups * 4);
  grid_wait();
  if (nested) cp_async_wait_all();
  __syncthreads();
  if (carries) mailbox.serve(args, stretch);
}

// Multiplies and finishes, row block by row block.
template <class T, int SHAPE>
__device__ __forceinline__ void consume(const SmallWgmmaArgs& args, const Stretch& stretch, char* smem, int warp,
                                        int lane) {
  constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  const bool nested = args.nested_code != nullptr;
  const SmallWgmmaShared map(S, nested, 0);
  const float nested_offset = nested ? __ldg(args.nested_offset) : 0.0f;
  PairTable::fill<S.row_tiles()>(smem, args.codebook, warp, lane);
  const Ring<SHAPE> ring(smem_address(smem), map, nested);
  const int row = warp * TILE_ROWS + lane / 4;
  const WarpScales<S.burst> scales = {
      args,
      smem_address(smem + map.scales) + warp * (S.burst * TILE_ROWS * 4),
      smem_address(smem + map.nested_code),
      smem_address(smem + map.nested_absmax),
      nested_offset,
      stretch.nested_groups<SHAPE>(args).offset + row * args.blocks_per_row};
  __syncthreads();
  grid_wait();  // slots and y may be in use until then

  Consumer<T, SHAPE> consumer = {args, ring, scales, warp, lane, smem_address(smem), PairTable::lane_address(lane),
                                Unit(args, stretch.begin)};
  const Mailbox mailbox = {smem_address(smem + map.barriers) + S.stages * 16};
  const Finish<SmallWgmma<T, SHAPE>> finish(args, mailbox);

  consumer.start();
  consumer.clear();
  for (int begin = stretch.begin; begin < stretch.end;) {
    const int row_block = begin / args.bursts, end = min(stretch.end, (row_block + 1) * args.bursts);
    for (int u = begin; u < end; ++u) consumer.multiply(u + 1 < stretch.end);
    finish(consumer.sum, row_block, begin, end);
    consumer.clear();
    begin = end;
  }
  finish.end(stretch);
}

template <class T, int SHAPE>
__global__ void __launch_bounds__(SMALL_WGMMA_SHAPES[SHAPE].threads(), 1)
    small_wgmma_kernel(const __grid_constant__ SmallWgmmaArgs args, const __grid_constant__ SmallWgmmaMaps maps) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) char smem[];
  constexpr SmallWgmmaShape S = SMALL_WGMMA_SHAPES[SHAPE];
  constexpr RegisterShare REGISTERS(S.row_groups);
  grid_launch_dependents();
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const Stretch stretch(args);
  if (warp >= S.row_tiles()) {
    setmaxnreg_dec<REGISTERS.producer>();
    produce<SHAPE>(args, maps, stretch, smem, warp - S.row_tiles(), lane);
  } else {
    setmaxnreg_inc<REGISTERS.consumer>();
    consume<T, SHAPE>(args, stretch, smem, warp, lane);
  }
#endif
}

}  // namespace nf4l
