// How the collapsed convolution is cut up as an implicit matrix product: out[co, o] = sum over k = (offset j, ci) of
// V[co, k] * x[ci, o*r + j]. A pure function of shape and device.
#pragma once

#include <algorithm>

#include "collapsed_conv.h"

namespace fused {

inline constexpr int kGemmWarps = 8;
inline constexpr int kGemmThreads = 32 * kGemmWarps;
inline constexpr int kGemmPositions = 32;  // of a warp
inline constexpr int kGemmStages = 3;      // of inputs in shared memory: one in use, two on their way
// So that two blocks fit on a multiprocessor. (16, 16, 16, 64, 64) -> 32 takes 277 us, with half of it 336.
inline constexpr int64_t kGemmStageBytes = 24 * 1024;
// Offsets. With 9 of them 500 us instead of 600 in bfloat16 at (32, 64, 128, 128) -> 64; with 3, 320 instead of 254 in
// float16 at (16, 256, 8192) -> 128.
inline constexpr int64_t kMinTransposedTaps = 4;
inline constexpr int64_t kMaxGemmDepth = 4096;  // products of a stage, each with an entry in a table
inline constexpr int64_t kMinGemmChannels = 5;  // output channels of a group: with fewer, most rows are empty

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
  bool transposed = false;          // rows become points before they are multiplied
  int point = 0;                    // then: elements from one point to the next
  int64_t boxes = 0;                // of a sample
  int64_t channel_tiles = 0;        // of all groups
  int64_t shared_memory = 0;

  constexpr bool fits() const { return tiles > 0; }
  constexpr int points() const { return patch[0] * patch[1] * patch[2]; }
  // Of a stage that the products read: a multiple of the channels of one lies together.
  constexpr bool runs() const { return transposed || lines == GemmLines::kPoints; }
  constexpr int out_channels() const { return 16 * tiles * channel_warps; }
  constexpr int positions() const { return kGemmPositions * kGemmWarps / channel_warps; }
};

// Blocks of a multiprocessor: sums of half types are kept twice, which takes the registers of two.
constexpr int gemm_blocks(int itemsize) { return itemsize == 2 ? 1 : 2; }
constexpr int gemm_step(int itemsize) { return itemsize == 2 ? 16 : 8; }  // depth of a tensor-core product

// Inputs of a stage, given the box.
inline void shape_stage(const AvgPoolProblem& problem, int64_t taps, GemmTiling& tiling) {
  const int64_t in_group = problem.in_group(), vector = 16 / problem.itemsize;
  const int64_t step = gemm_step(problem.itemsize);
  const int64_t p0 = tiling.patch[0], p1 = tiling.patch[1], p2 = tiling.patch[2];
  // About as many channels as a stage holds: what leaves the fewest empty in the last of them.
  const auto split = [&](int64_t most, int64_t unit) {
    const int64_t least = ceil_div(in_group, most);
    int64_t chunks = 0, channels = 0;
    for (int64_t trial = least; trial < least + 4; ++trial) {
      const int64_t each = round_up(ceil_div(in_group, trial), unit), needed = ceil_div(in_group, each);
      if (chunks > 0 && needed * each >= chunks * channels) continue;
      chunks = needed;
      channels = each;
    }
    tiling.channels = static_cast<int>(channels);
    tiling.chunks = static_cast<int>(chunks);
  };
  // Points lie an odd multiple of 32 bytes apart, so that the lanes of a product meet different banks.
  const auto padded = [&](int64_t elements) {
    while (elements * problem.itemsize % 64 != 32) elements += vector;
    return elements;
  };
  int64_t outer = 0, stage = 0;
  if (!problem.channels_last) {
    tiling.lines = GemmLines::kRows;
    tiling.line = static_cast<int>(round_up(p2 + vector - 1, vector));
    outer = padded(p0 * p1 * tiling.line);
    int64_t most = std::max<int64_t>(1, std::min(kGemmStageBytes / (outer * problem.itemsize), kMaxGemmDepth / taps));
    // Of half types a lane needs four channels at once; transposing them pays where they are read often.
    tiling.transposed = problem.itemsize == 2 && in_group >= step && taps >= kMinTransposedTaps;
    if (tiling.transposed || (most < in_group && most >= step)) most = std::max(step, most / step * step);
    split(most, most < in_group || tiling.transposed ? std::min(most, step) : 1);
    stage = tiling.channels * outer;
    if (tiling.transposed) tiling.point = static_cast<int>(padded(tiling.channels));
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
    split(std::max(step, std::min(most, kMaxGemmDepth / taps) / step * step), step);
    tiling.line = static_cast<int>(padded(tiling.channels));
    outer = p1 * p2 * tiling.line;
    stage = p0 * outer;
  }
  tiling.steps = static_cast<int>(ceil_div(tiling.channels * taps, step));
  tiling.outer = static_cast<int>(outer);
  tiling.stage = static_cast<int>(round_up(stage, vector));
  const int64_t staged = std::min(stage, kMax32BitSize) * kGemmStages;
  const int64_t transposed = tiling.transposed ? 2 * p0 * p1 * p2 * tiling.point : 0;
  // And the tables: where a product's inputs are, where positions are in the input and output, factors.
  tiling.shared_memory = (staged + transposed) * problem.itemsize + tiling.steps * step * 4 + tiling.positions() * 16 +
                         tiling.out_channels() * 16 + 16;
}

// Few candidates, since this runs in every call: widths and heights near powers of two that leave no narrow rest.
inline void choose_box(const AvgPoolProblem& problem, const DeviceProperties& device, int64_t taps,
                       GemmTiling& tiling) {
  const int64_t positions = tiling.positions();
  const auto even = [](int64_t size, int64_t most) { return ceil_div(size, ceil_div(size, most)); };
  const int64_t out[3] = {problem.dims[0].output(), problem.dims[1].output(), problem.dims[2].output()};
  int64_t step[kMaxSpatialDims], offsets[kMaxSpatialDims];
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    step[d] = problem.dims[d].step();
    offsets[d] = problem.dims[d].offsets().size();
  }
  GemmTiling best;
  double least = 0;
  for (int64_t width = std::min(positions, round_up(out[2], 8)); width >= 8; width /= 2)
    for (int64_t height = 1; height <= positions / std::min(width, out[2]); height *= 2) {
      const int64_t b2 = even(out[2], width), b1 = even(out[1], height), b0 = even(out[0], positions / (b1 * b2));
      const int64_t box[3] = {b0, b1, b2};
      double inputs = 1, boxes = 1;
      for (int d = 0; d < kMaxSpatialDims; ++d) {
        inputs *= static_cast<double>((box[d] - 1) * step[d] + offsets[d]);
        boxes *= static_cast<double>(ceil_div(out[d], box[d]));
      }
      // An input costs about as much to fetch as a position to compute per channel and few taps.
      const double cost = boxes * (4.0 * static_cast<double>(positions) + inputs);
      if (inputs > 1 << 16 || (best.fits() && cost >= least)) continue;
      GemmTiling trial = tiling;
      trial.boxes = static_cast<int64_t>(boxes);
      for (int d = 0; d < kMaxSpatialDims; ++d) {
        trial.box[d] = static_cast<int>(box[d]);
        trial.patch[d] = static_cast<int>((box[d] - 1) * step[d] + offsets[d]);
      }
      shape_stage(problem, taps, trial);
      if (trial.shared_memory > device.shared_memory_per_block) continue;
      best = trial;
      least = cost;
    }
  tiling = best;
}

// Empty where the product is not worth it or does not fit.
inline GemmTiling gemm_tiling(const AvgPoolProblem& problem, const DeviceProperties& device) {
  const int arch = device.compute_capability;
  // Half types need the products of this architecture, the others fast float64 ones.
  if (device.code_capability < 80 || (problem.itemsize > 2 && arch != 80 && arch != 90 && arch != 100)) return {};
  const int64_t per_group = problem.per_group(), taps = problem.offsets();
  if (per_group < kMinGemmChannels || taps > kMaxGemmDepth / 8 || !fits_32_bits(problem)) return {};
  if (count_product({problem.in_channels, problem.inputs()}) > kMax32BitSize || problem.outputs() > kMax32BitSize ||
      problem.out_channels > kMax32BitSize)
    return {};
  // Wide tiles fetch inputs less often, narrow ones leave fewer rows empty.
  GemmTiling best;
  double least = 0;
  // In float64 a warp's sums of 64 channels would not leave the registers for two blocks.
  const bool half = problem.itemsize == 2;
  const int widths[4][2] = {{1, 1}, {2, 1}, {half ? 4 : 2, half ? 1 : 2}, {4, 2}};
  for (int i = 0; i < (half ? 4 : 3); ++i) {
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
  if (!best.fits() || best.boxes > kMax32BitSize || best.channel_tiles > kMax32BitSize) return {};
  return best;
}

// Elements of V as the kernel takes it, a term.
inline int64_t gemm_weights(const AvgPoolProblem& problem, const GemmTiling& tiling) {
  return count_product(
      {tiling.channel_tiles, tiling.out_channels(), tiling.chunks, tiling.steps, gemm_step(problem.itemsize)});
}

}  // namespace fused
