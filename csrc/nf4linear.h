// The C ABI of nf4linear: everything the shared libraries export.
//
// Plain structs and error codes only. No call throws, exits, prints, allocates device memory or synchronises; the
// caller owns every pointer. One binary serves any torch and any Python, because neither is mentioned here.
//
// A weight is [n, k] row-major in meaning (n out_features, k in_features); the byte orders are drawn in layout.h.
#ifndef NF4LINEAR_H
#define NF4LINEAR_H

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define NF4L_API __declspec(dllexport)
#else
#define NF4L_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Raised whenever a struct or a meaning below changes; the loader refuses a library with another number. The numbers in
// the tuning flags are exempt: they follow the shapes that are compiled.
#define NF4L_ABI_VERSION 2

enum nf4l_status {
  NF4L_OK = 0,
  NF4L_USE_GEMM = 1,         // not an error: no fused engine takes this call; dequantize, then a 16/32-bit GEMM
  NF4L_BAD_ARGUMENT = -1,    // a field is out of range or a pointer is missing
  NF4L_NO_KERNEL_IMAGE = -2, // the library holds no code for this device
  NF4L_MISALIGNED = -3,      // a pointer is not aligned as the field's comment asks
  NF4L_CUDA_ERROR = -1000    // a CUDA call failed: the code is NF4L_CUDA_ERROR - cudaError_t
};

enum nf4l_format { NF4L_NF4 = 0, NF4L_FP4 = 1, NF4L_W8_S8 = 2, NF4L_W8_U8 = 3 };
enum nf4l_layout { NF4L_FLAT = 0, NF4L_TILE16X64 = 1, NF4L_TILE16X32 = 2 };
enum nf4l_dtype { NF4L_F32 = 0, NF4L_F16 = 1, NF4L_BF16 = 2 };

// One quantized weight. Device pointers for the CUDA library, host pointers for the CPU library.
typedef struct nf4l_weight {
  int32_t format;    // nf4l_format
  int32_t layout;    // nf4l_layout
  int64_t n, k;
  // 4 bit: weights a scale, a power of two 32..4096; 8 bit: group size 64 or 128, 0 = one scale a row
  int64_t blocksize;
  const uint8_t* qweight;     // 16-byte aligned in the tiled layouts
  // 4 bit: uint8 codes if nested_code is set, else float32; 8 bit: float32 (raw row maxima or group scales)
  const void* scales;
  const float* nested_code;   // [256], NULL without double quantization
  const float* nested_absmax; // [ceil(blocks / 256)] in flat block order of the unsharded weight
  const float* nested_offset; // one float, read on the device: no host copy, no synchronisation
  // Position of this weight inside the unsharded one, in rows and 64-input blocks; 0, 0, k / 64 when it is not a shard.
  int64_t n0, kb0, kb_full;
} nf4l_weight;

// y[m, n] = x[m, k] * weight^T + bias, x and y contiguous rows of one dtype, accumulated in float32.
typedef struct nf4l_linear_args {
  int32_t dtype;     // nf4l_dtype of x, y and bias
  int32_t flags;     // nf4l_linear_flags
  int64_t m;
  const void* x;     // [m, k], rows `x_stride` elements apart; 16-byte aligned rows reach the fused engines
  int64_t x_stride;
  const void* bias;  // [n] or NULL
  void* y;           // [m, n]
  void* workspace;   // 16-byte aligned scratch of nf4l_cuda_workspace_bytes(); what it holds does not matter
  size_t workspace_bytes;
} nf4l_linear_args;

enum nf4l_linear_flags {
  // Programmatic dependent launch: the read of the weight may start before the previous kernel of the stream ends, so
  // that kernel must not write it. x, bias, y and workspace are not touched before.
  NF4L_DEPENDENT_LAUNCH = 1,
  // CPU library, float32 x: products may be formed in bfloat16, by levels that have instructions for it.
  NF4L_ALLOW_BF16 = 2,
  // y is written transposed, [n, m] (CUDA only): the product with the weight as the first operand.
  NF4L_TRANSPOSED_OUTPUT = 4,
  // For tuning, in place of the launch table's choice: 1 + a shape in bits 8..15, those of the small-batch engine, then
  // those of the small wgmma engine, then those of the two prefill engines, of wgmma and of mma.sync; in bits 16..23
  // slices of k for the first, least units a block for the second, slices of k of the last output tiles for the third
  // (5: four, by two clusters), 1 for output tiles all whole for the last. 8-bit weights: the shapes of their engines.
  // What a number stands for is known only beside the plans (*_plan.h) of the same build.
  NF4L_TUNE_SHAPE_SHIFT = 8,
  NF4L_TUNE_SLICES_SHIFT = 16
};

// ---- libnf4linear_cuda ----------------------------------------------------------------------------------------------
// All launches go to `stream` (a cudaStream_t) of the calling thread's current device.
NF4L_API int nf4l_cuda_abi_version(void);
// Comma-separated architectures this binary holds code for, such as "80,90a".
NF4L_API const char* nf4l_cuda_architectures(void);
// Text for a negative status; static storage.
NF4L_API const char* nf4l_cuda_status_text(int status);
// Writes the whole weight [n, k] row-major in `dtype`, bit-identical to bitsandbytes' dequantize (4 bit).
NF4L_API int nf4l_cuda_dequantize(const nf4l_weight* weight, int32_t dtype, void* out, void* stream);
// Bytes of workspace that this call needs on the current device, 0 for most; the pointers in `args` may be NULL or not
// yet what they will be, but x as aligned as it will be. Negative: a status.
NF4L_API int64_t nf4l_cuda_workspace_bytes(const nf4l_weight* weight, const nf4l_linear_args* args);
// NF4L_OK after a launch, NF4L_USE_GEMM when the dispatch table sends the call to dequantize + GEMM.
NF4L_API int nf4l_cuda_linear(const nf4l_weight* weight, const nf4l_linear_args* args, void* stream);

// ---- libnf4linear_cpu -----------------------------------------------------------------------------------------------
NF4L_API int nf4l_cpu_abi_version(void);
// The instruction-set level in use: "avx512", "avx2" or "portable".
NF4L_API const char* nf4l_cpu_level(void);
NF4L_API const char* nf4l_cpu_status_text(int status);
NF4L_API int nf4l_cpu_dequantize(const nf4l_weight* weight, int32_t dtype, void* out, int32_t threads);
NF4L_API int nf4l_cpu_linear(const nf4l_weight* weight, const nf4l_linear_args* args, int32_t threads);

#ifdef __cplusplus
}
#endif
#endif
