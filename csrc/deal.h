// How units of work in one line are dealt to the blocks of a grid. Plain C++, for planners and kernels.
#ifndef NF4LINEAR_DEAL_H
#define NF4LINEAR_DEAL_H

#include "layout.h"

namespace nf4l {

constexpr int WARPGROUP = 128;        // threads
constexpr int WARPGROUP_ROWS = 64;    // of the weight: the m of wgmma m64nNk16

// Blocks of a launch that share sums, or block columns that do: each has a counter of its own.
constexpr int MAX_BLOCKS = 256;

// Each block has a stretch of `base` units, the first `extra` blocks one more.
struct Deal {
  int base, extra;

  NF4L_HD constexpr int first_unit(int block) const { return block * base + (block < extra ? block : extra); }
  // Number of blocks that begin before unit `unit`.
  NF4L_HD constexpr int blocks_before(int unit) const {
    const int longer = extra * (base + 1);  // units of the blocks that have one more
    return unit <= longer ? (unit + base) / (base + 1) : extra + (unit - longer + base - 1) / base;
  }
};

}  // namespace nf4l

#endif
