// nf4l_check_file: reads a weight file and says what it holds, or what is wrong with it (exit status 1).
#include <exception>

#include "weight_file.h"

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "usage: nf4l_check_file FILE\n");
    return 2;
  }
  try {
    const nf4l::lab::WeightFile w = nf4l::lab::read_weight_file(argv[1]);
    const char* tables = w.table_type == nf4l::lab::TABLE_FLOAT16 ? "fp16" : "fp32";
    printf("rows %llu columns %llu blocksize %u tables %s offset %.9g\n", (unsigned long long)w.rows,
           (unsigned long long)w.columns, w.blocksize, tables, w.offset);
    return 0;
  } catch (const std::exception& error) {
    fprintf(stderr, "nf4l_check_file: %s\n", error.what());
    return 1;
  }
}
