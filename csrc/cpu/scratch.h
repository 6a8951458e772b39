// Working memory that outlives a call: one growing buffer a thread and purpose, so that a call allocates nothing once
// it has seen its largest shape.
#ifndef NF4LINEAR_CPU_SCRATCH_H
#define NF4LINEAR_CPU_SCRATCH_H

#include <stddef.h>

namespace nf4l::cpu {

// PACKED_X belongs to the calling thread and is read by all workers of its call; WORKER is each thread's own.
enum class Scratch { PACKED_X, WORKER };

// At least `bytes` of this thread's buffer, 64-byte aligned, contents undefined; nullptr when memory is short.
void* scratch(Scratch which, size_t bytes) noexcept;

}  // namespace nf4l::cpu

#endif
