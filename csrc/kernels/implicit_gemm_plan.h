// How the collapsed convolution is cut up as an implicit matrix product: out[co, o] = sum over k = (offset j, ci) of
// V[co, k] * x[ci, o*r + j]. A pure function of shape and device.
#pragma once

#include <algorithm>

#include "geometry.h"
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

inline constexpr int kGemmWarps = 8;
inline constexpr int kGemmThreads = 32 * kGemmWarps;
inline constexpr int kGemmPositions = 32;              // of a warp
inline constexpr int kGemmStages = 3;                  // of inputs in shared memory: one in use, two on their way
inline constexpr int64_t kGemmStageBytes = 24 * 1024;  // so that two blocks fit on a multiprocessor
inline constexpr int64_t kMostGemmDepth = 4096;        // products of a stage, each with an entry in a table
inline constexpr int64_t kMostGemmSize = 1 << 30;      // the kernel computes with 32 bits within a sample
inline constexpr int64_t kFewGemmChannels = 5;         // output channels of a group: with fewer, most rows are empty

// What is one line of inputs, copied at once, in memory and in shared memory.
enum class GemmLines {
  kRows,    // contiguous: a row of one channel
  kPixels,  // channels_last: a row of all channels
  kPoints,  // channels_last: some channels of one position
};

struct GemmTiling {
  int tiles = 0;          // of 16 output channels that a warp computes
  int channel_warps = 0;  // warps beside each other along the output channels; the others share the positions
  GemmLines lines = GemmLines::kRows;
  int box[kMaxSpatialDims] = {};    // outputs of a block
  int patch[kMaxSpatialDims] = {};  // inputs that they need
  int channels = 0;                 // input channels of a stage
  int chunks = 0;                   // stages that make up a sum
  int steps = 0;                    // tensor-core products deep that a stage is
  int line = 0;                     // elements from one line to the next
  int outer = 0;                    // and from one channel (kRows) or plane to the next
  int stage = 0;                    // elements
  int64_t boxes = 0;                // of a sample
  int64_t channel_tiles = 0;        // of all groups
  int64_t shared_memory = 0;

  constexpr bool fits() const { return tiles > 0; }
  constexpr int out_channels() const { return 16 * tiles * channel_warps; }
  constexpr int positions() const { return kGemmPositions * kGemmWarps / channel_warps; }
};

constexpr int gemm_step(int itemsize) { return itemsize == 2 ? 16 : 8; }  // depth of a tensor-core product

constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Inputs of a stage, given the box.
inline void shape_stage(const AvgPoolProblem& problem, int64_t taps, GemmTiling& tiling) {
  const int64_t in_group = problem.in_channels / problem.groups, vector = 16 / problem.itemsize;
  const int64_t step = gemm_step(problem.itemsize);
  const int64_t p0 = tiling.patch[0], p1 = tiling.patch[1], p2 = tiling.patch[2];
  // As many channels as a stage holds; several stages take whole products of them.
  const auto split = [&](int64_t most, int64_t unit) {
    const int64_t chunks = ceil_div(in_group, most);
    tiling.channels = static_cast<int>(round_up(ceil_div(in_group, chunks), unit));
    tiling.chunks = static_cast<int>(ceil_div(in_group, tiling.channels));
  };
  int64_t outer = 0, stage = 0;
  if (!problem.channels_last) {
    tiling.lines = GemmLines::kRows;
    tiling.line = static_cast<int>(round_up(p2 + vector - 1, vector));
    // Channels lie an odd multiple of 32 bytes apart, so that the lanes of a product meet different banks.
    outer = p0 * p1 * tiling.line;
    while (outer * problem.itemsize % 64 != 32) outer += vector;
    int64_t most = std::max<int64_t>(1, std::min(kGemmStageBytes / (outer * problem.itemsize), kMostGemmDepth / taps));
    if (most < in_group && most >= step) most = most / step * step;
    split(most, most < in_group && most >= step ? step : 1);
    stage = tiling.channels * outer;
  } else if (problem.groups == 1 && in_group < step) {
    tiling.lines = GemmLines::kPixels;
    tiling.channels = static_cast<int>(in_group);
    tiling.chunks = 1;
    tiling.line = static_cast<int>(round_up(p2 * in_group + vector - 1, vector));
    outer = p1 * tiling.line;
    stage = p0 * outer;
  } else {
    tiling.lines = GemmLines::kPoints;
    const int64_t positions = p0 * p1 * p2,
                  most = kGemmStageBytes / (positions * problem.itemsize) - 32 / problem.itemsize;
    split(std::max(step, std::min(most, kMostGemmDepth / taps) / step * step), step);
    tiling.line = tiling.channels;
    while (tiling.line * problem.itemsize % 64 != 32) tiling.line += static_cast<int>(vector);
    outer = p1 * p2 * tiling.line;
    stage = p0 * outer;
  }
  tiling.steps = static_cast<int>(ceil_div(tiling.channels * taps, step));
  tiling.outer = static_cast<int>(outer);
  // What lies beyond a box is computed from what lies in it, so a stage ends in nothing.
  tiling.stage = static_cast<int>(round_up(stage, vector));
  tiling.shared_memory = std::min(stage, kMostGemmSize) * problem.itemsize * kGemmStages +  // inputs
                         static_cast<int64_t>(tiling.steps) * step * 4 +  // where a product's inputs are
                         tiling.positions() * 16 + tiling.out_channels() * 16 +
                         16;  // positions in the input and output, factors
}

// Few candidates, since this runs in every call: widths and heights near powers of two that leave no narrow rest.
inline void choose_box(const AvgPoolProblem& problem, const DeviceProperties& device, int64_t taps,
                       GemmTiling& tiling) {
  const int64_t positions = tiling.positions();
  const auto even = [](int64_t size, int64_t most) { return ceil_div(size, ceil_div(size, most)); };
  const int64_t out[3] = {problem.dims[0].output(), problem.dims[1].output(), problem.dims[2].output()};
  GemmTiling best;
  double least = 0;
  for (int64_t width = positions; width >= 8; width /= 2)
    for (int64_t height = 1; height <= positions / std::min(width, out[2]); height *= 2) {
      GemmTiling trial = tiling;
      const int64_t b2 = even(out[2], width), b1 = even(out[1], height), b0 = even(out[0], positions / (b1 * b2));
      const int64_t box[3] = {b0, b1, b2};
      double inputs = 1;
      trial.boxes = 1;
      for (int d = 0; d < kMaxSpatialDims; ++d) {
        const int64_t patch = (box[d] - 1) * problem.dims[d].step() + problem.dims[d].offsets().size();
        inputs *= static_cast<double>(patch);
        if (inputs > 1 << 16) break;
        trial.box[d] = static_cast<int>(box[d]);
        trial.patch[d] = static_cast<int>(patch);
        trial.boxes *= ceil_div(out[d], box[d]);
      }
      if (inputs > 1 << 16) continue;
      shape_stage(problem, taps, trial);
      if (trial.shared_memory > device.shared_memory_per_block) continue;
      // An input costs about as much to fetch as a position to compute per channel and few taps.
      const double cost = static_cast<double>(trial.boxes) * (4.0 * static_cast<double>(positions) + inputs);
      if (best.fits() && cost >= least) continue;
      best = trial;
      least = cost;
    }
  tiling = best;
}

// Empty where the product is not worth it or does not fit.
inline GemmTiling gemm_tiling(const AvgPoolProblem& problem, const DeviceProperties& device) {
  const int arch = device.compute_capability;
  // Half types need the products of this architecture, the others fast float64 ones.
  if (arch < 80 || (problem.itemsize > 2 && arch != 80 && arch != 90 && arch != 100)) return {};
  const int64_t in_group = problem.in_channels / problem.groups, per_group = problem.out_channels / problem.groups;
  if (in_group == 0 || per_group < kFewGemmChannels) return {};
  int64_t taps = 1;
  double inputs = static_cast<double>(problem.in_channels), outputs = 1;
  for (const PoolDim& dim : problem.dims) {
    const Range offsets = dim.offsets();
    if (offsets.size() == 0 || offsets.size() > kMostGemmDepth || dim.conv.input > kMostGemmSize ||
        std::abs(offsets.begin) > kMostGemmSize || dim.output() > kMostGemmSize || dim.step() > kMostGemmSize)
      return {};
    taps *= offsets.size();
    if (taps > kMostGemmDepth / 8) return {};
    if (dim.conv.dilation > dim.pool_kernel)
      for (int64_t j = offsets.begin; j < offsets.end; ++j)
        if (dim.is_hole(j)) return {};
    inputs *= static_cast<double>(dim.conv.input);
    outputs *= static_cast<double>(dim.output());
  }
  if (inputs > kMostGemmSize || outputs > kMostGemmSize || problem.out_channels > kMostGemmSize) return {};
  // Wide tiles fetch inputs less often, narrow ones leave fewer rows empty.
  GemmTiling best;
  double least = 0;
  const int widths[4][2] = {{1, 1}, {2, 1}, {problem.itemsize == 2 ? 4 : 2, problem.itemsize == 2 ? 1 : 2}, {4, 2}};
  for (int i = 0; i < (problem.itemsize == 2 ? 4 : 3); ++i) {
    GemmTiling tiling;
    tiling.tiles = widths[i][0];
    tiling.channel_warps = widths[i][1];
    tiling.channel_tiles = ceil_div(per_group, tiling.out_channels());
    const double cost = static_cast<double>(tiling.channel_tiles) * (tiling.out_channels() + 8);
    if (best.fits() && cost > least) continue;
    best = tiling;
    least = cost;
  }
  best.channel_tiles *= problem.groups;
  choose_box(problem, device, taps, best);
  if (!best.fits() || best.boxes > kMostGemmSize || best.channel_tiles > kMostGemmSize) return {};
  return best;
}

// Numbers that V is split into: half types would not hold it. (float16 takes two of them, bfloat16 three.)
constexpr int gemm_terms(int itemsize) { return itemsize == 2 ? 3 : 1; }

// Elements of V as the kernel takes it, a term.
inline int64_t gemm_weights(const AvgPoolProblem& problem, const GemmTiling& tiling) {
  return tiling.channel_tiles * tiling.out_channels() * tiling.chunks * tiling.steps * gemm_step(problem.itemsize);
}

}  // namespace fused
