// nf4l_lab: reads a weight file, runs one stage of the ladder on the GPU, times it and writes the dequantized weight.
//
// Needs neither torch nor Python: see CMakeLists.txt beside this and docs/dequantize.md.
#include <stdlib.h>

#include <algorithm>
#include <stdexcept>
#include <string>
#include <vector>

#include "device.cuh"
#include "options.h"
#include "stages.cuh"
#include "timing.h"
#include "weight_file.h"

namespace nf4l::lab {
namespace {

// The published protocol: the device is idle before each launch, and the inputs stay where the last launch left them.
std::vector<float> time_idle(const Options& options, const DeviceWeight& weight, void* out, cudaStream_t stream) {
  for (int i = 0; i < options.warmup; ++i) launch_stage(options.stage, weight, options.dtype, out, stream);
  std::vector<float> ms;
  Event start, stop;
  for (int i = 0; i < options.repeats; ++i) {
    NF4L_CUDA(cudaDeviceSynchronize());
    start.record(stream);
    launch_stage(options.stage, weight, options.dtype, out, stream);
    stop.record(stream);
    ms.push_back(stop.milliseconds_since(start));
  }
  return ms;
}

// Cold inputs: one graph walks over enough copies of the weight to exceed the L2 cache four times. All write one output,
// as a framework's allocator would have it.
std::vector<float> time_cold(const Options& options, const WeightFile& file, void* out, cudaStream_t stream) {
  int device = 0, l2_bytes = 0;
  NF4L_CUDA(cudaGetDevice(&device));
  NF4L_CUDA(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device));
  std::vector<DeviceWeight> copies;
  copies.emplace_back(file);
  const size_t wanted = std::clamp<size_t>(4 * size_t(l2_bytes) / copies[0].input_bytes() + 1, 2, 64);
  while (copies.size() < wanted) copies.emplace_back(file);

  cudaGraph_t graph;
  cudaGraphExec_t replay;
  NF4L_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (const DeviceWeight& weight : copies) launch_stage(options.stage, weight, options.dtype, out, stream);
  NF4L_CUDA(cudaStreamEndCapture(stream, &graph));
  NF4L_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  std::vector<float> ms;
  Event start, stop;
  for (int i = -1; i < options.repeats; ++i) {  // one replay to warm up
    start.record(stream);
    NF4L_CUDA(cudaGraphLaunch(replay, stream));
    stop.record(stream);
    const float each = stop.milliseconds_since(start) / float(copies.size());
    if (i >= 0) ms.push_back(each);
  }
  NF4L_CUDA(cudaGraphExecDestroy(replay));
  NF4L_CUDA(cudaGraphDestroy(graph));
  return ms;
}

void write_output(const std::string& path, const DeviceBuffer& out) {
  std::vector<char> host(out.bytes());
  NF4L_CUDA(cudaMemcpy(host.data(), out.as<void>(), host.size(), cudaMemcpyDeviceToHost));
  FILE* file = fopen(path.c_str(), "wb");
  const bool written = file && fwrite(host.data(), 1, host.size(), file) == host.size();
  const bool closed = file && fclose(file) == 0;
  if (!written || !closed) throw std::runtime_error(path + ": cannot be written");
}

int run(const Options& options) {
  const WeightFile file = read_weight_file(options.input);
  const DeviceWeight weight(file);
  const DeviceBuffer out(size_t(weight.numel()) * (options.dtype == NF4L_F32 ? 4 : 2));
  // NaN in every type: an element that no thread writes shows up in the comparison.
  NF4L_CUDA(cudaMemset(out.as<void>(), 0xff, out.bytes()));
  Stream stream;
  launch_stage(options.stage, weight, options.dtype, out.as<void>(), stream);
  NF4L_CUDA(cudaStreamSynchronize(stream));
  if (!options.output.empty()) write_output(options.output, out);

  if (options.repeats > 0) {
    const std::vector<float> ms = options.protocol == "cold" ? time_cold(options, file, out.as<void>(), stream)
                                                             : time_idle(options, weight, out.as<void>(), stream);
    // The bytes of the report: packed codes, block scales, both tables as they are in the file, output.
    const size_t bytes = file.payload_bytes() + out.bytes();
    printf("%s\n", to_json(options.stage, options.dtype_name, options.protocol, ms.size(), bytes, summarize(ms, bytes)).c_str());
  }
  return 0;
}

}  // namespace
}  // namespace nf4l::lab

int main(int argc, char** argv) {
  try {
    return nf4l::lab::run(nf4l::lab::parse_options(argc, argv, nf4l::lab::stage_names()));
  } catch (const std::exception& error) {
    fprintf(stderr, "nf4l_lab: %s\n", error.what());
    return 1;
  }
}
