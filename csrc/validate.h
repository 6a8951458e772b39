// What both libraries check before they touch a pointer. Plain host C++: no CUDA, no allocation.
#ifndef NF4LINEAR_VALIDATE_H
#define NF4LINEAR_VALIDATE_H

#include "nf4linear.h"

namespace nf4l {

inline bool aligned(const void* p, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(p) % bytes == 0; }

inline bool known_dtype(int32_t dtype) { return dtype == NF4L_F32 || dtype == NF4L_F16 || dtype == NF4L_BF16; }

inline size_t dtype_bytes(int32_t dtype) { return dtype == NF4L_F32 ? 4 : 2; }

inline bool power_of_two(int64_t v) { return v > 0 && (v & (v - 1)) == 0; }

inline int check_four_bit(const nf4l_weight& w) {
  if (!power_of_two(w.blocksize) || w.blocksize < 32 || w.blocksize > 4096) return NF4L_BAD_ARGUMENT;
  if (w.layout != NF4L_FLAT && w.layout != NF4L_TILE16X64) return NF4L_BAD_ARGUMENT;
  // Either all three second-level statistics or none.
  const bool nested = w.nested_code != nullptr;
  if ((w.nested_absmax != nullptr) != nested || (w.nested_offset != nullptr) != nested) return NF4L_BAD_ARGUMENT;
  if (w.layout == NF4L_FLAT) return NF4L_OK;
  if (w.k % 64 || w.blocksize % 64 || w.n0 < 0 || w.kb0 < 0 || w.kb_full < w.kb0 + w.k / 64) return NF4L_BAD_ARGUMENT;
  return aligned(w.qweight, 16) && aligned(w.scales, nested ? 8 : 16) ? NF4L_OK : NF4L_MISALIGNED;
}

inline int check_eight_bit(const nf4l_weight& w) {
  if (w.layout != NF4L_TILE16X32 || w.nested_code) return NF4L_BAD_ARGUMENT;
  const bool per_row = w.blocksize == 0;
  const bool grouped = (w.blocksize == 64 || w.blocksize == 128) && w.k % w.blocksize == 0;
  if (!per_row && !grouped) return NF4L_BAD_ARGUMENT;
  return aligned(w.qweight, 16) && aligned(w.scales, per_row ? 4 : 16) ? NF4L_OK : NF4L_MISALIGNED;
}

inline int check_weight(const nf4l_weight* w) {
  if (!w || !w->qweight || !w->scales || w->n <= 0 || w->k <= 0) return NF4L_BAD_ARGUMENT;
  switch (w->format) {
    case NF4L_NF4:
    case NF4L_FP4: return check_four_bit(*w);
    case NF4L_W8_S8:
    case NF4L_W8_U8: return check_eight_bit(*w);
    default: return NF4L_BAD_ARGUMENT;
  }
}

inline int check_dequantize(const nf4l_weight* w, int32_t dtype, const void* out) {
  if (const int status = check_weight(w)) return status;
  if (!known_dtype(dtype) || !out) return NF4L_BAD_ARGUMENT;
  return aligned(out, dtype_bytes(dtype)) ? NF4L_OK : NF4L_MISALIGNED;
}

inline int check_linear(const nf4l_weight* w, const nf4l_linear_args* a) {
  if (const int status = check_weight(w)) return status;
  if (!a || !known_dtype(a->dtype) || a->m < 0 || a->x_stride < 0) return NF4L_BAD_ARGUMENT;
  if (a->m == 0) return NF4L_OK;
  if (!a->x || !a->y) return NF4L_BAD_ARGUMENT;
  const size_t bytes = dtype_bytes(a->dtype);
  return aligned(a->x, bytes) && aligned(a->y, bytes) && aligned(a->bias, bytes) ? NF4L_OK : NF4L_MISALIGNED;
}

// Text for a status that both libraries share; nullptr for the others.
inline const char* shared_status_text(int status) {
  switch (status) {
    case NF4L_OK: return "ok";
    case NF4L_USE_GEMM: return "no fused engine for this call: dequantize, then a 16/32-bit GEMM";
    case NF4L_BAD_ARGUMENT: return "a field of the weight or of the call is out of range, or a pointer is missing";
    case NF4L_MISALIGNED: return "a pointer is not aligned as csrc/nf4linear.h asks";
    default: return nullptr;
  }
}

}  // namespace nf4l

#endif
