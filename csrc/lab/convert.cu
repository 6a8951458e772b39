// The shared library of the conversion laboratory, which `nf4linear lab convert` builds, loads, checks and times.
//
// Every function launches on the given stream and returns a cudaError_t.
#include "convert.cuh"

using namespace nf4l;
using namespace nf4l::lab;

namespace {

// f(T, Code, HOW) for kind = 4 how + 2 bf16 + signed.
template <How HOW, class F>
auto by_types(int kind, F f) {
  switch (kind % 4) {
    case 0: return f(__half(), W8U8(), std::integral_constant<How, HOW>());
    case 1: return f(__half(), W8S8(), std::integral_constant<How, HOW>());
    case 2: return f(__nv_bfloat16(), W8U8(), std::integral_constant<How, HOW>());
    default: return f(__nv_bfloat16(), W8S8(), std::integral_constant<How, HOW>());
  }
}
template <class F>
auto by_kind(int kind, F f) {
  switch (kind / 4) {
    case 0: return by_types<How::nothing>(kind, f);
    case 1: return by_types<How::plain>(kind, f);
    default: return by_types<How::fast>(kind, f);
  }
}

template <Way WAY>
cudaError_t launch_product(const ProductArgs& args, cudaStream_t stream) {
  constexpr int BYTES = ProductTile::STAGES * ProductTile::STAGE;
  constexpr auto MOST = cudaFuncAttributeMaxDynamicSharedMemorySize;
  if (const cudaError_t error = cudaFuncSetAttribute(product<WAY>, MOST, BYTES)) return error;
  const dim3 grid(args.n / ProductTile::ROWS, args.m / ProductTile::TOKENS);
  product<WAY><<<grid, ProductTile::THREADS, BYTES, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace

#define NF4L_LAB extern "C" __attribute__((visibility("default")))

// Weights that one thread of nf4l_lab_convert_loop converts in a round.
NF4L_LAB int nf4l_lab_convert_weights(void) { return 4 * CONVERT_WORDS; }

NF4L_LAB int nf4l_lab_convert_loop(int kind, uint32_t* out, int blocks, int rounds, cudaStream_t stream) {
  by_kind(kind, [&](auto t, auto code, auto how) {
    convert_loop<decltype(how)::value, decltype(t), decltype(code)><<<blocks, 256, 0, stream>>>(out, rounds);
  });
  return cudaGetLastError();
}

NF4L_LAB int nf4l_lab_convert_once(int kind, const uint32_t* words, uint32_t* out, int n, cudaStream_t stream) {
  by_kind(kind, [&](auto t, auto code, auto how) {
    convert_once<decltype(how)::value, decltype(t), decltype(code)><<<(n + 255) / 256, 256, 0, stream>>>(words, out, n);
  });
  return cudaGetLastError();
}

NF4L_LAB int nf4l_lab_product(int way, const uint8_t* w, const void* x, void* d, int n, int m, int k,
                              cudaStream_t stream) {
  const ProductArgs args = {w, static_cast<const __half*>(x), static_cast<__half*>(d), n, m, k};
  switch (way) {
    case 0: return launch_product<Way::narrow_loads>(args, stream);
    case 1: return launch_product<Way::shuffles>(args, stream);
    default: return launch_product<Way::offline>(args, stream);
  }
}
