// The Hopper engine for 8-bit weights seen from the host: its compiled shapes, how a call is cut into blocks, and the
// map of a block's shared memory. Plain C++, so that tests and dispatch.h need no CUDA.
#ifndef NF4LINEAR_GEMM_W8_PLAN_H
#define NF4LINEAR_GEMM_W8_PLAN_H

#include <stdint.h>

#include "deal.h"
#include "gemm_cut.h"
#include "layout.h"

namespace nf4l {

// A block multiplies 64 rows of the weight a consumer by `tokens` rows of x; one more warpgroup feeds them.
struct GemmW8Shape {
  int tokens;     // the n of wgmma
  int consumers;  // warpgroups
  int stages;     // of the ring, one k tile each

  static constexpr int STORE_TOKENS = 32;            // of y that a warpgroup stores at once
  static constexpr int TILE_CODES = 2 * TILE_BYTES;  // of a row tile's k tile
  NF4L_HD constexpr int threads() const { return (consumers + 1) * WARPGROUP; }
  NF4L_HD constexpr int block_rows() const { return consumers * WARPGROUP_ROWS; }
  NF4L_HD constexpr int row_tiles() const { return block_rows() / TILE_ROWS; }
  NF4L_HD constexpr int x_bytes() const { return tokens * GEMM_K * 2; }           // of a stage
  NF4L_HD constexpr int codes_bytes() const { return row_tiles() * TILE_CODES; }  // of a stage
  NF4L_HD constexpr int lane_results() const { return tokens / 2; }
  // Whether output tiles of y transposed begin with lines of 128 bytes.
  NF4L_HD constexpr bool whole_lines() const { return tokens % 64 == 0; }
  NF4L_HD constexpr int out_buffers() const { return whole_lines() ? 2 : 4; }  // of a consumer
  // Sums of one output tile, float32.
  NF4L_HD constexpr int slot_floats() const { return lane_results() * consumers * WARPGROUP; }
};

// Everything that is compiled, for each kind of codes and 16-bit type.
constexpr GemmW8Shape GEMM_W8_SHAPES[] = {
    {128, 2, 8},
    {192, 2, 6},
    {216, 2, 5},
    {256, 2, 5},
};
constexpr int GEMM_W8_SHAPE_COUNT = sizeof(GEMM_W8_SHAPES) / sizeof(GEMM_W8_SHAPES[0]);

// Index of a compiled shape; asking for another at compile time does not compile.
constexpr int gemm_w8_shape(int tokens, int consumers) {
  int i = 0;
  while (GEMM_W8_SHAPES[i].tokens != tokens || GEMM_W8_SHAPES[i].consumers != consumers) ++i;
  return i;
}

// Byte offsets in a block's shared memory; what is swizzled begins at multiples of 1024.
struct GemmW8Shared {
  int x;         // [stages][tokens][64], 16 bit
  int codes;     // [stages][row_tiles][2][512]
  int out;       // [consumers][out_buffers][STORE_TOKENS][64], 16 bit: y on its way out
  int barriers;  // uint64 [stages][full, empty]
  int total;

  NF4L_HD static constexpr int out_bytes() { return GemmW8Shape::STORE_TOKENS * WARPGROUP_ROWS * 2; }

  NF4L_HD constexpr explicit GemmW8Shared(GemmW8Shape shape)
      : x(0),
        codes(x + shape.stages * shape.x_bytes()),
        out(codes + shape.stages * shape.codes_bytes()),
        barriers(out + shape.consumers * shape.out_buffers() * out_bytes()),
        total(barriers + shape.stages * 16) {}
};

// One launch.
struct GemmW8Plan {
  int shape;  // in GEMM_W8_SHAPES
  GemmCut cut;
  int shared_bytes;
  int64_t workspace_bytes;  // 0 where nothing is cut; else a slot a block, and a set of flags at the end
};

// False when nothing fits, or when an index would leave 32 bits. `cut`: output tiles that do not fill a wave are cut
// along k.
inline bool plan_gemm_w8(int64_t m, int64_t n, int64_t k, int shape_index, bool cut, int sms, int shared_limit,
                         GemmW8Plan& plan) {
  const GemmW8Shape shape = GEMM_W8_SHAPES[shape_index];
  const int64_t token_tiles = ceil_div(m, shape.tokens), row_blocks = ceil_div(n, shape.block_rows()),
                k_tiles = k / GEMM_K;
  if (m > INT32_MAX - 1024 || n > INT32_MAX - 1024 || k > INT32_MAX / 2) return false;
  const int64_t most = sms < MAX_BLOCKS ? sms : MAX_BLOCKS;
  if (token_tiles > INT32_MAX / 2 / row_blocks) return false;
  const int64_t tiles = token_tiles * row_blocks;
  const int shared = GemmW8Shared(shape).total;
  if (shared > shared_limit) return false;
  int64_t blocks = tiles < most ? tiles : most, whole_tiles = tiles;
  const int64_t rest = tiles % most;
  if (cut && rest > 0) {
    blocks = most;
    whole_tiles = tiles - rest;
    if (rest * k_tiles < blocks * GEMM_LEAST_TILES) {
      // Whatever is whole comes first, so only a launch without it shrinks.
      if (whole_tiles > 0) return false;
      blocks = ceil_div(rest * k_tiles, GEMM_LEAST_TILES);
    }
  }
  const int64_t units = (tiles - whole_tiles) * k_tiles;
  if (units > INT32_MAX) return false;
  const Deal deal = {int(units / blocks), int(units % blocks)};
  plan = {shape_index,
          {int(k_tiles), int(token_tiles), int(row_blocks), int(blocks), int(whole_tiles), deal,
           Divider(int(row_blocks) * OutTile::GROUP)},
          shared,
          units > 0 ? blocks * shape.slot_floats() * 4 + MAX_BLOCKS * 4 : 0};
  return true;
}

}  // namespace nf4l

#endif
