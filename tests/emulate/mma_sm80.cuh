// csrc/mma_sm80.cuh for the CPU: fragments as the PTX manual draws them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "convert.cuh"
#include "copy.cuh"

namespace nf4l {

inline void ldmatrix_x4(uint32_t (&b)[4], uint32_t address) {
  const uint64_t mine = address;
  const auto all = simt::exchange(&mine, 1);
  const int lane = simt::block.running->lane;
  for (int i = 0; i < 4; ++i) {
    std::memcpy(&b[i], at(uint32_t(all[8 * i + lane / 4][0])) + lane % 4 * 4, 4);
  }
}

inline uint32_t movmatrix_trans(uint32_t pair) {
  const uint64_t mine = pair;
  const auto all = simt::exchange(&mine, 1);
  const int lane = simt::block.running->lane, column = lane / 4, row = lane % 4 * 2;
  const auto value = [&](int r) { return uint32_t(all[r * 4 + column / 2][0] >> 16 * (column % 2)) & 0xffff; };
  return value(row) | value(row + 1) << 16;
}

template <class T>
float half_of(uint64_t pair, int high) {
  const uint16_t bits = uint16_t(pair >> 16 * high);
  return to_float(reinterpret_cast<const T&>(bits));
}

template <class T>
void mma_m16n8k16(float (&d)[4], const uint32_t* a, uint32_t b0, uint32_t b1) {
  const uint64_t mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
  const auto all = simt::exchange(mine, 6);
  const int lane = simt::block.running->lane, g = lane / 4, t = lane % 4;
  for (int i = 0; i < 4; ++i) {
    const int row_half = i / 2, column = 2 * t + i % 2;  // rows g and g + 8
    for (int k = 0; k < 16; ++k) {
      const int owner = k % 8 / 2;
      const float weight = half_of<T>(all[4 * g + owner][row_half + k / 8 * 2], k % 2);
      d[i] += weight * half_of<T>(all[4 * column + owner][4 + k / 8], k % 2);
    }
  }
}

}  // namespace nf4l
