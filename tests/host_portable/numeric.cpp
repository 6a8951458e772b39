// Runs one conversion of csrc/portable/numeric16.h over stdin: arrays in, arrays out, as raw bytes.
#include <stdio.h>
#include <string.h>

#include <string>
#include <vector>

#include "portable/numeric16.h"

template <class From, class To>
int convert(To (*function)(From)) {
  std::vector<From> block(4096);
  while (const size_t got = fread(block.data(), sizeof(From), block.size(), stdin)) {
    for (size_t i = 0; i < got; ++i) {
      const To value = function(block[i]);
      if (fwrite(&value, sizeof value, 1, stdout) != 1) return 1;
    }
  }
  return 0;
}

int main(int, char** argv) {
  using namespace nf4l::portable;
  const std::string name = argv[1];
  if (name == "float_to_half") return convert(float_to_half);
  if (name == "float_to_bfloat16") return convert(float_to_bfloat16);
  if (name == "half_to_float") return convert(half_to_float);
  if (name == "bfloat16_to_float") return convert(bfloat16_to_float);
  return 2;
}
