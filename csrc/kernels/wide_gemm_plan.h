// Where the product of whole warpgroups fits, and how it is cut up: half types, many channels on both sides, stride 1. A
// pure function of shape and device.
#pragma once

#include <algorithm>

#include "collapsed_conv.h"

namespace fused {

// Only the code of 9.0a has these products. The build says where it may hold other code for devices of 9.0.
#ifdef FUSED_KERNELS_PLAIN_SM90
inline constexpr bool kWarpgroupProducts = false;
#else
inline constexpr bool kWarpgroupProducts = true;
#endif

inline constexpr int kWarpgroup = 128;  // threads
inline constexpr int kWideConsumers =
    2;  // warpgroups that multiply, behind one that loads: a warp V, the others inputs
inline constexpr int kWideThreads = kWarpgroup * (1 + kWideConsumers);
inline constexpr int kWideLoaders = kWarpgroup - 32;
// Registers of a thread that loads, and of one that multiplies: multiples of eight, as many together as at the start.
inline constexpr int kWideLoadRegisters = 104, kWideMultiplyRegisters = 200;
inline constexpr int kWideChannels = 64;    // output channels of a tile
inline constexpr int kWidePositions = 128;  // of a consumer
inline constexpr int kWideTile = kWidePositions * kWideConsumers;
inline constexpr int kWideDepth = 16;  // input channels of a product
// At most, of a sum that the tensor cores make: what they cut off, 2^-23 of it each time, stays a hundredth of what rounding
// to a half type does.
inline constexpr int kWideProducts = 18;
inline constexpr int64_t kWideGroupBytes = 30 * 1024;  // of a group of V that does not stay, at most
inline constexpr int kMaxWideSlots =
    4;  // chunks of inputs in shared memory; with one, loaders and consumers would wait for ever
inline constexpr int kWideWeightSlots = 4;      // groups of V, where not all of them fit; at least two
inline constexpr int kMaxWideWeightSlots = 32;  // where all of V stays
// Of a chunk, unless a single product's inputs are more: what takes longer to multiply than its first byte to arrive.
inline constexpr int64_t kWideSlotBytes = 17 * 1024;
inline constexpr int64_t kMaxWideSegments = 32;

// A row of outputs and the inputs beyond its end that they need lie in one line with the next row, so that an offset is a
// shift. The positions in between are computed for nothing.
struct WideTiling {
  int run = 0;           // inputs of a row that are one aligned vector where rows begin with one: 4 or 2
  int skip = 0;          // points before the first of a line, which begins with a run
  int pitch = 0;         // from one row to the next, whole runs
  int segments = 0;      // offsets of the leading two dimensions
  int points = 0;        // inputs of a segment and channel, whole runs
  int next_segment = 0;  // from one segment's inputs to the next's: rows of the line, or all points
  int line = 0;          // points of all segments
  int half = 0;          // from eight channels of a block to the other eight: odd, so that lanes write both at once
  int blocks = 0;        // of input channels, each a product deep
  int depth = 0;         // blocks of a chunk
  int group = 0;         // steps, an offset of a block each, whose products make a sum
  int groups = 0;        // of a job
  int lead = 0;          // groups that one warpgroup is ahead of the other
  int slots = 0;         // chunks in shared memory
  int weight_slots = 0;  // and groups of V: all where it stays there from job to job
  int64_t lines = 0;     // tiles of a plane of outputs
  int64_t channel_tiles = 0;  // of all groups
  int64_t shared_memory = 0;

  constexpr bool fits() const { return slots > 0; }
  constexpr bool keeps_weights() const { return weight_slots == groups; }
  constexpr int slot() const { return depth * kWideDepth * half; }  // elements
};

// Bytes of a step's V.
constexpr int64_t wide_step_bytes(bool bfloat16) { return kWideChannels * kWideDepth * 2 * weight_terms(2, bfloat16); }

// Empty where it does not fit or would compute too much for nothing.
inline WideTiling wide_tiling(const AvgPoolProblem& problem, const DeviceProperties& device) {
  if (!kWarpgroupProducts || device.compute_capability != 90 || device.code_capability != 90 || problem.itemsize != 2)
    return {};
  const int64_t per_group = problem.per_group(), in_group = problem.in_group();
  if (in_group < kWideDepth || per_group <= kWideChannels / 2 || !fits_32_bits(problem)) return {};
  if (count_product({problem.in_channels, problem.inputs()}) > kMax32BitSize ||
      count_product({problem.out_channels, problem.outputs()}) > kMax32BitSize)
    return {};
  for (const PoolDim& dim : problem.dims)
    if (dim.step() != 1) return {};
  const PoolDim &dim0 = problem.dims[0], &dim1 = problem.dims[1], &dim2 = problem.dims[2];
  const int64_t segments = dim0.offsets().size() * dim1.offsets().size();
  if (segments > kMaxWideSegments) return {};
  WideTiling tiling;
  const int64_t run = dim2.conv.input % 4 == 0 ? 4 : 2, reach = dim2.offsets().size() - 1;
  const int64_t skip = dim2.offsets().begin & (run - 1);
  // The first run of a row begins with skipped points, which count as the end of the row before: there are inputs at neither
  // place, unless the first offset lies beyond the first input.
  if (skip > 0 && dim2.offsets().begin > 0) return {};
  const int64_t pitch = round_up(dim2.output() + reach, run), points = round_up(kWideTile + reach + skip, run);
  tiling.run = static_cast<int>(run);
  tiling.skip = static_cast<int>(skip);
  tiling.pitch = static_cast<int>(pitch);
  tiling.segments = static_cast<int>(segments);
  tiling.points = static_cast<int>(points);
  // Segments of one plane are the same line, rows further on: together they are fewer inputs where a row is shorter.
  const int64_t next_segment = dim0.offsets().size() == 1 ? std::min(pitch, points) : points;
  const int64_t line = (segments - 1) * next_segment + points;
  tiling.next_segment = static_cast<int>(next_segment);
  const int64_t half = round_up(line + 7, 8) - 7;
  tiling.line = static_cast<int>(line);
  tiling.half = static_cast<int>(half);
  const int64_t blocks = ceil_div(in_group, kWideDepth), block_bytes = half * kWideDepth * 2;
  tiling.blocks = static_cast<int>(blocks);
  tiling.lines = ceil_div((dim1.output() - 1) * pitch + dim2.output(), kWideTile);
  tiling.channel_tiles = problem.groups * ceil_div(per_group, kWideChannels);
  // Where half of the products are for nothing, those of single warps are as fast.
  const int64_t used = dim1.output() * dim2.output() * problem.out_channels;
  if (2 * used < tiling.lines * kWideTile * tiling.channel_tiles * kWideChannels) return {};
  const int64_t depth = std::clamp<int64_t>(kWideSlotBytes / block_bytes, 1, blocks);
  tiling.depth = static_cast<int>(depth);
  const int64_t step_bytes = wide_step_bytes(problem.bfloat16), steps = depth * problem.offsets();
  // V, tables of where the inputs of two jobs are, and chunks of them; with no number of slots for V, all of it.
  const int64_t tables = round_up(2 * line * 4, 128), space = device.shared_memory_per_block - 1024 - tables;
  const auto cut = [&](int64_t most, int64_t weight_slots, int64_t least) {
    const int64_t group = ceil_div(steps, ceil_div(steps, most));
    const auto groups_of = [&](int64_t of_blocks) { return ceil_div(of_blocks * problem.offsets(), group); };
    const int64_t groups = blocks / depth * groups_of(depth) + groups_of(blocks % depth);
    const int64_t weights = (weight_slots > 0 ? weight_slots * group : blocks * problem.offsets()) * step_bytes;
    if (weight_slots == 0) weight_slots = groups;
    const int64_t slot = depth * block_bytes;
    const int64_t slots = std::min<int64_t>(kMaxWideSlots, std::max<int64_t>(space - weights, 0) / slot);
    tiling.group = static_cast<int>(group);
    tiling.groups = static_cast<int>(groups);
    tiling.weight_slots = static_cast<int>(weight_slots);
    tiling.slots = static_cast<int>(slots);
    tiling.lead = static_cast<int>(std::clamp<int64_t>(weight_slots - 1, 1, groups_of(depth)));
    tiling.shared_memory = weights + tables + slots * slot;
    return weight_slots <= kMaxWideWeightSlots && slots >= least;
  };
  // All of V stays where that leaves room for as many chunks.
  const int64_t most = kWideProducts / weight_terms(2, problem.bfloat16);
  if (cut(most, 0, kMaxWideSlots)) return tiling;
  for (int64_t fewer = std::min(most, kWideGroupBytes / step_bytes); fewer > 1; fewer /= 2)
    for (int64_t weight_slots = kWideWeightSlots; weight_slots >= 2; --weight_slots)
      if (cut(fewer, weight_slots, 2)) return tiling;
  return {};
}

// Elements of V, a term.
inline int64_t wide_weights(const AvgPoolProblem& problem, const WideTiling& tiling) {
  return count_product({tiling.channel_tiles, kWideChannels, tiling.blocks, kWideDepth, problem.offsets()});
}

}  // namespace fused
