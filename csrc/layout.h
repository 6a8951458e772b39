// Where each weight and scale lies in kernel order: the same integer maps as nf4linear/layout.py, tested equal to them.
//
// A 512-byte tile is 32 lanes x 16 bytes, the A fragments of mma.m16n8k16 (and of wgmma with A in registers): lane
// l = 4 g + t owns rows g and g + 8.
//
// tile16x64 (4 bit), 16 rows x 64 inputs; bytes of a lane for k16 step s = 0..3, each byte two codes (high = even k):
//
//     4s+0: row g,   k = 16s + 2t, +1        4s+2: row g,   k = 16s + 8 + 2t, +1
//     4s+1: row g+8, same k                  4s+3: row g+8, same k as 4s+2
//
// tile16x32 (8 bit), 16 rows x 32 inputs; bytes of a lane for step s = 0..1, k0 = 16s + 2t:
//
//     8s+0: row g, k0    8s+1: row g, k0+1   8s+2: row g+8, k0   8s+3: row g+8, k0+1    8s+4..7: the same at k0 + 8
#ifndef NF4LINEAR_LAYOUT_H
#define NF4LINEAR_LAYOUT_H

#include <stdint.h>

#if defined(__CUDACC__)
#define NF4L_HD __host__ __device__
#else
#define NF4L_HD
#endif

namespace nf4l {

constexpr int TILE_ROWS = 16;
constexpr int TILE_K4 = 64;   // inputs of a 4-bit tile
constexpr int TILE_K8 = 32;   // inputs of an 8-bit tile
constexpr int TILE_BYTES = 512;
constexpr int LANE_BYTES = 16;
constexpr int NESTED_BLOCKSIZE = 256;

NF4L_HD constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
NF4L_HD constexpr int log2_of(int64_t power_of_two) {
  int log2 = 0;
  while ((int64_t(1) << log2) < power_of_two) ++log2;
  return log2;
}

// Byte of a 4-bit qweight that holds input k of row; n_k inputs a row. Even k is its high nibble.
NF4L_HD constexpr int64_t tile16x64_byte(int64_t row, int64_t k, int64_t n_k) {
  const int64_t tile = row / 16 * (n_k / 64) + k / 64;
  const int h = row % 16 / 8, g = row % 8;
  const int s = k % 64 / 16, u = k % 16 / 8, t = k % 8 / 2;
  return tile * TILE_BYTES + (4 * g + t) * LANE_BYTES + 4 * s + 2 * u + h;
}

// Byte of an 8-bit qweight that holds input k of row; n_k inputs a row (padded to 32 in storage).
NF4L_HD constexpr int64_t tile16x32_byte(int64_t row, int64_t k, int64_t n_k) {
  const int64_t tile = row / 16 * ceil_div(n_k, 32) + k / 32;
  const int h = row % 16 / 8, g = row % 8;
  const int s = k % 32 / 16, u = k % 16 / 8, t = k % 8 / 2, e = k % 2;
  return tile * TILE_BYTES + (4 * g + t) * LANE_BYTES + 8 * s + 4 * u + 2 * h + e;
}

// Byte of absmax_q with the scale code of 64-input block kb of row; n_kb blocks a row.
NF4L_HD constexpr int64_t absmax_q_byte(int64_t row, int64_t kb, int64_t n_kb) {
  const int h = row % 16 / 8, g = row % 8;
  return (row / 16 * ceil_div(n_kb, 4) + kb / 4) * 64 + 8 * g + 4 * h + kb % 4;
}

// Element of float32 absmax or group_scale with the scale of block (or group) kb of row; n_kb a row.
NF4L_HD constexpr int64_t row_scale_index(int64_t row, int64_t kb, int64_t n_kb) {
  const int h = row % 16 / 8, g = row % 8;
  return (row / 16 * n_kb + kb) * 16 + 2 * g + h;
}

// Element of nested_absmax that scales 64-input block kb of row; n_kb such blocks a row of the unsharded weight.
NF4L_HD constexpr int64_t nested_group(int64_t row, int64_t kb, int64_t n_kb, int64_t blocksize) {
  return (row * n_kb + kb) * 64 / blocksize / NESTED_BLOCKSIZE;
}

}  // namespace nf4l

#endif
