// The wgmma engine for 8-bit weights seen from the host: its compiled shapes, how a call is cut into blocks, and the
// map of a block's shared memory. Plain C++, so that tests and dispatch.h need no CUDA.
#ifndef NF4LINEAR_SMALL_WGMMA_W8_PLAN_H
#define NF4LINEAR_SMALL_WGMMA_W8_PLAN_H

#include <stdint.h>

#include "deal.h"
#include "layout.h"
#include "small_w8_plan.h"
#include "small_wgmma_plan.h"

namespace nf4l {

// A block is row_groups warpgroups that multiply, and one that feeds them.
struct SmallWgmmaW8Shape {
  int tokens;      // rows of x that fit: the n of wgmma
  int row_groups;  // warpgroups side by side, 64 rows each
  int burst;       // 64-input tiles of a unit
  int stages;      // of the ring; a stage holds a unit

  NF4L_HD constexpr int block_rows() const { return row_groups * WARPGROUP_ROWS; }
  NF4L_HD constexpr int row_tiles() const { return block_rows() / TILE_ROWS; }
  NF4L_HD constexpr int threads() const { return (row_groups + 1) * WARPGROUP; }
  NF4L_HD constexpr int lane_results() const { return tokens / 2; }
  NF4L_HD constexpr int x_bytes() const { return burst * tokens * TILE_K4 * 2; }             // of a stage
  NF4L_HD constexpr int codes_bytes() const { return row_tiles() * burst * W8_TILE_BYTES; }  // of a stage
  NF4L_HD constexpr int stage_bytes() const { return x_bytes() + codes_bytes(); }
  // Of group scales in a stage, float [row_tiles][groups of the burst][16]: at most, with 64 inputs a group.
  NF4L_HD constexpr int scale_bytes() const { return row_tiles() * burst * TILE_ROWS * 4; }
  // Sums of one row block, float32.
  NF4L_HD constexpr int slot_floats() const { return lane_results() * row_groups * WARPGROUP; }
};

// Everything that is compiled, for each kind of codes, of scales and 16-bit type.
constexpr SmallWgmmaW8Shape SMALL_WGMMA_W8_SHAPES[] = {
    {16, 2, 4, 5}, {32, 2, 2, 8}, {32, 2, 4, 4}, {64, 2, 2, 6}, {64, 2, 4, 3},
};
constexpr int SMALL_WGMMA_W8_SHAPE_COUNT = sizeof(SMALL_WGMMA_W8_SHAPES) / sizeof(SMALL_WGMMA_W8_SHAPES[0]);

// Index of a compiled shape; asking for another at compile time does not compile.
constexpr int small_wgmma_w8_shape(int tokens, int row_groups, int burst) {
  int i = 0;
  while (SMALL_WGMMA_W8_SHAPES[i].tokens != tokens || SMALL_WGMMA_W8_SHAPES[i].row_groups != row_groups ||
         SMALL_WGMMA_W8_SHAPES[i].burst != burst) {
    ++i;
  }
  return i;
}

// Byte offsets in a block's shared memory.
struct SmallWgmmaW8Shared {
  // [stages] of: 16 bit x [burst][x_rows][64], swizzled, the rows that are copied, in room for [burst][tokens][64];
  // codes [row_tiles][burst][2][512]
  int ring;
  int scales;    // [stages] of group scales
  int barriers;  // uint64 [stages][full, empty], then those of the mailbox
  int total;

  NF4L_HD constexpr explicit SmallWgmmaW8Shared(SmallWgmmaW8Shape shape)
      : ring(0),
        scales(ring + shape.stages * shape.stage_bytes()),
        barriers(scales + shape.stages * shape.scale_bytes()),
        total(barriers + shape.stages * 16 + 4 * 8) {}
};

// One launch: units, (row block, burst), lie in one line, and each block of the grid has a stretch of it.
struct SmallWgmmaW8Plan {
  int shape;   // in SMALL_WGMMA_W8_SHAPES
  int bursts;  // of one row block
  int blocks;
  Deal deal;
  int shared_bytes;
  int64_t workspace_bytes;  // 0 where no row block is cut; else two slots a block, and a set of counters at the end
};

// Cuts a call into blocks of `least_units` units at least. False when nothing fits, or when an index would leave 32
// bits.
inline bool plan_small_wgmma_w8(int64_t n, int64_t k, int shape_index, int least_units, int sms, int shared_limit,
                                SmallWgmmaW8Plan& plan) {
  const SmallWgmmaW8Shape shape = SMALL_WGMMA_W8_SHAPES[shape_index];
  const int64_t row_blocks = ceil_div(n, shape.block_rows()), bursts = ceil_div(k / TILE_K4, shape.burst);
  const int shared = SmallWgmmaW8Shared(shape).total;
  if (n > INT32_MAX - 1024 || k > INT32_MAX / 2 || row_blocks * bursts > INT32_MAX || shared > shared_limit)
    return false;
  const WgmmaCut cut = cut_units(row_blocks * bursts, bursts, sms, least_units);
  const int64_t slots = cut.shares ? int64_t(cut.blocks) * 2 * shape.slot_floats() * 4 + MAX_BLOCKS * 4 : 0;
  plan = {shape_index, int(bursts), cut.blocks, cut.deal, shared, slots};
  return true;
}

}  // namespace nf4l

#endif
