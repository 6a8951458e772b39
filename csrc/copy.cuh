// Moves between global memory, shared memory and registers: each instruction wrapped once and named after it.
//
// Shared memory is addressed by 32-bit offsets in its own window, so that an address may be computed by byte tricks.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace nf4l {

__device__ __forceinline__ uint32_t smem_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Read-only table: not volatile, so the compiler may keep many in flight and order them as it likes. The caller orders
// it after the barrier that follows the table's writing (see PairTable::lane_address).
__device__ __forceinline__ uint32_t ld_shared_table(uint32_t address) {
  uint32_t v;
  asm("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

// The same number, which no later instruction with an address made from it may be moved in front of.
__device__ __forceinline__ uint32_t mov_in_order(uint32_t v) {
  uint32_t same;
  asm volatile("mov.b32 %0, %1;" : "=r"(same) : "r"(v) : "memory");
  return same;
}

// Loads that stay where they stand, in order.
__device__ __forceinline__ uint32_t ld_shared_u8(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u8 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ uint16_t ld_shared_u16(uint32_t address) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ uint32_t ld_shared_u32(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ float ld_shared_f32(uint32_t address) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address));
  return v;
}

__device__ __forceinline__ float2 ld_shared_f32x2(uint32_t address) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(address));
  return v;
}

__device__ __forceinline__ float4 ld_shared_f32x4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ uint4 ld_shared_u32x4(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}

__device__ __forceinline__ void st_shared_f32x2(uint32_t address, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(v.x), "f"(v.y) : "memory");
}

__device__ __forceinline__ void st_shared_u32x4(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ void st_shared_u32(uint32_t address, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}

__device__ __forceinline__ void st_shared_f32x4(uint32_t address, float4 v) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

// Barrier `id` (1 .. 15; 0 is __syncthreads) of `threads` threads of the block, whole warps.
__device__ __forceinline__ void bar_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// 16 bytes of a stream that is read once, kept out of L1; where `wanted` is false, v stays. The predicate is inside: a
// branch around each load would keep them from being issued together.
__device__ __forceinline__ void ld_stream_if(uint4& v, const void* p, bool wanted) {
  asm volatile(
      "{.reg .pred q; setp.ne.b32 q, %5, 0;\n"
      "@q ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0, %1, %2, %3}, [%4];}"
      : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)
      : "l"(p), "r"(static_cast<int>(wanted)));
}

__device__ __forceinline__ void ld_if(uint2& v, const void* p, bool wanted) {
  asm volatile(
      "{.reg .pred q; setp.ne.b32 q, %3, 0;\n"
      "@q ld.global.nc.v2.u32 {%0, %1}, [%2];}"
      : "+r"(v.x), "+r"(v.y)
      : "l"(p), "r"(static_cast<int>(wanted)));
}

__device__ __forceinline__ void prefetch_l1(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }

// 16 bytes at once: where an address is made of a type of two bytes, the compiler may take four stores.
__device__ __forceinline__ void st_global_u32x4(void* p, uint4 v) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// Asynchronous copies to shared memory. Where `wanted` is false, zeros are written and nothing is read.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(wanted ? 4 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0) : "memory");
}
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }
__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
__device__ __forceinline__ void cp_async_commit_group_if(bool wanted) {
  asm volatile("{.reg .pred q; setp.ne.b32 q, %0, 0;\n@q cp.async.commit_group;}" ::"r"(int(wanted)) : "memory");
}
template <int PENDING>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
// Returns when no more than `pending` of this thread's groups are under way; at most 8.
__device__ __forceinline__ void cp_async_wait_group(int pending) {
  switch (pending) {
    case 0: return cp_async_wait_group<0>();
    case 1: return cp_async_wait_group<1>();
    case 2: return cp_async_wait_group<2>();
    case 3: return cp_async_wait_group<3>();
    case 4: return cp_async_wait_group<4>();
    case 5: return cp_async_wait_group<5>();
    case 6: return cp_async_wait_group<6>();
    case 7: return cp_async_wait_group<7>();
    default: return cp_async_wait_group<8>();
  }
}

__device__ __forceinline__ unsigned ld_acquire_gpu(const unsigned* p) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

// Adds, without an answer; what was written before is seen by whoever sees the sum.
__device__ __forceinline__ void red_add_release_gpu(unsigned* p, unsigned v) {
  asm volatile("red.add.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// Adds, returns what was there. What this block wrote before the barrier in front of it is seen by whoever sees the
// sum.
__device__ __forceinline__ unsigned atom_add_acq_rel(unsigned* p, unsigned v) {
  unsigned before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}

// Adds, where `wanted`, and returns what was there; else 0. It orders nothing, and having no branch it is not waited
// for before the answer is used.
__device__ __forceinline__ unsigned atom_add_if(unsigned* p, unsigned v, bool wanted) {
  unsigned before;
  asm volatile(
      "{.reg .pred q; setp.ne.b32 q, %3, 0;\n"
      "mov.b32 %0, 0;\n"
      "@q atom.add.relaxed.gpu.global.u32 %0, [%1], %2;}"
      : "=&r"(before)
      : "l"(p), "r"(v), "r"(static_cast<int>(wanted))
      : "memory");
  return before;
}

// What other blocks wrote and this one has been told of.
__device__ __forceinline__ float4 ld_relaxed_gpu_f32x4(const float4* p) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "l"(p)
               : "memory");
  return v;
}

// ---- programmatic dependent launch (sm_90 and later; elsewhere launches are never dependent) ------------------------

// The next kernel of the stream may start now.
__device__ __forceinline__ void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Returns when the kernels before this one have ended and what they wrote can be read.
__device__ __forceinline__ void grid_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace nf4l
