#include "level.h"

#include <cstdlib>
#include <cstring>

namespace nf4l::cpu {

namespace {

// Best first.
const Level* const LEVELS[] = {
#if defined(__x86_64__) && !defined(NF4L_PORTABLE_ONLY)
    &AVX512_LEVEL,
    &AVX512_CORE_LEVEL,
    &AVX2_LEVEL,
#endif
    &PORTABLE_LEVEL,
};

const Level& choose() {
  // A name that is unknown or not supported here is ignored: what a user gets is then the best level, as without it.
  const char* wanted = std::getenv("NF4LINEAR_CPU_LEVEL");
  for (const Level* l : LEVELS)
    if (wanted && !std::strcmp(wanted, l->name) && l->supported()) return *l;
  for (const Level* l : LEVELS)
    if (l->supported()) return *l;
  return PORTABLE_LEVEL;
}

}  // namespace

const Level& level() {
  static const Level& chosen = choose();
  return chosen;
}

}  // namespace nf4l::cpu
