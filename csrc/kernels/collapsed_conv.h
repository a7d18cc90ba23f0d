// What the plans of the collapsed convolution's kernels share: its problem, and what 32-bit arithmetic can take.
#pragma once

#include <cstdlib>

#include "geometry.h"
#include "plan.h"

namespace fused {

struct AvgPoolProblem {
  int64_t batch = 0;
  int64_t in_channels = 0;
  int64_t out_channels = 0;
  int64_t groups = 1;
  int itemsize = 4;
  bool bfloat16 = false;
  bool channels_last = false;
  PoolDim dims[kMaxSpatialDims];  // leading dimensions of size 1 where there are fewer

  int64_t in_group() const { return in_channels / groups; }
  int64_t per_group() const { return out_channels / groups; }
  // Of all dimensions together.
  int64_t inputs() const { return count_product({dims[0].conv.input, dims[1].conv.input, dims[2].conv.input}); }
  int64_t outputs() const { return count_product({dims[0].output(), dims[1].output(), dims[2].output()}); }
  int64_t offsets() const {
    return count_product({dims[0].offsets().size(), dims[1].offsets().size(), dims[2].offsets().size()});
  }
};

// Numbers of its type that V is split into for a matrix product: half types would not hold it in float32's precision.
constexpr int weight_terms(int itemsize, bool bfloat16) { return itemsize > 2 ? 1 : bfloat16 ? 3 : 2; }

// Kernels that write V for a matrix product.
inline constexpr int kCollapseThreads = 256;
inline constexpr int64_t kMaxCollapseBlocks = 1024;  // each has a flag that all blocks of the product read

inline constexpr int64_t kMax32BitSize = 1 << 30;  // of what a kernel counts with 32 bits
inline constexpr int64_t kMaxDimOffsets = 4096;    // of one dimension, for such a kernel

// Whether each dimension's sizes leave room in 32 bits, and each of its offsets has a tap. Products are left to the caller.
inline bool fits_32_bits(const AvgPoolProblem& problem) {
  for (const PoolDim& dim : problem.dims) {
    const Range offsets = dim.offsets();
    if (offsets.size() == 0 || offsets.size() > kMaxDimOffsets || std::abs(offsets.begin) > kMax32BitSize ||
        dim.conv.input > kMax32BitSize || dim.step() > kMax32BitSize || dim.has_holes())
      return false;
  }
  return true;
}

}  // namespace fused
