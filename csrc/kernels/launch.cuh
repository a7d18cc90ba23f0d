// The host side of a kernel launch: device guard, torch's current stream, launch, error check.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <map>
#include <utility>
#include <vector>

#include "plan.h"
#include "tensors.h"
#include "vector.cuh"

namespace fused {

inline void check_cuda(const char* op, cudaError_t error, const char* what) {
  if (error != cudaSuccess) fail(op, what, " failed: ", cudaGetErrorString(error));
}

// Only libtorch_cuda knows the current stream. It is looked up when first needed, so that this binary loads under a
// CPU-only torch too; by then torch has loaded it, or there would be no CUDA tensor.
inline cudaStream_t current_stream(const char* op, int32_t device) {
  using Function = AOTITorchError (*)(int32_t, void**);
  static const Function function = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return reinterpret_cast<Function>(library ? dlsym(library, "aoti_torch_get_current_cuda_stream") : nullptr);
  }();
  void* stream = nullptr;
  if (!function || function(device, &stream) != 0) fail(op, "cannot ask torch for the current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

inline int device_attribute(const char* op, cudaDeviceAttr attribute, int device) {
  int value = 0;
  check_cuda(op, cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// They never change, so every device is asked once.
inline const DeviceProperties& device_properties(const char* op, int device) {
  static const std::vector<DeviceProperties> all = [op] {
    int count = 0;
    check_cuda(op, cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    std::vector<DeviceProperties> properties;
    for (int i = 0; i < count; ++i)
      properties.push_back({device_attribute(op, cudaDevAttrComputeCapabilityMajor, i) * 10 +
                                device_attribute(op, cudaDevAttrComputeCapabilityMinor, i),
                            device_attribute(op, cudaDevAttrMultiProcessorCount, i),
                            device_attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin, i)});
    return properties;
  }();
  return all.at(static_cast<size_t>(device));
}

// Makes the device of `tensor` current for as long as it lives, for torch and for this binary's own CUDA runtime.
class CudaContext {
 public:
  CudaContext(const char* op, const Tensor& tensor)
      : op_(op), device_(tensor.get_device_index()), guard_(device_), stream_(current_stream(op, device_)) {
    int current = -1;
    check_cuda(op, cudaGetDevice(&current), "cudaGetDevice");
    if (current != device_) check_cuda(op, cudaSetDevice(device_), "cudaSetDevice");
  }

  const DeviceProperties& properties() const { return device_properties(op_, device_); }

  template <class... Parameters, class... Arguments>
  void launch(const Launch& launch, void (*kernel)(Parameters...), Arguments&&... arguments) const {
    // The limit is a property of the kernel on the current device, so it is set at each call that needs it.
    if (launch.shared_memory > 48 * 1024)
      check_cuda(op_,
                 cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                      static_cast<int>(launch.shared_memory)),
                 "raising the shared memory limit");
    if (launch.grid > INT32_MAX)
      fail(op_, "expected an input that takes at most ", INT32_MAX, " blocks, but ", launch.kernel, " would take ",
           launch.grid, ", which is not supported yet");
    const bool programmatic = launch.programmatic && waits_by_itself(reinterpret_cast<const void*>(kernel));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(launch.grid));
    config.blockDim = dim3(static_cast<unsigned>(launch.block));
    config.dynamicSmemBytes = static_cast<size_t>(launch.shared_memory);
    config.stream = stream_;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = programmatic ? 1 : 0;
    check_cuda(op_, cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), launch.kernel);
  }

 private:
  // Code made from PTX of an older architecture does not, whatever the device. Every thread asks once: a lock costs more.
  bool waits_by_itself(const void* kernel) const {
    thread_local std::map<std::pair<const void*, int32_t>, bool> known;
    const auto found = known.find({kernel, device_});
    if (found != known.end()) return found->second;
    cudaFuncAttributes attributes = {};
    check_cuda(op_, cudaFuncGetAttributes(&attributes, kernel), "cudaFuncGetAttributes");
    return known[{kernel, device_}] = attributes.ptxVersion >= 90;
  }

  const char* op_;
  int32_t device_;
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_;
};

// Calls `function` with a value of the dtype that a kernel computes in; the checks have refused every other dtype.
template <class F>
void dispatch(ScalarType dtype, const F& function) {
  switch (dtype) {
    case ScalarType::Float: return function(float());
    case ScalarType::Double: return function(double());
    case ScalarType::Half: return function(__half());
    default: return function(__nv_bfloat16());
  }
}

// Waits for the launch before this one; a no-op where a launch waits by itself.
__device__ inline void wait_for_previous_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Lets the next launch of the stream begin.
__device__ inline void allow_next_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

}  // namespace fused
