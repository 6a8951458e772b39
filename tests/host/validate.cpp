// csrc/validate.h: every argument a library must refuse before it follows a pointer, and those it must let through.
#include <cstdio>
#include <functional>

#include "validate.h"

namespace {

int failures = 0;

void expect(const char* what, int got, int want) {
  if (got == want) return;
  std::printf("%s: got %d, want %d\n", what, got, want);
  ++failures;
}

alignas(16) uint8_t codes[512];
alignas(16) float floats[256];

nf4l_weight tiled() {
  return {NF4L_NF4, NF4L_TILE16X64, 16, 64, 64, codes, floats, floats, floats, floats, 0, 0, 1};
}
nf4l_weight eight_bit() {
  return {NF4L_W8_S8, NF4L_TILE16X32, 16, 32, 0, codes, floats, nullptr, nullptr, nullptr, 0, 0, 0};
}

using Weight = nf4l_weight&;

void weights() {
  auto four = [](const char* what, int want, const std::function<void(Weight)>& change) {
    nf4l_weight w = tiled();
    change(w);
    expect(what, nf4l::check_weight(&w), want);
  };
  four("tiled", NF4L_OK, [](Weight) {});
  four("flat", NF4L_OK, [](Weight w) { w.layout = NF4L_FLAT, w.k = 33, w.blocksize = 32; });
  four("plain absmax", NF4L_OK, [](Weight w) { w.nested_code = w.nested_absmax = w.nested_offset = nullptr; });
  four("shard", NF4L_OK, [](Weight w) { w.n0 = 16, w.kb0 = 3, w.kb_full = 4; });
  four("no codes", NF4L_BAD_ARGUMENT, [](Weight w) { w.qweight = nullptr; });
  four("no scales", NF4L_BAD_ARGUMENT, [](Weight w) { w.scales = nullptr; });
  four("no nested_absmax", NF4L_BAD_ARGUMENT, [](Weight w) { w.nested_absmax = nullptr; });
  four("no nested_offset", NF4L_BAD_ARGUMENT, [](Weight w) { w.nested_offset = nullptr; });
  four("only nested_offset", NF4L_BAD_ARGUMENT, [](Weight w) { w.nested_code = w.nested_absmax = nullptr; });
  four("n = 0", NF4L_BAD_ARGUMENT, [](Weight w) { w.n = 0; });
  four("k < 0", NF4L_BAD_ARGUMENT, [](Weight w) { w.k = -64; });
  four("format", NF4L_BAD_ARGUMENT, [](Weight w) { w.format = 9; });
  four("layout", NF4L_BAD_ARGUMENT, [](Weight w) { w.layout = NF4L_TILE16X32; });
  four("blocksize 48", NF4L_BAD_ARGUMENT, [](Weight w) { w.blocksize = 48; });
  four("blocksize 16", NF4L_BAD_ARGUMENT, [](Weight w) { w.blocksize = 16; });
  four("blocksize 8192", NF4L_BAD_ARGUMENT, [](Weight w) { w.blocksize = 8192; });
  four("tiled, blocksize 32", NF4L_BAD_ARGUMENT, [](Weight w) { w.blocksize = 32; });
  four("tiled, k = 96", NF4L_BAD_ARGUMENT, [](Weight w) { w.k = 96; });
  four("shard outside", NF4L_BAD_ARGUMENT, [](Weight w) { w.kb0 = 1; });
  four("codes off by one", NF4L_MISALIGNED, [](Weight w) { w.qweight = codes + 1; });
  four("flat codes off by one", NF4L_OK, [](Weight w) { w.layout = NF4L_FLAT, w.qweight = codes + 1; });

  auto eight = [](const char* what, int want, const std::function<void(Weight)>& change) {
    nf4l_weight w = eight_bit();
    change(w);
    expect(what, nf4l::check_weight(&w), want);
  };
  eight("8 bit", NF4L_OK, [](Weight) {});
  eight("8 bit, any k", NF4L_OK, [](Weight w) { w.k = 7, w.format = NF4L_W8_U8; });
  eight("groups", NF4L_OK, [](Weight w) { w.k = 128, w.blocksize = 64; });
  eight("groups that do not divide k", NF4L_BAD_ARGUMENT, [](Weight w) { w.k = 96, w.blocksize = 64; });
  eight("groups of 32", NF4L_BAD_ARGUMENT, [](Weight w) { w.blocksize = 32; });
  eight("8 bit, flat", NF4L_BAD_ARGUMENT, [](Weight w) { w.layout = NF4L_FLAT; });
  expect("no weight", nf4l::check_weight(nullptr), NF4L_BAD_ARGUMENT);
}

void calls() {
  const nf4l_weight w = tiled();
  expect("dequantize", nf4l::check_dequantize(&w, NF4L_F16, floats), NF4L_OK);
  expect("no output", nf4l::check_dequantize(&w, NF4L_F16, nullptr), NF4L_BAD_ARGUMENT);
  expect("output dtype", nf4l::check_dequantize(&w, 3, floats), NF4L_BAD_ARGUMENT);
  expect("output off by one", nf4l::check_dequantize(&w, NF4L_F16, codes + 1), NF4L_MISALIGNED);

  const nf4l_linear_args good = {NF4L_BF16, 0, 2, floats, 64, nullptr, floats, nullptr, 0};
  auto linear = [&](const char* what, int want, const std::function<void(nf4l_linear_args&)>& change) {
    nf4l_linear_args a = good;
    change(a);
    expect(what, nf4l::check_linear(&w, &a), want);
  };
  linear("linear", NF4L_OK, [](auto&) {});
  linear("empty batch", NF4L_OK, [](auto& a) { a.m = 0, a.x = nullptr, a.y = nullptr; });
  linear("m < 0", NF4L_BAD_ARGUMENT, [](auto& a) { a.m = -1; });
  linear("no x", NF4L_BAD_ARGUMENT, [](auto& a) { a.x = nullptr; });
  linear("no y", NF4L_BAD_ARGUMENT, [](auto& a) { a.y = nullptr; });
  linear("dtype", NF4L_BAD_ARGUMENT, [](auto& a) { a.dtype = -1; });
  linear("stride < 0", NF4L_BAD_ARGUMENT, [](auto& a) { a.x_stride = -64; });
  linear("bias off by one", NF4L_MISALIGNED, [](auto& a) { a.bias = codes + 1; });
  expect("no args", nf4l::check_linear(&w, nullptr), NF4L_BAD_ARGUMENT);
}

}  // namespace

int main() {
  weights();
  calls();
  return failures != 0;
}
