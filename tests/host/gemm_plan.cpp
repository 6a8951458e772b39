// Walks for tests/test_gemm_plan.py what csrc/gemm_wgmma_plan.h deals to the blocks. One question a line on standard input:
//   shape m n k cut sms shared_bytes
// one answer a line: "none", or the plan (tokens block_rows k_tiles token_tiles row_blocks blocks whole_tiles shared
// workspace slot_bytes) and, behind ';' for each block, its count of k tiles and behind ',' for each of its pieces: tile begin
// end token_tile row_block, whether it is the last one, and of the sharers of a cut tile (else zeros): first count finishers.
#include <iostream>
#include <sstream>
#include <string>

#include "gemm_wgmma_plan.h"

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
    nf4l::GemmPlan plan;
    if (!nf4l::plan_gemm(m, n, k, nf4l::GEMM_FOUR_BIT, shape, cut, sms, shared, plan)) {
      std::cout << "none\n";
      continue;
    }
    const nf4l::GemmShape s = nf4l::GEMM_SHAPES[plan.shape];
    const nf4l::GemmCut& c = plan.cut;
    std::cout << s.tokens << ' ' << s.block_rows() << ' ' << c.k_tiles << ' ' << c.token_tiles << ' ' << c.row_blocks << ' '
              << c.blocks << ' ' << c.whole_tiles << ' ' << plan.shared_bytes << ' ' << plan.workspace_bytes << ' '
              << s.slot_floats() * 4;
    for (int block = 0; block < c.blocks; ++block) {
      nf4l::GemmPieces piece(c, block);
      std::cout << ';' << piece.k_tiles_left();
      while (piece.next()) {
        const nf4l::OutTile out(c, piece.tile);
        std::cout << ',' << piece.tile << ' ' << piece.begin << ' ' << piece.end << ' ' << out.token_tile << ' '
                  << out.row_block << ' ' << piece.last();
        if (piece.whole_tile()) {
          std::cout << " 0 0 0";
        } else {
          const nf4l::GemmSharers sharers(c, piece.tile);
          std::cout << ' ' << sharers.first << ' ' << sharers.count << ' ' << sharers.finishers;
        }
      }
    }
    std::cout << '\n';
  }
}
