// How units of work in one line are dealt to the blocks of a grid. Plain C++, for planners and kernels.
#ifndef NF4LINEAR_DEAL_H
#define NF4LINEAR_DEAL_H

#include <stdint.h>

#include "layout.h"

namespace nf4l {

constexpr int WARPGROUP = 128;      // threads
constexpr int WARPGROUP_ROWS = 64;  // of the weight: the m of wgmma m64nNk16

// Blocks of a launch that share sums, or block columns that do: each has a counter of its own.
constexpr int MAX_BLOCKS = 256;

// Division by a number that is known before the launch, without dividing: a block starts with code that is in no cache
// yet, and a division is forty instructions.
struct Divider {
  uint32_t factor = uint32_t(1) << 31;
  int shift = 31;

  constexpr Divider() = default;
  constexpr explicit Divider(int divisor) {
    while (int64_t(1) << (shift - 31) < divisor) ++shift;
    factor = uint32_t((uint64_t(1) << shift) / uint64_t(divisor) + 1);
  }
  // Of n >= 0.
  NF4L_HD constexpr int quotient(int n) const { return int(uint64_t(uint32_t(n)) * factor >> shift); }
};

// n / divisor, of n >= 0 and a divisor from 1 to 4.
NF4L_HD constexpr int small_quotient(int n, int divisor) {
  return divisor == 3 ? int(uint64_t(uint32_t(n)) * 0xaaaaaaabu >> 33) : n >> divisor / 2;
}

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
