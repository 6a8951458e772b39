// Walks for tests/test_gemm_mma_plan.py what csrc/gemm_mma_plan.h deals to the blocks. A question: shape, m, n, k,
// whether to cut, SMs, shared memory. The answer: the plan, then for each block ";": its k tiles, and for each piece of
// its work ",": tile, begin, end, token tile, row block, the first of the blocks that share it and their number.
#include <iostream>
#include <sstream>
#include <string>

#include "gemm_mma_plan.h"

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    int shape = 0, sms = 0, shared = 0;
    int64_t m = 0, n = 0, k = 0;
    bool cut = false;
    words >> shape >> m >> n >> k >> cut >> sms >> shared;
    if (!words) {
      std::cerr << "cannot read: " << line << '\n';
      return 1;
    }
    nf4l::GemmMmaPlan plan;
    const nf4l::FourBitProblem problem = {n, k, k / 64, 8, true};
    if (!nf4l::plan_gemm_mma(problem, m, shape, cut, sms, shared, plan)) {
      std::cout << "none\n";
      continue;
    }
    const nf4l::GemmMmaShape s = nf4l::GEMM_MMA_SHAPES[plan.shape];
    const nf4l::GemmCut& c = plan.cut;
    std::cout << s.tokens << ' ' << s.BLOCK_ROWS << ' ' << c.k_tiles << ' ' << c.token_tiles << ' ' << c.row_blocks
              << ' ' << c.blocks << ' ' << c.whole_tiles << ' ' << plan.shared_bytes << ' ' << plan.workspace_bytes
              << ' ' << s.slot_floats() * 4 << ' ' << plan.stages;
    for (int block = 0; block < c.blocks; ++block) {
      nf4l::GemmPieces piece(c, block);
      std::cout << ';' << piece.k_tiles_left();
      while (piece.next()) {
        const nf4l::OutTile out(c, piece.tile);
        std::cout << ',' << piece.tile << ' ' << piece.begin << ' ' << piece.end << ' ' << out.token_tile << ' '
                  << out.row_block;
        if (piece.whole_tile()) {
          std::cout << " 0 0";
        } else {
          const nf4l::GemmSharers sharers(c, piece.tile);
          std::cout << ' ' << sharers.first << ' ' << sharers.count;
        }
      }
    }
    std::cout << '\n';
  }
}
