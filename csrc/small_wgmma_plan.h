// The wgmma engine seen from the host: its compiled shapes, how a call is cut into blocks, and the map of a block's
// shared memory. Plain C++, so that tests and dispatch.h need no CUDA.
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
  int burst;         // 64-input tiles of a unit: 4, or 2
  int stages;        // of the ring; a stage holds a unit
  int accumulators;  // 2: the scales of a tile are applied while the next tile multiplies

  NF4L_HD constexpr int block_rows() const { return row_groups * WARPGROUP_ROWS; }
  NF4L_HD constexpr int row_tiles() const { return block_rows() / TILE_ROWS; }
  NF4L_HD constexpr int threads() const { return (row_groups + 1) * WARPGROUP; }
  NF4L_HD constexpr int lane_results() const { return tokens / 2; }
  NF4L_HD constexpr int x_bytes() const { return burst * tokens * TILE_K4 * 2; }  // of a stage
  NF4L_HD constexpr int stage_bytes() const { return x_bytes() + row_tiles() * burst * TILE_BYTES; }
  // Sums of one row block, float32.
  NF4L_HD constexpr int slot_floats() const { return lane_results() * row_groups * WARPGROUP; }
};

// Everything that is compiled, for each 16-bit type: what wins somewhere, see dispatch.h.
constexpr SmallWgmmaShape SMALL_WGMMA_SHAPES[] = {
    {16, 4, 4, 3, 2}, {32, 2, 4, 4, 2}, {32, 3, 4, 3, 2}, {32, 4, 4, 3, 1}, {64, 2, 4, 3, 1}, {64, 3, 4, 2, 1},
    {96, 2, 4, 2, 1}, {128, 2, 2, 3, 1},
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
  // [stages] of: 16 bit x [burst][x_rows][64], the rows that are copied, in room for [burst][tokens][64]; codes
  // [row_tiles][burst][512]
  int ring;
  int scale_codes;    // [stages][row_tiles] of: 64 codes, or float [burst][16] with plain absmax
  int nested_code;    // float [256]
  int scales;         // float [consumer warps][burst][16], of the unit in hand
  int barriers;       // uint64 [stages][full, empty], then those of the mailbox
  int nested_absmax;  // float [nested_groups], of the block's rows
  int total;

  // Of a row tile in a stage.
  NF4L_HD static constexpr int scale_bytes(int burst, bool nested) { return nested ? 64 : burst * TILE_ROWS * 4; }

  NF4L_HD constexpr SmallWgmmaShared(SmallWgmmaShape shape, bool nested, int nested_groups)
      : ring(PAIR_TABLE_BYTES),
        scale_codes(ring + shape.stages * shape.stage_bytes()),
        nested_code(scale_codes + shape.stages * shape.row_tiles() * scale_bytes(shape.burst, nested)),
        scales(nested_code + (nested ? 256 * 4 : 0)),
        barriers(scales + shape.row_tiles() * shape.burst * TILE_ROWS * 4),
        nested_absmax(barriers + shape.stages * 16 + 4 * 8),
        total(nested_absmax + nested_groups * 4) {}
};

// The blocks that have units of one row block: owner .. stop - 1, of which the owner begins it.
struct Sharers {
  // Of more than eight too many would wait for blocks which may not have started.
  static constexpr int MOST_SPREAD = 8;

  int owner, stop;
  bool even;  // all stretches are the same part of a row block, and end together

  NF4L_HD constexpr Sharers(const Deal& deal, int row_block, int bursts)
      : owner(deal.blocks_before(row_block * bursts + 1) - 1), stop(deal.blocks_before((row_block + 1) * bursts)),
        even(deal.extra == 0 && bursts % deal.base == 0) {}

  NF4L_HD constexpr int count() const { return stop - owner; }
  // Whether each of them adds up a part of the sums; else the owner adds the others' to its own.
  NF4L_HD constexpr bool spread() const { return even && count() > 1 && count() <= MOST_SPREAD; }
};

// What a block of a small weight gets at least, in units: the sums of many blocks would take longer than their work,
// those of more than MOST_SPREAD to a row block above all (96 tokens: 512x8192 10.7 us, with twice as many 15.1). Up to
// a third more where that divides a row block, so that all who share it add up; else its owner adds alone, and one more
// block than MOST_SPREAD can have a part of it.
constexpr int least_units(int burst, int64_t k) {
  constexpr int LEAST_TILES = 4;
  const int even_share = int(ceil_div(k / TILE_K4, Sharers::MOST_SPREAD));
  const int least = int(ceil_div(even_share > LEAST_TILES ? even_share : LEAST_TILES, burst));
  const int64_t bursts = ceil_div(k / TILE_K4, burst);
  for (int units = least; units <= least * 4 / 3; ++units) {
    if (bursts % units == 0) return units;
  }
  return least;
}

// A number of bursts, and the division of units by it.
struct Bursts {
  int count = 1;
  Divider divider;

  constexpr Bursts() = default;
  constexpr explicit Bursts(int bursts) : count(bursts), divider(bursts) {}
  NF4L_HD constexpr operator int() const { return count; }
  friend NF4L_HD constexpr int operator/(int unit, const Bursts& b) { return b.divider.quotient(unit); }
};

// One launch: units, (row block, burst), lie in one line, and each block of the grid has a stretch of it.
struct SmallWgmmaPlan {
  int shape;        // in SMALL_WGMMA_SHAPES
  Bursts bursts;    // of one row block
  int blocks;
  Deal deal;
  int shared_bytes;
  int64_t workspace_bytes;  // 0 where no row block is cut; else two slots a block, and a set of counters at the end
};

// Units of the longest stretch, for `units` units on `sms` SMs. A stretch that divides a row block leaves no block with
// parts of two, and then all that share one add it up together; where it takes many to a row block, that is worth a
// sixteenth more.
inline int64_t stretch_units(int64_t units, int64_t bursts, int64_t sms, int64_t least) {
  const int64_t needed = ceil_div(units, sms), shortest = needed > least ? needed : least;
  const int64_t longest = shortest * 3 <= bursts ? shortest * 17 / 16 : shortest;
  for (int64_t stretch = shortest; stretch <= longest; ++stretch) {
    if (bursts % stretch == 0) return stretch;
  }
  return shortest;
}

// How units are dealt to blocks.
struct WgmmaCut {
  int blocks;
  Deal deal;
  bool shares;  // some row block has units in several blocks
};

// At least `least_units` units a block.
inline WgmmaCut cut_units(int64_t units, int64_t bursts, int64_t sms, int64_t least_units) {
  const int64_t least = least_units > 1 ? least_units : 1, most_blocks = sms < MAX_BLOCKS ? sms : MAX_BLOCKS;
  const int64_t stretch = stretch_units(units, bursts, most_blocks, least);
  int64_t blocks = bursts % stretch == 0 ? units / stretch : units / least;
  blocks = blocks < 1 ? 1 : blocks < most_blocks ? blocks : most_blocks;
  const int64_t base = units / blocks, extra = units % blocks;
  return {int(blocks), {int(base), int(extra)}, bursts > 1 && (extra > 0 || base % bursts > 0)};
}

// Cuts a call into blocks of `least_units` units at least. False when nothing fits, or when an index would leave 32
// bits.
inline bool plan_small_wgmma(const FourBitProblem& p, int shape_index, int least_units, int sms, int shared_limit,
                             SmallWgmmaPlan& plan) {
  const SmallWgmmaShape shape = SMALL_WGMMA_SHAPES[shape_index];
  const int64_t row_blocks = ceil_div(p.n, shape.block_rows()), bursts = ceil_div(p.k / TILE_K4, shape.burst);
  if (row_blocks * shape.block_rows() * p.blocks_per_row > INT32_MAX || p.k > INT32_MAX / 2) return false;
  const WgmmaCut cut = cut_units(row_blocks * bursts, bursts, sms, least_units);
  // A stretch that starts with the last burst of a row block meets the most of them.
  const int64_t met = ceil_div(cut.deal.base + (cut.deal.extra > 0) - 1, bursts) + 1;
  const int64_t nested_groups = nested_span(p, (met < row_blocks ? met : row_blocks) * shape.block_rows());
  if (nested_groups * 4 > shared_limit) return false;
  const int64_t shared = SmallWgmmaShared(shape, p.nested, int(nested_groups)).total;
  if (shared > shared_limit) return false;
  plan = {shape_index, Bursts(int(bursts)), cut.blocks, cut.deal, int(shared),
          cut.shares ? int64_t(cut.blocks) * 2 * shape.slot_floats() * 4 + MAX_BLOCKS * 4 : 0};
  return true;
}

}  // namespace nf4l

#endif
