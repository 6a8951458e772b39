// The prefill engine's way out: an output tile's sums gathered, rounded and stored. The engine itself, with the story
// of all its files, is gemm_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_wgmma_load.cuh"
#include "gemm_wgmma_plan.h"
#include "wgmma_sm90.cuh"

namespace nf4l {

// A warpgroup's rows of output tiles.
//
// A tile's tokens are stored in steps of STORE_TOKENS. Where the blocks of a cluster have a slice of its k tiles each,
// they do it together (GemmShares): all wait until nobody's tensor cores read shared memory any more, send to the
// others what those will store, wait again, and add to their own steps what they were sent, in the order of the slices.
// Blocks of a cluster run at the same time, so that nobody waits for one that has not started.
template <class Format, class T, int SHAPE>
struct GemmFinish {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  static constexpr int LINE_BYTES = Format::BYTES.stride;
  static constexpr int STEPS = S.store_steps();
  static constexpr int STEP_VECTORS = S.STORE_TOKENS / 8;  // float4 of a lane: rows g, g + 8, two tokens
  using Sums = float[S.tokens / 2];
  const GemmArgs<typename Format::Weight>& args;
  const uint32_t received;  // [places][warpgroups][STEP_VECTORS][128] float4, in the ring
  const uint32_t buffers;   // two
  const int warpgroup, thread;

  // The sums of a piece of work.
  __device__ __forceinline__ void operator()(Sums& sums, const GemmWork& work) const {
    int from = 0, to = STEPS;
    if (work.sliced) {
      const GemmShares shares = {STEPS, args.grid.blocks};
      cluster_sync_threads();
      send(sums, shares, work.rank);
      cluster_sync();
      collect(sums, shares, work.rank);
      from = shares.first(work.rank), to = shares.first(work.rank + 1);
    }
    store(sums, work, from, to);
  }

  __device__ __forceinline__ uint32_t place(const GemmShares& shares, int step, int from) const {
    constexpr int WARPGROUP_BYTES = STEP_VECTORS * WARPGROUP * 16;
    static_assert(S.step_bytes() == S.consumers * WARPGROUP_BYTES);
    return received + shares.place(step, from) * S.step_bytes() + warpgroup * WARPGROUP_BYTES + thread * 16;
  }

  __device__ __forceinline__ void send(const Sums& sums, const GemmShares& shares, int slice) const {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      const int to = shares.owner(step);
      if (to == slice) continue;
      const uint32_t at = cluster_address(place(shares, step, slice), to);
#pragma unroll
      for (int i = 0; i < STEP_VECTORS; ++i) {
        const float* v = sums + 4 * (step * STEP_VECTORS + i);
        st_cluster_f32x4(at + i * (WARPGROUP * 16), {v[0], v[1], v[2], v[3]});
      }
    }
  }

  __device__ __forceinline__ void collect(Sums& sums, const GemmShares& shares, int slice) const {
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (shares.owner(step) != slice) continue;
#pragma unroll 1
      for (int from = 0; from < shares.slices; ++from) {
        if (from == slice) continue;
        const uint32_t at = place(shares, step, from);
#pragma unroll
        for (int i = 0; i < STEP_VECTORS; ++i) {
          const float4 v = ld_shared_f32x4(at + i * (WARPGROUP * 16));
          float* sum = sums + 4 * (step * STEP_VECTORS + i);
          sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
        }
      }
    }
  }

  // Steps from .. to_step - 1 of a tile, each warp by itself. A lane has rows g and g + 8 of its warp's 16, tokens 2 t
  // and 2 t + 1 of each eight; y wants neighbouring rows together, so 8x8 matrices are transposed on the way into a
  // buffer of STORE_TOKENS lines of 64 rows, whose chunks of eight rows are swizzled for the banks' sake. A warp has
  // two chunks of each line.
  __device__ __forceinline__ void store(const Sums& sums, const GemmWork& work, int from, int to_step) const {
    constexpr int LINES = WARP / 2;  // that a warp stores at once: 32 bytes of each
    const int lane = thread % WARP, warp = thread / WARP;
    const int first_row = work.row_block * S.block_rows() + warpgroup * WARPGROUP_ROWS + warp * TILE_ROWS;
    const float2 bias = {bias_of(first_row + lane / 4), bias_of(first_row + lane / 4 + 8)};
    const int column = first_row + lane % 2 * 8;
    int token = work.token_tile * S.tokens + from * S.STORE_TOKENS + lane / 2;
    uint16_t* to = static_cast<uint16_t*>(args.y) + int64_t(token) * args.n + column;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step < from || step >= to_step) continue;
      const uint32_t buffer = buffers + step % 2 * (S.STORE_TOKENS * LINE_BYTES);
#pragma unroll
      for (int j = 0; j < STEP_VECTORS; j += 2) {
        const float* v = sums + 4 * (step * STEP_VECTORS + j);
        const int line = (j + lane / 16) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        stmatrix_x4_trans(buffer + line * LINE_BYTES + ((chunk ^ lane % 8) << 4),
                          round_pair<T>(v[0] + bias.x, v[1] + bias.x), round_pair<T>(v[2] + bias.y, v[3] + bias.y),
                          round_pair<T>(v[4] + bias.x, v[5] + bias.x), round_pair<T>(v[6] + bias.y, v[7] + bias.y));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < S.STORE_TOKENS / LINES; ++i) {
        const int line = i * LINES + lane / 2, chunk = warp * 2 + lane % 2;
        if (token < args.m) put(buffer + line * LINE_BYTES + ((chunk ^ line % 8) << 4), to, args.n - column);
        token += LINES;
        to += LINES * int64_t(args.n);
      }
    }
    __syncwarp();  // the buffers have been read
  }

  __device__ __forceinline__ float bias_of(int row) const {
    return args.bias && row < args.n ? to_float(static_cast<const T*>(args.bias)[row]) : 0.0f;
  }

  // As many of a chunk's eight values as there are rows.
  __device__ __forceinline__ void put(uint32_t chunk, uint16_t* to, int rows) const {
    if (args.vectors) {
      if (rows > 0) st_global_u32x4(to, ld_shared_u32x4(chunk));
    } else {
#pragma unroll 1
      for (int e = 0; e < 8 && e < rows; ++e) to[e] = ld_shared_u16(chunk + 2 * e);
    }
  }
};

}  // namespace nf4l
