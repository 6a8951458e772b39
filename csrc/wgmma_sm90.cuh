// Warpgroup instructions of sm_90a, each wrapped once and named after it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "deal.h"

namespace nf4l {

// Registers of a thread in a block of `consumers` warpgroups that multiply and one that feeds them: the block starts
// with an equal share for all, and the producer gives most of its own away.
struct RegisterShare {
  static constexpr int OF_AN_SM = 65536;

  int producer, consumer;

  NF4L_HD constexpr RegisterShare(int consumers, int of_producer)
      : producer(of_producer), consumer((all(consumers) - of_producer) / consumers / 8 * 8) {}
  NF4L_HD constexpr explicit RegisterShare(int consumers) : RegisterShare(consumers, consumers == 2 ? 40 : 32) {}

  // What one thread of every warpgroup has together.
  NF4L_HD static constexpr int all(int consumers) {
    return OF_AN_SM / ((consumers + 1) * WARPGROUP) / 8 * 8 * (consumers + 1);
  }
};

// Orders what was done to registers before the wgmma that read or write them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit_group() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Returns when no more than `PENDING` groups are under way.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait_group() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Moves registers between the warpgroups of a block: all its threads start with the same number.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// ---- clusters: blocks that run at the same time and reach each other's shared memory --------------------------------

__device__ __forceinline__ int cluster_index() {
  int index;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(index));
  return index;
}
// Of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// All threads of the cluster's blocks that have not ended, warps together, in two halves. Nothing is waited for but the
// threads: what they wrote before may not be seen after it.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_sync_threads() {
  cluster_arrive();
  cluster_wait();
}
// The same, and what they wrote before is seen after it.
__device__ __forceinline__ void cluster_sync_memory() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Where block `rank` of the cluster has what this block has at `address` of its shared memory.
__device__ __forceinline__ uint32_t cluster_address(uint32_t address, int rank) {
  uint32_t there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
// The barrier, of the same block, gets the bytes when they are there.
__device__ __forceinline__ void st_async_f32x4(uint32_t there, float4 v, uint32_t barrier_there) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(there),
      "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(barrier_there)
      : "memory");
}

// ---- matrices -------------------------------------------------------------------------------------------------------

// Four 8x8 matrices of 16-bit values, each transposed; lane l gives the address of column l % 8 of matrix l / 8, and
// holds the pair of row l / 4, columns 2 (l % 4) and + 1.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// The same without transposing: lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t address, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(a), "r"(b),
               "r"(c), "r"(d)
               : "memory");
}

// Where wgmma finds its second operand: [n][64] 16-bit values in 128-byte rows, 128-byte swizzle, at a multiple of
// 1024. A k16 step further is 32 bytes further, inside the swizzle; bytes count in sixteens, so `descriptor + 2`.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t smem) {
  constexpr uint32_t SWIZZLE_128 = 1u << 30, EIGHT_ROWS = 1024 / 16;  // high word: kind, bytes from 8 rows to the next
  constexpr uint32_t UNUSED_STRIDE = 1;                               // low word, upper half: none in this kind
  return uint64_t(SWIZZLE_128 | EIGHT_ROWS) << 32 | UNUSED_STRIDE << 16 | (smem & 0x3ffff) >> 4;
}

// d[64 x n] = a[64 x 16] * b[16 x n] (+ d if `add`); a and b hold T, d is float32. Lane l of the warpgroup's warp w has
// of a the fragment of mma m16n8k16 for rows 16 w .. 16 w + 15, and of d, for each 8 columns, that of mma's.
#define NF4L_D8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define NF4L_D16 NF4L_D8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define NF4L_D32 NF4L_D16 ", %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define NF4L_D48 NF4L_D32 ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define NF4L_D64 NF4L_D48 ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define NF4L_D80 NF4L_D64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define NF4L_D84 NF4L_D80 ", %80, %81, %82, %83"
#define NF4L_D88 NF4L_D84 ", %84, %85, %86, %87"
#define NF4L_D96 NF4L_D80 ", %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define NF4L_D108 NF4L_D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107"
#define NF4L_D112 \
  NF4L_D96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define NF4L_D128 \
  NF4L_D112 ", %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define NF4L_R4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define NF4L_R8(i) NF4L_R4(i), NF4L_R4(i + 4)
#define NF4L_R16(i) NF4L_R8(i), NF4L_R8(i + 8)
#define NF4L_R32(i) NF4L_R16(i), NF4L_R16(i + 16)
#define NF4L_R64(i) NF4L_R32(i), NF4L_R32(i + 32)
#define NF4L_WGMMA(N, TYPE, D, A, B, ADD, ...)                                                                         \
  asm volatile("{.reg .pred p; setp.ne.b32 p, " ADD                                                                    \
               ", 0;\n"                                                                                                \
               "wgmma.mma_async.sync.aligned.m64n" N "k16.f32." TYPE "." TYPE " {" D "}, {" A "}, " B ", p, 1, 1, 0;}" \
               : __VA_ARGS__                                                                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(add)))
#define NF4L_WGMMA_FUNCTION(N, COUNT, D, A, B, ADD, ...)                                                          \
  template <class T>                                                                                              \
  __device__ __forceinline__ void wgmma_m64k16(float (&d)[COUNT], const uint32_t (&a)[4], uint64_t b, bool add) { \
    if constexpr (std::is_same_v<T, __half>) NF4L_WGMMA(N, "f16", D, A, B, ADD, __VA_ARGS__);                     \
    else NF4L_WGMMA(N, "bf16", D, A, B, ADD, __VA_ARGS__);                                                        \
  }

NF4L_WGMMA_FUNCTION("16", 8, NF4L_D8, "%8, %9, %10, %11", "%12", "%13", NF4L_R8(0))
NF4L_WGMMA_FUNCTION("32", 16, NF4L_D16, "%16, %17, %18, %19", "%20", "%21", NF4L_R16(0))
NF4L_WGMMA_FUNCTION("64", 32, NF4L_D32, "%32, %33, %34, %35", "%36", "%37", NF4L_R32(0))
NF4L_WGMMA_FUNCTION("96", 48, NF4L_D48, "%48, %49, %50, %51", "%52", "%53", NF4L_R32(0), NF4L_R16(32))
NF4L_WGMMA_FUNCTION("128", 64, NF4L_D64, "%64, %65, %66, %67", "%68", "%69", NF4L_R64(0))
NF4L_WGMMA_FUNCTION("160", 80, NF4L_D80, "%80, %81, %82, %83", "%84", "%85", NF4L_R64(0), NF4L_R16(64))
NF4L_WGMMA_FUNCTION("168", 84, NF4L_D84, "%84, %85, %86, %87", "%88", "%89", NF4L_R64(0), NF4L_R16(64),
                    NF4L_R4(80))
NF4L_WGMMA_FUNCTION("176", 88, NF4L_D88, "%88, %89, %90, %91", "%92", "%93", NF4L_R64(0), NF4L_R16(64), NF4L_R8(80))
NF4L_WGMMA_FUNCTION("192", 96, NF4L_D96, "%96, %97, %98, %99", "%100", "%101", NF4L_R64(0), NF4L_R32(64))
NF4L_WGMMA_FUNCTION("216", 108, NF4L_D108, "%108, %109, %110, %111", "%112", "%113", NF4L_R64(0), NF4L_R32(64),
                    NF4L_R8(96), NF4L_R4(104))
NF4L_WGMMA_FUNCTION("224", 112, NF4L_D112, "%112, %113, %114, %115", "%116", "%117", NF4L_R64(0), NF4L_R32(64),
                    NF4L_R16(96))
NF4L_WGMMA_FUNCTION("256", 128, NF4L_D128, "%128, %129, %130, %131", "%132", "%133", NF4L_R64(0), NF4L_R64(64))

#undef NF4L_WGMMA_FUNCTION
#undef NF4L_WGMMA
#undef NF4L_R64
#undef NF4L_R32
#undef NF4L_R16
#undef NF4L_R8
#undef NF4L_R4
#undef NF4L_D128
#undef NF4L_D112
#undef NF4L_D108
#undef NF4L_D96
#undef NF4L_D88
#undef NF4L_D84
#undef NF4L_D80
#undef NF4L_D64
#undef NF4L_D48
#undef NF4L_D32
#undef NF4L_D16
#undef NF4L_D8

}  // namespace nf4l
