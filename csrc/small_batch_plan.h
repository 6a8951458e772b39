// The small-batch engine seen from the host: its compiled shapes, how a call is cut into blocks, and the map of a
// block's shared memory. Plain C++, so that tests and dispatch.h need no CUDA.
#ifndef NF4LINEAR_SMALL_BATCH_PLAN_H
#define NF4LINEAR_SMALL_BATCH_PLAN_H

#include <stdint.h>

#include "deal.h"
#include "four_bit.h"
#include "layout.h"

namespace nf4l {

// A row group is `row_tiles` tiles of 16 rows, which a warp multiplies together; tokens is how many rows of x fit.
struct SmallBatchShape {
  int row_tiles;
  int tokens;  // 1, or a multiple of 8
  int warps;   // of a block; one block on an SM

  NF4L_HD constexpr int token_tiles() const { return tokens == 1 ? 0 : tokens / 8; }
  // Results of one row group that a lane holds: with one token only columns 0 of the accumulators count.
  NF4L_HD constexpr int lane_results() const { return tokens == 1 ? 2 * row_tiles : 4 * row_tiles * token_tiles(); }
};

// Everything that is compiled, for each 16-bit type. More tokens than 32 or more registers a warp spill.
constexpr SmallBatchShape SMALL_BATCH_SHAPES[] = {
    {1, 1, 8}, {2, 1, 8}, {1, 8, 8}, {2, 8, 8}, {1, 16, 8}, {2, 16, 8}, {1, 32, 8},
};
constexpr int SMALL_BATCH_SHAPE_COUNT = sizeof(SMALL_BATCH_SHAPES) / sizeof(SMALL_BATCH_SHAPES[0]);

// Index of a compiled shape; asking for another at compile time does not compile.
constexpr int small_batch_shape(int row_tiles, int tokens) {
  int i = 0;
  while (SMALL_BATCH_SHAPES[i].row_tiles != row_tiles || SMALL_BATCH_SHAPES[i].tokens != tokens) ++i;
  return i;
}

// Slices of the inputs that a row of a launch table asks for.
template <class Row>
int wanted_slices(const Row& row, SmallBatchShape shape, int sms, int64_t n, int64_t k_tiles) {
  const int64_t slices = k_tiles <= row.whole_tiles ? 1 : ceil_div(k_tiles, row.slice_tiles);
  // Few rows leave SMs without work: cut the inputs further, sixteen tiles a slice at least.
  const int64_t groups = ceil_div(n, TILE_ROWS * shape.row_tiles);
  const int64_t idle = sms / groups, most = k_tiles / 16;
  return int(slices < idle && slices < most ? (idle < most ? idle : most) : slices);
}

// Block columns of a launch.
constexpr int MAX_PARTS = MAX_BLOCKS;

// Byte offsets in a block's shared memory.
struct SmallBatchShared {
  int nested_code;    // float [256]
  int scales;         // float [warps][row_tiles][BURST][16], of the burst in hand
  int tails;          // float [warps][lane_results][32]
  int nested_absmax;  // float [nested_groups], of the block's rows
  int activations;    // 16 bit [tiles][tokens][64], tiles = those of a slice, up to a whole burst
  int total;

  NF4L_HD constexpr SmallBatchShared(SmallBatchShape shape, int nested_groups, int slice_tiles)
      : nested_code(PAIR_TABLE_BYTES),
        scales(nested_code + 256 * 4),
        tails(scales + shape.warps * shape.row_tiles * BURST * 16 * 4),
        nested_absmax(tails + shape.warps * shape.lane_results() * 32 * 4),
        activations(nested_absmax + (nested_groups * 4 + 127) / 128 * 128),
        total(activations + (slice_tiles + BURST - 1) / BURST * BURST * shape.tokens * 128) {}
};

// One launch. The grid is parts x slices blocks: a part is a run of row groups, a slice a run of inputs.
struct SmallBatchPlan {
  int shape;         // in SMALL_BATCH_SHAPES
  int groups;        // row groups of the weight
  int parts;
  int base_groups;   // each part has this many row groups, the first `extra_groups` parts one more
  int extra_groups;
  int slices;
  int slice_tiles;   // of 64 inputs, a multiple of BURST; the last slice may have fewer
  int shared_bytes;
  int64_t workspace_bytes;  // 0 with one slice; else partial sums, and a set of arrival counters at its end
};

// Cuts a call into `slices` slices at least, more where the activations of one would not fit into shared memory.
// False when nothing fits, or when an index would leave 32 bits.
inline bool plan_small_batch(const FourBitProblem& p, int shape_index, int slices, int sms, int shared_limit,
                             SmallBatchPlan& plan) {
  const SmallBatchShape shape = SMALL_BATCH_SHAPES[shape_index];
  const int64_t k_tiles = p.k / TILE_K4, groups = ceil_div(ceil_div(p.n, TILE_ROWS), shape.row_tiles);
  if (groups * k_tiles > INT32_MAX || p.n * p.blocks_per_row > INT32_MAX) return false;
  const int64_t wanted = ceil_div(ceil_div(k_tiles, slices), BURST) * BURST;
  // Of more tiles the activations alone are too large, and beyond any int with the longest rows.
  const int64_t most = shared_limit / (shape.tokens * TILE_K4 * 2) / BURST * BURST;
  for (int64_t slice_tiles = wanted < most ? wanted : most; slice_tiles > 0; slice_tiles -= BURST) {
    const int64_t cut = ceil_div(k_tiles, slice_tiles);  // no slice is empty
    const int64_t most_parts = groups < MAX_PARTS ? groups : MAX_PARTS;
    const auto second_level = [&](int64_t parts) {
      return nested_span(p, ceil_div(groups, parts) * shape.row_tiles * TILE_ROWS);
    };
    int64_t parts = sms / cut < 1 ? 1 : sms / cut;
    parts = parts < most_parts ? parts : most_parts;
    // Gigantic weights: more blocks than SMs, rather than more second-level scales than fit.
    while (second_level(parts) * 4 > shared_limit / 16 && parts < most_parts) ++parts;
    const int64_t nested_groups = second_level(parts);
    if (nested_groups * 4 > shared_limit) continue;
    const int64_t shared = SmallBatchShared(shape, int(nested_groups), int(slice_tiles)).total;
    if (shared > shared_limit) continue;
    const int64_t sums = cut > 1 ? cut * groups * shape.lane_results() * 32 * 4 + MAX_PARTS * 4 : 0;
    plan = {shape_index, int(groups), int(parts), int(groups / parts), int(groups % parts), int(cut), int(slice_tiles),
            int(shared), sums};
    return true;
  }
  return false;
}

}  // namespace nf4l

#endif
