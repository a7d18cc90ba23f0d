// Checks and output shapes of global_avg_pool, conv_transpose_global_avg_pool and
// conv_transpose_global_avg_pool_logsumexp. No torch, no CUDA.
#pragma once

#include "checks.h"

namespace fused {

template <class Int>
std::vector<Int> check_global_avg_pool(const TensorInfo<Int>& input) {
  check_input("global_avg_pool", input);
  std::vector<Int> output(input.sizes.size(), Int(1));
  output[0] = input.sizes[0];
  output[1] = input.sizes[1];
  return output;
}

template <class Int>
struct PooledConvTranspose {
  ConvTranspose<Int> conv;
  std::vector<Int> output;
};

template <class Int>
PooledConvTranspose<Int> check_conv_transpose_global_avg_pool(
    const char* op, bool logsumexp, const TensorInfo<Int>& input, const TensorInfo<Int>& weight,
    const TensorInfo<Int>* bias, const std::vector<int64_t>& stride, const std::vector<int64_t>& padding,
    const std::vector<int64_t>& output_padding, int64_t groups, const std::vector<int64_t>& dilation,
    const TensorInfo<Int>* scale, const TensorInfo<Int>* shift) {
  PooledConvTranspose<Int> result;
  result.conv = check_conv_transpose(op, input, weight, bias, stride, padding, output_padding, groups, dilation);
  const auto& conv = result.conv;
  check_channel_param(op, "scale", scale, input, conv.out_channels, conv.spatial_dims);
  check_channel_param(op, "shift", shift, input, conv.out_channels, conv.spatial_dims);
  if (logsumexp) {
    result.output = {conv.batch, Int(1)};
  } else {
    result.output.assign(input.sizes.size(), Int(1));
    result.output[0] = conv.batch;
    result.output[1] = conv.out_channels;
  }
  return result;
}

}  // namespace fused
