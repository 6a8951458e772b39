// Which engine a linear call gets, in float32 arithmetic.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

// Two or more rows of x, or one where the level has no gemv.
template <class Isa, class Math, class Format, class T>
int run_batch(const nf4l_weight& w, const nf4l_linear_args& a, int threads) {
  if (a.m > Math::template most_rows<T>()) return NF4L_USE_GEMM;
  if (a.m <= Isa::MAX_IN_REGISTERS) return Batch<Isa, Math, Format, T>(w, a, threads).run();
  return Gemm<Isa, Math, Format, T>(w, a, threads).run();
}

template <class Isa>
int linear_f32(const nf4l_weight& w, const nf4l_linear_args& a, int threads) {
  return with_dtype(a.dtype, [&](auto element) {
    return with_format(w.format, [&](auto format) {
      return run_batch<Isa, F32Math<Isa>, decltype(format), decltype(element)>(w, a, threads);
    });
  });
}

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
