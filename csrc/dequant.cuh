// Engine: a whole quantized weight to row-major float32, float16 or bfloat16, in one launch.
//
// This is V4, the last stage of the ladder in lab/ladder.cuh. Four bytes or more are written for each byte read, so the
// kernel is a stream of stores, and everything else is arranged around them. One warp takes 512 bytes of codes, a
// "unit":
//
//   prefetch  one thread asks the L2 cache for the codes of a block that will start later: long reads of device memory,
//             and short waits;
//   load      16 bytes a lane, and the one block scale that the lane decodes for the whole warp;
//   swap      the codes go through 512 bytes of shared memory, so that each lane finds the codes of the 16 output bytes
//             that lie beside its neighbours' (this is also where tile order becomes row order);
//   decode    each code picks its centroid out of the warp's registers: lane c holds centroid c, so a look-up is one
//             shuffle, without a table to set up, a barrier or a bank conflict;
//   store     16 bytes a lane, rows in whole 64-byte segments or more, marked as streaming.
//
// A weight is rounded once: float32 centroid times float32 scale, then to the output type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "codebook.h"
#include "convert.cuh"
#include "layout.h"
#include "nf4linear.h"
#include "scale.cuh"
#include "status.cuh"

namespace nf4l {

constexpr int UNIT_BYTES = TILE_BYTES;
constexpr int DEQUANT_WARPS = 8;  // of one block
// Blocks between the one that prefetches and the one whose codes it asks for: twice what an H200 holds at once. On that
// GPU once as many was up to 1 % slower, no prefetch 1 to 3 %, and half as many slower than none.
constexpr int PREFETCH_BLOCKS = 2112;

// ---- output ---------------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

// Outputs of one 16-byte store: 4 float32 or 8 16-bit values.
template <class T>
constexpr int VECTOR = 16 / sizeof(T);

template <class T>
__device__ __forceinline__ uint4 pack_vector(const float* v) {
  if constexpr (std::is_same_v<T, float>) {
    return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
  } else {
    const T type = T();
    return {pack_pair(v[0], v[1], type), pack_pair(v[2], v[3], type), pack_pair(v[4], v[5], type),
            pack_pair(v[6], v[7], type)};
  }
}

// ---- byte orders ----------------------------------------------------------------------------------------------------
// An order knows, for one unit, how a lane loads codes and its scale, and where the lane's i-th vector of VECTOR<T>
// outputs comes from and goes to. Lane<T> holds what does not depend on i; all three steps are constants or one
// multiplication.

template <class T>
struct Lane {
  T* out;                // of vector 0; vector i is out_step elements further
  int64_t out_step;
  const uint8_t* codes;  // of vector 0 in the staged unit
  int scale_lane;        // the lane that decoded vector 0's scale
};

// Two codes of a byte, high nibble first; lane c of each half warp holds `centroid` c. At this width a shuffle reads
// only the low four bits of the lane number, so nothing is masked.
__device__ __forceinline__ void decode_byte(uint32_t byte, float centroid, float scale, float* value) {
  value[0] = __fmul_rn(__shfl_sync(ALL_LANES, centroid, byte >> 4, 16), scale);
  value[1] = __fmul_rn(__shfl_sync(ALL_LANES, centroid, byte, 16), scale);
}

// bitsandbytes' order: codes and blocks run over the flat [n, k].
struct FlatOrder {
  static constexpr int UNIT_WEIGHTS = 2 * UNIT_BYTES;
  template <class T>
  static constexpr int CODES_STEP = WARP * VECTOR<T> / 2;
  template <class T>
  static constexpr int SCALE_STEP = VECTOR<T>;  // 32 vectors of it hold as many blocks of 32 weights

  BlockScales scales;
  const uint8_t* codes;
  int64_t numel;
  int64_t first_block;  // of this shard in the unsharded weight
  int log2_blocksize;

  // Where unit `index` lies: its first weight.
  using Place = int64_t;
  __device__ __forceinline__ Place place(uint32_t index) const { return int64_t(index) * UNIT_WEIGHTS; }

  __device__ __forceinline__ bool whole(Place unit) const { return unit + UNIT_WEIGHTS <= numel; }

  // The last unit may end early, and a view of a larger buffer may start anywhere: then byte by byte.
  __device__ __forceinline__ uint4 load(uint32_t index, int lane, bool vectors) const {
    const int64_t first = int64_t(index) * UNIT_BYTES + lane * LANE_BYTES, bytes = (numel + 1) / 2;
    if (vectors) return __ldcs(reinterpret_cast<const uint4*>(codes + first));
    uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int b = 0; b < LANE_BYTES; ++b) {
      if (first + b < bytes) word[b / 4] |= uint32_t(codes[first + b]) << (8 * (b % 4));
    }
    return {word[0], word[1], word[2], word[3]};
  }

  // A lane decodes the scale of its own 32 weights: no block is smaller.
  __device__ __forceinline__ float scale(Place unit, int lane) const {
    const int64_t first = unit + 32 * lane, block = first >> log2_blocksize;
    return first < numel ? scales(block, (block + first_block) / NESTED_BLOCKSIZE) : 0.0f;
  }

  template <class T>
  __device__ __forceinline__ Lane<T> lane(Place unit, int lane, const uint8_t* staged, T* out) const {
    const int first = lane * VECTOR<T>;
    return {out + (unit + first), WARP * VECTOR<T>, staged + first / 2, first / 32};
  }

  template <class T>
  __device__ __forceinline__ void decode(const uint8_t* staged, float centroid, float scale, float* value) const {
    using Bytes = std::conditional_t<VECTOR<T> == 8, uint32_t, uint16_t>;
    const uint32_t bytes = *reinterpret_cast<const Bytes*>(staged);
#pragma unroll
    for (int b = 0; b < VECTOR<T> / 2; ++b) decode_byte(bytes >> (8 * b), centroid, scale, value + 2 * b);
  }

  // How many values of vector i exist.
  template <class T>
  __device__ __forceinline__ int64_t count(Place unit, int lane, int i) const {
    return numel - unit - (i * WARP + lane) * VECTOR<T>;
  }
};

// What both tile orders share: a unit is a tile of 16 rows, and a store covers rows g and g + 8 together, whose codes
// share 4-byte words of shared memory, so that no two lanes' reads conflict.
template <int TILE_K>
struct TileOrder {
  static constexpr int UNIT_WEIGHTS = TILE_ROWS * TILE_K;
  template <class T>
  static constexpr int ROW_LANES = TILE_K / VECTOR<T>;
  template <class T>
  static constexpr int SCALE_STEP = WARP / ROW_LANES<T> / 2;  // rows g of one store
  template <class T>
  static constexpr int CODES_STEP = SCALE_STEP<T> * 4 * LANE_BYTES;

  const uint8_t* codes;
  int64_t n, k;
  uint32_t k_tiles;

  // Where a tile lies: its first row, and the number of the tile along k.
  struct Place {
    int64_t row;
    uint32_t k_tile;
  };
  __device__ __forceinline__ Place place(uint32_t index) const {
    const uint32_t row_tile = index / k_tiles;
    return {int64_t(row_tile) * TILE_ROWS, index - row_tile * k_tiles};
  }

  __device__ __forceinline__ uint4 load(uint32_t index, int lane, bool) const {
    return __ldcs(reinterpret_cast<const uint4*>(codes + int64_t(index) * UNIT_BYTES) + lane);
  }

  // Row within the tile and column within the tile of the lane's vector 0.
  template <class T>
  __device__ __forceinline__ static int tile_row(int lane) {
    return lane / ROW_LANES<T> % 2 * 8 + lane / ROW_LANES<T> / 2;
  }
  template <class T>
  __device__ __forceinline__ static int tile_column(int lane) {
    return lane % ROW_LANES<T> * VECTOR<T>;
  }

  __device__ __forceinline__ bool whole(Place tile) const {
    return tile.row + TILE_ROWS <= n && (int64_t(tile.k_tile) + 1) * TILE_K <= k;
  }

  template <class T>
  __device__ __forceinline__ Lane<T> lane(Place tile, int lane, const uint8_t* staged, T* out) const {
    const int row = tile_row<T>(lane), column = tile_column<T>(lane);
    const int64_t byte = TILE_K == TILE_K4 ? tile16x64_byte(row, column, TILE_K) : tile16x32_byte(row, column, TILE_K);
    const int64_t first = (tile.row + row) * k + int64_t(tile.k_tile) * TILE_K + column;
    return {out + first, SCALE_STEP<T> * k, staged + byte, row};
  }

  template <class T>
  __device__ __forceinline__ int64_t count(Place tile, int lane, int i) const {
    const int64_t row = tile.row + tile_row<T>(lane) + i * SCALE_STEP<T>;
    return row < n ? k - int64_t(tile.k_tile) * TILE_K - tile_column<T>(lane) : 0;
  }
};

// 4 bit: a vector gathers one byte from each of its row's four lanes.
struct Tile64Order : TileOrder<TILE_K4> {
  BlockScales scales;
  int64_t n0, kb0, kb_full;
  int log2_group;               // 64-input blocks of one second-level group
  int64_t absmax_q_tile_bytes;  // scale codes of one row tile

  // Lane l decodes the scale of row l % 16. Padding rows have none: their second-level group may not exist. Addresses
  // are split into the row tile's start and the place within it, where the compiler sees small unsigned numbers.
  __device__ __forceinline__ float scale(Place tile, int lane) const {
    const unsigned row = lane % TILE_ROWS, kb = tile.k_tile;
    if (tile.row + row >= n) return 0.0f;
    if (scales.nested_code == nullptr) {
      return scales.plain(tile.row * k_tiles + row_scale_index(row, kb, k_tiles));
    }
    const int64_t index = tile.row / TILE_ROWS * absmax_q_tile_bytes + absmax_q_byte(row, kb, k_tiles);
    return scales.nested(index, ((tile.row + row + n0) * kb_full + kb + kb0) >> log2_group);
  }

  template <class T>
  __device__ __forceinline__ void decode(const uint8_t* staged, float centroid, float scale, float* value) const {
#pragma unroll
    for (int b = 0; b < VECTOR<T> / 2; ++b) decode_byte(staged[LANE_BYTES * b], centroid, scale, value + 2 * b);
  }
};

// 8 bit: a vector gathers two bytes from each of its row's lanes; k need not fill the last tile.
struct Tile32Order : TileOrder<TILE_K8> {
  const float* scales;  // [n] raw row maxima, or group scales
  unsigned group;       // inputs a group, 0 for row scales
  int64_t groups;       // of one row
  int bias;             // value = byte - bias

  __device__ __forceinline__ float scale(Place tile, int lane) const {
    const unsigned row = lane % TILE_ROWS;
    if (tile.row + row >= n) return 0.0f;
    if (group == 0) return __ldg(scales + tile.row + row);
    return __ldg(scales + tile.row * groups + row_scale_index(row, tile.k_tile * TILE_K8 / group, groups));
  }

  template <class T>
  __device__ __forceinline__ void decode(const uint8_t* staged, float, float scale, float* value) const {
#pragma unroll
    for (int j = 0; j < VECTOR<T>; ++j) {
      const float scaled = __fmul_rn(float(int(staged[j / 2 * LANE_BYTES + j % 2]) - bias), scale);
      value[j] = group == 0 ? __fmul_rn(scaled, INV_127) : scaled;
    }
  }
};

// ---- kernel ---------------------------------------------------------------------------------------------------------

// Sixteen centroids as a kernel argument.
struct Codebook {
  float value[16];
};

__device__ __forceinline__ void prefetch_l2(const void* address, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes) : "memory");
#endif
}

// out: [n, k] row-major. vectors: every row starts on 16 bytes, so that whole vectors may be stored at once.
template <class Order, class T>
__global__ void __launch_bounds__(DEQUANT_WARPS* WARP)
    dequantize_kernel(const __grid_constant__ Order order, const __grid_constant__ Codebook codebook, uint32_t units,
                      bool vectors, T* __restrict__ out) {
  __shared__ uint4 staged[DEQUANT_WARPS][WARP];
  // The shuffle tells the compiler that the warp's number, and all that follows from it, is one value for the warp.
  const int warp = __shfl_sync(ALL_LANES, threadIdx.x / WARP, 0), lane = threadIdx.x % WARP;
  const uint32_t unit = blockIdx.x * DEQUANT_WARPS + warp;
  if (unit >= units) return;
  const typename Order::Place place = order.place(unit);
  const bool whole = vectors && order.whole(place);

  const uint4 codes = order.load(unit, lane, whole);
  const float lane_scale = order.scale(place, lane);
  const float centroid = codebook.value[lane % 16];
  const uint32_t later = unit + PREFETCH_BLOCKS * DEQUANT_WARPS;
  if (threadIdx.x == 0 && vectors && later + DEQUANT_WARPS < units) {
    prefetch_l2(order.codes + int64_t(later) * UNIT_BYTES, DEQUANT_WARPS * UNIT_BYTES);
  }
  staged[warp][lane] = codes;
  __syncwarp();

  constexpr int VECTORS = Order::UNIT_WEIGHTS / (WARP * VECTOR<T>);
  const Lane<T> mine = order.template lane<T>(place, lane, reinterpret_cast<const uint8_t*>(staged[warp]), out);
  const auto decode = [&](int i, float* value) {
    const float scale = __shfl_sync(ALL_LANES, lane_scale, mine.scale_lane + i * Order::template SCALE_STEP<T>);
    order.template decode<T>(mine.codes + i * Order::template CODES_STEP<T>, centroid, scale, value);
  };
  if (whole) {
#pragma unroll
    for (int i = 0; i < VECTORS; ++i) {
      float value[VECTOR<T>];
      decode(i, value);
      __stcs(reinterpret_cast<uint4*>(mine.out + i * mine.out_step), pack_vector<T>(value));
    }
  } else {  // edges of a weight, and rows that do not start on 16 bytes: one value at a time
    for (int i = 0; i < VECTORS; ++i) {
      float value[VECTOR<T>];
      decode(i, value);
      const int64_t count = order.template count<T>(place, lane, i);
#pragma unroll
      for (int j = 0; j < VECTOR<T>; ++j) {
        if (j < count) mine.out[i * mine.out_step + j] = round_to<T>(value[j]);
      }
    }
  }
}

// ---- launcher -------------------------------------------------------------------------------------------------------

template <class F>
Codebook codebook_of() {
  Codebook book;
  for (int c = 0; c < 16; ++c) book.value[c] = F::value(c);
  return book;
}

// row_weights: outputs from one row start to the next, which must keep rows on 16 bytes for vector stores.
template <class T, class Order>
int launch_order(const Order& order, const Codebook& codebook, int64_t units, int64_t row_weights, void* out,
                 cudaStream_t stream) {
  const int64_t blocks = ceil_div(units, DEQUANT_WARPS);
  if (blocks > INT32_MAX / DEQUANT_WARPS - PREFETCH_BLOCKS) return NF4L_BAD_ARGUMENT;
  const bool vectors = reinterpret_cast<uintptr_t>(out) % 16 == 0 && row_weights % VECTOR<T> == 0 &&
                       reinterpret_cast<uintptr_t>(order.codes) % LANE_BYTES == 0;
  dequantize_kernel<Order, T><<<unsigned(blocks), DEQUANT_WARPS * WARP, 0, stream>>>(
      order, codebook, uint32_t(units), vectors, static_cast<T*>(out));
  return launch_status();
}

template <class T>
int launch_dequantize_as(const nf4l_weight& w, void* out, cudaStream_t stream) {
  const int64_t row_tiles = ceil_div(w.n, TILE_ROWS);
  if (w.layout == NF4L_TILE16X32) {
    const int64_t k_tiles = ceil_div(w.k, TILE_K8);
    const int bias = w.format == NF4L_W8_S8 ? W8S8::BIAS : W8U8::BIAS;
    const Tile32Order order = {
        {w.qweight, w.n, w.k, uint32_t(k_tiles)}, static_cast<const float*>(w.scales), unsigned(w.blocksize),
        w.blocksize ? w.k / w.blocksize : 0, bias};
    return launch_order<T>(order, Codebook(), row_tiles * k_tiles, w.k, out, stream);
  }
  const Codebook codebook = w.format == NF4L_NF4 ? codebook_of<Nf4>() : codebook_of<Fp4>();
  const int log2_blocksize = log2_of(w.blocksize);
  if (w.layout == NF4L_TILE16X64) {
    const int64_t k_tiles = w.k / TILE_K4;
    const int log2_group = log2_blocksize - log2_of(TILE_K4) + log2_of(NESTED_BLOCKSIZE);
    const Tile64Order order = {
        {w.qweight, w.n, w.k, uint32_t(k_tiles)}, block_scales(w), w.n0, w.kb0, w.kb_full, log2_group,
        ceil_div(k_tiles, 4) * 64};
    return launch_order<T>(order, codebook, row_tiles * k_tiles, w.k, out, stream);
  }
  const int64_t numel = w.n * w.k, first_block = (w.n0 * w.kb_full * TILE_K4) >> log2_blocksize;
  const FlatOrder order = {block_scales(w), w.qweight, numel, first_block, log2_blocksize};
  // A flat weight is one long row.
  const int64_t units = ceil_div(numel, FlatOrder::UNIT_WEIGHTS);
  return launch_order<T>(order, codebook, units, FlatOrder::UNIT_WEIGHTS, out, stream);
}

// The whole weight [n, k] row-major in `dtype` to `out`; arguments are checked already (validate.h).
inline int launch_dequantize(const nf4l_weight& w, int dtype, void* out, cudaStream_t stream) {
  switch (dtype) {
    case NF4L_F32: return launch_dequantize_as<float>(w, out, stream);
    case NF4L_F16: return launch_dequantize_as<__half>(w, out, stream);
    case NF4L_BF16: return launch_dequantize_as<__nv_bfloat16>(w, out, stream);
    default: return NF4L_BAD_ARGUMENT;
  }
}

}  // namespace nf4l
