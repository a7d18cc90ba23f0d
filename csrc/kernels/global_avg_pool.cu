// The global-pool family on CUDA: one pass over the input, whose planes are summed; all else works on those sums.
//
//   global_avg_pool                          mean[n, c] = sum of plane (n, c) / size
//   conv_transpose_global_avg_pool[_logsumexp]
//     mean[n, co] = 1/O * sum over ci and regions r of S[n, ci, r] * U[ci, co, r] + bias[co]
//     S: sum of the input over region r, U: sum of the weight's taps that meet region r. With padding 0 there is one
//     region, the whole plane.
//
// Contiguous and channels_last inputs are read in place. Bytes: the input once, and 8 for each partial sum, of which there
// is one per plane, or one per 32 KB of a large one (channels_last: one per channel and chunk of cells). On H200 the kernels
// that read large planes take 1.01 to 1.03 times as long as a pure read.
#include <cuda_pipeline.h>

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
  static constexpr int kColumnBlocks = 3;
  double* sums;
  __device__ void operator()(int64_t i, double sum) const { sums[i] = sum; }
};
template <class T>
struct Mean {
  static constexpr int kColumnBlocks = 4;
  T* output;  // (N, C)
  double size;
  __device__ void operator()(int64_t i, double sum) const { output[i] = from_double<T>(sum / size); }
};

// One dimension cut into the segments in which the same taps apply.
struct SegmentedDim {
  int64_t size = 1, kernel = 1;
  int count = 1;
  Range cells[kMaxSegments] = {{0, 1}};
  Range taps[kMaxSegments] = {{0, 1}};
};
// A plane cut into boxes; leading dimensions of size 1 where there are fewer than three. Those of one launch, which are the
// regions from number `first` on of `total`.
struct Regions {
  SegmentedDim dims[kMaxSpatialDims];
  int64_t first = 0, total = 1;

  __host__ __device__ int count() const { return dims[0].count * dims[1].count * dims[2].count; }
  // The segment of each dimension that makes up a region.
  __device__ void segments(int region, int (&segment)[kMaxSpatialDims]) const {
    segment[2] = region % dims[2].count;
    segment[1] = region / dims[2].count % dims[1].count;
    segment[0] = region / dims[2].count / dims[1].count;
  }
};

// Walks the cells of a box from cell `first` on in steps of `step` cells, without a division per cell. `size1` and `size2`
// are the box's inner sizes, the strides the distances in memory along its three dimensions.
template <class Index>
class BoxWalk {
 public:
  __device__ BoxWalk(Index first, Index step, Index size1, Index size2, Index stride0, Index stride1, Index stride2)
      : size1_(size1),
        size2_(size2),
        step1_(step / size2 % size1),
        step2_(step % size2),
        i1_(first / size2 % size1),
        i2_(first % size2),
        step_offset_(step / size2 / size1 * stride0 + step1_ * stride1 + step2_ * stride2),
        carry1_(stride0 - size1 * stride1),
        carry2_(stride1 - size2 * stride2),
        offset_(first / size2 / size1 * stride0 + i1_ * stride1 + i2_ * stride2) {}
  __device__ Index offset() const { return offset_; }
  __device__ void advance() {
    offset_ += step_offset_;
    i1_ += step1_;
    i2_ += step2_;
    if (i2_ >= size2_) {
      i2_ -= size2_;
      ++i1_;
      offset_ += carry2_;
    }
    if (i1_ >= size1_) {
      i1_ -= size1_;
      offset_ += carry1_;
    }
  }

 private:
  Index size1_, size2_, step1_, step2_, i1_, i2_, step_offset_, carry1_, carry2_, offset_;
};
// The same for cells that lie evenly in memory.
class LineWalk {
 public:
  __device__ LineWalk(int64_t first, int64_t step, int64_t stride) : step_(step * stride), offset_(first * stride) {}
  __device__ int64_t offset() const { return offset_; }
  __device__ void advance() { offset_ += step_; }

 private:
  int64_t step_, offset_;
};

// The part of n items that falls to one of `parts`. Unlike ceil_div, it divides nothing negative: only non-negative 64-bit
// numbers that fit 32 bits divide fast.
__device__ inline Range share(int64_t n, int64_t part, int64_t parts) {
  const int64_t size = parts == 1 ? n : (n + parts - 1) / parts;
  return {min(part * size, n), min((part + 1) * size, n)};
}

// How many of n items row `row` of `rows` takes if they take turns: a number that fits 32 bits.
__device__ inline int rows_share(int64_t n, int row, int rows) { return static_cast<int>((n + rows - 1 - row) / rows); }

// The weight summed over the taps that meet each region: U[ci, r, j], j the output channel within its group. The first
// `blocks` blocks of a summing kernel do this, beside the others; none where there is no weight.
//
// Where they are `early`, the finishing kernel reads them before it waits for the rest: it starts when every block has ended or
// allowed it, and a block with such sums does neither before they are out (the fence).
template <class T>
struct TapSums {
  const T* weight = nullptr;  // (C_in, C_out/groups, taps)
  double* sums = nullptr;     // (C_in, regions, C_out/groups)
  int64_t blocks = 0, pairs = 0, per_group = 0, taps = 0;
  bool early = false;

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
  // Index counts the taps.
  template <class Index>
  __device__ double region_taps(int64_t pair, int region, const Regions& regions) const {
    constexpr int kAhead = 9;
    int segment[kMaxSpatialDims];
    regions.segments(region, segment);
    const auto& [dim0, dim1, dim2] = regions.dims;
    const Range range0 = dim0.taps[segment[0]], range1 = dim1.taps[segment[1]], range2 = dim2.taps[segment[2]];
    const auto size1 = static_cast<Index>(range1.size()), size2 = static_cast<Index>(range2.size());
    const auto kernel1 = static_cast<Index>(dim1.kernel), kernel2 = static_cast<Index>(dim2.kernel);
    const Index count = static_cast<Index>(range0.size()) * size1 * size2;
    const T* first = weight + pair * taps + (range0.begin * dim1.kernel + range1.begin) * dim2.kernel + range2.begin;
    BoxWalk<Index> walk(0, 1, size1, size2, kernel1 * kernel2, kernel2, 1);
    double sum = 0;
    for (Index i = 0; i < count; i += kAhead) {
      Accumulator<T> loaded[kAhead];
#pragma unroll
      for (int u = 0; u < kAhead; ++u) {
        loaded[u] = i + u < count ? to_accumulator(first[walk.offset()]) : 0;
        walk.advance();
      }
#pragma unroll
      for (int u = 0; u < kAhead; ++u) sum += static_cast<double>(loaded[u]);
    }
    return sum;
  }

  __device__ bool is_mine() const { return blockIdx.x < blocks; }
  __device__ void run() const {
    if (!early) allow_next_launch();
    const int lanes = taps >= kManyTaps ? 8 : 1, lane = threadIdx.x % lanes;
    for (int64_t pair = (blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x) / lanes;
         pair < (pairs + 31) / 32 * 32; pair += blocks * blockDim.x / lanes) {
      const double sum = group_sum(pair < pairs ? all_taps(pair, lane, lanes) : 0.0, lanes);
      if (lane == 0 && pair < pairs) sums[pair] = sum;
    }
    if (early) __threadfence();
  }
  __device__ void run(const Regions& regions) const {
    if (!early) allow_next_launch();
    run<int64_t>(regions, blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x);
  }
  // By the threads of `blocks` blocks, of which this is number `first`.
  template <class Index>
  __device__ void run(const Regions& regions, int64_t first) const {
    const int count = regions.count();
    for (int64_t i = first; i < pairs * count; i += blocks * blockDim.x) {
      const int64_t j = i % per_group, ci = i / per_group / count;
      const int region = static_cast<int>(i / per_group % count);
      sums[(ci * regions.total + regions.first + region) * per_group + j] =
          region_taps<Index>(ci * per_group + j, region, regions);
    }
    if (early && first < pairs * count) __threadfence();
  }
};

// What inputs are added up in before their sums go on in float64. Of float32, even a sum of two might leave the error above
// that of torch.mean where the plane's values cancel.
template <class T>
using Partial = std::conditional_t<sizeof(T) == 2, float, double>;

// A sum of bfloat16 in float32 may overflow where the plane's does not. What is not finite is summed again, in float64.
template <class T, class Acc = Partial<T>>
constexpr bool kMayOverflow = std::is_same_v<Acc, float> && !std::is_same_v<T, __half>;

template <class T>
__device__ double wide_sum(const T* x, int64_t n) {
  double sum = 0;
#pragma unroll 1
  for (int64_t i = 0; i < n; ++i) sum += static_cast<double>(to_accumulator(x[i]));
  return sum;
}

template <class Acc, class T>
__device__ Acc vector_sum(const Vector<T>& vector) {
  Acc values[Vector<T>::kSize];
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
// Blocks per multiprocessor: what the registers of kUnroll loads allow. With six for bfloat16, whose sums may have to be made
// again, the compiler moves its last load behind the sum of the others.
template <class T>
constexpr int kChunkBlocks = sizeof(T) > 2               ? 4
                             : std::is_same_v<T, __half> ? 6
                                                         : 5;

template <class Acc, class T, class Index>
__device__ double strided_sum(const T* x, Index n, int lane, int lanes) {
  constexpr int kLoads = kUnroll<T>;
  constexpr int kSize = Vector<T>::kSize;
  const bool whole_vectors = is_vector_aligned(x) && n % kSize == 0;
  const Index step = static_cast<Index>(lanes) * kSize;
  double total = 0;
  for (Index base = static_cast<Index>(lane) * kSize; base < n; base += step * kLoads) {
    Acc sums[kLoads];
    if (whole_vectors) {
      // Not by unpack: with that, the compiler moves the last load of bfloat16 behind the sum of the others, and 103 per cent
      // of a pure read's time become 107.
      Vector<T> loaded[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u)
        loaded[u] =
            base + u * step < n ? load_streaming(reinterpret_cast<const Vector<T>*>(x + base + u * step)) : Vector<T>{};
#pragma unroll
      for (int u = 0; u < kLoads; ++u) sums[u] = vector_sum<Acc>(loaded[u]);
    } else {
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        Acc values[kSize];
#pragma unroll
        for (int q = 0; q < kSize; ++q) {
          const Index i = base + u * step + q;
          values[q] = i < n ? to_accumulator(x[i]) : Acc(0);
        }
        sums[u] = tree_sum(values);
      }
    }
    total += static_cast<double>(tree_sum(sums));
  }
  if constexpr (kMayOverflow<T, Acc>)
    if (!isfinite(total)) {
      total = 0;
      for (Index base = static_cast<Index>(lane) * kSize; base < n; base += step)
        total += wide_sum(x + base, min(static_cast<Index>(kSize), n - base));
    }
  return total;
}

// `warps` warps per chunk of a plane, 1 to kMaxWarps; a block holds as many chunks as fit.
template <class T, class Store>
__global__ void __launch_bounds__(kMaxWarps * 32, kChunkBlocks<T>)
    chunk_sums(const T* __restrict__ input,  // (planes, plane)
               int64_t planes, int64_t plane, int64_t chunks, int64_t chunk_elements, int warps, Store store,
               TapSums<T> taps) {
  if (taps.is_mine()) return taps.run();
  allow_next_launch();
  const int64_t block = blockIdx.x - taps.blocks;
  __shared__ double warp_sums[kMaxWarps];
  const int warp = threadIdx.x / 32;
  const int per_block = blockDim.x / 32 / warps;
  const int64_t item = block * per_block + warp / warps;
  double sum = 0;
  if (item < planes * chunks) {
    const int64_t begin = item % chunks * chunk_elements;
    const int64_t end = begin + chunk_elements < plane ? begin + chunk_elements : plane;
    sum = strided_sum<Partial<T>>(input + item / chunks * plane + begin, end - begin, threadIdx.x % (warps * 32),
                                  warps * 32);
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

// Planes of whole vectors as a stream: a lane copies its loads to shared memory, kStreamStages - 1 stages ahead of its sums,
// across the ends of planes. Blocks stay, so none of them begins with a wait, and no lane reads what another has copied.
// `warps` warps sum a plane.
template <class T, class Store>
__global__ void __launch_bounds__(kColumnThreads, kStreamThreads / kColumnThreads)
    plane_stream(const T* __restrict__ input,  // (planes, plane)
                 int64_t planes, int64_t plane, int warps, Store store, TapSums<T> taps) {
  constexpr int kSize = Vector<T>::kSize, kRing = kStreamStages * kStreamLoads * kColumnThreads;
  extern __shared__ __align__(16) unsigned char staged[];
  __shared__ double warp_sums[2][kColumnThreads / 32];
  if (taps.is_mine()) return taps.run();
  allow_next_launch();
  Vector<T>* const ring = reinterpret_cast<Vector<T>*>(staged) + threadIdx.x;  // (stages, loads, threads)
  const int lanes = warps * 32, lane = threadIdx.x % lanes, group = threadIdx.x / lanes;
  const int per_block = kColumnThreads / lanes, warp = threadIdx.x / 32;
  const int vectors = static_cast<int>(plane / kSize), of_stage = kStreamLoads * lanes;
  const int64_t first = (blockIdx.x - taps.blocks) * per_block, stride = (gridDim.x - taps.blocks) * per_block;
  const bool aligned = is_vector_aligned(input);

  int64_t loading = first + group;
  int ahead = 0, next = lane;  // place in the ring, and the next vector
  const auto load_stage = [&] {
    if (loading < planes) {
      const T* from = input + loading * plane + next * kSize;
      const int left = vectors - next;
      if (aligned && left > (kStreamLoads - 1) * lanes) {
#pragma unroll
        for (int u = 0; u < kStreamLoads; ++u)
          __pipeline_memcpy_async(ring + ahead + u * kColumnThreads, from + u * lanes * kSize, 16);
      } else {
#pragma unroll 1
        for (int u = 0; u < kStreamLoads; ++u, from += lanes * kSize) {
          uint4* const to = reinterpret_cast<uint4*>(ring + ahead + u * kColumnThreads);
          const bool use = u * lanes < left;
          if (aligned)
            __pipeline_memcpy_async(to, use ? from : input, 16, use ? 0 : 16);
          else
            *to = use ? gather_bits(from) : uint4{};
        }
      }
      next += of_stage;
      if (next - lane >= vectors) {
        next = lane;
        loading += stride;
      }
      ahead += kStreamLoads * kColumnThreads;
      if (ahead == kRing) ahead = 0;
    }
    __pipeline_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStreamStages - 1; ++i) load_stage();

  int at = 0, parity = 0;
  for (int64_t item = first; item < planes; item += stride) {
    const int64_t mine = item + group;
    double sum = 0;
    if (mine < planes) {
#pragma unroll 1
      for (int done = 0; done < vectors; done += of_stage) {
        __pipeline_wait_prior(kStreamStages - 2);
        Vector<T> loaded[kStreamLoads];
#pragma unroll
        for (int u = 0; u < kStreamLoads; ++u) loaded[u] = ring[at + u * kColumnThreads];
        at += kStreamLoads * kColumnThreads;
        if (at == kRing) at = 0;
        load_stage();
        Partial<T> sums[kStreamLoads];
#pragma unroll
        for (int u = 0; u < kStreamLoads; ++u) sums[u] = vector_sum<Partial<T>>(loaded[u]);
        sum += static_cast<double>(tree_sum(sums));
      }
      if constexpr (kMayOverflow<T>)
        if (!isfinite(sum)) {
          sum = 0;
          for (int i = lane; i < vectors; i += lanes) sum += wide_sum(input + mine * plane + i * kSize, kSize);
        }
    }
    sum = warp_sum(sum);
    if (warps > 1) {
      // By turns in two places, so that one barrier does.
      if (threadIdx.x % 32 == 0) warp_sums[parity][warp] = sum;
      __syncthreads();
      sum = 0;
      for (int i = 0; i < warps; ++i) sum += warp_sums[parity][group * warps + i];
      parity ^= 1;
    }
    if (lane == 0 && mine < planes) store(mine, sum);
  }
}

// One lane's share of a plane in shared memory.
template <class T>
__device__ Partial<T> lane_sum(const T* x, int plane, int lane, int lanes) {
  Partial<T> sum = 0;
  int i = lane;
#pragma unroll 4
  for (; i + 3 * lanes < plane; i += 4 * lanes) {
    const Partial<T> values[4] = {to_accumulator(x[i]), to_accumulator(x[i + lanes]), to_accumulator(x[i + 2 * lanes]),
                                  to_accumulator(x[i + 3 * lanes])};
    sum += tree_sum(values);
  }
  for (; i < plane; i += lanes) sum += to_accumulator(x[i]);
  return sum;
}

// A plane of a half type, which begins at element `begin`: two neighbours from each word, or from the halves of two words.
// The pairs are those of the plane's indices, wherever it begins.
template <class T>
__device__ float pairs_sum(const T* tile, int begin, int plane) {
  const unsigned* words = reinterpret_cast<const unsigned*>(tile) + begin / 2;
  const unsigned shift = begin % 2 * 16;
  float sums[2] = {};
  unsigned word = words[0];
#pragma unroll 4
  for (int pair = 0; pair < plane / 2; ++pair) {
    const unsigned next = words[pair + 1];
    float values[2];
    unpack<T>(__funnelshift_r(word, next, shift), values);
    sums[0] += values[0];
    sums[1] += values[1];
    word = next;
  }
  if (plane % 2) sums[0] += to_accumulator(tile[begin + plane - 1]);
  return sums[0] + sums[1];
}

// Small planes: a block copies a tile of whole planes into shared memory, all of it in flight at once, and `lanes` lanes sum
// each plane.
template <class T, class Store>
__global__ void __launch_bounds__(kTileThreads)
    tile_sums(const T* __restrict__ input,  // (planes, plane)
              int64_t planes, int plane, int tile_planes, int lanes, Store store, TapSums<T> taps) {
  extern __shared__ __align__(16) unsigned char staged[];
  if (taps.is_mine()) return taps.run();
  allow_next_launch();
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
  for (int v = begin_full + threadIdx.x; v < end_full; v += kTileThreads)
    __pipeline_memcpy_async(reinterpret_cast<Vector<T>*>(staged) + v, vectors + v, sizeof(Vector<T>));
  __pipeline_commit();
  const int head_end = min(begin_full * kSize, end), tail_begin = max(end_full, begin_full) * kSize;
  for (int i = skew + threadIdx.x; i < head_end; i += kTileThreads) tile[i] = source[i - skew];
  for (int i = tail_begin + threadIdx.x; i < end; i += kTileThreads) tile[i] = source[i - skew];
  __pipeline_wait_prior(0);
  __syncthreads();

  const int lane = threadIdx.x % lanes, of_warp = 32 / lanes;  // planes that a warp sums at once, all its lanes
  for (int p = threadIdx.x / lanes; p < (count + of_warp - 1) / of_warp * of_warp; p += kTileThreads / lanes) {
    Partial<T> sum = 0;
    if (p < count) {
      const int begin = skew + p * plane;
      if constexpr (sizeof(T) == 2)
        sum = lanes == 1 ? pairs_sum(tile, begin, plane) : lane_sum(tile + begin, plane, lane, lanes);
      else
        sum = lane_sum(tile + begin, plane, lane, lanes);
    }
    sum = group_sum(sum, lanes);
    if (lane == 0 && p < count)
      store(first + p, !kMayOverflow<T> || isfinite(sum) ? sum : wide_sum(tile + skew + p * plane, plane));
  }
}

// ---- Sums of planes, channels last -------------------------------------------------------------------------------

// Adds each channel's loads to its sum in float64, kTogether of them, combined pairwise, at a time.
template <int kTogether, class T, int kLoads, int kWidth>
__device__ void add_cells(const uint4 (&loaded)[kLoads], double (&sums)[kWidth]) {
  // By halves, since all values at once would take too many registers.
  constexpr int kHalf = kWidth / 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    Accumulator<T> values[kHalf][kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      Accumulator<T> unpacked[kHalf];
      unpack<T>(half ? uint2{loaded[u].z, loaded[u].w} : uint2{loaded[u].x, loaded[u].y}, unpacked);
#pragma unroll
      for (int q = 0; q < kHalf; ++q) values[q][u] = unpacked[q];
    }
#pragma unroll
    for (int q = 0; q < kHalf; ++q) add_groups<kTogether>(values[q], sums[half * kHalf + q]);
  }
}

// Adds up kWidth neighbouring channels over `cells` cells, which the walk goes through: in float64 at once, unless Acc is what
// the dtype accumulates in; then each channel's loads add up pairwise and their sums in float64.
template <class Acc, int kWidth, class T, class Walk>
__device__ void cell_sums(const T* x, Walk walk, int cells, double (&sums)[kWidth]) {
  constexpr int kLoads = kWidth > 1 ? kCellLoads : kScalarCellLoads;
  constexpr int kTogether = std::is_same_v<Acc, Accumulator<T>> ? kLoads : 1;
  if constexpr (kWidth == 1) {
    for (; cells > 0; cells -= kLoads) {
      Accumulator<T> values[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        values[u] = u < cells ? to_accumulator(x[walk.offset()]) : Accumulator<T>(0);
        walk.advance();
      }
      add_groups<kTogether>(values, sums[0]);
    }
  } else {
    const bool aligned = is_vector_aligned(x);
    for (; cells > 0; cells -= kLoads) {
      uint4 loaded[kLoads];
      const auto load = [&](const auto& load_bits) {
#pragma unroll
        for (int u = 0; u < kLoads; ++u) {
          loaded[u] = u < cells ? load_bits(x + walk.offset()) : uint4{};
          walk.advance();
        }
      };
      if (aligned)
        load([](const T* address) { return load_streaming_bits(address); });
      else
        load([](const T* address) { return gather_bits(address); });
      add_cells<kTogether, T>(loaded, sums);
    }
  }
}

// A function of its own, or its registers would count beside those of the loads in cell_sums.
template <int kWidth, class T, class Walk>
__device__ __noinline__ void wide_cell_sums(const T* x, Walk walk, int cells, double (&sums)[kWidth]) {
#pragma unroll 1
  for (; cells > 0; --cells) {
#pragma unroll
    for (int q = 0; q < kWidth; ++q) sums[q] += static_cast<double>(to_accumulator(x[walk.offset() + q]));
    walk.advance();
  }
}

// Where a sum is not finite, all are what `sum_again` makes of them.
template <int kWidth, class SumAgain>
__device__ void replace_infinite(double (&sums)[kWidth], const SumAgain& sum_again) {
  bool finite = true;
#pragma unroll
  for (int q = 0; q < kWidth; ++q) finite &= isfinite(sums[q]);
  if (finite) return;
  double again[kWidth] = {};
  sum_again(again);
#pragma unroll
  for (int q = 0; q < kWidth; ++q) sums[q] = again[q];
}

// The sums of all rows of threads, pairwise, in row 0; thread (row, column) is number row * columns + column. The caller
// keeps a barrier between two calls.
template <int kWidth, int kThreads>
__device__ void add_rows(double (&sums)[kWidth], double (&shared)[kWidth][kThreads], int row, int rows, int columns) {
  for (int count = rows; count > 1;) {
    const int half = (count + 1) / 2;
    if (row >= half && row < count) {
#pragma unroll
      for (int q = 0; q < kWidth; ++q) shared[q][threadIdx.x] = sums[q];
    }
    __syncthreads();
    if (row + half < count) {
#pragma unroll
      for (int q = 0; q < kWidth; ++q) sums[q] += shared[q][threadIdx.x + half * columns];
    }
    count = half;
  }
}

// What a channel is summed over: the whole plane, or each of its regions.
struct WholePlane {
  int64_t size;
  __device__ int count() const { return 1; }
  __device__ int64_t sum_index(int64_t plane, int) const { return plane; }
  __device__ int64_t cells(int) const { return size; }
  __device__ int64_t begin(int) const { return 0; }
  __device__ LineWalk walk(int, int64_t first, int64_t step, int64_t channels) const { return {first, step, channels}; }
  template <class T>
  __device__ void run(const TapSums<T>& taps) const {
    taps.run();
  }
};
struct PlaneRegions {
  Regions regions;
  __device__ int count() const { return regions.count(); }
  __device__ int64_t sum_index(int64_t plane, int region) const {
    return plane * regions.total + regions.first + region;
  }
  __device__ Range range(int d, int region) const {
    int segment[kMaxSpatialDims];
    regions.segments(region, segment);
    return regions.dims[d].cells[segment[d]];
  }
  __device__ int64_t cells(int region) const {
    return range(0, region).size() * range(1, region).size() * range(2, region).size();
  }
  __device__ int64_t begin(int region) const {
    return (range(0, region).begin * regions.dims[1].size + range(1, region).begin) * regions.dims[2].size +
           range(2, region).begin;
  }
  __device__ BoxWalk<int64_t> walk(int region, int64_t first, int64_t step, int64_t channels) const {
    const int64_t row = regions.dims[2].size * channels;
    return {first, step, range(1, region).size(), range(2, region).size(), regions.dims[1].size * row, row, channels};
  }
  template <class T>
  __device__ void run(const TapSums<T>& taps) const {
    taps.run(regions);
  }
};

// Blocks per multiprocessor, on H200, float32, loads of four channels: planes of 49 cells, 1.14 times a pure read with 4 blocks,
// 1.22 with 3; of 3136 cells, cut into chunks, 1.20 and 1.16.
//
// A block takes `columns` times kWidth neighbouring channels of one of `chunks` shares of a plane's cells: its threads are
// rows of `columns`, which lie side by side in memory, and each row takes a cell at a time.
template <class T, int kWidth, class Cells, class Store>
__global__ void __launch_bounds__(kColumnThreads, Store::kColumnBlocks)
    column_sums(const T* __restrict__ input,  // (N, plane, C)
                int64_t channels, int64_t plane, unsigned chunks, int columns, unsigned channel_blocks,
                const __grid_constant__ Cells cells, Store store, TapSums<T> taps) {
  if (taps.is_mine()) return cells.run(taps);
  allow_next_launch();
  __shared__ double shared[kWidth][kColumnThreads];
  const unsigned block = blockIdx.x - static_cast<unsigned>(taps.blocks);
  const unsigned chunk = block / channel_blocks % chunks;
  const int64_t sample = block / channel_blocks / chunks;
  const int rows = kColumnThreads / columns, row = threadIdx.x / columns;
  const int64_t channel = (static_cast<int64_t>(block % channel_blocks) * columns + threadIdx.x % columns) * kWidth;
  const bool is_column = row < rows && channel < channels;
  const auto store_sums = [&](int region, const double (&sums)[kWidth]) {
    if (!is_column || row > 0) return;
#pragma unroll
    for (int q = 0; q < kWidth; ++q)
      store(cells.sum_index(sample * channels + channel + q, region) * chunks + chunk, sums[q]);
  };
  for (int region = 0; region < cells.count(); ++region) {
    Range mine = share(cells.cells(region), chunk, chunks);
    if constexpr (std::is_same_v<Cells, PlaneRegions>)
      // What a block can load at once is left to one block; the others go on meanwhile.
      if (chunks > 1 && cells.cells(region) <= rows * kCellLoads) {
        if (region % chunks != chunk) {
          store_sums(region, {});
          continue;
        }
        mine = {0, cells.cells(region)};
      }
    if (region > 0) __syncthreads();
    const int row_cells = rows_share(mine.size(), row, rows);
    double sums[kWidth] = {};
    if (is_column) {
      const T* x = input + (sample * plane + cells.begin(region)) * channels + channel;
      cell_sums<Partial<T>>(x, cells.walk(region, mine.begin + row, rows, channels), row_cells, sums);
      if constexpr (kMayOverflow<T>)
        replace_infinite(sums, [&](double (&again)[kWidth]) {
          wide_cell_sums(x, cells.walk(region, mine.begin + row, rows, channels), row_cells, again);
        });
    }
    add_rows(sums, shared, row, rows, columns);
    store_sums(region, sums);
  }
}

// What column_stream goes through.
struct ColumnStream {
  int64_t channels = 0, plane = 0, items = 0;
  unsigned chunks = 1, chunk_cells = 0, channel_blocks = 1;
  int columns = 1;
  bool whole_planes = false;  // whether an item is all chunks of a plane
};

// The chunks that a block of column_stream sums, one after another: those of every stride-th item.
class ColumnRuns {
 public:
  __device__ ColumnRuns(const ColumnStream& stream, unsigned first, unsigned stride)
      : stream_(stream), item_(first), stride_(stride) {
    split(first, sample, chunk, channel_block);
    split(stride, step_sample_, step_chunk_, step_block_);
  }
  int64_t sample;
  unsigned chunk, channel_block;

  __device__ bool any() const { return item_ < stream_.items; }
  __device__ bool is_last_of_item() const { return !stream_.whole_planes || chunk + 1 == stream_.chunks; }
  __device__ void next() {
    if (!is_last_of_item()) {
      ++chunk;
      return;
    }
    item_ += stride_;
    sample += step_sample_;
    if (stream_.whole_planes) chunk = 0;
    if (add(channel_block, step_block_, stream_.channel_blocks)) {
      if (stream_.whole_planes)
        ++sample;
      else
        sample += add(chunk, 1, stream_.chunks);
    }
    if (!stream_.whole_planes) sample += add(chunk, step_chunk_, stream_.chunks);
  }
  __device__ int64_t first_cell() const { return static_cast<int64_t>(chunk) * stream_.chunk_cells; }
  __device__ unsigned cells() const {
    return static_cast<unsigned>(min(static_cast<int64_t>(stream_.chunk_cells), stream_.plane - first_cell()));
  }

 private:
  __device__ void split(unsigned item, int64_t& sample, unsigned& chunk, unsigned& channel_block) const {
    channel_block = item % stream_.channel_blocks;
    item /= stream_.channel_blocks;
    chunk = stream_.whole_planes ? 0 : item % stream_.chunks;
    sample = stream_.whole_planes ? item : item / stream_.chunks;
  }
  // Whether the digit overflows.
  __device__ static bool add(unsigned& digit, unsigned step, unsigned base) {
    digit += step;
    const bool over = digit >= base;
    if (over) digit -= base;
    return over;
  }
  const ColumnStream& stream_;
  int64_t item_, step_sample_;
  unsigned stride_, step_chunk_, step_block_;
};

// Whole planes as a stream: a thread copies loads to shared memory, kStreamStages - 1 stages ahead of its sums, across the
// ends of chunks and items. Blocks stay, so none of them begins with a wait, and no thread reads what another has copied.
//
// A block's threads are rows of `columns`, which lie side by side in memory, and each row takes a cell at a time. Chunks of a
// plane add up one after another, whether a block has them all or finish_mean reads their sums.
//
// On H200, (32, 512, 56, 56) takes 53 us in float32 and 29 in float16 (a pure read: 48 and 26), where column_sums and a second
// launch took 58 and 37. Half as many rows of twice the loads side by side took 1 us longer in float16: with fewer warps, they
// wait for one another's arithmetic.
template <class T, class Store>
__global__ void __launch_bounds__(kColumnThreads, kStreamThreads / kColumnThreads)
    column_stream(const T* __restrict__ input,  // (N, plane, C)
                  const __grid_constant__ ColumnStream stream, Store store, TapSums<T> taps) {
  constexpr int kWidth = Vector<T>::kSize;
  constexpr int kTogether = std::is_same_v<Partial<T>, Accumulator<T>> ? kStreamLoads : 1;
  static_assert(kWidth * sizeof(double) <= kStreamLoads * sizeof(uint4));
  extern __shared__ __align__(16) unsigned char staged[];
  if (taps.is_mine()) return taps.run();
  allow_next_launch();
  uint4* const ring = reinterpret_cast<uint4*>(staged);  // (stages, loads, threads)
  const int threads = blockDim.x, columns = stream.columns, rows = threads / columns;
  const int row = threadIdx.x / columns, column = threadIdx.x % columns;
  const int64_t step = rows * stream.channels;
  const bool aligned = is_vector_aligned(input);
  const auto first_channel = [&](const ColumnRuns& run) {
    return static_cast<int64_t>(run.channel_block) * columns * kWidth;
  };
  const auto exists = [&](const ColumnRuns& run) {
    return row < rows && first_channel(run) + column * kWidth < stream.channels;
  };
  const auto first_load = [&](const ColumnRuns& run) {
    return input + (run.sample * stream.plane + run.first_cell() + row) * stream.channels + first_channel(run) +
           column * kWidth;
  };
  const auto loads_of = [&](const ColumnRuns& run) {
    return exists(run) ? static_cast<int>((run.cells() + rows - 1 - row) / rows) : 0;
  };
  const auto stages_of = [&](const ColumnRuns& run) {  // at least one
    return static_cast<int>(((run.cells() + rows - 1) / rows + kStreamLoads - 1) / kStreamLoads);
  };

  ColumnRuns loading(stream, blockIdx.x - static_cast<unsigned>(taps.blocks),
                     gridDim.x - static_cast<unsigned>(taps.blocks));
  ColumnRuns adding = loading;
  uint4* ahead = ring + threadIdx.x;
  const T* from = input;
  int stages = 0, loads = 0;  // left of the chunk
  const auto next_slot = [&](uint4* slot) {
    slot += kStreamLoads * threads;
    return slot < ring + kStreamStages * kStreamLoads * threads ? slot : ring + threadIdx.x;
  };
  const auto load_stage = [&] {
    if (loading.any()) {
      if (stages == 0) {
        stages = stages_of(loading);
        loads = loads_of(loading);
        from = first_load(loading);
      }
      if (aligned && loads >= kStreamLoads) {
#pragma unroll
        for (int u = 0; u < kStreamLoads; ++u) {
          __pipeline_memcpy_async(ahead + u * threads, from, 16);
          from += step;
        }
      } else if (aligned) {
#pragma unroll
        for (int u = 0; u < kStreamLoads; ++u) {
          __pipeline_memcpy_async(ahead + u * threads, u < loads ? from : input, 16, u < loads ? 0 : 16);
          from += step;
        }
      } else {
#pragma unroll 1
        for (int u = 0; u < kStreamLoads; ++u) {
          ahead[u * threads] = u < loads ? gather_bits(from) : uint4{};
          from += step;
        }
      }
      loads -= kStreamLoads;
      ahead = next_slot(ahead);
      if (--stages == 0) loading.next();
    }
    __pipeline_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStreamStages - 1; ++i) load_stage();

  uint4* slot = ring + threadIdx.x;
  double total = 0;
  for (; adding.any(); adding.next()) {
    double sums[kWidth] = {};
    uint4* last = slot;
#pragma unroll 1
    for (int left = stages_of(adding); left > 0; --left) {
      __pipeline_wait_prior(kStreamStages - 2);
      uint4 loaded[kStreamLoads];
#pragma unroll
      for (int u = 0; u < kStreamLoads; ++u) loaded[u] = slot[u * threads];
      last = slot;
      slot = next_slot(slot);
      load_stage();
      add_cells<kTogether, T>(loaded, sums);
    }
    if constexpr (kMayOverflow<T>)
      if (exists(adding))
        replace_infinite(sums, [&](double (&again)[kWidth]) {
          wide_cell_sums(first_load(adding), LineWalk(0, 1, step), loads_of(adding), again);
        });
    // A thread leaves its sums where its last loads were; a channel has one thread that adds up its rows'.
    const auto finish = [&](double sum, int64_t i) {
      total += sum;
      if (!adding.is_last_of_item()) return;
      store(stream.whole_planes ? i : i * stream.chunks + adding.chunk, total);
      total = 0;
    };
#pragma unroll
    for (int q = 0; q < kWidth; q += 2) *reinterpret_cast<double2*>(last + q / 2 * threads) = {sums[q], sums[q + 1]};
    __syncthreads();
    for (int c = threadIdx.x; c < columns * kWidth; c += threads) {
      const uint4* of_row = last - threadIdx.x + c % kWidth / 2 * threads + c / kWidth;
      double sum = 0;
      for (int r = 0; r < rows; ++r, of_row += columns) sum += reinterpret_cast<const double*>(of_row)[c % 2];
      const int64_t channel = first_channel(adding) + c;
      if (channel < stream.channels) finish(sum, adding.sample * stream.channels + channel);
    }
    __syncthreads();
  }
}

// ---- Sums of regions ---------------------------------------------------------------------------------------------

// Sums of the boxes of a contiguous plane, so that cells of different regions never meet in a sum. The rows of a plane are
// summed as cells of channels are above, a thread keeping to its place in the row, and the columns told apart at the end.
// `warps` warps take one of `chunks` shares of the rows of every pair of outer segments; what one warp can load at once is
// left to one warp, the others go on meanwhile.
template <class T>
__global__ void __launch_bounds__(kMaxWarps * 32, kBoxBlocks)
    box_sums(const T* __restrict__ input,  // (planes, D0, D1, D2)
             int64_t planes, int64_t chunks, int warps, const __grid_constant__ Regions regions, PartialSum store,
             TapSums<T> taps) {
  if (taps.is_mine()) return taps.run(regions);
  allow_next_launch();
  __shared__ double segment_sums[kMaxWarps][kMaxSegments];
  // No structured binding: C++17 lets no lambda capture one.
  const SegmentedDim &dim0 = regions.dims[0], &dim1 = regions.dims[1], &dim2 = regions.dims[2];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, per_block = blockDim.x / 32 / warps;
  const int first_warp = warp / warps * warps;  // of those with the same item
  const int64_t item = (blockIdx.x - taps.blocks) * per_block + warp / warps;
  const bool is_item = item < planes * chunks;
  const int64_t plane_index = is_item ? item / chunks : 0, chunk = is_item ? item % chunks : 0;
  const T* plane = input + plane_index * dim0.size * dim1.size * dim2.size;
#pragma unroll 1
  for (int outer = 0; outer < dim0.count * dim1.count; ++outer) {
    const Range range0 = dim0.cells[outer / dim1.count], range1 = dim1.cells[outer % dim1.count];
    const bool alone = range0.size() * range1.size() * dim2.size <= 32 * kCellLoads * chunks;
    const bool takes_part = is_item && (!alone || warp - first_warp == outer % warps);
    if (takes_part) {
      const Range mine = {range1.begin + share(range1.size(), chunk, chunks).begin,
                          range1.begin + share(range1.size(), chunk, chunks).end};
      const int threads = alone ? 32 : warps * 32, thread = threadIdx.x % threads;
      const int columns = static_cast<int>(min(dim2.size, static_cast<int64_t>(threads)));
      const int rows = threads / columns, row = thread / columns;
      const int loads = row < rows ? rows_share(mine.size(), row, rows) : 0;
#pragma unroll 1
      for (int64_t first = 0; first < dim2.size; first += columns) {
        const int64_t column = first + thread % columns;
        double sums[1] = {};
        if (column < dim2.size) {
          const auto add = [&](const auto& cells) {
#pragma unroll 1
            for (int64_t i0 = range0.begin; i0 < range0.end; ++i0)
              cells(plane + (i0 * dim1.size + mine.begin + row) * dim2.size + column, LineWalk(0, rows, dim2.size));
          };
          add([&](const T* x, const LineWalk& walk) { cell_sums<Partial<T>>(x, walk, loads, sums); });
          if constexpr (kMayOverflow<T>)
            replace_infinite(sums, [&](double (&again)[1]) {
              add([&](const T* x, const LineWalk& walk) { wide_cell_sums(x, walk, loads, again); });
            });
        }
#pragma unroll 1
        for (int s = 0; s < dim2.count; ++s) {
          const bool inside = column >= dim2.cells[s].begin && column < dim2.cells[s].end;
          double sum = inside ? sums[0] : 0.0;
          sum = warp_sum(sum);
          if (lane == 0) segment_sums[warp][s] = first == 0 ? sum : segment_sums[warp][s] + sum;
        }
      }
    }
    const int64_t first_region = plane_index * regions.total + regions.first + outer * dim2.count;
    if (alone) {
      __syncwarp();
      if (takes_part && lane < dim2.count) store((first_region + lane) * chunks + chunk, segment_sums[warp][lane]);
      __syncwarp();
      continue;
    }
    __syncthreads();
    const int s = threadIdx.x % (warps * 32);
    if (is_item && s < dim2.count) {
      double sum = 0;
      for (int w = 0; w < warps; ++w) sum += segment_sums[first_warp + w][s];
      store((first_region + s) * chunks + chunk, sum);
    }
    __syncthreads();
  }
}

// What box_stream goes through. An item is a chunk of `side` planes, which a warp's lanes take side by side.
struct BoxStream {
  int64_t planes = 0;
  unsigned chunks = 1;          // of a plane
  int cut = 0, chunk_size = 1;  // the dimension that chunks share, and how much of it each has; of the innermost, loads
  int side = 1, lanes = 32;     // of these lanes a plane has `rows` of `columns`
  int rows = 1, columns = 1;
  unsigned step_planes = 0, step_chunks = 0;  // from one item of a warp to the next
};

// A range within a dimension, which the plan has seen to fit.
struct Range32 {
  int begin, end;
  __device__ int size() const { return max(0, end - begin); }
};

// The rows of a box that one lane takes: every `step`-th of them from number `first` on. A slice of the plane has
// `size1` rows of `size2` elements.
class RowWalk {
 public:
  __device__ RowWalk(int first, int step, const Range32& rows0, const Range32& rows1, int size1, int size2)
      : straight_(rows0.size() <= 1), size1_(max(1, rows1.size())) {
    // Most boxes are of one slice, which saves the divisions.
    const int first0 = straight_ ? 0 : first / size1_, step0 = straight_ ? 0 : step / size1_;
    i1_ = straight_ ? 0 : first - first0 * size1_;
    step1_ = straight_ ? 0 : step - step0 * size1_;
    carry_ = (size1 - size1_) * size2;
    step_offset_ = (step0 * size1 + step - step0 * size1_) * size2;
    offset_ = ((rows0.begin + first0) * size1 + rows1.begin + first - first0 * size1_) * size2;
  }
  __device__ bool is_straight() const { return straight_; }
  __device__ int offset() const { return offset_; }
  __device__ int step_offset() const { return step_offset_; }
  __device__ void advance_straight(int steps) { offset_ += steps * step_offset_; }
  __device__ void advance() {
    offset_ += step_offset_;
    i1_ += step1_;
    if (i1_ >= size1_) {
      i1_ -= size1_;
      offset_ += carry_;
    }
  }

 private:
  bool straight_;
  int size1_, i1_, step1_, carry_, step_offset_, offset_;
};

// The runs of loads of a warp, one after another: of each item, the rows of each pair of outer segments, `columns` of
// their loads at a time.
class BoxRuns {
 public:
  __device__ BoxRuns(const BoxStream& stream, const Regions& regions, int row_loads, unsigned first)
      : stream_(stream), regions_(regions), row_loads_(row_loads) {
    plane = static_cast<int64_t>(first);
    if (stream.chunks > 1) {
      plane = first / stream.chunks;
      chunk = first % stream.chunks;
    }
    plane *= stream.side;
  }
  int64_t plane;  // the item's first
  unsigned chunk = 0;
  int column = 0;  // the run's first load of a row, within the chunk

  __device__ bool any() const { return plane < stream_.planes; }
  __device__ int outer() const { return segment0_ * regions_.dims[1].count + segment1_; }
  __device__ Range32 rows0() const { return meet(0, segment0_); }
  __device__ Range32 rows1() const { return meet(1, segment1_); }
  __device__ Range32 loads() const { return share(2, row_loads_); }  // of a row
  __device__ bool is_last_of_rows() const { return column + stream_.columns >= loads().size(); }
  __device__ void next() {
    column += stream_.columns;
    if (column < loads().size()) return;
    column = 0;
    if (++segment1_ < regions_.dims[1].count) return;
    segment1_ = 0;
    if (++segment0_ < regions_.dims[0].count) return;
    segment0_ = 0;
    plane += stream_.step_planes;
    chunk += stream_.step_chunks;
    if (chunk >= stream_.chunks) {
      chunk -= stream_.chunks;
      plane += stream_.side;
    }
  }

 private:
  // What the chunk has of a dimension.
  __device__ Range32 share(int d, int size) const {
    if (stream_.cut != d) return {0, size};
    const int begin = static_cast<int>(chunk) * stream_.chunk_size;
    return {begin, min(begin + stream_.chunk_size, size)};
  }
  __device__ Range32 meet(int d, int segment) const {
    const Range& cells = regions_.dims[d].cells[segment];
    const Range32 mine = share(d, static_cast<int>(regions_.dims[d].size));
    return {max(mine.begin, static_cast<int>(cells.begin)), min(mine.end, static_cast<int>(cells.end))};
  }
  const BoxStream& stream_;
  const Regions& regions_;
  int row_loads_, segment0_ = 0, segment1_ = 0;
};

// A barrier at which the first warp alone waits; whether this is that warp.
template <int kThreads>
__device__ bool all_warps_are_here() {
  if (threadIdx.x < 32)
    asm volatile("barrier.sync 1, %0;" ::"n"(kThreads) : "memory");
  else
    asm volatile("barrier.arrive 1, %0;" ::"n"(kThreads) : "memory");
  return threadIdx.x < 32;
}

// The boxes of planes whose rows are whole loads, as a stream: a lane keeps to its place in the row, as a thread of
// box_sums does, and copies its loads to shared memory, kStreamStages - 1 stages ahead of its sums, across the ends of
// boxes and planes. Blocks stay, so none of them begins with a wait; no lane reads what another has copied, and but for the
// sums of taps no warp waits for another.
//
// On H200, (16, 64, 128, 128) takes 21.9 us in float32 and 13.2 in float16 (a pure read: 15.7 and 8.6), where box_sums,
// with such loads, took 30.4 and 26.4; (32, 512, 56, 56) in float32, 57 and 173.
template <class T>
__global__ void __launch_bounds__(kBoxThreads, kStreamThreads / kBoxThreads)
    box_stream(const T* __restrict__ input,  // (planes, D0, D1, D2), D2 in whole loads
               const __grid_constant__ BoxStream stream, const __grid_constant__ Regions regions, PartialSum store,
               TapSums<T> taps) {
  constexpr int kWidth = Vector<T>::kSize, kWarps = kBoxThreads / 32;
  constexpr int kTogether = std::is_same_v<Partial<T>, Accumulator<T>> ? kStreamLoads : 1;
  constexpr int kRing = kStreamStages * kStreamLoads * kBoxThreads;
  extern __shared__ __align__(16) unsigned char staged[];
  __shared__ double segment_sums[kWarps][kMaxSegments];
  uint4* const ring = reinterpret_cast<uint4*>(staged) + threadIdx.x;  // (stages, loads, threads)
  const SegmentedDim &dim1 = regions.dims[1], &dim2 = regions.dims[2];
  const int size1 = static_cast<int>(dim1.size), size2 = static_cast<int>(dim2.size), row_loads = size2 / kWidth;
  const int64_t plane_size = regions.dims[0].size * dim1.size * dim2.size;
  const int warp = threadIdx.x / 32, lane = threadIdx.x & (stream.lanes - 1);
  const int group = threadIdx.x % 32 >> __popc(stream.lanes - 1);
  const bool aligned = is_vector_aligned(input);
  // A lane for which there is no row, column or plane takes the last one's loads, and its sums do not count.
  const int rows = stream.rows, row = min(lane / stream.columns, rows - 1);
  const int column = min(lane - row * stream.columns, stream.columns - 1);
  const auto first_load = [&](const BoxRuns& run) {
    return input + min(run.plane + group, stream.planes - 1) * plane_size +
           (run.loads().begin + min(run.column + column, run.loads().size() - 1)) * kWidth;
  };
  const auto counts = [&](const BoxRuns& run) {
    return lane < rows * stream.columns && run.plane + group < stream.planes &&
           run.column + column < run.loads().size();
  };

  BoxRuns loading(stream, regions, row_loads, blockIdx.x * kWarps + warp);
  BoxRuns adding = loading;
  RowWalk walk(0, 1, {0, 1}, {0, 1}, 1, 1);
  const T* from = input;
  int left = 0, ahead = 0;  // rows of the run that are to be loaded, and the place in the ring
  const auto begin_run = [&] {
    const Range32 rows0 = loading.rows0(), rows1 = loading.rows1();
    left = rows0.size() * rows1.size();
    walk = RowWalk(row, rows, rows0, rows1, size1, size2);
    from = first_load(loading);
  };
  if (loading.any()) begin_run();
  const auto load_stage = [&] {
    while (left <= 0 && loading.any()) {
      loading.next();
      if (loading.any()) begin_run();
    }
    if (left > 0) {
      if (aligned && walk.is_straight() && left >= kStreamLoads * rows) {
#pragma unroll
        for (int u = 0; u < kStreamLoads; ++u)
          __pipeline_memcpy_async(ring + ahead + u * kBoxThreads, from + walk.offset() + u * walk.step_offset(), 16);
        walk.advance_straight(kStreamLoads);
      } else if (aligned) {
#pragma unroll
        for (int u = 0; u < kStreamLoads; ++u) {
          const bool use = row + u * rows < left;
          __pipeline_memcpy_async(ring + ahead + u * kBoxThreads, use ? from + walk.offset() : input, 16, use ? 0 : 16);
          walk.advance();
        }
      } else {
#pragma unroll 1
        for (int u = 0; u < kStreamLoads; ++u) {
          ring[ahead + u * kBoxThreads] = row + u * rows < left ? gather_bits(from + walk.offset()) : uint4{};
          walk.advance();
        }
      }
      left -= kStreamLoads * rows;
      ahead += kStreamLoads * kBoxThreads;
      if (ahead == kRing) ahead = 0;
    }
    __pipeline_commit();
  };
#pragma unroll 1
  for (int i = 0; i < kStreamStages - 1; ++i) load_stage();
  // While the first loads are on their way, a few warps of every block. With blocks for the taps alone, those that stay lie
  // unevenly on the multiprocessors: on H200, (512, 512, 8, 8) took 115 us so and takes 77 now, (16, 64, 512, 512) 283 and 265.
  taps.template run<int>(regions, (warp * static_cast<int64_t>(gridDim.x) + blockIdx.x) * 32 + threadIdx.x % 32);
  if (all_warps_are_here<kBoxThreads>()) allow_next_launch();

  const auto place = [](int64_t column, int first) {  // within a load
    return max(0, min(static_cast<int>(column) - first, kWidth));
  };
  int slot = 0;
  for (; adding.any(); adding.next()) {
    const int run_rows = adding.rows0().size() * adding.rows1().size();
    double sums[kWidth] = {};
#pragma unroll 1
    for (int done = 0; done < run_rows; done += kStreamLoads * rows) {
      __pipeline_wait_prior(kStreamStages - 2);
      uint4 loaded[kStreamLoads];
#pragma unroll
      for (int u = 0; u < kStreamLoads; ++u) loaded[u] = ring[slot + u * kBoxThreads];
      slot += kStreamLoads * kBoxThreads;
      if (slot == kRing) slot = 0;
      load_stage();
      add_cells<kTogether, T>(loaded, sums);
    }
    if constexpr (kMayOverflow<T>)
      replace_infinite(sums, [&](double (&again)[kWidth]) {
        wide_cell_sums(first_load(adding), RowWalk(row, rows, adding.rows0(), adding.rows1(), size1, size2),
                       (run_rows + rows - 1 - row) / rows, again);
      });
    const bool mine = counts(adding), is_last = adding.is_last_of_rows();
    const int first = (adding.loads().begin + adding.column + column) * kWidth;
    int64_t i = ((adding.plane + group) * regions.total + regions.first + adding.outer() * dim2.count) * stream.chunks +
                adding.chunk;
    // Two segments at once, of those that the run meets; the rest have nothing of it, nor have any of a run without rows.
    const int run_begin = (adding.loads().begin + adding.column) * kWidth,
              run_end = run_begin + stream.columns * kWidth;
#pragma unroll 1
    for (int s = 0; s < dim2.count; s += 2) {
      double pair[2] = {};
      if (run_rows > 0 && dim2.cells[min(s + 1, dim2.count - 1)].end > run_begin && dim2.cells[s].begin < run_end) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          const int begin = place(dim2.cells[s + p].begin, first), end = mine ? place(dim2.cells[s + p].end, first) : 0;
#pragma unroll
          for (int q = 0; q < kWidth; ++q)
            if (q >= begin && q < end) pair[p] += sums[q];
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
          if (offset < stream.lanes) {
#pragma unroll
            for (double& sum : pair) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
          }
      }
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        if (lane == 0 && s + p < dim2.count) {
          // Where a row takes several runs, the warp has one plane.
          if (adding.column > 0) pair[p] += segment_sums[warp][s + p];
          if (!is_last)
            segment_sums[warp][s + p] = pair[p];
          else if (adding.plane + group < stream.planes)
            store(i, pair[p]);
        }
        i += stream.chunks;
      }
    }
  }
}

// ---- Finishing ---------------------------------------------------------------------------------------------------

__device__ double sum_of_chunks(const double* sums, int chunks, int lane, int width) {
  constexpr int kAhead = kChunksAhead;
  double sum = 0;
  for (int first = lane; first < chunks; first += kAhead * width) {
    double loaded[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; ++u) loaded[u] = first + u * width < chunks ? sums[first + u * width] : 0.0;
#pragma unroll
    for (int u = 0; u < kAhead; ++u) sum += loaded[u];
  }
  return group_sum(sum, width);
}

template <class T>
__global__ void finish_mean(const double* __restrict__ sums,  // (planes, chunks)
                            int64_t planes, int chunks, int lanes, Mean<T> store) {
  wait_for_previous_launch();
  const int64_t plane = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / lanes;
  const double sum = sum_of_chunks(sums + plane * chunks, plane < planes ? chunks : 0, threadIdx.x % lanes, lanes);
  if (threadIdx.x % lanes == 0 && plane < planes) store(plane, sum);
}

// log(sum of exp) seen so far: maximum + log(sum). A NaN lives in the sum, since a maximum would lose it. In float64 for
// every dtype: float32's exp and log left the result up to 1.1 units in the last place off, more than eager's.
struct RunningLogSumExp {
  double maximum, sum;  // -inf and 0 of nothing

  // Equal maxima have factor 1 by definition, which keeps infinities from meeting themselves.
  __device__ static double factor(double maximum, double larger) {
    return maximum == larger ? 1.0 : exp(maximum - larger);
  }
  __device__ void add(double x) {
    const double larger = fmax(maximum, x);
    if (sum != 0) sum *= factor(maximum, larger);
    maximum = larger;
    if (x != -INFINITY) sum += factor(x, larger);
  }
};

// The largest in a warp, in every lane; no NaN among them. As integers, whose order is that of the numbers: two reductions in
// place of ten shuffles.
__device__ double warp_max(double x) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  const auto ordered = [](long long bits) { return bits ^ (bits >> 63 & INT64_MAX); };  // its own inverse
  const long long mine = ordered(__double_as_longlong(x));
  const int my_high = static_cast<int>(mine >> 32), high = __reduce_max_sync(0xffffffffu, my_high);
  const unsigned low = __reduce_max_sync(0xffffffffu, my_high == high ? static_cast<unsigned>(mine) : 0u);
  return __longlong_as_double(ordered(static_cast<long long>(high) << 32 | low));
#else
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) x = fmax(x, __shfl_xor_sync(0xffffffffu, x, offset));
  return x;
#endif
}

// log(sum of exp) of kRows rows, each spread over kRowThreads neighbouring threads, which all get it. One exp a thread: the
// compiler keeps several of them one after another.
template <int kRows>
struct RowLogSumExp {
  static constexpr int kWarps = kRowThreads / 32;
  static_assert(kWarps == 4);
  double maxima[kRows][kWarps], sums[kRows][kWarps];

  // By all threads of the block.
  __device__ double operator()(const RunningLogSumExp& mine) {
    const int row = threadIdx.x / kRowThreads, warp = threadIdx.x / 32 % kWarps;
    const bool is_first = row < kRows && threadIdx.x % 32 == 0;
    double value = warp_max(mine.maximum);
    if (is_first) maxima[row][warp] = value;
    __syncthreads();
    double maximum = 0;
    if (row < kRows) {
      maximum = fmax(fmax(maxima[row][0], maxima[row][1]), fmax(maxima[row][2], maxima[row][3]));
      value = warp_sum(mine.sum * RunningLogSumExp::factor(mine.maximum, maximum));
      if (is_first) sums[row][warp] = value;
    }
    __syncthreads();
    return row < kRows ? maximum + log(tree_sum(sums[row])) : 0.0;
  }
};

// The channel axis of a chain, and what happens on it.
template <class T>
struct Channels {
  int64_t in_channels, out_channels, groups, regions;
  int64_t per_group;         // output channels
  int64_t group_runs, runs;  // of as many output channels as a block computes at once: of a group, and of all
  int64_t depth;             // input channels per group, times regions
  double output_size;        // elements of the transposed convolution's output plane
  ChannelParam bias, scale, shift;
  double out_scale;

  __device__ static double load(const ChannelParam& param, int64_t c) {
    return param.data ? static_cast<double>(to_accumulator(static_cast<const T*>(param.data)[c * param.stride]))
                      : param.value;
  }
  struct Affine {
    double bias = 0, scale = 1, shift = 0;
    __device__ double operator()(double mean) const { return (mean + bias) * scale + shift; }
  };
  __device__ Affine affine(int64_t c) const { return {load(bias, c), load(scale, c), load(shift, c)}; }
};

// Turns the plane sums of kSamples samples into their values at the output channels, a run of kColumns of them after
// another: those of number `first`, first + step and so on. A block's threads are the columns of a run times kSlices slices
// of the depth, which runs over input channels and regions. depth_sums(first, count) gives those plane sums in shared memory,
// the samples kFinishDepth apart; it and tap_sum(i) hold from ready() on. store(s, channel, value) takes what comes out, of one
// sample and column in each thread that is given any. Everything is asked for as early as it is there, the parameters before
// ready() and the first weights before the sums, so that all are under way at once.
template <class T, int kColumns, int kSlices, int kAhead, int kSamples>
struct SampleFinisher {
  static_assert(kSamples <= kSlices && kFinishDepth % (kAhead * kSlices) == 0);
  double dots[kSamples][kSlices][kColumns];

  template <class TapSum, class Ready, class DepthSums, class Store>
  __device__ void run(const Channels<T>& channels, int64_t first, int64_t step, const TapSum& tap_sum,
                      const Ready& ready, const DepthSums& depth_sums, const Store& store) {
    const int64_t per_group = channels.per_group, depth = channels.depth;
    const int column = threadIdx.x % kColumns, slice = threadIdx.x / kColumns;
#pragma unroll 1
    for (int64_t run = first; run < channels.runs; run += step) {
      const int64_t group = channels.groups == 1 ? 0 : run / channels.group_runs;
      const int64_t j = (run - group * channels.group_runs) * kColumns + column, channel = group * per_group + j;
      const bool exists = j < per_group, stores = slice < kSamples && exists;
      typename Channels<T>::Affine affine;
      if (stores) affine = channels.affine(channel);
      if (run == first) ready();
      double partial[kSamples] = {};
      int64_t next = (group * depth + slice) * per_group + j;
#pragma unroll 1
      for (int64_t k0 = 0; k0 < depth; k0 += kFinishDepth) {
        const int count = static_cast<int>(min(static_cast<int64_t>(kFinishDepth), depth - k0));
        const double* sums = nullptr;
#pragma unroll 1
        for (int begin = 0; begin < count; begin += kAhead * kSlices) {
          double weights[kAhead];
#pragma unroll
          for (int u = 0; u < kAhead; ++u) {
            weights[u] = exists && begin + u * kSlices + slice < count ? tap_sum(next) : 0.0;
            next += kSlices * per_group;
          }
          if (begin == 0) sums = depth_sums(group * depth + k0, count) + slice;
#pragma unroll
          for (int u = 0; u < kAhead; ++u)
            if (begin + u * kSlices + slice < count) {
#pragma unroll
              for (int s = 0; s < kSamples; ++s)
                partial[s] += weights[u] * sums[s * kFinishDepth + begin + u * kSlices];
            }
        }
      }
#pragma unroll
      for (int s = 0; s < kSamples; ++s) dots[s][slice][column] = partial[s];
      __syncthreads();
      if (stores) {
        double dot = dots[slice][0][column];
#pragma unroll
        for (int other = 1; other < kSlices; ++other) dot += dots[slice][other][column];
        store(slice, channel, affine(dot / channels.output_size));
      }
      __syncthreads();
    }
  }
};

// The plane sums of some samples, from number `sample` on, as SampleFinisher wants them: `lanes` lanes add up the partial sums
// of a plane or region, once the launch before this one has ended.
template <int kSamples, int kThreads>
struct ChunkSums {
  double (&shared)[kSamples][kFinishDepth];
  const double* plane_sums;  // (N, depth of all groups, chunks)
  int64_t sample, batch, sample_depth;
  int chunks, lanes;
  int64_t filled = -1;  // what those in shared memory begin with

  __device__ const double* operator()(int64_t first, int count) {
    if (first == filled) return shared[0];
    // All that can be known before the wait stands before it.
    const double* sums = plane_sums + (sample * sample_depth + first) * chunks;
    const int shift = __popc(lanes - 1), lane = threadIdx.x & (lanes - 1), at_once = kThreads >> shift;
    const int last = round_up(count, 32), here = static_cast<int>(min(int64_t{kSamples}, batch - sample));
    if (filled < 0)
      wait_for_previous_launch();
    else
      __syncthreads();
    filled = first;
#pragma unroll 1
    for (int s = 0; s < here; ++s, sums += sample_depth * chunks) {
#pragma unroll 1
      for (int k = threadIdx.x >> shift; k < last; k += at_once) {
        const double sum = sum_of_chunks(sums + k * chunks, k < count ? chunks : 0, lane, lanes);
        if (lane == 0 && k < count) shared[s][k] = sum;
      }
    }
    __syncthreads();
    return shared[0];
  }
};

// U as the finishing kernel reads it: early, as it is in the L2 cache, where its writers' fences left it.
struct SummedTaps {
  const double* sums;  // (C_in, regions, C_out/groups)
  bool early;
  __device__ void wait() const {
    if (!early) wait_for_previous_launch();
  }
  __device__ double operator()(int64_t i) const { return __ldcg(sums + i); }
};

// Behind the kernel that sums the planes: a block takes a run of channels of kSamples samples. Value is T, or double where a
// logsumexp follows. The first sums of taps are read before the wait for those of planes, if TapSums allows: on H200, that
// and what follows the wait kept short are 1.2 us of the 5 that workload A took beyond a pure read.
template <class T, class Value, int kSamples>
__global__ void __launch_bounds__(kFinishThreads, kFinishBlocks)
    finish(const double* __restrict__ plane_sums,  // (N, C_in, regions, chunks)
           SummedTaps tap_sum,
           Value* output,  // (N, C_out)
           int64_t batch, int chunks, int lanes, const __grid_constant__ Channels<T> channels) {
  __shared__ SampleFinisher<T, kFinishColumns, kFinishThreads / kFinishColumns, kSamples == 1 ? 16 : 8, kSamples>
      finisher;
  __shared__ double shared[kSamples][kFinishDepth];
  allow_next_launch();
  const auto runs = static_cast<unsigned>(channels.runs);
  const int64_t sample = static_cast<int64_t>(blockIdx.x / runs) * kSamples;
  ChunkSums<kSamples, kFinishThreads> sums{shared, plane_sums, sample, batch, channels.in_channels * channels.regions,
                                           chunks, lanes};
  finisher.run(
      channels, blockIdx.x % runs, runs, tap_sum, [&] { tap_sum.wait(); },
      [&](int64_t first, int count) { return sums(first, count); },
      [&](int s, int64_t channel, double value) {
        if (sample + s < batch) output[(sample + s) * channels.out_channels + channel] = from_double<Value>(value);
      });
  wait_for_previous_launch();  // where there was no depth to wait for
}

// The same with all channels in one block, where they meet in a logsumexp. Alone on its multiprocessor with one sample, it
// spills no registers: spilling, it took 2 us longer.
template <class T, int kSamples>
__global__ void __launch_bounds__(kSampleThreads, kSamples == 1 ? 1 : kSampleBlocks)
    finish_logsumexp(const double* __restrict__ plane_sums, SummedTaps tap_sum,
                     T* output,  // (N)
                     int64_t batch, int chunks, int lanes, const __grid_constant__ Channels<T> channels) {
  __shared__ SampleFinisher<T, kSampleColumns, kSampleThreads / kSampleColumns, 16 / kSamples, kSamples> finisher;
  __shared__ double shared[kSamples][kFinishDepth];
  __shared__ RowLogSumExp<kSamples> logsumexp;
  const int64_t sample = static_cast<int64_t>(blockIdx.x) * kSamples;
  ChunkSums<kSamples, kSampleThreads> sums{shared, plane_sums, sample, batch, channels.in_channels * channels.regions,
                                           chunks, lanes};
  RunningLogSumExp running{-INFINITY, 0};
  finisher.run(
      channels, 0, 1, tap_sum, [&] { tap_sum.wait(); }, [&](int64_t first, int count) { return sums(first, count); },
      [&](int, int64_t, double value) { running.add(value); });
  const double value = logsumexp(running);
  const int s = threadIdx.x / kSampleColumns;
  if (threadIdx.x % kSampleColumns == 0 && s < kSamples && sample + s < batch)
    output[sample + s] = from_double<T>(value * channels.out_scale);
  wait_for_previous_launch();  // where there was no depth to wait for
}

// Behind `finish`, where the weights of all channels are many: a block takes a sample.
template <class T>
__global__ void __launch_bounds__(kRowThreads) logsumexp_rows(const double* __restrict__ values,  // (N, C_out)
                                                              int64_t channels, double out_scale, T* output) {
  __shared__ RowLogSumExp<1> logsumexp;
  wait_for_previous_launch();
  const double* row = values + static_cast<int64_t>(blockIdx.x) * channels;
  RunningLogSumExp running{-INFINITY, 0};
#pragma unroll 4
  for (int64_t c = threadIdx.x; c < channels; c += kRowThreads) running.add(row[c]);
  const double value = logsumexp(running);
  if (threadIdx.x == 0) output[blockIdx.x] = from_double<T>(value * out_scale);
}

// One block per sample does all of it, where a sample is small. Its sums are float64 throughout: of few outputs the largest
// error is luck, so that what is better than eager on average would not be enough.
template <class T, bool kLogSumExp>
__global__ void __launch_bounds__(kSampleThreads, kSampleBlocks)
    whole_sample(const T* __restrict__ input,  // (N, C_in, plane), or (N, plane, C_in) with `channels_last`
                 int plane, bool channels_last, int warps,
                 T* output,  // (N, C_out), or (N) with kLogSumExp
                 const __grid_constant__ Channels<T> channels, const __grid_constant__ TapSums<T> taps) {
  __shared__ SampleFinisher<T, kSampleColumns, kSampleThreads / kSampleColumns, 4, 1> finisher;
  __shared__ RowLogSumExp<1> logsumexp;
  __shared__ double shared[1][kSampleThreads];
  extern __shared__ __align__(16) double plane_sums[];  // (C_in)
  const int in_channels = static_cast<int>(channels.in_channels);
  double* tap_sums = plane_sums + in_channels;  // (C_in, C_out/groups)
  const int64_t sample = blockIdx.x;
  const T* x = input + sample * in_channels * plane;
  const auto sum_planes = [&] {
    // `columns` planes at a time, with a row of threads for each of their parts.
    const int columns = channels_last ? min(kSampleThreads, in_channels) : kSampleThreads / 32 / warps;
    const int lanes = warps * 32, lane = threadIdx.x % lanes;
#pragma unroll 1
    for (int first = 0; first < in_channels; first += columns) {
      if (channels_last) {
        const int rows = kSampleThreads / columns, row = threadIdx.x / columns;
        const int channel = first + threadIdx.x % columns;
        double sum[1] = {};
        if (row < rows && channel < in_channels)
          cell_sums<double, 1>(x + channel, LineWalk(row, rows, in_channels), rows_share(plane, row, rows), sum);
        add_rows(sum, shared, row, rows, columns);
        if (row == 0 && channel < in_channels) plane_sums[channel] = sum[0];
      } else {
        const int channel = first + threadIdx.x / lanes;
        double sum = channel < in_channels ? strided_sum<double>(x + channel * plane, plane, lane, lanes) : 0.0;
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) shared[0][threadIdx.x / 32] = sum;
        __syncthreads();
        if (threadIdx.x < columns && first + threadIdx.x < in_channels) {
          sum = 0;
          for (int w = 0; w < warps; ++w) sum += shared[0][threadIdx.x * warps + w];
          plane_sums[first + threadIdx.x] = sum;
        }
      }
      __syncthreads();
    }
  };
  // From the last thread on, since the first warps have most of the planes to read.
  const auto ready = [&] {
    const int pairs = static_cast<int>(taps.pairs);
    for (int pair = kSampleThreads - 1 - threadIdx.x; pair < pairs; pair += kSampleThreads)
      tap_sums[pair] = taps.all_taps(pair, 0, 1);
    sum_planes();
  };
  RunningLogSumExp running{-INFINITY, 0};
  finisher.run(
      channels, 0, 1, [&](int64_t i) { return tap_sums[i]; }, ready,
      [&](int64_t first, int) { return plane_sums + first; },
      [&](int, int64_t channel, double value) {
        if constexpr (kLogSumExp)
          running.add(value);
        else
          output[sample * channels.out_channels + channel] = from_double<T>(value);
      });
  if constexpr (kLogSumExp) {
    const double value = logsumexp(running);
    if (threadIdx.x == 0) output[sample] = from_double<T>(value * channels.out_scale);
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

template <class T, class Store>
void launch_plane_sums(const CudaContext& cuda, const GlobalPoolPlan& plan, const GlobalPoolProblem& problem,
                       const T* input, const Store& store, const TapSums<T>& taps) {
  const int64_t planes = problem.batch * problem.channels;
  if (plan.sum == SumKernel::kTile)
    cuda.launch(plan.launch[0], tile_sums<T, Store>, input, planes, static_cast<int>(problem.plane), plan.planes,
                plan.lanes, store, taps);
  else if (plan.sum == SumKernel::kPlaneStream)
    cuda.launch(plan.launch[0], plane_stream<T, Store>, input, planes, problem.plane, plan.warps, store, taps);
  else
    cuda.launch(plan.launch[0], chunk_sums<T, Store>, input, planes, problem.plane, plan.chunks, plan.chunk_elements,
                plan.warps, store, taps);
}

template <class T, class Cells, class Store>
void launch_column_sums(const CudaContext& cuda, const GlobalPoolPlan& plan, const GlobalPoolProblem& problem,
                        const T* input, const Cells& cells, const Store& store, const TapSums<T>& taps) {
  if constexpr (std::is_same_v<Cells, WholePlane>)
    if (plan.sum == SumKernel::kColumnStream) {
      const ColumnStream stream{problem.channels,
                                problem.plane,
                                plan.items,
                                static_cast<unsigned>(plan.chunks),
                                static_cast<unsigned>(plan.chunk_elements),
                                static_cast<unsigned>(plan.channel_blocks),
                                plan.columns,
                                plan.whole_planes};
      return cuda.launch(plan.launch[0], column_stream<T, Store>, input, stream, store, taps);
    }
  cuda.launch(plan.launch[0],
              plan.width > 1 ? column_sums<T, Vector<T>::kSize, Cells, Store> : column_sums<T, 1, Cells, Store>, input,
              problem.channels, problem.plane, static_cast<unsigned>(plan.chunks), plan.columns,
              static_cast<unsigned>(plan.channel_blocks), cells, store, taps);
}

BoxStream box_stream_of(const GlobalPoolPlan& plan, const GlobalPoolProblem& problem) {
  BoxStream stream;
  stream.planes = problem.regions > 0 ? problem.batch * problem.channels : 0;
  stream.chunks = static_cast<unsigned>(plan.chunks);
  stream.cut = plan.cut;
  stream.chunk_size = static_cast<int>(plan.chunk_elements);
  stream.side = 32 / plan.lanes;
  stream.lanes = plan.lanes;
  stream.rows = plan.lanes / plan.columns;
  stream.columns = plan.columns;
  const auto warps = static_cast<unsigned>(plan.launch[0].grid * (kBoxThreads / 32));
  stream.step_planes = warps / stream.chunks * stream.side;
  stream.step_chunks = warps % stream.chunks;
  return stream;
}

Tensor global_avg_pool_cuda(const Tensor& input) {
  const Ints output_sizes = check_global_avg_pool(info(input));
  const CudaContext cuda("global_avg_pool", input);
  Tensor output = empty(output_sizes, input.scalar_type(), input);
  const auto sizes = input.sizes();
  const bool channels_last = is_only_channels_last(input);  // read in place, as contiguous is; others are copied
  const auto problem =
      global_pool_problem({sizes.begin(), sizes.end()}, static_cast<int>(input.element_size()), channels_last);
  const GlobalPoolPlan plan = plan_global_avg_pool(problem, cuda.properties());
  if (plan.launches == 0) return output;
  const Tensor x = channels_last ? input : as_contiguous(input);
  dispatch(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const T* data = static_cast<const T*>(x.const_data_ptr());
    const Mean<T> mean{static_cast<T*>(output.mutable_data_ptr()), static_cast<double>(problem.plane)};
    const auto sum_into = [&](const auto& store) {
      if (channels_last)
        launch_column_sums(cuda, plan, problem, data, WholePlane{problem.plane}, store, TapSums<T>());
      else
        launch_plane_sums(cuda, plan, problem, data, store, TapSums<T>());
    };
    if (plan.launches == 1) return sum_into(mean);
    const Tensor workspace = empty_bytes(plan.workspace, input);
    auto* sums = static_cast<double*>(workspace.mutable_data_ptr());
    sum_into(PartialSum{sums});
    cuda.launch(plan.launch[1], finish_mean<T>, sums, problem.batch * problem.channels, static_cast<int>(plan.chunks),
                plan.lanes, mean);
  });
  return output;
}

// The regions of a plane, by launches: each takes a run of at most kMaxSegments segments of every dimension.
std::vector<Regions> device_regions(const ConvTranspose<int64_t>& conv, const std::vector<Segmentation>& segments,
                                    const GlobalPoolProblem& problem) {
  std::vector<Regions> parts;
  int64_t next = 0;
  for (int64_t part = 0; part < problem.parts; ++part) {
    Regions regions;
    int64_t rest = part;
    for (int d = 0; d < conv.spatial_dims; ++d) {
      SegmentedDim& dim = regions.dims[kMaxSpatialDims - conv.spatial_dims + d];
      const std::vector<Range>& cut = segments[d].segments;
      const auto count = static_cast<int64_t>(cut.size());
      const int64_t runs = std::max<int64_t>(1, ceil_div(count, kMaxSegments)), begin = rest % runs * kMaxSegments;
      rest /= runs;
      dim.size = conv.input[d];
      dim.kernel = conv.kernel[d];
      dim.count = static_cast<int>(std::min<int64_t>(kMaxSegments, count - begin));
      for (int i = 0; i < dim.count; ++i) {
        dim.cells[i] = cut[begin + i];
        // All cells of a segment meet the same taps, so its first one stands for it.
        dim.taps[i] = input_tap_range(conv_dim(conv, d), cut[begin + i].begin);
      }
    }
    regions.first = next;
    regions.total = problem.regions;
    next += regions.count();
    parts.push_back(regions);
  }
  return parts;
}

Tensor run_chain(const char* op, bool logsumexp, const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                 const Ints& stride, const Ints& padding, const Ints& output_padding, int64_t groups,
                 const Ints& dilation, const MaybeTensor& scale, const MaybeTensor& shift, double out_scale) {
  const auto checked = check_conv_transpose_global_avg_pool(
      op, logsumexp, info(input), info(weight), MaybeInfo(bias).get(), stride, padding, output_padding, groups,
      dilation, MaybeInfo(scale).get(), MaybeInfo(shift).get());
  const auto& conv = checked.conv;
  const std::vector<Segmentation> segments = segment_inputs(conv);
  const CudaContext cuda(op, input);
  Tensor output = empty(checked.output, input.scalar_type(), input);
  const bool channels_last = is_only_channels_last(input);  // read in place, as contiguous is; others are copied
  const auto problem =
      global_pool_problem(conv, logsumexp, static_cast<int>(input.element_size()), channels_last, segments);
  const GlobalPoolPlan plan = plan_global_avg_pool(problem, cuda.properties());
  if (plan.launches == 0) return output;
  const Tensor x = channels_last ? input : as_contiguous(input), w = as_contiguous(weight);
  dispatch(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const int64_t per_group = conv.out_channels / conv.groups;
    const Channels<T> channels{conv.in_channels,
                               conv.out_channels,
                               conv.groups,
                               problem.regions,
                               per_group,
                               ceil_div(per_group, plan.finish_columns),
                               conv.groups * ceil_div(per_group, plan.finish_columns),
                               conv.in_channels / conv.groups * problem.regions,
                               float_product(conv.output),
                               channel_param(bias, 0.0),
                               channel_param(scale, 1.0),
                               channel_param(shift, 0.0),
                               out_scale};
    T* const result = static_cast<T*>(output.mutable_data_ptr());
    TapSums<T> taps{static_cast<const T*>(w.const_data_ptr()),
                    nullptr,
                    plan.tap_blocks,
                    conv.in_channels * per_group,
                    per_group,
                    problem.taps,
                    plan.early_taps};
    const T* data = static_cast<const T*>(x.const_data_ptr());
    if (plan.sum == SumKernel::kNone) {
      cuda.launch(plan.launch[0], logsumexp ? whole_sample<T, true> : whole_sample<T, false>, data,
                  static_cast<int>(problem.plane), channels_last, plan.warps, result, channels, taps);
      return;
    }
    const Tensor workspace = empty_bytes(plan.workspace, input);
    auto* sums = static_cast<double*>(workspace.mutable_data_ptr());
    taps.sums = sums + problem.batch * problem.channels * problem.regions * plan.chunks;
    for (const Regions& regions : device_regions(conv, segments, problem)) {
      if (channels_last && problem.boxes)
        launch_column_sums(cuda, plan, problem, data, PlaneRegions{regions}, PartialSum{sums}, taps);
      else if (channels_last)
        launch_column_sums(cuda, plan, problem, data, WholePlane{problem.plane}, PartialSum{sums}, taps);
      else if (plan.sum == SumKernel::kBoxStream)
        cuda.launch(plan.launch[0], box_stream<T>, data, box_stream_of(plan, problem), regions, PartialSum{sums}, taps);
      else if (problem.boxes)
        cuda.launch(plan.launch[0], box_sums<T>, data, problem.batch * problem.channels, plan.chunks, plan.warps,
                    regions, PartialSum{sums}, taps);
      else
        launch_plane_sums(cuda, plan, problem, data, PartialSum{sums}, taps);
    }
    const auto launch_finish = [&](const auto& kernel, auto* values) {
      cuda.launch(plan.launch[1], kernel, sums, SummedTaps{taps.sums, taps.early}, values, problem.batch,
                  static_cast<int>(plan.chunks), plan.finish_lanes, channels);
    };
    const bool alone = plan.finish_samples == 1;
    if (!logsumexp) return launch_finish(alone ? finish<T, T, 1> : finish<T, T, kFinishSamples>, result);
    if (plan.launches == 2)
      return launch_finish(alone ? finish_logsumexp<T, 1> : finish_logsumexp<T, kFinishSamples>, result);
    double* const values = taps.sums + taps.pairs * problem.regions;
    launch_finish(alone ? finish<T, double, 1> : finish<T, double, kFinishSamples>, values);
    cuda.launch(plan.launch[2], logsumexp_rows<T>, values, conv.out_channels, out_scale, result);
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
