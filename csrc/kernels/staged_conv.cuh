// The collapsed convolution of few channels and two offsets a dimension, on devices whose tensor cores multiply float64 at
// the rate of plain float32. A block goes through planes of 16 x 32 outputs (8 x 32 where there are few) of one tile after
// another. Its loader warp copies input planes into a ring in shared memory; its eight consumer warps compute output plane z
// from the input planes z and z + 1, each eight columns of half the rows; its storer warp sends finished results away. One
// product takes 8 taps of an input channel: 16 output channels x 8 taps times 8 taps x 8 positions.
//
// On H200, (128, 3, 16, 32, 32) -> 16 channels take 49 us in float32. The bytes need 35, the products 26; consumers that wait
// for nobody take 39, half types 28 of 36; loads and stores without them 45 and 29. More consumers of fewer registers made half
// types slower (42 to 45), float64 products of m16n8k4 and float16 ones of m16n8k16 made nothing faster. What it rests on:
// - The warps wait for one another plane by plane, each kind on its own: one barrier of the block a plane cost 11 us.
// - Results are gathered in shared memory and stored in bulk, a run of all rows a channel: rows of 31 floats written from
//   registers share their 32-byte sectors. In the first buffer a run has the same place in its 128-byte lines as in the
//   output: with only its vectors aligned, it took 3 us more. In the second only its vectors are, which costs nothing more.
// - A lane for each bulk store: with one lane for all of a step, half types took 41 us instead of 35. Runs that go on from tile
//   to tile, so that only whole sectors are stored, took both 4 us more: the ring then holds whole planes, and fewer of them.
// - Where channels come last, elements lie elsewhere: the ring holds rows of all channels as they are in the input, and
//   results, of at most 16 channels, are a run a row, or one of all rows: 48 us in float32.
// - V is summed from the weight as it comes, all taps on their way together: by way of shared memory, it was there 2 us later.
// - On the way to V, no weight or parameter waits for another: one sample in a CUDA graph takes 8.4 us instead of 9.5.
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
  int steps = 0;         // planes of outputs of all tiles: what the blocks share
  Divisor columns;       // of inputs that a row of a tile needs
  double over_pool = 1;  // by what the pool multiplies: a division here would cost each block of the kernel one
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
  // Whether its sums may be more than float32 holds: not of float16, whose inputs are below 2^16.
  static constexpr bool kMayOverflow = std::is_same_v<T, __nv_bfloat16>;
};
template <>
struct StagedTypes<float> {
  using Element = double;
  static constexpr int kTerms = 1;
  static constexpr bool kMayOverflow = false;
};

// What the warps of a block tell each other. Each barrier counts the uses of its buffer: `wait` returns when use number
// `use` of it is over. It tells a use only from the next, so none may run two ahead of who waits; the buffers see to that.
struct StagedSignals {
  __mbarrier_t loaded[kStagedSlots], freed[kStagedSlots];  // a plane of inputs, by the loader and by the consumers
  __mbarrier_t computed[kStagedBuffers], stored[kStagedBuffers];  // results, by the consumers and by the storer
  __mbarrier_t collapsed;  // V, by the consumers, and what is added, by the storer
  int exotic;              // whether V or the factors are not what the tensor cores may be trusted with
  int suspect;             // whether results are not finite, perhaps since float32 could not hold their sums

  __device__ void init() {
    for (int i = 0; i < kStagedSlots; ++i) {
      __mbarrier_init(&loaded[i], 32);
      __mbarrier_init(&freed[i], 32 * kStagedConsumers);
    }
    for (int i = 0; i < kStagedBuffers; ++i) {
      __mbarrier_init(&computed[i], 32 * kStagedConsumers);
      __mbarrier_init(&stored[i], 32);
    }
    __mbarrier_init(&collapsed, 32 * (kStagedConsumers + 1));
    exotic = suspect = false;
  }
  __device__ static void wait(__mbarrier_t& barrier, unsigned use) {
    while (!__mbarrier_try_wait_parity(&barrier, use % 2, 1000000)) {
    }
  }
};
static_assert(sizeof(StagedSignals) <= kStagedSignals);

// The carve-up of a block's shared memory.
template <class T>
struct StagedMemory {
  using Element = typename StagedTypes<T>::Element;
  Element* weights;  // (C_in, groups, terms, 32 lanes, 4): V times the factors, as the tensor cores want it
  Element* base;     // (channels): what bias and shift add
  T* results;        // (2, 16 channels, result pitch) or (2, rows, result row), the first of them from a whole line on
  T* ring;           // (4 slots, C_in, slot rows, slot row), channels_last (4 slots, slot rows, slot row)
  __device__ StagedMemory(const Staged& staged, void* memory) {
    weights = static_cast<Element*>(memory);
    base = weights + staged.in_channels * staged.groups() * StagedTypes<T>::kTerms * 128;
    results = reinterpret_cast<T*>(static_cast<char*>(memory) + staged.layout.results);
    ring = results + kStagedBuffers * staged.layout.buffer;
  }
};

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
__device__ inline void wait_for_bulk_writes() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
#endif
}
__device__ inline void publish_results() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Planes of outputs of one tile, [begin, end), that a block computes one after another.
struct StagedRun {
  int n, y, x, begin, end;

  // Of the first output channel in the first of these planes.
  template <class T>
  __device__ T* tile(const Convolution<T>& conv) const {
    const int64_t* strides = conv.output_strides;
    return conv.output + n * strides[0] + begin * strides[2] + y * strides[3] + x * strides[4];
  }
  __device__ int rows(const Staged& staged) const { return min(staged.layout.rows, staged.out[1] - y); }
  __device__ int columns(const Staged& staged) const { return min(kStagedColumns, staged.out[2] - x); }
};

// The march of the block, which each kind of its warps makes at its own pace.
template <class Body>
__device__ __forceinline__ void for_runs(const Staged& staged, Body body) {
  const int share = staged.steps / gridDim.x, rest = staged.steps % gridDim.x, block = blockIdx.x;
  const int last = (block + 1) * share + min(block + 1, rest);
#pragma unroll 1
  for (int step = block * share + min(block, rest); step < last;) {
    StagedRun run;
    run.begin = step % staged.out[0];
    run.end = min(staged.out[0], run.begin + last - step);
    int tile = step / staged.out[0];
    run.x = tile % staged.tiles2 * kStagedColumns;
    tile /= staged.tiles2;
    run.y = tile % staged.tiles1 * staged.layout.rows;
    run.n = tile / staged.tiles1;
    body(run);
    step += run.end - run.begin;
  }
}

// Where results begin in their buffer, so that runs have the same place in their lines as in the output: in the first
// buffer, and in both where channels come last.
template <bool kChannelsLast, class T>
__device__ int staged_skew(const Staged& staged, const T* tile) {
  return kChannelsLast || staged.layout.whole_rows
             ? static_cast<unsigned>(reinterpret_cast<uintptr_t>(tile) / sizeof(T)) %
                   (kStagedLine / static_cast<unsigned>(sizeof(T)))
             : 0;
}

// Rows of the input as they lie in the ring: those of a channel, or of all channels where they come last.
template <class T, bool kChannelsLast>
struct StagedRows {
  static constexpr int kSize = Vector<T>::kSize;
  static constexpr int kVectors = kStagedColumns / kSize + 1;  // of a row of one channel
  const int pixel, pitch;                                      // from one column, and one row, to the next
  const bool vectors;                                          // rows of the input are rows of whole vectors
  const int offset;                                            // of the first column of inputs from that of outputs
  __device__ StagedRows(const Convolution<T>& conv, const Staged& staged)
      : pixel(kChannelsLast ? staged.in_channels : 1),
        pitch(kChannelsLast ? staged.layout.slot_row : kVectors * kSize),
        vectors(is_vector_aligned(conv.input) && staged.size[2] * pixel % kSize == 0),
        offset(staged.offset[2]) {}
  // The elements before the first column that is meant.
  __device__ int skip(const StagedRun& run) const {
    return vectors ? static_cast<unsigned>((run.x + offset) * pixel) % kSize : 0;
  }
};

// Starts the copy of the inputs that a plane of the tile needs, (C_in, slot rows, kPitch), of which rows + 1 are filled; zero
// where there is no input.
template <class T>
__device__ void copy_channels(const Convolution<T>& conv, const Staged& staged, const StagedRun& run, int z, T* to) {
  using Rows = StagedRows<T, false>;
  constexpr int kPitch = Rows::kVectors * Rows::kSize;
  const Rows layout(conv, staged);
  const int lane = threadIdx.x % 32, height = staged.layout.rows + 1, gap = staged.layout.slot_rows - height;
  const int plane = z + staged.offset[0], y0 = run.y + staged.offset[1];
  const int x0 = run.x + staged.offset[2] - layout.skip(run), size1 = staged.size[1];
  const bool exists = plane >= 0 && plane < staged.size[0];
  const int64_t width = staged.size[2], area = size1 * width, volume = area * staged.size[0];
  const T* corner =
      conv.input + static_cast<int64_t>(run.n) * staged.in_channels * volume + plane * area + y0 * width + x0;
  const int rows = staged.in_channels * height;
  if (layout.vectors) {
    // Several rows at once, each lane always the same columns.
    constexpr int kAtOnce = 32 / Rows::kVectors;
    const int column = lane % Rows::kVectors * Rows::kSize, first = lane / Rows::kVectors;
    const bool inside = exists && x0 + column >= 0 && x0 + column < staged.size[2];
    if (first < kAtOnce) {
      const T* from = corner + first * width + column;
      to += first * kPitch + column;
      int y = first;
#pragma unroll 4
      for (int r = first; r < rows; r += kAtOnce) {
        const bool use = inside && static_cast<unsigned>(y0 + y) < static_cast<unsigned>(size1);
        __pipeline_memcpy_async(to, use ? from : conv.input, 16, use ? 0 : 16);
        from += kAtOnce * width;
        to += kAtOnce * kPitch;
        y += kAtOnce;
        if (y >= height) {
          y -= height;
          from += volume - height * width;
          to += gap * kPitch;
        }
      }
    }
  } else {
    const int columns = staged.columns.divisor;
#pragma unroll 4
    for (int i = lane; i < rows * columns; i += 32) {
      unsigned x;
      const int r = staged.columns.divide(i, x), ci = r / height, y = r - ci * height;
      const int at = (r + ci * gap) * kPitch + x;
      const bool use = exists && static_cast<unsigned>(x0 + x) < static_cast<unsigned>(staged.size[2]) &&
                       static_cast<unsigned>(y0 + y) < static_cast<unsigned>(size1);
      const T* from = use ? corner + (ci * volume + y * width + x) : conv.input;
      if constexpr (sizeof(T) == 4)
        __pipeline_memcpy_async(to + at, from, 4, use ? 0 : 4);
      else
        to[at] = use ? *from : from_accumulator<T>(0);
    }
  }
}

// The same of rows of pixels, (slot rows, slot row).
template <class T>
__device__ void copy_pixels(const Convolution<T>& conv, const Staged& staged, const StagedRun& run, int z, T* to) {
  using Rows = StagedRows<T, true>;
  const Rows layout(conv, staged);
  const int lane = threadIdx.x % 32, pitch = layout.pitch, end = (staged.layout.rows + 1) * pitch;
  const int plane = z + staged.offset[0], y0 = run.y + staged.offset[1], size1 = staged.size[1];
  const int x0 = (run.x + staged.offset[2]) * layout.pixel - layout.skip(run), width = staged.size[2] * layout.pixel;
  const bool exists = plane >= 0 && plane < staged.size[0];
  // The lanes take neighbours, of this row and the next ones.
  const auto for_units = [&](int unit, auto copy) {
    const int units = pitch / unit, columns = 32 % units * unit, rows = 32 / units;
    const int64_t next = static_cast<int64_t>(rows) * width + columns, wrap = width - pitch;
    int x = lane % units * unit, y = lane / units;
    const T* from =
        conv.input + ((static_cast<int64_t>(run.n) * staged.size[0] + plane) * size1 + y0 + y) * width + x0 + x;
#pragma unroll 4
    for (int i = lane * unit; i < end; i += 32 * unit) {
      const bool use = exists && static_cast<unsigned>(x0 + x) < static_cast<unsigned>(width) &&
                       static_cast<unsigned>(y0 + y) < static_cast<unsigned>(size1);
      copy(to + i, use ? from : conv.input, use);
      x += columns;
      y += rows;
      from += next;
      if (x >= pitch) {
        x -= pitch;
        ++y;
        from += wrap;
      }
    }
  };
  if (layout.vectors)
    for_units(Rows::kSize,
              [](T* target, const T* from, bool use) { __pipeline_memcpy_async(target, from, 16, use ? 0 : 16); });
  else
    for_units(1, [](T* target, const T* from, bool use) {
      if constexpr (sizeof(T) == 4)
        __pipeline_memcpy_async(target, from, 4, use ? 0 : 4);
      else
        *target = use ? *from : from_accumulator<T>(0);
    });
}

// The loader: two planes on their way, while the consumers have two.
template <class T, int kJ0, bool kChannelsLast>
__device__ void load_planes(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                            StagedSignals& signals) {
  unsigned plane = 0;  // of all that the block loads
  for_runs(staged, [&](const StagedRun& run) {
#pragma unroll 1
    for (int z = run.begin; z < run.end + kJ0 - 1; ++z, ++plane) {
      const unsigned slot = plane % kStagedSlots;
      if (plane >= kStagedSlots) StagedSignals::wait(signals.freed[slot], plane / kStagedSlots - 1);
      T* to = memory.ring + slot * staged.layout.slot;
      if constexpr (kChannelsLast)
        copy_pixels(conv, staged, run, z, to);
      else
        copy_channels(conv, staged, run, z, to);
      __pipeline_commit();
      if (plane > 0) {
        __pipeline_wait_prior(1);
        __mbarrier_arrive(&signals.loaded[(plane - 1) % kStagedSlots]);
      }
    }
  });
  __pipeline_wait_prior(0);
  __mbarrier_arrive(&signals.loaded[(plane - 1) % kStagedSlots]);
}

// The storer.
template <class T, bool kChannelsLast>
__device__ void store_results(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                              StagedSignals& signals) {
  constexpr int kSize = Vector<T>::kSize;
  const int lane = threadIdx.x % 32, groups = kChannelsLast ? 1 : staged.groups();
  const int pitch = staged.layout.result_pitch, result_row = staged.layout.result_row;
  const bool whole_rows = staged.layout.whole_rows;
  const int64_t area = conv.output_strides[2], volume = conv.output_strides[1];
  unsigned job = 0;  // results of 16 channels of a plane
  for_runs(staged, [&](const StagedRun& run) {
    const int rows = run.rows(staged), columns = run.columns(staged);
    T* plane = run.tile(conv);
#pragma unroll 1
    for (int z = run.begin; z < run.end; ++z, plane += area)
#pragma unroll 1
      for (int group = 0; group < groups; ++group, ++job) {
        const unsigned buffer = job % kStagedBuffers;
        T* tile = plane + group * kStagedChannels * volume;
        const int channels = min(kStagedChannels, staged.out_channels - group * kStagedChannels);
        const int skew = staged_skew<kChannelsLast>(staged, tile);
        const T* results = memory.results + buffer * staged.layout.buffer + skew;
        StagedSignals::wait(signals.computed[buffer], job / kStagedBuffers);
        if (kChannelsLast || whole_rows) {
          // Runs of the output: all rows of a channel; of pixels all rows, or each. One lane sends a run's whole vectors
          // and stores what comes before, another the rest.
          const int runs = !kChannelsLast ? channels : whole_rows ? 1 : rows;
          const int length = columns * (!kChannelsLast ? rows : whole_rows ? rows * channels : channels);
          const int i = lane % kMaxStagedRuns, begin = i * (kChannelsLast ? result_row : pitch);
          const int head = min(length, (kSize - (skew + begin) % kSize) % kSize);
          const int body = (length - head) / kSize * kSize;
          const T* source = results + begin;
          T* target = tile + i * (kChannelsLast ? conv.output_strides[3] : volume);
          if (lane < runs && body > 0) bulk_store(target + head, source + head, body * sizeof(T));
          commit_bulk_stores();
          const int first = lane < kMaxStagedRuns ? 0 : head + body, last = lane < kMaxStagedRuns ? head : length;
          if (i < runs)
#pragma unroll
            for (int k = 0; k < kSize - 1; ++k)
              if (first + k < last) target[first + k] = source[first + k];
          wait_for_bulk_reads();
        } else if (lane < columns) {
          // All rows are read before one is written: to the compiler, they might be the same memory.
          for (int c = 0; c < channels; ++c) {
            T values[kStagedRows];
#pragma unroll
            for (int y = 0; y < kStagedRows; ++y)
              if (y < rows) values[y] = results[c * pitch + y * result_row + lane];
            T* target = tile + c * volume + lane;
#pragma unroll
            for (int y = 0; y < kStagedRows; ++y, target += staged.out[2])
              if (y < rows) *target = values[y];
          }
        }
        __mbarrier_arrive(&signals.stored[buffer]);
      }
  });
}

// A parameter of a channel in two steps: so many loads are on their way before the value of one is needed.
template <class T>
__device__ T load_param(const ChannelParam& param, int c) {
  return param.data ? static_cast<const T*>(param.data)[c * param.stride] : from_accumulator<T>(0);
}
template <class T>
__device__ double param_value(const ChannelParam& param, T loaded) {
  return param.data ? static_cast<double>(to_accumulator(loaded)) : param.value;
}

// V times the factors into shared memory, by the consumers.
template <class T>
__device__ void collapse_weights(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                                 StagedSignals& signals) {
  // Taps of a number of V, and numbers of a thread, that are on their way together.
  constexpr int kTerms = StagedTypes<T>::kTerms, kAtOnce = 8, kNumbers = 2, kStep = kStagedConsumers * 32 / 128;
  const int out_channels = staged.out_channels, groups = staged.groups(), all = staged.in_channels * groups;
  const int kernel1 = staged.kernel[1], kernel2 = staged.kernel[2], kernel = staged.kernel[0] * kernel1 * kernel2;
  // Element e of a lane: of output channel g or g + 8, at offset (t / 2, e / 2, t % 2).
  const int at = threadIdx.x % 128, e = at % 4, lane = at / 4, j0 = lane / 2 % 2, j1 = e / 2, j2 = lane % 2;
  const int begin0 = staged.tap_begin[0][j0], begin1 = staged.tap_begin[1][j1], begin2 = staged.tap_begin[2][j2];
  const int end1 = staged.tap_end[1][j1], end2 = staged.tap_end[2][j2];
  const int count = (staged.tap_end[0][j0] - begin0) * (end1 - begin1) * (end2 - begin2);
  bool trusted = true;
#pragma unroll 1
  for (int first = threadIdx.x / 128; first < all; first += kNumbers * kStep) {
    const T* source[kNumbers];
    T scale1[kNumbers], scale2[kNumbers];
    bool exists[kNumbers];
    double sum[kNumbers] = {};
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) {
      const int rest = first + n * kStep, ci = rest / groups;
      const int co = (rest - ci * groups) * kStagedChannels + lane / 4 + e % 2 * 8;
      exists[n] = rest < all && co < out_channels;
      source[n] = conv.weight + (exists[n] ? (ci * out_channels + co) * kernel : 0);
      scale1[n] = load_param<T>(conv.scale1, exists[n] ? co : 0);
      scale2[n] = load_param<T>(conv.scale2, exists[n] ? co : 0);
    }
    int a = begin0, b = begin1, c = begin2;
#pragma unroll 1
    for (int i = 0; i < count; i += kAtOnce) {
      T taps[kNumbers][kAtOnce];
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k) {
        const int tap = (a * kernel1 + b) * kernel2 + c;
#pragma unroll
        for (int n = 0; n < kNumbers; ++n)
          taps[n][k] = i + k < count && exists[n] ? source[n][tap] : from_accumulator<T>(0);
        if (++c == end2) {
          c = begin2;
          if (++b == end1) {
            b = begin1;
            ++a;
          }
        }
      }
#pragma unroll
      for (int k = 0; k < kAtOnce; ++k)
#pragma unroll
        for (int n = 0; n < kNumbers; ++n) sum[n] += static_cast<double>(to_accumulator(taps[n][k]));
    }
#pragma unroll
    for (int n = 0; n < kNumbers; ++n) {
      const int rest = first + n * kStep;
      if (rest >= all) continue;
      if (exists[n])
        sum[n] *= staged.over_pool * param_value(conv.scale1, scale1[n]) * param_value(conv.scale2, scale2[n]);
      if constexpr (kTerms == 1) {
        memory.weights[rest * 128 + at] = sum[n];
        trusted &= isfinite(sum[n]);
      } else {
        // The first digits and the rest, which have the sign of V and are not zero, or an infinite input would give NaN.
        // Far from one, they might not hold it.
        const float v = static_cast<float>(sum[n]);
        const unsigned bits = __float_as_uint(v), high = v == 0 ? bits : (bits - 1) & 0xffffe000u;
        memory.weights[rest * 256 + at] = __uint_as_float(high);
        memory.weights[rest * 256 + 128 + at] = v - __uint_as_float(high);
        trusted &= sum[n] == 0 || (fabs(sum[n]) < 1e30 && fabs(sum[n]) > 1e-25);
      }
    }
  }
  if (!trusted) signals.exotic = true;
  __mbarrier_arrive(&signals.collapsed);
  StagedSignals::wait(signals.collapsed, 0);
}

// What bias and shift add, by the storer, which has nothing to store yet.
template <class T>
__device__ void collapse_base(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                              StagedSignals& signals) {
  using Element = typename StagedTypes<T>::Element;
  bool trusted = true;
#pragma unroll 1
  for (int c = threadIdx.x % 32; c < staged.groups() * kStagedChannels; c += 32) {
    const int co = min(c, staged.out_channels - 1);
    memory.base[c] = static_cast<Element>(Affine<double>(conv, co, staged.over_pool)(0));
    trusted &= isfinite(memory.base[c]);
  }
  if (!trusted) signals.exotic = true;
  __mbarrier_arrive(&signals.collapsed);
}

// The consumers. A warp has the lanes (g, t) = (lane / 4, lane % 4), and computes kTogether rows of eight columns at once.
template <class T, int kJ0, bool kChannelsLast>
__device__ void compute_results(const Convolution<T>& conv, const Staged& staged, const StagedMemory<T>& memory,
                                StagedSignals& signals) {
  using Element = typename StagedTypes<T>::Element;
  constexpr int kTerms = StagedTypes<T>::kTerms;
  constexpr int kTogether = staged_rows_together(sizeof(T)), kStrips = kStagedColumns / 8;
  const StagedRows<T, kChannelsLast> layout(conv, staged);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, strip = warp % kStrips * 8;
  const int warp_rows = staged.layout.rows / (kStagedConsumers / kStrips), first_row = warp / kStrips * warp_rows;
  const int in_row = layout.pitch, in_channel = kChannelsLast ? 1 : staged.layout.slot_rows * in_row;
  const int groups = kChannelsLast ? 1 : staged.groups(), result_row = staged.layout.result_row;
  const int64_t area = conv.output_strides[2], volume = conv.output_strides[1];
  // Of results, from one channel and column to the next.
  const int pitch = kChannelsLast ? 1 : staged.layout.result_pitch, pixel = kChannelsLast ? staged.out_channels : 1;
  // Column i of a product is position i / 2 + i % 2 * 4 of eight, so that the lanes t hold neighbours of a row.
  const T* const inputs = memory.ring + first_row * in_row + (strip + g % 2 * 4 + g / 2 + t % 2) * layout.pixel;
  T* const outputs = memory.results + g * pitch + first_row * result_row + (strip + t) * pixel;
  unsigned plane = 0, job = 0;
  for_runs(staged, [&](const StagedRun& run) {
    const int rows = min(warp_rows, staged.out[1] - run.y - first_row), left = staged.out[2] - run.x - strip - t;
    // Whether there is something to write of channel g (+ 8 with e / 2) and column t (+ 4 with e % 2).
    bool writes[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) writes[e] = left > e % 2 * 4 && (!kChannelsLast || staged.out_channels - g > e / 2 * 8);
    const int skip = layout.skip(run);
    const T* tile = run.tile(conv);
    if constexpr (kJ0 == 2) {
      StagedSignals::wait(signals.loaded[plane % kStagedSlots], plane / kStagedSlots);
      ++plane;
    }
#pragma unroll 1
    for (int z = run.begin; z < run.end; ++z, ++plane, tile += area) {
      StagedSignals::wait(signals.loaded[plane % kStagedSlots], plane / kStagedSlots);
      const T* const x = inputs + skip + (kJ0 == 1 || t / 2 ? plane : plane - 1) % kStagedSlots * staged.layout.slot;
#pragma unroll 1
      for (int group = 0; group < groups; ++group, ++job) {
        const unsigned buffer = job % kStagedBuffers;
        const int skew = staged_skew<kChannelsLast>(staged, tile + group * kStagedChannels * volume);
        // Of channels g and g + 8, or of columns t and t + 4.
        T *to = outputs + buffer * staged.layout.buffer + skew, *to2 = to + (kChannelsLast ? 4 * pixel : 8 * pitch);
        const Element *first_base = memory.base + group * kStagedChannels + g,
                      base[4] = {first_base[0], first_base[0], first_base[8], first_base[8]};
        if (job >= kStagedBuffers) StagedSignals::wait(signals.stored[buffer], job / kStagedBuffers - 1);
        if (left + t > 0) {
          [[maybe_unused]] float check = 0;  // not finite if any of the sums is not
#pragma unroll 1
          for (int r = 0; r < rows; r += kTogether) {
            Element sums[kTogether][4];
            const T* in = x + r * in_row;
            const Element* v = memory.weights + group * kTerms * 128 + lane * 4;
            const auto add_channel = [&](bool first) {
              // A row of inputs is the second row of taps of one row of outputs, and the first of the next.
              Element a[kTerms][4], b[kTogether + 1];
#pragma unroll
              for (int k = 0; k <= kTogether; ++k)
                b[k] = kJ0 == 1 && t >= 2 ? Element(0) : static_cast<Element>(to_accumulator(in[k * in_row]));
#pragma unroll
              for (int m = 0; m < kTerms; ++m)
#pragma unroll
                for (int e = 0; e < 4; ++e) a[m][e] = v[m * 128 + e];
#pragma unroll
              for (int m = kTerms - 1; m >= 0; --m)
#pragma unroll
                for (int k = 0; k < kTogether; ++k) {
                  if (first && m == kTerms - 1)
                    multiply_add(sums[k], a[m], b[k], b[k + 1], base);
                  else
                    multiply_add(sums[k], a[m], b[k], b[k + 1], sums[k]);
                }
              in += in_channel;
              v += groups * kTerms * 128;
            };
            add_channel(true);
#pragma unroll 1
            for (int ci = 1; ci < staged.in_channels; ++ci) add_channel(false);
#pragma unroll
            for (int k = 0; k < kTogether; ++k) {
              // All rows of the tile have room, also those that do not exist.
              if (k == kFewStagedRows / (kStagedConsumers / kStrips) && warp_rows == k) break;
#pragma unroll
              for (int e = 0; e < 4; ++e) {
                T* const target = kChannelsLast ? (e % 2 ? to2 : to) + e / 2 * 8 : (e / 2 ? to2 : to) + e % 2 * 4;
                if (writes[e]) {
                  const float value = static_cast<float>(sums[k][e]);
                  if constexpr (StagedTypes<T>::kMayOverflow) check += value;
                  *target = from_accumulator<T>(value);
                }
              }
              to += result_row;
              to2 += result_row;
            }
          }
          if constexpr (StagedTypes<T>::kMayOverflow)
            if (!isfinite(check)) signals.suspect = true;
        }
        publish_results();
        __mbarrier_arrive(&signals.computed[buffer]);
      }
      __mbarrier_arrive(&signals.freed[(plane - (kJ0 - 1)) % kStagedSlots]);
    }
    if (kJ0 == 2) __mbarrier_arrive(&signals.freed[(plane - 1) % kStagedSlots]);
  });
}

// The outputs of the block once more as they are defined: all of them, or those that are not finite.
template <class T>
__device__ __noinline__ void repair_outputs(const Convolution<T>& conv, const Staged& staged, bool all) {
  const int64_t* strides = conv.output_strides;
  for_runs(staged, [&](const StagedRun& run) {
    const int rows = run.rows(staged), columns = run.columns(staged), channels = staged.out_channels;
    for (int z = run.begin; z < run.end; ++z)
#pragma unroll 1
      for (int64_t i = threadIdx.x; i < static_cast<int64_t>(channels) * rows * columns; i += kStagedThreads) {
        const int x = i % columns, y = i / columns % rows, co = i / columns / rows;
        T& output = run.tile(conv)[co * strides[1] + (z - run.begin) * strides[2] + y * strides[3] + x * strides[4]];
        if (all || !isfinite(to_accumulator(output))) output = direct_value(conv, run.n, co, z, run.y + y, run.x + x);
      }
  });
}

template <class T, int kJ0, bool kChannelsLast>
__global__ void __launch_bounds__(kStagedThreads, kStagedBlocks)
    staged_conv(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Staged staged) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(kStagedLine) char lines[];
  __shared__ StagedSignals signals;
  const StagedMemory<T> memory(staged, lines);
  if (threadIdx.x == 0) signals.init();
  __syncthreads();
  const int warp = threadIdx.x / 32;
  if (warp < kStagedConsumers) {
    collapse_weights(conv, staged, memory, signals);
    compute_results<T, kJ0, kChannelsLast>(conv, staged, memory, signals);
  } else if (warp == kStagedConsumers) {
    load_planes<T, kJ0, kChannelsLast>(conv, staged, memory, signals);
  } else {
    collapse_base(conv, staged, memory, signals);
    store_results<T, kChannelsLast>(conv, staged, memory, signals);
    wait_for_bulk_writes();
  }
  __syncthreads();
  if (signals.exotic || (StagedTypes<T>::kMayOverflow && signals.suspect)) repair_outputs(conv, staged, signals.exotic);
#else
  __trap();  // the plan knows better
#endif
}

}  // namespace fused
