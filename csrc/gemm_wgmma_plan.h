// The prefill engine seen from the host: how a call is dealt to blocks. Plain C++, so that tests and dispatch.h need no
// CUDA.
#ifndef NF4LINEAR_GEMM_WGMMA_PLAN_H
#define NF4LINEAR_GEMM_WGMMA_PLAN_H

#include <stdint.h>

#include "deal.h"
#include "gemm_cut.h"
#include "gemm_wgmma_shape.h"
#include "layout.h"

namespace nf4l {

// How a call is dealt to clusters of `blocks` blocks, cluster c of so many.
//
// First come pairs: output tiles of two neighbouring row blocks and the same tokens, one for each block of a cluster of
// two, which share x. Cluster c takes pairs c, c + clusters, ... below `pairs`. The output tiles of the others, at most
// one for each cluster, are shared out within it instead: a slice of the k tiles for each block. So the last wave may
// be half a wave, and where output tiles are few there are no pairs at all. Then two clusters may also have one tile
// together, four slices: clusters of four find room for less of them.
struct GemmGrid {
  int k_tiles, token_tiles, row_pairs;  // where row blocks are odd in number, the last pairs have an empty tile
  int blocks, clusters, pairs;
  int parts;       // clusters that share an output tile's k tiles, 1 or 2
  Divider groups;  // by row_pairs * OutTile::GROUP

  NF4L_HD constexpr int sliced_tiles() const { return 2 * (token_tiles * row_pairs - pairs); }
  NF4L_HD constexpr int slices() const { return blocks * parts; }  // of a sliced tile
  NF4L_HD constexpr int first_k(int slice) const { return small_quotient(k_tiles * slice, slices()); }
};

// A block's work, one piece after the other: k tiles begin .. end - 1 of an output tile.
struct GemmWork {
  const GemmGrid& grid;
  const int cluster, rank;
  int next_pair;
  bool sliced = false;  // the piece in hand is the last one, and a slice
  int part = 0;         // which of the clusters that share its tile this is
  int token_tile = 0, row_block = 0, begin = 0, end = 0;

  NF4L_HD GemmWork(const GemmGrid& g, int cluster_index, int block)
      : grid(g), cluster(cluster_index), rank(block), next_pair(cluster_index) {}

  // Goes to the next piece; false when there is none.
  NF4L_HD bool next() {
    if (next_pair < grid.pairs) {
      take(next_pair, rank, 0, grid.k_tiles);
      next_pair += grid.clusters;
      return true;
    }
    if (sliced || cluster >= grid.sliced_tiles() * grid.parts) return false;
    sliced = true;
    part = cluster & (grid.parts - 1);
    const int slice = part * grid.blocks + rank;
    take(grid.pairs + sliced_tile() / 2, sliced_tile() % 2, grid.first_k(slice), grid.first_k(slice + 1));
    return true;
  }

  // Number of the output tile that is sliced.
  NF4L_HD int sliced_tile() const { return cluster >> (grid.parts - 1); }

  NF4L_HD void take(int pair, int row, int from, int to) {
    const OutTile tile(grid.token_tiles, grid.row_pairs, grid.groups, pair);
    token_tile = tile.token_tile;
    row_block = 2 * tile.row_block + row;
    begin = from;
    end = to;
  }
};

// How the blocks of a cluster add up their slices. They take turns with a tile's steps of STORE_TOKENS, and get
// the others' sums of their own into shared memory, where x has been.
struct GemmShares {
  int slices;

  NF4L_HD constexpr int owner(int step) const { return step - small_quotient(step, slices) * slices; }
  // Of a block at most, for a tile of so many steps.
  NF4L_HD constexpr int places(int steps) const { return int(ceil_div(steps, slices)) * (slices - 1); }
  // Where the owner of a step finds slice `from`'s sums of it, in step_bytes().
  NF4L_HD constexpr int place(int step, int from) const {
    return small_quotient(step, slices) * (slices - 1) + from - (from > owner(step));
  }
};

// Where the blocks of one rank of two clusters that share an output tile find each other (gemm_wgmma_finish.cuh).
struct GemmMeetingPlace {
  int tile, rank;
  GemmShape shape;

  // Of a half of the tile's tokens and a warpgroup.
  NF4L_HD constexpr int counter(int half, int warpgroup) const {
    return ((tile * 2 + rank) * 2 + half) * shape.consumers + warpgroup;
  }
  // Of the sums of step `own` of a half: as many for each warpgroup as there are steps of its own, counted in a
  // warpgroup's sums of a step.
  NF4L_HD constexpr int slot(int half, int own, int warpgroup) const {
    return (((tile * 2 + rank) * 2 + half) * (shape.store_steps() / 4) + own) * shape.consumers + warpgroup;
  }
};

// One launch.
struct GemmPlan {
  int shape;  // in GEMM_SHAPES
  GemmGrid grid;
  int shared_bytes;
  int64_t workspace_bytes;  // 0 but where clusters meet; else the sums of all output tiles, and a set of counters
};

// Slices of an output tile at most, so blocks of a cluster. More than two only where there are no pairs.
constexpr int GEMM_MOST_SLICES = 4;
// In place of a number of slices: four, by two clusters of two.
constexpr int GEMM_FOUR_BY_TWO = GEMM_MOST_SLICES + 1;
// Output tiles of a call whose clusters meet, at most: each has eight counters.
constexpr int GEMM_MEETING_COUNTERS = 8, GEMM_MOST_MEETINGS = MAX_BLOCKS / GEMM_MEETING_COUNTERS;

// Clusters of so many blocks that run at the same time. One lies within a part of the GPU whose number of SMs is even
// but no multiple of more: on an H200, 39 clusters of three and 30 of four find room.
constexpr int clusters_at_once(int sms, int blocks) { return (blocks > 2 ? sms * 7 / 8 : sms) / blocks; }

// `slices` of the output tiles that are cut (1: none), or GEMM_FOUR_BY_TWO. False when nothing fits, when an index
// would leave 32 bits, or when so many slices leave SMs without work.
inline bool plan_gemm(int64_t m, int64_t n, int64_t k, GemmFormatBytes format, int shape_index, int slices, int sms,
                      int shared_limit, GemmPlan& plan) {
  const GemmShape shape = GEMM_SHAPES[shape_index];
  if (m > INT32_MAX - 1024 || n > INT32_MAX - 1024 || k > INT32_MAX / 2) return false;
  const int64_t token_tiles = ceil_div(m, shape.tokens), row_pairs = ceil_div(n, 2 * shape.block_rows());
  if (token_tiles > INT32_MAX / 4 / row_pairs) return false;
  const int parts = slices == GEMM_FOUR_BY_TWO ? 2 : 1, all_slices = parts == 2 ? 4 : slices;
  const int blocks = parts == 1 && slices > 2 ? slices : 2, most = clusters_at_once(sms, blocks);
  const int k_tiles = int(k / GEMM_K), shared = GemmShared(shape, format).total;
  if (shared > shared_limit || all_slices > GEMM_MOST_SLICES || most == 0) return false;
  const int64_t all = token_tiles * row_pairs, sliced = slices == 1 ? 0 : slices == 2 ? all % most : all;
  const int64_t sliced_clusters = 2 * sliced * parts;
  if (slices > 1 && (sliced == 0 || sliced_clusters > most || k_tiles < all_slices * GEMM_LEAST_TILES)) return false;
  if (parts == 2 && (!shape.meets() || 2 * sliced > GEMM_MOST_MEETINGS)) return false;
  const int sums_bytes = GemmShares{blocks}.places(shape.store_steps()) * shape.step_bytes();
  if (sliced > 0 && sums_bytes > shape.stages * shape.x_bytes()) return false;  // their room is that of x
  const int64_t wanted = all - sliced > sliced_clusters ? all - sliced : sliced_clusters;
  const int64_t sums = 2 * sliced * shape.store_steps() * shape.step_bytes();
  plan = {shape_index,
          {k_tiles, int(token_tiles), int(row_pairs), blocks, int(wanted < most ? wanted : most), int(all - sliced),
           parts, Divider(int(row_pairs) * OutTile::GROUP)},
          shared,
          parts == 2 ? sums + MAX_BLOCKS * 4 : 0};
  return true;
}

}  // namespace nf4l

#endif
