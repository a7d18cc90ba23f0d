// Launch plan of conv_transpose_avg_pool: a pure function of shape and device. Every output is computed alike in every
// batch, so a sample's result is the same bits.
#pragma once

#include <algorithm>

#include "conv_transpose_avg_pool.h"
#include "implicit_gemm_plan.h"
#include "staged_conv_plan.h"
#include "wide_gemm_plan.h"

namespace fused {

inline AvgPoolProblem avg_pool_problem(const AvgPooledConvTranspose<int64_t>& pooled, int itemsize, bool bfloat16,
                                       bool channels_last) {
  AvgPoolProblem problem;
  problem.batch = pooled.conv.batch;
  problem.in_channels = pooled.conv.in_channels;
  problem.out_channels = pooled.conv.out_channels;
  problem.groups = pooled.conv.groups;
  problem.itemsize = itemsize;
  problem.bfloat16 = bfloat16;
  problem.channels_last = channels_last;
  for (int d = 0; d < pooled.conv.spatial_dims; ++d)
    problem.dims[kMaxSpatialDims - pooled.conv.spatial_dims + d] = pool_dim(pooled, d);
  return problem;
}

enum class PoolKernel { kNone, kStaged, kWide, kGemm, kColumns, kDirect };

struct AvgPoolPlan : Plan {
  PoolKernel kernel = PoolKernel::kNone;
  StagedLayout staged;
  int64_t staged_steps = 0;  // of a sample
  GemmTiling gemm;           // of the implicit matrix product
  WideTiling wide;           // of that of warpgroups
  int64_t collapsed = 0;     // bytes of the workspace that hold V, of kWide and kGemm
  int column_taps = 0;       // offsets along a column that a thread holds in registers
  int columns = 1;           // side by side, of a thread
  int64_t threads = 0;       // that have work: of a sample in kColumns, of all in kDirect
};

inline constexpr int kDirectThreads = 256;
// Outputs of a column that a thread takes. With two columns, (32, 64, 128, 128) with 64 groups, kernel 4 and stride 2, takes
// 107 us in float32 and 75 in half types.
inline constexpr int kColumnRows = 8;
inline constexpr int kMaxColumnTaps = 4;
// Per multiprocessor, at least, where threads take two columns each: fewer would leave it waiting for memory.
inline constexpr int64_t kMinColumnThreads = 512;
inline constexpr int64_t kMaxColumnLaunches = 1024;
inline constexpr int64_t kMaxColumnChannels = 1024;  // of a group: longer sums go on in float64
inline constexpr int kDirectChannels = 4;            // output channels of a thread

// The column kernel computes with 32 bits within a sample's outputs, a row of inputs and V.
inline bool fits_columns(const AvgPoolProblem& problem) {
  return problem.in_group() <= kMaxColumnChannels && fits_32_bits(problem) &&
         count_product({problem.out_channels, problem.outputs()}) <= kMax32BitSize &&
         count_product({problem.channels_last ? problem.in_channels : 1, problem.dims[2].conv.input}) <=
             kMax32BitSize &&
         count_product({problem.in_group(), problem.offsets(), problem.out_channels}) <= kMax32BitSize;
}

inline AvgPoolPlan plan_conv_transpose_avg_pool(const AvgPoolProblem& problem, const DeviceProperties& device) {
  AvgPoolPlan plan;
  const PoolDim &dim0 = problem.dims[0], &dim1 = problem.dims[1], &dim2 = problem.dims[2];
  const int64_t inputs = count_product({problem.batch, problem.in_channels, problem.inputs()});
  const int64_t outputs = count_product({problem.batch, problem.out_channels, problem.outputs()});
  const int64_t weight_taps = count_product({dim0.conv.kernel, dim1.conv.kernel, dim2.conv.kernel});
  const int64_t offsets = problem.offsets();
  plan.bytes_read = count_product({problem.itemsize, inputs}) +
                    count_product({problem.itemsize, problem.in_channels, problem.per_group(), weight_taps});
  plan.bytes_written = count_product({problem.itemsize, outputs});
  plan.operations = count_product({2, outputs, problem.in_group(), offsets});
  if (outputs == 0) {
    plan.variant = "nothing to do";
    return plan;
  }
  constexpr int64_t kMaxBlocks = 1 << 30;  // the kernels loop over what lies beyond
  if (fits_staged(problem, device)) {
    plan.variant = "planes staged in shared memory";
    plan.kernel = PoolKernel::kStaged;
    const int rows = staged_rows(problem, device);
    plan.staged = staged_layout(problem, rows);
    plan.staged_steps = staged_steps(problem, rows);
    const int64_t shared_memory = staged_shared_memory(problem, plan.staged);
    const int64_t blocks = device.multiprocessors * staged_blocks(shared_memory, device);
    plan.add("staged_conv", std::min(count_product({problem.batch, plan.staged_steps}), blocks), kStagedThreads,
             shared_memory);
    return plan;
  }
  const bool programmatic = device.code_capability >= 90;
  const int terms = weight_terms(problem.itemsize, problem.bfloat16);
  // V as a kernel takes it, factors of each output channel, and a flag of each block that writes them.
  const auto collapse = [&plan](const char* kernel, int64_t weights, int itemsize, int64_t factors) {
    plan.collapsed = count_product({weights, itemsize});
    const int64_t blocks = std::min(ceil_div(weights, kCollapseThreads), kMaxCollapseBlocks);
    plan.workspace = plan.collapsed + factors * 8 + blocks * 4;
    plan.add(kernel, blocks, kCollapseThreads);
  };
  plan.wide = wide_tiling(problem, device);
  if (plan.wide.fits()) {
    plan.variant = "matrix product of warpgroups on tensor cores";
    plan.kernel = PoolKernel::kWide;
    collapse("wide_taps", wide_weights(problem, plan.wide), 2 * terms, problem.out_channels);
    const int64_t jobs = count_product({problem.batch, dim0.output(), plan.wide.lines, plan.wide.channel_tiles});
    plan.add("wide_gemm", std::min<int64_t>(jobs, device.multiprocessors), kWideThreads, plan.wide.shared_memory,
             programmatic);
    return plan;
  }
  plan.gemm = gemm_tiling(problem, device);
  if (plan.gemm.fits()) {
    plan.variant = "implicit matrix product on tensor cores";
    plan.kernel = PoolKernel::kGemm;
    collapse("split_taps", gemm_weights(problem, plan.gemm), problem.itemsize == 2 ? 2 * terms : 8, 0);
    // Blocks of one tile of channels share the positions: as many as run at once.
    const int64_t together = device.multiprocessors * gemm_blocks(problem.itemsize);
    const int64_t boxes = std::min(count_product({problem.batch, plan.gemm.boxes}), kMax32BitSize);
    const int64_t blocks = std::clamp<int64_t>(together / plan.gemm.channel_tiles, 1, boxes);
    plan.add("implicit_gemm", plan.gemm.channel_tiles * blocks, kGemmThreads, plan.gemm.shared_memory, programmatic);
    return plan;
  }
  const int64_t collapsed = count_product({problem.in_group(), offsets, problem.out_channels});
  plan.workspace = count_product({collapsed, problem.itemsize == 2 ? 4 : 8});
  if (collapsed > 0)
    plan.add("collapse_taps", std::min(ceil_div(collapsed, kDirectThreads), kMaxBlocks), kDirectThreads);
  if (fits_columns(problem)) {
    const auto taps = [](const PoolDim& dim) {
      const bool overlap = dim.step() == 1 && dim.output() > 1 && dim.offsets().size() <= kMaxColumnTaps;
      return overlap ? static_cast<int>(dim.offsets().size()) : 0;
    };
    plan.column_taps = taps(dim1);
    const auto sample_threads = [&](int columns) {
      return count_product({problem.out_channels, dim0.output(), ceil_div(dim2.output(), columns),
                            ceil_div(dim1.output(), plan.column_taps > 0 ? kColumnRows : 1)});
    };
    // Two columns where their window is square, as its taps then are all in registers.
    if (plan.column_taps > 0 && plan.column_taps == taps(dim2) &&
        count_product({problem.batch, sample_threads(2)}) >= device.multiprocessors * kMinColumnThreads)
      plan.columns = 2;
    plan.threads = sample_threads(plan.columns);
    const int64_t samples = kMax32BitSize / plan.threads;  // of a launch
    const int64_t launches = ceil_div(problem.batch, samples);
    if (launches <= kMaxColumnLaunches) {
      plan.variant = plan.columns == 2 ? "one thread two columns" : "one thread a column";
      plan.kernel = PoolKernel::kColumns;
      plan.add("column_conv", ceil_div(std::min(problem.batch, samples) * plan.threads, kDirectThreads), kDirectThreads,
               0, programmatic);
      plan.launch[plan.launches - 1].times = launches;
      return plan;
    }
    plan.columns = 1;
  }
  plan.variant = "one thread a position";
  plan.kernel = PoolKernel::kDirect;
  plan.threads =
      count_product({problem.batch, problem.outputs(), problem.groups, ceil_div(problem.per_group(), kDirectChannels)});
  plan.add("direct_conv", std::min(ceil_div(plan.threads, kDirectThreads), kMaxBlocks), kDirectThreads, 0,
           programmatic && plan.launches > 0);
  return plan;
}

}  // namespace fused
