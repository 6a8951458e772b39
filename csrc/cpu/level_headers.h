// What every level_*.cpp includes before the kernel headers: those open no other header, so that all of their code
// lies in the level's own namespace.
#include <stddef.h>
#include <stdint.h>

#include <atomic>
#include <utility>

#include "../codebook.h"
#include "../layout.h"
#include "../nf4linear.h"
#include "level.h"
#include "parallel.h"
#include "scratch.h"
