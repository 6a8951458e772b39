// Threads: the process's own OpenMP team, borrowed.
//
// torch runs its operators on an OpenMP team whose workers spin for a while after each operator. A second pool would
// compete with those spinning threads for the same cores, and linking OpenMP could bring a second runtime into the
// process (torch wheels ship theirs) or fail to load where none is installed. So the entry point of the runtime that is
// already there is looked up at the first parallel call; a process without OpenMP runs on the calling thread.
#ifndef NF4LINEAR_CPU_PARALLEL_H
#define NF4LINEAR_CPU_PARALLEL_H

#include <stdint.h>

namespace nf4l::cpu {

using Task = void (*)(void* context, int64_t begin, int64_t end);

// Runs `task` over [0, count) in pieces of at most `grain`, on `threads` threads at most, and returns when all is done.
// A thread gets pieces that lie together first, and then what others have not begun, so a result may not depend on
// which thread runs a piece. The child of a fork runs on the calling thread: OpenMP's workers do not survive a fork.
void parallel_for(int64_t count, int64_t grain, int threads, Task task, void* context);

// The same with a callable, `body(begin, end)`.
template <class Body>
void parallel_for(int64_t count, int64_t grain, int threads, const Body& body) {
  const Task task = [](void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); };
  parallel_for(count, grain, threads, task, const_cast<Body*>(&body));
}

}  // namespace nf4l::cpu

#endif
