// The collapsed convolution as a matrix product on tensor cores, V (C_out, K) times inputs (K, positions), for groups of
// many output channels. A block takes a box of positions: their inputs, each once, go through a ring of stages in shared
// memory, and a table says where in a stage the input of each k = (offset j, channel) lies, seen from a position. V comes
// from the cache in the very order of the lanes' registers.
//
// float32 and float64 multiply in float64, whose tensor cores are as fast as plain float32 and whose sums have no error to
// speak of: the composition's pool averages its own away, and chains of even eight float32 products do not keep up with
// that. Half types multiply by V in as many numbers of their type as hold it in float32's precision.
#pragma once

#include <cuda_pipeline.h>

#include "collapsed_conv.cuh"
#include "implicit_gemm_plan.h"
#include "launch.cuh"

namespace fused {

// The geometry in 32-bit numbers. Inputs are seen as lines in three dimensions, of a sample and group:
//   kRows (C, D0, D1) lines of D2;  kPixels (1, D0, D1) lines of D2 * C;  kPoints (D0, D1, D2) lines of C.
struct Gemm {
  GemmTiling tiling;
  int boxes = 0;  // of all samples
  int in_group = 0, per_group = 0, taps = 0;
  int out[kMaxSpatialDims] = {}, step[kMaxSpatialDims] = {}, offset[kMaxSpatialDims] = {};
  int limit[4] = {};            // lines and elements of a line that exist
  int64_t line_stride[3] = {};  // in memory
  bool whole_vectors = false;   // every line begins and ends with one
  bool channels_last = false;
  int at_channel = 0, at[kMaxSpatialDims] = {};  // from one to the next in what is multiplied
  int row_at[kMaxSpatialDims] = {};              // and before it is transposed
  Divisor tiles[kMaxSpatialDims], tap_counts[kMaxSpatialDims], channels;
  Divisor vectors_of_line, elements_of_line, lines[3], points, patch[kMaxSpatialDims];
};

// How a dtype is multiplied.
template <class T>
struct GemmMath {  // float32, float64
  using Sum = double;
  using Weight = double;
  static constexpr int kTerms = 1;       // numbers that V is split into (weight_terms)
  static constexpr int kSlots = 2;       // k of a lane in a product
  static constexpr bool kSplit = false;  // infinities may become NaN
  struct Inputs {
    double values[kSlots];
  };
  __device__ static Inputs inputs(const T* stage, const int* at, int position) {
    const auto value = [&](int i) { return at[i] < 0 ? 0.0 : static_cast<double>(stage[at[i] + position]); };
    return {{value(0), value(1)}};
  }
  __device__ static Inputs run(const T* stage, int at) {
    struct alignas(2 * sizeof(T)) Pair {
      T values[2];
    };
    const Pair pair = *reinterpret_cast<const Pair*>(stage + at);
    return {{static_cast<double>(pair.values[0]), static_cast<double>(pair.values[1])}};
  }
  __device__ static void multiply(double (&sums)[4], const uint4 (&weights)[2], const Inputs& x) {
    double a[4];
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      a[2 * v] = __hiloint2double(static_cast<int>(weights[v].y), static_cast<int>(weights[v].x));
      a[2 * v + 1] = __hiloint2double(static_cast<int>(weights[v].w), static_cast<int>(weights[v].z));
    }
    multiply_add(sums, a, x.values[0], x.values[1], sums);
  }
};

template <class T>
struct HalfMath {
  using Sum = float;
  using Weight = T;
  static constexpr int kTerms = weight_terms(2, std::is_same_v<T, __nv_bfloat16>);
  static constexpr int kSlots = 4;
  static constexpr bool kSplit = true;
  struct Inputs {
    unsigned pairs[2];
  };
  __device__ static Inputs inputs(const T* stage, const int* at, int position) {
    const auto bits = [&](int i) {
      return at[i] < 0 ? 0u : static_cast<unsigned>(reinterpret_cast<const unsigned short*>(stage)[at[i] + position]);
    };
    return {{bits(0) | bits(1) << 16, bits(2) | bits(3) << 16}};
  }
  __device__ static Inputs run(const T* stage, int at) {
    const uint2 four = *reinterpret_cast<const uint2*>(stage + at);
    return {{four.x, four.y}};
  }
  __device__ static void multiply(float (&sums)[4], const uint4 (&weights)[1], const Inputs& x) {
    const unsigned a[4] = {weights[0].x, weights[0].y, weights[0].z, weights[0].w};
    multiply_add<T>(sums, a, x.pairs);
  }
};
template <>
struct GemmMath<__half> : HalfMath<__half> {};
template <>
struct GemmMath<__nv_bfloat16> : HalfMath<__nv_bfloat16> {};

// A lane's weights of one product and term: 16 channels by kSlots, 32 or 16 bytes.
template <class T>
inline constexpr int kGemmFragment = 2 * GemmMath<T>::kSlots;
template <class T>
inline constexpr int kGemmVectors = kGemmFragment<T> * sizeof(typename GemmMath<T>::Weight) / 16;

// The k of a lane's slots in one product: a sum may take its k in any order, so they are those whose inputs the lanes read
// without bank conflicts, four apart or, of points, a run of channels. (Rows g and g + 8 are channels 2g and 2g + 1.)
template <class T>
__device__ int k_of_slot(int t, int slot, bool run) {
  return run ? t * GemmMath<T>::kSlots + slot : t + 4 * slot;
}

// V in the order of the registers, (channel tiles, 16-channel blocks, chunks, steps, terms, lanes, fragment), zero where
// there is no k or channel; and for each block whether it has met a V that may not be multiplied so.
template <class T>
__global__ void __launch_bounds__(kCollapseThreads)
    split_taps(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Gemm gemm,
               typename GemmMath<T>::Weight* weights, int* flags, int64_t count) {
  using Math = GemmMath<T>;
  allow_next_launch();
  constexpr int kLanes = 32 * kGemmFragment<T>;
  const GemmTiling& tiling = gemm.tiling;
  const int blocks = tiling.tiles * tiling.channel_warps;
  const int64_t tiles_of_group = tiling.channel_tiles / conv.groups;
  const bool run = tiling.runs();
  bool trusted = true;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int within = static_cast<int>(i % kLanes), lane = within / kGemmFragment<T>, e = within % kGemmFragment<T>;
    // Registers hold pairs along k, or single numbers: rows g, g + 8, g, g + 8.
    constexpr int kPair = Math::kSlots / 2;
    const int slot = e / (2 * kPair) * kPair + e % kPair, high = e / kPair % 2;
    int64_t rest = i / kLanes;
    const int step = static_cast<int>(rest % tiling.steps);
    rest /= tiling.steps;
    const int chunk = static_cast<int>(rest % tiling.chunks);
    rest /= tiling.chunks;
    const int block = static_cast<int>(rest % blocks);
    const int64_t tile = rest / blocks, group = tile / tiles_of_group;
    const int64_t co = ((tile % tiles_of_group) * blocks + block) * 16 + lane / 4 * 2 + high;
    const unsigned k = step * 4 * Math::kSlots + k_of_slot<T>(lane % 4, slot, run);
    unsigned channel, j2, j1;
    const unsigned j = gemm.channels.divide(k, channel), ci = chunk * tiling.channels + channel;
    double v = 0;
    if (co < gemm.per_group && ci < gemm.in_group && j < gemm.taps) {
      const unsigned j0 = gemm.tap_counts[1].divide(gemm.tap_counts[2].divide(j, j2), j1);
      v = collapsed_tap(conv, group * gemm.in_group + ci, co, {j0, j1, j2});
    }
    auto* to = weights + (i - within) * Math::kTerms + within;
    if constexpr (Math::kTerms == 1) {
      *to = v;
      trusted &= isfinite(v);
    } else {
      trusted &= split_weight<Math::kTerms>(v, to, kLanes);
    }
  }
  const bool all = __syncthreads_and(trusted);
  if (threadIdx.x == 0) flags[blockIdx.x] = !all;
}

// A box of a sample, and the part of the channels that is next.
struct GemmCursor {
  int box, chunk, sample;
  int first[kMaxSpatialDims];  // output
  __device__ void locate(const Gemm& gemm) {
    unsigned rest = box, tile;
    for (int d = kMaxSpatialDims - 1; d >= 0; --d) {
      rest = gemm.tiles[d].divide(rest, tile);
      first[d] = static_cast<int>(tile) * gemm.tiling.box[d];
    }
    sample = static_cast<int>(rest);
  }
  __device__ int input(const Gemm& gemm, int d) const { return first[d] * gemm.step[d] + gemm.offset[d]; }
  // Of the box's outputs that exist.
  __device__ int extent(const Gemm& gemm, int d) const { return min(gemm.tiling.box[d], gemm.out[d] - first[d]); }
  // Where the patch begins in its lines.
  __device__ int begin(const Gemm& gemm) const {
    switch (gemm.tiling.lines) {
      case GemmLines::kRows: return input(gemm, 2);
      case GemmLines::kPixels: return input(gemm, 2) * gemm.in_group;
      default: return chunk * gemm.tiling.channels;
    }
  }
  // How much earlier the copy begins, so that it is of whole vectors.
  template <class T>
  __device__ int skip(const Gemm& gemm, bool vectors) const {
    return vectors ? static_cast<unsigned>(begin(gemm)) % Vector<T>::kSize : 0;
  }
};

// Starts the copy of a stage's inputs; zero where there is none.
template <class T>
__device__ void copy_inputs(const T* input, const Gemm& gemm, const GemmCursor& at, bool vectors, T* stage) {
  constexpr int kSize = Vector<T>::kSize;
  const GemmTiling& tiling = gemm.tiling;
  const bool rows = tiling.lines == GemmLines::kRows, points = tiling.lines == GemmLines::kPoints;
  const int i0 = at.input(gemm, 0), i1 = at.input(gemm, 1);
  const int origin[3] = {rows     ? at.chunk * tiling.channels
                         : points ? i0
                                  : 0,
                         points ? i1 : i0, points ? at.input(gemm, 2) : i1};
  const int begin = at.begin(gemm) - at.skip<T>(gemm, vectors);
  const auto address = [&](unsigned line, int element, T*& to) -> const T* {
    unsigned v, w;
    const unsigned u = gemm.lines[1].divide(gemm.lines[2].divide(line, w), v);
    to = stage + u * tiling.outer + (v * gemm.lines[2].divisor + w) * tiling.line + element;
    const int place[3] = {origin[0] + static_cast<int>(u), origin[1] + static_cast<int>(v),
                          origin[2] + static_cast<int>(w)};
    if (static_cast<unsigned>(place[0]) >= static_cast<unsigned>(gemm.limit[0]) ||
        static_cast<unsigned>(place[1]) >= static_cast<unsigned>(gemm.limit[1]) ||
        static_cast<unsigned>(place[2]) >= static_cast<unsigned>(gemm.limit[2]) ||
        static_cast<unsigned>(begin + element) >= static_cast<unsigned>(gemm.limit[3]))
      return nullptr;
    return input + (place[0] * gemm.line_stride[0] + place[1] * gemm.line_stride[1] + place[2] * gemm.line_stride[2] +
                    begin + element);
  };
  const int lines = gemm.lines[0].divisor * gemm.lines[1].divisor * gemm.lines[2].divisor;
  if (vectors) {
    const int count = lines * gemm.vectors_of_line.divisor;
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += kGemmThreads) {
      unsigned vector;
      T* to;
      const unsigned line = gemm.vectors_of_line.divide(i, vector);
      const T* from = address(line, vector * kSize, to);
      __pipeline_memcpy_async(to, from ? from : input, 16, from ? 0 : 16);
    }
  } else {
    const int count = lines * gemm.elements_of_line.divisor;
#pragma unroll 2
    for (int i = threadIdx.x; i < count; i += kGemmThreads) {
      unsigned element;
      T* to;
      const unsigned line = gemm.elements_of_line.divide(i, element);
      const T* from = address(line, element, to);
      if constexpr (sizeof(T) >= 4)
        __pipeline_memcpy_async(to, from ? from : input, sizeof(T), from ? 0 : sizeof(T));
      else
        *to = from ? *from : from_accumulator<T>(0);
    }
  }
}

// The carve-up of a block's shared memory.
template <class T>
struct GemmMemory {
  using Sum = typename GemmMath<T>::Sum;
  T* stages;         // (stages, stage)
  T* transposed;     // (2, points, channels): stages of rows, transposed
  int64_t* output;   // (positions): where a position of the box lies in the output, from the first
  Sum* factors;      // (channels): what a sum is multiplied by,
  Sum* base;         // (channels): and what is added
  int* inputs;       // (depth): where a k lies in a stage, -1 for none; in the order of the slots
  int* position;     // (positions): where a position lies in a stage
  int* coordinates;  // (positions): within the box, ten bits each
  int* skips;        // (stages): how much earlier than the patch the lines of a stage begin
  __device__ GemmMemory(const GemmTiling& tiling, void* memory) {
    stages = static_cast<T*>(memory);
    transposed = stages + kGemmStages * tiling.stage;
    output = reinterpret_cast<int64_t*>(transposed + (tiling.transposed ? 2 * tiling.points() * tiling.point : 0));
    factors = reinterpret_cast<Sum*>(output + tiling.positions());
    base = factors + tiling.out_channels();
    position = reinterpret_cast<int*>(base + tiling.out_channels());
    coordinates = position + tiling.positions();
    skips = coordinates + tiling.positions();
    inputs = skips + 4;
  }
};
inline constexpr int kNoPosition = 1023 << 20;  // lies in no box

// Makes points of a stage of rows: eight channels of one together, as the products take them.
template <class T>
__device__ void transpose_rows(const Gemm& gemm, const T* stage, T* transposed) {
  constexpr int kSize = Vector<T>::kSize;
  const GemmTiling& tiling = gemm.tiling;
  const int count = tiling.points() * tiling.channels / kSize;
#pragma unroll 2
  for (int i = threadIdx.x; i < count; i += kGemmThreads) {
    unsigned point, x, b;
    const unsigned channel = gemm.points.divide(i, point) * kSize;
    const unsigned a = gemm.patch[1].divide(gemm.patch[2].divide(point, x), b);
    const T* from = stage + channel * tiling.outer + a * gemm.row_at[0] + b * gemm.row_at[1] + x;
    Vector<T> vector;
#pragma unroll
    for (int c = 0; c < kSize; ++c) vector.values[c] = from[c * tiling.outer];
    *reinterpret_cast<Vector<T>*>(transposed + point * tiling.point + channel) = vector;
  }
}

// False where the factors may not be multiplied with each other: they would lose what they leave.
template <class T>
__device__ bool make_tables(const Convolution<T>& conv, const Gemm& gemm, const GemmMemory<T>& memory,
                            int64_t first_channel, int channels) {
  using Math = GemmMath<T>;
  using Sum = typename Math::Sum;
  const GemmTiling& tiling = gemm.tiling;
  const bool run = tiling.runs();
  bool trusted = true;
  for (int i = threadIdx.x; i < tiling.steps * 4 * Math::kSlots; i += kGemmThreads) {
    const int t = i / Math::kSlots % 4, slot = i % Math::kSlots;
    unsigned channel, j1, j2;
    const unsigned j =
        gemm.channels.divide(i / (4 * Math::kSlots) * (4 * Math::kSlots) + k_of_slot<T>(t, slot, run), channel);
    const unsigned j0 = gemm.tap_counts[1].divide(gemm.tap_counts[2].divide(j, j2), j1);
    memory.inputs[i] =
        j < gemm.taps
            ? static_cast<int>(channel * gemm.at_channel + j0 * gemm.at[0] + j1 * gemm.at[1] + j2 * gemm.at[2])
            : -1;
  }
  for (int p = threadIdx.x; p < tiling.positions(); p += kGemmThreads) {
    const int p2 = p % tiling.box[2], p1 = p / tiling.box[2] % tiling.box[1], p0 = p / tiling.box[2] / tiling.box[1];
    const bool use = p0 < tiling.box[0];
    memory.position[p] =
        use ? p0 * gemm.step[0] * gemm.at[0] + p1 * gemm.step[1] * gemm.at[1] + p2 * gemm.step[2] * gemm.at[2] : 0;
    memory.coordinates[p] = use ? p0 << 20 | p1 << 10 | p2 : kNoPosition;
    memory.output[p] = p0 * conv.output_strides[2] + p1 * conv.output_strides[3] + p2 * conv.output_strides[4];
  }
  for (int c = threadIdx.x; c < tiling.out_channels(); c += kGemmThreads) {
    const Affine<double> affine(conv, first_channel + min(c, channels - 1));
    constexpr double kMax = std::is_same_v<T, double> ? 1e290 : 1e30;
    const double factor = affine.factor();
    trusted &= isfinite(affine(0)) &&
               ((fabs(factor) < kMax && fabs(factor) > 1 / kMax) || affine.scale1 == 0 || affine.scale2 == 0);
    memory.factors[c] = static_cast<Sum>(factor);
    memory.base[c] = static_cast<Sum>(affine(0));
  }
  return trusted;
}

// Neighbours in memory as one.
template <int kCount, class T>
struct alignas(kCount * sizeof(T) < 16 ? kCount * sizeof(T) : 16) Neighbours {
  T values[kCount];
};
template <int kCount, class T>
__device__ bool is_group_aligned(const T* address) {
  return reinterpret_cast<uintptr_t>(address) % alignof(Neighbours<kCount, T>) == 0;
}
template <int kCount, class T, class F>
__device__ void store_group(T* to, const F& value) {
  Neighbours<kCount, T> group;
#pragma unroll
  for (int i = 0; i < kCount; ++i) group.values[i] = value(i);
  *reinterpret_cast<Neighbours<kCount, T>*>(to) = group;
}

// One output of a box as it is defined, if it exists.
template <class T>
__device__ void write_direct(const Convolution<T>& conv, const Gemm& gemm, const GemmMemory<T>& memory,
                             const GemmCursor& at, int p, int channel, int channels, int64_t first_channel) {
  const int c = memory.coordinates[p], p0 = c >> 20, p1 = c >> 10 & 1023, p2 = c & 1023;
  if (channel >= channels || p0 >= at.extent(gemm, 0) || p1 >= at.extent(gemm, 1) || p2 >= at.extent(gemm, 2)) return;
  const int64_t co = first_channel + channel, o0 = at.first[0] + p0, o1 = at.first[1] + p1, o2 = at.first[2] + p2;
  conv.output[at.sample * conv.output_strides[0] + co * conv.output_strides[1] + o0 * conv.output_strides[2] +
              o1 * conv.output_strides[3] + o2 * conv.output_strides[4]] =
      direct_value(conv, at.sample, co, o0, o1, o2);
}

template <class T, int kTiles, bool kRun>
__global__ void __launch_bounds__(kGemmThreads, gemm_blocks(sizeof(T)))
    implicit_gemm(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Gemm gemm,
                  const uint4* __restrict__ weights, const int* __restrict__ flags, int flag_count) {
  using Math = GemmMath<T>;
  using Sum = typename Math::Sum;
  constexpr int kTerms = Math::kTerms, kVectors = kGemmVectors<T>, kSlots = Math::kSlots, kColumns = kGemmPositions / 8;
  extern __shared__ __align__(16) double shared[];
  const GemmTiling& tiling = gemm.tiling;
  const GemmMemory<T> memory(tiling, shared);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int channel_warp = warp % tiling.channel_warps, position_warp = warp / tiling.channel_warps;
  const unsigned channel_tiles = static_cast<unsigned>(tiling.channel_tiles);
  const int tile = blockIdx.x % channel_tiles, block = blockIdx.x / channel_tiles, blocks = gridDim.x / channel_tiles;
  const int tiles_of_group = static_cast<int>(channel_tiles / conv.groups), group = tile / tiles_of_group;
  const int first_of_group = tile % tiles_of_group * tiling.out_channels();
  const int channels = min(tiling.out_channels(), gemm.per_group - first_of_group);
  const int64_t first_channel = static_cast<int64_t>(group) * gemm.per_group + first_of_group;
  const T* input = conv.input + static_cast<int64_t>(group) * gemm.in_group * conv.input_strides[1];
  T* output = conv.output + first_channel * conv.output_strides[1];
  const bool vectors = gemm.whole_vectors && is_vector_aligned(conv.input);

  GemmCursor ahead{block, 0};
  ahead.locate(gemm);
  const auto fetch = [&](int slot) {
    if (ahead.box < gemm.boxes) {
      copy_inputs(input + ahead.sample * conv.input_strides[0], gemm, ahead, vectors,
                  memory.stages + slot * tiling.stage);
      if (threadIdx.x == 0) memory.skips[slot] = ahead.skip<T>(gemm, vectors);
      if (++ahead.chunk == tiling.chunks) {
        ahead.chunk = 0;
        ahead.box += blocks;
        ahead.locate(gemm);
      }
    }
    __pipeline_commit();
  };
  // Rows are transposed one stage ahead of the products, which takes a stage more.
  const bool transposed = kRun && tiling.transposed;
#pragma unroll 1
  for (int i = 0; i < kGemmStages - (transposed ? 0 : 1); ++i) fetch(i);
  bool flag = !make_tables(conv, gemm, memory, first_channel, channels);
  wait_for_previous_launch();
  for (int i = threadIdx.x; i < flag_count; i += kGemmThreads) flag |= flags[i] != 0;
  if (__syncthreads_or(flag)) {
    __pipeline_wait_prior(0);
    GemmCursor at{block, 0};
#pragma unroll 1
    for (; at.box < gemm.boxes; at.box += blocks) {
      at.locate(gemm);
      for (int i = threadIdx.x; i < tiling.positions() * channels; i += kGemmThreads)
        write_direct(conv, gemm, memory, at, i % tiling.positions(), i / tiling.positions(), channels, first_channel);
    }
    return;
  }

  // Two products n and n + 1 cover 16 positions. Column g of the first is position g / 2 * 4 + g % 2, of the second two
  // further: a lane's four sums of a channel, columns 2t and 2t + 1 of both, are then neighbours.
  int position[kColumns];
#pragma unroll
  for (int n = 0; n < kColumns; ++n)
    position[n] = memory.position[position_warp * kGemmPositions + n / 2 * 16 + g / 2 * 4 + n % 2 * 2 + g % 2] +
                  (kRun ? t * kSlots : 0);

  const int64_t depth = static_cast<int64_t>(tiling.chunks) * tiling.steps;
  const int64_t weights_of_block = depth * kTerms * kVectors * 32;
  const uint4* first_weights =
      weights + (static_cast<int64_t>(tile) * tiling.channel_warps + channel_warp) * kTiles * weights_of_block +
      lane * kVectors;
  uint4 next[kTiles][kTerms][kVectors];
  const auto load_weights = [&](const uint4* from) {
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int term = 0; term < kTerms; ++term)
#pragma unroll
        for (int v = 0; v < kVectors; ++v)
          next[m][term][v] = __ldg(from + m * weights_of_block + term * kVectors * 32 + v);
  };
  load_weights(first_weights);

  int slot = 0, half = 0;
  if (transposed && block < gemm.boxes) {
    __pipeline_wait_prior(kGemmStages - 1);
    __syncthreads();
    transpose_rows(gemm, memory.stages + memory.skips[0], memory.transposed);
  }
  GemmCursor at{block, 0};
  for (; at.box < gemm.boxes; at.box += blocks) {
    at.locate(gemm);
    Sum sums[kTiles][kColumns][4] = {};
    [[maybe_unused]] Sum totals[kTiles][kColumns][4] = {};
    const uint4* from = first_weights;
    int64_t left = depth;
    for (at.chunk = 0; at.chunk < tiling.chunks; ++at.chunk) {
      __pipeline_wait_prior(kGemmStages - 2);
      __syncthreads();
      const T* stage;
      if (transposed) {
        fetch(slot);
        slot = slot == kGemmStages - 1 ? 0 : slot + 1;
        const int size = tiling.points() * tiling.point;
        stage = memory.transposed + half * size;
        half ^= 1;
        if (at.chunk + 1 < tiling.chunks || at.box + blocks < gemm.boxes)
          transpose_rows(gemm, memory.stages + slot * tiling.stage + memory.skips[slot],
                         memory.transposed + half * size);
      } else {
        fetch(slot == 0 ? kGemmStages - 1 : slot - 1);
        stage = memory.stages + slot * tiling.stage + (kRun ? 0 : memory.skips[slot]);
        slot = slot == kGemmStages - 1 ? 0 : slot + 1;
      }
      const int* table = memory.inputs + t * kSlots;
#pragma unroll 1
      for (int step = 0; step < tiling.steps; ++step) {
        uint4 now[kTiles][kTerms][kVectors];
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int term = 0; term < kTerms; ++term)
#pragma unroll
            for (int v = 0; v < kVectors; ++v) now[m][term][v] = next[m][term][v];
        from = --left == 0 ? first_weights : from + kTerms * kVectors * 32;
        load_weights(from);
        int where[kSlots];
#pragma unroll
        for (int i = 0; i < (kRun ? 1 : kSlots); ++i) where[i] = table[i];
        table += 4 * kSlots;
#pragma unroll
        for (int n = 0; n < kColumns; ++n) {
          typename Math::Inputs x;
          if constexpr (kRun)
            x = Math::run(stage, memory.inputs[step * 4 * kSlots] + position[n]);
          else
            x = Math::inputs(stage, where, position[n]);
#pragma unroll
          for (int term = kTerms - 1; term >= 0; --term)
#pragma unroll
            for (int m = 0; m < kTiles; ++m) Math::multiply(sums[m][n], now[m][term], x);
        }
        // Tensor cores cut off what float32 sums do not hold, so they make short ones.
        if constexpr (Math::kSplit)
          if (step % 4 == 3 || step + 1 == tiling.steps)
#pragma unroll
            for (int m = 0; m < kTiles; ++m)
#pragma unroll
              for (int n = 0; n < kColumns; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                  totals[m][n][e] += sums[m][n][e];
                  sums[m][n][e] = 0;
                }
      }
    }
    const auto total = [&](int m, int n, int e) { return Math::kSplit ? totals[m][n][e] : sums[m][n][e]; };

    // A lane holds channels 2g and 2g + 1 of 16 at twice four positions 4t.
    const int extent[3] = {at.extent(gemm, 0), at.extent(gemm, 1), at.extent(gemm, 2)};
    T* corner = output + at.sample * conv.output_strides[0] + at.first[0] * conv.output_strides[2] +
                at.first[1] * conv.output_strides[3] + at.first[2] * conv.output_strides[4];
    [[maybe_unused]] bool odd = false;
    const auto finished = [&](Sum sum, int channel) -> T {
      const Sum value = sum * memory.factors[channel] + memory.base[channel];
      if constexpr (Math::kSplit) odd |= !isfinite(value);
      return from_sum<T>(value);
    };
#pragma unroll
    for (int quad = 0; quad < kColumns / 2; ++quad) {
      const int p = position_warp * kGemmPositions + quad * 16 + t * 4;
      bool exists[4];
      int64_t to[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int c = memory.coordinates[p + i];
        exists[i] = c >> 20 < extent[0] && (c >> 10 & 1023) < extent[1] && (c & 1023) < extent[2];
        to[i] = memory.output[p + i];
      }
      const bool neighbours = exists[0] && exists[3] && to[3] - to[0] == 3;
#pragma unroll
      for (int m = 0; m < kTiles; ++m) {
        const int channel = (channel_warp * kTiles + m) * 16 + 2 * g;
        const auto value = [&](int high, int i) {
          return finished(total(m, 2 * quad + i / 2, 2 * high + i % 2), channel + high);
        };
        if (gemm.channels_last) {
#pragma unroll
          for (int i = 0; i < 4; ++i)
            if (exists[i] && channel < channels) {
              T* pixel = corner + to[i] + channel;
              if (channel + 1 < channels && is_group_aligned<2>(pixel)) {
                store_group<2>(pixel, [&](int high) { return value(high, i); });
              } else {
                pixel[0] = value(0, i);
                if (channel + 1 < channels) pixel[1] = value(1, i);
              }
            }
        } else {
#pragma unroll
          for (int high = 0; high < 2; ++high)
            if (channel + high < channels) {
              T* plane = corner + (channel + high) * conv.output_strides[1];
              if (neighbours && is_group_aligned<4>(plane + to[0])) {
                store_group<4>(plane + to[0], [&](int i) { return value(high, i); });
              } else {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                  if (exists[i]) plane[to[i]] = value(high, i);
              }
            }
        }
      }
    }
    if constexpr (Math::kSplit) {
      // An infinite input makes NaN of the numbers that V is split into, so what this lane has written is looked at again.
      if (odd)
#pragma unroll 1
        for (int i = 0; i < kTiles * 2 * kGemmPositions / 4; ++i) {
          const int channel = (channel_warp * kTiles + i / 16) * 16 + 2 * g + i / 8 % 2;
          write_direct(conv, gemm, memory, at, position_warp * kGemmPositions + i / 4 % 2 * 16 + t * 4 + i % 4, channel,
                       channels, first_channel);
        }
    }
  }
  __pipeline_wait_prior(0);
}

}  // namespace fused
