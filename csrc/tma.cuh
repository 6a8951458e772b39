// Copies by the copy engine of sm_90 and later (TMA) and the barriers they report to; and, on the host, the maps that
// describe tensors to it.
#pragma once

#include <cuda.h>  // types only: the driver is asked through the runtime
#include <cuda_runtime.h>
#include <stdint.h>

#include "launch.cuh"
#include "nf4linear.h"

namespace nf4l {

// ---- barriers, 8 bytes of shared memory each -----------------------------------------------------------------------------

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
// Arrives; the phase then ends only after `bytes` have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// Returns when the phase of this parity has ended. Of a fresh barrier, the one of parity 1 has.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{.reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared.b64 p, [%0], %1;\n"
      "@!p bra.uni again;}" ::"r"(barrier), "r"(parity)
      : "memory");
}

// ---- copies to shared memory; addresses and sizes are multiples of 16 bytes ------------------------------------------------

// L2 drops first what is read once.
__device__ __forceinline__ uint64_t createpolicy_evict_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t createpolicy_evict_normal() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ void cp_async_bulk(uint32_t to, const void* from, int bytes, uint32_t barrier,
                                              uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// The box of a map at (column, row); zeros outside the tensor.
__device__ __forceinline__ void cp_async_bulk_tensor_2d(uint32_t to, const CUtensorMap* map, int column, int row,
                                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_3d(uint32_t to, const CUtensorMap* map, int x, int y, int z,
                                                        uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
      "l"(map), "r"(x), "r"(y), "r"(z), "r"(barrier)
      : "memory");
}

// ---- copies from shared memory ---------------------------------------------------------------------------------------------

// To the box of a map at (column, row); what lies outside the tensor is not written. One of the thread's next group.
__device__ __forceinline__ void cp_async_bulk_tensor_2d_store(const CUtensorMap* map, uint32_t from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(map), "r"(column),
               "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void cp_async_bulk_commit_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Returns when all but the last `PENDING` groups of this thread have been read from shared memory.
template <int PENDING>
__device__ __forceinline__ void cp_async_bulk_wait_group_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
// What this thread stored to shared memory is seen by copies that are started after the next barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- tensor maps -----------------------------------------------------------------------------------------------------------

using EncodeTiled = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*, const cuuint64_t*,
                                 const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave, CUtensorMapSwizzle,
                                 CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

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

// A matrix of 16-bit values [rows, columns], `row_bytes` from row to row (a multiple of 16, as is the pointer), in boxes
// [box_rows, box_columns] with the swizzle of that many bytes a row. A status.
inline int encode_boxes16(CUtensorMap& map, bool half, const void* matrix, int64_t rows, int64_t columns, int64_t row_bytes,
                          int box_rows, int box_columns) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return NF4L_CUDA_ERROR - int(cudaErrorNotSupported);
  const cuuint64_t sizes[2] = {cuuint64_t(columns), cuuint64_t(rows)}, strides[1] = {cuuint64_t(row_bytes)};
  const cuuint32_t box[2] = {cuuint32_t(box_columns), cuuint32_t(box_rows)}, steps[2] = {1, 1};
  const CUtensorMapSwizzle swizzle = box_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B;
  const CUresult result = encode(&map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                                 const_cast<void*>(matrix), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? NF4L_OK : NF4L_CUDA_ERROR - int(result);  // the two kinds of errors share their numbers
}

// In boxes [box_rows, 64] that land as wgmma reads them (wgmma_descriptor).
inline int encode_matrix16(CUtensorMap& map, bool half, const void* matrix, int64_t rows, int64_t columns, int64_t row_bytes,
                           int box_rows) {
  return encode_boxes16(map, half, matrix, rows, columns, row_bytes, box_rows, 64);
}

// Contiguous rows in boxes [box_rows, 32]: rows of 64 bytes.
inline int encode_rows64(CUtensorMap& map, bool half, const void* matrix, int64_t rows, int64_t columns, int box_rows) {
  return encode_boxes16(map, half, matrix, rows, columns, columns * 2, box_rows, 32);
}

// Codes [row_tiles][k_tiles][tile_bytes] in boxes [box_row_tiles][1][tile_bytes], tile after tile; tile_bytes is at most 2048.
inline int encode_codes(CUtensorMap& map, const void* codes, int row_tiles, int k_tiles, int tile_bytes, int box_row_tiles) {
  const EncodeTiled encode = encode_tiled();
  if (!encode) return NF4L_CUDA_ERROR - int(cudaErrorNotSupported);
  const cuuint32_t words = cuuint32_t(tile_bytes / 8);
  const cuuint64_t sizes[3] = {words, cuuint64_t(k_tiles), cuuint64_t(row_tiles)};
  const cuuint64_t strides[2] = {cuuint64_t(tile_bytes), cuuint64_t(tile_bytes) * k_tiles};
  const cuuint32_t box[3] = {words, 1, cuuint32_t(box_row_tiles)}, steps[3] = {1, 1, 1};
  const CUresult result = encode(&map, CU_TENSOR_MAP_DATA_TYPE_UINT64, 3, const_cast<void*>(codes), sizes, strides, box, steps,
                                 CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? NF4L_OK : NF4L_CUDA_ERROR - int(result);
}

}  // namespace nf4l
