// The 8-bit small-batch engine seen from the host: its compiled shapes, how a call is cut into blocks, and the map of a
// block's shared memory. Plain C++, so that tests and dispatch.h need no CUDA.
#ifndef NF4LINEAR_SMALL_W8_PLAN_H
#define NF4LINEAR_SMALL_W8_PLAN_H

#include <stdint.h>

#include "layout.h"
#include "small_batch_plan.h"

namespace nf4l {

// An 8-bit product as the planners see it; k is a multiple of 64.
struct EightBitProblem {
  int64_t n, k;
  int group_tiles;  // 64-input tiles under one scale, 0 with one scale a row
};

// Everything that is compiled, for each 16-bit type and with both kinds of scales.
constexpr SmallBatchShape SMALL_W8_SHAPES[] = {
    {1, 1, 8},
    {1, 8, 8},
    {1, 16, 8},
    {2, 32, 8},
};
constexpr int SMALL_W8_SHAPE_COUNT = sizeof(SMALL_W8_SHAPES) / sizeof(SMALL_W8_SHAPES[0]);

// Index of a compiled shape; asking for another at compile time does not compile.
constexpr int small_w8_shape(int row_tiles, int tokens) {
  int i = 0;
  while (SMALL_W8_SHAPES[i].row_tiles != row_tiles || SMALL_W8_SHAPES[i].tokens != tokens) ++i;
  return i;
}

constexpr int W8_TILE_BYTES = 2 * TILE_BYTES;  // of 16 rows x 64 inputs: two tiles of tile16x32

// Byte offsets in a block's shared memory. A ring of each warp's own holds the bursts on their way.
struct SmallW8Shared {
  static constexpr int MOST_STAGES = 3;  // with more, the first burst that a warp asks for comes too late

  // One burst of one row group: codes, then group scales, float [row_tiles][groups of the burst][16].
  NF4L_HD static constexpr int scale_bytes(SmallBatchShape shape, int group_tiles) {
    return group_tiles ? shape.row_tiles * (BURST / group_tiles) * TILE_ROWS * 4 : 0;
  }
  NF4L_HD static constexpr int stage_bytes(SmallBatchShape shape, int group_tiles) {
    return shape.row_tiles * BURST * W8_TILE_BYTES + scale_bytes(shape, group_tiles);
  }

  int activations;  // 16 bit [tiles][tokens][64], tiles = those of a slice, up to a whole burst
  int tails;        // float [warps][lane_results][32]
  int barriers;     // [warps][MOST_STAGES]
  int flag;         // whether this block is the last of its part
  int rings;        // [warps][stages][stage_bytes], at a multiple of 128: the copy engine writes lines of that
  int total;

  NF4L_HD constexpr SmallW8Shared(SmallBatchShape shape, int group_tiles, int slice_tiles, int stages)
      : activations(0),
        tails((slice_tiles + BURST - 1) / BURST * BURST * shape.tokens * 128),
        barriers(tails + shape.warps * shape.lane_results() * 32 * 4),
        flag(barriers + shape.warps * MOST_STAGES * 8),
        rings((flag + 4 + 127) / 128 * 128),
        total(rings + shape.warps * stages * stage_bytes(shape, group_tiles)) {}
};

// One launch. The grid is parts x slices blocks: a part is a run of row groups, a slice a run of inputs.
struct SmallW8Plan {
  int shape;   // in SMALL_W8_SHAPES
  int groups;  // row groups of the weight
  int parts;
  int base_groups;  // each part has this many row groups, the first `extra_groups` parts one more
  int extra_groups;
  int slices;
  int slice_tiles;  // of 64 inputs, a multiple of BURST; the last slice may have fewer
  int stages;       // bursts on their way to each warp
  int shared_bytes;
  int64_t workspace_bytes;  // 0 with one slice; else partial sums, and a set of arrival counters at its end
};

// Cuts a call into `slices` slices at least, more where the activations of one would leave too little shared memory for
// the rings. False when nothing fits, or when an index would leave 32 bits.
inline bool plan_small_w8(const EightBitProblem& p, int shape_index, int slices, int sms, int shared_limit,
                          SmallW8Plan& plan) {
  const SmallBatchShape shape = SMALL_W8_SHAPES[shape_index];
  const int64_t k_tiles = p.k / TILE_K4, groups = ceil_div(ceil_div(p.n, TILE_ROWS), shape.row_tiles);
  if (groups * k_tiles > INT32_MAX / 4 || p.n > INT32_MAX - 1024) return false;
  const int64_t wanted = ceil_div(ceil_div(k_tiles, slices), BURST) * BURST;
  // Of more tiles the activations alone are too large, and beyond any int with the longest rows.
  const int64_t most = shared_limit / (shape.tokens * TILE_K4 * 2) / BURST * BURST;
  for (int64_t slice_tiles = wanted < most ? wanted : most; slice_tiles > 0; slice_tiles -= BURST) {
    const int64_t cut = ceil_div(k_tiles, slice_tiles);  // no slice is empty
    int64_t parts = sms / cut < 1 ? 1 : sms / cut;
    parts = parts < groups ? parts : groups;
    parts = parts < MAX_PARTS ? parts : MAX_PARTS;
    // No more stages than a warp has bursts, and where it can be, no more than leave room for a block of the next
    // launch.
    const int64_t units = ceil_div(ceil_div(groups, parts) * (slice_tiles / BURST), shape.warps);
    const auto shared = [&](int64_t stages) {
      return SmallW8Shared(shape, p.group_tiles, int(slice_tiles), int(stages)).total;
    };
    int64_t stages = units < SmallW8Shared::MOST_STAGES ? units : SmallW8Shared::MOST_STAGES;
    while (stages > 2 && shared(stages) > shared_limit / 2 - 1024) --stages;
    while (stages > 0 && shared(stages) > shared_limit) --stages;
    if (stages < 2 && stages < units) continue;
    const int64_t sums = cut > 1 ? cut * groups * shape.lane_results() * 32 * 4 + MAX_PARTS * 4 : 0;
    plan = {shape_index, int(groups),      int(parts),  int(groups / parts), int(groups % parts),
            int(cut),    int(slice_tiles), int(stages), int(shared(stages)), sums};
    return true;
  }
  return false;
}

}  // namespace nf4l

#endif
