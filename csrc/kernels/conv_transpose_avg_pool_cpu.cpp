// conv_transpose_avg_pool on CPU: one small ordinary convolution of step r with tap-summed weights,
//
//   out[n, co, o] = affine(sum over ci and j of x[n, ci, o * r + j] * V[ci, j, co]),   V = sums of the weight's taps / P
//   affine(v) = ((v + bias) * scale1 + shift) * scale2
//
// A tile of the input is packed, converted and padded with zeros so that the step becomes 1 and every j a constant offset;
// then blocks of channels x vectors of positions stay in registers over the whole sum. The input is read once, in place
// whatever its strides, the output written once.
#ifndef FUSED_CPU_TARGET
#include <algorithm>
#include <atomic>
#include <limits>
#include <vector>

#include "conv_transpose_avg_pool.h"
#include "tensors.h"

namespace fused {
namespace {

// One spatial dimension of the collapsed convolution and of the tiles that its output is cut into.
struct Axis {
  int64_t input = 1, output = 1;
  int64_t step = 1;                // r
  int64_t first = 0, offsets = 1;  // j runs over [first, first + offsets)
  int64_t tile = 1, tiles = 1;     // outputs of a tile; tiles
  int64_t phases = 1,
          packed = 1;  // input i of a tile is packed at [i % r][i / r]: phases that some j meets, and their length
  int64_t input_stride = 0, output_stride = 0;
};

template <class Acc>
struct Convolution {
  int64_t batch = 0, groups = 1, in_group = 1, out_group = 1;
  Axis axes[3];
  int64_t input_strides[2], output_strides[2];  // of n and c
  int64_t packed_channel = 1;                   // elements of one packed channel
  std::vector<int64_t> offsets;                 // per (ci, j): where its first factor stands in the packed tile
  std::vector<Acc> weights;                     // (groups, channel blocks, (ci, j), channels of the block)
  std::vector<double> affine;                   // (C_out, 2): factor, term
  int64_t chain = 0;                            // float32 products that add up before they go to a float64 sum
  int64_t depth() const { return static_cast<int64_t>(offsets.size()); }
};

constexpr int kBlockChannels = 4;  // output channels that are in registers at once
constexpr int64_t kSlack = 256;    // elements past a packed tile or staged row that whole vectors may touch

}  // namespace
}  // namespace fused

#define FUSED_CPU_KERNELS "conv_transpose_avg_pool_cpu.cpp"
#include "cpu_targets.h"

#else  // ---- Kernels, once per instruction set ---------------------------------------------------------------------

#include "cpu_simd.h"

namespace fused {
namespace FUSED_CPU_TARGET {
namespace {

// Vectors of positions in registers, beside which kBlockChannels accumulators each and a broadcast have to fit.
constexpr int kBlockVectors = FUSED_CPU_REGISTERS == 32 ? 4 : 3;

// result[i] = x[i * stride], converted. Strided elements are gathered in a register: left to itself, GCC 12 converts two at
// a time by way of memory (10% slower in all where the pool is twice as wide as the convolution's stride).
template <class Acc, class T>
void pack_row(const T* x, int64_t count, int64_t stride, Acc* result) {
  using Bits = std::conditional_t<sizeof(T) == 2, uint16_t, T>;
  constexpr int k = kLanes<Acc>;
  int64_t i = 0;
  if (stride == 1)
    for (; i + k <= count; i += k) store(result + i, load_as<Acc>(x + i));
  else if (stride == 2)
    for (; i + k < count; i += k) {  // it reads the element behind the last, too
      using Index =
          std::conditional_t<sizeof(T) == 2, uint16_t, std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>;
      Vector<Bits, 2 * k> pairs;
      Vector<Index, 2 * k> even = {};
#pragma GCC unroll 16
      for (int lane = 0; lane < k; ++lane) even[lane] = static_cast<Index>(2 * lane);
      __builtin_memcpy(&pairs, x + i * 2, sizeof pairs);
      pairs = __builtin_shuffle(pairs, even);
      store(result + i, load_as<Acc>(reinterpret_cast<const T*>(&pairs)));
    }
  for (; i + k <= count; i += k) {
    Vector<Bits, k> gathered;
#pragma GCC unroll 16
    for (int lane = 0; lane < k; ++lane) gathered[lane] = load_bits<Bits>(x + (i + lane) * stride);
    store(result + i, load_as<Acc>(reinterpret_cast<const T*>(&gathered)));
  }
  for (; i < count; ++i) result[i] = static_cast<Acc>(x[i * stride]);
}

// The input of one tile of group channels, as (ci, phase0, phase1, phase2, packed0, packed1, packed2).
template <class T, class Acc>
void pack_tile(const T* x, const Convolution<Acc>& conv, const int64_t (&tile)[3], Acc* result) {
  constexpr int64_t kRowsAhead = 10, kLine = 64 / sizeof(T);
  const auto& [axis0, axis1, axis2] = conv.axes;
  const auto input_at = [&](const Axis& axis, int d, int64_t phase, int64_t i) {
    return (tile[d] * axis.tile + i) * axis.step + axis.first + phase;
  };
  for (int64_t ci = 0; ci < conv.in_group; ++ci, x += conv.input_strides[1])
    for (int64_t p0 = 0; p0 < axis0.phases; ++p0)
      for (int64_t p1 = 0; p1 < axis1.phases; ++p1)
        for (int64_t p2 = 0; p2 < axis2.phases; ++p2) {
          // Inputs of a row that exist: [begin, end)
          const int64_t start = input_at(axis2, 2, p2, 0);
          int64_t begin = start < 0 ? (-start + axis2.step - 1) / axis2.step : 0;
          int64_t end = start < axis2.input ? (axis2.input - start + axis2.step - 1) / axis2.step : 0;
          if (end > axis2.packed) end = axis2.packed;
          if (begin > end) begin = end;
          const T* row_start = x + (start + begin * axis2.step) * axis2.input_stride;
          const auto row_at = [&](int64_t at0, int64_t at1) {
            return row_start + at0 * axis0.input_stride + at1 * axis1.input_stride;
          };
          for (int64_t i0 = 0; i0 < axis0.packed; ++i0)
            for (int64_t i1 = 0; i1 < axis1.packed; ++i1, result += axis2.packed) {
              const int64_t at0 = input_at(axis0, 0, p0, i0), at1 = input_at(axis1, 1, p1, i1);
              // Short rows with gaps between them are nothing that the hardware would ask for ahead.
              const bool wraps = i1 + kRowsAhead >= axis1.packed;
              const T* ahead = row_at(at0 + (wraps ? axis0.step : 0),
                                      at1 + (wraps ? kRowsAhead - axis1.packed : kRowsAhead) * axis1.step);
              for (int64_t i = 0; i < (end - begin) * axis2.step * axis2.input_stride; i += kLine)
                __builtin_prefetch(ahead + i);
              if (at0 < 0 || at0 >= axis0.input || at1 < 0 || at1 >= axis1.input) {
                for (int64_t i = 0; i < axis2.packed; ++i) result[i] = 0;
                continue;
              }
              for (int64_t i = 0; i < begin; ++i) result[i] = 0;
              for (int64_t i = end; i < axis2.packed; ++i) result[i] = 0;
              pack_row(row_at(at0, at1), end - begin, axis2.step * axis2.input_stride, result + begin);
            }
        }
}

// acc[m, p] = sum over k of x[offsets[k] + p] * weights[k, m] for a block of positions.
template <class Acc, int kChannels>
inline void multiply_chain(const Acc* x, const int64_t* offsets, const Acc* weights, int64_t depth,
                           Lanes<Acc> (&acc)[kChannels][kBlockVectors]) {
#pragma GCC unroll 4
  for (int m = 0; m < kChannels; ++m)
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) acc[m][v] = Lanes<Acc>{};
  for (int64_t k = 0; k < depth; ++k) {
    const Acc* source = x + offsets[k];
    Lanes<Acc> values[kBlockVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kBlockVectors; ++v) values[v] = load(source + v * kLanes<Acc>);
#pragma GCC unroll 4
    for (int m = 0; m < kChannels; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVectors; ++v) acc[m][v] += values[v] * weights[k * kChannels + m];
  }
}

// results[m, p] = affine[m](the sum over all k), rounded, for a block of positions. Float64 sums stay in registers until
// they are results; float32 sums are added up in float64, one chain after the other.
template <class Acc, int kChannels, class Rounded>
inline void multiply(const Acc* x, const int64_t* offsets, const Acc* weights, int64_t depth, int64_t chain,
                     const double* affine, Rounded* results, int64_t pitch) {
  constexpr int n = kLanes<Acc>, kPositions = kBlockVectors * n;
  Lanes<Acc> acc[kChannels][kBlockVectors];
  if constexpr (std::is_same_v<Acc, double>) {
    multiply_chain<Acc, kChannels>(x, offsets, weights, depth, acc);
#pragma GCC unroll 4
    for (int m = 0; m < kChannels; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < kBlockVectors; ++v)
        store_rounded(results + m * pitch + v * n, acc[m][v] * affine[m * 2] + affine[m * 2 + 1]);
  } else {
    double sums[kChannels * kPositions] = {};
    for (int64_t k = 0; k < depth; k += chain) {
      multiply_chain<Acc, kChannels>(x, offsets + k, weights + k * kChannels, chain < depth - k ? chain : depth - k,
                                     acc);
#pragma GCC unroll 4
      for (int m = 0; m < kChannels; ++m)
#pragma GCC unroll 4
        for (int v = 0; v < kBlockVectors; ++v) add_to(sums + m * kPositions + v * n, acc[m][v]);
    }
    for (int m = 0; m < kChannels; ++m)
      for (int i = 0; i < kPositions; i += kLanes<double>)
        store_rounded(results + m * pitch + i, load(sums + m * kPositions + i) * affine[m * 2] + affine[m * 2 + 1]);
  }
}

// A row of results (kChannels, pitch) to the output.
template <int kChannels, class T, class Rounded>
inline void write_row(const Rounded* results, int64_t pitch, int64_t count, T* output, int64_t channel_stride,
                      int64_t stride) {
  constexpr int n = kLanes<Rounded>;
  if (stride == 1 && count >= n) {
    for (int m = 0; m < kChannels; ++m)
      for (int64_t i = 0; i < count; i += n) {
        const int64_t at = i + n <= count ? i : count - n;  // the last vector overlaps the one before
        store_rounded(output + m * channel_stride + at, load(results + m * pitch + at));
      }
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    for (int m = 0; m < kChannels; ++m)
      output[m * channel_stride + i * stride] = static_cast<T>(results[m * pitch + i]);
}

// A block of channels over `rows` rows of `columns` outputs, `packed_row` positions apart in x. Rows are written as soon as
// they are complete, so that the stores overlap with the arithmetic of the next.
template <class T, class Acc, int kChannels>
void convolve_rows(const Acc* x, const Convolution<Acc>& conv, int64_t first_channel, int64_t rows, int64_t columns,
                   Accumulator<T>* results, int64_t pitch, T* output) {
  constexpr int64_t kStep = kBlockVectors * kLanes<Acc>, kLine = 64 / sizeof(T);
  const int64_t packed_row = conv.axes[2].packed;
  const int64_t row_stride = conv.axes[1].output_stride, stride = conv.axes[2].output_stride;
  int64_t row = 0;
  for (int64_t p = 0; row < rows; p += kStep) {
    // The output is too large to be cached; asked for 32 elements ahead, its lines come 8% of workload B's time sooner.
    const T* ahead = output + row * row_stride + (p - row * packed_row + 32) * stride;
    for (int m = 0; m < kChannels; ++m)
      for (int64_t i = 0; i < kStep; i += kLine) __builtin_prefetch(ahead + m * conv.output_strides[1] + i, 1);
    multiply<Acc, kChannels>(x + p, conv.offsets.data(), conv.weights.data() + first_channel * conv.depth(),
                             conv.depth(), conv.chain, conv.affine.data() + first_channel * 2, results + p, pitch);
    for (; row < rows && row * packed_row + columns <= p + kStep; ++row)
      write_row<kChannels>(results + row * packed_row, pitch, columns, output + row * row_stride,
                           conv.output_strides[1], stride);
  }
}

// Items [begin, end) of (n, group, tile0, tile1, tile2).
template <class T, class Acc>
void convolve(const T* input, const Convolution<Acc>& conv, int64_t begin, int64_t end, T* output) {
  const auto& [axis0, axis1, axis2] = conv.axes;
  const int64_t most = (axis1.tile - 1) * axis2.packed + axis2.tile, pitch = most + kSlack;
  const int64_t packed_tile = conv.in_group * conv.packed_channel;
  const std::unique_ptr<Acc[]> packed(new Acc[packed_tile + kSlack]);
  for (int64_t i = 0; i < kSlack; ++i) packed[packed_tile + i] = 0;
  const std::unique_ptr<Accumulator<T>[]> results(new Accumulator<T>[kBlockChannels * pitch]);
  for (int64_t item = begin; item < end; ++item) {
    const int64_t tile[3] = {item / axis2.tiles / axis1.tiles % axis0.tiles, item / axis2.tiles % axis1.tiles,
                             item % axis2.tiles};
    const int64_t outer = item / axis2.tiles / axis1.tiles / axis0.tiles, n = outer / conv.groups,
                  group = outer % conv.groups;
    int64_t first[3], size[3];
    for (int d = 0; d < 3; ++d) {
      first[d] = tile[d] * conv.axes[d].tile;
      size[d] = conv.axes[d].output - first[d];
      if (size[d] > conv.axes[d].tile) size[d] = conv.axes[d].tile;
    }
    pack_tile(input + n * conv.input_strides[0] + group * conv.in_group * conv.input_strides[1], conv, tile,
              packed.get());
    T* target = output + n * conv.output_strides[0] + first[0] * axis0.output_stride + first[1] * axis1.output_stride +
                first[2] * axis2.output_stride;
    // Plane by plane, so that its inputs stay in the first-level cache for all channels.
    for (int64_t i0 = 0; i0 < size[0]; ++i0)
      for (int64_t c = 0; c < conv.out_group; c += kBlockChannels) {
        const int64_t left = conv.out_group - c, channel = group * conv.out_group + c;
        const auto rows = left == 1   ? &convolve_rows<T, Acc, 1>
                          : left == 2 ? &convolve_rows<T, Acc, 2>
                          : left == 3 ? &convolve_rows<T, Acc, 3>
                                      : &convolve_rows<T, Acc, 4>;
        rows(packed.get() + i0 * axis1.packed * axis2.packed, conv, channel, size[1], size[2], results.get(), pitch,
             target + channel * conv.output_strides[1] + i0 * axis0.output_stride);
      }
  }
}

}  // namespace
}  // namespace FUSED_CPU_TARGET
}  // namespace fused

#endif

#ifndef FUSED_CPU_TARGET  // ---- Host ------------------------------------------------------------------------------

namespace fused {
namespace {

// An offset j that has taps, in all dimensions, and the taps that its weight sums.
struct Offset {
  int64_t at[3];  // j - first
  Range taps[3];
};

std::vector<Offset> list_offsets(const std::vector<PoolDim>& dims) {
  const size_t skip = 3 - dims.size();
  std::vector<Offset> result = {{{0, 0, 0}, {{0, 1}, {0, 1}, {0, 1}}}};
  for (size_t d = 0; d < dims.size(); ++d) {
    std::vector<Offset> next;
    const Range range = dims[d].offsets();
    for (Offset offset : result)
      for (int64_t j = range.begin; j < range.end; ++j) {
        offset.at[skip + d] = j - range.begin;
        offset.taps[skip + d] = dims[d].taps(j);
        if (offset.taps[skip + d].size() > 0) next.push_back(offset);
      }
    result = next;
  }
  return result;
}

// As many outputs per tile as keep the packed input in the second-level cache, in equal parts; several planes only as far
// as packing their border twice costs more than it leaves to do for other threads.
void choose_tiles(Axis (&axes)[3], int64_t in_group) {
  constexpr int64_t kPacked = 65536, kPackedPlanes = 16384, kPositions = 1024, kLeast = 64;
  for (Axis& axis : axes) axis.phases = std::max<int64_t>(1, std::min(axis.step, axis.offsets));
  int64_t others = in_group;
  for (const Axis& axis : axes) others *= axis.phases * (1 + (axis.offsets - 1) / axis.step);
  for (int d = 2; d >= 0; --d) {
    Axis& axis = axes[d];
    const int64_t halo = (axis.offsets - 1) / axis.step;
    others /= 1 + halo;
    int64_t most = std::max<int64_t>((d == 0 ? kPackedPlanes : kPacked) / others - halo, d == 2 ? kLeast : 1);
    if (d == 1) most = std::min(most, std::max<int64_t>(1, kPositions / axes[2].packed));
    axis.tiles = ceil_div(axis.output, most);
    axis.tile = ceil_div(axis.output, axis.tiles);
    axis.tiles = ceil_div(axis.output, axis.tile);
    axis.packed = axis.tile + halo;
    others *= axis.packed;
  }
}

// Float32 products that add up in one register before they go to a float64 sum, in about equal parts; 0 where products are
// float64 themselves. Those of float32 inputs are, unless there are so many input channels that eager PyTorch, which sums
// them in float32, makes twice the error of chains of 32 (measured: 0.5 of eager's at 64 channels, less from there on),
// and so many outputs of a sample that luck does not turn the largest error's ratio (of 40 draws, the worst was 0.7 at
// 2^20; with chains of 16, 1.3 at 64 x 4096, 2.7 at 128 x 2).
template <class T>
int64_t choose_chain(int64_t in_group, int64_t depth, int64_t sample_outputs) {
  if (sizeof(T) == 8 || (sizeof(T) == 4 && (in_group < 64 || in_group * sample_outputs < 1 << 20))) return 0;
  const int64_t most = sizeof(T) == 4 ? 32 : std::clamp<int64_t>(depth / 16, 32, 64);
  return std::max<int64_t>(1, ceil_div(depth, std::max<int64_t>(1, ceil_div(depth, most))));
}

// Fills in the weights, V[ci, j, co] = sum of W[ci, co, k] over the taps of j / prod(P); tells whether all are finite.
template <class T, class Acc>
bool sum_taps(const T* weight, const std::vector<Offset>& offsets, const int64_t (&kernel)[3], double pool_size,
              Convolution<Acc>& conv) {
  const int64_t count = static_cast<int64_t>(offsets.size()), taps = kernel[0] * kernel[1] * kernel[2];
  const int64_t in_channels = conv.groups * conv.in_group;
  conv.weights.resize(static_cast<size_t>(conv.groups * conv.out_group * conv.depth()));
  std::atomic<bool> finite{true};
  torch::stable::parallel_for(
      0, in_channels, items_per_thread(conv.out_group * count * 8), [&](int64_t begin, int64_t end) {
        std::vector<double> block(static_cast<size_t>(taps * kBlockChannels));  // (taps, channels of the block)
        for (int64_t channel = begin; channel < end; ++channel) {
          const int64_t group = channel / conv.in_group, ci = channel % conv.in_group;
          for (int64_t first = 0; first < conv.out_group; first += kBlockChannels) {
            const int64_t width = std::min<int64_t>(kBlockChannels, conv.out_group - first);
            const T* w = weight + (channel * conv.out_group + first) * taps;
            for (int64_t m = 0; m < width; ++m)
              for (int64_t t = 0; t < taps; ++t) block[t * kBlockChannels + m] = static_cast<double>(w[m * taps + t]);
            Acc* result = conv.weights.data() + (group * conv.out_group + first) * conv.depth() + ci * count * width;
            for (int64_t j = 0; j < count; ++j) {
              const auto& [range0, range1, range2] = offsets[j].taps;
              double sums[kBlockChannels] = {};
              for (int64_t k0 = range0.begin; k0 < range0.end; ++k0)
                for (int64_t k1 = range1.begin; k1 < range1.end; ++k1)
                  for (int64_t k2 = range2.begin; k2 < range2.end; ++k2)
                    for (int m = 0; m < kBlockChannels; ++m)
                      sums[m] += block[((k0 * kernel[1] + k1) * kernel[2] + k2) * kBlockChannels + m];
              for (int64_t m = 0; m < width; ++m) {
                result[j * width + m] = static_cast<Acc>(sums[m] / pool_size);
                if (!std::isfinite(result[j * width + m])) finite = false;
              }
            }
          }
        }
      });
  return finite;
}

// ((v + bias) * scale1 + shift) * scale2 as v * factor + term; tells whether that is the same for every v.
template <class T>
bool fold_affine(const ChannelParam (&params)[4], int64_t c, std::vector<double>& affine) {
  double values[4];
  for (int i = 0; i < 4; ++i) values[i] = load<T>(params[i], c);
  const auto [bias, scale1, shift, scale2] = values;
  const double factor = scale1 * scale2, term = (bias * scale1 + shift) * scale2;
  affine.push_back(factor);
  affine.push_back(term);
  const bool vanished = std::fabs(factor) < std::numeric_limits<double>::min() && scale1 != 0 && scale2 != 0;
  return std::isfinite(factor) && std::isfinite(term) && !vanished;
}

// The same sums with terms outside the input left out instead of multiplied by zero, which an infinite weight would show,
// and every step of the affine part by itself; and without a packed input, which dilation may make large and mostly zero.
template <class T, class Acc>
void convolve_in_place(const T* input, const Convolution<Acc>& conv, const std::vector<Offset>& offsets,
                       const ChannelParam (&params)[4], T* output) {
  const auto& [axis0, axis1, axis2] = conv.axes;
  const int64_t count = static_cast<int64_t>(offsets.size()), out_channels = conv.groups * conv.out_group;
  // Of an axis: the outputs that offset j sends an input to.
  const auto outputs_of = [](const Axis& axis, int64_t j) {
    const int64_t start = axis.first + j;
    return Range{std::max<int64_t>(0, ceil_div(-start, axis.step)),
                 std::min(axis.output, floor_div(axis.input - 1 - start, axis.step) + 1)};
  };
  const int64_t plane = axis1.output * axis2.output;
  torch::stable::parallel_for(0, conv.batch * out_channels * axis0.output, 1, [&](int64_t begin, int64_t end) {
    std::vector<double> sums(static_cast<size_t>(plane));
    for (int64_t item = begin; item < end; ++item) {
      const int64_t o0 = item % axis0.output, outer = item / axis0.output;
      const int64_t n = outer / out_channels, channel = outer % out_channels;
      const int64_t group = channel / conv.out_group, co = channel % conv.out_group;
      const int64_t first = co / kBlockChannels * kBlockChannels;
      const int64_t width = std::min<int64_t>(kBlockChannels, conv.out_group - first);
      const Acc* weights = conv.weights.data() + (group * conv.out_group + first) * conv.depth() + co - first;
      std::fill(sums.begin(), sums.end(), 0.0);
      for (int64_t ci = 0; ci < conv.in_group; ++ci) {
        const T* x = input + n * conv.input_strides[0] + (group * conv.in_group + ci) * conv.input_strides[1];
        for (int64_t j = 0; j < count; ++j) {
          const int64_t i0 = o0 * axis0.step + axis0.first + offsets[j].at[0];
          if (i0 < 0 || i0 >= axis0.input) continue;
          const double w = static_cast<double>(weights[(ci * count + j) * width]);
          const Range rows = outputs_of(axis1, offsets[j].at[1]), columns = outputs_of(axis2, offsets[j].at[2]);
          for (int64_t o1 = rows.begin; o1 < rows.end; ++o1) {
            const int64_t i1 = o1 * axis1.step + axis1.first + offsets[j].at[1];
            const int64_t i2 = columns.begin * axis2.step + axis2.first + offsets[j].at[2];
            const T* source = x + i0 * axis0.input_stride + i1 * axis1.input_stride + i2 * axis2.input_stride;
            double* target = sums.data() + o1 * axis2.output + columns.begin;
            for (int64_t i = 0; i < columns.size(); ++i)
              target[i] += static_cast<double>(source[i * axis2.step * axis2.input_stride]) * w;
          }
        }
      }
      double affine[4];
      for (int i = 0; i < 4; ++i) affine[i] = load<T>(params[i], channel);
      T* y = output + n * conv.output_strides[0] + channel * conv.output_strides[1] + o0 * axis0.output_stride;
      for (int64_t o1 = 0; o1 < axis1.output; ++o1)
        for (int64_t o2 = 0; o2 < axis2.output; ++o2) {
          const double sum = sums[static_cast<size_t>(o1 * axis2.output + o2)];
          y[o1 * axis1.output_stride + o2 * axis2.output_stride] =
              from_double<T>(((sum + affine[0]) * affine[1] + affine[2]) * affine[3]);
        }
    }
  });
}

Tensor conv_transpose_avg_pool_cpu(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                                   const Ints& stride, const Ints& padding, const Ints& output_padding, int64_t groups,
                                   const Ints& dilation, const Ints& pool_kernel_size, const Ints& pool_stride,
                                   const MaybeTensor& scale1, const MaybeTensor& shift, const MaybeTensor& scale2) {
  const auto pooled = check_conv_transpose_avg_pool(
      info(input), info(weight), MaybeInfo(bias).get(), stride, padding, output_padding, groups, dilation,
      pool_kernel_size, pool_stride, MaybeInfo(scale1).get(), MaybeInfo(shift).get(), MaybeInfo(scale2).get());
  const int dims = pooled.conv.spatial_dims;
  Tensor output = empty(pooled.output, input.scalar_type(), input, wants_channels_last(input));
  if (output.numel() == 0) return output;
  const Tensor w = as_contiguous(weight);
  std::vector<PoolDim> pool_dims;
  for (int d = 0; d < dims; ++d) pool_dims.push_back(pool_dim(pooled, d));
  const std::vector<Offset> offsets = list_offsets(pool_dims);
  const ChannelParam params[4] = {channel_param(bias, 0.0), channel_param(scale1, 1.0), channel_param(shift, 0.0),
                                  channel_param(scale2, 1.0)};

  dispatch_cpu(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const int64_t in_group = pooled.conv.in_channels / groups;
    const int64_t chain =
        choose_chain<T>(in_group, in_group * static_cast<int64_t>(offsets.size()), output.numel() / pooled.conv.batch);
    const auto run = [&](auto product) {
      using Acc = decltype(product);
      Convolution<Acc> conv;
      conv.batch = pooled.conv.batch;
      conv.groups = groups;
      conv.in_group = in_group;
      conv.out_group = pooled.conv.out_channels / groups;
      int64_t kernel[3] = {1, 1, 1};
      for (int d = 0; d < dims; ++d) {
        Axis& axis = conv.axes[3 - dims + d];
        axis.input = pool_dims[d].conv.input;
        axis.output = pool_dims[d].output();
        axis.step = pool_dims[d].step();
        axis.first = pool_dims[d].offsets().begin;
        axis.offsets = std::max<int64_t>(1, pool_dims[d].offsets().size());
        axis.input_stride = input.stride(2 + d);
        axis.output_stride = output.stride(2 + d);
        kernel[3 - dims + d] = pooled.conv.kernel[d];
      }
      for (int d = 0; d < 2; ++d) {
        conv.input_strides[d] = input.stride(d);
        conv.output_strides[d] = output.stride(d);
      }
      choose_tiles(conv.axes, conv.in_group);
      const auto& [axis0, axis1, axis2] = conv.axes;
      const int64_t phase = axis0.packed * axis1.packed * axis2.packed;
      conv.packed_channel = axis0.phases * axis1.phases * axis2.phases * phase;
      for (int64_t ci = 0; ci < conv.in_group; ++ci)
        for (const auto& [at, taps] : offsets)
          conv.offsets.push_back(
              ci * conv.packed_channel +
              ((at[0] % axis0.step * axis1.phases + at[1] % axis1.step) * axis2.phases + at[2] % axis2.step) * phase +
              (at[0] / axis0.step * axis1.packed + at[1] / axis1.step) * axis2.packed + at[2] / axis2.step);
      bool plain = true;
      for (int64_t c = 0; c < pooled.conv.out_channels; ++c) plain = fold_affine<T>(params, c, conv.affine) && plain;
      conv.chain = chain;
      double pool_size = 1;
      for (int64_t size : pooled.pool_kernel) pool_size *= static_cast<double>(size);

      const T* x = static_cast<const T*>(input.const_data_ptr());
      T* out = static_cast<T*>(output.mutable_data_ptr());
      plain = sum_taps(static_cast<const T*>(w.const_data_ptr()), offsets, kernel, pool_size, conv) && plain;
      // Per input channel: elements to pack, mostly zeros where dilation is large, and products.
      const double packed = static_cast<double>(conv.packed_channel) * axis0.tiles * axis1.tiles * axis2.tiles;
      const double products =
          static_cast<double>(conv.out_group * conv.depth() / in_group) * axis0.output * axis1.output * axis2.output;
      if (!plain || packed > products) return convolve_in_place(x, conv, offsets, params, out);
      const auto kernel_function = FUSED_CPU_SELECT(convolve<T, Acc>);
      const int64_t work = axis0.tile * axis1.tile * axis2.tile * conv.out_group * (1 + conv.depth() / 8);
      torch::stable::parallel_for(0, conv.batch * groups * axis0.tiles * axis1.tiles * axis2.tiles,
                                  items_per_thread(work),
                                  [&](int64_t begin, int64_t end) { kernel_function(x, conv, begin, end, out); });
    };
    if constexpr (sizeof(T) <= 4)
      if (chain > 0) return run(float());
    if constexpr (sizeof(T) >= 4) run(double());
  });
  return output;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, CPU, m) { m.impl("conv_transpose_avg_pool", TORCH_BOX(&conv_transpose_avg_pool_cpu)); }

}  // namespace fused
#endif
