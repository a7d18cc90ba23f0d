// Checks and output shape of conv_transpose_avg_pool. No torch, no CUDA.
#pragma once

#include "checks.h"

namespace fused {

template <class Int>
struct AvgPooledConvTranspose {
  ConvTranspose<Int> conv;
  std::vector<int64_t> pool_kernel, pool_stride;
  std::vector<Int> output;  // (N, C_out, *pooled)
};

template <class Int>
PoolDim pool_dim(const AvgPooledConvTranspose<Int>& pooled, int d) {
  return {conv_dim(pooled.conv, d), pooled.pool_kernel[d], pooled.pool_stride[d]};
}

template <class Int>
AvgPooledConvTranspose<Int> check_conv_transpose_avg_pool(
    const TensorInfo<Int>& input, const TensorInfo<Int>& weight, const TensorInfo<Int>* bias,
    const std::vector<int64_t>& stride, const std::vector<int64_t>& padding, const std::vector<int64_t>& output_padding,
    int64_t groups, const std::vector<int64_t>& dilation, const std::vector<int64_t>& pool_kernel_size,
    const std::vector<int64_t>& pool_stride, const TensorInfo<Int>* scale1, const TensorInfo<Int>* shift,
    const TensorInfo<Int>* scale2) {
  const char* op = "conv_transpose_avg_pool";
  AvgPooledConvTranspose<Int> result;
  result.conv = check_conv_transpose(op, input, weight, bias, stride, padding, output_padding, groups, dilation);
  const auto& conv = result.conv;
  result.pool_kernel = expand(op, "pool_kernel_size", pool_kernel_size, conv.spatial_dims, 1);
  result.pool_stride =
      pool_stride.empty() ? result.pool_kernel : expand(op, "pool_stride", pool_stride, conv.spatial_dims, 1);
  result.output.reserve(conv.spatial_dims + 2);
  result.output = {conv.batch, conv.out_channels};
  for (int d = 0; d < conv.spatial_dims; ++d) {
    if (conv.output[d] < Int(result.pool_kernel[d]))
      fail(op, "expected `pool_kernel_size` to be at most the transposed convolution's output, ", show(conv.output),
           ", but got ", show(result.pool_kernel));
    if (result.pool_stride[d] % conv.stride[d] != 0)
      fail(op, "expected `pool_stride` to be a multiple of `stride`, ", show(conv.stride), ", but got ",
           show(result.pool_stride));
    result.output.push_back((conv.output[d] - Int(result.pool_kernel[d])) / Int(result.pool_stride[d]) + Int(1));
  }
  // The collapsed kernel: its offsets are counted and listed in 64 bits, and walked for each output.
  Int offsets(1);
  for (int d = 0; d < conv.spatial_dims; ++d) {
    const Int last = Int(conv.dilation[d]) * (conv.kernel[d] - Int(1)) + Int(result.pool_kernel[d] - 1);
    offsets = offsets * (last / Int(conv.stride[d]) + Int(1));
    if (Int(INT32_MAX) < offsets)
      fail(op,
           "expected a collapsed kernel, of (`dilation` * (kernel_size - 1) + `pool_kernel_size`) / `stride` offsets ",
           "per dimension, of less than 2**31 offsets, but got dilation ", show(conv.dilation), ", pool_kernel_size ",
           show(result.pool_kernel), ", stride ", show(conv.stride), " and a `weight` of shape ", show(weight.sizes));
  }
  check_channel_param(op, "scale1", scale1, input, conv.out_channels, conv.spatial_dims);
  check_channel_param(op, "shift", shift, input, conv.out_channels, conv.spatial_dims);
  check_channel_param(op, "scale2", scale2, input, conv.out_channels, conv.spatial_dims);
  return result;
}

}  // namespace fused
