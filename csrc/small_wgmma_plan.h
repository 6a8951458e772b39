// The wgmma engine seen from the host: its compiled shapes, how a call is cut into blocks, and the map of a block's shared
// memory. Plain C++, so that tests and dispatch.h need no CUDA.
#ifndef NF4LINEAR_SMALL_WGMMA_PLAN_H
#define NF4LINEAR_SMALL_WGMMA_PLAN_H

#include <stdint.h>

#include "deal.h"
#include "four_bit.h"
#include "layout.h"

namespace nf4l {

// A block is row_groups warpgroups that multiply, and one that feeds them.
struct SmallWgmmaShape {
  int tokens;        // rows of x that fit: the n of wgmma
  int row_groups;    // warpgroups side by side, 64 rows each
  int stages;        // of the ring; a stage holds a burst
  int accumulators;  // 2: the scales of a tile are applied while the next tile multiplies

  NF4L_HD constexpr int block_rows() const { return row_groups * WARPGROUP_ROWS; }
  NF4L_HD constexpr int row_tiles() const { return block_rows() / TILE_ROWS; }
  NF4L_HD constexpr int threads() const { return (row_groups + 1) * WARPGROUP; }
  NF4L_HD constexpr int lane_results() const { return tokens / 2; }
  NF4L_HD constexpr int x_bytes() const { return BURST * tokens * TILE_K4 * 2; }  // of a stage
  NF4L_HD constexpr int stage_bytes() const { return x_bytes() + row_tiles() * BURST * TILE_BYTES; }
  // Sums of one row block, float32.
  NF4L_HD constexpr int slot_floats() const { return lane_results() * row_groups * WARPGROUP; }
};

// Everything that is compiled, for each 16-bit type: what wins somewhere, see dispatch.h.
constexpr SmallWgmmaShape SMALL_WGMMA_SHAPES[] = {
    {16, 4, 3, 2}, {32, 2, 4, 2}, {32, 4, 3, 1}, {64, 2, 3, 1},
};
constexpr int SMALL_WGMMA_SHAPE_COUNT = sizeof(SMALL_WGMMA_SHAPES) / sizeof(SMALL_WGMMA_SHAPES[0]);

// Index of a compiled shape; asking for another at compile time does not compile.
constexpr int small_wgmma_shape(int tokens, int row_groups) {
  int i = 0;
  while (SMALL_WGMMA_SHAPES[i].tokens != tokens || SMALL_WGMMA_SHAPES[i].row_groups != row_groups) ++i;
  return i;
}

// Byte offsets in a block's shared memory. The pair table is at 0; swizzled tiles of x begin at multiples of 1024.
struct SmallWgmmaShared {
  static constexpr int TABLE_BYTES = 256 * 256;

  int ring;           // [stages] of: 16 bit x [BURST][tokens][64], codes [row_tiles][BURST][512]
  int scale_codes;    // [stages][row_tiles] of: 64 codes, or float [BURST][16] with plain absmax
  int nested_code;    // float [256]
  int scales;         // float [consumer warps][BURST][16], of the burst in hand
  int barriers;       // uint64 [stages][full, empty], then those of the mailbox
  int nested_absmax;  // float [nested_groups], of the block's rows
  int total;

  // Of a row tile in a stage.
  NF4L_HD static constexpr int scale_bytes(bool nested) { return nested ? 64 : BURST * TILE_ROWS * 4; }

  NF4L_HD constexpr SmallWgmmaShared(SmallWgmmaShape shape, bool nested, int nested_groups)
      : ring(TABLE_BYTES),
        scale_codes(ring + shape.stages * shape.stage_bytes()),
        nested_code(scale_codes + shape.stages * shape.row_tiles() * scale_bytes(nested)),
        scales(nested_code + (nested ? 256 * 4 : 0)),
        barriers(scales + shape.row_tiles() * BURST * TILE_ROWS * 4),
        nested_absmax(barriers + shape.stages * 16 + 4 * 8),
        total(nested_absmax + nested_groups * 4) {}
};

// The blocks that have units of one row block: owner .. stop - 1, of which the owner begins it.
struct Sharers {
  // Of two or three the owner adds up as fast. Of more than eight too many would wait for blocks which may not have started.
  static constexpr int LEAST_SPREAD = 4, MOST_SPREAD = 8;

  int owner, stop;

  NF4L_HD constexpr Sharers(const Deal& deal, int row_block, int bursts)
      : owner(deal.blocks_before(row_block * bursts + 1) - 1), stop(deal.blocks_before((row_block + 1) * bursts)) {}

  NF4L_HD constexpr int count() const { return stop - owner; }
  // Whether each of them adds up a part of the sums; else the owner adds the others' to its own.
  NF4L_HD constexpr bool spread() const { return count() >= LEAST_SPREAD && count() <= MOST_SPREAD; }
};

// One launch: units, (row block, burst), lie in one line, and each block of the grid has a stretch of it.
struct SmallWgmmaPlan {
  int shape;        // in SMALL_WGMMA_SHAPES
  int bursts;       // of one row block
  int blocks;
  Deal deal;
  int shared_bytes;
  int64_t workspace_bytes;  // 0 where no row block is cut; else two slots a block, and a set of counters at the end
};

// Cuts a call into blocks of `least_units` units at least. False when nothing fits, or when an index would leave 32 bits.
inline bool plan_small_wgmma(const FourBitProblem& p, int shape_index, int least_units, int sms, int shared_limit,
                             SmallWgmmaPlan& plan) {
  const SmallWgmmaShape shape = SMALL_WGMMA_SHAPES[shape_index];
  const int64_t row_blocks = ceil_div(p.n, shape.block_rows()), bursts = ceil_div(p.k / TILE_K4, BURST);
  if (row_blocks * shape.block_rows() * p.blocks_per_row > INT32_MAX || p.k > INT32_MAX / 2) return false;
  const int64_t units = row_blocks * bursts;
  int64_t blocks = units / (least_units > 1 ? least_units : 1);
  blocks = blocks < sms ? blocks : sms;
  blocks = blocks < 1 ? 1 : blocks < MAX_BLOCKS ? blocks : MAX_BLOCKS;
  const int64_t base = units / blocks, extra = units % blocks;
  // A stretch that starts with the last burst of a row block meets the most of them.
  const int64_t met = ceil_div(base + (extra > 0) - 1, bursts) + 1;
  const int64_t nested_groups = nested_span(p, (met < row_blocks ? met : row_blocks) * shape.block_rows());
  if (nested_groups * 4 > shared_limit) return false;
  const int64_t shared = SmallWgmmaShared(shape, p.nested, int(nested_groups)).total;
  if (shared > shared_limit) return false;
  const bool cut = bursts > 1 && (extra > 0 || base % bursts > 0);
  plan = {shape_index, int(bursts), int(blocks), {int(base), int(extra)}, int(shared),
          cut ? blocks * 2 * shape.slot_floats() * 4 + MAX_BLOCKS * 4 : 0};
  return true;
}

}  // namespace nf4l

#endif
