// The global-pool family on CUDA: one pass over the input, whose planes are summed; all else works on those sums.
//
//   global_avg_pool                          mean[n, c] = sum of plane (n, c) / size
//   conv_transpose_global_avg_pool[_logsumexp]
//     mean[n, co] = 1/O * sum over ci and regions r of S[n, ci, r] * U[ci, co, r] + bias[co]
//     S: sum of the input over region r, U: sum of the weight's taps that meet region r. With padding 0 there is one
//     region, the whole plane.
//
// Bytes: the input once, and 8 for each partial sum, of which there is one per 32 KB or per plane. On H200 the kernel that
// reads large planes takes 1.01 times as long as a pure read.
#include "global_avg_pool.h"
#include "global_avg_pool_plan.h"
#include "launch.cuh"
#include "reduce.cuh"
#include "vector.cuh"

namespace fused {
namespace {

// ---- Sums of planes ----------------------------------------------------------------------------------------------

// Where a plane's sum goes: to the partial sums, or, where it is the whole plane's, to the output as its mean.
struct PartialSum {
  double* sums;
  __device__ void operator()(int64_t i, double sum) const { sums[i] = sum; }
};
template <class T>
struct Mean {
  T* output;  // (N, C)
  double size;
  __device__ void operator()(int64_t i, double sum) const { output[i] = from_double<T>(sum / size); }
};

// One dimension cut into the segments in which the same taps apply.
struct SegmentedDim {
  int64_t size = 1;
  int count = 1;
  int64_t begin[kMaxSegments] = {0};
  int64_t end[kMaxSegments] = {1};
  ConvDim conv;
};
// A plane cut into boxes; leading dimensions of size 1 where there are fewer than three.
struct Regions {
  SegmentedDim dims[kMaxSpatialDims];
  __host__ __device__ int64_t count() const {
    return static_cast<int64_t>(dims[0].count) * dims[1].count * dims[2].count;
  }
};

// The weight summed over the taps that meet each region: U[ci, r, j], j the output channel within its group. The first
// `blocks` blocks of a summing kernel do this, beside the others.
template <class T>
struct TapSums {
  const T* weight;  // (C_in, C_out/groups, taps)
  double* sums;     // (C_in, regions, C_out/groups)
  int64_t blocks, pairs, per_group, taps;

  __device__ double all_taps(int64_t pair, int lane, int lanes) const {
    constexpr int kAhead = 9;  // a 3 x 3 kernel at once
    double sum = 0;
    for (int64_t first = lane; first < taps; first += kAhead * lanes) {
      Accumulator<T> loaded[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u)
        loaded[u] = first + u * lanes < taps ? to_accumulator(weight[pair * taps + first + u * lanes]) : 0;
#pragma unroll
      for (int u = 0; u < kAhead; ++u) sum += static_cast<double>(loaded[u]);
    }
    return sum;
  }
  __device__ double region_taps(int64_t pair, int64_t region, const Regions& regions) const {
    const auto& [dim0, dim1, dim2] = regions.dims;
    // All cells of a segment meet the same taps, so its first one stands for it.
    const Range i = input_tap_range(dim0.conv, dim0.begin[region / dim2.count / dim1.count]);
    const Range j = input_tap_range(dim1.conv, dim1.begin[region / dim2.count % dim1.count]);
    const Range k = input_tap_range(dim2.conv, dim2.begin[region % dim2.count]);
    double sum = 0;
    for (int64_t a = i.begin; a < i.end; ++a)
      for (int64_t b = j.begin; b < j.end; ++b)
        for (int64_t c = k.begin; c < k.end; ++c)
          sum += static_cast<double>(
              to_accumulator(weight[pair * taps + (a * dim1.conv.kernel + b) * dim2.conv.kernel + c]));
    return sum;
  }

  __device__ bool is_mine() const { return blockIdx.x < blocks; }
  __device__ void run() const {
    const int lanes = taps >= kManyTaps ? 8 : 1, lane = threadIdx.x % lanes;
    for (int64_t pair = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / lanes;
         pair < (pairs + 31) / 32 * 32; pair += blocks * blockDim.x / lanes) {
      const double sum = group_sum(pair < pairs ? all_taps(pair, lane, lanes) : 0.0, lanes);
      if (lane == 0 && pair < pairs) sums[pair] = sum;
    }
  }
  __device__ void run(const Regions& regions) const {
    const int64_t count = regions.count();
    for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < pairs * count;
         i += blocks * blockDim.x) {
      const int64_t j = i % per_group, region = i / per_group % count, ci = i / per_group / count;
      sums[i] = region_taps(ci * per_group + j, region, regions);
    }
  }
};
// global_avg_pool has no weight.
struct NoTaps {
  static constexpr int64_t blocks = 0;
  __device__ bool is_mine() const { return false; }
  __device__ void run() const {}
};

template <class T>
__device__ Accumulator<T> vector_sum(const Vector<T>& vector) {
  Accumulator<T> values[Vector<T>::kSize];
#pragma unroll
  for (int q = 0; q < Vector<T>::kSize; ++q) values[q] = to_accumulator(vector.values[q]);
  return tree_sum(values);
}

// Sums x[0, n) with `lanes` threads, of which this is number `lane`; returns this thread's share. Which thread takes which
// element depends on its index alone, never on its address: a sample's bits are the same wherever it lies. Groups of
// vectors add up pairwise and their sums in float64, so the error does not grow with n.
//
// kUnroll loads of 16 bytes are in flight per lane. On H200, (16, 64, 512, 512) and per cent of the time of a pure read:
// float32 with 8, 101.4, with 4, 101.6; bfloat16, where each load brings twice the arithmetic, 134 and 103.
template <class T>
constexpr int kUnroll = sizeof(T) == 2 ? 4 : 8;
template <class T>
constexpr int kChunkBlocks = sizeof(T) == 2 ? 6 : 4;  // per multiprocessor: what the registers of kUnroll loads allow

template <class T>
__device__ double strided_sum(const T* x, int64_t n, int lane, int lanes) {
  using Acc = Accumulator<T>;
  constexpr int kLoads = kUnroll<T>;
  constexpr int kSize = Vector<T>::kSize;
  const bool whole_vectors = is_vector_aligned(x) && n % kSize == 0;
  const int64_t step = static_cast<int64_t>(lanes) * kSize;
  double total = 0;
  for (int64_t base = static_cast<int64_t>(lane) * kSize; base < n; base += step * kLoads) {
    Acc sums[kLoads];
    if (whole_vectors) {
      Vector<T> loaded[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u)
        loaded[u] =
            base + u * step < n ? load_streaming(reinterpret_cast<const Vector<T>*>(x + base + u * step)) : Vector<T>{};
#pragma unroll
      for (int u = 0; u < kLoads; ++u) sums[u] = vector_sum(loaded[u]);
    } else {
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        Acc values[kSize];
#pragma unroll
        for (int q = 0; q < kSize; ++q) {
          const int64_t i = base + u * step + q;
          values[q] = i < n ? to_accumulator(x[i]) : Acc(0);
        }
        sums[u] = tree_sum(values);
      }
    }
    total += static_cast<double>(tree_sum(sums));
  }
  return total;
}

// `warps` warps per chunk of a plane, 1 to kMaxWarps; a block holds as many chunks as fit.
template <class T, class Store, class Taps>
__global__ void __launch_bounds__(kMaxWarps * 32, kChunkBlocks<T>)
    chunk_sums(const T* __restrict__ input,  // (planes, plane)
               int64_t planes, int64_t plane, int64_t chunks, int64_t chunk_elements, int warps, Store store,
               Taps taps) {
  allow_next_launch();
  if (taps.is_mine()) return taps.run();
  const int64_t block = blockIdx.x - taps.blocks;
  __shared__ double warp_sums[kMaxWarps];
  const int warp = threadIdx.x / 32;
  const int per_block = blockDim.x / 32 / warps;
  const int64_t item = block * per_block + warp / warps;
  double sum = 0;
  if (item < planes * chunks) {
    const int64_t begin = item % chunks * chunk_elements;
    const int64_t end = begin + chunk_elements < plane ? begin + chunk_elements : plane;
    sum = strided_sum(input + item / chunks * plane + begin, end - begin, threadIdx.x % (warps * 32), warps * 32);
  }
  sum = warp_sum(sum);
  if (warps == 1) {
    if (threadIdx.x % 32 == 0 && item < planes * chunks) store(item, sum);
    return;
  }
  if (threadIdx.x % 32 == 0) warp_sums[warp] = sum;
  __syncthreads();
  if (warp < per_block) {
    const int lane = threadIdx.x % 32;
    sum = warp_sum(lane < warps ? warp_sums[warp * warps + lane] : 0.0);
    const int64_t mine = block * per_block + warp;
    if (lane == 0 && mine < planes * chunks) store(mine, sum);
  }
}

// Small planes: a block copies a tile of whole planes into shared memory, 16 bytes at a time, and `lanes` lanes sum each.
template <class T, class Store, class Taps>
__global__ void __launch_bounds__(kTileThreads)
    tile_sums(const T* __restrict__ input,  // (planes, plane)
              int64_t planes, int plane, int tile_planes, int lanes, Store store, Taps taps) {
  // In float32, the error of sums this short would exceed that of torch.mean.
  using Sum = std::conditional_t<sizeof(T) == 2, float, double>;
  extern __shared__ __align__(16) unsigned char staged[];
  allow_next_launch();
  if (taps.is_mine()) return taps.run();
  const int64_t first = (blockIdx.x - taps.blocks) * tile_planes;
  const int count = static_cast<int>(min(static_cast<int64_t>(tile_planes), planes - first));
  const T* source = input + first * plane;
  // The copy keeps the source's place within 16 bytes, so that both sides are aligned in between.
  const int skew = static_cast<int>(reinterpret_cast<uintptr_t>(source) % 16 / sizeof(T));
  T* tile = reinterpret_cast<T*>(staged);
  const int end = skew + count * plane;
  constexpr int kSize = Vector<T>::kSize;
  const Vector<T>* vectors = reinterpret_cast<const Vector<T>*>(source - skew);
  const int begin_full = skew ? 1 : 0, end_full = end / kSize;
#pragma unroll 4
  for (int v = begin_full + threadIdx.x; v < end_full; v += kTileThreads)
    reinterpret_cast<Vector<T>*>(staged)[v] = load_streaming(vectors + v);
  const int head_end = min(begin_full * kSize, end), tail_begin = max(end_full, begin_full) * kSize;
  for (int i = skew + threadIdx.x; i < head_end; i += kTileThreads) tile[i] = source[i - skew];
  for (int i = tail_begin + threadIdx.x; i < end; i += kTileThreads) tile[i] = source[i - skew];
  __syncthreads();

  const int lane = threadIdx.x % lanes;
  for (int p = threadIdx.x / lanes; p < (count + 31) / 32 * 32; p += kTileThreads / lanes) {
    Sum sums[4] = {};
    if (p < count) {
      const T* x = tile + skew + p * plane;
      int i = lane;
      for (; i + 3 * lanes < plane; i += 4 * lanes)
#pragma unroll
        for (int u = 0; u < 4; ++u) sums[u] += static_cast<Sum>(to_accumulator(x[i + u * lanes]));
#pragma unroll
      for (int u = 0; u < 3; ++u, i += lanes)
        if (i < plane) sums[u] += static_cast<Sum>(to_accumulator(x[i]));
    }
    const Sum sum = group_sum(tree_sum(sums), lanes);
    if (lane == 0 && p < count) store(first + p, sum);
  }
}

// Sums of the boxes of a plane: per chunk of rows, and per region, so that cells of different regions never meet in a sum.
template <class T>
__global__ void __launch_bounds__(kBoxThreads)
    box_sums(const T* __restrict__ input,  // (planes, D0, D1, D2)
             int64_t chunks, int64_t chunk_rows, const __grid_constant__ Regions regions, PartialSum store,
             TapSums<T> taps) {
  allow_next_launch();
  if (taps.is_mine()) return taps.run(regions);
  __shared__ double warp_sums[kBoxThreads / 32];
  const auto& [dim0, dim1, dim2] = regions.dims;
  const int64_t block = blockIdx.x - taps.blocks, plane_index = block / chunks, chunk = block % chunks;
  const int64_t plane_rows = dim0.size * dim1.size;
  const int64_t first_row = chunk * chunk_rows, last_row = min(first_row + chunk_rows, plane_rows);
  const T* plane = input + plane_index * plane_rows * dim2.size;
  const int count = dim0.count * dim1.count * dim2.count;
  for (int region = 0; region < count; ++region) {
    const int r2 = region % dim2.count, r1 = region / dim2.count % dim1.count, r0 = region / dim2.count / dim1.count;
    const int64_t width = dim2.end[r2] - dim2.begin[r2];
    double sum = 0;
    for (int64_t d0 = max(dim0.begin[r0], first_row / dim1.size); d0 < dim0.end[r0] && d0 * dim1.size < last_row;
         ++d0) {
      const int64_t begin = max(dim1.begin[r1], first_row - d0 * dim1.size);
      const int64_t end = min(dim1.end[r1], last_row - d0 * dim1.size);
      // Each thread walks the box in steps of the block: its row and column move on without a division.
      const int64_t row_step = kBoxThreads / width;
      const int column_step = static_cast<int>(kBoxThreads % width);
      int64_t row = begin + threadIdx.x / width;
      int64_t column = threadIdx.x % width;
      const T* box = plane + d0 * dim1.size * dim2.size + dim2.begin[r2];
      constexpr int kUnroll = 8;
      while (row < end) {
        Accumulator<T> values[kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          values[u] = row < end ? to_accumulator(box[row * dim2.size + column]) : Accumulator<T>(0);
          column += column_step;
          row += row_step;
          if (column >= width) {
            column -= width;
            ++row;
          }
        }
        sum += static_cast<double>(tree_sum(values));
      }
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x < 32) {
      sum = warp_sum(threadIdx.x < kBoxThreads / 32 ? warp_sums[threadIdx.x] : 0.0);
      if (threadIdx.x == 0) store((plane_index * count + region) * chunks + chunk, sum);
    }
    __syncthreads();
  }
}

// ---- Finishing ---------------------------------------------------------------------------------------------------

__device__ double sum_of_chunks(const double* sums, int64_t chunks, int lane, int width) {
  double sum = 0;
  for (int64_t i = lane; i < chunks; i += width) sum += sums[i];
  return group_sum(sum, width);
}

template <class T>
__global__ void finish_mean(const double* __restrict__ sums,  // (planes, chunks)
                            int64_t planes, int64_t chunks, Mean<T> store) {
  wait_for_previous_launch();
  const int64_t plane = static_cast<int64_t>(blockIdx.x) * (blockDim.x / 32) + threadIdx.x / 32;
  if (plane >= planes) return;
  const double sum = sum_of_chunks(sums + plane * chunks, chunks, threadIdx.x % 32, 32);
  if (threadIdx.x % 32 == 0) store(plane, sum);
}

// log(sum of exp) seen so far: maximum + log(sum). A NaN lives in the sum, since a maximum would lose it.
template <class Acc>
struct RunningLogSumExp {
  double maximum = -INFINITY;
  double sum = 0;

  __device__ void add(double maximum2, double sum2) {
    const double larger = fmax(maximum, maximum2);
    // Equal maxima have factor 1 by definition, which keeps infinities from meeting themselves.
    const double mine = maximum == larger ? sum : sum * static_cast<double>(exp(Acc(maximum - larger)));
    const double other = maximum2 == larger ? sum2 : sum2 * static_cast<double>(exp(Acc(maximum2 - larger)));
    maximum = larger;
    sum = mine + other;
  }
  __device__ void add(double x) { x != x ? add(-INFINITY, x) : add(x, x == -INFINITY ? 0.0 : 1.0); }
  __device__ void add_lanes() {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
      add(__shfl_xor_sync(0xffffffffu, maximum, offset), __shfl_xor_sync(0xffffffffu, sum, offset));
  }
  __device__ double value() const { return maximum + static_cast<double>(log(Acc(sum))); }
};

// The channel axis of a chain, and what happens on it.
template <class T>
struct Channels {
  int64_t in_channels, out_channels, groups, regions;
  double output_size;  // elements of the transposed convolution's output plane
  ChannelParam bias, scale, shift;
  double out_scale;
  T* output;  // (N, C_out), or (N, 1) with logsumexp

  __device__ static double load(const ChannelParam& param, int64_t c) {
    return param.data ? static_cast<double>(to_accumulator(static_cast<const T*>(param.data)[c * param.stride]))
                      : param.value;
  }
  __device__ double affine(double sum, int64_t c) const {
    return (sum / output_size + load(bias, c)) * load(scale, c) + load(shift, c);
  }
};

// The whole block turns the plane sums of one sample into its output. Its threads are kColumns output channels times
// kSlices slices of the depth, which runs over input channels and regions: weight_at(k, j) gives U, fill(k, count, sums)
// puts plane sums into shared memory. The first weights are asked for before the sums, so that both are under way at once.
template <class T, bool kLogSumExp>
struct SampleFinisher {
  using Acc = Accumulator<T>;
  double sums[kFinishDepth];
  double dots[kSlices][kColumns];
  double2 warp_results[kColumns / 32];

  template <class WeightAt, class Fill>
  __device__ void run(const Channels<T>& channels, int64_t sample, int64_t first_block, int64_t blocks,
                      const WeightAt& weight_at, const Fill& fill) {
    constexpr int kAhead = 16;
    const int64_t per_group = channels.out_channels / channels.groups;
    const int64_t blocks_per_group = ceil_div(per_group, kColumns);
    const int64_t depth = channels.in_channels / channels.groups * channels.regions;
    const int column = threadIdx.x % kColumns, slice = threadIdx.x / kColumns;
    RunningLogSumExp<Acc> running;
    for (int64_t block = first_block; block < first_block + blocks; ++block) {
      const int64_t group = block / blocks_per_group, j = block % blocks_per_group * kColumns + column;
      double dot = 0;
      for (int64_t first = 0; first < depth; first += kFinishDepth) {
        const int count = static_cast<int>(min(static_cast<int64_t>(kFinishDepth), depth - first));
        double weights[kAhead];
        for (int begin = 0; begin < count; begin += kAhead * kSlices) {
#pragma unroll
          for (int u = 0; u < kAhead; ++u) {
            const int k = begin + u * kSlices + slice;
            weights[u] = k < count && j < per_group ? weight_at(group * depth + first + k, j) : 0.0;
          }
          if (begin == 0) {
            __syncthreads();
            fill(group * depth + first, count, sums);
            __syncthreads();
          }
#pragma unroll
          for (int u = 0; u < kAhead; ++u) {
            const int k = begin + u * kSlices + slice;
            if (k < count) dot += weights[u] * sums[k];
          }
        }
      }
      dots[slice][column] = dot;
      __syncthreads();
      if (slice == 0 && j < per_group) {
#pragma unroll
        for (int other = 1; other < kSlices; ++other) dot += dots[other][column];
        const int64_t channel = group * per_group + j;
        const double value = channels.affine(dot, channel);
        if constexpr (kLogSumExp)
          running.add(value);
        else
          channels.output[sample * channels.out_channels + channel] = from_double<T>(value);
      }
      __syncthreads();
    }
    if constexpr (kLogSumExp) {
      if (slice != 0) return;
      running.add_lanes();
      if (column % 32 == 0) warp_results[column / 32] = {running.maximum, running.sum};
      asm volatile("bar.sync 1, %0;" ::"n"(kColumns) : "memory");  // the threads of slice 0
      if (threadIdx.x == 0) {
#pragma unroll
        for (int warp = 1; warp < kColumns / 32; ++warp) running.add(warp_results[warp].x, warp_results[warp].y);
        channels.output[sample] = from_double<T>(running.value() * channels.out_scale);
      }
    }
  }
};

// Behind the kernel that sums the planes: `column_blocks` blocks per sample, one where all channels meet in a logsumexp.
template <class T, bool kLogSumExp>
__global__ void __launch_bounds__(kFinishThreads)
    finish(const double* __restrict__ plane_sums,  // (N, C_in, regions, chunks)
           const double* __restrict__ tap_sums,    // (C_in, regions, C_out/groups)
           int64_t chunks, int64_t column_blocks, const __grid_constant__ Channels<T> channels) {
  __shared__ SampleFinisher<T, kLogSumExp> finisher;
  const int64_t sample = blockIdx.x / column_blocks, per_group = channels.out_channels / channels.groups;
  const double* sample_sums = plane_sums + sample * channels.in_channels * channels.regions * chunks;
  int width = 1;
  while (width < chunks && width < 32) width *= 2;
  const auto weight_at = [&](int64_t k, int64_t j) { return tap_sums[k * per_group + j]; };
  const auto fill = [&](int64_t first, int count, double* sums) {
    for (int k = threadIdx.x / width; k < (count + 31) / 32 * 32; k += kFinishThreads / width) {
      const double sum =
          sum_of_chunks(sample_sums + (first + k) * chunks, k < count ? chunks : 0, threadIdx.x % width, width);
      if (threadIdx.x % width == 0 && k < count) sums[k] = sum;
    }
  };
  wait_for_previous_launch();
  const int64_t all_blocks = channels.groups * ceil_div(per_group, kColumns);
  finisher.run(channels, sample, kLogSumExp ? 0 : blockIdx.x % column_blocks, kLogSumExp ? all_blocks : 1, weight_at,
               fill);
}

// One block per sample does all of it, where a sample is small.
template <class T, bool kLogSumExp>
__global__ void __launch_bounds__(kFinishThreads)
    whole_sample(const T* __restrict__ input,  // (N, C_in, plane)
                 int64_t plane, int warps, const __grid_constant__ Channels<T> channels,
                 const __grid_constant__ TapSums<T> taps) {
  __shared__ SampleFinisher<T, kLogSumExp> finisher;
  __shared__ double warp_sums[kFinishThreads / 32];
  extern __shared__ __align__(16) double plane_sums[];   // (C_in)
  double* tap_sums = plane_sums + channels.in_channels;  // (C_in, C_out/groups)
  // From the last thread on, since the first warps have most of the planes to read.
  for (int64_t pair = kFinishThreads - 1 - threadIdx.x; pair < taps.pairs; pair += kFinishThreads)
    tap_sums[pair] = taps.all_taps(pair, 0, 1);
  const int64_t sample = blockIdx.x;
  const T* x = input + sample * channels.in_channels * plane;
  const int warp = threadIdx.x / 32, per_round = kFinishThreads / 32 / warps;
  for (int64_t first = 0; first < channels.in_channels; first += per_round) {
    const int64_t channel = first + warp / warps;
    double sum = 0;
    if (channel < channels.in_channels)
      sum = strided_sum(x + channel * plane, plane, threadIdx.x % (warps * 32), warps * 32);
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) warp_sums[warp] = sum;
    __syncthreads();
    if (threadIdx.x < per_round && first + threadIdx.x < channels.in_channels) {
      sum = 0;
      for (int w = 0; w < warps; ++w) sum += warp_sums[threadIdx.x * warps + w];
      plane_sums[first + threadIdx.x] = sum;
    }
    __syncthreads();
  }
  const auto weight_at = [&](int64_t k, int64_t j) { return tap_sums[k * taps.per_group + j]; };
  const auto fill = [&](int64_t first, int count, double* sums) {
    for (int k = threadIdx.x; k < count; k += kFinishThreads) sums[k] = plane_sums[first + k];
  };
  finisher.run(channels, sample, 0, channels.groups * ceil_div(taps.per_group, kColumns), weight_at, fill);
}

// ---- Host --------------------------------------------------------------------------------------------------------

template <class T, class Store, class Taps>
void launch_plane_sums(const CudaContext& cuda, const GlobalPoolPlan& plan, const GlobalPoolProblem& problem,
                       const T* input, const Store& store, const Taps& taps) {
  const int64_t planes = problem.batch * problem.channels;
  if (plan.sum == SumKernel::kTile)
    cuda.launch(plan.launch[0], tile_sums<T, Store, Taps>, input, planes, static_cast<int>(problem.plane), plan.planes,
                plan.lanes, store, taps);
  else
    cuda.launch(plan.launch[0], chunk_sums<T, Store, Taps>, input, planes, problem.plane, plan.chunks,
                plan.chunk_elements, plan.warps, store, taps);
}

Tensor global_avg_pool_cuda(const Tensor& input) {
  const Ints output_sizes = check_global_avg_pool(info(input));
  const CudaContext cuda("global_avg_pool", input);
  Tensor output = empty(output_sizes, input.scalar_type(), input);
  const auto sizes = input.sizes();
  const auto problem = global_pool_problem({sizes.begin(), sizes.end()}, static_cast<int>(input.element_size()));
  const GlobalPoolPlan plan = plan_global_avg_pool(problem, cuda.properties());
  if (plan.launches == 0) return output;
  const Tensor x = as_contiguous(input);
  dispatch(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T* data = static_cast<const T*>(x.const_data_ptr());
    const Mean<T> mean{static_cast<T*>(output.mutable_data_ptr()), static_cast<double>(problem.plane)};
    if (plan.chunks == 1) {
      launch_plane_sums(cuda, plan, problem, data, mean, NoTaps());
    } else {
      const Tensor workspace = empty_bytes(plan.workspace, input);
      auto* sums = static_cast<double*>(workspace.mutable_data_ptr());
      launch_plane_sums(cuda, plan, problem, data, PartialSum{sums}, NoTaps());
      cuda.launch(plan.launch[1], finish_mean<T>, sums, problem.batch * problem.channels, plan.chunks, mean);
    }
  });
  return output;
}

Regions device_regions(const ConvTranspose<int64_t>& conv, const std::vector<Segmentation>& segments) {
  Regions regions;
  for (int d = 0; d < conv.spatial_dims; ++d) {
    SegmentedDim& dim = regions.dims[kMaxSpatialDims - conv.spatial_dims + d];
    const std::vector<Range>& cut = segments[d].segments;
    dim.size = conv.input[d];
    dim.conv = conv_dim(conv, d);
    dim.count = static_cast<int>(cut.size());
    for (int i = 0; i < dim.count; ++i) {
      dim.begin[i] = cut[i].begin;
      dim.end[i] = cut[i].end;
    }
  }
  return regions;
}

Tensor run_chain(const char* op, bool logsumexp, const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                 const Ints& stride, const Ints& padding, const Ints& output_padding, int64_t groups,
                 const Ints& dilation, const MaybeTensor& scale, const MaybeTensor& shift, double out_scale) {
  const auto checked = check_conv_transpose_global_avg_pool(
      op, logsumexp, info(input), info(weight), MaybeInfo(bias).get(), stride, padding, output_padding, groups,
      dilation, MaybeInfo(scale).get(), MaybeInfo(shift).get());
  const auto& conv = checked.conv;
  const std::vector<Segmentation> segments = segment_inputs(op, conv);
  const Regions regions = device_regions(conv, segments);
  const CudaContext cuda(op, input);
  Tensor output = empty(checked.output, input.scalar_type(), input);
  const auto problem = global_pool_problem(conv, logsumexp, static_cast<int>(input.element_size()), segments);
  const GlobalPoolPlan plan = plan_global_avg_pool(problem, cuda.properties());
  if (plan.launches == 0) return output;
  const Tensor x = as_contiguous(input), w = as_contiguous(weight);
  dispatch(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Channels<T> channels{conv.in_channels,
                               conv.out_channels,
                               conv.groups,
                               problem.regions,
                               float_product(conv.output),
                               channel_param(bias, 0.0),
                               channel_param(scale, 1.0),
                               channel_param(shift, 0.0),
                               out_scale,
                               static_cast<T*>(output.mutable_data_ptr())};
    const int64_t per_group = conv.out_channels / conv.groups;
    TapSums<T> taps{static_cast<const T*>(w.const_data_ptr()),
                    nullptr,
                    plan.tap_blocks,
                    conv.in_channels * per_group,
                    per_group,
                    problem.taps};
    const T* data = static_cast<const T*>(x.const_data_ptr());
    if (plan.sum == SumKernel::kNone) {
      cuda.launch(plan.launch[0], logsumexp ? whole_sample<T, true> : whole_sample<T, false>, data, problem.plane,
                  plan.warps, channels, taps);
      return;
    }
    const Tensor workspace = empty_bytes(plan.workspace, input);
    auto* sums = static_cast<double*>(workspace.mutable_data_ptr());
    taps.sums = sums + problem.batch * problem.channels * problem.regions * plan.chunks;
    if (plan.sum == SumKernel::kBox)
      cuda.launch(plan.launch[0], box_sums<T>, data, plan.chunks, plan.chunk_rows, regions, PartialSum{sums}, taps);
    else
      launch_plane_sums(cuda, plan, problem, data, PartialSum{sums}, taps);
    cuda.launch(plan.launch[1], logsumexp ? finish<T, true> : finish<T, false>, sums, taps.sums, plan.chunks,
                plan.column_blocks, channels);
  });
  return output;
}

Tensor conv_transpose_global_avg_pool_cuda(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                                           const Ints& stride, const Ints& padding, const Ints& output_padding,
                                           int64_t groups, const Ints& dilation, const MaybeTensor& scale,
                                           const MaybeTensor& shift) {
  return run_chain("conv_transpose_global_avg_pool", false, input, weight, bias, stride, padding, output_padding,
                   groups, dilation, scale, shift, 1.0);
}

Tensor conv_transpose_global_avg_pool_logsumexp_cuda(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                                                     const Ints& stride, const Ints& padding,
                                                     const Ints& output_padding, int64_t groups, const Ints& dilation,
                                                     const MaybeTensor& scale, const MaybeTensor& shift,
                                                     double out_scale) {
  return run_chain("conv_transpose_global_avg_pool_logsumexp", true, input, weight, bias, stride, padding,
                   output_padding, groups, dilation, scale, shift, out_scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, CUDA, m) {
  m.impl("global_avg_pool", TORCH_BOX(&global_avg_pool_cuda));
  m.impl("conv_transpose_global_avg_pool", TORCH_BOX(&conv_transpose_global_avg_pool_cuda));
  m.impl("conv_transpose_global_avg_pool_logsumexp", TORCH_BOX(&conv_transpose_global_avg_pool_logsumexp_cuda));
}

}  // namespace fused
