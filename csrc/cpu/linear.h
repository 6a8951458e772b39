// Which engine and which arithmetic a linear call gets.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

template <class Isa, class Math, class T>
int run_gemm(const nf4l_weight& w, const nf4l_linear_args& a, int threads) {
  return with_format(w.format, [&](auto format) { return Gemm<Isa, Math, decltype(format), T>(w, a, threads).run(); });
}

// float32 arithmetic for every dtype.
template <class Isa>
int linear_f32(const nf4l_weight& w, const nf4l_linear_args& a, int threads) {
  return with_dtype(a.dtype, [&](auto element) { return run_gemm<Isa, F32Math<Isa>, decltype(element)>(w, a, threads); });
}

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
