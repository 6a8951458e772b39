// NF4 and FP4 for the prefill engine: how their codes and scales become wgmma operands.
//
// A weight is round(centroid * scale) with both in float32 and one rounding to T, bit for bit what dequantize gives:
// then the product differs from that of dequantize and GEMM only by the order of its sums. Scaling the products of a k
// tile instead (small_wgmma.cuh) would need a second set of sums, for which a tile of 128 x 256 leaves no registers.
//
// A format gives the engine
//     Weight        its part of the kernel's arguments
//     BYTES         what it needs of shared memory
//     fill_table()  of the consumers, behind which comes a barrier
//     weight_warps() of the producer that bring codes and scales of every stage, by produce()
//     Decoder<T>    a consumer thread's way from codes to fragments of T, for each k16 step: look_up() of a word of
//                   codes, which only starts, and finish() with the scales of its two rows
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "decode.cuh"
#include "four_bit.cuh"
#include "four_bit.h"
#include "gemm_wgmma_load.cuh"
#include "gemm_wgmma_scales.cuh"
#include "gemm_wgmma_shape.h"
#include "tma.cuh"
#include "wgmma_sm90.cuh"

namespace nf4l {

struct GemmFourBitWeight : FourBitWeight {
  CUtensorMap code_map;
  float centroids[16];
};

struct GemmFourBit {
  using Weight = GemmFourBitWeight;
  static constexpr GemmFormatBytes BYTES = GEMM_FOUR_BIT;
  static constexpr int NESTED_CODE = FloatPairTable::BYTES;  // where the table of second-level codes is: float [256]
  NF4L_HD static constexpr int weight_warps(GemmShape shape) { return shape.block_rows() / 2 / WARP; }

  // A barrier must follow.
  __device__ __forceinline__ static void fill_table(uint32_t smem, const Weight& weight, int thread) {
    if (thread < FloatPairTable::FILLERS) FloatPairTable::fill(smem, weight.centroids, thread);
  }

  // Codes of every k tile, by one thread, and their scales: those of rows g and g + 8 of a row tile, two neighbours of
  // the stage's [row_tiles][16], by each. Waits for the cluster when it needs the ring.
  template <int SHAPE>
  __device__ __forceinline__ static void produce(const GemmArgs<Weight>& args, const GemmRing<GemmFourBit, SHAPE>& ring,
                                                 const GemmWork& work, int thread) {
    if (args.nested_code) produce<NestedScales, SHAPE>(args, ring, work, thread);
    else produce<PlainScales, SHAPE>(args, ring, work, thread);
  }
  template <class Scales, int SHAPE>
  __device__ __forceinline__ static void produce(const GemmArgs<Weight>& args, const GemmRing<GemmFourBit, SHAPE>& ring,
                                                 GemmWork work, int thread);

  template <class T>
  struct Decoder;
};

template <class Scales, int SHAPE>
__device__ __forceinline__ void GemmFourBit::produce(const GemmArgs<Weight>& args,
                                                     const GemmRing<GemmFourBit, SHAPE>& ring, GemmWork work,
                                                     int thread) {
  constexpr GemmShape S = GEMM_SHAPES[SHAPE];
  constexpr int THREADS = weight_warps(S) * WARP;
  static_assert(THREADS == S.block_rows() / 2, "a pair of rows a thread");
  const int row_tile = thread / 8, g = thread % 8;
  prefetch_tensormap(&args.code_map);
  const uint32_t table = ring.smem + NESTED_CODE;
  Scales::template begin<THREADS>(args, table, thread);
  const float offset = Scales::offset_of(args);
  RingPosition<S.stages> at(1);
  bool started = false;
  while (work.next()) {
    const int first_tile = work.row_block * S.row_tiles();
    const Scales rows(args, first_tile + row_tile, g);
    const int first = work.begin / BURST * BURST;
    auto burst = rows.fetch(first);
    if (!started) {
      cluster_wait();
      cp_async_wait_all();
      bar_sync(5, THREADS);
      started = true;
    }
    for (int k = first; k < work.end; k += BURST) {
      auto next = burst;
#pragma unroll
      for (int j = 0; j < BURST; ++j) {
        if (k + j >= work.begin && k + j < work.end) {
          const uint32_t full = ring.full(at.stage);
          mbarrier_wait(ring.empty(at.stage), at.phase);
          if (thread == 0 && first_tile < args.row_tiles) {  // a copy of nothing would take long (feed)
            mbarrier_expect_tx(full, S.row_tiles() * BYTES.codes);
            cp_async_bulk_tensor_3d(ring.codes(at.stage, 0), &args.code_map, 0, k + j, first_tile, full);
          }
          st_shared_f32x2(ring.scales(at.stage, row_tile) + g * 8, Scales::scales(burst, table, offset, j));
          __syncwarp();
          if (thread % WARP == 0) mbarrier_arrive(full);
          at.step();
        }
        if (j == 0 && k + BURST < work.end) next = rows.fetch(k + BURST);
      }
      burst = next;
    }
  }
  if (!started) cluster_wait();
}

template <class T>
struct GemmFourBit::Decoder {
  struct Looked {
    float2 pair[4];
  };
  const uint32_t table, lane_address;

  __device__ __forceinline__ Decoder(uint32_t smem, int lane)
      : table(smem), lane_address(FloatPairTable::lane_address(lane)) {}

  __device__ __forceinline__ Looked look_up(uint32_t word) const {
    Looked looked;
#pragma unroll
    for (int i = 0; i < 4; ++i) looked.pair[i] = FloatPairTable::look_up(table, word, lane_address, i);
    return looked;
  }

  // In order with the volatile instructions around it: a wgmma reads these registers after a fence.
  __device__ __forceinline__ static void finish(const Looked& looked, float2 scale, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float s = i % 2 ? scale.y : scale.x;
      a[i] = round_pair_in_order<T>(__fmul_rn(looked.pair[i].x, s), __fmul_rn(looked.pair[i].y, s));
    }
  }
};

template <class T>
GemmFourBitWeight gemm_four_bit_weight(const nf4l_weight& w) {
  GemmFourBitWeight weight = {};
  static_cast<FourBitWeight&>(weight) = four_bit_weight<T>(w);
  for (int c = 0; c < 16; ++c) weight.centroids[c] = w.format == NF4L_NF4 ? Nf4::value(c) : Fp4::value(c);
  return weight;
}

}  // namespace nf4l
