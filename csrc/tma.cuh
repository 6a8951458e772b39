// Copies by the copy engine of sm_90 and later (TMA) and the barriers they report to; and, on the host, the maps that
// describe tensors to it.
#pragma once

#include <cuda.h>  // types only: the driver is asked through the runtime
#include <cuda_runtime.h>
#include <stdint.h>

#include "nf4linear.h"
#include "status.cuh"

namespace nf4l {

// ---- barriers, 8 bytes of shared memory each ------------------------------------------------------------------------

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers known to the copy engine.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// At the barrier of any block of the cluster, by its cluster_address().
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives; the phase then ends only after `bytes` have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// The same without arriving.
__device__ __forceinline__ void mbarrier_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns when the phase of this parity has ended. Of a fresh barrier, the one of parity 1 has.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The same, and what other blocks of the cluster sent with it can be read.
__device__ __forceinline__ void mbarrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again;}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Position in a ring of stages, which copies fill and others empty. Stage s is filled when its barriers `full` turn to
// `phase`, and free when its barrier `empty` does.
template <int STAGES>
struct RingPosition {
  int stage = 0;
  uint32_t phase;

  __device__ __forceinline__ explicit RingPosition(uint32_t first_phase) : phase(first_phase) {}
  __device__ __forceinline__ void step() {
    if (++stage == STAGES) {
      stage = 0;
      phase ^= 1;
    }
  }
};

// ---- copies to shared memory; addresses and sizes are multiples of 16 bytes -----------------------------------------

// L2 drops first what is read once.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void cp_async_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier,
                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// The box of a map at (x, y, z); zeros outside the tensor.
__device__ __forceinline__ void cp_async_bulk_tensor_3d(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// The same to this place of all blocks of the cluster whose rank is a bit of `blocks`; the barrier of each gets its
// bytes.
__device__ __forceinline__ void cp_async_bulk_tensor_3d_multicast(uint32_t to, const CUtensorMap* map, int x, int y,
                                                                  int z, uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier), "h"(blocks)
      : "memory");
}

// The same in two dimensions, with an L2 policy.
__device__ __forceinline__ void cp_async_bulk_tensor_2d(uint32_t to, const CUtensorMap* map, int column, int row,
                                                        uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3}], "
      "[%4], %5;" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy)
      : "memory");
}

// True in one lane of a whole warp, always the same. Copies behind this question are issued once, with addresses that
// the warp agrees on; behind any other the compiler loops over the lanes.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p;}" : "=r"(elected));
  return elected != 0;
}

// Fetches a map ahead of its first use.
__device__ __forceinline__ void prefetch_tensormap(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// ---- tensor maps ----------------------------------------------------------------------------------------------------

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                                 const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                                 CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

// cuTensorMapEncodeTiled of the driver in use, without linking to it; NULL if it has none.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &found, cudaEnableDefault, &result);
#endif
    cudaGetLastError();
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}

// Describes `rank` dimensions, the innermost first: sizes and box in elements, strides (of all but the innermost) in
// bytes. Boxes read zeros outside of the tensor. A status.
inline int encode_map(CUtensorMap& map, CUtensorMapDataType type, int rank, const void* data, const cuuint64_t* sizes,
                      const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return NF4L_CUDA_ERROR - int(cudaErrorNotSupported);
  const cuuint32_t steps[3] = {1, 1, 1};
  const CUresult result =
      encode(&map, type, rank, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? NF4L_OK
                                : NF4L_CUDA_ERROR - int(result);  // the two kinds of errors share their numbers
}

// x, 16-bit values [rows, columns], `row_bytes` from row to row (a multiple of 16, as is the pointer), as
// [columns / 64][rows][64], in boxes [tiles][box_rows][64] that land as wgmma reads them (wgmma_descriptor).
inline int encode_activations(CUtensorMap& map, bool half, const void* x, int64_t rows, int64_t columns,
                              int64_t row_bytes, int box_rows, int tiles) {
  const auto type = half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const cuuint64_t sizes[3] = {64, cuuint64_t(rows), cuuint64_t(columns / 64)},
                   strides[2] = {cuuint64_t(row_bytes), 128};
  const cuuint32_t box[3] = {64, cuuint32_t(box_rows), cuuint32_t(tiles)};
  return encode_map(map, type, 3, x, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_128B);
}

// Bytes [rows][row_bytes] in boxes [box_rows][box_bytes]; pointer and row_bytes are multiples of 16, box_bytes of 16 up
// to 2048. Columns count in 8 bytes.
inline int encode_bytes(CUtensorMap& map, const void* bytes, int64_t rows, int64_t row_bytes, int box_rows,
                        int box_bytes) {
  const cuuint64_t sizes[2] = {cuuint64_t(row_bytes / 8), cuuint64_t(rows)}, strides[1] = {cuuint64_t(row_bytes)};
  const cuuint32_t box[2] = {cuuint32_t(box_bytes / 8), cuuint32_t(box_rows)};
  return encode_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT64, 2, bytes, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

// Codes [row_tiles][k_tiles][tile_bytes] in boxes [box_row_tiles][1][tile_bytes], tile after tile; tile_bytes is at
// most 2048.
inline int encode_codes(CUtensorMap& map, const void* codes, int row_tiles, int k_tiles, int tile_bytes,
                        int box_row_tiles) {
  const cuuint32_t words = cuuint32_t(tile_bytes / 8), box[3] = {words, 1, cuuint32_t(box_row_tiles)};
  const cuuint64_t sizes[3] = {words, cuuint64_t(k_tiles), cuuint64_t(row_tiles)};
  const cuuint64_t strides[2] = {cuuint64_t(tile_bytes), cuuint64_t(tile_bytes) * k_tiles};
  return encode_map(map, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, codes, sizes, strides, box, CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace nf4l
