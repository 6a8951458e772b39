// Shape of a tiled weight, and the float32 scales of one strip (16 rows, all of K) in lane order.
//
// Lane i = 2 g + h of a 16-vector holds row g + 8 h of its tile: the order in which scales are stored and tiles
// decoded.

namespace nf4l::cpu::NF4L_CPU_LEVEL {

constexpr int LANES = TILE_ROWS;

inline constexpr int lane_row(int lane) { return lane / 2 + lane % 2 * 8; }

// A number that is known when a kernel is compiled, passed as a value.
template <int N>
using Constant = std::integral_constant<int, N>;

// Inputs that x is packed and panels are decoded by: one 4-bit tile or two 8-bit ones. Every scale covers whole slabs.
constexpr int SLAB_K = 64;

struct Tiling {
  int64_t strips;         // of 16 rows
  int64_t k_tiles;        // a strip
  int tile_k;             // inputs a tile
  int scale_shift;        // tile kt uses scale vector kt >> scale_shift of its strip
  int64_t scale_vectors;  // room that strip_scales() needs, in 16-vectors

  int slab_tiles() const { return SLAB_K / tile_k; }
  int64_t slabs() const { return ceil_div(k_tiles, slab_tiles()); }
};

inline int log2_of(int64_t power_of_two) { return __builtin_ctzll(static_cast<uint64_t>(power_of_two)); }

inline Tiling tiling_of(const nf4l_weight& w) {
  const int64_t strips = ceil_div(w.n, TILE_ROWS);
  if (w.layout == NF4L_TILE16X64) {
    const int64_t k_tiles = w.k / TILE_K4;
    return {strips, k_tiles, TILE_K4, 0, ceil_div(k_tiles, 4) * 4};
  }
  const int shift = w.blocksize ? log2_of(w.blocksize / TILE_K8) : 62;
  return {strips, ceil_div(w.k, TILE_K8), TILE_K8, shift, 1};
}

// Scale codes turned into absmax = code * nested scale + offset, each step rounded to float32.
template <class Isa>
void nested_scales(const nf4l_weight& w, const typename Isa::NestedCode& code, int64_t strip, float* out) {
  using Vec = typename Isa::Vec;
  const int n_kb = static_cast<int>(w.k / TILE_K4), quads = ceil_div(n_kb, 4);
  const uint8_t* codes = static_cast<const uint8_t*>(w.scales) + int64_t{64} * strip * quads;
  for (int q = 0; q < quads; ++q) Isa::look_up_scale_codes(code, codes + q * 64, out + q * 64);

  // Blocks of one row share a nested scale for long runs: walk K from one change in any of the 16 rows to the next.
  // Block numbers are counted from the nested group in which the strip begins, which keeps them in 32 bits.
  const int shift = log2_of(w.blocksize / TILE_K4 * NESTED_BLOCKSIZE);
  const int64_t start = (strip * TILE_ROWS + w.n0) * w.kb_full + w.kb0;
  const float* groups = w.nested_absmax + (start >> shift);
  const int start_in_group = static_cast<int>(start & ((int64_t{1} << shift) - 1));
  const int rows = static_cast<int>(w.n - strip * TILE_ROWS < TILE_ROWS ? w.n - strip * TILE_ROWS : TILE_ROWS);
  const int row_blocks = static_cast<int>(w.kb_full);
  int first[LANES];  // block number of each lane's row at kb = 0
  for (int i = 0; i < LANES; ++i)
    first[i] = start_in_group + (lane_row(i) < rows ? lane_row(i) : rows - 1) * row_blocks;
  const Vec offset = Isa::broadcast(*w.nested_offset);
  for (int kb = 0, end; kb < n_kb; kb = end) {
    float nested[LANES];
    const int left = Isa::nested_run(first, kb, shift, groups, nested);
    const Vec scale = Isa::load(nested);
    end = n_kb - kb < left ? n_kb : kb + left;
    for (int b = kb; b < end; ++b)
      Isa::store(out + b * LANES, Isa::add(Isa::mul(Isa::load(out + b * LANES), scale), offset));
  }
}

// Scales of a strip, [scale vectors][16]: where they are stored, or computed into `out`.
template <class Isa>
const float* strip_scales(const nf4l_weight& w, const typename Isa::NestedCode& code, int64_t strip, float* out) {
  const float* stored = static_cast<const float*>(w.scales);
  if (w.nested_code) {
    nested_scales<Isa>(w, code, strip, out);
    return out;
  }
  if (w.layout == NF4L_TILE16X64) return stored + strip * (w.k / TILE_K4) * LANES;
  if (w.blocksize) return stored + strip * (w.k / w.blocksize) * LANES;
  for (int i = 0; i < LANES; ++i) {
    const int64_t row = strip * TILE_ROWS + lane_row(i);
    out[i] = row < w.n ? stored[row] * INV_127 : 0.0f;
  }
  return out;
}

}  // namespace nf4l::cpu::NF4L_CPU_LEVEL
