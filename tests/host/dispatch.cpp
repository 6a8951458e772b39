// Answers for tests/test_dispatch.py what csrc/dispatch.h picks. One question a line on standard input:
//   arch sms shared_bytes dtype format layout n k blocksize nested m flags x_offset
// one answer a line: engine, and for small_batch the plan (row_tiles tokens slices slice_tiles parts base extra shared
// workspace), for small_wgmma (tokens row_groups accumulators bursts blocks base extra shared workspace), for
// gemm_wgmma (tokens consumers token_tiles row_pairs blocks clusters pairs parts shared workspace; where it is two
// launches behind "after" the rows of the one in front, and its plan), for gemm_mma
// (tokens stages blocks whole_tiles base extra shared workspace), for small_w8 (row_tiles tokens slices slice_tiles
// parts base extra stages shared workspace), for small_wgmma_w8 (tokens row_groups burst bursts blocks base extra
// shared workspace), for gemm_w8 (tokens consumers token_tiles row_blocks blocks whole_tiles base extra shared
// workspace).
#include <iostream>
#include <sstream>
#include <string>

#include "dispatch.h"

static void print_gemm(const nf4l::GemmPlan& p) {
  const nf4l::GemmShape shape = nf4l::GEMM_SHAPES[p.shape];
  std::cout << ' ' << shape.tokens << ' ' << shape.consumers << ' ' << p.grid.token_tiles << ' ' << p.grid.row_pairs
            << ' ' << p.grid.blocks << ' ' << p.grid.clusters << ' ' << p.grid.pairs << ' ' << p.grid.parts << ' '
            << p.shared_bytes << ' ' << p.workspace_bytes;
}

int main() {
  std::string line;
  alignas(16) static unsigned char memory[32];
  static float table[1];
  while (std::getline(std::cin, line)) {
    std::istringstream words(line);
    nf4l::DeviceInfo device = {};
    nf4l_weight w = {};
    nf4l_linear_args a = {};
    bool nested = false;
    int64_t offset = 0;
    words >> device.arch >> device.sms >> device.shared_bytes >> a.dtype >> w.format >> w.layout >> w.n >> w.k >>
        w.blocksize >> nested >> a.m >> a.flags >> offset;
    if (!words) {
      std::cerr << "cannot read: " << line << '\n';
      return 1;
    }
    device.wgmma = device.arch == 90;
    w.nested_code = nested ? table : nullptr;
    w.kb_full = w.k / 64;
    a.x = memory + offset;
    a.x_stride = w.k;
    const nf4l::Launch launch = nf4l::pick(device, w, a);
    switch (launch.engine) {
      case nf4l::Engine::nothing:
        std::cout << "nothing\n";
        break;
      case nf4l::Engine::gemm:
        std::cout << "gemm\n";
        break;
      case nf4l::Engine::small_batch: {
        const nf4l::SmallBatchPlan& p = launch.small_batch;
        const nf4l::SmallBatchShape shape = nf4l::SMALL_BATCH_SHAPES[p.shape];
        std::cout << "small_batch " << shape.row_tiles << ' ' << shape.tokens << ' ' << p.slices << ' ' << p.slice_tiles
                  << ' ' << p.parts << ' ' << p.base_groups << ' ' << p.extra_groups << ' ' << p.shared_bytes << ' '
                  << p.workspace_bytes << '\n';
        break;
      }
      case nf4l::Engine::small_wgmma: {
        const nf4l::SmallWgmmaPlan& p = launch.small_wgmma;
        const nf4l::SmallWgmmaShape shape = nf4l::SMALL_WGMMA_SHAPES[p.shape];
        std::cout << "small_wgmma " << shape.tokens << ' ' << shape.row_groups << ' ' << shape.accumulators << ' '
                  << p.bursts << ' ' << p.blocks << ' ' << p.deal.base << ' ' << p.deal.extra << ' ' << p.shared_bytes
                  << ' ' << p.workspace_bytes << '\n';
        break;
      }
      case nf4l::Engine::small_w8: {
        const nf4l::SmallW8Plan& p = launch.small_w8;
        const nf4l::SmallBatchShape shape = nf4l::SMALL_W8_SHAPES[p.shape];
        std::cout << "small_w8 " << shape.row_tiles << ' ' << shape.tokens << ' ' << p.slices << ' ' << p.slice_tiles
                  << ' ' << p.parts << ' ' << p.base_groups << ' ' << p.extra_groups << ' ' << p.stages << ' '
                  << p.shared_bytes << ' ' << p.workspace_bytes << '\n';
        break;
      }
      case nf4l::Engine::small_wgmma_w8: {
        const nf4l::SmallWgmmaW8Plan& p = launch.small_wgmma_w8;
        const nf4l::SmallWgmmaW8Shape shape = nf4l::SMALL_WGMMA_W8_SHAPES[p.shape];
        std::cout << "small_wgmma_w8 " << shape.tokens << ' ' << shape.row_groups << ' ' << shape.burst << ' '
                  << p.bursts << ' ' << p.blocks << ' ' << p.deal.base << ' ' << p.deal.extra << ' ' << p.shared_bytes
                  << ' ' << p.workspace_bytes << '\n';
        break;
      }
      case nf4l::Engine::gemm_w8: {
        const nf4l::GemmW8Plan& p = launch.gemm_w8;
        const nf4l::GemmW8Shape shape = nf4l::GEMM_W8_SHAPES[p.shape];
        std::cout << "gemm_w8 " << shape.tokens << ' ' << shape.consumers << ' ' << p.cut.token_tiles << ' '
                  << p.cut.row_blocks << ' ' << p.cut.blocks << ' ' << p.cut.whole_tiles << ' ' << p.cut.deal.base
                  << ' ' << p.cut.deal.extra << ' ' << p.shared_bytes << ' ' << p.workspace_bytes << '\n';
        break;
      }
      case nf4l::Engine::gemm_mma: {
        const nf4l::GemmMmaPlan& p = launch.gemm_mma;
        std::cout << "gemm_mma " << nf4l::GEMM_MMA_SHAPES[p.shape].tokens << ' ' << p.stages << ' ' << p.cut.blocks
                  << ' ' << p.cut.whole_tiles << ' ' << p.cut.deal.base << ' ' << p.cut.deal.extra << ' '
                  << p.shared_bytes << ' ' << p.workspace_bytes << '\n';
        break;
      }
      case nf4l::Engine::gemm_wgmma: {
        const nf4l::GemmLaunches& launches = launch.gemm_wgmma;
        std::cout << "gemm_wgmma";
        print_gemm(launches.last);
        if (launches.front_rows > 0) {
          std::cout << " after " << launches.front_rows;
          print_gemm(launches.front);
        }
        std::cout << '\n';
        break;
      }
    }
  }
}
