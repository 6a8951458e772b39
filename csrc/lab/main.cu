// nf4l_lab: reads a weight file, runs stages of the ladder on the GPU, times them and writes the dequantized weights.
//
// Needs neither torch nor Python: see CMakeLists.txt beside this and docs/dequantize.md.
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

// One measured combination.
struct Run {
  std::string stage, dtype_name;
  int dtype;
  void launch(const DeviceWeight& weight, const DeviceBuffer& out, cudaStream_t stream) const {
    launch_stage(stage, weight, dtype, out.as<void>(), stream);
  }
};

// The published protocol: the device is idle before each launch, and the inputs stay where the last launch left them.
std::vector<float> time_idle(const Run& run, const Options& options, const DeviceWeight& weight,
                             const DeviceBuffer& out, cudaStream_t stream) {
  for (int i = 0; i < options.warmup; ++i) run.launch(weight, out, stream);
  std::vector<float> ms;
  Event start, stop;
  for (int i = 0; i < options.repeats; ++i) {
    NF4L_CUDA(cudaDeviceSynchronize());
    start.record(stream);
    run.launch(weight, out, stream);
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

// Cold inputs: one graph walks over the copies, and is replayed until there were `repeats` launches, and five times at
// least. All launches write one output, as a framework's allocator would have it. A time is a replay's over the copies.
std::vector<float> time_cold(const Run& run, const Options& options, const std::vector<DeviceWeight>& copies,
                             const DeviceBuffer& out, cudaStream_t stream) {
  cudaGraph_t graph;
  cudaGraphExec_t replay;
  NF4L_CUDA(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (const DeviceWeight& weight : copies) run.launch(weight, out, stream);
  NF4L_CUDA(cudaStreamEndCapture(stream, &graph));
  NF4L_CUDA(cudaGraphInstantiate(&replay, graph, 0));
  const int replays = std::max<int>(5, int((options.repeats + copies.size() - 1) / copies.size()));
  std::vector<float> ms;
  Event start, stop;
  for (int i = -1; i < replays; ++i) {  // one more to warm up
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

void measure(const Run& run, const Options& options, const WeightFile& file, const std::vector<DeviceWeight>& weights,
             const DeviceBuffer& out, cudaStream_t stream) {
  // The bytes of the report: packed codes, block scales, both tables as they are in the file, output.
  const size_t bytes = file.payload_bytes() + out.bytes();
  for (const std::string& protocol : options.protocols) {
    const std::vector<float> ms = protocol == "cold" ? time_cold(run, options, weights, out, stream)
                                                     : time_idle(run, options, weights[0], out, stream);
    const Timing timing = summarize(ms, bytes);
    printf("%s\n", to_json(run.stage, run.dtype_name, protocol, ms.size(), bytes, timing).c_str());
  }
}

int run_all(const Options& options) {
  const WeightFile file = read_weight_file(options.input);
  const auto& protocols = options.protocols;
  const bool cold = options.repeats > 0 && std::find(protocols.begin(), protocols.end(), "cold") != protocols.end();
  std::vector<DeviceWeight> weights;
  if (cold) weights = cold_copies(file);
  else weights.emplace_back(file);
  Stream stream;
  for (const std::string& dtype : options.dtypes) {
    const DeviceBuffer out(size_t(file.numel()) * (dtype == "fp32" ? 4 : 2));
    for (const std::string& stage : options.stages) {
      const Run run = {stage, dtype, dtype_of(dtype)};
      // NaN in every type: an element that no thread writes shows up in the comparison.
      NF4L_CUDA(cudaMemset(out.as<void>(), 0xff, out.bytes()));
      NF4L_CUDA(cudaDeviceSynchronize());
      run.launch(weights[0], out, stream);
      NF4L_CUDA(cudaStreamSynchronize(stream));
      if (!options.output.empty()) write_output(options.output + "-" + stage + "-" + dtype + ".raw", out);
      if (options.repeats > 0) measure(run, options, file, weights, out, stream);
    }
  }
  return 0;
}

}  // namespace
}  // namespace nf4l::lab

int main(int argc, char** argv) {
  try {
    return nf4l::lab::run_all(nf4l::lab::parse_options(argc, argv, nf4l::lab::stage_names()));
  } catch (const std::exception& error) {
    fprintf(stderr, "nf4l_lab: %s\n", error.what());
    return 1;
  }
}
