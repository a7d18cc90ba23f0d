// The collapsed convolution of few channels and two offsets a dimension, on devices whose tensor cores multiply float64 at
// the rate of plain float32. A block goes through planes of 16 x 32 outputs (8 x 32 where there are few) of one tile after
// another. Its producer warp copies input planes into a ring in shared memory, two ahead, and sends finished results away;
// its consumer warps compute output plane z from the input planes z and z + 1. One product takes 8 taps of an input channel:
// 16 output channels x 8 taps times 8 taps x 8 positions.
//
// Results are gathered in shared memory: rows of 31 floats written from registers share their 32-byte sectors, which takes
// 1.5 times as long as a run of 16 rows a channel (66 us at (128, 3, 16, 32, 32) -> 16 channels on H200).
#pragma once

#include <cuda_awbarrier_primitives.h>
#include <cuda_pipeline.h>

#include "collapsed_conv.cuh"
#include "staged_conv_plan.h"

namespace fused {

// The geometry of the staged kernel in plain 32-bit numbers: 64-bit divisions took half of its time.
struct Staged {
  int tap_begin[kMaxSpatialDims][2] = {}, tap_end[kMaxSpatialDims][2] = {};  // the taps that V sums, per offset
  int offset[kMaxSpatialDims] = {};                                          // the first one
  int kernel[kMaxSpatialDims] = {}, size[kMaxSpatialDims] = {}, out[kMaxSpatialDims] = {};
  int in_channels = 0, out_channels = 0, tiles1 = 0, tiles2 = 0;
  int steps = 0;  // planes of outputs of all tiles: what the blocks share
  StagedLayout layout;

  // Of kStagedChannels output channels. (As a field, it made the float32 kernel spill.)
  constexpr int groups() const { return (out_channels + kStagedChannels - 1) / kStagedChannels; }
};

// How a dtype is multiplied: float32 in float64, since chains of 24 float32 products, even split in three, had 1.2 times
// the error of the composition, whose pool averages rounding errors away; half types in TF32, which holds them exactly.
template <class T>
struct StagedTypes {
  using Element = float;            // what is multiplied, and added up in
  static constexpr int kTerms = 2;  // numbers that V is split into
};
template <>
struct StagedTypes<float> {
  using Element = double;
  static constexpr int kTerms = 1;
};

enum class StagedTask { kEnd, kLoad, kCompute };

// One step of the block's march, from the producer to the consumers.
struct StagedJob {
  StagedTask task;
  int group;          // of output channels
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

  // A barrier of the block, which producer and consumers reach in different places of the code.
  __device__ void arrive_and_wait() {
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
    const int groups = staged.groups();
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

// The producer's place in the march: input plane `plane` of a tile of which the block computes the planes [begin, end) of
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
struct StagedProducer {
  static constexpr int kSize = Vector<T>::kSize, kVectors = kStagedColumns / kSize + 1, kPitch = kVectors * kSize;
  const Convolution<T>& conv;
  const Staged& staged;
  const StagedMemory<T>& memory;
  const int lane;
  const int height;    // rows of inputs of a tile
  const bool vectors;  // rows of the input are rows of whole vectors

  __device__ StagedProducer(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory)
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
__device__ void produce_planes(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                               StagedSignals& signals) {
  const StagedProducer<T, kJ0> producer(conv, staged, memory);
  const int groups = staged.groups();
  const int share = staged.steps / gridDim.x, rest = staged.steps % gridDim.x, block = blockIdx.x;
  const int last = (block + 1) * share + min(block + 1, rest);
  StagedCursor ahead{};
  ahead.step = block * share + min(block, rest);
  ahead.start(staged, last);
  StagedCursor at = ahead;
  const auto fetch = [&](int slot) {
    if (ahead.step < last) {
      producer.copy(ahead, slot);
      ahead.advance<kJ0>(staged, last);
    } else {
      __pipeline_commit();
    }
  };
#pragma unroll 1
  for (int i = 0; i < 2; ++i) fetch(i);
  signals.arrive_and_wait();  // in collapse_weights
  StagedJob previous{};
  int slot = 0, group = 0, buffer = 0;
  for (int parity = 0;; parity ^= 1) {
    StagedJob job{StagedTask::kEnd};
    if (at.step < last) {
      const int z = at.plane - (kJ0 - 1);
      job = {z >= at.begin ? StagedTask::kCompute : StagedTask::kLoad,
             group,
             slot,
             producer.skip(at),
             buffer,
             min(staged.layout.rows, staged.out[1] - at.y),
             min(kStagedColumns, staged.out[2] - at.x),
             at.n,
             z,
             at.y,
             at.x};
    }
    if (producer.lane == 0) signals.jobs[parity] = job;
    __pipeline_wait_prior(1);  // the job's plane has come,
    wait_for_bulk_reads();     // and its buffer of results is free
    signals.arrive_and_wait();
    if (previous.task == StagedTask::kCompute && staged.layout.whole_rows && !signals.exotic) producer.store(previous);
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
  constexpr int kThreads = kStagedConsumers * 32, kTerms = StagedTypes<T>::kTerms;
  const int out_channels = staged.out_channels, groups = staged.groups();
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
  signals.arrive_and_wait();
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
__device__ void consume_planes(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                               StagedSignals& signals) {
  using Element = typename StagedTypes<T>::Element;
  using Producer = StagedProducer<T, kJ0>;
  constexpr int kPitch = Producer::kPitch, kTerms = StagedTypes<T>::kTerms, kTiles = kStagedColumns / 8;
  collapse_weights(conv, staged, memory, signals);
  const int groups = staged.groups();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int64_t volume = static_cast<int64_t>(staged.out[0]) * staged.out[1] * staged.out[2];
  // Column i of a product is position i / 2 + i % 2 * 4 of eight, so that the lanes t hold neighbours of a row.
  const int position = g % 2 * 4 + g / 2;
  StagedJob previous{};
  for (int parity = 0;; parity ^= 1) {
    publish_results();
    signals.arrive_and_wait();
    // What is no run in the output goes row by row.
    if (!staged.layout.whole_rows && previous.task == StagedTask::kCompute && !signals.exotic) {
      T* tile = tile_of(conv, staged, previous);
      const T* results = memory.results + previous.buffer * kStagedChannels * staged.layout.result_pitch;
      const int channels = min(kStagedChannels, staged.out_channels - previous.group * kStagedChannels);
      if (lane < previous.columns)
#pragma unroll 4
        for (int run = warp; run < kStagedChannels * previous.rows; run += kStagedConsumers) {
          const int c = run % kStagedChannels, row = run / kStagedChannels;
          if (c < channels)
            tile[c * volume + static_cast<int64_t>(row) * staged.out[2] + lane] =
                results[result_at(staged, tile, c, row) + lane];
        }
    }
    __syncwarp();  // products need all lanes
    const StagedJob job = signals.jobs[parity];
    previous = job;
    if (job.task == StagedTask::kEnd) return;
    if (job.task == StagedTask::kLoad) continue;
    T* tile = tile_of(conv, staged, job);
    if (signals.exotic) {
      const int channels = min(kStagedChannels, staged.out_channels - job.group * kStagedChannels);
#pragma unroll 1
      for (int i = threadIdx.x; i < channels * job.rows * job.columns; i += kStagedConsumers * 32) {
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
    for (int row = warp * kStagedWarpRows; row < job.rows; row += kStagedConsumers * kStagedWarpRows) {
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
        for (int i = 0; i < staged.layout.rows / kStagedConsumers * 16; ++i) {
          const int column = i % 8 * 4 + t, c = g + i / 8 % 2 * 8, co = job.group * kStagedChannels + c;
          const int y =
              (i / 16 / kStagedWarpRows * kStagedConsumers + warp) * kStagedWarpRows + i / 16 % kStagedWarpRows;
          if (y < job.rows && column < job.columns && co < staged.out_channels)
            results[result_at(staged, tile, c, y) + column - t] =
                direct_value(conv, job.n, co, job.z, job.y + y, job.x + column);
        }
    }
  }
}

template <class T, int kJ0>
__global__ void __launch_bounds__(kStagedThreads, staged_blocks(sizeof(T)))
    staged_conv(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Staged staged) {
  extern __shared__ __align__(16) double shared[];
  __shared__ StagedSignals signals;
  const StagedMemory<T> memory(staged, shared);
  if (threadIdx.x == 0) __mbarrier_init(&signals.barrier, kStagedThreads);
  __syncthreads();
  if (threadIdx.x < kStagedConsumers * 32)
    consume_planes<T, kJ0>(conv, staged, memory, signals);
  else
    produce_planes<T, kJ0>(conv, staged, memory, signals);
}

}  // namespace fused
