// Iluvatar CoreX: clang++ with the cuda* runtime in compatibility mode.
#include <cuda_runtime.h>

#define GPU(name) cuda##name
#include "../program.h"
