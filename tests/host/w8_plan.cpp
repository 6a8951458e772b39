// Walks the blocks of the 8-bit Hopper engines' plans for tests/test_w8_plan.py, with the arithmetic of the kernels.
// One question a line on standard input:
//   wgmma shape n k least_units sms shared_bytes
//   gemm shape m n k cut sms shared_bytes
// one answer a line: "none"; or the plan (wgmma: tokens row_groups bursts blocks shared workspace; gemm: tokens
// consumers k_tiles token_tiles row_blocks blocks whole_tiles shared workspace), and then, for each block, ";" and for
// each piece of its work ",": row block, first unit, last unit, owner, stop, spread; or tile, begin, end, token tile,
// row block, and the block whose slots it collects, up to the second number (the same twice: none).
#include <algorithm>
#include <iostream>
#include <sstream>
#include <string>

#include "gemm_w8_plan.h"
#include "small_wgmma_w8_plan.h"

namespace {

void walk_wgmma(std::istream& words) {
  int shape_index = 0, least = 0, sms = 0, limit = 0;
  int64_t n = 0, k = 0;
  words >> shape_index >> n >> k >> least >> sms >> limit;
  nf4l::SmallWgmmaW8Plan plan = {};
  if (!words || !nf4l::plan_small_wgmma_w8(n, k, shape_index, least, sms, limit, plan)) {
    std::cout << "none";
    return;
  }
  const nf4l::SmallWgmmaW8Shape shape = nf4l::SMALL_WGMMA_W8_SHAPES[plan.shape];
  std::cout << shape.tokens << ' ' << shape.row_groups << ' ' << plan.bursts << ' ' << plan.blocks << ' '
            << plan.shared_bytes << ' ' << plan.workspace_bytes;
  for (int block = 0; block < plan.blocks; ++block) {
    const int end = plan.deal.first_unit(block + 1);
    std::cout << ';';
    for (int first = plan.deal.first_unit(block); first < end;) {
      const int row_block = first / plan.bursts, last = std::min(end, (row_block + 1) * plan.bursts);
      const nf4l::Sharers sharers(plan.deal, row_block, plan.bursts);
      std::cout << ',' << row_block << ' ' << first << ' ' << last << ' ' << sharers.owner << ' ' << sharers.stop << ' '
                << sharers.spread();
      first = last;
    }
  }
}

void walk_gemm(std::istream& words) {
  int shape_index = 0, sms = 0, limit = 0;
  int64_t m = 0, n = 0, k = 0;
  bool cut = false;
  words >> shape_index >> m >> n >> k >> cut >> sms >> limit;
  nf4l::GemmW8Plan plan = {};
  if (!words || !nf4l::plan_gemm_w8(m, n, k, shape_index, cut, sms, limit, plan)) {
    std::cout << "none";
    return;
  }
  const nf4l::GemmW8Shape shape = nf4l::GEMM_W8_SHAPES[plan.shape];
  const nf4l::GemmCut& c = plan.cut;
  std::cout << shape.tokens << ' ' << shape.consumers << ' ' << c.k_tiles << ' ' << c.token_tiles << ' ' << c.row_blocks
            << ' ' << c.blocks << ' ' << c.whole_tiles << ' ' << plan.shared_bytes << ' ' << plan.workspace_bytes;
  for (int block = 0; block < c.blocks; ++block) {
    std::cout << ';';
    for (nf4l::GemmPieces piece(c, block); piece.next();) {
      const nf4l::OutTile out(c, piece.tile);
      const bool collects = piece.begin == 0 && piece.end < c.k_tiles;
      const int stop = collects ? c.deal.blocks_before((piece.tile - c.whole_tiles + 1) * c.k_tiles) : block + 1;
      std::cout << ',' << piece.tile << ' ' << piece.begin << ' ' << piece.end << ' ' << out.token_tile << ' '
                << out.row_block << ' ' << block + 1 << ' ' << stop;
    }
  }
}

}  // namespace

int main() {
  std::string line, kind;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    words >> kind;
    if (kind == "wgmma") walk_wgmma(words);
    else walk_gemm(words);
    std::cout << '\n';
  }
}
