// Command line of the laboratory program. Host C++ only.
#pragma once

#include <stdio.h>
#include <stdlib.h>

#include <algorithm>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "../nf4linear.h"

namespace nf4l::lab {

struct Options {
  std::string input, output;
  std::vector<std::string> stages = {"v4"}, dtypes = {"fp16"}, protocols = {"idle"};
  int warmup = 20, repeats = 100;
};

constexpr char USAGE[] =
    "usage: nf4l_lab FILE [--stages NAME,...] [--dtypes fp32,fp16,bf16] [--protocols idle,cold] [--warmup N]\n"
    "                     [--repeats N] [--output STEM]\n"
    "FILE is written by `nf4linear lab generate`; outputs go to STEM-<stage>-<dtype>.raw. Stages: ";

inline int parse_count(const std::string& name, const std::string& text) {
  char* end = nullptr;
  const long value = strtol(text.c_str(), &end, 10);
  if (text.empty() || *end || value < 0 || value > 1000000) {
    throw std::runtime_error(name + " takes a number from 0 to 1000000, got '" + text + "'");
  }
  return int(value);
}

// Names between commas, each one of `known`.
inline std::vector<std::string> parse_names(const std::string& option, const std::string& text,
                                            const std::vector<std::string>& known) {
  std::vector<std::string> chosen;
  std::stringstream names(text);
  for (std::string name; std::getline(names, name, ',');) {
    if (std::find(known.begin(), known.end(), name) == known.end()) {
      std::string all;
      for (const std::string& each : known) all += " " + each;
      throw std::runtime_error(option + " takes any of" + all + "; got '" + name + "'");
    }
    chosen.push_back(name);
  }
  return chosen;
}

inline int dtype_of(const std::string& name) {
  return name == "fp32" ? NF4L_F32 : name == "fp16" ? NF4L_F16 : NF4L_BF16;
}

// Throws with the option, what was got and what is wanted.
inline Options parse_options(int argc, char** argv, const std::vector<std::string>& stages) {
  Options o;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name.rfind("--", 0) != 0) {
      if (!o.input.empty()) throw std::runtime_error("one input file only; surplus argument '" + name + "'");
      o.input = name;
      continue;
    }
    if (i + 1 == argc) throw std::runtime_error(name + " takes a value");
    const std::string value = argv[++i];
    if (name == "--stages") o.stages = parse_names(name, value, stages);
    else if (name == "--dtypes") o.dtypes = parse_names(name, value, {"fp32", "fp16", "bf16"});
    else if (name == "--protocols") o.protocols = parse_names(name, value, {"idle", "cold"});
    else if (name == "--output") o.output = value;
    else if (name == "--warmup") o.warmup = parse_count(name, value);
    else if (name == "--repeats") o.repeats = parse_count(name, value);
    else throw std::runtime_error("unknown option " + name);
  }
  if (o.input.empty()) {
    std::string usage = USAGE;
    for (const std::string& stage : stages) usage += stage + " ";
    throw std::runtime_error(usage);
  }
  return o;
}

}  // namespace nf4l::lab
