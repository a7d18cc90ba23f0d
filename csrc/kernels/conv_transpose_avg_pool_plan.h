// Launch plan of conv_transpose_avg_pool: a pure function of shape and device. Every output is computed alike in every
// batch, so a sample's result is the same bits.
#pragma once

#include <algorithm>

#include "conv_transpose_avg_pool.h"
#include "implicit_gemm_plan.h"
#include "plan.h"

namespace fused {

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

enum class PoolKernel { kNone, kStaged, kGemm, kColumns, kDirect };

struct AvgPoolPlan : Plan {
  PoolKernel kernel = PoolKernel::kNone;
  GemmTiling gemm;        // of the implicit matrix product
  int64_t collapsed = 0;  // bytes of the workspace that hold V of it
  int column_taps = 0;    // offsets along a column that a thread holds in registers
};

inline constexpr int kStagedMultipliers = 4;  // warps; with eight of them or one row a warp it took as long
inline constexpr int kStagedThreads = 32 * kStagedMultipliers + 32;
inline constexpr int kStagedRows = 16;       // of a tile; with 8 it took 70 us instead of 60,
inline constexpr int kFewStagedRows = 8;     // but 11.6 instead of 12.7 at batch 1, where blocks are few
inline constexpr int kStagedWarpRows = 2;    // of these that a warp computes at once
inline constexpr int kStagedColumns = 32;    // of a tile
inline constexpr int kStagedChannels = 16;   // output channels at a time
inline constexpr int kStagedSlots = 4;       // input planes: two in use, two on their way
inline constexpr int kMostStagedBlocks = 3;  // per multiprocessor: what the registers allow
inline constexpr int64_t kMostStaged = 1 << 30;
inline constexpr int kCollapseThreads = 256;
inline constexpr int64_t kMostCollapseBlocks = 1024;  // each has a flag that all blocks of the product read
inline constexpr int kDirectThreads = 256;
// Outputs of a thread of the column kernel. (32, 64, 128, 128) with 64 groups, kernel 4, stride 2: 325 us with 4 in float32
// and 259 in float16, 247 and 185 with 8, 328 with 16 in float16.
inline constexpr int kColumnRows = 8;
inline constexpr int kMostColumnTaps = 4;
inline constexpr int64_t kMostColumnChannels = 1024;  // of a group: longer sums go on in float64
inline constexpr int kDirectChannels = 4;             // output channels of a thread

inline int64_t taps_of(const AvgPoolProblem& problem) {
  int64_t taps = 1;
  for (const PoolDim& dim : problem.dims) taps *= dim.offsets().size();
  return taps;
}

// Sizes of the staged kernel's shared arrays, in elements of the dtype.
struct StagedLayout {
  int rows = 0;             // of outputs of a tile
  int slot = 0;             // one input plane of all channels in the ring
  bool whole_rows = false;  // of the output in a tile: its results of a channel are one run there
  int result_row = 0;       // from one row of results to the next
  int result_pitch = 0;     // from one channel of results to the next
};

inline StagedLayout staged_layout(const AvgPoolProblem& problem, int rows) {
  const int64_t size = 16 / problem.itemsize, columns = std::min<int64_t>(problem.dims[2].output(), kStagedColumns);
  // Whole vectors, by as many as let the lanes of a warp meet different banks.
  const auto vectors = [size](int64_t elements, int64_t remainder) {
    int64_t count = ceil_div(elements, size);
    while (count % 8 != remainder) ++count;
    return static_cast<int>(count * size);
  };
  StagedLayout layout;
  layout.rows = rows;
  layout.slot = vectors(problem.in_channels * (rows + 1) * (kStagedColumns + size), 4);
  // Whole rows follow one another without a gap, as in the output.
  layout.whole_rows = columns == problem.dims[2].output();
  layout.result_row = static_cast<int>(layout.whole_rows ? columns : columns + size);
  layout.result_pitch = vectors(rows * layout.result_row + size, 1);
  return layout;
}

// V, its factors and what is added to its products, two buffers of results and the ring of inputs, bytes.
inline int64_t staged_shared_memory(const AvgPoolProblem& problem, int rows) {
  const StagedLayout layout = staged_layout(problem, rows);
  const int64_t channels = ceil_div(problem.out_channels, kStagedChannels) * kStagedChannels;
  return (problem.in_channels * 8 + 2) * channels * 8 +
         (2 * kStagedChannels * layout.result_pitch + kStagedSlots * layout.slot) * problem.itemsize;
}

// Planes of outputs of all tiles of one sample.
inline int64_t staged_steps(const AvgPoolProblem& problem, int rows) {
  return problem.dims[0].output() * ceil_div(problem.dims[1].output(), rows) *
         ceil_div(problem.dims[2].output(), kStagedColumns);
}

inline int staged_rows(const AvgPoolProblem& problem, const DeviceProperties& device) {
  return problem.batch < ceil_div(device.multiprocessors, staged_steps(problem, kStagedRows)) ? kFewStagedRows
                                                                                              : kStagedRows;
}

// The staged kernel takes collapsed taps of 1 or 2 x 2 x 2 at stride 1.
inline bool fits_staged(const AvgPoolProblem& problem, const DeviceProperties& device) {
  // Only these have float64 tensor cores that are worth it.
  if (device.compute_capability != 90 && device.compute_capability != 100) return false;
  if (problem.groups != 1 || problem.itemsize == 8 || problem.channels_last) return false;
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    const PoolDim& dim = problem.dims[d];
    const Range offsets = dim.offsets();
    if (dim.step() != 1 || offsets.size() > 2 || (d > 0 && offsets.size() != 2) || offsets.size() == 0) return false;
    if (dim.conv.kernel > 64 || std::abs(offsets.begin) > kMostStaged || dim.output() > kMostStaged) return false;
    for (int64_t j = offsets.begin; j < offsets.end; ++j)
      if (dim.is_hole(j)) return false;
  }
  // It computes with 32 bits within weights and the count of steps. (Sizes are checked first: products could overflow.)
  for (const PoolDim& dim : problem.dims)
    if (dim.conv.input > kMostStaged) return false;
  if (problem.in_channels > 4096 || problem.out_channels > 4096 ||
      problem.dims[1].output() * problem.dims[2].output() > kMostStaged ||
      staged_steps(problem, kFewStagedRows) > kMostStaged)
    return false;
  return staged_shared_memory(problem, kStagedRows) <= device.shared_memory_per_block;
}

// Threads of a sample: a column of outputs each.
inline int64_t column_threads(const AvgPoolProblem& problem, int column_taps) {
  return problem.out_channels * problem.dims[0].output() * problem.dims[2].output() *
         ceil_div(problem.dims[1].output(), column_taps > 0 ? kColumnRows : 1);
}

// The column kernel computes with 32 bits within a sample.
inline bool fits_columns(const AvgPoolProblem& problem) {
  const int64_t in_group = problem.in_channels / problem.groups;
  if (in_group == 0 || in_group > kMostColumnChannels || problem.out_channels > kMostGemmSize) return false;
  double outputs = static_cast<double>(problem.out_channels);
  for (const PoolDim& dim : problem.dims) {
    const Range offsets = dim.offsets();
    if (offsets.size() == 0 || offsets.size() > kMostGemmDepth || dim.conv.input > kMostGemmSize ||
        std::abs(offsets.begin) > kMostGemmSize || dim.step() > kMostGemmSize)
      return false;
    if (dim.conv.dilation > dim.pool_kernel)
      for (int64_t j = offsets.begin; j < offsets.end; ++j)
        if (dim.is_hole(j)) return false;
    outputs *= static_cast<double>(dim.output());
  }
  return outputs <= kMostGemmSize;
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
    const int rows = staged_rows(problem, device);
    const int64_t shared_memory = staged_shared_memory(problem, rows);
    const int64_t blocks = device.multiprocessors *
                           std::clamp<int64_t>(device.shared_memory_per_block / shared_memory, 1, kMostStagedBlocks);
    plan.add("staged_conv", std::min(problem.batch * staged_steps(problem, rows), blocks), kStagedThreads,
             shared_memory);
    return plan;
  }
  const bool programmatic = device.compute_capability >= 90;
  plan.gemm = gemm_tiling(problem, device);
  if (plan.gemm.fits()) {
    plan.variant = "implicit matrix product on tensor cores";
    plan.kernel = PoolKernel::kGemm;
    const int64_t weights_here = gemm_weights(problem, plan.gemm);
    plan.collapsed = weights_here * (problem.itemsize == 2 ? 2 * gemm_terms(problem.itemsize) : 8);
    const int64_t collapsing = std::min<int64_t>(ceil_div(weights_here, kCollapseThreads), kMostCollapseBlocks);
    plan.workspace = plan.collapsed + collapsing * 4;  // and a flag of each block
    plan.add("split_taps", collapsing, kCollapseThreads);
    // Blocks of one tile of channels share the positions: as many as run at once.
    const int64_t together = device.multiprocessors * gemm_blocks(problem.itemsize);
    const int64_t boxes = std::min(problem.batch * plan.gemm.boxes, kMostGemmSize);
    const int64_t blocks = std::clamp<int64_t>(together / plan.gemm.channel_tiles, 1, boxes);
    plan.add("implicit_gemm", plan.gemm.channel_tiles * blocks, kGemmThreads, plan.gemm.shared_memory, programmatic);
    return plan;
  }
  const int64_t collapsed = weights * taps_of(problem);
  plan.workspace = collapsed * (problem.itemsize == 2 ? 4 : 8);
  if (collapsed > 0)
    plan.add("collapse_taps", std::min(ceil_div(collapsed, kDirectThreads), kMostBlocks), kDirectThreads);
  if (fits_columns(problem)) {
    const int64_t taps = problem.dims[1].offsets().size();
    plan.column_taps = problem.dims[1].step() == 1 && problem.dims[1].output() > 1 && taps <= kMostColumnTaps
                           ? static_cast<int>(taps)
                           : 0;
    const int64_t blocks = ceil_div(problem.batch * column_threads(problem, plan.column_taps), kDirectThreads);
    if (blocks <= INT32_MAX) {
      plan.variant = "one thread a column";
      plan.kernel = PoolKernel::kColumns;
      plan.add("column_conv", blocks, kDirectThreads, 0, programmatic);
      return plan;
    }
  }
  plan.variant = "one thread a position";
  plan.kernel = PoolKernel::kDirect;
  const int64_t threads = outputs / problem.out_channels * problem.groups *
                          ceil_div(problem.out_channels / problem.groups, kDirectChannels);
  plan.add("direct_conv", std::min(ceil_div(threads, kDirectThreads), kMostBlocks), kDirectThreads, 0,
           programmatic && plan.launches > 0);
  return plan;
}

}  // namespace fused
