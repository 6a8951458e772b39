// y = x W^T + bias for a handful of rows of x: tiles are decoded in registers and used there at once.
//
// Rows of W lie in lanes, inputs come one step after the other; each row of x has one register that sums a tile's
// products. Then scale * sum is added to the running result in float32 (see gemm.h, which shares the Math types and
// takes over where the registers end).

namespace nf4l::cpu::NF4L_CPU_LEVEL {

template <class Isa, class Math, class Format>
struct BatchKernel {
  using Element = typename Math::Element;
  using Vec = typename Isa::Vec;
  // result[M][16] = scaled sums of a strip over all of its tiles
  using SumStrip = void (*)(const Tiling& tiling, const uint8_t* tiles, const float* scales, const Element* x,
                            float* result);

  template <int M>
  static void sum_strip(const Tiling& tiling, const uint8_t* tiles, const float* scales, const Element* x,
                        float* result) {
    // A sum waits for the product before it: with few rows of x, two sums each keep the multipliers busy.
    constexpr int CHAINS = M <= 4 ? 2 : 1;
    for (int m = 0; m < M; ++m) Isa::store(result + m * LANES, Isa::zero());
    for (int64_t kt = 0; kt < tiling.k_tiles; ++kt) {
      const uint8_t* tile = tiles + kt * TILE_BYTES;
      for (int line = 0; line < TILE_BYTES; line += 64) __builtin_prefetch(tile + PREFETCH_BYTES + line);
      Vec sum[CHAINS][M];
#pragma GCC unroll 16
      for (int i = 0; i < CHAINS * M; ++i) sum[i % CHAINS][i / CHAINS] = Isa::zero();
      Math::template for_each_step<Format>(tile, [&](int group, auto step, typename Math::Operand w) ALWAYS_INLINE {
#pragma GCC unroll 16
        for (int m = 0; m < M; ++m) {
          Vec& to = sum[step % CHAINS][m];
          to = Math::multiply_add(to, w, Math::broadcast(x[(Math::GROUP * group + step) * M + m]));
        }
      });
      x += tiling.tile_k / Math::K_STEP * M;
      const Vec scale = Isa::load(scales + (kt >> tiling.scale_shift) * LANES);
#pragma GCC unroll 16
      for (int m = 0; m < M; ++m) {
        const Vec both = CHAINS == 1 ? sum[0][m] : Isa::add(sum[0][m], sum[CHAINS - 1][m]);
        Isa::store(result + m * LANES, Isa::multiply_add(Isa::load(result + m * LANES), both, scale));
      }
    }
  }

  // The kernel for `rows` rows of x, 1 .. MAX_IN_REGISTERS.
  static SumStrip of(int64_t rows) { return of(rows, std::make_integer_sequence<int, Isa::MAX_IN_REGISTERS>()); }

 private:
  template <int... R>
  static SumStrip of(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr SumStrip table[] = {sum_strip<R + 1>...};
    return table[rows - 1];
  }
};

template <class Isa, class Math, class Format, class T>
class Batch {
 public:
  using Element = typename Math::Element;

  // a.m rows, 1 <= a.m <= Isa::MAX_IN_REGISTERS
  Batch(const nf4l_weight& w, const nf4l_linear_args& a, int threads)
      : w_(w), a_(a), threads_(threads), tiling_(tiling_of(w)), code_(w.nested_code) {}

  int run() {
    const int64_t slabs = tiling_.slabs();
    packed_ =
        static_cast<Element*>(scratch(Scratch::PACKED_X, slabs * (SLAB_K / Math::K_STEP) * a_.m * sizeof(Element)));
    if (!packed_) return NF4L_USE_GEMM;
    const RowBlocks one_block = RowBlocks::of(a_.m, static_cast<int>(a_.m));
    pack_rows<Math>(static_cast<const T*>(a_.x), a_.x_stride, w_.k, one_block, 0, slabs, packed_);
    const SumStrip sum_strip = BatchKernel<Isa, Math, Format>::of(a_.m);
    const int64_t grain = pieces(tiling_.strips, w_.n * w_.k * a_.m, threads_);
    parallel_for(tiling_.strips, grain, threads_,
                 [this, sum_strip](int64_t begin, int64_t end) { run_strips(sum_strip, begin, end); });
    return short_of_memory_ ? NF4L_USE_GEMM : NF4L_OK;
  }

 private:
  using SumStrip = typename BatchKernel<Isa, Math, Format>::SumStrip;

  void run_strips(SumStrip sum_strip, int64_t begin, int64_t end) {
    auto* room = static_cast<float*>(scratch(Scratch::WORKER, tiling_.scale_vectors * LANES * sizeof(float)));
    if (!room) {
      short_of_memory_ = true;
      return;
    }
    for (int64_t strip = begin; strip < end; ++strip) {
      alignas(64) float result[Isa::MAX_IN_REGISTERS * LANES];
      const float* scales = strip_scales<Isa>(w_, code_, strip, room);
      sum_strip(tiling_, w_.qweight + strip * tiling_.k_tiles * TILE_BYTES, scales, packed_, result);
      store_strip<Isa, T>(w_, a_, strip, 0, a_.m, result, LANES, Math::template output_factor<Format>());
    }
  }

  const nf4l_weight& w_;
  const nf4l_linear_args& a_;
  const int threads_;
  const Tiling tiling_;
  const typename Isa::NestedCode code_;
  Element* packed_ = nullptr;
  std::atomic<bool> short_of_memory_{false};
};

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
