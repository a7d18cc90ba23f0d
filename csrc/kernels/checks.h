// Argument checks that the families share. They stand once for the CPU and CUDA kernels (Int = int64_t) and for the fake
// kernels in Python (Int = a symbolic integer), so that every door gives the same error. No torch, no CUDA.
#pragma once

#include <array>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "geometry.h"

namespace fused {

// What the checks need to know of a tensor.
template <class Int>
struct TensorInfo {
  std::vector<Int> sizes;
  std::string dtype;   // as torch names it, without the prefix: "float32"; empty where None stands for the tensor
  std::string device;  // "cpu", "cuda:0"
  bool is_cpu = true;
};

inline std::string show(int64_t value) { return std::to_string(value); }

template <class Int>
std::string show(const std::vector<Int>& values) {
  std::string text = "[";
  for (size_t i = 0; i < values.size(); ++i) text += (i ? ", " : "") + show(values[i]);
  return text + "]";
}

// Text is put together without streams: a second copy of the C++ library in the process, as some compilers link it in,
// breaks their locales.
inline const char* text_of(const char* text) { return text; }
inline const std::string& text_of(const std::string& text) { return text; }
template <class Number>
std::enable_if_t<std::is_integral_v<Number>, std::string> text_of(Number number) {
  return std::to_string(number);
}

template <class... Parts>
std::string join(const Parts&... parts) {
  std::string text;
  ((text += text_of(parts)), ...);
  return text;
}

template <class... Parts>
[[noreturn]] void fail(const char* op, const Parts&... parts) {
  throw std::runtime_error(join("fused::", op, ": ", parts...));
}

inline bool is_supported_dtype(const std::string& dtype) {
  return dtype == "float32" || dtype == "float64" || dtype == "float16" || dtype == "bfloat16";
}

// The shapes and arguments of one transposed convolution, checked, with one value per spatial dimension.
template <class Int>
struct ConvTranspose {
  int spatial_dims = 0;
  Int batch = Int(0), in_channels = Int(0), out_channels = Int(0);
  int64_t groups = 1;
  std::vector<Int> input, kernel, output;  // spatial sizes
  std::vector<int64_t> stride, padding, output_padding, dilation;
};

template <class Int>
ConvDim conv_dim(const ConvTranspose<Int>& conv, int d) {
  return {conv.input[d], conv.kernel[d], conv.stride[d], conv.padding[d], conv.output_padding[d], conv.dilation[d]};
}

template <class Int>
void check_is_tensor(const char* op, const char* name, const TensorInfo<Int>& tensor) {
  if (tensor.dtype.empty()) fail(op, "expected `", name, "` to be a Tensor, but got None");
}

template <class Int>
void check_input(const char* op, const TensorInfo<Int>& input) {
  check_is_tensor(op, "input", input);
  if (input.sizes.size() < 3 || input.sizes.size() > 2 + kMaxSpatialDims)
    fail(op, "expected `input` to have 3 to 5 dimensions (N, C, and 1 to 3 spatial ones), but got shape ",
         show(input.sizes));
  if (!is_supported_dtype(input.dtype))
    fail(op, "expected `input` to be float32, float64, float16 or bfloat16, but got ", input.dtype);
}

template <class Int>
void check_same_kind(const char* op, const char* name, const TensorInfo<Int>& tensor, const TensorInfo<Int>& input) {
  if (tensor.dtype != input.dtype)
    fail(op, "expected `", name, "` to have the dtype of `input`, ", input.dtype, ", but got ", tensor.dtype);
  if (tensor.device != input.device)
    fail(op, "expected `", name, "` to be on the device of `input`, ", input.device, ", but got ", tensor.device);
}

// A list argument of length 1 or spatial_dims, each value at least `least`; the length becomes spatial_dims.
inline std::vector<int64_t> expand(const char* op, const char* name, const std::vector<int64_t>& values,
                                   int spatial_dims, int64_t least) {
  if (values.size() != 1 && values.size() != static_cast<size_t>(spatial_dims))
    fail(op, "expected `", name, "` to be one number or one for each of the ", spatial_dims,
         " spatial dimensions, but got ", show(values));
  for (int64_t value : values)
    if (value < least || value > INT32_MAX)
      fail(op, "expected `", name, "` to be ", least ? "positive" : "0 or more",
           value > INT32_MAX ? " and below 2147483648" : "", ", but got ", show(values));
  return values.size() == 1 ? std::vector<int64_t>(spatial_dims, values[0]) : values;
}

// Everything torch.nn.functional.conv_transpose{1,2,3}d refuses is refused here.
template <class Int>
ConvTranspose<Int> check_conv_transpose(const char* op, const TensorInfo<Int>& input, const TensorInfo<Int>& weight,
                                        const TensorInfo<Int>* bias, const std::vector<int64_t>& stride,
                                        const std::vector<int64_t>& padding, const std::vector<int64_t>& output_padding,
                                        int64_t groups, const std::vector<int64_t>& dilation) {
  check_input(op, input);
  check_is_tensor(op, "weight", weight);
  check_same_kind(op, "weight", weight, input);
  ConvTranspose<Int> conv;
  conv.spatial_dims = static_cast<int>(input.sizes.size()) - 2;
  const int dims = conv.spatial_dims;
  if (weight.sizes.size() != input.sizes.size())
    fail(op, "expected `weight` to have ", input.sizes.size(), " dimensions (C_in, C_out/groups, *kernel_size) for an ",
         "`input` of shape ", show(input.sizes), ", but got shape ", show(weight.sizes));
  conv.stride = expand(op, "stride", stride, dims, 1);
  conv.padding = expand(op, "padding", padding, dims, 0);
  conv.output_padding = expand(op, "output_padding", output_padding, dims, 0);
  conv.dilation = expand(op, "dilation", dilation, dims, 1);
  if (groups < 1) fail(op, "expected `groups` to be positive, but got ", groups);
  conv.groups = groups;
  conv.batch = input.sizes[0];
  conv.in_channels = input.sizes[1];
  for (size_t i = 0; i < weight.sizes.size(); ++i)
    if (weight.sizes[i] < Int(1))
      fail(op, "expected every size of `weight` to be at least 1, but got shape ", show(weight.sizes));
  if (conv.in_channels != weight.sizes[0])
    fail(op, "expected `input` to have as many channels as `weight` has rows, ", show(weight.sizes[0]),
         ", but got an `input` of shape ", show(input.sizes), " and a `weight` of shape ", show(weight.sizes));
  if (conv.in_channels % Int(groups) != Int(0))
    fail(op, "expected `groups` to divide the ", show(conv.in_channels), " input channels, but got ", groups);
  conv.out_channels = weight.sizes[1] * Int(groups);
  for (std::vector<Int>* sizes : {&conv.input, &conv.kernel, &conv.output}) sizes->reserve(dims);
  for (int d = 0; d < dims; ++d) {
    const Int size = input.sizes[2 + d], kernel = weight.sizes[2 + d];
    if (size < Int(1))
      fail(op, "expected every spatial size of `input` to be at least 1, but got shape ", show(input.sizes));
    if (conv.output_padding[d] >= conv.stride[d] && conv.output_padding[d] >= conv.dilation[d])
      fail(op, "expected `output_padding` to be smaller than `stride` or `dilation`, but got output_padding ",
           show(conv.output_padding), ", stride ", show(conv.stride), " and dilation ", show(conv.dilation));
    if constexpr (std::is_same_v<Int, int64_t>)  // Python's integers do not overflow
      if (static_cast<double>(size) * conv.stride[d] + static_cast<double>(kernel) * conv.dilation[d] > 0x1p62)
        fail(op,
             "expected arguments that give a transposed convolution of less than 2**62 outputs per dimension, but got ",
             "an `input` of shape ", show(input.sizes), ", a `weight` of shape ", show(weight.sizes), ", stride ",
             show(conv.stride), " and dilation ", show(conv.dilation));
    conv.input.push_back(size);
    conv.kernel.push_back(kernel);
    conv.output.push_back(conv_transpose_output_size(size, kernel, conv.stride[d], conv.padding[d],
                                                     conv.output_padding[d], conv.dilation[d]));
  }
  for (int d = 0; d < dims; ++d)
    if (conv.output[d] < Int(1))
      fail(op, "expected arguments that give a transposed convolution of positive output size, but `padding` ",
           show(conv.padding), " gives ", show(conv.output), " for an `input` of shape ", show(input.sizes));
  if (bias) {
    check_same_kind(op, "bias", *bias, input);
    if (bias->sizes.size() != 1 || bias->sizes[0] != conv.out_channels)
      fail(op, "expected `bias` to have shape [", show(conv.out_channels), "], but got ", show(bias->sizes));
  }
  return conv;
}

// A scale or shift: 1 or C_out elements, laid out to broadcast over channels. A 0-d CPU tensor is taken by value and may
// have any of the four dtypes and stand beside an input on any device.
template <class Int>
void check_channel_param(const char* op, const char* name, const TensorInfo<Int>* tensor, const TensorInfo<Int>& input,
                         const Int& out_channels, int spatial_dims) {
  if (!tensor) return;
  if (tensor->sizes.empty() && tensor->is_cpu) {
    if (!is_supported_dtype(tensor->dtype))
      fail(op, "expected `", name, "` to be float32, float64, float16 or bfloat16, but got ", tensor->dtype);
    return;
  }
  check_same_kind(op, name, *tensor, input);
  const size_t dims = tensor->sizes.size(), full = static_cast<size_t>(spatial_dims) + 2;
  // (C,) or (C, 1, ..) or (1, C, 1, ..)
  const size_t channel = dims == full ? 1 : 0;
  bool fits = dims <= full;
  bool single = fits;
  for (size_t i = 0; i < dims && single; ++i) single = tensor->sizes[i] == Int(1);
  if (fits && !single) {
    fits = dims == 1 || dims == full - 1 || dims == full;
    for (size_t i = 0; i < dims && fits; ++i) fits = tensor->sizes[i] == (i == channel ? out_channels : Int(1));
  }
  if (!fits)
    fail(op, "expected `", name, "` to have 1 or ", show(out_channels), " elements and a shape that broadcasts over ",
         "channels, such as [", show(out_channels), "] or [", show(out_channels),
         spatial_dims == 1   ? ", 1]"
         : spatial_dims == 2 ? ", 1, 1]"
                             : ", 1, 1, 1]",
         ", but got shape ", show(tensor->sizes));
}

}  // namespace fused
