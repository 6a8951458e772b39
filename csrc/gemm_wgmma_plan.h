// The prefill engine seen from the host: its compiled shapes, how a call is cut into blocks, and the map of a block's shared
// memory. Plain C++, so that tests and dispatch.h need no CUDA.
#ifndef NF4LINEAR_GEMM_WGMMA_PLAN_H
#define NF4LINEAR_GEMM_WGMMA_PLAN_H

#include <stdint.h>

#include "deal.h"
#include "layout.h"

namespace nf4l {

constexpr int GEMM_K = 64;  // inputs of a k tile: what a stage of the ring holds

// A block computes output tiles of block_rows() rows of the weight by `tokens` rows of x with two warpgroups, each of which
// has one half of the rows; a third feeds them.
struct GemmShape {
  int tokens;      // the n of wgmma
  int row_groups;  // of a warpgroup: 64 rows each, the m of wgmma
  int stages;      // of the ring

  static constexpr int CONSUMERS = 2;
  static constexpr int STORE_TOKENS = 32;  // rows of y that a warpgroup stores at once
  NF4L_HD static constexpr int threads() { return (CONSUMERS + 1) * WARPGROUP; }
  NF4L_HD constexpr int group_rows() const { return row_groups * WARPGROUP_ROWS; }
  NF4L_HD constexpr int block_rows() const { return CONSUMERS * group_rows(); }
  NF4L_HD constexpr int row_tiles() const { return block_rows() / TILE_ROWS; }
  NF4L_HD constexpr int x_bytes() const { return tokens * GEMM_K * 2; }  // of a stage
  NF4L_HD constexpr int lane_results() const { return row_groups * tokens / 2; }
  // Sums of one output tile, float32.
  NF4L_HD constexpr int slot_floats() const { return lane_results() * CONSUMERS * WARPGROUP; }
};

// Everything that is compiled, for each format and 16-bit type.
constexpr GemmShape GEMM_SHAPES[] = {{96, 2, 6}, {128, 2, 5}, {128, 1, 6}, {192, 1, 5}, {256, 1, 4}};
constexpr int GEMM_SHAPE_COUNT = sizeof(GEMM_SHAPES) / sizeof(GEMM_SHAPES[0]);

// Bytes that a format needs in shared memory.
struct GemmFormatBytes {
  int table;  // for decoding, once
  int codes;  // of a stage, for each row tile
  int scales; // the same
};
constexpr GemmFormatBytes GEMM_FOUR_BIT = {65536, TILE_BYTES, TILE_ROWS * 4};

// Byte offsets in a block's shared memory. The decoding table is at 0; what is swizzled begins at multiples of 1024.
struct GemmShared {
  int x;         // [stages][tokens][64], 16 bit
  int out;       // [warpgroups][2][STORE_TOKENS][64], 16 bit: y on its way out
  int codes;     // [stages][row_tiles] of the format's bytes
  int scales;    // [stages][row_tiles] of the format's bytes
  int barriers;  // uint64 [stages][full, empty]
  int total;

  NF4L_HD static constexpr int out_bytes() { return GemmShape::STORE_TOKENS * WARPGROUP_ROWS * 2; }

  NF4L_HD constexpr GemmShared(GemmShape shape, GemmFormatBytes format)
      : x(format.table),
        out(x + shape.stages * shape.x_bytes()),
        codes(out + GemmShape::CONSUMERS * 2 * out_bytes()),
        scales(codes + shape.stages * shape.row_tiles() * format.codes),
        barriers(scales + shape.stages * shape.row_tiles() * format.scales),
        total(barriers + shape.stages * 16) {}
};

// How a call is cut. Each block takes output tiles whole, block b those numbered b, b + blocks, ... below `whole_tiles`. The k
// tiles of all later ones lie in one line, of which each block has a stretch, so that all blocks end together.
struct GemmCut {
  int k_tiles, token_tiles, row_blocks;
  int blocks;
  int whole_tiles;
  Deal deal;  // of the line, in k tiles
};

// Where an output tile lies. Tiles of four token tiles follow each other along the rows: what blocks read at the same time
// stays in L2.
struct OutTile {
  static constexpr int GROUP = 4;
  int token_tile, row_block;

  NF4L_HD OutTile(const GemmCut& cut, int tile) {
    const int group = tile / (GROUP * cut.row_blocks), rest = tile - group * GROUP * cut.row_blocks;
    const int left = cut.token_tiles - group * GROUP, tokens = left < GROUP ? left : GROUP;
    row_block = rest / tokens;
    token_tile = group * GROUP + rest - row_block * tokens;
  }
};

// A block's work, one piece after the other: k tiles begin .. end - 1 of one output tile.
struct GemmPieces {
  const GemmCut& cut;
  int whole;       // the next whole tile
  int unit, stop;  // what is left of the stretch
  int tile = 0, begin = 0, end = 0;

  NF4L_HD GemmPieces(const GemmCut& c, int block)
      : cut(c), whole(block), unit(c.deal.first_unit(block)), stop(c.deal.first_unit(block + 1)) {}

  NF4L_HD int k_tiles_left() const {
    const int tiles = whole < cut.whole_tiles ? (cut.whole_tiles - whole + cut.blocks - 1) / cut.blocks : 0;
    return tiles * cut.k_tiles + stop - unit;
  }

  // Goes to the next piece; false when there is none.
  NF4L_HD bool next() {
    if (whole < cut.whole_tiles) {
      tile = whole;
      begin = 0;
      end = cut.k_tiles;
      whole += cut.blocks;
      return true;
    }
    if (unit == stop) return false;
    const int cut_tile = unit / cut.k_tiles;
    tile = cut.whole_tiles + cut_tile;
    begin = unit - cut_tile * cut.k_tiles;
    end = begin + stop - unit < cut.k_tiles ? begin + stop - unit : cut.k_tiles;
    unit += end - begin;
    return true;
  }
};

// One launch.
struct GemmPlan {
  int shape;  // in GEMM_SHAPES
  GemmCut cut;
  int shared_bytes;
  int64_t workspace_bytes;  // 0 where nothing is cut; else a slot a block, and a set of flags at the end
};

// What an output tile shared by blocks costs them, in k tiles: sums written, waited for, read and added.
constexpr int GEMM_CUT_TILES = 6;
// No block gets less of the line.
constexpr int GEMM_LEAST_TILES = 4;

// False when nothing fits, or when an index would leave 32 bits. `cut` false: all output tiles whole.
inline bool plan_gemm(int64_t m, int64_t n, int64_t k, GemmFormatBytes format, int shape_index, bool cut, int sms,
                      int shared_limit, GemmPlan& plan) {
  const GemmShape shape = GEMM_SHAPES[shape_index];
  const int64_t token_tiles = ceil_div(m, shape.tokens), row_blocks = ceil_div(n, shape.block_rows()), k_tiles = k / GEMM_K;
  if (m > INT32_MAX - 1024 || n > INT32_MAX - 1024 || k > INT32_MAX / 2) return false;
  if (token_tiles > INT32_MAX / 2 / row_blocks) return false;
  const int64_t tiles = token_tiles * row_blocks;
  const int shared = GemmShared(shape, format).total;
  if (shared > shared_limit) return false;
  const int64_t most = sms < MAX_BLOCKS ? sms : MAX_BLOCKS;
  int64_t blocks = tiles < most ? tiles : most, whole_tiles = tiles;
  const int64_t waves = tiles / most, rest = tiles % most;
  if (cut && rest > 0) {
    // The last wave is cut, together with the one before it: then no tile is in more than three pieces.
    const int64_t cut_tiles = rest + (waves > 0 ? most : 0), units = cut_tiles * k_tiles;
    const int64_t parts = waves > 0 || units / GEMM_LEAST_TILES > most ? most : ceil_div(units, GEMM_LEAST_TILES);
    if (units + GEMM_CUT_TILES * parts < parts * k_tiles * ((waves > 0) + 1)) {
      blocks = parts;
      whole_tiles = tiles - cut_tiles;
    }
  }
  const int64_t units = (tiles - whole_tiles) * k_tiles;
  if (units > INT32_MAX) return false;
  const Deal deal = {int(units / blocks), int(units % blocks)};
  plan = {shape_index, {int(k_tiles), int(token_tiles), int(row_blocks), int(blocks), int(whole_tiles), deal}, shared,
          units > 0 ? blocks * shape.slot_floats() * 4 + MAX_BLOCKS * 4 : 0};
  return true;
}

}  // namespace nf4l

#endif
