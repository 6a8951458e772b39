// Arrival counters for engines whose blocks share a result: the block that arrives last finishes it.
#ifndef NF4LINEAR_ARRIVALS_H
#define NF4LINEAR_ARRIVALS_H

#include <cuda_runtime.h>

namespace nf4l {

constexpr int ARRIVALS = 256;  // counters of one set

// A set of ARRIVALS counters on `device`, all zero, which a launch on `stream` must leave zero. Launches that may run at
// the same time never share one: a set belongs to a stream, or to a stream of one capture. NULL when there is none left.
unsigned* arrival_set(int device, cudaStream_t stream);

// A set in any case: where the library has none left, `spare`, ARRIVALS counters of the launch's own, which are cleared on
// the stream first. A status.
int claim_arrivals(unsigned*& arrivals, int device, cudaStream_t stream, void* spare);

}  // namespace nf4l

#endif
