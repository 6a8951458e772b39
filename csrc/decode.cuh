// Two 4-bit codes to two 16-bit values by one look-up: a table of all 256 bytes in shared memory.
//
//     line e (256 bytes) of the table belongs to byte e:
//
//         0            128                     256
//         | pair x 32  | free                  |       pair = value(e >> 4) | value(e & 15) << 16
//
// Lane l reads word l of a line, so 32 lanes never meet in a bank, whatever their bytes are. A line of 256 bytes puts
// the byte into the second byte of the address and 4 * lane into the first: one PRMT takes byte i out of a packed word
// and makes the whole address, and the load adds the table's base for nothing. Halving the line saves 32 KB and costs a
// shift and an OR a look-up; it was slower on every shape (docs/kernel-log.md).
//
// The table knows the format only by its sixteen values, so NF4 and FP4 share every kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "codebook.h"
#include "convert.cuh"
#include "copy.cuh"
#include "four_bit.h"

namespace nf4l {

// The sixteen centroids rounded to a 16-bit type, as bits: a kernel argument.
struct Codebook16 {
  uint16_t bits[16];
};

template <class Format, class T>
Codebook16 codebook16_of() {
  Codebook16 book;
  for (int c = 0; c < 16; ++c) {
    const T value = round_to<T>(Format::value(c));
    book.bits[c] = reinterpret_cast<const uint16_t&>(value);
  }
  return book;
}

struct PairTable {
  static constexpr int LINE_BYTES = PAIR_TABLE_BYTES / 256;

  // All warps of the block together; a barrier must follow. One 16-byte store a lane fills four words of a line.
  template <int WARPS>
  __device__ __forceinline__ static void fill(char* table, const Codebook16& book, int warp, int lane) {
    const uint32_t low = book.bits[lane % 16];  // the value of the low nibble lane % 16
    for (int high = warp; high < 16; high += WARPS) {
      // Lane l holds the pair of byte (high, l % 16); the even input is the high nibble and the low half.
      const uint32_t pair = __shfl_sync(ALL_LANES, low, high) | low << 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int nibble = 4 * i + lane / 8;
        const uint32_t p = __shfl_sync(ALL_LANES, pair, nibble);
        reinterpret_cast<uint4*>(table + (high * 16 + nibble) * LINE_BYTES)[lane % 8] = make_uint4(p, p, p, p);
      }
    }
  }

  // 4 * lane, to be taken after the barrier: look-ups are not volatile and may not be moved before it.
  __device__ __forceinline__ static uint32_t lane_address(int lane) { return mov_in_order(4 * lane); }

  // The pair of byte `i` of `word`.
  __device__ __forceinline__ static uint32_t decode(uint32_t base, uint32_t word, uint32_t lane_address, int i) {
    return ld_shared_table(address(base, word, lane_address, i));
  }

  // The same, in order with the volatile instructions around it: for registers that a wgmma reads after a fence.
  __device__ __forceinline__ static uint32_t decode_in_order(uint32_t base, uint32_t word, uint32_t lane_address,
                                                             int i) {
    return ld_shared_u32(address(base, word, lane_address, i));
  }

  __device__ __forceinline__ static uint32_t address(uint32_t base, uint32_t word, uint32_t lane_address, int i) {
    return base + __byte_perm(word, lane_address, 0x7504 | i << 4);
  }
};

// The same for float32, exact: line e holds the two values of byte e sixteen times, 8 bytes each. A load of 8 bytes
// serves half a warp at a time, whose lanes never meet in a bank.
struct FloatPairTable {
  static constexpr int LINE_BYTES = 256;
  static constexpr int BYTES = 256 * LINE_BYTES;

  // The first 256 of a block's threads together; a barrier must follow. Each has one low nibble and one of the sixteen
  // copies of its lines.
  static constexpr int FILLERS = 256;
  __device__ __forceinline__ static void fill(uint32_t table, const float (&centroids)[16], int thread) {
    const int low = thread / 16, copy = thread % 16;
    const float second = centroids[low];
    const uint32_t to = table + low * LINE_BYTES + copy * 8;
#pragma unroll
    for (int high = 0; high < 16; ++high) st_shared_f32x2(to + high * 16 * LINE_BYTES, {centroids[high], second});
  }

  __device__ __forceinline__ static uint32_t lane_address(int lane) { return mov_in_order(lane % 16 * 8); }

  // The values of byte `i` of `word`: of its high nibble, then of its low one.
  __device__ __forceinline__ static float2 look_up(uint32_t base, uint32_t word, uint32_t lane_address, int i) {
    return ld_shared_f32x2(PairTable::address(base, word, lane_address, i));
  }
};

}  // namespace nf4l
