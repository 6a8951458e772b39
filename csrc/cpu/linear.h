// Which engine and which arithmetic a linear call gets.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

template <class Isa, class Math>
int run_gemm(const nf4l_weight& w, const nf4l_linear_args& a, int threads) {
  return with_dtype(a.dtype, [&](auto element) {
    using T = decltype(element);
    return with_format(w.format, [&](auto format) { return Gemm<Isa, Math, decltype(format), T>(w, a, threads).run(); });
  });
}

template <class Isa>
int linear(const nf4l_weight& w, const nf4l_linear_args& a, int threads) {
  return run_gemm<Isa, F32Math<Isa>>(w, a, threads);
}

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
