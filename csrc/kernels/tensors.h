// Between torch's stable ABI and the kernels: facts of a tensor for the checks, outputs and workspaces, parameters.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cctype>
#include <cstring>
#include <optional>
#include <vector>

#include "checks.h"

namespace fused {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using Ints = std::vector<int64_t>;

inline std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float: return "float32";
    case ScalarType::Double: return "float64";
    case ScalarType::Half: return "float16";
    case ScalarType::BFloat16: return "bfloat16";
    case ScalarType::Byte: return "uint8";
    case ScalarType::Char: return "int8";
    case ScalarType::Short: return "int16";
    case ScalarType::Int: return "int32";
    case ScalarType::Long: return "int64";
    case ScalarType::Bool: return "bool";
    case ScalarType::ComplexHalf: return "complex32";
    case ScalarType::ComplexFloat: return "complex64";
    case ScalarType::ComplexDouble: return "complex128";
    default: break;
  }
  // Float8_e5m2, UInt16, ...: PyTorch has the same names in lower case.
  std::string name = torch::headeronly::toString(dtype);
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  return name;
}

inline std::string dtype_name(const Tensor& tensor) {
  ScalarType dtype;
  try {
    dtype = tensor.scalar_type();
  } catch (const std::exception&) {
    return "a dtype that PyTorch's stable ABI does not know";
  }
  return dtype_name(dtype);
}

inline TensorInfo<int64_t> info(const Tensor& tensor) {
  if (!tensor.defined()) return {};  // what torch's dispatcher makes of None
  const auto sizes = tensor.sizes();
  const bool is_cpu = tensor.is_cpu();
  return {{sizes.begin(), sizes.end()},
          dtype_name(tensor),
          is_cpu ? "cpu" : "cuda:" + std::to_string(tensor.get_device_index()),
          is_cpu};
}

// A TensorInfo of an argument that may be absent, as the checks take it.
class MaybeInfo {
 public:
  explicit MaybeInfo(const MaybeTensor& tensor) {
    if (tensor) info_ = info(*tensor);
  }
  const TensorInfo<int64_t>* get() const { return info_ ? &*info_ : nullptr; }

 private:
  std::optional<TensorInfo<int64_t>> info_;
};

// Whether the tensor, of any rank, lies in memory as (N, *spatial, C), without gaps.
inline bool is_channels_last(const Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  int64_t expected = 1;
  const auto fits = [&](size_t d) {
    const bool result = sizes[d] == 1 || strides[d] == expected;
    expected *= sizes[d];
    return result;
  };
  bool result = fits(1);
  for (size_t d = sizes.size() - 1; d > 1; --d) result = fits(d) && result;
  return fits(0) && result;
}

// The same of a tensor that is not contiguous as well, as one with a single channel or position is.
inline bool is_only_channels_last(const Tensor& tensor) { return !tensor.is_contiguous() && is_channels_last(tensor); }

// Whether an output with spatial dimensions takes this memory format from the input, as PyTorch's convolutions do.
inline bool wants_channels_last(const Tensor& input) { return input.dim() > 3 && is_only_channels_last(input); }

// An uninitialised tensor on the device of `like`.
inline Tensor empty(const Ints& sizes, ScalarType dtype, const Tensor& like, bool channels_last = false) {
  const int dims = static_cast<int>(sizes.size());
  Ints strides(sizes.size(), 1);
  int64_t stride = 1;
  const auto place = [&](int d) {
    strides[d] = stride;
    stride *= sizes[d] > 1 ? sizes[d] : 1;
  };
  if (channels_last) place(1);
  for (int d = dims - 1; d > (channels_last ? 1 : -1); --d) place(d);
  if (channels_last) place(0);
  int32_t device_type = 0;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      dims, sizes.data(), strides.data(), torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)),
      device_type, like.get_device_index(), &handle));
  return Tensor(handle);
}

inline Tensor empty_bytes(int64_t bytes, const Tensor& like) { return empty({bytes}, ScalarType::Byte, like); }

inline Tensor as_contiguous(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

inline int64_t product(const Ints& values) {
  int64_t result = 1;
  for (int64_t value : values) result *= value;
  return result;
}

// For divisors: the product of a convolution's output sizes can exceed 64 bits.
inline double float_product(const Ints& values) {
  double result = 1;
  for (int64_t value : values) result *= static_cast<double>(value);
  return result;
}

// A bias, scale or shift as the kernels take it: element c is data[c * stride], or `value` where data is null.
struct ChannelParam {
  const void* data = nullptr;
  int64_t stride = 0;
  double value = 0;
};

inline double scalar_value(const Tensor& tensor) {
  const void* data = tensor.const_data_ptr();
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return *static_cast<const float*>(data);
    case ScalarType::Double: return *static_cast<const double*>(data);
    case ScalarType::Half: return static_cast<float>(*static_cast<const torch::headeronly::Half*>(data));
    default: return static_cast<float>(*static_cast<const torch::headeronly::BFloat16*>(data));
  }
}

// The tensor passed the checks, so its only size above 1, if any, is that of the channels.
inline ChannelParam channel_param(const MaybeTensor& tensor, double absent) {
  if (!tensor) return {nullptr, 0, absent};
  const auto sizes = tensor->sizes();
  if (sizes.size() == 0 && tensor->is_cpu()) return {nullptr, 0, scalar_value(*tensor)};
  ChannelParam param{tensor->const_data_ptr(), 0, 0};
  for (size_t i = 0; i < sizes.size(); ++i)
    if (sizes[i] > 1) param.stride = tensor->stride(static_cast<int64_t>(i));
  return param;
}

}  // namespace fused
