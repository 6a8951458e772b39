// The laboratory of 8-bit conversions: each conversion in a loop of its own, and one product of 8-bit and 16-bit
// matrices with three ways from stored bytes to the fragments that the tensor cores want.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "../codebook.h"
#include "../convert.cuh"
#include "../convert8.cuh"
#include "../copy.cuh"
#include "../mma_sm80.cuh"

namespace nf4l::lab {

// ---- conversions ----------------------------------------------------------------------------------------------------

enum class How { nothing, plain, fast };

// The plain way: each byte widened, made a number of T, and two of them packed.
template <class T, class Code>
__device__ __forceinline__ uint32_t plain_pair(uint32_t word, int p) {
  T value[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int byte = int(word >> (8 * (2 * p + i)) & 255) - Code::BIAS;
    if constexpr (std::is_same_v<T, __half>) value[i] = __int2half_rn(byte);
    else value[i] = __int2bfloat16_rn(byte);
  }
  return uint32_t(reinterpret_cast<const uint16_t&>(value[0])) |
         uint32_t(reinterpret_cast<const uint16_t&>(value[1])) << 16;
}

template <How HOW, class T, class Code>
__device__ __forceinline__ uint32_t pair_by(uint32_t word, int p) {
  if constexpr (HOW == How::nothing) return p ? 0 : word;
  else if constexpr (HOW == How::plain) return plain_pair<T, Code>(word, p);
  else return Convert8<T>::template pair_of<Code>(word, p);
}

constexpr int CONVERT_WORDS = 16;  // of a thread; one round converts each once

// Converts words that change from round to round, and folds the results into one.
template <How HOW, class T, class Code>
__global__ void __launch_bounds__(256) convert_loop(uint32_t* out, int rounds) {
  uint32_t words[CONVERT_WORDS], folded = 0;
#pragma unroll
  for (int i = 0; i < CONVERT_WORDS; ++i) words[i] = (threadIdx.x + 1) * (2654435761u + 2 * i);
#pragma unroll 1
  for (int round = 0; round < rounds; ++round) {
#pragma unroll
    for (int i = 0; i < CONVERT_WORDS; ++i) {
      folded ^= pair_by<HOW, T, Code>(words[i], 0) ^ pair_by<HOW, T, Code>(words[i], 1);
      words[i] = words[i] * 747796405u + 1;
    }
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = folded;
}

// One word a thread, to compare the two ways value by value: out [2 n] pairs.
template <How HOW, class T, class Code>
__global__ void convert_once(const uint32_t* words, uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  for (int p = 0; p < 2; ++p) out[2 * i + p] = pair_by<HOW, T, Code>(words[i], p);
}

// ---- the product ----------------------------------------------------------------------------------------------------
// d[n, m] = w[n, k] * x[m, k]^T: 8-bit w first, float16 x, float32 sums, float16 d. One block computes 128 x 128 of d
// with eight warps of 32 x 64, through a ring of four stages of 64 k.

enum class Way {
  narrow_loads,  // w row-major; a lane loads the two bytes of each fragment register by themselves
  shuffles,      // w row-major; ldmatrix loads four bytes a lane, and lanes exchange halves
  offline,       // w in tile16x32; a lane loads 16 bytes that are its fragments
};

struct ProductArgs {
  const uint8_t* w;
  const __half* x;
  __half* d;
  int n, m, k;  // multiples of 128, 128, 64
};

struct ProductTile {
  static constexpr int ROWS = 128, TOKENS = 128, K = 64, STAGES = 4, THREADS = 256;
  static constexpr int PITCH = K + 16;  // of a row of w in shared memory: no two rows of eight meet in a bank
  static constexpr int X_BYTES = TOKENS * K * 2, W_BYTES = ROWS * PITCH, STAGE = X_BYTES + W_BYTES;
};

template <Way WAY>
struct ProductLoad {
  using P = ProductTile;
  // Issues k tile `kt` into the stage at `smem`.
  __device__ __forceinline__ static void copy(const ProductArgs& a, uint32_t smem, int row, int token, int kt) {
    const int thread = threadIdx.x;
#pragma unroll
    for (int i = thread; i < P::TOKENS * 8; i += P::THREADS) {  // rows of 128 bytes, their 16-byte chunks swizzled
      const int line = i / 8, chunk = i % 8;
      cp_async_16(smem + line * 128 + (chunk ^ line % 8) * 16,
                  a.x + int64_t(token + line) * a.k + kt * P::K + chunk * 8, true);
    }
    const uint32_t w = smem + P::X_BYTES;
#pragma unroll
    for (int i = thread; i < P::ROWS * P::K / 16; i += P::THREADS) {
      if (WAY == Way::offline) {
        const int tile = i / 64, at = i % 64 * 16;  // of 16 rows x 64 k: 1024 bytes
        cp_async_16(w + i * 16, a.w + (int64_t(row / 16 + tile) * (a.k / P::K) + kt) * 1024 + at, true);
      } else {
        const int line = i / 4, chunk = i % 4;
        cp_async_16(w + line * P::PITCH + chunk * 16, a.w + int64_t(row + line) * a.k + kt * P::K + chunk * 16, true);
      }
    }
  }

  // Fragments of k16 steps 2 half and 2 half + 1 for row tile `tile`: a[step % 2] of mma.m16n8k16.
  __device__ __forceinline__ static void fragments(uint32_t w, int tile, int half, int lane, uint32_t (&a)[2][4]) {
    const int g = lane / 4, t = lane % 4;
    if constexpr (WAY == Way::offline) {
      const uint4 v = ld_shared_u32x4(w + tile * 1024 + half * 512 + lane * 16);
      const uint32_t word[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) a[i / 4][i % 4] = Convert8<__half>::pair_of<W8U8>(word[i / 2], i % 2);
    } else if constexpr (WAY == Way::narrow_loads) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int row = tile * 16 + g + i % 2 * 8, k = half * 32 + i / 4 * 16 + i % 4 / 2 * 8 + 2 * t;
        a[i / 4][i % 4] = Convert8<__half>::pair_of<W8U8>(ld_shared_u16(w + row * P::PITCH + k), 0);
      }
    } else {
      uint32_t v[4];  // of 16 k each: rows g, g + 8 of the first, then of the second step
      const int row = tile * 16 + lane % 16, k = half * 32 + lane / 16 * 16;
      ldmatrix_x4(v, w + row * P::PITCH + k);
      const int from = g * 4 + t / 2;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t low = __shfl_sync(ALL_LANES, v[i], from), high = __shfl_sync(ALL_LANES, v[i], from + 2);
        const uint32_t bytes = __byte_perm(low, high, t % 2 ? 0x7632 : 0x5410);
        a[i / 2][i % 2] = Convert8<__half>::pair_of<W8U8>(bytes, 0);
        a[i / 2][2 + i % 2] = Convert8<__half>::pair_of<W8U8>(bytes, 1);
      }
    }
  }
};

template <Way WAY>
__global__ void __launch_bounds__(ProductTile::THREADS, 1) product(const ProductArgs args) {
  using P = ProductTile;
  extern __shared__ __align__(1024) char smem[];
  const uint32_t base = smem_address(smem);
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int row = blockIdx.x * P::ROWS, token = blockIdx.y * P::TOKENS, k_tiles = args.k / P::K;
  const int warp_tile = warp % 4 * 2, warp_token = warp / 4 * 64;
  float sum[2][8][4] = {};
  for (int s = 0; s < P::STAGES - 1; ++s) {
    if (s < k_tiles) ProductLoad<WAY>::copy(args, base + s * P::STAGE, row, token, s);
    cp_async_commit_group();
  }
  for (int kt = 0; kt < k_tiles; ++kt) {
    cp_async_wait_group<P::STAGES - 2>();
    __syncthreads();
    const int next = kt + P::STAGES - 1;
    if (next < k_tiles) ProductLoad<WAY>::copy(args, base + next % P::STAGES * P::STAGE, row, token, next);
    cp_async_commit_group();
    const uint32_t x = base + kt % P::STAGES * P::STAGE, w = x + P::X_BYTES;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t a[2][2][4];
#pragma unroll
      for (int r = 0; r < 2; ++r) ProductLoad<WAY>::fragments(w, warp_tile + r, half, lane, a[r]);
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        uint32_t b[4];  // k16 steps of the half, low and high eight k of each
        const int line = warp_token + c * 8 + lane % 8, chunk = half * 4 + lane / 8;
        ldmatrix_x4(b, x + line * 128 + (chunk ^ line % 8) * 16);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
#pragma unroll
          for (int s = 0; s < 2; ++s) mma_m16n8k16<__half>(sum[r][c], a[r][s], b[2 * s], b[2 * s + 1]);
        }
      }
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int line = row + (warp_tile + r) * 16 + lane / 4 + 8 * h;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        const uint32_t pair = round_pair<__half>(sum[r][c][2 * h], sum[r][c][2 * h + 1]);
        __half* to = args.d + int64_t(line) * args.m + token + warp_token + c * 8 + lane % 4 * 2;
        *reinterpret_cast<uint32_t*>(to) = pair;
      }
    }
  }
}

}  // namespace nf4l::lab
