// Engine: y[m, n] = x[m, k] * weight^T + bias for few tokens, where the time is that of reading the weight once.
//
// The weight is the 16-row operand of mma.m16n8k16 and the tokens are its 8 columns, so a 512-byte tile of tile16x64
// goes from memory to registers in one 16-byte read a lane, and from there to A fragments by table look-up
// (decode.cuh). Nothing else touches the codes: no ring in shared memory, whose bandwidth the look-ups need, and no
// barrier.
//
// A block owns a part of the row groups and a slice of the inputs. Its units, (row group, burst of four tiles), lie in
// one line, and each warp walks a contiguous stretch of it, so that all warps end together whatever the shape:
//
//     group      |      0      |      1      |      2      |          A stretch that starts inside a group leaves that
//     units      |. . . . . . .|. . . . . . .|. . . . . . .|          group's tail in shared memory; the warp that has
//     warp       |0 0 0 0 0|1 1 1 1 1|2 2 2 2 2|3 3 3 3 3 3|          the group's start adds the tails up, in order.
//
// Slices leave partial sums in the workspace; the block that arrives last at a part's counter adds them, in order. So
// the result has the same bits at every call.
//
// A unit, on one warp:
//   scales   lane (g, t) = (lane / 4, lane % 4) decodes those of rows g and g + 8 for tile t, into shared memory;
//   load     the next burst is issued, into the other half of the registers;
//   multiply each tile: 16 look-ups, 4 mma for 8 tokens from zero, then acc += scale * product. Scaling after the
//            product costs less than scaling weights, and only the centroids are rounded to 16 bits, never the scales.
//
// Shared memory (offsets in small_batch_plan.h):
//   | pair table 64 KB | nested_code | scales of bursts | tails | nested_absmax | activations of the slice |
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "convert.cuh"
#include "copy.cuh"
#include "decode.cuh"
#include "layout.h"
#include "mma_sm80.cuh"
#include "scale.cuh"
#include "small_batch_load.cuh"
#include "small_batch_plan.h"

namespace nf4l {

// A lane's results of one row group, float32: rows g and g + 8 of each tile, tokens 2 t and 2 t + 1 of each token tile.
template <int R, int TOKENS>
struct Results {
  static constexpr int COLUMN_TILES = TOKENS == 1 ? 1 : TOKENS / 8;
  static constexpr int COUNT = SmallBatchShape{R, TOKENS, 0}.lane_results();
  float value[R][COLUMN_TILES][4];

  // f(result, i), i = 0 .. COUNT - 1, for those that mean something.
  template <class F>
  __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (TOKENS > 1) f(value[r][c][i], (r * COLUMN_TILES + c) * 4 + i);
          else if (i % 2 == 0) f(value[r][c][i], r * 2 + i / 2);
        }
      }
    }
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < R * COLUMN_TILES * 4; ++i) (&value[0][0][0])[i] = 0.0f;
  }

  // To and from memory, 32 lanes side by side; `at` is the lane's first.
  __device__ __forceinline__ void put(float* at) {
    each([&](float& v, int i) { at[i * WARP] = v; });
  }
  __device__ __forceinline__ void add(const float* at) {
    each([&](float& v, int i) { v += at[i * WARP]; });
  }

  // To and from the workspace, CHUNK results of a lane side by side; `slot` holds a row group's results of all lanes.
  static constexpr int CHUNK = COUNT % 4 == 0 ? 4 : 2;
  using Chunk = std::conditional_t<CHUNK == 4, float4, float2>;

  __device__ __forceinline__ void put_partial(float* slot, int lane) {
    float v[COUNT];
    each([&](float& x, int i) { v[i] = x; });
#pragma unroll
    for (int i = 0; i < COUNT; i += CHUNK) {
      __stcg(reinterpret_cast<Chunk*>(slot + i * WARP) + lane, reinterpret_cast<const Chunk&>(v[i]));
    }
  }

  // Adds the slots of `slices` slices, `stride` floats apart, in order. Loads of a batch are in flight together.
  __device__ __forceinline__ void add_partials(const float* slot, int slices, int64_t stride, int lane) {
    constexpr int BATCH = 64 / COUNT < 8 ? 64 / COUNT : 8;
    for (int first = 0; first < slices; first += BATCH) {
      float v[BATCH][COUNT];
#pragma unroll
      for (int j = 0; j < BATCH; ++j) {
#pragma unroll
        for (int i = 0; i < COUNT; i += CHUNK) {
          const Chunk* from = reinterpret_cast<const Chunk*>(slot + (first + j) * stride + i * WARP) + lane;
          reinterpret_cast<Chunk&>(v[j][i]) = first + j < slices ? __ldcg(from) : Chunk{};
        }
      }
#pragma unroll
      for (int j = 0; j < BATCH; ++j) each([&](float& x, int i) { x += v[j][i]; });
    }
  }

  // value += scale * (a * b) for tile row r; scale.x belongs to row g, scale.y to row g + 8.
  template <class T>
  __device__ __forceinline__ void multiply(int r, const uint32_t (&a)[16], const uint32_t (&b)[COLUMN_TILES][8],
                                           float2 scale) {
#pragma unroll
    for (int c = 0; c < COLUMN_TILES; ++c) {
      float d[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int s = 0; s < 4; ++s) mma_m16n8k16<T>(d, a + 4 * s, b[c][2 * s], b[c][2 * s + 1]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (TOKENS > 1 || i % 2 == 0) value[r][c][i] = fmaf(d[i], i < 2 ? scale.x : scale.y, value[r][c][i]);
      }
    }
  }

  // Rounding and output of row group `group`. `result_of(row)` gives what makes a result of a sum of that row; the
  // results of a row are `token_stride` values of y apart, those of a token `row_stride`.
  template <class T, class Args, class ResultOf>
  __device__ __forceinline__ void store(const Args& a, int64_t token_stride, int64_t row_stride, int group, int lane,
                                        ResultOf result_of) const {
    const int g = lane / 4, t = lane % 4;
    if (TOKENS == 1 && t != 0) return;
#pragma unroll
    for (int r = 0; r < R; ++r) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = (group * R + r) * TILE_ROWS + g + 8 * h;
        if (row >= a.n) continue;
        const auto result = result_of(row);
        T* const y = static_cast<T*>(a.y) + row * row_stride;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
#pragma unroll
          for (int e = 0; e < (TOKENS == 1 ? 1 : 2); ++e) {
            const int token = c * 8 + t * 2 + e;
            if (token < a.m) y[token * token_stride] = round_to<T>(result(value[r][c][2 * h + e]));
          }
        }
      }
    }
  }
};

// Block scales of the burst in hand, float32, in a buffer of the warp's own: [R][BURST][16], element 2 g + h of a tile
// is row g + 8 h. Decoding them once here and not in every lane that needs them saves a fifth of the instructions.
template <int R>
struct ScaleBuffer {
  uint32_t buffer;
  const float *nested_code, *nested_absmax;  // shared memory; NULL with plain absmax
  float nested_offset;
  int group_shift, row_blocks;
  int block;  // of (row g of the group, tile 0 of the slice), counted from the first second-level group at hand

  __device__ __forceinline__ void decode(const uint2 (&raw)[R], int tile, int last_tile, int lane) const {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < R; ++r) {
      float2 scale = {__uint_as_float(raw[r].x), __uint_as_float(raw[r].y)};
      if (nested_code) {
        // A tile beyond the last takes its place in the table of groups: its products are zero.
        const int at = block + r * TILE_ROWS * row_blocks + min(tile + t, last_tile);
        const float absmax_g = nested_absmax[at >> group_shift];
        const float absmax_g8 = nested_absmax[(at + 8 * row_blocks) >> group_shift];
        scale.x = nested_scale(nested_code[raw[r].x >> 8 * t & 255], absmax_g, nested_offset);
        scale.y = nested_scale(nested_code[raw[r].y >> 8 * t & 255], absmax_g8, nested_offset);
      }
      st_shared_f32x2(buffer + ((r * BURST + t) * TILE_ROWS + 2 * g) * 4, scale);
    }
  }

  // Of rows g and g + 8.
  __device__ __forceinline__ float2 read(int r, int j, int lane) const {
    return ld_shared_f32x2(buffer + ((r * BURST + j) * TILE_ROWS + lane / 4 * 2) * 4);
  }
};

// Bias and output of row group `group`.
template <class T, int R, int TOKENS>
__device__ __forceinline__ void store_biased(const SmallBatchArgs& a, const Results<R, TOKENS>& sum, int group,
                                             int lane) {
  sum.template store<T>(a, a.n, 1, group, lane, [&](int row) {
    const float bias = a.bias ? to_float(static_cast<const T*>(a.bias)[row]) : 0.0f;
    return [bias](float v) { return v + bias; };
  });
}

// The units of one warp, one after the other.
template <class T, int R, int TOKENS, int WARPS>
struct WarpWalk {
  using Sum = Results<R, TOKENS>;
  const SmallBatchArgs& args;
  const BlockWork& work;
  const int lane;
  WeightStream<R>& weights;
  ScaleBuffer<R>& scales;
  const Activations<TOKENS, WARPS * WARP>& activations;
  float* const tail;          // where this warp leaves one
  const uint32_t table, lane_address;
  int group, burst;           // of the next unit, in the block
  bool inside;                // the stretch began inside `group`, so another warp owns it
  uint32_t b[Sum::COLUMN_TILES][8] = {};
  Sum sum;

  template <int S>
  __device__ __forceinline__ void unit(bool load_next) {
    const int tile = burst * BURST;
    scales.decode(weights.scales[S], tile, work.tiles - 1, lane);
    if (load_next) {
      uint32_t after = weights.codes[S][BURST - 1][R - 1].x & args.zero;
      asm volatile("" : "+r"(after));
      weights.template load<S ^ 1>(args, work, lane, after);
    }
    __syncwarp();  // the scales are written
#pragma unroll
    for (int j = 0; j < BURST; ++j) {
      activations.fragments(b, tile + j, lane);
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const uint4 codes = weights.codes[S][j][r];
        const uint32_t word[4] = {codes.x, codes.y, codes.z, codes.w};
        const float2 scale = scales.read(r, j, lane);
        uint32_t a[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) a[i] = PairTable::decode(table, word[i / 4], lane_address, i % 4);
        sum.template multiply<T>(r, a, b, scale);
      }
    }
    __syncwarp();  // and read
    if (++burst == work.bursts) next_group();
  }

  __device__ __forceinline__ void next_group() {
    if (inside) sum.put(tail);
    else finish();
    sum.clear();
    inside = false;
    burst = 0;
    ++group;
    scales.block += R * TILE_ROWS * args.blocks_per_row;
  }

  // The sum of a whole row group over the slice.
  __device__ __forceinline__ void finish() {
    const int whole_group = work.first_group + group;
    if (gridDim.y == 1) store_biased<T>(args, sum, whole_group, lane);
    else sum.put_partial(args.partials + (int64_t(blockIdx.y) * args.groups + whole_group) * (Sum::COUNT * WARP), lane);
  }
};

// The end of a walk. A stretch that ended inside a group leaves its tail, or, where it has the group's start, adds up
// those of the warps behind it. All warps come here together.
template <int WARPS, class Walk>
__device__ __forceinline__ void close_stretch(Walk& walk, int warp, const float* tails) {
  const int units = walk.work.units, begin = units * warp / WARPS, end = units * (warp + 1) / WARPS;
  const bool open = walk.burst != 0 && begin < end;
  if (open && walk.inside) walk.sum.put(walk.tail);
  __syncthreads();
  if (open && !walk.inside) {
    const int group_end = (walk.group + 1) * walk.work.bursts;
    for (int w = warp + 1; w < WARPS && units * w / WARPS < group_end; ++w) {
      if (units * w / WARPS < units * (w + 1) / WARPS) walk.sum.add(tails + w * (Walk::Sum::COUNT * WARP));
    }
    walk.finish();
  }
}

// The last block of a part adds the slices' sums and gives them to store(sum, group); every block comes here.
template <class Sum, int WARPS, class Args, class Store>
__device__ __forceinline__ void add_slices(const Args& a, const BlockWork& work, bool* is_last, int warp, int lane,
                                           Store store) {
  const int slices = gridDim.y;
  __syncthreads();
  if (threadIdx.x == 0) {
    *is_last = atom_add_acq_rel(a.arrivals + blockIdx.x, 1u) == unsigned(slices - 1);
    if (*is_last) a.arrivals[blockIdx.x] = 0;
  }
  __syncthreads();
  if (!*is_last) return;
  constexpr int SLOT = Sum::COUNT * WARP;
  for (int i = warp; i < work.groups; i += WARPS) {
    const int group = work.first_group + i;
    Sum sum;
    sum.clear();
    sum.add_partials(a.partials + int64_t(group) * SLOT, slices, int64_t(a.groups) * SLOT, lane);
    store(sum, group);
  }
}

template <class T, int R, int TOKENS, int WARPS>
__global__ void __launch_bounds__(WARPS* WARP, 1) small_batch_kernel(const __grid_constant__ SmallBatchArgs args) {
  extern __shared__ __align__(1024) char smem[];
  constexpr int THREADS = WARPS * WARP;
  constexpr SmallBatchShape SHAPE = {R, TOKENS, WARPS};
  grid_launch_dependents();
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const BlockWork work(args);
  const int begin = work.units * warp / WARPS, end = work.units * (warp + 1) / WARPS;

  // The first burst goes first: whatever is issued behind it also arrives behind it, and is small. A dependent launch
  // has time for a second; otherwise that would only be waited for together with the first (see WeightStream::load).
  WeightStream<R> weights(args, work, begin, end, lane);
  weights.template load<0>(args, work, lane, 0);
  if (args.dependent) weights.template load<1>(args, work, lane, 0);

  const bool nested = args.nested_code != nullptr;
  const NestedGroups second(args, work.first_group * R * TILE_ROWS, work.groups * R * TILE_ROWS);
  const SmallBatchShared map(SHAPE, nested ? second.count : 0, args.slice_tiles);
  float* const nested_code = reinterpret_cast<float*>(smem + map.nested_code);
  float* const nested_absmax = reinterpret_cast<float*>(smem + map.nested_absmax);
  float nested_offset = 0.0f;
  if (nested) {
    const uint32_t to = smem_address(nested_code);
    for (int i = threadIdx.x; i < 256; i += THREADS) cp_async_4(to + 4 * i, args.nested_code + i, true);
    second.load_async(args, smem_address(nested_absmax), threadIdx.x, THREADS);
    nested_offset = __ldg(args.nested_offset);
  }
  using X = Activations<TOKENS, THREADS>;
  const uint32_t x_smem = smem_address(smem + map.activations);
  if (!args.dependent) X::load_async(args, work, x_smem);
  PairTable::fill<WARPS>(smem, args.codebook, warp, lane);
  if (args.dependent) {
    grid_wait();
    X::load_async(args, work, x_smem);
  }
  cp_async_wait_all();
  __syncthreads();

  const int group = begin / work.bursts, burst = begin - group * work.bursts;
  ScaleBuffer<R> scales = {smem_address(smem + map.scales) + warp * R * BURST * TILE_ROWS * 4,
                           nested ? nested_code : nullptr, nested_absmax, nested_offset, args.log2_group,
                           args.blocks_per_row,
                           second.offset + (group * R * TILE_ROWS + lane / 4) * args.blocks_per_row + work.first_tile};
  const X activations(x_smem, lane);
  float* const tails = reinterpret_cast<float*>(smem + map.tails) + lane;
  constexpr int TAIL = SHAPE.lane_results() * WARP;
  WarpWalk<T, R, TOKENS, WARPS> walk = {args, work, lane, weights, scales, activations, tails + warp * TAIL,
                                        smem_address(smem), PairTable::lane_address(lane), group, burst, burst != 0};
  walk.sum.clear();
  for (int u = begin; u < end; u += 2) {
    walk.template unit<0>(u > begin || !args.dependent);
    if (u + 1 < end) walk.template unit<1>(true);
  }

  close_stretch<WARPS>(walk, warp, tails);
  if (gridDim.y > 1) {
    using Sum = Results<R, TOKENS>;
    const auto store = [&](const Sum& sum, int row_group) { store_biased<T>(args, sum, row_group, lane); };
    add_slices<Sum, WARPS>(args, work, reinterpret_cast<bool*>(nested_code), warp, lane, store);
  }
}

}  // namespace nf4l
