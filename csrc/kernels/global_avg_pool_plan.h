// Launch plan of the global-pool family: a pure function of shape and device. A plane's split into chunks depends on the
// plane alone, never on the batch, so that a sample's result is the same bits in every batch.
#pragma once

#include <algorithm>

#include "global_avg_pool.h"
#include "plan.h"

namespace fused {

// Per dimension, what one launch of a CUDA kernel takes as an argument. More segments take more launches.
inline constexpr int kMaxSegments = 32;

struct GlobalPoolProblem {
  int64_t batch = 0;
  int64_t channels = 0;
  int64_t plane = 0;  // elements
  int itemsize = 4;
  bool channels_last = false;  // the input lies in memory as (N, plane, C)
  // Where not all cells of the plane meet all taps, the sums are taken per region: a grid of boxes.
  bool boxes = false;
  int64_t regions = 1;
  int64_t parts = 1;  // launches that sum them
  // Spatial sizes, the innermost last.
  int64_t sizes[kMaxSpatialDims] = {1, 1, 1};
  // Only the transposed convolutions have these.
  bool chain = false;
  bool logsumexp = false;
  int64_t out_channels = 0;
  int64_t groups = 1;
  int64_t taps = 1;
};

// The problem of global_avg_pool on an input of these sizes.
inline GlobalPoolProblem global_pool_problem(const std::vector<int64_t>& sizes, int itemsize, bool channels_last) {
  GlobalPoolProblem problem;
  problem.batch = sizes[0];
  problem.channels = sizes[1];
  problem.plane = 1;
  for (size_t i = 2; i < sizes.size(); ++i) problem.plane *= sizes[i];
  problem.itemsize = itemsize;
  problem.channels_last = channels_last;
  std::copy(sizes.begin() + 2, sizes.end(), std::end(problem.sizes) - (sizes.size() - 2));
  return problem;
}

// The same behind a transposed convolution; `segments` cuts each spatial dimension of its input.
inline GlobalPoolProblem global_pool_problem(const ConvTranspose<int64_t>& conv, bool logsumexp, int itemsize,
                                             bool channels_last, const std::vector<Segmentation>& segments) {
  std::vector<int64_t> sizes{conv.batch, conv.in_channels};
  sizes.insert(sizes.end(), conv.input.begin(), conv.input.end());
  GlobalPoolProblem problem = global_pool_problem(sizes, itemsize, channels_last);
  for (int d = 0; d < conv.spatial_dims; ++d) {
    const auto count = static_cast<int64_t>(segments[d].segments.size());
    problem.regions *= count;
    problem.parts *= std::max<int64_t>(1, ceil_div(count, kMaxSegments));
    // Unless there is one region, the whole plane, that every tap meets.
    const std::vector<Range>& runs = segments[d].tap_range;
    if (segments[d].segments != std::vector<Range>{{0, conv.input[d]}} ||
        std::any_of(runs.begin(), runs.end(), [](const Range& run) { return run.size() == 0; }))
      problem.boxes = true;
    problem.taps *= conv.kernel[d];
  }
  problem.chain = true;
  problem.logsumexp = logsumexp;
  problem.out_channels = conv.out_channels;
  problem.groups = conv.groups;
  return problem;
}

inline std::vector<Segmentation> segment_inputs(const ConvTranspose<int64_t>& conv) {
  std::vector<Segmentation> result;
  for (int d = 0; d < conv.spatial_dims; ++d) result.push_back(segment_input(conv_dim(conv, d)));
  return result;
}

enum class SumKernel { kTile, kChunk, kBox, kBoxStream, kPlaneStream, kColumn, kColumnStream, kNone };

struct GlobalPoolPlan : Plan {
  SumKernel sum = SumKernel::kChunk;
  int64_t chunks = 1;          // partial sums per plane and region
  int64_t chunk_elements = 0;  // kChunk, and kColumnStream: of a channel; kBoxStream: of dimension `cut`
  int warps = 1;               // kChunk, kBox, kPlaneStream and whole samples: per chunk
  int cut = 0;                 // kBoxStream: the dimension that chunks share; of the innermost, loads
  int lanes = 1;               // kTile, kBoxStream and finish_mean: per plane
  int planes = 1;              // kTile: per block
  int width = 1;               // kColumn and the streams: elements per load
  int columns = 1;             // kColumn and the streams of columns and boxes: loads side by side, of a row of threads
  int64_t channel_blocks = 1;  // kColumn and kColumnStream: blocks side by side, for all channels
  int64_t items = 0;           // kColumnStream and kBoxStream: what their blocks share
  bool whole_planes = false;   // kColumnStream: an item is all chunks of a plane
  int64_t tap_blocks = 0;   // blocks of the summing kernel that sum the weight's taps: leading ones, which do no more;
                            // of kBoxStream all
  bool early_taps = false;  // whether the finishing kernel may read these sums before the summing kernel has ended
  int finish_columns = 1;   // output channels that a finishing block computes at once
  int finish_samples = 1;   // of a finishing block
  int finish_lanes = 1;     // per plane or region
};

inline constexpr int64_t kWarpBytes = 4096;       // what a warp takes of a chunk: eight loads of 16 bytes a lane
inline constexpr int kMaxWarps = 8;               // per chunk, and the warps of a block
inline constexpr int64_t kMaxChunks = 1024;       // partial sums per plane that a finishing block has to add up
inline constexpr int64_t kTilePlaneBytes = 2048;  // below this a warp cannot fill its loads from one plane
inline constexpr int64_t kTileBytes = 24576;      // staged in shared memory: nine blocks fit a multiprocessor of H200
inline constexpr int kTileThreads = 128;
inline constexpr int64_t kBoxBytes = 65536;  // of a plane per chunk: two rounds of a block's loads
inline constexpr int kBoxBlocks = 2;         // per multiprocessor, which the registers allow
inline constexpr int kChunksAhead = 8;       // partial sums that a lane of a finishing block has in flight

// channels_last. A block's row of threads takes up to 1024 bytes side by side.
inline constexpr int kColumnThreads = 256;
inline constexpr int kCellLoads = 8;         // in flight per thread, of 16 bytes
inline constexpr int kScalarCellLoads = 16;  // of one element
inline constexpr int kMaxColumns = 64;       // H200, (256, 2048, 7, 7) float32: with 32 it takes 13% longer
inline constexpr int kMaxScalarColumns = 128;
inline constexpr int64_t kThreadLoads = 32;  // per chunk: four rounds of kCellLoads
// Up to this many, one block of 16 columns takes a plane's cells whole, which saves the second launch.
inline constexpr int64_t kMostThreadLoads = 64;
inline constexpr int kNarrowColumns = 16;

// Streams: blocks that stay. Their threads are as many as a multiprocessor's shared memory holds the loads of.
inline constexpr int kStreamThreads = 768;  // per multiprocessor, of kColumnThreads a block or fewer
inline constexpr int kStreamLoads = 4;      // of a stage, of 16 bytes a thread
inline constexpr int kStreamStages = 4;     // three of them on their way
constexpr int64_t stream_bytes(int threads) { return int64_t{16} * kStreamStages * kStreamLoads * threads; }
// Contiguous planes of half types of this many vectors, and of other dtypes what tile_sums would sum. On H200, per cent of the
// time of a pure read, without and with a stream: float16 (32, 512, 56, 56), 120 and 109, (64, 512, 112, 112), 109 and 102;
// float32 (32, 512, 56, 56), 105 and 108.
inline constexpr int64_t kMinStreamVectors = 96;
inline constexpr int64_t kMaxStreamVectors = 2048;
// channels_last: of larger planes, column_sums reads 5 per cent faster.
inline constexpr int64_t kMaxStreamCells = 32768;
// Up to this many chunks, a block may sum a plane's one after another, where there are planes enough.
inline constexpr int64_t kStreamWholeChunks = 8;
static_assert(kStreamWholeChunks <= kChunksAhead);  // one lane of finish_mean adds up as many, in the same order
// How a block sums a plane: rows of `columns` loads side by side take turns in a chunk of about `cells` cells.
struct StreamShape {
  int rows, columns;
  int64_t cells;
};
constexpr StreamShape stream_shape(int64_t plane) {
  if (plane <= 64) return {2, 32, 64};
  if (plane <= 256) return {8, 16, 256};
  return {32, 8, plane <= 4096 ? 512 : 2048};
}
// Where there are several chunks, a thread has at most one channel's sum to go on with.
static_assert(stream_shape(2 * stream_shape(64).cells).rows >= 8 &&
              stream_shape(2 * stream_shape(256).cells).rows >= 8);

// box_stream: a warp takes a share of a plane, and of small planes as many as give a lane about kLaneLoads. On H200, a
// plane of (16, 64, 512, 512) float32 by 32, 64 and 128 KB: 281, 251 and 246 us; one sample of it: 25.9, 26.5 and 30.5.
// (32, 512, 56, 56) float16 with 32 loads a lane and 64: 40.1 and 36.6.
inline constexpr int kBoxThreads = 128;
inline constexpr int64_t kBoxChunks = 4;  // of a plane, where that is between these
inline constexpr int64_t kMinBoxBytes = 16384, kMaxBoxBytes = 65536;
inline constexpr int64_t kLaneLoads = 64;
// It counts in 32 bits: elements, up to 32 loads beyond the last, and taps, up to eight rounds of them.
inline constexpr int64_t kMaxBoxPlane = INT32_MAX - 1024, kMaxBoxTaps = INT32_MAX / 9;

inline constexpr int64_t kSampleBytes =
    65536;  // a block reads this in about a microsecond, less than another launch takes
inline constexpr int64_t kSamplePairs = 4096;  // channel sums and tap sums that it keeps in shared memory
inline constexpr int kManyTaps = 16;           // from here on 8 lanes share a sum of taps

// Threads per multiprocessor that sum taps which the finishing kernel reads early: as many as run at once, since the fences
// of the others would delay blocks that follow. On H200, 2 million of them, (8, 2048, 7, 7) -> 1000, take 82 us so, else 63.
inline constexpr int64_t kMaxEarlyTapThreads = 2048;
// Finishing blocks compute a run of output channels at once; their threads are the channels times slices of the depth, input
// channels and regions.
inline constexpr int kFinishThreads = 256;
inline constexpr int kFinishBlocks = 3;  // per multiprocessor
inline constexpr int kFinishColumns = 32;
inline constexpr int kFinishDepth = 256;  // sums in shared memory at a time
// Samples of a block, which share its reads of the weights, where there are enough of them.
inline constexpr int kFinishSamples = 4;
// Blocks that have all channels of a sample, for a logsumexp. Of more weights, a block reads longer than one more launch takes:
// on H200, (16, 64, 128, 128) with padding, 32768 of them, takes 28.9 us in one block a sample and 28.0 in two launches. Where
// chunks are many, each block would read them all: the same, channels_last, takes 44.4 us and 49.2.
inline constexpr int kSampleThreads = 512;
inline constexpr int kSampleBlocks = 2;  // per multiprocessor
inline constexpr int kSampleColumns = 128;
inline constexpr int64_t kMaxSampleWeights = 16384, kMaxChunkedWeights = 32768;
inline constexpr int64_t kMaxSampleRuns = 8;  // the same: one after another
inline constexpr int kRowThreads = kSampleColumns;

inline int power_of_two_at_least(int64_t value, int most) {
  int result = 1;
  while (result < value && result < most) result *= 2;
  return result;
}

inline GlobalPoolPlan plan_global_avg_pool(const GlobalPoolProblem& problem, const DeviceProperties& device) {
  GlobalPoolPlan plan;
  const int64_t planes = problem.batch * problem.channels;
  const int64_t plane_bytes = problem.plane * problem.itemsize;
  const int64_t outputs = problem.batch * (problem.logsumexp ? 1
                                           : problem.chain   ? problem.out_channels
                                                             : problem.channels);
  const int64_t depth = problem.channels / problem.groups * problem.regions;
  const int64_t pairs = problem.chain ? problem.channels * (problem.out_channels / problem.groups) : 0;
  plan.bytes_read = (planes * problem.plane + pairs * problem.taps) * problem.itemsize;
  plan.bytes_written = outputs * problem.itemsize;
  plan.operations = planes * problem.plane + pairs * problem.taps +
                    2 * (problem.chain ? problem.batch * problem.out_channels * depth : 0);
  if (outputs == 0) {
    plan.variant = "nothing to do";
    plan.sum = SumKernel::kNone;
    return plan;
  }
  plan.warps = power_of_two_at_least(ceil_div(plane_bytes, kWarpBytes), kMaxWarps);
  if (problem.chain && !problem.boxes && problem.channels * plane_bytes <= kSampleBytes &&
      pairs * problem.taps * problem.itemsize <= kSampleBytes && problem.channels + pairs <= kSamplePairs) {
    plan.variant = "one block a sample";
    plan.sum = SumKernel::kNone;
    plan.finish_columns = kSampleColumns;
    // More warps for each plane, as long as there are more than planes.
    while (plan.warps < kMaxWarps && 2 * plan.warps * problem.channels <= kSampleThreads / 32 &&
           plan.warps * 32 * 16 < plane_bytes)
      plan.warps *= 2;
    plan.add("whole_sample", problem.batch, kSampleThreads, (problem.channels + pairs) * 8);
    return plan;
  }

  if (problem.chain) {
    const int64_t threads = pairs * ceil_div(problem.regions, problem.parts) * (problem.taps >= kManyTaps ? 8 : 1);
    plan.tap_blocks = ceil_div(threads, 256);
    plan.early_taps = threads <= kMaxEarlyTapThreads * device.multiprocessors;
  }
  const int vector = 16 / problem.itemsize;
  // Blocks that stay: as many on each multiprocessor as make the rounds of items even.
  const auto add_stream = [&](const char* kernel, int64_t items, int threads) {
    const int64_t bytes = stream_bytes(threads);
    const int64_t most =
        std::clamp<int64_t>(device.shared_memory_per_block / (bytes + 1024), 1, kStreamThreads / threads);
    const auto rounds = [&](int64_t blocks) { return ceil_div(items, blocks * device.multiprocessors) * blocks; };
    int64_t resident = most;
    for (int64_t blocks = most - 1; 2 * blocks > most; --blocks)
      if (rounds(blocks) < rounds(resident)) resident = blocks;
    if (problem.chain) plan.tap_blocks = ceil_div(plan.tap_blocks * 256, threads);
    plan.add(kernel, plan.tap_blocks + std::min(items, resident * device.multiprocessors), threads, bytes);
  };
  const bool streams = !problem.boxes && stream_bytes(kColumnThreads) + 1024 <= device.shared_memory_per_block;
  const int64_t vectors = problem.plane % vector == 0 ? problem.plane / vector : 0;  // of a contiguous plane
  if (streams && problem.channels_last && problem.channels % vector == 0 && problem.plane > 0 &&
      problem.plane <= kMaxStreamCells) {
    plan.variant = "stream of channels";
    plan.sum = SumKernel::kColumnStream;
    plan.width = vector;
    const int64_t units = problem.channels / vector;
    const StreamShape shape = stream_shape(problem.plane);
    plan.channel_blocks = ceil_div(units, shape.columns);
    plan.columns = static_cast<int>(ceil_div(units, plan.channel_blocks));
    const int threads = static_cast<int>(std::min<int64_t>(kColumnThreads, round_up(shape.rows * plan.columns, 32)));
    plan.chunk_elements = ceil_div(problem.plane, std::max<int64_t>(1, problem.plane / shape.cells));
    plan.chunks = ceil_div(problem.plane, plan.chunk_elements);
    const int64_t columns = problem.batch * plan.channel_blocks;
    plan.whole_planes =
        !problem.chain && plan.chunks <= kStreamWholeChunks && 4 * columns >= 3 * device.multiprocessors;
    plan.items = columns * (plan.whole_planes ? 1 : plan.chunks);
    add_stream("column_stream", plan.items, threads);
  } else if (problem.channels_last) {
    plan.variant = "columns of channels";
    plan.sum = SumKernel::kColumn;
    plan.width = problem.channels % vector == 0 ? vector : 1;
    const int64_t units = problem.channels / plan.width;
    int64_t thread_loads = 0;
    const auto cut = [&](int most_columns) {
      plan.channel_blocks = ceil_div(units, most_columns);
      plan.columns = static_cast<int>(ceil_div(units, plan.channel_blocks));
      thread_loads = ceil_div(problem.plane, kColumnThreads / plan.columns);
    };
    cut(plan.width > 1 ? kMaxColumns : kMaxScalarColumns);
    if (thread_loads > kThreadLoads) {
      // One narrower block a plane saves the second launch.
      const int64_t columns = plan.columns;
      cut(kNarrowColumns);
      if (thread_loads > kMostThreadLoads) {
        cut(static_cast<int>(columns));
        plan.chunks = std::min(ceil_div(thread_loads, kThreadLoads), kMaxChunks);
      }
    }
    plan.add("column_sums", plan.tap_blocks + problem.batch * plan.chunks * plan.channel_blocks, kColumnThreads);
  } else if (problem.boxes && vectors > 0 && problem.sizes[2] % vector == 0 && problem.plane <= kMaxBoxPlane &&
             problem.taps <= kMaxBoxTaps) {
    plan.variant = "stream of boxes";
    plan.early_taps = problem.chain;
    plan.sum = SumKernel::kBoxStream;
    plan.width = vector;
    const int64_t extents[] = {problem.sizes[0], problem.sizes[1], problem.sizes[2] / vector};
    const int64_t chunk_bytes = std::clamp(plane_bytes / kBoxChunks, kMinBoxBytes, kMaxBoxBytes);
    const int64_t wanted = std::min(ceil_div(plane_bytes, chunk_bytes), kMaxChunks);
    // The outermost dimension that has so many, or the largest.
    const auto* cut = std::find_if(extents, extents + 3, [&](int64_t extent) { return extent >= wanted; });
    plan.cut = static_cast<int>((cut < extents + 3 ? cut : std::max_element(extents, extents + 3)) - extents);
    plan.chunk_elements = ceil_div(extents[plan.cut], wanted);
    plan.chunks = ceil_div(extents[plan.cut], plan.chunk_elements);
    const int64_t row_loads = plan.cut == 2 ? plan.chunk_elements : extents[2];
    plan.columns = static_cast<int>(ceil_div(row_loads, ceil_div(row_loads, 32)));
    plan.lanes = plan.chunks > 1 ? 32 : power_of_two_at_least(std::max(row_loads, ceil_div(vectors, kLaneLoads)), 32);
    // All blocks sum taps, each few of them, while its first loads are on their way.
    const int64_t tap_blocks =
        std::min(plan.tap_blocks * 256 / kBoxThreads, kStreamThreads / kBoxThreads * int64_t{device.multiprocessors});
    plan.tap_blocks = 0;
    plan.items = ceil_div(planes, 32 / plan.lanes) * plan.chunks;
    add_stream("box_stream", ceil_div(plan.items, kBoxThreads / 32), kBoxThreads);
    plan.tap_blocks = plan.launch[0].grid = std::max(plan.launch[0].grid, tap_blocks);
  } else if (problem.boxes) {
    plan.variant = "boxes";
    plan.sum = SumKernel::kBox;
    plan.chunks = std::clamp<int64_t>(ceil_div(plane_bytes, kBoxBytes), 1, kMaxChunks);
    const int per_block = kMaxWarps / plan.warps;  // chunks
    plan.add("box_sums", plan.tap_blocks + ceil_div(planes * plan.chunks, per_block), kMaxWarps * 32);
  } else if (streams && vectors >= kMinStreamVectors && vectors <= kMaxStreamVectors &&
             (problem.itemsize == 2 || plane_bytes <= kTilePlaneBytes)) {
    plan.variant = "stream of planes";
    plan.sum = SumKernel::kPlaneStream;
    plan.width = vector;
    plan.warps = vectors > kMaxStreamVectors / 2 ? 2 : 1;
    add_stream("plane_stream", ceil_div(planes, kColumnThreads / 32 / plan.warps), kColumnThreads);
  } else if (plane_bytes <= kTilePlaneBytes) {
    plan.variant = "tiles of planes";
    plan.sum = SumKernel::kTile;
    // As many lanes a plane as keep the lanes of a warp on distinct banks, more where whole planes would not fit.
    plan.lanes = static_cast<int>(std::min<int64_t>(32, std::max<int64_t>(1, problem.plane & -problem.plane)));
    while (plan.lanes < 32 && kTileThreads / plan.lanes * plane_bytes > kTileBytes) plan.lanes *= 2;
    const int64_t once = kTileThreads / plan.lanes;
    // Less than fits where there would not be two blocks for every multiprocessor.
    const int64_t most = kTileBytes / std::max<int64_t>(1, once * plane_bytes);
    const int64_t rounds = std::clamp<int64_t>(std::min(most, planes / (2 * once * device.multiprocessors)), 1, 16);
    plan.planes = static_cast<int>(once * rounds);
    plan.add("tile_sums", plan.tap_blocks + ceil_div(planes, plan.planes), kTileThreads,
             plan.planes * plane_bytes + 32);  // room for the source's place in its vector, and a word behind the last
  } else {
    plan.variant = "chunks of planes";
    plan.sum = SumKernel::kChunk;
    const int64_t most = kMaxWarps * kWarpBytes / problem.itemsize;  // elements that one block takes in one step
    plan.chunk_elements = std::max<int64_t>(1, ceil_div(problem.plane, most * kMaxChunks)) * most;
    plan.chunks = ceil_div(problem.plane, plan.chunk_elements);
    const int per_block = std::max(1, 8 / plan.warps);  // chunks
    plan.add("chunk_sums", plan.tap_blocks + ceil_div(planes * plan.chunks, per_block), plan.warps * per_block * 32);
  }
  plan.launch[0].times = problem.parts;
  const bool programmatic = device.code_capability >= 90;
  if (problem.chain) {
    plan.workspace = (planes * problem.regions * plan.chunks + pairs * problem.regions) * 8;
    const auto runs_of = [&](int columns) {
      return problem.groups * ceil_div(problem.out_channels / problem.groups, columns);
    };
    const int64_t most_weights = 4 * plan.chunks < problem.out_channels ? kMaxSampleWeights : kMaxChunkedWeights;
    const bool in_one_block = problem.logsumexp && runs_of(kSampleColumns) <= kMaxSampleRuns &&
                              count_product({depth, problem.out_channels}) <= most_weights;
    const int threads = in_one_block ? kSampleThreads : kFinishThreads;
    plan.finish_columns = in_one_block ? kSampleColumns : kFinishColumns;
    const int64_t runs = runs_of(plan.finish_columns);
    const int64_t blocks = in_one_block ? 1 : runs;  // of a sample
    const int64_t at_once = device.multiprocessors * (in_one_block ? 1 : kFinishBlocks);
    if (count_product({problem.batch, blocks}) > at_once) plan.finish_samples = kFinishSamples;
    const int64_t grid = count_product({ceil_div(problem.batch, plan.finish_samples), blocks});
    // As many lanes as there are threads for.
    while (plan.finish_lanes < std::min<int64_t>(plan.chunks, 32) &&
           2 * plan.finish_lanes * std::min<int64_t>(depth, kFinishDepth) <= threads)
      plan.finish_lanes *= 2;
    if (in_one_block) {
      plan.add("finish_logsumexp", grid, kSampleThreads, 0, programmatic);
    } else {
      plan.add("finish", grid, kFinishThreads, 0, programmatic);
      if (problem.logsumexp) {
        plan.workspace += problem.batch * problem.out_channels * 8;
        plan.add("logsumexp_rows", problem.batch, kRowThreads, 0, programmatic);
      }
    }
  } else if (plan.chunks > 1 && !plan.whole_planes) {
    plan.workspace = planes * plan.chunks * 8;
    plan.lanes = power_of_two_at_least(ceil_div(plan.chunks, kChunksAhead), 32);
    plan.add("finish_mean", ceil_div(planes * plan.lanes, 256), 256, 0, programmatic);
  }
  return plan;
}

}  // namespace fused
