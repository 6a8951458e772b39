// The counters live in the library, not in a workspace: they have to be zero at first, and clearing them in front of
// each launch would cost as much as a small layer. A workspace that outlives a call is no way out, because
// torch.compile's CUDA graphs refuse memory that an operator keeps.
#include "arrivals.h"

#include <stdint.h>

#include <mutex>

#include "status.cuh"
#include "validate.h"

namespace nf4l {
namespace {

constexpr int SETS = 4096;  // 4 MB

__device__ unsigned counters[SETS][ARRIVALS];  // zero when the library is loaded onto a device

// Whose a set is. Ids of streams and captures, unlike handles, are never used twice. A capturing stream must not be
// asked for its id (cudaStreamGetId ends the capture), so there its handle stands beside the id of the capture.
struct Owner {
  int device;
  unsigned long long capture, stream;  // capture 0: none

  bool operator==(const Owner& other) const {
    return device == other.device && capture == other.capture && stream == other.stream;
  }
};

unsigned* find_set(const Owner& owner) {
  static std::mutex mutex;
  static Owner owners[SETS];
  static int used = 0;
  const std::lock_guard<std::mutex> lock(mutex);
  int set = 0;
  while (set < used && !(owners[set] == owner)) ++set;
  if (set == SETS) return nullptr;
  void* base = nullptr;
  // The first question loads the variable onto the device, which a capture in its strict mode does not allow.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t found = cudaGetSymbolAddress(&base, counters);
  cudaThreadExchangeStreamCaptureMode(&mode);
  if (found != cudaSuccess) return nullptr;
  if (set == used) owners[used++] = owner;
  return static_cast<unsigned*>(base) + set * ARRIVALS;
}

// A set of counters which launches that may run at the same time never share: it belongs to a stream, or to a stream of
// one capture. NULL when there is none left.
unsigned* arrival_set(int device, cudaStream_t stream) {
  cudaStreamCaptureStatus capturing;
  Owner owner = {device, 0, 0};
  if (cudaStreamGetCaptureInfo(stream, &capturing, &owner.capture) != cudaSuccess) return nullptr;
  if (capturing == cudaStreamCaptureStatusNone) {
    owner.capture = 0;
    if (cudaStreamGetId(stream, &owner.stream) != cudaSuccess) return nullptr;
  } else {
    owner.stream = reinterpret_cast<uintptr_t>(stream);
  }
  // A thread mostly asks for the same stream again.
  static thread_local Owner last = {-1, 0, 0};
  static thread_local unsigned* last_set = nullptr;
  if (!(owner == last)) {
    last_set = find_set(owner);
    last = owner;
  }
  return last_set;
}

}  // namespace

int claim_workspace(Workspace& workspace, const nf4l_linear_args& args, int64_t bytes, const LaunchTarget& target) {
  if (bytes == 0) return NF4L_OK;
  const bool large_enough = args.workspace && int64_t(args.workspace_bytes) >= bytes;
  if (!large_enough || !aligned(args.workspace, 16)) return NF4L_BAD_ARGUMENT;
  workspace.sums = args.workspace;
  workspace.arrivals = arrival_set(target.device, target.stream);
  if (workspace.arrivals) return NF4L_OK;
  constexpr size_t SET_BYTES = ARRIVALS * sizeof(unsigned);
  char* spare = static_cast<char*>(args.workspace) + bytes - SET_BYTES;
  workspace.arrivals = reinterpret_cast<unsigned*>(spare);
  return status_of(cudaMemsetAsync(spare, 0, SET_BYTES, target.stream));
}

}  // namespace nf4l
