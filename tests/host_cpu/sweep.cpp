// The CPU library over many shapes, each buffer exactly as large as the format says: built with sanitizers (see
// run_sanitizers.sh), it finds reads and writes outside them. Results are compared with a scalar decode by
// csrc/layout.h. Prints one line a level; exits with 1 at the first wrong result.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <random>
#include <vector>

#include "../../csrc/codebook.h"
#include "../../csrc/layout.h"
#include "../../csrc/nf4linear.h"

using namespace nf4l;

namespace {

std::mt19937 rng(7);

float uniform(float low, float high) { return std::uniform_real_distribution<float>(low, high)(rng); }

// Exactly sized and 64-byte aligned, as torch allocates.
template <class T>
struct Buffer {
  T* data;
  size_t count;
  explicit Buffer(size_t n) : count(n) {
    if (posix_memalign(reinterpret_cast<void**>(&data), 64, n ? n * sizeof(T) : 1)) abort();
    memset(data, 0x5a, n * sizeof(T));
  }
  ~Buffer() { free(data); }
  Buffer(const Buffer&) = delete;
};

struct Weight {
  nf4l_weight w{};
  std::unique_ptr<Buffer<uint8_t>> qweight, scale_codes;
  std::unique_ptr<Buffer<float>> scales, nested_code, nested_absmax, nested_offset;
  std::vector<float> exact;  // [n, k]

  Weight(int format, int64_t n, int64_t k, int64_t blocksize, bool nested) {
    w.format = format;
    w.n = n;
    w.k = k;
    w.blocksize = blocksize;
    w.kb_full = k / TILE_K4;
    const bool four_bit = format == NF4L_NF4 || format == NF4L_FP4;
    const bool tiled = k % 64 == 0 && blocksize % 64 == 0 && blocksize && k % blocksize == 0;
    w.layout = !four_bit ? NF4L_TILE16X32 : tiled ? NF4L_TILE16X64 : NF4L_FLAT;
    const int64_t strips = ceil_div(n, TILE_ROWS);
    size_t bytes = (n * k + 1) / 2;
    if (w.layout == NF4L_TILE16X64) bytes = strips * (k / 64) * TILE_BYTES;
    if (w.layout == NF4L_TILE16X32) bytes = strips * ceil_div(k, TILE_K8) * TILE_BYTES;
    qweight = std::make_unique<Buffer<uint8_t>>(bytes);
    for (size_t i = 0; i < bytes; ++i) qweight->data[i] = static_cast<uint8_t>(rng());
    w.qweight = qweight->data;
    if (four_bit) {
      fill_scales(strips, nested);
    } else {
      scales = std::make_unique<Buffer<float>>(blocksize ? strips * (k / blocksize) * TILE_ROWS : n);
      for (size_t i = 0; i < scales->count; ++i) scales->data[i] = uniform(0.005f, 0.02f);
      w.scales = scales->data;
    }
    exact.resize(n * k);
    for (int64_t r = 0; r < n; ++r)
      for (int64_t c = 0; c < k; ++c) exact[r * k + c] = four_bit ? value4(r, c) : value8(r, c);
  }

  void fill_scales(int64_t strips, bool nested) {
    const int64_t blocks = ceil_div(w.n * w.k, w.blocksize);
    const bool tiled = w.layout == NF4L_TILE16X64;
    if (!nested) {
      scales = std::make_unique<Buffer<float>>(tiled ? strips * (w.k / 64) * TILE_ROWS : blocks);
      for (size_t i = 0; i < scales->count; ++i) scales->data[i] = uniform(0.5f, 2.0f);
      w.scales = scales->data;
      return;
    }
    scale_codes = std::make_unique<Buffer<uint8_t>>(tiled ? strips * ceil_div(w.k / 64, 4) * 64 : blocks);
    for (size_t i = 0; i < scale_codes->count; ++i) scale_codes->data[i] = static_cast<uint8_t>(rng());
    nested_code = std::make_unique<Buffer<float>>(256);
    for (int i = 0; i < 256; ++i) nested_code->data[i] = uniform(-1.0f, 1.0f);
    nested_absmax = std::make_unique<Buffer<float>>(ceil_div(blocks, NESTED_BLOCKSIZE));
    for (size_t i = 0; i < nested_absmax->count; ++i) nested_absmax->data[i] = uniform(0.1f, 1.0f);
    nested_offset = std::make_unique<Buffer<float>>(1);
    nested_offset->data[0] = 2.0f;
    w.scales = scale_codes->data;
    w.nested_code = nested_code->data;
    w.nested_absmax = nested_absmax->data;
    w.nested_offset = nested_offset->data;
  }

  float value4(int64_t r, int64_t c) const {
    const int64_t element = r * w.k + c, n_kb = w.k / 64, kb = c / 64;
    const bool tiled = w.layout == NF4L_TILE16X64;
    const uint8_t byte = w.qweight[tiled ? tile16x64_byte(r, c, w.k) : element / 2];
    const int code = (tiled ? c : element) % 2 ? byte & 15 : byte >> 4;
    float scale;
    if (w.nested_code) {
      const int64_t group = tiled ? nested_group(r, kb, n_kb, w.blocksize) : element / w.blocksize / NESTED_BLOCKSIZE;
      const uint8_t q = scale_codes->data[tiled ? absmax_q_byte(r, kb, n_kb) : element / w.blocksize];
      volatile float product = w.nested_code[q] * w.nested_absmax[group];  // volatile: no fused multiply-add
      scale = product + *w.nested_offset;
    } else {
      scale = scales->data[tiled ? row_scale_index(r, kb, n_kb) : element / w.blocksize];
    }
    return (w.format == NF4L_NF4 ? Nf4::value(code) : Fp4::value(code)) * scale;
  }

  float value8(int64_t r, int64_t c) const {
    const uint8_t byte = w.qweight[tile16x32_byte(r, c, w.k)];
    const float value = w.format == NF4L_W8_S8 ? W8S8::value(byte) : W8U8::value(byte);
    if (w.blocksize) return value * scales->data[row_scale_index(r, c / w.blocksize, w.k / w.blocksize)];
    return value * scales->data[r] * INV_127;
  }
};

float load(const void* p, int64_t i, int dtype) {
  if (dtype == NF4L_F32) return static_cast<const float*>(p)[i];
  const uint16_t bits = static_cast<const uint16_t*>(p)[i];
  uint32_t wide = static_cast<uint32_t>(bits) << 16;
  if (dtype == NF4L_F16) {  // normal values and zero are all that appear here
    if (!(bits & 0x7fff)) return 0.0f;
    if (!(bits & 0x7c00)) return (bits & 0x8000 ? -1.0f : 1.0f) * static_cast<float>(bits & 0x3ff) * 0x1p-24f;
    wide = (bits & 0x8000u) << 16 | (((bits & 0x7fffu) << 13) + (112u << 23));
  }
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

// Small multiples of 1/8 are exact in every type.
void store_exact(void* p, int64_t i, int dtype, int eighths) {
  const float value = static_cast<float>(eighths) / 8.0f;
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (dtype == NF4L_F32) static_cast<float*>(p)[i] = value;
  if (dtype == NF4L_BF16) static_cast<uint16_t*>(p)[i] = static_cast<uint16_t>(bits >> 16);
  if (dtype == NF4L_F16)
    static_cast<uint16_t*>(p)[i] =
        value == 0.0f ? 0 : static_cast<uint16_t>((bits >> 16 & 0x8000) | ((bits & 0x7fffffff) - (112u << 23)) >> 13);
}

[[noreturn]] void fail(const Weight& t, const char* what, int64_t m, int dtype) {
  printf("WRONG %s: format %d, %lld x %lld, blocksize %lld, M=%lld, dtype %d\n", what, t.w.format, (long long)t.w.n,
         (long long)t.w.k, (long long)t.w.blocksize, (long long)m, dtype);
  exit(1);
}

void check_dequantize(const Weight& t, int dtype) {
  const size_t size = dtype == NF4L_F32 ? 4 : 2;
  Buffer<uint8_t> out(t.w.n * t.w.k * size);
  if (nf4l_cpu_dequantize(&t.w, dtype, out.data, 2)) fail(t, "dequantize status", 0, dtype);
  const float tolerance = dtype == NF4L_F32 ? 0.0f : dtype == NF4L_F16 ? 0x1p-11f : 0x1p-8f;
  for (int64_t i = 0; i < t.w.n * t.w.k; ++i)
    if (fabsf(load(out.data, i, dtype) - t.exact[i]) >
        tolerance * fabsf(t.exact[i]) + (dtype == NF4L_F16 ? 0x1p-25f : 0.0f))
      fail(t, "dequantize", 0, dtype);
}

void check_linear(const Weight& t, int64_t m, int dtype, int32_t flags, int threads) {
  const size_t size = dtype == NF4L_F32 ? 4 : 2;
  const int64_t n = t.w.n, k = t.w.k;
  Buffer<uint8_t> x(m * k * size), y(m * n * size), bias(n * size);
  for (int64_t i = 0; i < m * k; ++i) store_exact(x.data, i, dtype, static_cast<int>(rng() % 65) - 32);
  for (int64_t i = 0; i < n; ++i) store_exact(bias.data, i, dtype, static_cast<int>(rng() % 65) - 32);
  nf4l_linear_args a{};
  a.dtype = dtype;
  a.flags = flags;
  a.m = m;
  a.x = x.data;
  a.x_stride = k;
  a.y = y.data;
  a.bias = m % 2 ? bias.data : nullptr;
  const int status = nf4l_cpu_linear(&t.w, &a, threads);
  if (t.w.layout == NF4L_FLAT) {
    if (status != NF4L_USE_GEMM) fail(t, "linear status", m, dtype);
    return;
  }
  if (status != NF4L_OK) fail(t, "linear status", m, dtype);
  const bool float32 = dtype == NF4L_F32 && !flags;
  const double tolerance = float32 ? 2e-6 : dtype == NF4L_F16 ? 1e-3 : 1e-2;
  for (int64_t r = 0; r < m; ++r)
    for (int64_t c = 0; c < n; ++c) {
      double sum = a.bias ? load(bias.data, c, dtype) : 0.0, magnitude = fabs(sum);
      for (int64_t i = 0; i < k; ++i) {
        const double product = static_cast<double>(load(x.data, r * k + i, dtype)) * t.exact[c * k + i];
        sum += product;
        magnitude += fabs(product);
      }
      if (!(fabs(load(y.data, r * n + c, dtype) - sum) <= tolerance * magnitude + 1e-6)) fail(t, "linear", m, dtype);
    }
}

struct Shape {
  int64_t n, k;
};

}  // namespace

int main() {
  const Shape shapes[] = {{1, 64},    {16, 128}, {17, 192}, {48, 320}, {35, 576},
                          {20, 2752}, {3, 50},   {7, 33},   {1, 1},    {66, 96}};
  const int64_t rows[] = {1, 2, 3, 8, 16, 17, 26};
  const int dtypes[] = {NF4L_F32, NF4L_F16, NF4L_BF16};
  int cases = 0;
  const auto check = [&](const Weight& t) {
    for (int dtype : dtypes) {
      check_dequantize(t, dtype);
      for (int64_t m : rows) check_linear(t, m, dtype, 0, 1 + ++cases % 3);
    }
    for (int64_t m : rows) check_linear(t, m, NF4L_F32, NF4L_ALLOW_BF16, 1 + ++cases % 3);
  };
  for (const Shape s : shapes) {
    for (int format : {NF4L_NF4, NF4L_FP4})
      for (int64_t blocksize : {32, 64, 4096}) {
        check(Weight(format, s.n, s.k, blocksize, true));
        check(Weight(format, s.n, s.k, blocksize, false));
      }
    for (int format : {NF4L_W8_S8, NF4L_W8_U8})
      for (int64_t group : {0, 64})
        if (!group || s.k % group == 0) check(Weight(format, s.n, s.k, group, false));
  }
  printf("%-12s %d linear calls right\n", nf4l_cpu_level(), cases);
  return 0;
}
