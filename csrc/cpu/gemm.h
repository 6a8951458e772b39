// y = x W^T + bias for any M: each slab (64 inputs) is decoded once into a small panel and multiplied with all rows of
// x.
//
// A panel is PANEL strips x one slab, decoded with rows in lanes and without its scales (for NF4 that is exact, and
// for bfloat16 products it needs one rounding of the 16 centroids instead of one of every weight). The micro-kernel
// sums a slab's products in registers and then adds scale * sum to the running result in float32.
//
// A Math says how products are formed: F32Math multiplies float32 (every level), a Bf16Math pairs of bfloat16 values.
//   Element, K_STEP      what one lane of the panel and one packed x hold: K_STEP inputs in 4 bytes
//   for_each_step<Format>(tile, body)    decodes: body(group, STEP(), Operand of 16 rows) for each K_STEP inputs of a
//   tile,
//                        step GROUP * group + STEP; STEP is an integral_constant
//   pack(slab, step, inputs)   the Element of x for a step, from a slab of which `inputs` exist
//   output_factor<Format>()    what the result still has to be multiplied with
//   multiply_add(acc, w, x)

namespace nf4l::cpu::NF4L_CPU_LEVEL {

// result[MR][PANEL][16] += scales[PANEL][16] * (panel . x) over one slab.
template <class Isa, class Math, int MR>
void multiply_panel(const typename Math::Element* panel, const typename Math::Element* x, int steps,
                    const float* const* scales, float* result) {
  using Vec = typename Isa::Vec;
  constexpr int PANEL = Isa::PANEL;
  Vec sum[MR][PANEL];
  for (int r = 0; r < MR; ++r)
    for (int p = 0; p < PANEL; ++p) sum[r][p] = Isa::zero();
  for (int s = 0; s < steps; ++s) {
    typename Math::Operand w[PANEL];
    for (int p = 0; p < PANEL; ++p) w[p] = Math::load(panel + (s * PANEL + p) * LANES);
    for (int r = 0; r < MR; ++r) {
      const typename Math::Operand xv = Math::broadcast(x[s * MR + r]);
      for (int p = 0; p < PANEL; ++p) sum[r][p] = Math::multiply_add(sum[r][p], w[p], xv);
    }
  }
  for (int p = 0; p < PANEL; ++p) {
    const Vec scale = Isa::load(scales[p]);
    for (int r = 0; r < MR; ++r) {
      float* at = result + (r * PANEL + p) * LANES;
      Isa::store(at, Isa::multiply_add(Isa::load(at), sum[r][p], scale));
    }
  }
}

template <class Math>
using MultiplyPanel = void (*)(const typename Math::Element* panel, const typename Math::Element* x, int steps,
                               const float* const* scales, float* result);

// The kernels for 1 .. MAX_MR rows of x.
template <class Isa, class Math, int... R>
const MultiplyPanel<Math>* multiply_panels(std::integer_sequence<int, R...>) {
  static constexpr MultiplyPanel<Math> table[] = {multiply_panel<Isa, Math, R + 1>...};
  return table;
}

template <class Isa, class Math, class Format, class T>
class Gemm {
 public:
  using Element = typename Math::Element;

  Gemm(const nf4l_weight& w, const nf4l_linear_args& a, int threads)
      : w_(w), a_(a), threads_(threads), tiling_(tiling_of(w)), code_(w.nested_code) {}

  int run() {
    // Rows of x a pass: bounds the packed x that a thread keeps to MAX_PACKED_BYTES.
    const int64_t row_bytes = tiling_.slabs() * STEPS * sizeof(Element);
    const int64_t most = MAX_PACKED_BYTES / row_bytes;
    const int64_t pass = a_.m < most ? a_.m : (most < Isa::MAX_MR ? Isa::MAX_MR : most / Isa::MAX_MR * Isa::MAX_MR);
    packed_ = static_cast<Element*>(scratch(Scratch::PACKED_X, pass * row_bytes));
    if (!packed_) return NF4L_USE_GEMM;
    for (int64_t m = 0; m < a_.m; m += pass) {
      first_row_ = m;
      rows_ = a_.m - m < pass ? a_.m - m : pass;
      blocks_ = RowBlocks::of(rows_, Isa::MAX_MR);
      pack_x();
      const int64_t panels = ceil_div(tiling_.strips, Isa::PANEL);
      const int64_t share = pieces(panels, w_.n * w_.k * rows_, threads_);
      together_ = share < MOST_TOGETHER ? share : MOST_TOGETHER;
      parallel_for(panels, together_, threads_, [this](int64_t begin, int64_t end) { run_panels(begin, end); });
      if (short_of_memory_) return NF4L_USE_GEMM;
    }
    return NF4L_OK;
  }

 private:
  static constexpr int PANEL = Isa::PANEL;
  static constexpr int STEPS = SLAB_K / Math::K_STEP;
  static constexpr int64_t MAX_PACKED_BYTES = 8 << 20;
  static constexpr int64_t DECODED_FLOATS = int64_t{SLAB_K} * PANEL * LANES;
  // Panels that share one pass over x, which is too large for the near caches when it has many rows.
  static constexpr int MOST_TOGETHER = 4;
  // Below this much x the calling thread packs alone: less than waking the others costs.
  static constexpr int64_t PACK_ALONE_ELEMENTS = 1 << 16;

  void pack_x() {
    const T* x = static_cast<const T*>(a_.x) + first_row_ * a_.x_stride;
    const int64_t grain = ceil_div(PACK_ALONE_ELEMENTS, rows_ * SLAB_K);
    parallel_for(tiling_.slabs(), grain, threads_, [&](int64_t begin, int64_t end) {
      pack_rows<Math>(x, a_.x_stride, w_.k, blocks_, begin, end, packed_);
    });
  }

  void run_panels(int64_t begin, int64_t end) {
    const int64_t scale_floats = tiling_.scale_vectors * LANES;
    const int64_t result_floats = rows_ * PANEL * LANES;
    const int64_t panel_floats = scale_floats * PANEL + result_floats + DECODED_FLOATS;
    auto* room = static_cast<float*>(scratch(Scratch::WORKER, together_ * panel_floats * sizeof(float)));
    if (!room) {
      short_of_memory_ = true;
      return;
    }
    for (int64_t first = begin; first < end; first += together_) {
      Panel panels[MOST_TOGETHER];
      const int count = static_cast<int>(end - first < together_ ? end - first : together_);
      for (int i = 0; i < count; ++i) {
        float* own = room + i * panel_floats;
        panels[i] = {reinterpret_cast<Element*>(own), own + DECODED_FLOATS, {}, {}};
        memset(panels[i].result, 0, result_floats * sizeof(float));
        for (int p = 0; p < PANEL; ++p) {
          // A last panel that sticks out computes its last strip again; it is not stored.
          const int64_t wanted = (first + i) * PANEL + p, strip = wanted < tiling_.strips ? wanted : tiling_.strips - 1;
          float* scale_room = panels[i].result + result_floats + p * scale_floats;
          panels[i].scales[p] = strip_scales<Isa>(w_, code_, strip, scale_room);
          panels[i].tiles[p] = w_.qweight + strip * tiling_.k_tiles * TILE_BYTES;
        }
      }
      multiply(panels, count);
      for (int i = 0; i < count; ++i) store(first + i, panels[i].result);
    }
  }

  struct Panel {
    Element* decoded;  // [steps][PANEL][16], one slab
    float* result;     // [rows][PANEL][16]
    const float* scales[PANEL];
    const uint8_t* tiles[PANEL];
  };

  void multiply(const Panel* panels, int count) const {
    const MultiplyPanel<Math>* kernels = multiply_panels<Isa, Math>(std::make_integer_sequence<int, Isa::MAX_MR>());
    const int slab_tiles = tiling_.slab_tiles(), tile_steps = STEPS / slab_tiles;
    for (int64_t kt = 0; kt < tiling_.k_tiles; kt += slab_tiles) {
      const int tiles = static_cast<int>(tiling_.k_tiles - kt < slab_tiles ? tiling_.k_tiles - kt : slab_tiles);
      const float* scales[MOST_TOGETHER][PANEL];
      for (int i = 0; i < count; ++i) {
        for (int p = 0; p < PANEL; ++p) {
          for (int t = 0; t < tiles; ++t)
            decode(panels[i].tiles[p] + (kt + t) * TILE_BYTES,
                   panels[i].decoded + (t * tile_steps * PANEL + p) * LANES);
          scales[i][p] = panels[i].scales[p] + (kt >> tiling_.scale_shift) * LANES;
        }
      }
      const Element* x = packed_ + kt / slab_tiles * rows_ * STEPS;
      for (int64_t b = 0; b < blocks_.count; ++b) {
        const int64_t row = blocks_.start_of(b);
        const auto kernel = kernels[blocks_.rows_of(b) - 1];
        for (int i = 0; i < count; ++i)
          kernel(panels[i].decoded, x + row * STEPS, tiles * tile_steps, scales[i],
                 panels[i].result + row * PANEL * LANES);
      }
    }
  }

  static void decode(const uint8_t* tile, Element* to) {
    Math::template for_each_step<Format>(tile, [=](int group, auto step, typename Math::Operand w) ALWAYS_INLINE {
      Math::store(to + (Math::GROUP * group + step) * PANEL * LANES, w);
    });
  }

  void store(int64_t panel, const float* result) const {
    for (int p = 0; p < PANEL; ++p)
      store_strip<Isa, T>(w_, a_, panel * PANEL + p, first_row_, rows_, result + p * LANES, PANEL * LANES,
                          Math::template output_factor<Format>());
  }

  const nf4l_weight& w_;
  const nf4l_linear_args& a_;
  const int threads_;
  const Tiling tiling_;
  const typename Isa::NestedCode code_;
  Element* packed_ = nullptr;
  int64_t first_row_ = 0, rows_ = 0;
  RowBlocks blocks_{};
  int64_t together_ = 1;
  std::atomic<bool> short_of_memory_{false};
};

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
