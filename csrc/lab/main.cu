// nf4l_lab: reads a weight file, runs stages of the ladder on the GPU, times them and writes the dequantized weights.
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
std::vector<float> time_idle(const Options& options, const std::string& stage, const DeviceWeight& weight, void* out,
                             cudaStream_t stream) {
  for (int i = 0; i < options.warmup; ++i) launch_stage(stage, weight, options.dtype, out, stream);
  std::vector<float> ms;
  Event start, stop;
  for (int i = 0; i < options.repeats; ++i) {
    NF4L_CUDA(cudaDeviceSynchronize());
    start.record(stream);
    launch_stage(stage, weight, options.dtype, out, stream);
    stop.record(stream);
    ms.push_back(stop.milliseconds_since(start));
  }
  return ms;
}

// Enough copies of the weight to exceed the L2 cache four times.
std::vector<DeviceWeight> cold_copies(const WeightFile& file) {
  int device = 0, l2_bytes = 0;
  NF4L_CUDA(cudaGetDevice(&device));
  NF4L_CUDA(cudaDeviceGetAttribute(&l2_bytes, cudaDevAttrL2CacheSize, device));
  std::vector<DeviceWeight> copies;
  copies.emplace_back(file);
  const size_t wanted = std::clamp<size_t>(4 * size_t(l2_bytes) / copies[0].input_bytes() + 1, 2, 64);
  while (copies.size() < wanted) copies.emplace_back(file);
  return copies;
}

// Cold inputs: one graph walks over the copies. All write one output, as a framework's allocator would have it.
std::vector<float> time_cold(const Options& options, const std::string& stage, const std::vector<DeviceWeight>& copies,
                             void* out, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  NF4L_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (const DeviceWeight& weight : copies) launch_stage(stage, weight, options.dtype, out, stream);
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
  const bool cold = options.protocol == "cold" && options.repeats > 0;
  std::vector<DeviceWeight> weights;
  if (cold) weights = cold_copies(file);
  else weights.emplace_back(file);
  const DeviceBuffer out(size_t(file.numel()) * (options.dtype == NF4L_F32 ? 4 : 2));
  Stream stream;
  for (const std::string& stage : options.stages) {
    // NaN in every type: an element that no thread writes shows up in the comparison.
    NF4L_CUDA(cudaMemset(out.as<void>(), 0xff, out.bytes()));
    NF4L_CUDA(cudaDeviceSynchronize());
    launch_stage(stage, weights[0], options.dtype, out.as<void>(), stream);
    NF4L_CUDA(cudaStreamSynchronize(stream));
    if (!options.output.empty()) write_output(options.output + "-" + stage + ".raw", out);
    if (options.repeats == 0) continue;

    const std::vector<float> ms = cold ? time_cold(options, stage, weights, out.as<void>(), stream)
                                       : time_idle(options, stage, weights[0], out.as<void>(), stream);
    // The bytes of the report: packed codes, block scales, both tables as they are in the file, output.
    const size_t bytes = file.payload_bytes() + out.bytes();
    const Timing timing = summarize(ms, bytes);
    printf("%s\n", to_json(stage, options.dtype_name, options.protocol, ms.size(), bytes, timing).c_str());
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
