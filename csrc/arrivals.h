// Arrival counters for engines whose blocks share a result: the block that arrives last finishes it.
#ifndef NF4LINEAR_ARRIVALS_H
#define NF4LINEAR_ARRIVALS_H

#include <cuda_runtime.h>
#include <stdint.h>

#include "deal.h"
#include "engines.h"
#include "nf4linear.h"

namespace nf4l {

constexpr int ARRIVALS = MAX_BLOCKS;  // counters of one set

// What the blocks of a launch share. NULL where a plan asks for no workspace.
struct Workspace {
  void* sums = nullptr;          // 16-byte aligned
  unsigned* arrivals = nullptr;  // ARRIVALS counters, all zero, which the launch must leave zero
};

// The `bytes` that a plan asks for out of the call's workspace; the last ARRIVALS counters of it are there for when the
// library has no set left, and then they are cleared on the stream first. A status.
int claim_workspace(Workspace& workspace, const nf4l_linear_args& args, int64_t bytes, const LaunchTarget& target);

}  // namespace nf4l

#endif
