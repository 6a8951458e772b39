// Which engine and which arithmetic a linear call gets at the AVX-512 levels.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

template <class Format, class T>
int linear_avx512(const nf4l_weight& w, const nf4l_linear_args& a, int threads) {
#if defined(__AVX512BF16__)
  if constexpr (!std::is_same_v<T, Half>) {
    if (std::is_same_v<T, Bf16> || (a.flags & NF4L_ALLOW_BF16)) {
      if (a.m > 1) return run_batch<Avx512, Bf16Math, Format, T>(w, a, threads);
      if constexpr (IS_4BIT<Format>) return Gemv<Decoder4Bf16<Format>, T>(w, a, threads).run();
    }
  }
#endif
  if (a.m > 1) return run_batch<Avx512, F32Math<Avx512>, Format, T>(w, a, threads);
  using Decoder = std::conditional_t<IS_4BIT<Format>, Decoder4F32<Format>, Decoder8F32<Format>>;
  return Gemv<Decoder, T>(w, a, threads).run();
}

inline int linear(const nf4l_weight& w, const nf4l_linear_args& a, int threads) {
  return with_dtype(a.dtype, [&](auto element) {
    return with_format(w.format,
                       [&](auto format) { return linear_avx512<decltype(format), decltype(element)>(w, a, threads); });
  });
}

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
