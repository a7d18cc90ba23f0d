// Where the staged convolution fits, and how it cuts up its work. A pure function of shape and device.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "collapsed_conv.h"

namespace fused {

inline constexpr int kStagedConsumers = 8;  // warps that compute
inline constexpr int kStagedThreads = 32 * (kStagedConsumers + 2);
inline constexpr int kStagedBlocks = 2;  // of a multiprocessor, as registers allow; with three, half types took longer
// Rows of a tile: 8 while there are fewer tiles than multiprocessors, so that twice as many blocks share the work.
inline constexpr int kStagedRows = 16;
inline constexpr int kFewStagedRows = 8;
// Of a tile, in strips of eight: a warp has one of them and half the rows.
inline constexpr int kStagedColumns = 32;
inline constexpr int kStagedChannels = 16;  // output channels at a time
// Of a buffer's results in the output: channels, or rows of pixels.
inline constexpr int kMaxStagedRuns = std::max(kStagedChannels, kStagedRows);
inline constexpr int kStagedSlots = 4;      // input planes: two in use, two on their way
inline constexpr int kStagedBuffers = 2;    // of results: one computed, one stored
inline constexpr int kStagedLine = 128;     // bytes of a line of memory
inline constexpr int kStagedPixel = 32;     // bytes that a channels_last position of the input stays below
inline constexpr int kStagedSignals = 128;  // bytes of shared memory beside what the layout says

// Rows that a warp computes at once. float32 adds up in float64, of which registers hold four; half types took 36 us with
// eight, 38 with four.
constexpr int staged_rows_together(int itemsize) { return itemsize == 2 ? 8 : 4; }

// Sizes of the staged kernel's shared arrays, in elements of the dtype.
struct StagedLayout {
  int rows = 0;       // of outputs of a tile
  int slot_rows = 0;  // of inputs in the ring, with those that a warp reads beyond its tile
  int slot_row = 0;   // from one of them to the next
  int slot = 0;       // one input plane of all channels in the ring
  // Of the output in a tile: its results are one run there, of each channel or of all that come last.
  bool whole_rows = false;
  int result_row = 0;    // from one row of results to the next
  int result_pitch = 0;  // from one channel of results to the next
  int buffer = 0;        // from one buffer of results to the next
  int results = 0;       // where the results begin, bytes
};

// How many of the lanes that write results together meet in one bank, where channels are `pitch` elements apart.
inline int staged_bank_conflicts(int64_t pitch, int itemsize) {
  int words[32] = {}, most = 0;
  for (int g = 0; g < 8; ++g) {
    int64_t previous = -1;
    for (int t = 0; t < 4; ++t) {
      const int64_t word = (g * pitch + t) * itemsize / 4;
      if (word != previous) most = std::max(most, ++words[word % 32]);
      previous = word;
    }
  }
  return most;
}

inline StagedLayout staged_layout(const AvgPoolProblem& problem, int rows) {
  const int64_t size = 16 / problem.itemsize, line = kStagedLine / problem.itemsize;
  const int64_t columns = std::min<int64_t>(problem.dims[2].output(), kStagedColumns);
  StagedLayout layout;
  layout.rows = rows;
  layout.slot_rows = std::max(rows, rows / 2 + staged_rows_together(problem.itemsize)) + 1;
  // Up to a vector before the first element that is meant.
  const int64_t pixel = problem.channels_last ? problem.in_channels : 1;
  layout.slot_row = static_cast<int>(round_up((kStagedColumns + 1) * pixel + size - 1, size));
  // Neighbours in the ring are half a line apart, for the lanes of a warp read from two of them.
  layout.slot = static_cast<int>(
      round_up(problem.in_channels / pixel * layout.slot_rows * layout.slot_row + line / 2, line) - line / 2);
  const int64_t width = problem.dims[2].output(), channels = round_up(problem.out_channels, kStagedChannels);
  layout.whole_rows = columns == width;
  if (problem.channels_last) {
    // As far apart as in the output, up to whole lines; whole rows without a gap.
    layout.result_row =
        static_cast<int>(columns * problem.out_channels + (width - columns) * problem.out_channels % line);
    layout.result_pitch = 1;
    layout.buffer = static_cast<int>(round_up(rows * layout.result_row + line - 1, line));
  } else {
    // Whole rows follow one another without a gap, as in the output.
    layout.result_row = static_cast<int>(layout.whole_rows ? columns : columns + size);
    int64_t pitch = rows * layout.result_row + line - 1;
    const int64_t volume = problem.outputs();
    if (!layout.whole_rows) {
      pitch = round_up(pitch, line) + size;
    } else {
      // As far apart as in the output, up to whole lines, or vectors where that would have too many lanes meet.
      const int64_t unit = staged_bank_conflicts(volume % line, problem.itemsize) <= 2 ? line : size;
      while ((pitch - volume) % unit != 0 || (unit == size && staged_bank_conflicts(pitch, problem.itemsize) > 2))
        ++pitch;
    }
    layout.result_pitch = static_cast<int>(pitch);
    layout.buffer = static_cast<int>(kStagedChannels * pitch);
  }
  layout.results = static_cast<int>(round_up((problem.in_channels * 8 + 1) * channels * 8, kStagedLine));
  return layout;
}

// V and what is added to its products, two buffers of results and the ring of inputs, bytes.
inline int64_t staged_shared_memory(const AvgPoolProblem& problem, const StagedLayout& layout) {
  return layout.results +
         (static_cast<int64_t>(kStagedBuffers) * layout.buffer + static_cast<int64_t>(kStagedSlots) * layout.slot) *
             problem.itemsize;
}

// Blocks that a multiprocessor takes at once. The system keeps a part of its shared memory for each of them.
inline int64_t staged_blocks(int64_t shared_memory, const DeviceProperties& device) {
  constexpr int64_t kKept = 1024;
  return std::clamp<int64_t>((device.shared_memory_per_block + kKept) / (shared_memory + kStagedSignals + kKept), 1,
                             kStagedBlocks);
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
  if (device.code_capability < 90) return false;
  if (problem.groups != 1 || problem.itemsize == 8) return false;
  // Pixels that are a few channels, and whose results are a run: longer ones fill the steps of the matrix product.
  if (problem.channels_last &&
      (problem.in_channels >= kStagedPixel / problem.itemsize || problem.out_channels > kStagedChannels))
    return false;
  // It computes with 32 bits within weights, rows and the count of steps. (Sizes are checked first: products could overflow.)
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    const PoolDim& dim = problem.dims[d];
    const Range offsets = dim.offsets();
    if (dim.step() != 1 || offsets.size() > 2 || (d > 0 && offsets.size() != 2) || offsets.size() == 0) return false;
    if (dim.conv.kernel > 64 || std::abs(offsets.begin) > kMax32BitSize || dim.output() > kMax32BitSize ||
        dim.conv.input > kMax32BitSize || dim.has_holes())
      return false;
  }
  const PoolDim& row = problem.dims[2];
  if (problem.in_channels > 4096 || problem.out_channels > 4096 ||
      (problem.channels_last &&
       (row.conv.input + std::abs(row.offsets().begin)) * problem.in_channels > kMax32BitSize) ||
      problem.dims[1].output() * problem.dims[2].output() > kMax32BitSize ||
      staged_steps(problem, kFewStagedRows) > kMax32BitSize)
    return false;
  return staged_shared_memory(problem, staged_layout(problem, kStagedRows)) + kStagedSignals <=
         device.shared_memory_per_block;
}

}  // namespace fused
