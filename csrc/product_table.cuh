// 4-bit codes to 16-bit weights without look-ups: the sixteen products of a row in registers, bytes picked by PRMT.
//
// A row has one scale for a k tile of 64 inputs, so its weights there are sixteen numbers, round(centroid * scale),
// each made once: exact. A table holds them as two planes, of their low bytes and of their high bytes:
//
//     word          0              1              2                 3
//     bytes of   codes 0..3     codes 4..7   (8..11) ^ (0..3)   (12..15) ^ (4..7)
//
// PRMT takes four of eight bytes by the low three bits of four nibbles. So one picks from words 0 and 1 as if bit 3 of
// the codes were clear, another from words 2 and 3 what that bit would change, which one LOP3 masks and adds. A word of
// codes (four bytes: rows g, g + 8, g, g + 8; the high nibble comes first) takes 22 instructions for its eight weights.
//
// In shared memory, the tables of a tile of 16 rows are [row g, row g + 8][low, high][g][16 bytes]: 512 bytes, where
// neither the eight rows that write a plane at once meet in a bank nor those that read it, four lanes each.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"
#include "layout.h"

namespace nf4l {

// Byte j of the result: byte i of a (0..3) or b (4..7), where nibble j of the selector is i; eight times its top bit
// where the nibble is 8 + i.
__device__ __forceinline__ uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d = 0;
#if defined(__CUDA_ARCH__)
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
#else
  for (int j = 0; j < 4; ++j) {
    const uint32_t nibble = selector >> 4 * j & 15, byte = (nibble & 4 ? b : a) >> 8 * (nibble & 3) & 255;
    d |= (nibble & 8 ? (byte >> 7) * 255 : byte) << 8 * j;
  }
#endif
  return d;
}

// The products of one row; x, y, z, w are words 0..3.
struct ProductTable {
  uint4 low, high;
};

template <class T>
__device__ __forceinline__ ProductTable product_table(const float (&centroids)[16], float scale) {
  uint32_t low[4], high[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float* c = centroids + 4 * i;
    const uint32_t first = round_pair<T>(__fmul_rn(c[0], scale), __fmul_rn(c[1], scale));
    const uint32_t second = round_pair<T>(__fmul_rn(c[2], scale), __fmul_rn(c[3], scale));
    low[i] = prmt(first, second, 0x6420);
    high[i] = prmt(first, second, 0x7531);
  }
  return {{low[0], low[1], low[2] ^ low[0], low[3] ^ low[1]}, {high[0], high[1], high[2] ^ high[0], high[3] ^ high[1]}};
}

// The tables of a row tile in shared memory.
struct ProductTables {
  static constexpr int BYTES = TILE_ROWS * 32;

  // Row g + 8 h.
  __device__ __forceinline__ static void store(uint32_t tables, int g, int h, const ProductTable& table) {
    st_shared_u32x4(tables + h * (BYTES / 2) + g * 16, table.low);
    st_shared_u32x4(tables + h * (BYTES / 2) + BYTES / 4 + g * 16, table.high);
  }
  __device__ __forceinline__ static ProductTable load(uint32_t tables, int g, int h) {
    return {ld_shared_u32x4(tables + h * (BYTES / 2) + g * 16),
            ld_shared_u32x4(tables + h * (BYTES / 2) + BYTES / 4 + g * 16)};
  }
};

// The bytes of a word's eight weights: of rows g and g + 8 four each, of both planes.
struct PickedProducts {
  uint32_t low[2], high[2];

  // Bits 3 of the codes in word, spread over bytes: of row g + 8 h.
  __device__ __forceinline__ static uint32_t upper(uint32_t word, uint32_t shifted, int h) {
    return prmt(shifted, word, h ? 0xfbd9 : 0xeac8);
  }

  // `rows`: tables of rows g and g + 8.
  __device__ __forceinline__ PickedProducts(uint32_t word, const ProductTable (&rows)[2]) {
    const uint32_t indices = word & 0x77777777, shifted = word << 4;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const ProductTable& row = rows[h];
      const uint32_t selector = prmt(indices, 0, h ? 0x4431 : 0x4420), mask = upper(word, shifted, h);
      low[h] = prmt(row.low.x, row.low.y, selector) ^ (prmt(row.low.z, row.low.w, selector) & mask);
      high[h] = prmt(row.high.x, row.high.y, selector) ^ (prmt(row.high.z, row.high.w, selector) & mask);
    }
  }

  // The pair that byte `i` of the word stands for: that of its high nibble in the low half. These are registers 0..3 of
  // the A fragment of mma m16n8k16.
  __device__ __forceinline__ uint32_t pair(int i) const {
    return prmt(low[i % 2], high[i % 2], i / 2 ? 0x6273 : 0x4051);
  }
};

}  // namespace nf4l
