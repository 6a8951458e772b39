// A 4-bit product as the fused engines' planners see it. Plain C++, so that tests and dispatch.h need no CUDA.
#ifndef NF4LINEAR_FOUR_BIT_H
#define NF4LINEAR_FOUR_BIT_H

#include <stdint.h>

#include "layout.h"
#include "nf4linear.h"

namespace nf4l {

// Tiles of 64 inputs that engines load at once, and their unit of work: as many as share 64 bytes of scale codes.
constexpr int BURST = 4;

// Shared memory of the look-up table of decode.cuh: a line of 256 bytes for each byte of codes.
constexpr int PAIR_TABLE_BYTES = 256 * 256;

struct FourBitProblem {
  int64_t n, k;
  int64_t blocks_per_row;  // 64-input blocks of the unsharded weight, for the span of second-level scales
  int log2_group;          // 64-input blocks under one second-level scale
  bool nested;
};

// Floats of nested_absmax that a block with `rows` rows may meet, wherever it starts.
constexpr int64_t nested_span(const FourBitProblem& p, int64_t rows) {
  return p.nested ? (rows * p.blocks_per_row >> p.log2_group) + 2 : 0;
}

// `rows` rows of a weight in kernel order from `first` on, a multiple of TILE_ROWS.
inline nf4l_weight four_bit_rows(const nf4l_weight& w, int64_t first, int64_t rows) {
  nf4l_weight part = w;
  const int64_t k_tiles = w.k / TILE_K4;
  part.n = rows;
  part.n0 += first;
  part.qweight += tile16x64_byte(first, 0, w.k);
  part.scales = w.nested_code
                    ? static_cast<const void*>(static_cast<const uint8_t*>(w.scales) + absmax_q_byte(first, 0, k_tiles))
                    : static_cast<const float*>(w.scales) + row_scale_index(first, 0, k_tiles);
  return part;
}

}  // namespace nf4l

#endif
