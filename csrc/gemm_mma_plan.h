// The mma.sync prefill engine seen from the host: its compiled shapes, how a call is cut into blocks, and the map of a
// block's shared memory. Plain C++, so that tests and dispatch.h need no CUDA.
#ifndef NF4LINEAR_GEMM_MMA_PLAN_H
#define NF4LINEAR_GEMM_MMA_PLAN_H

#include <stdint.h>

#include "deal.h"
#include "four_bit.h"
#include "gemm_cut.h"
#include "layout.h"

namespace nf4l {

// A block computes output tiles of BLOCK_ROWS rows of the weight by `tokens` rows of x. Its warps are two groups of
// four, which take turns with the k tiles; each warp multiplies 32 rows by all tokens.
struct GemmMmaShape {
  int tokens;   // a multiple of 16
  int tile_ns;  // what a k tile takes, measured (docs/kernel-log.md); for the choice between shapes

  static constexpr int GROUPS = 2, GROUP_WARPS = 4, ROW_TILES = 2;  // ROW_TILES: of a warp
  static constexpr int GROUP_THREADS = GROUP_WARPS * 32, THREADS = GROUPS * GROUP_THREADS;
  static constexpr int BLOCK_ROWS = GROUP_WARPS * ROW_TILES * TILE_ROWS;
  NF4L_HD constexpr int x_bytes() const { return tokens * GEMM_K * 2; }                       // of a stage
  NF4L_HD constexpr int codes_bytes() const { return GROUP_WARPS * ROW_TILES * TILE_BYTES; }  // of a stage
  NF4L_HD constexpr int stage_bytes() const { return x_bytes() + codes_bytes() + BLOCK_ROWS * 4; }
  // Sums of a lane, in vectors of four: rows g and g + 8 of a row tile, two of eight tokens.
  NF4L_HD constexpr int vectors() const { return ROW_TILES * tokens / 8; }
  // Sums of one output tile, float32.
  NF4L_HD constexpr int slot_floats() const { return BLOCK_ROWS * tokens; }
};

// Everything that is compiled, for each 16-bit type.
constexpr GemmMmaShape GEMM_MMA_SHAPES[] = {{48, 520}, {64, 600}, {96, 715}, {128, 870}};
constexpr int GEMM_MMA_SHAPE_COUNT = sizeof(GEMM_MMA_SHAPES) / sizeof(GEMM_MMA_SHAPES[0]);

// Stages of a group's ring: as many as fit.
constexpr int GEMM_MMA_LEAST_STAGES = 2, GEMM_MMA_MOST_STAGES = 3;

// Byte offsets in a block's shared memory. Between two output tiles the ring is empty, and has room for their sums and
// results.
struct GemmMmaShared {
  static constexpr int NESTED_FLOATS = 256 + 8;
  static constexpr int TABLES = 0;  // product tables of the k tile in hand: [warps][ROW_TILES][512]
  static constexpr int NESTED = GemmMmaShape::THREADS / 32 * GemmMmaShape::ROW_TILES * TILE_ROWS * 32;
  // ... float [GROUPS][NESTED_FLOATS]: nested_code, nested_offset
  static constexpr int RING = (NESTED + GemmMmaShape::GROUPS * NESTED_FLOATS * 4 + 127) / 128 * 128;
  // The ring is [GROUPS][stages] of x [tokens][64], 16 bit, codes [GROUP_WARPS][ROW_TILES][512], scales [BLOCK_ROWS].
  int total;

  NF4L_HD constexpr GemmMmaShared(GemmMmaShape shape, int stages)
      : total(RING + GemmMmaShape::GROUPS * stages * shape.stage_bytes()) {}
};

// One launch.
struct GemmMmaPlan {
  int shape;  // in GEMM_MMA_SHAPES
  int stages;
  GemmCut cut;
  int shared_bytes;
  int64_t workspace_bytes;  // 0 where nothing is cut; else two slots a block, and a set of counters at the end
};

// What an output tile costs beside its k tiles, and what it costs if blocks share it.
constexpr int GEMM_MMA_STORE_NS = 2000, GEMM_MMA_SHARE_NS = 4000;
// No block gets less of the line.
constexpr int GEMM_MMA_LEAST_TILES = 8;
// The block that comes last adds up all others' sums, alone.
constexpr int GEMM_MMA_MOST_SHARERS = 8;

// False when nothing fits, or when an index would leave 32 bits. `cut` false: all output tiles whole.
inline bool plan_gemm_mma(const FourBitProblem& p, int64_t m, int shape_index, bool cut, int sms, int shared_limit,
                          GemmMmaPlan& plan) {
  const int64_t n = p.n, k = p.k;
  const GemmMmaShape shape = GEMM_MMA_SHAPES[shape_index];
  const int64_t token_tiles = ceil_div(m, shape.tokens), row_blocks = ceil_div(n, shape.BLOCK_ROWS);
  const int64_t k_tiles = k / GEMM_K;
  if (m > INT32_MAX - 1024 || n > INT32_MAX - 1024 || k > INT32_MAX / 2) return false;
  if (token_tiles > INT32_MAX / 2 / row_blocks) return false;
  // Bytes of float32 scales, and blocks behind the first one's group, that holds less than a million.
  if (row_blocks * shape.BLOCK_ROWS > INT32_MAX / 4 / k_tiles) return false;
  if (row_blocks * shape.BLOCK_ROWS > (INT32_MAX - (1 << 20)) / p.blocks_per_row) return false;
  const int64_t tiles = token_tiles * row_blocks;
  int stages = GEMM_MMA_MOST_STAGES;
  while (GemmMmaShared(shape, stages).total > shared_limit) {
    if (--stages < GEMM_MMA_LEAST_STAGES) return false;
  }
  const int64_t most = sms < MAX_BLOCKS ? sms : MAX_BLOCKS;
  int64_t blocks = tiles < most ? tiles : most, whole_tiles = tiles;
  const int64_t waves = tiles / most, rest = tiles % most;
  if (cut && rest > 0) {
    // The last wave is cut, together with the one before it: then no tile is in more than three pieces.
    const int64_t cut_tiles = rest + (waves > 0 ? most : 0), units = cut_tiles * k_tiles;
    int64_t parts = units / GEMM_MMA_LEAST_TILES;
    parts = parts < cut_tiles * GEMM_MMA_MOST_SHARERS ? parts : cut_tiles * GEMM_MMA_MOST_SHARERS;
    parts = parts < cut_tiles ? cut_tiles : parts;
    parts = parts < most ? parts : most;
    // A stretch that divides a tile leaves no block with parts of two: that is worth an eighth more.
    const int64_t needed = ceil_div(units, parts);
    for (int64_t stretch = needed; stretch <= needed * 9 / 8 && stretch < k_tiles; ++stretch) {
      if (k_tiles % stretch) continue;
      parts = units / stretch;
      break;
    }
    const int64_t whole_ns = k_tiles * ((waves > 0) + 1) * shape.tile_ns;
    if (units * shape.tile_ns + GEMM_MMA_SHARE_NS * parts < parts * whole_ns) {
      blocks = parts;
      whole_tiles = tiles - cut_tiles;
    }
  }
  const int64_t units = (tiles - whole_tiles) * k_tiles;
  if (units > INT32_MAX) return false;
  const Deal deal = {int(units / blocks), int(units % blocks)};
  plan = {shape_index,
          stages,
          {int(k_tiles), int(token_tiles), int(row_blocks), int(blocks), int(whole_tiles), deal,
           Divider(int(row_blocks) * OutTile::GROUP)},
          GemmMmaShared(shape, stages).total,
          units > 0 ? blocks * 2 * shape.slot_floats() * 4 + MAX_BLOCKS * 4 : 0};
  return true;
}

// How long the slowest block of a plan takes, in nanoseconds, not counting the start.
inline int64_t estimated_ns(const GemmMmaPlan& plan) {
  const GemmCut& cut = plan.cut;
  const int64_t tile_ns = GEMM_MMA_SHAPES[plan.shape].tile_ns, stretch = cut.deal.base + (cut.deal.extra > 0);
  const int64_t whole = ceil_div(cut.whole_tiles, cut.blocks) * (cut.k_tiles * tile_ns + GEMM_MMA_STORE_NS);
  return whole + (stretch > 0 ? stretch * tile_ns + GEMM_MMA_STORE_NS + GEMM_MMA_SHARE_NS : 0);
}

// The plan of the shape that should take least; false when none fits.
inline bool plan_best_gemm_mma(const FourBitProblem& p, int64_t m, int sms, int shared_limit, GemmMmaPlan& best) {
  int64_t best_ns = INT64_MAX;
  for (int shape = 0; shape < GEMM_MMA_SHAPE_COUNT; ++shape) {
    GemmMmaPlan plan;
    if (!plan_gemm_mma(p, m, shape, true, sms, shared_limit, plan)) continue;
    const int64_t ns = estimated_ns(plan);
    if (ns < best_ns) best = plan, best_ns = ns;
  }
  return best_ns < INT64_MAX;
}

}  // namespace nf4l

#endif
