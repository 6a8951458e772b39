// Rows of x on their way in and rows of y on their way out.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

// How the rows of x are cut into blocks of at most MAX_MR rows, as evenly as possible.
struct RowBlocks {
  int64_t count;
  int64_t longer;  // the first `longer` blocks have `rows` + 1 rows
  int rows;

  static RowBlocks of(int64_t m, int max_rows) {
    const int64_t count = ceil_div(m, max_rows);
    return {count, m % count, static_cast<int>(m / count)};
  }
  int rows_of(int64_t b) const { return rows + (b < longer); }
  int64_t start_of(int64_t b) const { return b * rows + (b < longer ? b : longer); }
};

// x of slabs [begin, end) in the order in which kernels read it: [slab][row block][step][row of the block].
// Inputs from k on do not exist and count as 0: the last 8-bit tiles of a row may be padded. `x` is the first row.
template <class Math, class T>
void pack_rows(const T* x, int64_t stride, int64_t k, const RowBlocks& blocks, int64_t begin, int64_t end,
               typename Math::Element* packed) {
  constexpr int STEPS = SLAB_K / Math::K_STEP;
  const int64_t slab_elements = blocks.start_of(blocks.count) * STEPS;
  for (int64_t b = 0; b < blocks.count; ++b) {
    const int rows = blocks.rows_of(b);
    for (int r = 0; r < rows; ++r) {
      const T* row = x + (blocks.start_of(b) + r) * stride;
      typename Math::Element* to = packed + begin * slab_elements + blocks.start_of(b) * STEPS + r;
      for (int64_t slab = begin; slab < end; ++slab, to += slab_elements) {
        const T* from = row + slab * SLAB_K;
        const int64_t inputs = k - slab * SLAB_K;
        if (inputs >= SLAB_K) {
          for (int s = 0; s < STEPS; ++s) to[s * rows] = Math::pack(from, s, SLAB_K);
        } else {
          for (int s = 0; s < STEPS; ++s) to[s * rows] = Math::pack(from, s, inputs);
        }
      }
    }
  }
}

// y[first_row + r][rows of a strip] = result[r * stride ..] * factor + bias for `rows` rows of x; a strip beyond n is
// none.
template <class Isa, class T>
void store_strip(const nf4l_weight& w, const nf4l_linear_args& a, int64_t strip, int64_t first_row, int64_t rows,
                 const float* result, int64_t stride, float factor) {
  const int64_t n = strip * LANES;
  if (n >= w.n) return;
  const int count = static_cast<int>(w.n - n < LANES ? w.n - n : LANES);
  const T* bias = a.bias ? static_cast<const T*>(a.bias) + n : nullptr;
  for (int64_t r = 0; r < rows; ++r)
    Isa::store_rows(static_cast<T*>(a.y) + (first_row + r) * w.n + n, Isa::load(result + r * stride), factor, bias,
                    count);
}

// Products below which the calling thread is done before another one has joined it.
constexpr int64_t ALONE_PRODUCTS = 1 << 17;

// Units (strips or panels) a piece of a parallel loop over `count` of them: a few pieces a thread, so that one that is
// held up does not hold up the call, or all of them where they are little work.
inline int64_t pieces(int64_t count, int64_t products, int threads) {
  if (products < ALONE_PRODUCTS) return count;
  return ceil_div(count, int64_t{8} * (threads > 0 ? threads : 1));
}

// How far ahead of their use weights are asked for.
constexpr int PREFETCH_BYTES = 4096;

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
