// Statistics of repeated launches. Host C++ only.
#pragma once

#include <stddef.h>
#include <stdio.h>

#include <algorithm>
#include <numeric>
#include <string>
#include <vector>

namespace nf4l::lab {

struct Timing {
  double mean_ms, median_ms, min_ms, max_ms;
  double gb_per_s;  // bytes over the median
};

inline Timing summarize(std::vector<float> ms, size_t bytes) {
  std::sort(ms.begin(), ms.end());
  const size_t n = ms.size();
  const double median = n % 2 ? ms[n / 2] : (ms[n / 2 - 1] + ms[n / 2]) / 2.0;
  const double mean = std::accumulate(ms.begin(), ms.end(), 0.0) / double(n);
  return {mean, median, ms.front(), ms.back(), double(bytes) / median / 1e6};
}

// One line of JSON: what a program that runs this one reads.
inline std::string to_json(const std::string& stage, const std::string& dtype, const std::string& protocol,
                           size_t repeats, size_t bytes, const Timing& t) {
  char line[512];
  snprintf(line, sizeof line,
           "{\"stage\": \"%s\", \"dtype\": \"%s\", \"protocol\": \"%s\", \"repeats\": %zu, \"bytes\": %zu, "
           "\"mean_ms\": %.6f, \"median_ms\": %.6f, \"min_ms\": %.6f, \"max_ms\": %.6f, \"gb_per_s\": %.2f}",
           stage.c_str(), dtype.c_str(), protocol.c_str(), repeats, bytes, t.mean_ms, t.median_ms, t.min_ms, t.max_ms,
           t.gb_per_s);
  return line;
}

}  // namespace nf4l::lab
