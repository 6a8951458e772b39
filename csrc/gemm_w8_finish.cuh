// The way out of the Hopper engine for 8-bit weights: an output tile's sums gathered, scaled, rounded and stored. The
// engine itself, with the story of all its files, is gemm_w8.cuh.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "codebook.h"
#include "convert.cuh"
#include "copy.cuh"
#include "gemm_w8_load.cuh"
#include "gemm_w8_plan.h"
#include "wgmma_sm90.cuh"

namespace nf4l {

// A consumer's part of output tiles. Consumers have nothing to do with each other here: each has its barrier, its part
// of the slots and its byte of the flags.
template <class T, int SHAPE>
struct GemmW8Finish {
  static constexpr GemmW8Shape S = GEMM_W8_SHAPES[SHAPE];
  static constexpr int RESULTS = S.lane_results(), VECTORS = RESULTS / 4;
  using Sums = float[RESULTS];
  const GemmW8Args& args;
  const uint32_t buffers;  // out_buffers() of them
  const int consumer, thread;

  __device__ __forceinline__ void sync() const { asm volatile("bar.sync %0, 128;" ::"r"(1 + consumer) : "memory"); }

  // The sums of a piece.
  //
  // An output tile that several blocks share belongs to the one that begins it: it has the tile last in its stretch,
  // the others have theirs first. They leave their sums in their slot and go on, waiting for nobody, and the owner adds
  // them up when it is done itself, in order: the same bits at every call. Of the blocks that run, only the last to
  // have started can wait for one that has not.
  __device__ __forceinline__ void operator()(Sums& sums, const GemmPieces& piece) const {
    if (piece.begin > 0) {
      leave(sums);
      return;
    }
    if (piece.end < args.cut.k_tiles) collect(sums, (piece.tile - args.cut.whole_tiles + 1) * args.cut.k_tiles);
    // Addresses made from the thread's number are not worth registers in the loop before.
    const GemmW8Finish here = {args, buffers, consumer, int(mov_in_order(thread))};
    here.store(sums, OutTile(args.cut, piece.tile));
  }

  // Asks for the row maxima that the end of a piece will need.
  __device__ __forceinline__ void prefetch(const GemmPieces& piece) const {
    const int row = OutTile(args.cut, piece.tile).row_block * S.block_rows() + consumer * WARPGROUP_ROWS;
    if (piece.begin == 0 && thread < WARPGROUP_ROWS && row + thread < args.n)
      prefetch_l1(args.row_maxima + row + thread);
  }

 private:
  __device__ __forceinline__ void store(Sums& sums, OutTile out) const {
    const int first_row = out.row_block * S.block_rows() + consumer * WARPGROUP_ROWS;
    const int end_row = min(args.n, (out.row_block + 1) * S.block_rows());
    scale(sums, first_row);
    const int first_token = out.token_tile * S.tokens;
    if (!args.transposed) store_by<false>(sums, first_token, first_row, end_row);
    else if constexpr (S.whole_lines()) store_by<true>(sums, first_token, first_row, end_row);
    else store_in_lines(sums, first_token, first_row, end_row);
  }

  __device__ __forceinline__ float4* slot(int block) const {
    return args.slots + (int64_t(block) * S.consumers + consumer) * (VECTORS * WARPGROUP) + thread;
  }
  __device__ __forceinline__ unsigned flag() const { return 1u << (8 * consumer); }

  __device__ __forceinline__ void leave(const Sums& sums) const {
    float4* to = slot(blockIdx.x);
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      const float* v = sums + 4 * i;
      __stcg(to + i * WARPGROUP, make_float4(v[0], v[1], v[2], v[3]));
    }
    __threadfence();
    sync();
    if (thread == 0) red_add_release_gpu(args.raised + blockIdx.x, flag());
  }

  // The slots of the blocks behind this one that begin before unit `end` of the line.
  __device__ __forceinline__ void collect(Sums& sums, int end) const {
    const int next = blockIdx.x + 1, stop = args.cut.deal.blocks_before(end);
    for (int block = next + thread; block < stop; block += WARPGROUP) {
      while ((ld_acquire_gpu(args.raised + block) & flag()) == 0) {
      }
      atomicSub(args.raised + block, flag());
    }
    sync();
    constexpr int BATCH = 8;  // loads in flight together, or more where registers are left
#pragma unroll(S.consumers == 2 && VECTORS <= BATCH ? 4 : VECTORS < BATCH ? 2 : 1)
    for (int block = next; block < stop; ++block) {
      const float4* from = slot(block);
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        if (i > 0 && i % BATCH == 0) asm volatile("" ::: "memory");
        const float4 v = __ldcg(from + i * WARPGROUP);
        float* sum = sums + 4 * i;
        sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
      }
    }
  }

  // Row scales and bias. A lane has rows g and g + 8 of its warp's 16, tokens 2 t and 2 t + 1 of each eight.
  __device__ __forceinline__ void scale(Sums& sums, int first_row) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + thread / WARP * TILE_ROWS + thread % WARP / 4 + 8 * h;
      const float scale = row < args.n ? __ldg(args.row_maxima + row) * INV_127 : 0.0f;
      const float bias = args.bias && row < args.n ? to_float(static_cast<const T*>(args.bias)[row]) : 0.0f;
#pragma unroll
      for (int i = 0; i < VECTORS; ++i) {
        sums[4 * i + 2 * h] = fmaf(sums[4 * i + 2 * h], scale, bias);
        sums[4 * i + 2 * h + 1] = fmaf(sums[4 * i + 2 * h + 1], scale, bias);
      }
    }
  }

  // Through shared memory, so that y is written in lines of 128 bytes: 32 tokens x 64 rows at once, in two buffers that
  // take turns, or transposed 64 rows x 64 tokens, in both together.
  template <bool TRANSPOSED>
  __device__ __forceinline__ void store_by(const Sums& sums, int first_token, int first_row, int end_row) const {
    constexpr int STEP = TRANSPOSED ? 2 * S.STORE_TOKENS : S.STORE_TOKENS;
#pragma unroll
    for (int first = 0; first < S.tokens; first += STEP) {
      const uint32_t buffer = buffers + (TRANSPOSED ? 0 : first / STEP % 2 * GemmW8Shared::out_bytes());
      write<TRANSPOSED, STEP>(sums, first, buffer);
      sync();
      const int end_token = min(args.m, first_token + (first + STEP < S.tokens ? first + STEP : S.tokens));
      read<TRANSPOSED, STEP>(buffer, first_token + first, end_token, first_row, end_row);
      if (TRANSPOSED) sync();
    }
    if (!TRANSPOSED) sync();  // the buffers may be written again
  }

  // y transposed where output tiles do not begin with lines of 128 bytes: stores across two lines take twice as long.
  // So 128 tokens of each row wait in all buffers together, token t at t % 128, and leave line by line.
  __device__ __forceinline__ void store_in_lines(const Sums& sums, int first_token, int first_row, int end_row) const {
    constexpr int LINE = 64;  // tokens
    const int lane = thread % WARP, warp = thread / WARP;
    const int end_token = min(args.m, first_token + S.tokens);
#pragma unroll
    for (int first = 0; first < S.tokens; first += LINE) {
#pragma unroll
      for (int j = 0; j < LINE / 8; j += 2) {
        const int i = (first / 8 + j) * 4;
        if (i >= RESULTS) break;
        stmatrix_x4(buffers + at_256(warp * TILE_ROWS + lane % 16, (first_token + first) / 8 + j + lane / 16),
                    pair(sums, i), pair(sums, i + 2), pair(sums, i + 4), pair(sums, i + 6));
      }
      sync();
      put_line((first_token + first) / LINE * LINE, first_token, end_token, first_row, end_row);
      sync();
    }
    const int last = (first_token + (S.tokens - 1) / LINE * LINE) / LINE * LINE;  // of the lines that have left
    put_line(last + LINE, first_token, end_token, first_row, end_row);
    sync();  // the buffers may be written again
  }

  // Byte of a row's 16-byte chunk that begins with token 8 * chunk.
  __device__ __forceinline__ static int at_256(int row, int chunk) { return row * 256 + ((chunk % 16 ^ row % 8) << 4); }

  // Tokens line .. line + 63 of all rows, as far as they are in the output tile.
  __device__ __forceinline__ void put_line(int line, int first_token, int end_token, int first_row, int end_row) const {
    const int token = line + thread % 8 * 8, left = end_token - token;
    if (token < first_token || left <= 0) return;
#pragma unroll
    for (int i = 0; i < WARPGROUP_ROWS; i += WARPGROUP / 8) {
      const int row = i + thread / 8;
      if (first_row + row >= end_row) continue;
      const uint4 v = ld_shared_u32x4(buffers + at_256(row, token / 8));
      put(static_cast<uint16_t*>(args.y) + int64_t(first_row + row) * args.m + token, v, left);
    }
  }

  // As many of eight neighbours as are `left`.
  __device__ __forceinline__ void put(uint16_t* to, const uint4& v, int left) const {
    if (args.vectors && left >= 8) {
      *reinterpret_cast<uint4*>(to) = v;
    } else {
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        if (e < left) to[e] = uint16_t(word[e / 2] >> (e % 2 * 16));
      }
    }
  }

  __device__ __forceinline__ static uint32_t pair(const Sums& sums, int i) {
    return i < RESULTS ? round_pair<T>(sums[i], sums[i + 1]) : 0;
  }

  // Tokens from `first` on; a line is swizzled so that neither way in nor out meets in banks.
  template <bool TRANSPOSED, int STEP>
  __device__ __forceinline__ void write(const Sums& sums, int first, uint32_t buffer) const {
    const int lane = thread % WARP, warp = thread / WARP;
#pragma unroll
    for (int j = 0; j < STEP / 8; j += 2) {
      const int i = (first / 8 + j) * 4;
      if (i >= RESULTS) break;
      if constexpr (TRANSPOSED) {
        stmatrix_x4(buffer + at(warp * TILE_ROWS + lane % 16, j + lane / 16), pair(sums, i), pair(sums, i + 2),
                    pair(sums, i + 4), pair(sums, i + 6));
      } else {
        stmatrix_x4_trans(buffer + at((j + lane / 16) * 8 + lane % 8, warp * 2 + lane / 8 % 2), pair(sums, i),
                          pair(sums, i + 2), pair(sums, i + 4), pair(sums, i + 6));
      }
    }
  }

  // Byte of 16-byte chunk `chunk` of a line.
  __device__ __forceinline__ static int at(int line, int chunk) { return line * 128 + ((chunk ^ line % 8) << 4); }

  // Tokens first_token .. end_token - 1, rows first_row .. end_row - 1, as far as they are in the buffer.
  template <bool TRANSPOSED, int STEP>
  __device__ __forceinline__ void read(uint32_t buffer, int first_token, int end_token, int first_row,
                                       int end_row) const {
    constexpr int LINES = TRANSPOSED ? WARPGROUP_ROWS : STEP, CHUNKS = 8;
    const int64_t pitch = TRANSPOSED ? args.m : args.n;
    const int first_line = TRANSPOSED ? first_row : first_token,
              lines = (TRANSPOSED ? end_row : end_token) - first_line;
    const int first_column = TRANSPOSED ? first_token : first_row;
    const int columns = (TRANSPOSED ? end_token : end_row) - first_column;
    uint16_t* const y = static_cast<uint16_t*>(args.y) + first_line * pitch + first_column;
#pragma unroll
    for (int i = 0; i < LINES * CHUNKS; i += WARPGROUP) {
      const int line = (i + thread) / CHUNKS, chunk = thread % CHUNKS, left = columns - chunk * 8;
      if (line >= lines || left <= 0) continue;
      const uint4 v = ld_shared_u32x4(buffer + at(line, chunk));
      put(y + line * pitch + chunk * 8, v, left);
    }
  }
};

}  // namespace nf4l
