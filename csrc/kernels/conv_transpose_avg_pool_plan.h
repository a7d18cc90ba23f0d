// Launch plan of conv_transpose_avg_pool: a pure function of shape and device. The kernel does not depend on the batch, so
// a sample's result is the same bits in every batch.
#pragma once

#include <algorithm>

#include "conv_transpose_avg_pool.h"
#include "plan.h"

namespace fused {

struct AvgPoolProblem {
  int64_t batch = 0;
  int64_t in_channels = 0;
  int64_t out_channels = 0;
  int64_t groups = 1;
  int itemsize = 4;
  bool channels_last = false;
  PoolDim dims[kMaxSpatialDims];  // leading dimensions of size 1 where there are fewer
};

inline AvgPoolProblem avg_pool_problem(const AvgPooledConvTranspose<int64_t>& pooled, int itemsize,
                                       bool channels_last) {
  AvgPoolProblem problem;
  problem.batch = pooled.conv.batch;
  problem.in_channels = pooled.conv.in_channels;
  problem.out_channels = pooled.conv.out_channels;
  problem.groups = pooled.conv.groups;
  problem.itemsize = itemsize;
  problem.channels_last = channels_last;
  for (int d = 0; d < pooled.conv.spatial_dims; ++d)
    problem.dims[kMaxSpatialDims - pooled.conv.spatial_dims + d] = pool_dim(pooled, d);
  return problem;
}

enum class PoolKernel { kNone, kStaged, kDirect };

struct AvgPoolPlan : Plan {
  PoolKernel kernel = PoolKernel::kNone;
};

inline constexpr int kStagedThreads = 256;
inline constexpr int kStagedRows = 16;      // of a tile
inline constexpr int kStagedColumns = 32;   // of a tile
inline constexpr int kStagedChannels = 16;  // output channels at a time
inline constexpr int kStagedPitch = 176;    // bytes of a row of inputs: rows of taps fall on different banks
inline constexpr int64_t kMostStagedUnits = 1 << 30;
inline constexpr int kStagedBlocks = 3;        // per multiprocessor: what the registers allow
inline constexpr int kStagedResultPitch = 40;  // the same for results, floats
inline constexpr int kDirectThreads = 256;
inline constexpr int kDirectChannels = 4;  // output channels of a thread

inline int64_t taps_of(const AvgPoolProblem& problem) {
  int64_t taps = 1;
  for (const PoolDim& dim : problem.dims) taps *= dim.offsets().size();
  return taps;
}

// V in float64, affine parameters, results and two tiles of inputs, bytes.
inline int64_t staged_shared_memory(const AvgPoolProblem& problem) {
  const int64_t channels = ceil_div(problem.out_channels, kStagedChannels) * kStagedChannels;
  const int64_t results = kStagedThreads / 32 * kStagedChannels * kStagedResultPitch * 4;
  const int64_t tile = problem.in_channels * problem.dims[0].offsets().size() * (kStagedRows + 1) * kStagedPitch;
  return problem.in_channels * channels * 8 * 8 + channels * 16 + results + 2 * tile;
}

// Tiles of one sample.
inline int64_t staged_units(const AvgPoolProblem& problem) {
  return problem.dims[0].output() * ceil_div(problem.dims[1].output(), kStagedRows) *
         ceil_div(problem.dims[2].output(), kStagedColumns);
}

// The staged kernel takes collapsed taps of 1 or 2 x 2 x 2 at stride 1 that never reach over the input's border.
inline bool fits_staged(const AvgPoolProblem& problem, const DeviceProperties& device) {
  // Only these have float64 tensor cores that are worth it.
  if (device.compute_capability != 90 && device.compute_capability != 100) return false;
  if (problem.groups != 1 || problem.itemsize == 8 || problem.channels_last) return false;
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    const PoolDim& dim = problem.dims[d];
    const Range offsets = dim.offsets();
    if (dim.step() != 1 || offsets.size() > 2 || (d > 0 && offsets.size() != 2) || offsets.size() == 0) return false;
    if (offsets.begin < 0 || dim.output() - 1 + offsets.end > dim.conv.input || dim.conv.kernel > 64) return false;
    for (int64_t j = offsets.begin; j < offsets.end; ++j)
      if (dim.is_hole(j)) return false;
  }
  // It computes with 32 bits within planes, weights and the count of tiles.
  if (problem.dims[1].conv.input * problem.dims[2].conv.input > kMostStagedUnits ||
      problem.dims[0].conv.input > kMostStagedUnits || staged_units(problem) > kMostStagedUnits)
    return false;
  return staged_shared_memory(problem) <= device.shared_memory_per_block;
}

inline AvgPoolPlan plan_conv_transpose_avg_pool(const AvgPoolProblem& problem, const DeviceProperties& device) {
  AvgPoolPlan plan;
  int64_t inputs = problem.batch * problem.in_channels, outputs = problem.batch * problem.out_channels, weight_taps = 1;
  for (const PoolDim& dim : problem.dims) {
    inputs *= dim.conv.input;
    outputs *= dim.output();
    weight_taps *= dim.conv.kernel;
  }
  const int64_t depth = problem.in_channels / problem.groups * taps_of(problem);
  const int64_t weights = problem.in_channels * (problem.out_channels / problem.groups);
  plan.bytes_read = (inputs + weights * weight_taps) * problem.itemsize;
  plan.bytes_written = outputs * problem.itemsize;
  plan.operations = 2 * outputs * depth;
  if (outputs == 0) {
    plan.variant = "nothing to do";
    return plan;
  }
  constexpr int64_t kMostBlocks = 1 << 30;  // both kernels loop over what lies beyond
  if (fits_staged(problem, device)) {
    plan.variant = "planes staged in shared memory";
    plan.kernel = PoolKernel::kStaged;
    const int64_t shared_memory = staged_shared_memory(problem);
    const int64_t blocks =
        device.multiprocessors * std::clamp<int64_t>(device.shared_memory_per_block / shared_memory, 1, kStagedBlocks);
    plan.add("staged_conv", std::min(problem.batch * staged_units(problem), blocks), kStagedThreads, shared_memory);
    return plan;
  }
  plan.variant = "one thread a position";
  plan.kernel = PoolKernel::kDirect;
  const int64_t collapsed = weights * taps_of(problem);
  plan.workspace = collapsed * (problem.itemsize == 2 ? 4 : 8);
  if (collapsed > 0)
    plan.add("collapse_taps", std::min(ceil_div(collapsed, kDirectThreads), kMostBlocks), kDirectThreads);
  const int64_t threads = outputs / problem.out_channels * problem.groups *
                          ceil_div(problem.out_channels / problem.groups, kDirectChannels);
  plan.add("direct_conv", std::min(ceil_div(threads, kDirectThreads), kMostBlocks), kDirectThreads);
  return plan;
}

}  // namespace fused
