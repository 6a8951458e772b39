// Walks for tests/test_gemm_plan.py what csrc/gemm_wgmma_plan.h deals to the blocks. One question a line on standard
// input:
//   shape m n k slices sms shared_bytes
// one answer a line: "none", or the plan (tokens block_rows k_tiles token_tiles row_pairs blocks clusters pairs parts
// steps shared workspace, and the sums of a step that fit where x has been); behind ';' for each block behind ',' each
// of its pieces: sliced begin end token_tile row_block, for a slice the number of its tile, and if that is one that two
// clusters share the counters and the slots of its rank (half by half, warpgroups last); and at the end, behind ';' for
// each slice, behind ',' for each step: the step, its owner and, if that is another slice, the place there.
//   estimate shape m n k slices sms shared_bytes
// "none", or how long the plan should take, in nanoseconds.
//   launches m n k sms shared_bytes
// "none", or how long the launch or the two that are chosen should take and their workspace; behind ';' for each the
// weight's first row, the number of rows, what "shape" says of a plan up to `parts`, slices, workspace, nanoseconds.
//   tokens shape m parts
// tokens of a half of x and where the second one begins, and the first token of each tile, as they are copied.
//   divide n d
// n / d as csrc/deal.h has it: by a Divider, and for d up to 4 by small_quotient.
#include <iostream>
#include <sstream>
#include <string>

#include "gemm_wgmma_choice.h"
#include "gemm_wgmma_plan.h"

static void print_meeting(const nf4l::GemmWork& work, const nf4l::GemmShape& s) {
  const nf4l::GemmMeetingPlace place = {work.sliced_tile(), work.rank, s};
  for (int half = 0; half < 2; ++half) {
    for (int w = 0; w < s.consumers; ++w) std::cout << ' ' << place.counter(half, w);
  }
  for (int half = 0; half < 2; ++half) {
    for (int own = 0; own < s.store_steps() / 4; ++own) {
      for (int w = 0; w < s.consumers; ++w) std::cout << ' ' << place.slot(half, own, w);
    }
  }
}

static void print_plan(const nf4l::GemmPlan& plan) {
  const nf4l::GemmShape s = nf4l::GEMM_SHAPES[plan.shape];
  const nf4l::GemmGrid& g = plan.grid;
  std::cout << s.tokens << ' ' << s.block_rows() << ' ' << g.k_tiles << ' ' << g.token_tiles << ' ' << g.row_pairs
            << ' ' << g.blocks << ' ' << g.clusters << ' ' << g.pairs << ' ' << g.parts;
}

static void print_launch(int64_t first_row, int64_t rows, const nf4l::GemmPlan& plan) {
  std::cout << ';' << first_row << ' ' << rows << ' ';
  print_plan(plan);
  std::cout << ' ' << plan.grid.slices() << ' ' << plan.workspace_bytes << ' ' << nf4l::estimated_ns(plan);
}

static void print_launches(std::istringstream& words) {
  nf4l::GemmProblem p = {};
  p.format = nf4l::GEMM_FOUR_BIT;
  words >> p.m >> p.n >> p.k >> p.sms >> p.shared_limit;
  nf4l::GemmLaunches launches;
  const int64_t ns = nf4l::plan_gemm_launches(p, launches);
  if (ns == INT64_MAX) {
    std::cout << "none\n";
    return;
  }
  std::cout << ns << ' ' << launches.workspace_bytes();
  if (launches.front_rows > 0) print_launch(0, launches.front_rows, launches.front);
  print_launch(launches.front_rows, p.n - launches.front_rows, launches.last);
  std::cout << '\n';
}

int main() {
  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    if (line.rfind("divide ", 0) == 0) {
      int n = 0, d = 1;
      words.ignore(7) >> n >> d;
      std::cout << nf4l::Divider(d).quotient(n) << ' ' << (d <= 4 ? nf4l::small_quotient(n, d) : n / d) << '\n';
      continue;
    }
    if (line.rfind("tokens ", 0) == 0) {
      int shape = 0, m = 0, parts = 0;
      words.ignore(7) >> shape >> m >> parts;
      const int width = nf4l::GEMM_SHAPES[shape].tokens;
      const nf4l::GemmTokens tokens(nf4l::GEMM_SHAPES[shape], m, parts);
      std::cout << tokens.half << ' ' << tokens.second;
      for (int tile = 0; tile * width < m; ++tile) std::cout << ' ' << tokens.first(width, tile);
      std::cout << '\n';
      continue;
    }
    if (line.rfind("launches ", 0) == 0) {
      words.ignore(9);  // the question's name
      print_launches(words);
      continue;
    }
    const bool estimate = line.rfind("estimate ", 0) == 0;
    if (estimate) words.ignore(9);
    int shape = 0, slices = 0, sms = 0, shared = 0;
    int64_t m = 0, n = 0, k = 0;
    words >> shape >> m >> n >> k >> slices >> sms >> shared;
    if (!words) {
      std::cerr << "cannot read: " << line << '\n';
      return 1;
    }
    nf4l::GemmPlan plan;
    if (!nf4l::plan_gemm(m, n, k, nf4l::GEMM_FOUR_BIT, shape, slices, sms, shared, plan)) {
      std::cout << "none\n";
      continue;
    }
    if (estimate) {
      std::cout << nf4l::estimated_ns(plan) << '\n';
      continue;
    }
    const nf4l::GemmShape s = nf4l::GEMM_SHAPES[plan.shape];
    const nf4l::GemmGrid& g = plan.grid;
    print_plan(plan);
    std::cout << ' ' << s.store_steps() << ' ' << plan.shared_bytes << ' ' << plan.workspace_bytes << ' '
              << s.stages * s.x_bytes() / s.step_bytes();
    for (int block = 0; block < g.clusters * g.blocks; ++block) {
      std::cout << ';';
      nf4l::GemmWork work(g, block / g.blocks, block % g.blocks);
      for (bool first = true; work.next(); first = false) {
        std::cout << (first ? "" : ",") << work.sliced << ' ' << work.begin << ' ' << work.end << ' ' << work.token_tile
                  << ' ' << work.row_block;
        if (work.sliced) std::cout << ' ' << work.sliced_tile();
        if (work.sliced && g.parts == 2) print_meeting(work, s);
      }
    }
    const nf4l::GemmShares shares = {g.blocks};
    for (int slice = 0; slice < g.blocks; ++slice) {
      std::cout << ';';
      for (int step = 0; step < s.store_steps(); ++step) {
        std::cout << (step > 0 ? "," : "") << step << ' ' << shares.owner(step);
        if (shares.owner(step) != slice) std::cout << ' ' << shares.place(step, slice);
      }
    }
    std::cout << '\n';
  }
}
