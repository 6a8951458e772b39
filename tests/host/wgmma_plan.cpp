// Walks the blocks of the wgmma engine's plans for tests/test_wgmma_plan.py, with the arithmetic of the kernel. One
// question a line on standard input:
//   shape n k kb_full log2_group nested least_units sms shared_bytes
// one answer a line: "none", or the plan (tokens row_groups burst stages bursts blocks shared workspace) and then,
// for each block, "; begin end" and for each row block it meets ", row_block first last owner stop spread": units first
// .. last - 1 are its own, blocks owner .. stop - 1 share the row block, and they all add up if it is spread, else the
// owner.
#include <algorithm>
#include <iostream>
#include <sstream>
#include <string>

#include "small_wgmma_plan.h"

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    int shape_index = 0, least = 0, sms = 0, limit = 0;
    nf4l::FourBitProblem problem = {};
    words >> shape_index >> problem.n >> problem.k >> problem.blocks_per_row >> problem.log2_group >> problem.nested >>
        least >> sms >> limit;
    if (!words) {
      std::cerr << "cannot read: " << line << '\n';
      return 1;
    }
    nf4l::SmallWgmmaPlan plan = {};
    if (!nf4l::plan_small_wgmma(problem, shape_index, least, sms, limit, plan)) {
      std::cout << "none\n";
      continue;
    }
    const nf4l::SmallWgmmaShape shape = nf4l::SMALL_WGMMA_SHAPES[plan.shape];
    std::cout << shape.tokens << ' ' << shape.row_groups << ' ' << shape.burst << ' ' << shape.stages << ' '
              << plan.bursts << ' '
              << plan.blocks << ' ' << plan.shared_bytes << ' ' << plan.workspace_bytes;
    for (int block = 0; block < plan.blocks; ++block) {
      const int begin = plan.deal.first_unit(block), end = plan.deal.first_unit(block + 1);
      std::cout << "; " << begin << ' ' << end;
      for (int first = begin; first < end;) {
        const int row_block = first / plan.bursts, last = std::min(end, (row_block + 1) * plan.bursts);
        const nf4l::Sharers sharers(plan.deal, row_block, plan.bursts);
        std::cout << ", " << row_block << ' ' << first << ' ' << last << ' ' << sharers.owner << ' ' << sharers.stop
                  << ' ' << sharers.spread();
        first = last;
      }
    }
    std::cout << '\n';
  }
}
