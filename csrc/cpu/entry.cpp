// The C ABI of libnf4linear_cpu: check, then hand over to the level in use.
#include "../nf4linear.h"
#include "../validate.h"
#include "level.h"

extern "C" {

int nf4l_cpu_abi_version(void) { return NF4L_ABI_VERSION; }

const char* nf4l_cpu_level(void) { return nf4l::cpu::level().name; }

const char* nf4l_cpu_status_text(int status) {
  const char* text = nf4l::shared_status_text(status);
  return text ? text : "unknown status";
}

int nf4l_cpu_dequantize(const nf4l_weight* weight, int32_t dtype, void* out, int32_t threads) {
  if (const int status = nf4l::check_dequantize(weight, dtype, out)) return status;
  return nf4l::cpu::level().dequantize(*weight, dtype, out, threads);
}

int nf4l_cpu_linear(const nf4l_weight* weight, const nf4l_linear_args* args, int32_t threads) {
  if (const int status = nf4l::check_linear(weight, args)) return status;
  if (args->m == 0) return NF4L_OK;
  if (weight->layout == NF4L_FLAT) return NF4L_USE_GEMM;
  return nf4l::cpu::level().linear(*weight, *args, threads);
}

}  // extern "C"
