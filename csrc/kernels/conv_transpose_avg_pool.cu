// conv_transpose_avg_pool on CUDA: one small convolution with summed taps, whose output is the only thing written.
//
//   out[n, co, o] = ((1/P * sum over ci and offsets j of x[n, ci, o*r + j] * V[ci, j, co] + bias) * scale1 + shift) * scale2
//   V[ci, j, co] = sum of the taps of weight[ci, co] that the pool window brings to offset j (geometry.h)
//
// Bytes: the input and the output once. At (128, 3, 16, 32, 32) -> 16 channels on H200: 144 MB, 33 us; 0.7 G multiply-adds,
// 21 us of plain FMA. Four kernels: staged_conv for two offsets a dimension and few channels, implicit_gemm
// (implicit_gemm.cuh) for many output channels, column_conv for few, direct_conv for whatever is left.
#include <cuda_awbarrier_primitives.h>
#include <cuda_pipeline.h>

#include "collapsed_conv.cuh"
#include "conv_transpose_avg_pool.h"
#include "conv_transpose_avg_pool_plan.h"
#include "implicit_gemm.cuh"
#include "launch.cuh"
#include "vector.cuh"

namespace fused {
namespace {

// The geometry of the staged kernel in plain 32-bit numbers: 64-bit divisions took half of its time.
struct Staged {
  int tap_begin[kMaxSpatialDims][2] = {}, tap_end[kMaxSpatialDims][2] = {};  // the taps that V sums, per offset
  int offset[kMaxSpatialDims] = {};                                          // the first one
  int kernel[kMaxSpatialDims] = {}, size[kMaxSpatialDims] = {}, out[kMaxSpatialDims] = {};
  int in_channels = 0, out_channels = 0, tiles1 = 0, tiles2 = 0;
  int steps = 0;  // planes of outputs of all tiles: what the blocks share
  StagedLayout layout;
};

// Few channels, on devices whose tensor cores multiply float64 at the rate of plain float32. A block marches through
// planes of 16 x 32 outputs, or 8 x 32 where there are few. One warp moves data, four multiply: while these compute plane
// z from the input planes z and z + 1 in a ring in shared memory, the mover fetches plane z + 3 and sends the results of
// plane z - 1 away. Per input channel, 16 output channels x 8 taps meet 8 taps x 8 positions in one instruction.
//
// Why float64: chains of 24 float32 products, even split in three, had 1.2 times the error of the composition, whose pool
// averages rounding errors away. Half types multiply in TF32, which holds them exactly, by V split in two such numbers.
// Why results are gathered first: rows of 31 floats written one by one from registers share their 32-byte sectors, and took
// 90 us at (128, 3, 16, 32, 32); one run of 16 rows a channel, 60 us; no stores at all, 53.
template <class T>
struct StagedTypes {
  using Element = float;             // what is multiplied, and added up in
  static constexpr int kTerms = 2;   // numbers that V is split into
  static constexpr int kBlocks = 3;  // a multiprocessor
};
template <>
struct StagedTypes<float> {
  using Element = double;
  static constexpr int kTerms = 1;
  static constexpr int kBlocks = 2;
};

enum class StagedTask { kEnd, kLoad, kCompute };

// One step of the block's march, from the mover to the others.
struct StagedJob {
  StagedTask task;
  int group;          // of 16 output channels
  int slot, skip;     // the last input plane in the ring, and the columns before the first that is meant
  int buffer;         // of results
  int rows, columns;  // of the tile that exist
  int n, z, y, x;     // its first output
};

// What the warps of a block tell each other.
struct StagedSignals {
  __mbarrier_t barrier;
  StagedJob jobs[2];
  int exotic;  // whether V or the factors are not what the tensor cores may be trusted with

  // The barrier of the block, which the mover and the multipliers reach in different places of the code.
  __device__ void meet() {
    const __mbarrier_token_t token = __mbarrier_arrive(&barrier);
    while (!__mbarrier_try_wait(&barrier, token, 1000000)) {
    }
  }
};

// The carve-up of a block's shared memory.
template <class T>
struct StagedMemory {
  using Element = typename StagedTypes<T>::Element;
  Element* weights;  // (C_in, groups, terms, 32 lanes, 4): V times the factors, as the tensor cores want it
  double* factors;   // (channels): what V is multiplied by
  Element* base;     // (channels): what bias and shift add
  T* results;        // (2, 16 channels, result pitch)
  T* ring;           // (4 slots, C_in, rows + 1, pitch)
  __device__ StagedMemory(const Staged& staged, void* memory) {
    const int groups = (staged.out_channels + kStagedChannels - 1) / kStagedChannels;
    weights = static_cast<Element*>(memory);
    factors = reinterpret_cast<double*>(weights + staged.in_channels * groups * StagedTypes<T>::kTerms * 128);
    base = reinterpret_cast<Element*>(factors + groups * kStagedChannels);
    results = reinterpret_cast<T*>(base + groups * kStagedChannels);
    ring = results + 2 * kStagedChannels * staged.layout.result_pitch;
  }
};

// Where a tile's results of one channel and row begin: such that vectors there are vectors in the output too.
template <class T>
__device__ int result_at(const Staged& staged, const T* tile, int channel, int row) {
  const unsigned volume = static_cast<unsigned>(staged.out[0]) * staged.out[1] * staged.out[2];
  const unsigned skew = static_cast<unsigned>(staged.out[2] - staged.layout.result_row);
  const unsigned align =
      static_cast<unsigned>(reinterpret_cast<uintptr_t>(tile) / sizeof(T)) + channel * volume + row * skew;
  return channel * staged.layout.result_pitch + row * staged.layout.result_row + align % Vector<T>::kSize;
}

template <class T>
__device__ T* tile_of(const Convolution<T>& conv, const Staged& staged, const StagedJob& job) {
  return conv.output +
         ((static_cast<int64_t>(job.n) * staged.out_channels + job.group * kStagedChannels) * staged.out[0] + job.z) *
             (static_cast<int64_t>(staged.out[1]) * staged.out[2]) +
         static_cast<int64_t>(job.y) * staged.out[2] + job.x;
}

// Copies of whole vectors from shared to global memory that go on by themselves. What other threads wrote is visible to
// them behind `publish_results` and a barrier.
__device__ inline void bulk_store(void* target, const void* source, unsigned bytes) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(target),
               "r"(static_cast<unsigned>(__cvta_generic_to_shared(source))), "r"(bytes)
               : "memory");
#endif
}
__device__ inline void commit_bulk_stores() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
__device__ inline void wait_for_bulk_reads() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
}
__device__ inline void publish_results() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The mover's place in the march: input plane `plane` of a tile of which the block computes the planes [begin, end) of
// outputs.
struct StagedCursor {
  int n, y, x, plane, begin, end, step;

  __device__ void start(const Staged& staged, int last) {
    begin = plane = step % staged.out[0];
    end = min(staged.out[0], plane + last - step);
    int tile = step / staged.out[0];
    x = tile % staged.tiles2 * kStagedColumns;
    tile /= staged.tiles2;
    y = tile % staged.tiles1 * staged.layout.rows;
    n = tile / staged.tiles1;
  }
  template <int kJ0>
  __device__ void advance(const Staged& staged, int last) {
    if (++plane < end + kJ0 - 1) return;
    step += end - begin;
    if (step < last) start(staged, last);
  }
};

template <class T, int kJ0>
struct StagedMover {
  static constexpr int kSize = Vector<T>::kSize, kVectors = kStagedColumns / kSize + 1, kPitch = kVectors * kSize;
  const Convolution<T>& conv;
  const Staged& staged;
  const StagedMemory<T>& memory;
  const int lane;
  const int height;    // rows of inputs of a tile
  const bool vectors;  // rows of the input are rows of whole vectors

  __device__ StagedMover(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory)
      : conv(conv),
        staged(staged),
        memory(memory),
        lane(threadIdx.x % 32),
        height(staged.layout.rows + 1),
        vectors(is_vector_aligned(conv.input) && staged.size[2] % kSize == 0) {}

  __device__ int skip(const StagedCursor& at) const {
    return vectors ? static_cast<unsigned>(at.x + staged.offset[2]) % kSize : 0;
  }

  // Starts the copy of the inputs that a plane of the tile needs, (C_in, rows + 1, kPitch); zero where there is no input.
  __device__ void copy(const StagedCursor& at, int slot) const {
    const int plane = at.plane + staged.offset[0], y0 = at.y + staged.offset[1];
    const int x0 = at.x + staged.offset[2] - skip(at), size1 = staged.size[1];
    const bool exists = plane >= 0 && plane < staged.size[0];
    const int64_t width = staged.size[2], area = size1 * width, volume = area * staged.size[0];
    const T* corner =
        conv.input + static_cast<int64_t>(at.n) * staged.in_channels * volume + plane * area + y0 * width + x0;
    T* to = memory.ring + slot * staged.layout.slot;
    const int rows = staged.in_channels * height;
    if (vectors) {
      // Several rows at once, each lane always the same columns.
      constexpr int kAtOnce = 32 / kVectors;
      const int column = lane % kVectors * kSize, first = lane / kVectors;
      const bool inside = exists && x0 + column >= 0 && x0 + column < staged.size[2];
      if (first < kAtOnce) {
        const T* from = corner + first * width + column;
        int y = first;
#pragma unroll 4
        for (int r = first; r < rows; r += kAtOnce) {
          const bool use = inside && static_cast<unsigned>(y0 + y) < static_cast<unsigned>(size1);
          __pipeline_memcpy_async(to + r * kPitch + column, use ? from : conv.input, 16, use ? 0 : 16);
          from += kAtOnce * width;
          y += kAtOnce;
          if (y >= height) {
            y -= height;
            from += volume - height * width;
          }
        }
      }
    } else {
#pragma unroll 4
      for (int i = lane; i < rows * kPitch; i += 32) {
        const int x = i % kPitch, r = i / kPitch, y = r % height, ci = r / height;
        const bool use = exists && static_cast<unsigned>(x0 + x) < static_cast<unsigned>(staged.size[2]) &&
                         static_cast<unsigned>(y0 + y) < static_cast<unsigned>(size1);
        const T* from = use ? corner + (ci * volume + y * width + x) : conv.input;
        if constexpr (sizeof(T) == 4)
          __pipeline_memcpy_async(to + i, from, 4, use ? 0 : 4);
        else
          to[i] = use ? *from : from_accumulator<T>(0);
      }
    }
    __pipeline_commit();
  }

  // Starts the stores of a job's results: a run of all its rows per channel, a lane each.
  __device__ void store(const StagedJob& job) const {
    const int channels = min(kStagedChannels, staged.out_channels - job.group * kStagedChannels);
    if (lane < channels) {
      T* tile = tile_of(conv, staged, job);
      const int length = job.rows * job.columns, at = result_at(staged, tile, lane, 0);
      const int head = min(length, (kSize - at % kSize) % kSize), body = (length - head) / kSize * kSize;
      const T* source = memory.results + job.buffer * kStagedChannels * staged.layout.result_pitch + at;
      T* target = tile + lane * (static_cast<int64_t>(staged.out[0]) * staged.out[1] * staged.out[2]);
      if (body > 0) bulk_store(target + head, source + head, body * sizeof(T));
      for (int i = 0; i < head; ++i) target[i] = source[i];
      for (int i = head + body; i < length; ++i) target[i] = source[i];
    }
    commit_bulk_stores();
  }
};

template <class T, int kJ0>
__device__ void move(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                     StagedSignals& signals) {
  const StagedMover<T, kJ0> mover(conv, staged, memory);
  const int groups = (staged.out_channels + kStagedChannels - 1) / kStagedChannels;
  const int share = staged.steps / gridDim.x, rest = staged.steps % gridDim.x, block = blockIdx.x;
  const int last = (block + 1) * share + min(block + 1, rest);
  StagedCursor ahead{};
  ahead.step = block * share + min(block, rest);
  ahead.start(staged, last);
  StagedCursor at = ahead;
  const auto fetch = [&](int slot) {
    if (ahead.step < last) {
      mover.copy(ahead, slot);
      ahead.advance<kJ0>(staged, last);
    } else {
      __pipeline_commit();
    }
  };
#pragma unroll 1
  for (int i = 0; i < 2; ++i) fetch(i);
  signals.meet();  // in collapse_weights
  StagedJob previous{};
  int slot = 0, group = 0, buffer = 0;
  for (int turn = 0;; turn ^= 1) {
    StagedJob job{StagedTask::kEnd};
    if (at.step < last) {
      const int z = at.plane - (kJ0 - 1);
      job = {z >= at.begin ? StagedTask::kCompute : StagedTask::kLoad,
             group,
             slot,
             mover.skip(at),
             buffer,
             min(staged.layout.rows, staged.out[1] - at.y),
             min(kStagedColumns, staged.out[2] - at.x),
             at.n,
             z,
             at.y,
             at.x};
    }
    if (mover.lane == 0) signals.jobs[turn] = job;
    __pipeline_wait_prior(1);  // the job's plane has come,
    wait_for_bulk_reads();     // and its buffer of results is free
    signals.meet();
    if (previous.task == StagedTask::kCompute && staged.layout.whole_rows && !signals.exotic) mover.store(previous);
    if (job.task == StagedTask::kEnd) break;
    if (group == 0) fetch((slot + 2) % kStagedSlots);
    if (job.task == StagedTask::kCompute) buffer ^= 1;
    if (job.task == StagedTask::kLoad || ++group == groups) {
      group = 0;
      slot = (slot + 1) % kStagedSlots;
      at.advance<kJ0>(staged, last);
    }
    previous = job;
  }
  wait_for_bulk_reads();
}

// V times the factors into shared memory, and what bias and shift add.
template <class T>
__device__ void collapse_weights(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                                 StagedSignals& signals) {
  using Element = typename StagedTypes<T>::Element;
  constexpr int kThreads = kStagedMultipliers * 32, kTerms = StagedTypes<T>::kTerms;
  const int out_channels = staged.out_channels, groups = (out_channels + kStagedChannels - 1) / kStagedChannels;
  const int kernel1 = staged.kernel[1], kernel2 = staged.kernel[2], kernel = staged.kernel[0] * kernel1 * kernel2;
  // Summed from a copy of the weight in the place of the results, where it fits there. All loads leave at once: in a small
  // call their latency is most of the time.
  const int count = staged.in_channels * out_channels * kernel;
  const bool fits = count <= 2 * kStagedChannels * staged.layout.result_pitch;
  const T* weight = fits ? memory.results : conv.weight;
  const Affine<double> affine(conv, min(static_cast<int>(threadIdx.x), out_channels - 1));
  if (fits)
#pragma unroll 16
    for (int i = threadIdx.x; i < count; i += kThreads) memory.results[i] = conv.weight[i];
  bool trusted = true;
  for (int c = threadIdx.x; c < groups * kStagedChannels; c += kThreads) {
    const Affine<double> own = c < kThreads ? affine : Affine<double>(conv, min(c, out_channels - 1));
    memory.factors[c] = own.factor();
    memory.base[c] = static_cast<Element>(own(0));
    trusted &= isfinite(memory.base[c]);
  }
  if (threadIdx.x == 0) signals.exotic = false;
  signals.meet();
#pragma unroll 1
  for (int i = threadIdx.x; i < staged.in_channels * groups * 128; i += kThreads) {
    // Element e of a lane: of output channel g or g + 8, at offset (t / 2, e / 2, t % 2).
    const int e = i % 4, lane = i / 4 % 32, rest = i / 128, group = rest % groups, ci = rest / groups;
    const int co = group * kStagedChannels + lane / 4 + e % 2 * 8, j0 = lane / 2 % 2, j1 = e / 2, j2 = lane % 2;
    double sum = 0;
    if (co < out_channels) {
      const T* source = weight + (ci * out_channels + co) * kernel;
      for (int a = staged.tap_begin[0][j0]; a < staged.tap_end[0][j0]; ++a)
        for (int b = staged.tap_begin[1][j1]; b < staged.tap_end[1][j1]; ++b)
          for (int c = staged.tap_begin[2][j2]; c < staged.tap_end[2][j2]; ++c)
            sum += static_cast<double>(to_accumulator(source[(a * kernel1 + b) * kernel2 + c]));
      sum *= memory.factors[co];
    }
    if constexpr (kTerms == 1) {
      memory.weights[i] = sum;
      trusted &= isfinite(sum);
    } else {
      // The halves of V have its sign, or an infinite input would give NaN. Far from one, they might not hold it.
      const float v = static_cast<float>(sum), high = __uint_as_float(__float_as_uint(v) & 0xffffe000u);
      memory.weights[rest * 256 + i % 128] = high;
      memory.weights[rest * 256 + 128 + i % 128] = v - high;
      trusted &= sum == 0 || (fabs(sum) < 1e30 && fabs(sum) > 1e-25);
    }
  }
  if (!trusted) signals.exotic = true;
}

template <class T, int kJ0>
__device__ void multiply(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                         StagedSignals& signals) {
  using Element = typename StagedTypes<T>::Element;
  using Mover = StagedMover<T, kJ0>;
  constexpr int kPitch = Mover::kPitch, kTerms = StagedTypes<T>::kTerms, kTiles = kStagedColumns / 8;
  collapse_weights(conv, staged, memory, signals);
  const int groups = (staged.out_channels + kStagedChannels - 1) / kStagedChannels;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t volume = static_cast<int64_t>(staged.out[0]) * staged.out[1] * staged.out[2];
  // Column i of a product is position i / 2 + i % 2 * 4 of eight, so that the lanes t hold neighbours of a row.
  const int position = g % 2 * 4 + g / 2;
  StagedJob previous{};
  for (int turn = 0;; turn ^= 1) {
    publish_results();
    signals.meet();
    // What is no run in the output goes row by row.
    if (!staged.layout.whole_rows && previous.task == StagedTask::kCompute && !signals.exotic) {
      T* tile = tile_of(conv, staged, previous);
      const T* results = memory.results + previous.buffer * kStagedChannels * staged.layout.result_pitch;
      const int channels = min(kStagedChannels, staged.out_channels - previous.group * kStagedChannels);
      if (lane < previous.columns)
#pragma unroll 4
        for (int run = warp; run < kStagedChannels * previous.rows; run += kStagedMultipliers) {
          const int c = run % kStagedChannels, row = run / kStagedChannels;
          if (c < channels)
            tile[c * volume + static_cast<int64_t>(row) * staged.out[2] + lane] =
                results[result_at(staged, tile, c, row) + lane];
        }
    }
    __syncwarp();  // products need all lanes
    const StagedJob job = signals.jobs[turn];
    previous = job;
    if (job.task == StagedTask::kEnd) return;
    if (job.task == StagedTask::kLoad) continue;
    T* tile = tile_of(conv, staged, job);
    if (signals.exotic) {
      const int channels = min(kStagedChannels, staged.out_channels - job.group * kStagedChannels);
#pragma unroll 1
      for (int i = threadIdx.x; i < channels * job.rows * job.columns; i += kStagedMultipliers * 32) {
        const int x = i % job.columns, y = i / job.columns % job.rows, c = i / job.columns / job.rows;
        tile[c * volume + static_cast<int64_t>(y) * staged.out[2] + x] =
            direct_value(conv, job.n, job.group * kStagedChannels + c, job.z, job.y + y, job.x + x);
      }
      continue;
    }
    const int slot = kJ0 == 1 || t / 2 ? job.slot : (job.slot + kStagedSlots - 1) % kStagedSlots;
    const T* inputs = memory.ring + slot * staged.layout.slot + job.skip + t % 2 + position;
    T* results = memory.results + job.buffer * kStagedChannels * staged.layout.result_pitch + t;
    const Element *first_base = memory.base + job.group * kStagedChannels + g,
                  base[4] = {first_base[0], first_base[0], first_base[8], first_base[8]};
    [[maybe_unused]] float check = 0;  // NaN if any of the sums is
    for (int row = warp * kStagedWarpRows; row < job.rows; row += kStagedMultipliers * kStagedWarpRows) {
      Element sums[kStagedWarpRows][kTiles][4];
      const T* x = inputs + row * kPitch;
      const Element* v = memory.weights + job.group * kTerms * 128 + lane * 4;
      const auto add_channel = [&](bool first) {
        Element a[kTerms][4];
#pragma unroll
        for (int m = 0; m < kTerms; ++m)
#pragma unroll
          for (int e = 0; e < 4; ++e) a[m][e] = v[m * 128 + e];
        // A row of inputs is the second row of taps of one row of outputs, and the first of the next.
        const auto input = [&](int r, int n) {
          return kJ0 == 1 && t >= 2 ? Element(0) : static_cast<Element>(to_accumulator(x[r * kPitch + n * 8]));
        };
        Element b[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) b[n] = input(0, n);
#pragma unroll
        for (int r = 0; r < kStagedWarpRows; ++r)
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            const Element next = input(r + 1, n);
            if (first)
              multiply_add(sums[r][n], a[kTerms - 1], b[n], next, base);
            else
              multiply_add(sums[r][n], a[kTerms - 1], b[n], next, sums[r][n]);
            if constexpr (kTerms == 2) multiply_add(sums[r][n], a[0], b[n], next, sums[r][n]);
            b[n] = next;
          }
        x += (staged.layout.rows + 1) * kPitch;
        v += groups * kTerms * 128;
      };
      add_channel(true);
      for (int ci = 1; ci < staged.in_channels; ++ci) add_channel(false);
#pragma unroll
      for (int r = 0; r < kStagedWarpRows; ++r) {
        if (row + r >= job.rows) break;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          T* to = results + result_at(staged, tile, g + 8 * half, row + r);
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              const float value = static_cast<float>(sums[r][n][2 * half + e]);
              if constexpr (kTerms == 2) check += value;
              if (n * 8 + e * 4 < job.columns - t) to[n * 8 + e * 4] = from_accumulator<T>(value);
            }
        }
      }
    }
    if constexpr (kTerms == 2) {
      // An infinite input makes NaN of a half of V that is zero, so what this lane has written is looked at again.
      if (isnan(check))
#pragma unroll 1
        for (int i = 0; i < staged.layout.rows / kStagedMultipliers * 16; ++i) {
          const int column = i % 8 * 4 + t, c = g + i / 8 % 2 * 8, co = job.group * kStagedChannels + c;
          const int y =
              (i / 16 / kStagedWarpRows * kStagedMultipliers + warp) * kStagedWarpRows + i / 16 % kStagedWarpRows;
          if (y < job.rows && column < job.columns && co < staged.out_channels)
            results[result_at(staged, tile, c, y) + column - t] =
                direct_value(conv, job.n, co, job.z, job.y + y, job.x + column);
        }
    }
  }
}

template <class T, int kJ0>
__global__ void __launch_bounds__(kStagedThreads, StagedTypes<T>::kBlocks)
    staged_conv(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Staged staged) {
  extern __shared__ __align__(16) double shared[];
  __shared__ StagedSignals signals;
  const StagedMemory<T> memory(staged, shared);
  if (threadIdx.x == 0) __mbarrier_init(&signals.barrier, kStagedThreads);
  __syncthreads();
  if (threadIdx.x < kStagedMultipliers * 32)
    multiply<T, kJ0>(conv, staged, memory, signals);
  else
    move<T, kJ0>(conv, staged, memory, signals);
}

// What the kernels below add up in: in float32 their error would exceed that of the composition, whose pool averages
// rounding errors away.
template <class T>
using DirectSum = std::conditional_t<sizeof(T) == 2, float, double>;

// V for the kernels below, (C_in/groups, taps, C_out).
template <class T>
__global__ void __launch_bounds__(kDirectThreads)
    collapse_taps(const __grid_constant__ Convolution<T> conv, DirectSum<T>* collapsed, int64_t count) {
  const int64_t per_group = conv.out_channels / conv.groups, in_group = conv.in_channels / conv.groups;
  const int64_t j1 = conv.dims[1].offsets().size(), j2 = conv.dims[2].offsets().size();
  const int64_t taps = conv.dims[0].offsets().size() * j1 * j2;
  allow_next_launch();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDirectThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kDirectThreads) {
    const int64_t channel = i % conv.out_channels, j = i / conv.out_channels % taps, ci = i / conv.out_channels / taps;
    const int64_t group = channel / per_group, co = channel % per_group;
    collapsed[i] =
        static_cast<DirectSum<T>>(collapsed_tap(conv, group * in_group + ci, co, {j / j2 / j1, j / j2 % j1, j % j2}));
  }
}

// Few output channels a group, as with one for each input channel: a thread takes kColumnRows outputs of a column, whose inputs
// overlap; each is converted once. kTaps1 is the number of offsets along the column, 0 for any. The lanes of a warp take
// neighbours in memory: of a row, or channels where they come last.
struct Columns {
  int out[kMaxSpatialDims] = {}, size[kMaxSpatialDims] = {}, step[kMaxSpatialDims] = {};
  int begin[kMaxSpatialDims] = {}, taps[kMaxSpatialDims] = {};
  int in_group = 0;
  bool channels_last = false;
  Divisor channels, per_group, columns, rows, planes;  // counts of the indices of a thread
};

template <class T, int kTaps1>
__global__ void __launch_bounds__(kDirectThreads)
    column_conv(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Columns at,
                const DirectSum<T>* __restrict__ collapsed, int64_t threads) {
  using Acc = DirectSum<T>;
  constexpr int kRows = kTaps1 > 0 ? kColumnRows : 1, kInputs = kTaps1 > 0 ? kTaps1 + kRows - 1 : 1;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kDirectThreads + threadIdx.x;
  wait_for_previous_launch();
  if (i >= threads) return;
  const int64_t of_sample =
      static_cast<int64_t>(at.channels.divisor) * at.columns.divisor * at.rows.divisor * at.planes.divisor;
  const int64_t n = i / of_sample;
  unsigned rest = static_cast<unsigned>(i - n * of_sample), co, o2, o1, o0;
  if (at.channels_last) {
    rest = at.channels.divide(rest, co);
    rest = at.columns.divide(rest, o2);
    rest = at.rows.divide(rest, o1);
    o0 = rest;
  } else {
    rest = at.columns.divide(rest, o2);
    rest = at.rows.divide(rest, o1);
    co = at.planes.divide(rest, o0);
  }
  o1 *= kRows;
  const int64_t first = static_cast<int64_t>(at.per_group.divide(co)) * at.in_group;
  const int i0 = static_cast<int>(o0) * at.step[0] + at.begin[0], i1 = static_cast<int>(o1) * at.step[1] + at.begin[1],
            i2 = static_cast<int>(o2) * at.step[2] + at.begin[2];
  const T* sample = conv.input + n * conv.input_strides[0] + first * conv.input_strides[1];
  const Acc* v = collapsed + co;
  const int64_t next = conv.out_channels;  // from one tap of V to the next
  Acc sums[kRows] = {};
  for (int ci = 0; ci < at.in_group; ++ci, sample += conv.input_strides[1]) {
    Acc partial[kRows] = {};
    for (int a = 0; a < at.taps[0]; ++a) {
      if (static_cast<unsigned>(i0 + a) >= static_cast<unsigned>(at.size[0])) {
        v += at.taps[1] * at.taps[2] * next;
        continue;
      }
      const T* plane = sample + (i0 + a) * conv.input_strides[2];
      if constexpr (kTaps1 == 0) {
        for (int b = 0; b < at.taps[1]; ++b)
          for (int c = 0; c < at.taps[2]; ++c, v += next)
            if (static_cast<unsigned>(i1 + b) < static_cast<unsigned>(at.size[1]) &&
                static_cast<unsigned>(i2 + c) < static_cast<unsigned>(at.size[2]))
              partial[0] += *v * static_cast<Acc>(to_accumulator(
                                     plane[(i1 + b) * conv.input_strides[3] + (i2 + c) * conv.input_strides[4]]));
      } else {
        for (int c = 0; c < at.taps[2]; ++c, v += next) {
          if (static_cast<unsigned>(i2 + c) >= static_cast<unsigned>(at.size[2])) continue;
          const T* column = plane + (i2 + c) * conv.input_strides[4];
          Acc weights[kTaps1], x[kInputs];
#pragma unroll
          for (int b = 0; b < kTaps1; ++b) weights[b] = v[b * at.taps[2] * next];
#pragma unroll
          for (int u = 0; u < kInputs; ++u) {
            const int y = i1 + u;
            x[u] = static_cast<unsigned>(y) < static_cast<unsigned>(at.size[1])
                       ? static_cast<Acc>(to_accumulator(column[y * conv.input_strides[3]]))
                       : Acc(0);
          }
          // An infinite weight meets no zeros of the border.
#pragma unroll
          for (int u = 0; u < kInputs; ++u)
            if (static_cast<unsigned>(i1 + u) < static_cast<unsigned>(at.size[1]))
#pragma unroll
              for (int q = 0; q < kRows; ++q)
                if (u >= q && u < q + kTaps1) partial[q] += x[u] * weights[u - q];
        }
        v += (at.taps[1] - 1) * at.taps[2] * next;
      }
    }
#pragma unroll
    for (int q = 0; q < kRows; ++q) sums[q] += partial[q];
  }
  const Affine<double> affine(conv, co);
  const Affine<Acc> short_affine(conv, co);
  T* to = conv.output + n * conv.output_strides[0] + co * conv.output_strides[1] + o0 * conv.output_strides[2] +
          o1 * conv.output_strides[3] + o2 * conv.output_strides[4];
#pragma unroll
  for (int q = 0; q < kRows; ++q) {
    if (static_cast<int>(o1) + q >= at.out[1]) break;
    Acc value = short_affine(sums[q]);
    to[q * conv.output_strides[3]] = std::is_same_v<Acc, float> && isfinite(value)
                                         ? from_sum<T>(value)
                                         : from_double<T>(affine(static_cast<double>(sums[q])));
  }
}

// Every shape: a thread takes one output position and kDirectChannels channels. Taps that lie outside the input are
// skipped, not multiplied by zero, since a weight may be infinite. Half types continue the sum over many channels in float64.
template <class T>
__global__ void __launch_bounds__(kDirectThreads)
    direct_conv(const __grid_constant__ Convolution<T> conv, const DirectSum<T>* __restrict__ collapsed,
                int64_t threads) {
  using Acc = DirectSum<T>;
  const int64_t per_group = conv.out_channels / conv.groups, in_group = conv.in_channels / conv.groups;
  const int64_t channel_blocks = ceil_div(per_group, kDirectChannels);
  wait_for_previous_launch();
  const PoolDim &dim0 = conv.dims[0], &dim1 = conv.dims[1], &dim2 = conv.dims[2];
  const int64_t out0 = dim0.output(), out1 = dim1.output(), out2 = dim2.output();
  const int64_t size0 = dim0.conv.input, size1 = dim1.conv.input, size2 = dim2.conv.input;
  const Range j0 = dim0.offsets(), j1 = dim1.offsets(), j2 = dim2.offsets();
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDirectThreads + threadIdx.x; i < threads;
       i += static_cast<int64_t>(gridDim.x) * kDirectThreads) {
    int64_t rest = i;
    const int64_t o2 = rest % out2;
    rest /= out2;
    const int64_t o1 = rest % out1;
    rest /= out1;
    const int64_t o0 = rest % out0;
    rest /= out0;
    const int64_t first = rest % channel_blocks * kDirectChannels;
    rest /= channel_blocks;
    const int64_t group = rest % conv.groups, n = rest / conv.groups;
    double sums[kDirectChannels] = {};
    for (int64_t ci = group * in_group; ci < (group + 1) * in_group; ++ci) {
      const T* x = conv.input + n * conv.input_strides[0] + ci * conv.input_strides[1];
      const Acc* v = collapsed + (ci - group * in_group) * j0.size() * j1.size() * j2.size() * conv.out_channels +
                     group * per_group + first;
      Acc partial[kDirectChannels] = {};
      for (int64_t a = j0.begin; a < j0.end; ++a) {
        const int64_t i0 = o0 * dim0.step() + a;
        const bool use0 = i0 >= 0 && i0 < size0 && !dim0.is_hole(a);
        for (int64_t b = j1.begin; b < j1.end; ++b) {
          const int64_t i1 = o1 * dim1.step() + b;
          const bool use1 = use0 && i1 >= 0 && i1 < size1 && !dim1.is_hole(b);
          for (int64_t c = j2.begin; c < j2.end; ++c, v += conv.out_channels) {
            const int64_t i2 = o2 * dim2.step() + c;
            if (!use1 || i2 < 0 || i2 >= size2 || dim2.is_hole(c)) continue;
            const Acc value = static_cast<Acc>(to_accumulator(
                x[i0 * conv.input_strides[2] + i1 * conv.input_strides[3] + i2 * conv.input_strides[4]]));
#pragma unroll
            for (int q = 0; q < kDirectChannels; ++q)
              if (first + q < per_group) partial[q] += value * v[q];
          }
        }
      }
#pragma unroll
      for (int q = 0; q < kDirectChannels; ++q) sums[q] += static_cast<double>(partial[q]);
    }
#pragma unroll
    for (int q = 0; q < kDirectChannels; ++q) {
      if (first + q >= per_group) break;
      const int64_t channel = group * per_group + first + q;
      const Affine<double> affine(conv, channel);
      conv.output[n * conv.output_strides[0] + channel * conv.output_strides[1] + o0 * conv.output_strides[2] +
                  o1 * conv.output_strides[3] + o2 * conv.output_strides[4]] = from_double<T>(affine(sums[q]));
    }
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

Staged staged_geometry(const AvgPoolProblem& problem, int rows, int64_t steps) {
  Staged staged;
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    const PoolDim& dim = problem.dims[d];
    const Range offsets = dim.offsets();
    staged.offset[d] = static_cast<int>(offsets.begin);
    for (int64_t j = offsets.begin; j < offsets.end; ++j) {
      staged.tap_begin[d][j - offsets.begin] = static_cast<int>(dim.taps(j).begin);
      staged.tap_end[d][j - offsets.begin] = static_cast<int>(dim.taps(j).end);
    }
    staged.kernel[d] = static_cast<int>(dim.conv.kernel);
    staged.size[d] = static_cast<int>(dim.conv.input);
    staged.out[d] = static_cast<int>(dim.output());
  }
  staged.in_channels = static_cast<int>(problem.in_channels);
  staged.out_channels = static_cast<int>(problem.out_channels);
  staged.tiles1 = static_cast<int>(ceil_div(staged.out[1], rows));
  staged.tiles2 = static_cast<int>(ceil_div(staged.out[2], kStagedColumns));
  staged.steps = static_cast<int>(steps);
  staged.layout = staged_layout(problem, rows);
  return staged;
}

template <class T>
Gemm gemm_geometry(const AvgPoolProblem& problem, const GemmTiling& tiling, const Convolution<T>& conv) {
  Gemm gemm;
  gemm.tiling = tiling;
  gemm.in_group = static_cast<int>(problem.in_channels / problem.groups);
  gemm.per_group = static_cast<int>(problem.out_channels / problem.groups);
  gemm.taps = static_cast<int>(taps_of(problem));
  gemm.channels_last = problem.channels_last;
  gemm.channels = Divisor(tiling.channels);
  const bool rows = tiling.lines == GemmLines::kRows, points = tiling.lines == GemmLines::kPoints;
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    const PoolDim& dim = problem.dims[d];
    gemm.out[d] = static_cast<int>(dim.output());
    gemm.step[d] = static_cast<int>(dim.step());
    gemm.offset[d] = static_cast<int>(dim.offsets().begin);
    gemm.tiles[d] = Divisor(ceil_div(dim.output(), tiling.box[d]));
    gemm.tap_counts[d] = Divisor(dim.offsets().size());
    gemm.patch[d] = Divisor(tiling.patch[d]);
    // Line dimensions are (C, D0, D1) or (D0, D1, D2); of pixels the first is empty.
    const int at = points ? d : d + 1;
    gemm.limit[at] = static_cast<int>(dim.conv.input);
    if (at < 3) {
      gemm.line_stride[at] = conv.input_strides[2 + d];
      gemm.lines[at] = Divisor(tiling.patch[d]);
    }
  }
  gemm.at[0] = points ? tiling.outer : rows ? tiling.patch[1] * tiling.line : tiling.outer;
  gemm.at[1] = points ? tiling.patch[2] * tiling.line : tiling.line;
  gemm.at[2] = points ? tiling.line : rows ? 1 : gemm.in_group;
  gemm.at_channel = rows ? tiling.outer : 1;
  std::copy(std::begin(gemm.at), std::end(gemm.at), gemm.row_at);
  if (tiling.turned) {
    gemm.at_channel = 1;
    gemm.at[2] = tiling.point;
    gemm.at[1] = tiling.patch[2] * gemm.at[2];
    gemm.at[0] = tiling.patch[1] * gemm.at[1];
  }
  gemm.points = Divisor(tiling.points());
  if (rows) {
    gemm.limit[0] = gemm.in_group;
    gemm.line_stride[0] = conv.input_strides[1];
    gemm.lines[0] = Divisor(tiling.channels);
  } else if (points) {
    gemm.limit[3] = gemm.in_group;
  } else {
    gemm.limit[0] = 1;
    gemm.limit[3] *= gemm.in_group;
  }
  const int elements = points ? tiling.channels : rows ? tiling.patch[2] : tiling.patch[2] * gemm.in_group;
  constexpr int kSize = Vector<T>::kSize;
  gemm.elements_of_line = Divisor(elements);
  gemm.vectors_of_line = Divisor((points ? tiling.channels : tiling.line) / kSize);
  gemm.whole_vectors = gemm.limit[3] % kSize == 0 && conv.input_strides[0] % kSize == 0;
  for (const int64_t stride : gemm.line_stride) gemm.whole_vectors &= stride % kSize == 0;
  return gemm;
}

template <class T, int kTiles>
void launch_gemm(const CudaContext& cuda, const AvgPoolPlan& plan, const AvgPoolProblem& problem,
                 const Convolution<T>& conv, const Tensor& like) {
  const Tensor workspace = empty_bytes(plan.workspace, like);
  auto* weights = static_cast<typename GemmMath<T>::Weight*>(workspace.mutable_data_ptr());
  auto* flags = reinterpret_cast<int*>(static_cast<char*>(workspace.mutable_data_ptr()) + plan.collapsed);
  Gemm gemm = gemm_geometry(problem, plan.gemm, conv);
  cuda.launch(plan.launch[0], split_taps<T>, conv, gemm, weights, flags, gemm_weights(problem, plan.gemm));
  const auto kernel = plan.gemm.runs() ? implicit_gemm<T, kTiles, true> : implicit_gemm<T, kTiles, false>;
  // The kernel counts boxes with 32 bits, so a huge batch goes in slices.
  const int64_t samples = kMostGemmSize / plan.gemm.boxes;
  for (int64_t first = 0; first < problem.batch; first += samples) {
    Convolution<T> slice = conv;
    slice.input += first * conv.input_strides[0];
    slice.output += first * conv.output_strides[0];
    gemm.boxes = static_cast<int>(std::min(samples, problem.batch - first) * plan.gemm.boxes);
    cuda.launch(plan.launch[1], kernel, slice, gemm, reinterpret_cast<const uint4*>(weights), flags,
                static_cast<int>(plan.launch[0].grid));
  }
}

Columns column_geometry(const AvgPoolProblem& problem, int column_taps) {
  Columns at;
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    const PoolDim& dim = problem.dims[d];
    at.out[d] = static_cast<int>(dim.output());
    at.size[d] = static_cast<int>(dim.conv.input);
    at.step[d] = static_cast<int>(dim.step());
    at.begin[d] = static_cast<int>(dim.offsets().begin);
    at.taps[d] = static_cast<int>(dim.offsets().size());
  }
  at.in_group = static_cast<int>(problem.in_channels / problem.groups);
  at.channels_last = problem.channels_last;
  at.channels = Divisor(problem.out_channels);
  at.per_group = Divisor(problem.out_channels / problem.groups);
  at.columns = Divisor(at.out[2]);
  at.rows = Divisor(ceil_div(at.out[1], column_taps > 0 ? kColumnRows : 1));
  at.planes = Divisor(at.out[0]);
  return at;
}

template <class T>
void launch_conv(const CudaContext& cuda, const AvgPoolPlan& plan, const AvgPoolProblem& problem,
                 const Convolution<T>& conv, const Tensor& like) {
  if constexpr (!std::is_same_v<T, double>) {
    if (plan.kernel == PoolKernel::kStaged) {
      const auto kernel = conv.dims[0].offsets().size() == 1 ? staged_conv<T, 1> : staged_conv<T, 2>;
      // The kernel counts steps with 32 bits, so a huge batch goes in slices.
      const int rows = staged_rows(problem, cuda.properties());
      const int64_t samples = kMostStaged / staged_steps(problem, rows);
      for (int64_t first = 0; first < problem.batch; first += samples) {
        Convolution<T> slice = conv;
        slice.input += first * conv.input_strides[0];
        slice.output += first * conv.output_strides[0];
        const int64_t steps = std::min(samples, problem.batch - first) * staged_steps(problem, rows);
        Launch launch = plan.launch[0];
        launch.grid = std::min(launch.grid, steps);
        cuda.launch(launch, kernel, slice, staged_geometry(problem, rows, steps));
      }
      return;
    }
  }
  if (plan.kernel == PoolKernel::kGemm) {
    if constexpr (sizeof(T) == 2)
      if (plan.gemm.tiles == 4) return launch_gemm<T, 4>(cuda, plan, problem, conv, like);
    return (plan.gemm.tiles == 2 ? launch_gemm<T, 2> : launch_gemm<T, 1>)(cuda, plan, problem, conv, like);
  }
  const Tensor workspace = empty_bytes(plan.workspace, like);
  auto* collapsed = static_cast<DirectSum<T>*>(workspace.mutable_data_ptr());
  if (plan.launches == 2)
    cuda.launch(plan.launch[0], collapse_taps<T>, conv, collapsed,
                plan.workspace / static_cast<int64_t>(sizeof(DirectSum<T>)));
  const Launch& last = plan.launch[plan.launches - 1];
  if (plan.kernel == PoolKernel::kColumns) {
    const auto kernels = {column_conv<T, 0>, column_conv<T, 1>, column_conv<T, 2>, column_conv<T, 3>,
                          column_conv<T, 4>};
    cuda.launch(last, kernels.begin()[plan.column_taps], conv, column_geometry(problem, plan.column_taps), collapsed,
                problem.batch * column_threads(problem, plan.column_taps));
    return;
  }
  cuda.launch(last, direct_conv<T>, conv, collapsed,
              conv.batch * conv.groups * ceil_div(conv.out_channels / conv.groups, kDirectChannels) *
                  conv.dims[0].output() * conv.dims[1].output() * conv.dims[2].output());
}

Tensor conv_transpose_avg_pool_cuda(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                                    const Ints& stride, const Ints& padding, const Ints& output_padding, int64_t groups,
                                    const Ints& dilation, const Ints& pool_kernel_size, const Ints& pool_stride,
                                    const MaybeTensor& scale1, const MaybeTensor& shift, const MaybeTensor& scale2) {
  const auto checked = check_conv_transpose_avg_pool(
      info(input), info(weight), MaybeInfo(bias).get(), stride, padding, output_padding, groups, dilation,
      pool_kernel_size, pool_stride, MaybeInfo(scale1).get(), MaybeInfo(shift).get(), MaybeInfo(scale2).get());
  const auto& conv = checked.conv;
  const CudaContext cuda("conv_transpose_avg_pool", input);
  const bool channels_last = wants_channels_last(input);
  Tensor output = empty(checked.output, input.scalar_type(), input, channels_last);
  const AvgPoolProblem problem = avg_pool_problem(checked, static_cast<int>(input.element_size()), channels_last);
  const AvgPoolPlan plan = plan_conv_transpose_avg_pool(problem, cuda.properties());
  if (plan.launches == 0) return output;
  const Tensor x = channels_last ? input : as_contiguous(input), w = as_contiguous(weight);
  dispatch(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    Convolution<T> convolution{static_cast<const T*>(x.const_data_ptr()),
                               static_cast<const T*>(w.const_data_ptr()),
                               static_cast<T*>(output.mutable_data_ptr()),
                               conv.batch,
                               conv.in_channels,
                               conv.out_channels,
                               conv.groups,
                               {},
                               {},
                               {},
                               float_product(checked.pool_kernel),
                               channel_param(bias, 0.0),
                               channel_param(scale1, 1.0),
                               channel_param(shift, 0.0),
                               channel_param(scale2, 1.0)};
    std::copy(std::begin(problem.dims), std::end(problem.dims), convolution.dims);
    for (int d = 0; d < conv.spatial_dims + 2; ++d) {
      const int at = d < 2 ? d : kMaxSpatialDims - conv.spatial_dims + d;
      convolution.input_strides[at] = x.stride(d);
      convolution.output_strides[at] = output.stride(d);
    }
    launch_conv(cuda, plan, problem, convolution, input);
  });
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, CUDA, m) {
  m.impl("conv_transpose_avg_pool", TORCH_BOX(&conv_transpose_avg_pool_cuda));
}

}  // namespace fused
