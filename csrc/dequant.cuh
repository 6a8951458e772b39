// Engine: a whole quantized weight to row-major float32, float16 or bfloat16, in one launch.
//
// This is V4, the last stage of the ladder in lab/ladder.cuh. Four outputs bytes or more are written for each byte read,
// so the kernel is a stream of stores, and everything else is arranged around them. One warp takes 512 bytes of codes:
//
//   load    one 16-byte read a lane, and the one block scale that the lane decodes for the whole warp;
//   swap    the codes go through 512 bytes of shared memory, so that each lane finds the codes of 16 output bytes that
//           lie beside its neighbours' (this is also where tile order becomes row order);
//   decode  each code picks its centroid out of the warp's own registers: lane c holds centroid c, so a look-up is one
//           shuffle, without table set-up, barrier or bank conflict;
//   store   16 bytes a lane, whole 64-byte segments or more a row, marked as streaming.
//
// A weight is rounded once: float32 centroid times float32 scale, then to the output type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <type_traits>

#include "codebook.h"
#include "layout.h"
#include "nf4linear.h"
#include "scale.cuh"

namespace nf4l {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int DEQUANT_WARPS = 8;  // of one block

// ---- output vectors -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ uint32_t pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}
__device__ __forceinline__ uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(pair);
}

template <class T>
__device__ __forceinline__ T round_to(float value) {
  if constexpr (sizeof(T) == 4) return value;
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(value);
  else return __float2bfloat16_rn(value);
}

// The outputs of one 16-byte store: 4 float32 or 8 16-bit values.
template <class T>
struct OutputVector {
  static constexpr int COUNT = 16 / sizeof(T);
  float value[COUNT];

  __device__ __forceinline__ void store(T* out) const {
    uint4 bits;
    if constexpr (sizeof(T) == 4) {
      bits = {__float_as_uint(value[0]), __float_as_uint(value[1]), __float_as_uint(value[2]), __float_as_uint(value[3])};
    } else {
      bits = {pack_pair(value[0], value[1], T()), pack_pair(value[2], value[3], T()),
              pack_pair(value[4], value[5], T()), pack_pair(value[6], value[7], T())};
    }
    __stcs(reinterpret_cast<uint4*>(out), bits);
  }

  // The first `count` values, one by one: ends of a weight, and rows that do not start on 16 bytes.
  __device__ __forceinline__ void store_scalars(T* out, int64_t count) const {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      if (j < count) out[j] = round_to<T>(value[j]);
    }
  }
};

// ---- byte orders --------------------------------------------------------------------------------------------------------
// An order says, for one warp's 512 bytes ("unit") and the lane's i-th store: which codes, whose scale, where to.

// Where a vector goes: element `offset` of the output, `count` of its values exist (<= 0: none of them).
struct Target {
  int64_t offset;
  int64_t count;
};

// Sixteen centroids as a kernel argument.
struct Codebook {
  float value[16];
};

template <class F>
Codebook codebook_of() {
  Codebook book;
  for (int c = 0; c < 16; ++c) book.value[c] = F::value(c);
  return book;
}

// Values of a 4-bit byte order: `centroid` is the value of code lane % 16, looked up by shuffle.
struct FourBitValues {
  Codebook book;

  __device__ __forceinline__ float prepare(int lane) const { return book.value[lane % 16]; }

  // Two codes of a byte, high nibble first. Shuffle reads only the low four bits of the lane number at this width.
  __device__ __forceinline__ static void decode(uint32_t byte, float centroid, float scale, float* value) {
    value[0] = __fmul_rn(__shfl_sync(ALL_LANES, centroid, byte >> 4, 16), scale);
    value[1] = __fmul_rn(__shfl_sync(ALL_LANES, centroid, byte, 16), scale);
  }
};

// bitsandbytes' order: codes and blocks run over the flat [n, k].
struct FlatOrder : FourBitValues {
  static constexpr int UNIT_WEIGHTS = 2 * TILE_BYTES;
  BlockScales scales;
  const uint8_t* codes;
  int64_t numel;
  int64_t first_block;  // of this shard in the unsharded weight
  int log2_blocksize;

  // 16 bytes of codes. The last unit may end early, and a view of a larger buffer may start anywhere.
  __device__ __forceinline__ uint4 load(uint32_t unit, int lane) const {
    const int64_t first = int64_t(unit) * TILE_BYTES + lane * LANE_BYTES;
    const int64_t bytes = (numel + 1) / 2;
    if (first + LANE_BYTES <= bytes && reinterpret_cast<uintptr_t>(codes) % LANE_BYTES == 0) {
      return __ldcs(reinterpret_cast<const uint4*>(codes + first));
    }
    uint32_t word[4] = {0, 0, 0, 0};
#pragma unroll
    for (int b = 0; b < LANE_BYTES; ++b) {
      if (first + b < bytes) word[b / 4] |= uint32_t(codes[first + b]) << (8 * (b % 4));
    }
    return {word[0], word[1], word[2], word[3]};
  }

  // A lane decodes the scale of its own 32 weights: no block is smaller.
  __device__ __forceinline__ float scale(uint32_t unit, int lane) const {
    const int64_t first = int64_t(unit) * UNIT_WEIGHTS + 32 * lane;
    const int64_t block = first >> log2_blocksize;
    return first < numel ? scales(block, (block + first_block) / NESTED_BLOCKSIZE) : 0.0f;
  }

  template <class T>
  __device__ __forceinline__ Target vector(uint32_t unit, int lane, int i, const uint8_t* staged, float centroid,
                                           float lane_scale, OutputVector<T>& v) const {
    constexpr int COUNT = OutputVector<T>::COUNT;
    const int first = (i * WARP + lane) * COUNT;  // in the unit
    const float scale = __shfl_sync(ALL_LANES, lane_scale, first / 32);
    using Bytes = std::conditional_t<COUNT == 8, uint32_t, uint16_t>;
    const uint32_t bytes = reinterpret_cast<const Bytes*>(staged)[first / COUNT];
#pragma unroll
    for (int b = 0; b < COUNT / 2; ++b) decode(bytes >> (8 * b), centroid, scale, v.value + 2 * b);
    const int64_t offset = int64_t(unit) * UNIT_WEIGHTS + first;
    return {offset, numel - offset};
  }
};

// tile16x64: a unit is a tile of 16 rows x 64 inputs, so a lane's vector gathers one byte from each of its row's lanes.
struct Tile64Order : FourBitValues {
  static constexpr int UNIT_WEIGHTS = TILE_ROWS * TILE_K4;
  BlockScales scales;
  const uint8_t* codes;
  int64_t n, k;
  int64_t n0, kb0, kb_full;
  int log2_group;  // 64-input blocks of one second-level group
  uint32_t k_tiles;

  __device__ __forceinline__ uint4 load(uint32_t unit, int lane) const {
    return __ldcs(reinterpret_cast<const uint4*>(codes + int64_t(unit) * TILE_BYTES) + lane);
  }

  // Lane l decodes the scale of row l % 16. Padding rows have none: their second-level group may not exist.
  __device__ __forceinline__ float scale(uint32_t unit, int lane) const {
    const int64_t row = int64_t(unit / k_tiles) * TILE_ROWS + lane % TILE_ROWS;
    const int64_t kb = unit % k_tiles;
    if (row >= n) return 0.0f;
    const bool nested = scales.nested_code != nullptr;
    const int64_t index = nested ? absmax_q_byte(row, kb, k_tiles) : row_scale_index(row, kb, k_tiles);
    return scales(index, ((row + n0) * kb_full + kb + kb0) >> log2_group);
  }

  template <class T>
  __device__ __forceinline__ Target vector(uint32_t unit, int lane, int i, const uint8_t* staged, float centroid,
                                           float lane_scale, OutputVector<T>& v) const {
    constexpr int COUNT = OutputVector<T>::COUNT;
    constexpr int ROW_LANES = TILE_K4 / COUNT, ROWS = WARP / ROW_LANES;
    // A store covers rows g and g + 8 together: they share 4-byte words in shared memory, so no two lanes' reads conflict.
    const int h = lane / ROW_LANES % 2, g = i * (ROWS / 2) + lane / ROW_LANES / 2;
    const int column = lane % ROW_LANES * COUNT;
    const float scale = __shfl_sync(ALL_LANES, lane_scale, 8 * h + g);
    const uint8_t* bytes = staged + tile16x64_byte(8 * h + g, column, TILE_K4);
#pragma unroll
    for (int b = 0; b < COUNT / 2; ++b) decode(bytes[LANE_BYTES * b], centroid, scale, v.value + 2 * b);
    const int64_t row = int64_t(unit / k_tiles) * TILE_ROWS + 8 * h + g;
    return {row * k + int64_t(unit % k_tiles) * TILE_K4 + column, row < n ? COUNT : 0};
  }
};

// tile16x32, 8 bit: as tile16x64 with a byte a weight; k need not fill the last tile.
struct Tile32Order {
  static constexpr int UNIT_WEIGHTS = TILE_ROWS * TILE_K8;
  const uint8_t* codes;
  const float* scales;  // [n] raw row maxima, or group scales
  int64_t n, k;
  int group;            // inputs a group, 0 for row scales
  int bias;             // value = byte - bias
  uint32_t k_tiles;

  __device__ __forceinline__ float prepare(int) const { return 0.0f; }

  __device__ __forceinline__ uint4 load(uint32_t unit, int lane) const {
    return __ldcs(reinterpret_cast<const uint4*>(codes + int64_t(unit) * TILE_BYTES) + lane);
  }

  __device__ __forceinline__ float scale(uint32_t unit, int lane) const {
    const int64_t row = int64_t(unit / k_tiles) * TILE_ROWS + lane % TILE_ROWS;
    if (row >= n) return 0.0f;
    return __ldg(scales + (group == 0 ? row : row_scale_index(row, unit % k_tiles * TILE_K8 / group, k / group)));
  }

  template <class T>
  __device__ __forceinline__ Target vector(uint32_t unit, int lane, int i, const uint8_t* staged, float, float lane_scale,
                                           OutputVector<T>& v) const {
    constexpr int COUNT = OutputVector<T>::COUNT;
    constexpr int ROW_LANES = TILE_K8 / COUNT, ROWS = WARP / ROW_LANES;
    const int h = lane / ROW_LANES % 2, g = i * (ROWS / 2) + lane / ROW_LANES / 2;
    const int column = lane % ROW_LANES * COUNT;
    const float scale = __shfl_sync(ALL_LANES, lane_scale, 8 * h + g);
    const uint8_t* bytes = staged + tile16x32_byte(8 * h + g, column, TILE_K8);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
      const float scaled = __fmul_rn(float(int(bytes[j / 2 * LANE_BYTES + j % 2]) - bias), scale);
      v.value[j] = group == 0 ? __fmul_rn(scaled, INV_127) : scaled;
    }
    const int64_t row = int64_t(unit / k_tiles) * TILE_ROWS + 8 * h + g;
    const int64_t first = int64_t(unit % k_tiles) * TILE_K8 + column;
    return {row * k + first, row < n ? k - first : 0};
  }
};

// ---- kernel and launcher ------------------------------------------------------------------------------------------------

// out: [n, k] row-major. vectors: every row starts on 16 bytes, so whole vectors may be stored at once.
template <class Order, class T>
__global__ void __launch_bounds__(DEQUANT_WARPS* WARP)
    dequantize_kernel(const __grid_constant__ Order order, uint32_t units, bool vectors, T* __restrict__ out) {
  __shared__ uint4 staged[DEQUANT_WARPS][WARP];
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const uint32_t unit = blockIdx.x * DEQUANT_WARPS + warp;
  if (unit >= units) return;

  const uint4 codes = order.load(unit, lane);
  const float lane_scale = order.scale(unit, lane);
  const float centroid = order.prepare(lane);
  staged[warp][lane] = codes;
  __syncwarp();

  const uint8_t* bytes = reinterpret_cast<const uint8_t*>(staged[warp]);
  constexpr int STORES = Order::UNIT_WEIGHTS / (WARP * OutputVector<T>::COUNT);
#pragma unroll
  for (int i = 0; i < STORES; ++i) {
    OutputVector<T> v;
    const Target target = order.template vector<T>(unit, lane, i, bytes, centroid, lane_scale, v);
    if (vectors && target.count >= OutputVector<T>::COUNT) {
      v.store(out + target.offset);
    } else {
      v.store_scalars(out + target.offset, target.count);
    }
  }
}

inline int launch_status() {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return NF4L_OK;
  return error == cudaErrorNoKernelImageForDevice ? NF4L_NO_KERNEL_IMAGE : NF4L_CUDA_ERROR - int(error);
}

inline int log2_of(int64_t power_of_two) {
  int log2 = 0;
  while ((int64_t(1) << log2) < power_of_two) ++log2;
  return log2;
}

template <class Order, class T>
int launch_order(const Order& order, int64_t units, int64_t row_weights, void* out, cudaStream_t stream) {
  const int64_t blocks = ceil_div(units, DEQUANT_WARPS);
  if (blocks > INT32_MAX) return NF4L_BAD_ARGUMENT;
  const bool vectors = reinterpret_cast<uintptr_t>(out) % 16 == 0 && row_weights * sizeof(T) % 16 == 0;
  dequantize_kernel<Order, T>
      <<<unsigned(blocks), DEQUANT_WARPS * WARP, 0, stream>>>(order, uint32_t(units), vectors, static_cast<T*>(out));
  return launch_status();
}

template <class T>
int launch_dequantize_as(const nf4l_weight& w, void* out, cudaStream_t stream) {
  if (w.layout == NF4L_TILE16X32) {
    const int64_t k_tiles = ceil_div(w.k, TILE_K8), units = ceil_div(w.n, TILE_ROWS) * k_tiles;
    const Tile32Order order = {w.qweight, static_cast<const float*>(w.scales), w.n, w.k, int(w.blocksize),
                               w.format == NF4L_W8_S8 ? W8S8::BIAS : W8U8::BIAS, uint32_t(k_tiles)};
    return launch_order<Tile32Order, T>(order, units, w.k, out, stream);
  }
  const FourBitValues values = {w.format == NF4L_NF4 ? codebook_of<Nf4>() : codebook_of<Fp4>()};
  const int log2_blocksize = log2_of(w.blocksize);
  if (w.layout == NF4L_TILE16X64) {
    const int64_t k_tiles = w.k / TILE_K4, units = ceil_div(w.n, TILE_ROWS) * k_tiles;
    const int log2_group = log2_blocksize - log2_of(TILE_K4) + log2_of(NESTED_BLOCKSIZE);
    const Tile64Order order = {values, block_scales(w), w.qweight, w.n, w.k, w.n0, w.kb0, w.kb_full, log2_group,
                               uint32_t(k_tiles)};
    return launch_order<Tile64Order, T>(order, units, w.k, out, stream);
  }
  const int64_t numel = w.n * w.k, first_block = (w.n0 * w.kb_full * TILE_K4) >> log2_blocksize;
  const FlatOrder order = {values, block_scales(w), w.qweight, numel, first_block, log2_blocksize};
  // A flat weight is one row of numel weights: only its start needs alignment.
  return launch_order<FlatOrder, T>(order, ceil_div(numel, FlatOrder::UNIT_WEIGHTS), 16, out, stream);
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
