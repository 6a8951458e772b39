// A GPU as the launch tables see it. Plain C++.
#ifndef NF4LINEAR_DEVICE_INFO_H
#define NF4LINEAR_DEVICE_INFO_H

namespace nf4l {

struct DeviceInfo {
  int arch;          // 80, 86, 89, 90, ...
  int sms;
  int shared_bytes;  // most that one block may use
  bool wgmma;        // the library holds code for this very GPU that may use it
};

}  // namespace nf4l

#endif
