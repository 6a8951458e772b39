// The prefill engine seen from the host: its compiled shapes, how a call is cut into blocks, and the map of a block's shared
// memory. Plain C++, so that tests and dispatch.h need no CUDA.
#ifndef NF4LINEAR_GEMM_WGMMA_PLAN_H
#define NF4LINEAR_GEMM_WGMMA_PLAN_H

#include <stdint.h>

#include "deal.h"
#include "layout.h"

namespace nf4l {

constexpr int GEMM_K = 64;  // inputs of a k tile: what a stage of the ring holds

// A block computes output tiles of block_rows() rows of the weight by `tokens` rows of x: warpgroups that multiply have 64 rows
// each, and one more feeds them.
struct GemmShape {
  int tokens;     // the n of wgmma
  int consumers;  // warpgroups that multiply
  int stages;     // of the ring
  int tile_ns;    // what a k tile takes, measured (docs/kernel-log.md); for the choice between shapes

  static constexpr int STORE_TOKENS = 32;  // rows of y that a warp stores at once
  NF4L_HD constexpr int threads() const { return (consumers + 1) * WARPGROUP; }
  NF4L_HD constexpr int block_rows() const { return consumers * WARPGROUP_ROWS; }
  NF4L_HD constexpr int row_tiles() const { return block_rows() / TILE_ROWS; }
  NF4L_HD constexpr int x_bytes() const { return tokens * GEMM_K * 2; }  // of a stage
  NF4L_HD constexpr int lane_results() const { return tokens / 2; }
  // Sums of one output tile, float32.
  NF4L_HD constexpr int slot_floats() const { return lane_results() * consumers * WARPGROUP; }
};

// Everything that is compiled, for each format and 16-bit type.
constexpr GemmShape GEMM_SHAPES[] = {{128, 2, 7, 490}, {128, 3, 6, 690}, {192, 2, 5, 610}, {256, 2, 4, 750}};
constexpr int GEMM_SHAPE_COUNT = sizeof(GEMM_SHAPES) / sizeof(GEMM_SHAPES[0]);

// Bytes that a format needs in shared memory.
struct GemmFormatBytes {
  int table;   // for decoding, once
  int gap;     // where in the table the first of many free lines of 128 bytes is, 0 if there are none
  int stride;  // from one free line to the next
  int codes;   // of a stage, for each row tile
  int scales;  // the same
};
constexpr GemmFormatBytes GEMM_FOUR_BIT = {65536, 128, 256, TILE_BYTES, TILE_ROWS * 4};

// Byte offsets in a block's shared memory. The decoding table is at 0; what is swizzled begins at multiples of 1024.
struct GemmShared {
  int x;         // [stages][tokens][64], 16 bit
  int out;       // [warpgroups][2][STORE_TOKENS] lines of [64], 16 bit: y on its way out, in the table's gaps if it has any
  int out_line;  // bytes from one line to the next
  int codes;     // [stages][row_tiles] of the format's bytes
  int scales;    // [stages][row_tiles] of the format's bytes
  int barriers;  // uint64 [stages][full_codes, full_x, empty]
  int total;

  static constexpr int BARRIERS = 24;  // bytes of a stage

  NF4L_HD constexpr GemmShared(GemmShape shape, GemmFormatBytes format)
      : x(format.table),
        out(format.gap > 0 ? format.gap : x + shape.stages * shape.x_bytes()),
        out_line(format.gap > 0 ? format.stride : 128),
        codes(x + shape.stages * shape.x_bytes() + (format.gap > 0 ? 0 : shape.consumers * 2 * GemmShape::STORE_TOKENS * 128)),
        scales(codes + shape.stages * shape.row_tiles() * format.codes),
        barriers(scales + shape.stages * shape.row_tiles() * format.scales),
        total(barriers + shape.stages * BARRIERS) {}
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

  NF4L_HD bool whole_tile() const { return end - begin == cut.k_tiles; }
  // Whether the piece in hand is the block's last one.
  NF4L_HD bool last() const { return whole >= cut.whole_tiles && unit == stop; }

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

// The blocks that share a cut output tile, and what each of them does for its sum. All leave sums to others; those whose
// stretch ends here, at about the same time, then add up and store a part of the tile's tokens each. So nobody waits who has
// other work left. A block has only one such tile, so that the first block stands for the tile.
struct GemmSharers {
  int first, count;  // blocks
  int finishers;     // the first so many of them

  NF4L_HD GemmSharers(const GemmCut& cut, int tile) {
    const int begin = (tile - cut.whole_tiles) * cut.k_tiles, end = begin + cut.k_tiles;
    first = cut.deal.blocks_before(begin + 1) - 1;
    count = cut.deal.blocks_before(end) - first;
    finishers = cut.deal.first_unit(first + count) > end ? count - 1 : count;
  }

  // Which of the finishers stores part `part` of `parts`.
  NF4L_HD int finisher(int part, int parts) const { return part * finishers / parts; }
};

// One launch.
struct GemmPlan {
  int shape;  // in GEMM_SHAPES
  GemmCut cut;
  int shared_bytes;
  int64_t workspace_bytes;  // 0 where nothing is cut; else two slots a block, and a set of counters at the end
};

// What an output tile costs beside its k tiles, and what it costs if blocks share it: sums written, waited for, read.
constexpr int GEMM_STORE_NS = 600, GEMM_SHARE_NS = 9000;
// No block gets less of the line, and no more blocks share an output tile (but for one that ends and one that begins there).
constexpr int GEMM_LEAST_TILES = 4, GEMM_MOST_SHARERS = 16;

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
    int64_t parts = units / GEMM_LEAST_TILES < cut_tiles * GEMM_MOST_SHARERS ? units / GEMM_LEAST_TILES
                                                                            : cut_tiles * GEMM_MOST_SHARERS;
    parts = parts < cut_tiles ? cut_tiles : parts;
    parts = parts < most ? parts : most;
    if (units * shape.tile_ns + GEMM_SHARE_NS * parts < parts * k_tiles * ((waves > 0) + 1) * shape.tile_ns) {
      blocks = parts;
      whole_tiles = tiles - cut_tiles;
    }
  }
  const int64_t units = (tiles - whole_tiles) * k_tiles;
  if (units > INT32_MAX) return false;
  const Deal deal = {int(units / blocks), int(units % blocks)};
  plan = {shape_index, {int(k_tiles), int(token_tiles), int(row_blocks), int(blocks), int(whole_tiles), deal}, shared,
          units > 0 ? blocks * 2 * shape.slot_floats() * 4 + MAX_BLOCKS * 4 : 0};
  return true;
}

// How long the slowest block of a plan takes, in nanoseconds, not counting the start.
inline int64_t estimated_ns(const GemmPlan& plan) {
  const GemmCut& cut = plan.cut;
  const int64_t tile_ns = GEMM_SHAPES[plan.shape].tile_ns, stretch = cut.deal.base + (cut.deal.extra > 0);
  const int64_t whole = ceil_div(cut.whole_tiles, cut.blocks) * (cut.k_tiles * tile_ns + GEMM_STORE_NS);
  return whole + (stretch > 0 ? stretch * tile_ns + GEMM_STORE_NS + GEMM_SHARE_NS : 0);
}

// The plan of the shape that should take least; false when none fits.
inline bool plan_best_gemm(int64_t m, int64_t n, int64_t k, GemmFormatBytes format, int sms, int shared_limit, GemmPlan& best) {
  bool found = false;
  for (int shape = 0; shape < GEMM_SHAPE_COUNT; ++shape) {
    GemmPlan plan;
    if (!plan_gemm(m, n, k, format, shape, true, sms, shared_limit, plan)) continue;
    if (!found || estimated_ns(plan) < estimated_ns(best)) best = plan;
    found = true;
  }
  return found;
}

}  // namespace nf4l

#endif
