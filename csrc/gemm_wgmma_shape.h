// The prefill engine's compiled shapes, the map of a block's shared memory, and how tokens get there. Plain C++.
#ifndef NF4LINEAR_GEMM_WGMMA_SHAPE_H
#define NF4LINEAR_GEMM_WGMMA_SHAPE_H

#include <stdint.h>

#include "deal.h"
#include "gemm_cut.h"
#include "layout.h"

namespace nf4l {

// A block computes output tiles of block_rows() rows of the weight by `tokens` rows of x: warpgroups that multiply have
// 64 rows each, and one more feeds them.
struct GemmShape {
  int tokens;     // the n of wgmma, or beyond 256 that of two together: first_tokens() and the others
  int consumers;  // warpgroups that multiply
  int stages;     // of the ring
  int tile_ns;    // what a k tile takes, measured (docs/kernel-log.md); for the choice between shapes
  int slice_ns;   // the same in a slice, for which a block copies all of x itself

  static constexpr int STORE_TOKENS = 32;  // rows of y that a warpgroup stores at once, but for the last ones
  NF4L_HD constexpr int threads() const { return (consumers + 1) * WARPGROUP; }
  NF4L_HD constexpr int block_rows() const { return consumers * WARPGROUP_ROWS; }
  NF4L_HD constexpr int row_tiles() const { return block_rows() / TILE_ROWS; }
  NF4L_HD constexpr int x_bytes() const { return tokens * GEMM_K * 2; }  // of a stage
  // By eights, the rows that the swizzle goes by.
  NF4L_HD constexpr int first_tokens() const { return tokens > 256 ? int(ceil_div(tokens, 16)) * 8 : tokens; }
  NF4L_HD constexpr int store_steps() const { return int(ceil_div(tokens, STORE_TOKENS)); }
  NF4L_HD constexpr int step_tokens(int step) const {
    const int left = tokens - step * STORE_TOKENS;
    return left < STORE_TOKENS ? left : STORE_TOKENS;
  }
  // Float32 sums of a step, and the room that each has.
  NF4L_HD constexpr int step_bytes(int step) const { return step_tokens(step) * block_rows() * 4; }
  NF4L_HD constexpr int step_bytes() const { return step_bytes(0); }
  // Whether two clusters of two blocks can share an output tile: each block then adds up steps of either half.
  NF4L_HD constexpr bool meets() const { return consumers == 2 && store_steps() % 4 == 0; }
};

// Everything that is compiled, for each format and 16-bit type.
constexpr GemmShape GEMM_SHAPES[] = {
    {64, 2, 12, 347, 347}, {96, 2, 9, 406, 406},  {128, 2, 7, 448, 448}, {128, 3, 6, 620, 620}, {160, 2, 6, 492, 492},
    {192, 2, 5, 570, 570}, {224, 2, 4, 645, 645}, {256, 2, 4, 687, 687}, {320, 2, 3, 815, 905}, {344, 2, 3, 860, 965},
};
constexpr int GEMM_SHAPE_COUNT = sizeof(GEMM_SHAPES) / sizeof(GEMM_SHAPES[0]);

// Bytes that a format needs in shared memory.
struct GemmFormatBytes {
  int table;   // for decoding, once: a multiple of 1024
  int gap;     // where in the table the first of many free lines of 128 bytes is
  int stride;  // from one free line to the next
  int codes;   // of a stage, for each row tile
  int scales;  // the same
};
constexpr GemmFormatBytes GEMM_FOUR_BIT = {65536 + 1024, 128, 256, TILE_BYTES, TILE_ROWS * 4};

// Byte offsets in a block's shared memory. The decoding table is at 0; what is swizzled begins at multiples of 1024.
struct GemmShared {
  int x;         // [stages][tokens][64], 16 bit
  int codes;     // [stages][row_tiles] of the format's bytes
  int scales;    // [stages][row_tiles] of the format's bytes
  int barriers;  // uint64 [stages][full, empty], then [steps] of a tile that have arrived from other blocks
  int tickets;   // [consumers], of meetings (gemm_wgmma_finish.cuh)
  int total;

  static constexpr int BARRIERS = 16;  // bytes of a stage
  // Free lines of the table that y takes on its way out: [warpgroups][2][STORE_TOKENS] lines of [64], 16 bit.
  static constexpr int OUT_LINES = 2 * GemmShape::STORE_TOKENS;  // of a warpgroup

  NF4L_HD constexpr GemmShared(GemmShape shape, GemmFormatBytes format)
      : x(format.table),
        codes(x + shape.stages * shape.x_bytes()),
        scales(codes + shape.stages * shape.row_tiles() * format.codes),
        barriers(scales + shape.stages * shape.row_tiles() * format.scales),
        tickets(barriers + shape.stages * BARRIERS + shape.store_steps() * 8),
        total(tickets + shape.consumers * 4) {}
};

// The tokens of a call, and how those of an output tile get to shared memory: in two halves, by eights, which overlap
// where they are an odd number of them. A copy takes longer the more of it lies beyond the last token, by up to half a
// k tile. So the last tile begins earlier, with tokens of the one before that it does not store; and halves of fewer
// tokens than a tile has are smaller, but where two clusters exchange theirs (GemmMeeting).
struct GemmTokens {
  int count = 0;
  int half = 0;    // tokens of each
  int second = 0;  // where the second one begins

  constexpr GemmTokens() = default;
  constexpr GemmTokens(GemmShape shape, int m, int parts)
      : count(m), half(int(ceil_div(width(shape, m, parts), 16)) * 8), second(width(shape, m, parts) - half) {}
  static constexpr int width(GemmShape shape, int m, int parts) {
    return m < shape.tokens && parts == 1 ? int(ceil_div(m, 8)) * 8 : shape.tokens;
  }

  // The first token that is copied for a tile of so many.
  NF4L_HD constexpr int first(int tile_tokens, int token_tile) const {
    const int own = token_tile * tile_tokens, last = count > tile_tokens ? count - tile_tokens : 0;
    return own < last ? own : last;
  }
};

}  // namespace nf4l

#endif
