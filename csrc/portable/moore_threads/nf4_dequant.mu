// Moore Threads MUSA: mcc and the musa* runtime.
#include <musa_runtime.h>

#define GPU(name) musa##name
#include "../program.h"
