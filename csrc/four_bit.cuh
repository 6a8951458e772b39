// A 4-bit weight in kernel order as the fused engines' kernels see it.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "codebook.h"
#include "copy.cuh"
#include "decode.cuh"
#include "layout.h"
#include "nf4linear.h"

namespace nf4l {

struct FourBitWeight {
  const uint8_t* codes;         // [row_tiles][k_tiles][512]
  const uint8_t* scales;        // absmax_q [row_tiles][ceil(k_tiles / 4)][64]; plain: float [row_tiles][k_tiles][16]
  const float* nested_code;     // [256], NULL with plain absmax
  const float* nested_absmax;   // one for 2^log2_group blocks of the unsharded weight
  const float* nested_offset;
  int64_t first_block;          // of the weight in the unsharded one, in blocks of 64 inputs
  int blocks_per_row;           // of the unsharded weight
  int log2_group;
  int n, row_tiles, k_tiles;
  Codebook16 codebook;
};

// T is the 16-bit type that the centroids are rounded to. Sizes fit (dispatch.h has planned with them).
template <class T>
FourBitWeight four_bit_weight(const nf4l_weight& w) {
  FourBitWeight a = {};
  a.codes = w.qweight;
  a.scales = static_cast<const uint8_t*>(w.scales);
  a.nested_code = w.nested_code;
  a.nested_absmax = w.nested_absmax;
  a.nested_offset = w.nested_offset;
  a.first_block = w.n0 * w.kb_full + w.kb0;
  a.blocks_per_row = int(w.kb_full);
  a.log2_group = log2_of(w.blocksize / TILE_K4 * NESTED_BLOCKSIZE);
  a.n = int(w.n);
  a.row_tiles = int(ceil_div(w.n, TILE_ROWS));
  a.k_tiles = int(w.k / TILE_K4);
  a.codebook = w.format == NF4L_NF4 ? codebook16_of<Nf4, T>() : codebook16_of<Fp4, T>();
  return a;
}

// Second-level scales of a block's rows in shared memory, and where the block of a row and tile finds its own.
struct NestedGroups {
  int first, count, last;  // groups of the unsharded weight: first of the part, how many, the last that exists
  int offset;              // of the part's first block in group `first`

  __device__ __forceinline__ NestedGroups(const FourBitWeight& a, int first_row, int rows) {
    const int64_t block = a.first_block + int64_t(first_row) * a.blocks_per_row;
    first = int(block >> a.log2_group);
    offset = int(block - (int64_t(first) << a.log2_group));
    count = ((offset + (rows - 1) * a.blocks_per_row + a.k_tiles - 1) >> a.log2_group) + 1;
    last = int((a.first_block + int64_t(a.n - 1) * a.blocks_per_row + a.k_tiles - 1) >> a.log2_group);
  }

  // Padding rows may lie beyond the last group: theirs is read in its place, and their results are never stored.
  __device__ __forceinline__ void load_async(const FourBitWeight& a, uint32_t to, int thread, int threads) const {
    for (int i = thread; i < count; i += threads) cp_async_4(to + 4 * i, a.nested_absmax + min(first + i, last), true);
  }
};

}  // namespace nf4l
