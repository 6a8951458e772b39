// The prefill engine's choice for a call: one launch or two, and the shape and slices of each. Plain C++.
#ifndef NF4LINEAR_GEMM_WGMMA_CHOICE_H
#define NF4LINEAR_GEMM_WGMMA_CHOICE_H

#include <stdint.h>

#include "gemm_wgmma_plan.h"
#include "gemm_wgmma_shape.h"
#include "layout.h"

namespace nf4l {

// What a call costs beside its k tiles, and an output tile. What slices cost: barriers and a late start of large
// clusters, for each block but one, and sums that are sent and read; and the meeting of two clusters, with a
// microsecond for doubt.
constexpr int GEMM_START_NS = 3200, GEMM_STORE_NS = 2000, GEMM_SLICE_NS = 500, GEMM_SLICE_BYTES_A_NS = 45;
constexpr int GEMM_MEETING_NS = 1600, GEMM_MEETING_BYTES_A_NS = 19;
// A second launch has to save one part in so many, what such estimates are good for.
constexpr int GEMM_WORTH_A_LAUNCH = 50;

// How long a launch takes, in nanoseconds.
inline int64_t estimated_ns(const GemmPlan& plan) {
  const GemmShape shape = GEMM_SHAPES[plan.shape];
  const GemmGrid& grid = plan.grid;
  const int64_t whole = int64_t(grid.k_tiles) * shape.tile_ns + GEMM_STORE_NS;
  const int64_t sent = int64_t(shape.tokens) * shape.block_rows() * 4 * (grid.blocks - 1) / grid.blocks;
  const int64_t slice = ceil_div(grid.k_tiles, grid.slices()) * shape.slice_ns + GEMM_STORE_NS +
                        (grid.blocks - 1) * GEMM_SLICE_NS + sent / GEMM_SLICE_BYTES_A_NS +
                        (grid.parts - 1) * (GEMM_MEETING_NS + sent / GEMM_MEETING_BYTES_A_NS);
  return GEMM_START_NS + ceil_div(grid.pairs, grid.clusters) * whole + (grid.sliced_tiles() > 0 ? slice : 0);
}

// The product that is planned, and what it may use.
struct GemmProblem {
  int64_t m, n, k;
  GemmFormatBytes format;
  int sms, shared_limit;
};

// Plans the launch that should take least, and says how long: in nanoseconds, INT64_MAX when none fits.
inline int64_t plan_best_gemm(const GemmProblem& p, GemmPlan& best) {
  int64_t best_ns = INT64_MAX;
  for (int shape = 0; shape < GEMM_SHAPE_COUNT; ++shape) {
    for (int slices = 1; slices <= GEMM_FOUR_BY_TWO; ++slices) {
      GemmPlan plan;
      if (!plan_gemm(p.m, p.n, p.k, p.format, shape, slices, p.sms, p.shared_limit, plan)) continue;
      const int64_t ns = estimated_ns(plan);
      if (ns < best_ns) best = plan, best_ns = ns;
    }
  }
  return best_ns;
}

// A call in one launch, or in two where it ends in a wave that most SMs have no part in: the last launch has as many of
// the weight's rows as make full waves, and the one in front of it the others, in the shape and slices that are best
// for so few. That one is first because the start of the last is hidden behind it.
struct GemmLaunches {
  int64_t front_rows = 0;  // 0: one launch
  GemmPlan front = {}, last = {};

  int64_t workspace_bytes() const {
    return front.workspace_bytes > last.workspace_bytes ? front.workspace_bytes : last.workspace_bytes;
  }
};

// The weight's rows that are left in front of full waves of that shape, which are planned; 0 when there are none.
inline int64_t plan_full_waves(const GemmProblem& p, int shape_index, GemmPlan& waves) {
  const int pair_rows = 2 * GEMM_SHAPES[shape_index].block_rows();
  const int64_t token_tiles = ceil_div(p.m, GEMM_SHAPES[shape_index].tokens), row_pairs = ceil_div(p.n, pair_rows);
  const int64_t at_once = clusters_at_once(p.sms, 2);
  if (at_once == 0 || row_pairs > INT32_MAX / token_tiles) return 0;
  const int64_t front_pairs = row_pairs - row_pairs * token_tiles / at_once * at_once / token_tiles;
  if (front_pairs == 0 || front_pairs == row_pairs) return 0;
  const int64_t front_rows = front_pairs * pair_rows, rows = p.n - front_rows;
  return plan_gemm(p.m, rows, p.k, p.format, shape_index, 1, p.sms, p.shared_limit, waves) ? front_rows : 0;
}

// Plans the one or two launches that should take least, and says how long: in nanoseconds, INT64_MAX when none fit.
inline int64_t plan_gemm_launches(const GemmProblem& p, GemmLaunches& best) {
  best = {};
  const int64_t one_ns = plan_best_gemm(p, best.last);
  if (one_ns == INT64_MAX) return one_ns;
  int64_t best_ns = one_ns - one_ns / GEMM_WORTH_A_LAUNCH;
  for (int shape = 0; shape < GEMM_SHAPE_COUNT; ++shape) {
    GemmLaunches cut;
    cut.front_rows = plan_full_waves(p, shape, cut.last);
    if (cut.front_rows == 0) continue;
    GemmProblem front = p;
    front.n = cut.front_rows;
    const int64_t last_ns = estimated_ns(cut.last);
    // Most that are not worth it end here: another shape is hardly a quarter faster than this one in full waves.
    const double as_fast = double(last_ns - GEMM_START_NS) * double(front.n) / double(p.n - front.n);
    if (double(last_ns + GEMM_START_NS) + as_fast * 3 / 4 >= double(best_ns)) continue;
    const int64_t front_ns = plan_best_gemm(front, cut.front);
    if (front_ns < best_ns - last_ns) best = cut, best_ns = last_ns + front_ns;
  }
  return best.front_rows > 0 ? best_ns : one_ns;
}

}  // namespace nf4l

#endif
