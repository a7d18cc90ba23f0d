// The host side of a kernel launch: device guard, torch's current stream, launch, error check.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>

#include <memory>
#include <mutex>
#include <utility>

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

// Tells by its attributes what the code was compiled for that a device runs.
template <class>
__global__ void nothing() {}

// Of the current device. They never change, so every device is asked once, when it is first used.
inline const DeviceProperties& device_properties(const char* op, int device) {
  struct Entry {
    std::once_flag asked;
    DeviceProperties properties;
  };
  static const std::unique_ptr<Entry[]> all = [op] {
    int count = 0;
    check_cuda(op, cudaGetDeviceCount(&count), "cudaGetDeviceCount");
    return std::make_unique<Entry[]>(static_cast<size_t>(count));
  }();
  Entry& entry = all[static_cast<size_t>(device)];
  std::call_once(entry.asked, [op, device, &entry] {
    cudaFuncAttributes attributes = {};
    check_cuda(op, cudaFuncGetAttributes(&attributes, nothing<void>), "cudaFuncGetAttributes");
    entry.properties = {device_attribute(op, cudaDevAttrComputeCapabilityMajor, device) * 10 +
                            device_attribute(op, cudaDevAttrComputeCapabilityMinor, device),
                        device_attribute(op, cudaDevAttrMultiProcessorCount, device),
                        device_attribute(op, cudaDevAttrMaxSharedMemoryPerBlockOptin, device), attributes.ptxVersion};
  });
  return entry.properties;
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
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(launch.grid));
    config.blockDim = dim3(static_cast<unsigned>(launch.block));
    config.dynamicSmemBytes = static_cast<size_t>(launch.shared_memory);
    config.stream = stream_;
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &attribute;
    config.numAttrs = launch.programmatic ? 1 : 0;
    check_cuda(op_, cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), launch.kernel);
  }

 private:
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
