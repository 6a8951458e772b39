// What every level_*.cpp includes before the kernel headers: those open no other header, so that all of their code
// lies in the level's own namespace.
#include <limits.h>
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <type_traits>
#include <utility>

#include "../codebook.h"
#include "../layout.h"
#include "../nf4linear.h"
#include "level.h"
#include "parallel.h"
#include "scratch.h"

// Kernel bodies are lambdas; one that is not inlined would keep its registers in memory.
#define ALWAYS_INLINE __attribute__((always_inline))
