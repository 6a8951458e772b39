// 8-bit weights as the register operand of wgmma m64nNk16: what the two Hopper engines for them share.
//
// A byte is converted in registers (convert8.cuh), behind what the warpgroup has given to the tensor cores. A k16 step:
//
//     fence | wgmma a[s] | commit | wait until only two are under way | convert step s + 2
//
// So the tensor cores have two steps to do meanwhile, and the fragments of the four steps of a tile take turns.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert8.cuh"
#include "tma.cuh"
#include "wgmma_sm90.cuh"

namespace nf4l {

// What one warp of a consumer has in hand. Ring has `S`, the shape, and the barriers full() and empty() of its stages.
template <class Code, class T, class Ring>
struct W8Operand {
  const Ring& ring;
  const int row_tile, lane;  // row_tile: of the warp, in a row block
  RingPosition<Ring::S.stages> at{0};
  int used = -1;  // stage whose wgmma may still be under way
  float sums[Ring::S.lane_results()];
  uint4 words[2];    // of a tile, or of one and the next
  uint32_t a[4][4];  // fragments of four k16 steps

  // Gives the stage that was used last back to the ring, when all its wgmma are complete.
  __device__ __forceinline__ void release() const {
    __syncwarp();
    if (used >= 0 && lane == 0) mbarrier_arrive(ring.empty(used));
  }

  // into (+)= a[s] times the activations of its k16 step; `x` describes those of step 0.
  template <int RESULTS>
  __device__ __forceinline__ void step(float (&into)[RESULTS], int s, uint64_t x, bool add) {
    wgmma_fence();
    wgmma_m64k16<T>(into, a[s], x + 2 * s, add);
    wgmma_commit_group();
    wgmma_wait_group<2>();
  }

  __device__ __forceinline__ void convert(int s) {
    const uint4 v = words[s / 2];
    const uint32_t word[2] = {s % 2 ? v.z : v.x, s % 2 ? v.w : v.y};
#pragma unroll
    for (int i = 0; i < 4; ++i) a[s][i] = Convert8<T, true>::template pair_of<Code>(word[i / 2], i % 2);
  }

  // After this the sums may be read.
  __device__ __forceinline__ void finish() {
    wgmma_wait_group<0>();
    release();
    used = -1;
  }
};

}  // namespace nf4l
