#include "scratch.h"

#include <cstdlib>
#include <new>

namespace nf4l::cpu {

namespace {

constexpr std::align_val_t ALIGNMENT{64};

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;

  ~Buffer() { ::operator delete(data, ALIGNMENT); }

  void* reserve(size_t wanted) noexcept {
    if (wanted > bytes) {
      ::operator delete(data, ALIGNMENT);
      data = ::operator new(wanted, ALIGNMENT, std::nothrow);
      bytes = data ? wanted : 0;
    }
    return data;
  }
};

}  // namespace

void* scratch(Scratch which, size_t bytes) noexcept {
  thread_local Buffer buffers[2];
  return buffers[static_cast<int>(which)].reserve(bytes);
}

}  // namespace nf4l::cpu
