// The prefill engine's way out: an output tile's sums gathered, rounded and stored. The engine itself, with the story of all
// its files, is gemm_wgmma.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "gemm_wgmma_load.cuh"
#include "gemm_wgmma_plan.h"
#include "wgmma_sm90.cuh"

namespace nf4l {

// A warpgroup's rows of output tiles. They have nothing to do with the other warpgroups': each has its barrier, its part of the
// slots and its byte of the counters.
//
// A tile's tokens are stored in steps of STORE_TOKENS. Where several blocks share a tile (gemm_wgmma_plan.h), each of them
// leaves in a slot what others will store and counts itself in; then each finisher waits for all, adds to its own steps what
// the others left, in the order of the blocks, the same bits at every call, and counts itself out; the last one clears the counter. Blocks start
// in order, so of all that run, only those of one tile can wait for blocks that have not started.
template <class Format, class T, int SHAPE>
struct GemmFinish {
  static constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  static constexpr int LINE_BYTES = GemmShared(S, Format::BYTES).out_line;
  static constexpr int STEPS = S.tokens / S.STORE_TOKENS;
  static constexpr int STEP_VECTORS = S.STORE_TOKENS / 8;  // float4 of a lane: rows g, g + 8, two tokens
  using Sums = float[S.tokens / 2];
  const GemmArgs<typename Format::Weight>& args;
  const uint32_t buffers;  // two
  const int warpgroup, thread;

  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(2 + warpgroup) : "memory"); }

  // The sums of a piece.
  __device__ __forceinline__ void operator()(Sums& sums, const GemmPieces& piece) const {
    int from = 0, to = STEPS;  // steps that this block stores
    if (!piece.whole_tile() && !share(sums, piece, from, to)) return;
    store(sums, OutTile(args.cut, piece.tile), from, to);
  }

  // Leaves to the other blocks and takes from them; false where they do the rest.
  __device__ __forceinline__ bool share(Sums& sums, const GemmPieces& piece, int& from, int& to) const {
    const GemmSharers sharers(args.cut, piece.tile);
    const bool finishes = piece.last();
    const int me = blockIdx.x - sharers.first, finishers = sharers.finishers;
    // finisher() grows with the step.
    from = finishes ? (me * STEPS + finishers - 1) / finishers : STEPS;
    to = finishes ? ((me + 1) * STEPS + finishers - 1) / finishers : STEPS;
    leave(sums, piece.begin == 0, from, to);
    unsigned* const counter = args.raised + sharers.first;
    const int shift = 8 * warpgroup;
    sync();
    if (thread == 0) red_add_release_gpu(counter, 1u << shift);
    if (!finishes) return false;
    if (thread == 0) {
      while ((ld_acquire_gpu(counter) >> shift & 255) < unsigned(sharers.count)) {
      }
      const unsigned last = sharers.count + finishers - 1;
      if ((atomicAdd(counter, 1u << shift) >> shift & 255) == last) atomicSub(counter, (last + 1) << shift);
    }
    sync();
    collect(sums, sharers, from, to);
    return true;
  }

  // A block has two slots, because it may share two tiles: `first` is that of the one it begins.
  __device__ __forceinline__ float4* slot(int block, bool first) const {
    constexpr int VECTORS = STEPS * STEP_VECTORS;
    return args.slots + (int64_t(2 * block + first) * S.consumers + warpgroup) * (VECTORS * WARPGROUP) + thread;
  }

  // All but steps from .. to - 1.
  __device__ __forceinline__ void leave(const Sums& sums, bool first, int from, int to) const {
    float4* at = slot(blockIdx.x, first);
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step >= from && step < to) continue;
#pragma unroll
      for (int i = step * STEP_VECTORS; i < (step + 1) * STEP_VECTORS; ++i) {
        __stcg(at + i * WARPGROUP, make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
      }
    }
    __threadfence();
  }

  // Adds what the other sharers left of steps from .. to - 1, block after block; reads of two blocks and two steps are under
  // way together. A step beside them may come with them: it is not stored.
  __device__ __forceinline__ void collect(Sums& sums, const GemmSharers& sharers, int from, int to) const {
    constexpr int STEP_PAIR = 2 * STEP_VECTORS;
    static_assert(STEPS % 2 == 0, "steps come in pairs");
    const int stop = sharers.first + sharers.count;
#pragma unroll
    for (int step = 0; step < STEPS; step += 2) {
      if (step + 1 < from || step >= to) continue;
#pragma unroll 1
      for (int block = sharers.first; block < stop; block += 2) {
        float4 v[2][STEP_PAIR];
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          const bool other = block + b < stop && block + b != int(blockIdx.x);
          const float4* at = slot(block + b, block + b == sharers.first) + step * STEP_VECTORS * WARPGROUP;
#pragma unroll
          for (int i = 0; i < STEP_PAIR; ++i) v[b][i] = other ? __ldcg(at + i * WARPGROUP) : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int b = 0; b < 2; ++b) {
#pragma unroll
          for (int i = 0; i < STEP_PAIR; ++i) {
            float* sum = sums + 4 * (step * STEP_VECTORS + i);
            sum[0] += v[b][i].x, sum[1] += v[b][i].y, sum[2] += v[b][i].z, sum[3] += v[b][i].w;
          }
        }
      }
    }
  }

  // Steps from .. to - 1 of a tile, each warp by itself. A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of
  // each eight; y wants neighbouring rows together, so 8x8 matrices are transposed on the way into a buffer of STORE_TOKENS
  // lines of 64 rows, whose chunks of eight rows are swizzled for the banks' sake. A warp has two chunks of each line.
  __device__ __forceinline__ void store(const Sums& sums, OutTile out, int from, int to_step) const {
    constexpr int LINES = WARP / 2;  // that a warp stores at once: 32 bytes of each
    const int lane = thread % WARP, warp = thread / WARP;
    const int first_row = out.row_block * S.block_rows() + warpgroup * WARPGROUP_ROWS + warp * TILE_ROWS;
    const float2 bias = {bias_of(first_row + lane / 4), bias_of(first_row + lane / 4 + 8)};
    const int column = first_row + lane % 2 * 8;
    int token = out.token_tile * S.tokens + from * S.STORE_TOKENS + lane / 2;
    uint16_t* to = static_cast<uint16_t*>(args.y) + int64_t(token) * args.n + column;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
      if (step < from || step >= to_step) continue;
      const uint32_t buffer = buffers + step % 2 * (S.STORE_TOKENS * LINE_BYTES);
#pragma unroll
      for (int j = 0; j < STEP_VECTORS; j += 2) {
        const float* v = sums + 4 * (step * STEP_VECTORS + j);
        const int line = (j + lane / 16) * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
        stmatrix_x4_trans(buffer + line * LINE_BYTES + ((chunk ^ lane % 8) << 4), round_pair<T>(v[0] + bias.x, v[1] + bias.x),
                          round_pair<T>(v[2] + bias.y, v[3] + bias.y), round_pair<T>(v[4] + bias.x, v[5] + bias.x),
                          round_pair<T>(v[6] + bias.y, v[7] + bias.y));
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
      if (rows > 0) *reinterpret_cast<uint4*>(to) = ld_shared_u32x4(chunk);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8 && e < rows; ++e) to[e] = ld_shared_u16(chunk + 2 * e);
    }
  }
};

}  // namespace nf4l
