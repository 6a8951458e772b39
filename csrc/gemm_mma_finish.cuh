// The mma.sync prefill engine's way out: an output tile's sums gathered, rounded and stored. The engine itself, with
// the story of all its files, is gemm_mma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_mma_load.cuh"
#include "gemm_mma_plan.h"
#include "mma_sm80.cuh"

namespace nf4l {

// For one thread; all threads of the block come here together, and the ring, empty then, holds what they hand to each
// other.
//
// Each group has the sums of its k tiles. It keeps some of the vectors of sums, gives away the others, adds to its own
// what the other group gives, and goes on with those. Where several blocks share a tile, each leaves what it has in a
// slot and counts itself in; the last one adds up all, block after block, the same bits at every call. So nobody waits
// for another block.
template <class T, int SHAPE>
struct GemmMmaFinish {
  static constexpr GemmMmaShape S = GEMM_MMA_SHAPES[SHAPE];
  // Vector v belongs to row tile v / COLUMNS and tokens 8 * (v % COLUMNS) to + 7. A group keeps every GROUPS-th.
  static constexpr int COLUMNS = S.tokens / 8, VECTORS = S.vectors();
  static constexpr int KEPT = (VECTORS + S.GROUPS - 1) / S.GROUPS;
  static constexpr int GIVEN = VECTORS * (S.GROUPS - 1) * S.GROUP_THREADS * 16;  // bytes
  // Results on their way out: a line of BLOCK_ROWS for a token, and 16 bytes for the banks' sake.
  static constexpr int LINE = S.BLOCK_ROWS * 2 + 16;
  static constexpr int RING = GemmMmaShared(S, GEMM_MMA_LEAST_STAGES).total - GemmMmaShared::RING;  // bytes
  static_assert(GIVEN <= RING && S.tokens * LINE <= RING);
  using Sums = float[S.ROW_TILES][COLUMNS][4];
  const GemmMmaArgs& args;
  const uint32_t ring;
  const int group, thread;  // of the group
  float4 kept[KEPT];

  __device__ __forceinline__ GemmMmaFinish(const GemmMmaArgs& a, uint32_t ring_)
      : args(a), ring(ring_), group(threadIdx.x / S.GROUP_THREADS), thread(threadIdx.x % S.GROUP_THREADS) {}

  __device__ __forceinline__ void operator()(const Sums& sums, const GemmPieces& piece) {
    __syncthreads();
    exchange(sums);
    if (piece.whole_tile() || share(piece)) store(OutTile(args.cut, piece.tile));
    __syncthreads();  // the ring may be filled again
  }

  // f(i, v): the i-th vector kept is v.
  template <class F>
  __device__ __forceinline__ void each(F f) {
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
      const int v = i * S.GROUPS + group;
      if (VECTORS % S.GROUPS == 0 || v < VECTORS) f(i, v);
    }
  }

  // Where the `from`-th of the other groups leaves vector v.
  __device__ __forceinline__ uint32_t given(int v, int from) const {
    return ring + ((v * (S.GROUPS - 1) + from) * S.GROUP_THREADS + thread) * 16;
  }

  __device__ __forceinline__ void exchange(const Sums& sums) {
#pragma unroll
    for (int i = 0; i < KEPT; ++i) {
#pragma unroll
      for (int owner = 0; owner < S.GROUPS && i * S.GROUPS + owner < VECTORS; ++owner) {
        const int v = i * S.GROUPS + owner;
        const float* s = sums[v / COLUMNS][v % COLUMNS];
        const float4 vector = make_float4(s[0], s[1], s[2], s[3]);
        // A choice and no branch: a register that is only sometimes written would be kept alive through the loops
        // before.
        kept[i] = owner == 0 || owner == group ? vector : kept[i];
        if (owner != group) st_shared_f32x4(given(v, group - (group > owner)), vector);
      }
    }
    __syncthreads();
    each([&](int i, int v) {
#pragma unroll
      for (int from = 0; from < S.GROUPS - 1; ++from) add(kept[i], ld_shared_f32x4(given(v, from)));
    });
  }

  __device__ __forceinline__ static void add(float4& sum, float4 v) {
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }

  // A block has two slots, because it may share two tiles: `first` is that of the one it begins.
  __device__ __forceinline__ float4* slot(int block, bool first) const {
    return args.slots + int64_t(2 * block + first) * (VECTORS * S.GROUP_THREADS) + thread;
  }

  // True for the block that has all sums then.
  __device__ __forceinline__ bool share(const GemmPieces& piece) {
    const GemmSharers sharers(args.cut, piece.tile);
    float4* const mine = slot(blockIdx.x, piece.begin == 0);
    each([&](int i, int v) { __stcg(mine + v * S.GROUP_THREADS, kept[i]); });
    __syncthreads();
    bool last = false;
    if (threadIdx.x == 0) {
      unsigned* const counter = args.arrivals + sharers.first;  // no other tile begins in that block
      last = atom_add_acq_rel(counter, 1u) == unsigned(sharers.count - 1);
      if (last) *counter = 0;
    }
    if (!__syncthreads_or(last)) return false;
#pragma unroll
    for (int i = 0; i < KEPT; ++i) kept[i] = make_float4(0, 0, 0, 0);
    for (int block = 0; block < sharers.count; ++block) {
      const float4* from = slot(sharers.first + block, block == 0);
      float4 left[KEPT];
      each([&](int i, int v) { left[i] = __ldcg(from + v * S.GROUP_THREADS); });
      each([&](int i, int) { add(kept[i], left[i]); });
    }
    return true;
  }

  // A lane has rows g and g + 8 of each row tile, tokens 2 t and 2 t + 1 of each eight; y wants neighbouring rows
  // together, so 8x8 matrices are transposed on the way into lines, from which whole ones are stored.
  __device__ __forceinline__ void store(OutTile out) {
    const int warp = thread / WARP, g = thread % WARP / 4, t = thread % 4;
    const int first_row = out.row_block * S.BLOCK_ROWS, first_token = out.token_tile * S.tokens;
    float bias[2 * S.ROW_TILES];
#pragma unroll
    for (int i = 0; i < 2 * S.ROW_TILES; ++i) {
      bias[i] = bias_of(first_row + warp * (S.ROW_TILES * TILE_ROWS) + 8 * i + g);
    }
    __syncthreads();  // what groups gave each other has been read
    each([&](int i, int v) {
      const bool second = v >= COLUMNS;  // row tile
      const int column = second ? v - COLUMNS : v, row = (warp * S.ROW_TILES + second) * TILE_ROWS;
      const float low = second ? bias[2] : bias[0], high = second ? bias[3] : bias[1];
      const uint32_t to = ring + (column * 8 + g) * LINE + (row + 2 * t) * 2;
      st_shared_u32(to, movmatrix_trans(round_pair<T>(kept[i].x + low, kept[i].y + low)));
      st_shared_u32(to + 16, movmatrix_trans(round_pair<T>(kept[i].z + high, kept[i].w + high)));
    });
    __syncthreads();
    constexpr int CHUNKS = S.BLOCK_ROWS / 8, STEP = S.THREADS / CHUNKS;
    const int column = threadIdx.x % CHUNKS * 8, rows = args.n - first_row - column;
    const int tokens = min(args.m - first_token, S.tokens);
#pragma unroll 4
    for (int line = threadIdx.x / CHUNKS; line < tokens; line += STEP) {
      uint16_t* const to = static_cast<uint16_t*>(args.y) + int64_t(first_token + line) * args.n + first_row + column;
      put(ring + line * LINE + column * 2, to, rows);
    }
  }

  __device__ __forceinline__ float bias_of(int row) const {
    return args.bias && row < args.n ? to_float(static_cast<const T*>(args.bias)[row]) : 0.0f;
  }

  // As many of a chunk's eight values as there are rows.
  __device__ __forceinline__ void put(uint32_t chunk, uint16_t* to, int rows) const {
    if (args.vectors) {
      if (rows > 0) *reinterpret_cast<uint4*>(to) = ld_shared_u32x4(chunk);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8 && e < rows; ++e) to[e] = ld_shared_u16(chunk + 2 * e);
    }
  }
};

}  // namespace nf4l
