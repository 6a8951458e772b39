// A GPU as the launch tables see it, and what their rows share. Plain C++.
#ifndef NF4LINEAR_DEVICE_INFO_H
#define NF4LINEAR_DEVICE_INFO_H

#include <stdint.h>

namespace nf4l {

constexpr int64_t ANY = INT64_MAX;  // in a row of a launch table: no limit

struct DeviceInfo {
  int arch;          // 80, 86, 89, 90, ...
  int sms;
  int shared_bytes;  // most that one block may use
  bool wgmma;        // the library holds code for this very GPU that may use it
};

}  // namespace nf4l

#endif
