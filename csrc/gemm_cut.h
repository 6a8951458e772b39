// How the k tiles of a call's output tiles are dealt to blocks, for engines whose blocks share output tiles through
// memory. Plain C++, for planners and kernels.
#ifndef NF4LINEAR_GEMM_CUT_H
#define NF4LINEAR_GEMM_CUT_H

#include <stdint.h>

#include "deal.h"
#include "layout.h"

namespace nf4l {

constexpr int GEMM_K = 64;           // inputs of a k tile: what a stage of a ring holds
constexpr int GEMM_LEAST_TILES = 4;  // k tiles of a block's part of an output tile at least

// How a call is cut. Each block takes output tiles whole, block b those numbered b, b + blocks, ... below
// `whole_tiles`. The k tiles of all later ones lie in one line, of which each block has a stretch, so that all blocks
// end together.
struct GemmCut {
  int k_tiles, token_tiles, row_blocks;
  int blocks;
  int whole_tiles;
  Deal deal;       // of the line, in k tiles
  Divider groups;  // by row_blocks * OutTile::GROUP
};

// Where an output tile lies. Tiles of four token tiles follow each other along the rows: what blocks read at the same
// time stays in L2.
struct OutTile {
  static constexpr int GROUP = 4;
  int token_tile, row_block;

  // `groups` divides by row_blocks * GROUP.
  NF4L_HD OutTile(int token_tiles, int row_blocks, const Divider& groups, int tile) {
    const int group = groups.quotient(tile), rest = tile - group * GROUP * row_blocks;
    const int left = token_tiles - group * GROUP, tokens = left < GROUP ? left : GROUP;
    row_block = small_quotient(rest, tokens);
    token_tile = group * GROUP + rest - row_block * tokens;
  }
  NF4L_HD OutTile(const GemmCut& cut, int tile) : OutTile(cut.token_tiles, cut.row_blocks, cut.groups, tile) {}
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

// The blocks that share a cut output tile. A block begins at most one such tile, so that the first block stands for the
// tile.
struct GemmSharers {
  int first, count;  // blocks

  NF4L_HD GemmSharers(const GemmCut& cut, int tile) {
    const int begin = (tile - cut.whole_tiles) * cut.k_tiles, end = begin + cut.k_tiles;
    first = cut.deal.blocks_before(begin + 1) - 1;
    count = cut.deal.blocks_before(end) - first;
  }
};

}  // namespace nf4l

#endif
