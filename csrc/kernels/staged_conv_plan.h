// Where the staged convolution fits, and how it cuts up its work. A pure function of shape and device.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "collapsed_conv.h"

namespace fused {

inline constexpr int kStagedConsumers = 4;  // warps that compute; with eight of them or one row a warp it took as long
inline constexpr int kStagedThreads = 32 * kStagedConsumers + 32;
// Rows of a tile. (128, 3, 16, 32, 32) -> 16 channels takes 66 us on H200, a sixth more with 8 rows; batch 1, where blocks
// are few, 14.0 us with 8, a tenth more with 16.
inline constexpr int kStagedRows = 16;
inline constexpr int kFewStagedRows = 8;
inline constexpr int kStagedWarpRows = 2;   // of these that a warp computes at once
inline constexpr int kStagedColumns = 32;   // of a tile
inline constexpr int kStagedChannels = 16;  // output channels at a time
inline constexpr int kStagedSlots = 4;      // input planes: two in use, two on their way

// Blocks of a multiprocessor, as the registers allow: float32 adds up in float64.
constexpr int staged_blocks(int itemsize) { return itemsize == 2 ? 3 : 2; }

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
inline int64_t staged_shared_memory(const AvgPoolProblem& problem, const StagedLayout& layout) {
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
  // It computes with 32 bits within weights and the count of steps. (Sizes are checked first: products could overflow.)
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    const PoolDim& dim = problem.dims[d];
    const Range offsets = dim.offsets();
    if (dim.step() != 1 || offsets.size() > 2 || (d > 0 && offsets.size() != 2) || offsets.size() == 0) return false;
    if (dim.conv.kernel > 64 || std::abs(offsets.begin) > kMax32BitSize || dim.output() > kMax32BitSize ||
        dim.conv.input > kMax32BitSize || dim.has_holes())
      return false;
  }
  if (problem.in_channels > 4096 || problem.out_channels > 4096 ||
      problem.dims[1].output() * problem.dims[2].output() > kMax32BitSize ||
      staged_steps(problem, kFewStagedRows) > kMax32BitSize)
    return false;
  return staged_shared_memory(problem, staged_layout(problem, kStagedRows)) <= device.shared_memory_per_block;
}

}  // namespace fused
