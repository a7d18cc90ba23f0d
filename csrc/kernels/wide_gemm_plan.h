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
inline constexpr int kWideChannels = 64;    // output channels of a tile
inline constexpr int kWidePositions = 128;  // of a consumer
inline constexpr int kWideTile = kWidePositions * kWideConsumers;
inline constexpr int kWideDepth = 16;     // input channels of a product
inline constexpr int kWideProducts = 12;  // at most, of a sum that the tensor cores make
inline constexpr int kMaxWideSlots =
    4;  // chunks of inputs in shared memory; with one, loaders and consumers would wait for ever
inline constexpr int kMaxWideWeightSlots = 3;  // groups of V, at least two
// Of a chunk, unless a single product's inputs are more: what takes longer to multiply than its first byte to arrive.
inline constexpr int64_t kWideSlotBytes = 34 * 1024;
inline constexpr int64_t kMaxWideSegments = 32;

// A row of outputs and the inputs beyond its end that they need lie in one line with the next row, so that an offset is a
// shift. The positions in between are computed for nothing.
struct WideTiling {
  int skip = 0;               // inputs before the first of a row, so that rows begin with an even one
  int pitch = 0;              // from one row to the next, even
  int segments = 0;           // offsets of the leading two dimensions, each with its own inputs
  int points = 0;             // inputs of a segment and channel, even
  int blocks = 0;             // of input channels, each a product deep
  int depth = 0;              // blocks of a chunk
  int group = 0;              // steps, an offset of a block each, whose products make a sum
  int slots = 0;              // chunks in shared memory
  int weight_slots = 0;       // and groups of V
  int64_t lines = 0;          // tiles of a plane of outputs
  int64_t channel_tiles = 0;  // of all groups
  int64_t shared_memory = 0;

  constexpr bool fits() const { return slots > 0; }
  constexpr int line() const { return segments * points; }            // vectors of eight channels in a chunk
  constexpr int slot() const { return depth * kWideDepth * line(); }  // elements
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
  const int64_t skip = dim2.offsets().begin & 1, reach = dim2.offsets().size() - 1 + skip;
  const int64_t pitch = round_up(dim2.output() + reach, 2), points = round_up(kWideTile + reach, 2);
  tiling.skip = static_cast<int>(skip);
  tiling.pitch = static_cast<int>(pitch);
  tiling.segments = static_cast<int>(segments);
  tiling.points = static_cast<int>(points);
  const int64_t blocks = ceil_div(in_group, kWideDepth), block_bytes = segments * points * kWideDepth * 2;
  const int64_t depth = std::clamp<int64_t>(kWideSlotBytes / block_bytes, 1, blocks);
  tiling.blocks = static_cast<int>(blocks);
  tiling.depth = static_cast<int>(depth);
  tiling.lines = ceil_div((dim1.output() - 1) * pitch + dim2.output(), kWideTile);
  tiling.channel_tiles = problem.groups * ceil_div(per_group, kWideChannels);
  // Where half of the products are for nothing, those of single warps are as fast.
  const int64_t used = dim1.output() * dim2.output() * problem.out_channels;
  if (2 * used < tiling.lines * kWideTile * tiling.channel_tiles * kWideChannels) return {};
  const int64_t steps = depth * problem.offsets(), most = kWideProducts / weight_terms(2, problem.bfloat16);
  tiling.group = static_cast<int>(ceil_div(steps, ceil_div(steps, most)));
  // V, a table of where the inputs of a job are, and chunks of them.
  const int64_t slot = depth * block_bytes, weights = tiling.group * wide_step_bytes(problem.bfloat16);
  for (int64_t weight_slots = kMaxWideWeightSlots; weight_slots >= 2; --weight_slots) {
    const int64_t fixed = weight_slots * weights + round_up(segments * points * 4, 128);
    const int64_t slots = std::min<int64_t>(kMaxWideSlots, (device.shared_memory_per_block - 1024 - fixed) / slot);
    if (slots < 2) continue;
    tiling.weight_slots = static_cast<int>(weight_slots);
    tiling.slots = static_cast<int>(slots);
    tiling.shared_memory = fixed + slots * slot;
    return tiling;
  }
  return {};
}

// Elements of V, a term.
inline int64_t wide_weights(const AvgPoolProblem& problem, const WideTiling& tiling) {
  return count_product({tiling.channel_tiles, kWideChannels, tiling.blocks, kWideDepth, problem.offsets()});
}

}  // namespace fused
