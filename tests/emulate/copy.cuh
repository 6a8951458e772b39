// csrc/copy.cuh for the CPU: what each wrapped instruction does, without its asynchrony.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace nf4l {

// The shared memory of the block that runs; its window starts where it does on a GPU.
constexpr uint32_t WINDOW = 1024;
alignas(1024) inline char smem[256 << 10];

inline char* at(uint32_t address) { return smem + (address - WINDOW); }

inline uint32_t smem_address(const void* p) { return uint32_t(static_cast<const char*>(p) - smem) + WINDOW; }

template <class V>
V ld_shared(uint32_t address) {
  V v;
  std::memcpy(&v, at(address), sizeof v);
  return v;
}
inline uint32_t ld_shared_table(uint32_t address) { return ld_shared<uint32_t>(address); }
inline uint32_t ld_shared_u8(uint32_t address) { return ld_shared<uint8_t>(address); }
inline uint32_t ld_shared_u32(uint32_t address) { return ld_shared<uint32_t>(address); }
inline float2 ld_shared_f32x2(uint32_t address) { return ld_shared<float2>(address); }
inline uint4 ld_shared_u32x4(uint32_t address) { return ld_shared<uint4>(address); }
inline void st_shared_f32x2(uint32_t address, float2 v) { std::memcpy(at(address), &v, sizeof v); }
inline uint16_t ld_shared_u16(uint32_t address) { return ld_shared<uint16_t>(address); }
inline float ld_shared_f32(uint32_t address) { return ld_shared<float>(address); }
inline float4 ld_shared_f32x4(uint32_t address) { return ld_shared<float4>(address); }
inline void st_shared_u32(uint32_t address, uint32_t v) { std::memcpy(at(address), &v, sizeof v); }
inline void st_shared_f32x4(uint32_t address, float4 v) { std::memcpy(at(address), &v, sizeof v); }
inline void st_shared_u32x4(uint32_t address, uint4 v) { std::memcpy(at(address), &v, sizeof v); }
inline uint32_t mov_in_order(uint32_t v) { return v; }

template <class V>
void ld_global_if(V& v, const void* p, bool wanted) {
  if (!wanted) return;
  simt::check_read(p, sizeof v);
  std::memcpy(&v, p, sizeof v);
}
inline void ld_stream_if(uint4& v, const void* p, bool wanted) { ld_global_if(v, p, wanted); }
inline void ld_if(uint2& v, const void* p, bool wanted) { ld_global_if(v, p, wanted); }

template <int BYTES>
void cp_async(uint32_t to, const void* from, bool wanted) {
  if (wanted) simt::check_read(from, BYTES);
  if (wanted) std::memcpy(at(to), from, BYTES);
  else std::memset(at(to), 0, BYTES);
}
inline void cp_async_4(uint32_t to, const void* from, bool wanted) { cp_async<4>(to, from, wanted); }
inline void cp_async_16(uint32_t to, const void* from, bool wanted) { cp_async<16>(to, from, wanted); }
inline void cp_async_wait_all() {}
inline void cp_async_commit_group() {}
inline void cp_async_commit_group_if(bool) {}
inline void cp_async_wait_group(int) {}
template <int PENDING>
void cp_async_wait_group() {}
inline void bar_sync(int id, int threads) { simt::wait_named(id, threads); }

inline unsigned atom_add_acq_rel(unsigned* p, unsigned v) {
  simt::check_read(p, sizeof *p);
  const unsigned before = *p;
  *p += v;
  return before;
}

inline void grid_launch_dependents() {}
inline void grid_wait() {}

}  // namespace nf4l
