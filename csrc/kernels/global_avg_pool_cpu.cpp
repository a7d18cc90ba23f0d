// The global-pool family on CPU: the input is read once, where it lies, into sums of its planes; all else works on those.
//
//   global_avg_pool                          mean[n, c] = sum of plane (n, c) / size
//   conv_transpose_global_avg_pool[_logsumexp]
//     mean[n, co] = 1/O * sum over ci and regions r of S[n, ci, r] * U[ci, co, r] + bias[co]
//     S: sum of the input over region r, U: sum of the weight's taps that meet region r. With padding 0 there is one
//     region, the whole plane.
//
// Sums are kept in float64 (half types: runs of at most 1024 elements in float32 first), which is free where memory is the
// limit, so that one rounding at the end is all that is left of the error.
#ifndef FUSED_CPU_TARGET
#include <algorithm>
#include <utility>
#include <vector>

#include "global_avg_pool.h"
#include "tensors.h"

namespace fused {
namespace {

// How planes are cut: into the regions in which the same taps apply, and into pieces that are summed as one item of work.
// Both depend on the plane alone, so that a sample's bits do not depend on its batch or on the number of threads.
struct PlaneCut {
  int64_t sizes[3] = {1, 1, 1};
  std::vector<Range> segments[3];
  std::vector<int32_t>
      segment_of[2];  // per index of the two outer dimensions: its segment, or -1 where no tap meets it
  int64_t plane = 1, regions = 1;
  int64_t channels = 1;  // that lie beside each other in each cell: C for channels_last, else 1
  int64_t piece = 1, pieces = 1;

  bool whole() const { return sizes[0] * sizes[1] == 1 && regions == 1 && segments[2][0] == Range{0, plane}; }
};

}  // namespace
}  // namespace fused

#define FUSED_CPU_KERNELS "global_avg_pool_cpu.cpp"
#include "cpu_targets.h"

#else  // ---- Kernels, once per instruction set ---------------------------------------------------------------------

#include "cpu_simd.h"

namespace fused {
namespace FUSED_CPU_TARGET {
namespace {

// What a vector lane adds up in.
template <class T>
using Lane = std::conditional_t<sizeof(T) == 2, float, double>;

constexpr int64_t kRun = 1024;
// Reads go through this many distant places at once: one alone gets six sevenths of the memory's speed.
constexpr int kStreams = 4;  // sum_run and add_rows name each

// totals[s] += the sum of n elements from x + s * stride on, for each of kCount streams; in the same order for any kCount.
template <class Acc, int kCount, class T>
void add_streams(const T* x, int64_t stride, int64_t n, double* totals) {
  using V = Lanes<Acc>;
  constexpr int k = kLanes<Acc>;
  for (int64_t i = 0; i < n;) {
    const int64_t end = i + kRun < n ? i + kRun : n;
    V sums[kCount][2] = {};
    for (; i + 4 * k <= end; i += 4 * k)
#pragma GCC unroll 4
      for (int s = 0; s < kCount; ++s)
#pragma GCC unroll 4
        for (int u = 0; u < 4; ++u) sums[s][u % 2] += load_as<Acc>(x + s * stride + i + u * k);
    for (; i + k <= end; i += k)
#pragma GCC unroll 4
      for (int s = 0; s < kCount; ++s) sums[s][0] += load_as<Acc>(x + s * stride + i);
#pragma GCC unroll 4
    for (int s = 0; s < kCount; ++s) {
      double total = horizontal_sum(sums[s][0] + sums[s][1]);
      for (int64_t j = i; j < end; ++j) total += static_cast<double>(x[s * stride + j]);
      totals[s] += total;
    }
    i = end;
  }
}

template <class Acc, class T>
double sum_run(const T* x, int64_t n) {
  const int64_t quarter = n > kRun ? n / (kStreams * kRun) * kRun : 0;
  double totals[kStreams + 1] = {};
  add_streams<Acc, kStreams>(x, quarter, quarter, totals);
  add_streams<Acc, 1>(x + kStreams * quarter, 0, n - kStreams * quarter, totals + kStreams);
  return (totals[0] + totals[1]) + (totals[2] + totals[3]) + totals[kStreams];
}

// sums[j] += sum of x[r, j] over r, x (rows, columns); rows of four places at once.
template <class Acc, class T>
void add_rows(const T* x, int64_t rows, int64_t columns, double* sums) {
  constexpr int k = kLanes<Acc>;
  const int64_t quarter = rows / kStreams, apart = quarter * columns;
  for (int64_t row = 0; row < quarter; ++row) {
    const T *x0 = x + row * columns, *x1 = x0 + apart, *x2 = x1 + apart, *x3 = x2 + apart;
    int64_t j = 0;
    for (; j + k <= columns; j += k)
      add_to(sums + j, (load_as<Acc>(x0 + j) + load_as<Acc>(x1 + j)) + (load_as<Acc>(x2 + j) + load_as<Acc>(x3 + j)));
    for (; j < columns; ++j)
      sums[j] += (static_cast<double>(x0[j]) + static_cast<double>(x1[j])) +
                 (static_cast<double>(x2[j]) + static_cast<double>(x3[j]));
  }
  for (int64_t row = kStreams * quarter; row < rows; ++row) {
    const T* x0 = x + row * columns;
    int64_t j = 0;
    for (; j + k <= columns; j += k) add_to(sums + j, load_as<Acc>(x0 + j));
    for (; j < columns; ++j) sums[j] += static_cast<double>(x0[j]);
  }
}

// sums[c] += sum of x[i, c] over i, x (cells, channels). Few channels: several cells make one long row.
template <class Acc, class T>
void add_cells(const T* x, int64_t cells, int64_t channels, double* sums) {
  constexpr int64_t kFew = 64, kFold = 16;
  const int64_t fold = kFold * ((kFold + channels - 1) / channels);
  if (channels >= kFew || cells < 2 * fold) return add_rows<Acc>(x, cells, channels, sums);
  double folded[kFold * (kFold + kFew)];
  for (int64_t i = 0; i < fold * channels; ++i) folded[i] = 0;
  const int64_t rows = cells / fold;
  add_rows<Acc>(x, rows, fold * channels, folded);
  add_rows<Acc>(x + rows * fold * channels, 1, (cells - rows * fold) * channels, folded);
  for (int64_t i = 0; i < fold; ++i)
    for (int64_t c = 0; c < channels; ++c) sums[c] += folded[i * channels + c];
}

// Items [begin, end) of (planes or samples, pieces): sums (item, region, channel).
template <class T, class Acc = Lane<T>>
void sum_pieces(const T* input, const PlaneCut& cut, int64_t begin, int64_t end, double* sums) {
  const int64_t channels = cut.channels, width = cut.sizes[2];
  const int64_t count1 = static_cast<int64_t>(cut.segments[1].size()),
                count2 = static_cast<int64_t>(cut.segments[2].size());
  const Range* segments = cut.segments[2].data();
  for (int64_t item = begin; item < end; ++item) {
    const int64_t first = item % cut.pieces * cut.piece;
    const int64_t last = first + cut.piece < cut.plane ? first + cut.piece : cut.plane;
    const T* x = input + item / cut.pieces * cut.plane * channels;
    double* item_sums = sums + (item - begin) * cut.regions * channels;
    for (int64_t i = 0; i < cut.regions * channels; ++i) item_sums[i] = 0;
    for (int64_t row = first / width; row * width < last; ++row) {
      const int64_t segment0 = cut.segment_of[0][row / cut.sizes[1]], segment1 = cut.segment_of[1][row % cut.sizes[1]];
      if (segment0 < 0 || segment1 < 0) continue;
      double* row_sums = item_sums + (segment0 * count1 + segment1) * count2 * channels;
      for (int64_t s = 0; s < count2; ++s) {
        const int64_t from = row * width + segments[s].begin, to = row * width + segments[s].end;
        const int64_t run_begin = from > first ? from : first, run_end = to < last ? to : last;
        if (run_begin >= run_end) continue;
        if (channels == 1)
          row_sums[s] += sum_run<Acc>(x + run_begin, run_end - run_begin);
        else
          add_cells<Acc>(x + run_begin * channels, run_end - run_begin, channels, row_sums + s * channels);
      }
    }
  }
}

// Contiguous whole planes of one piece: nothing but runs of one length, far apart ones at once.
template <class T>
void sum_planes(const T* input, const PlaneCut& cut, int64_t begin, int64_t end, double* sums) {
  const int64_t count = end - begin, apart = count / kStreams;
  const T* x = input + begin * cut.plane;
  for (int64_t i = 0; i < apart; ++i) {
    double totals[kStreams] = {};
    add_streams<Lane<T>, kStreams>(x + i * cut.plane, apart * cut.plane, cut.plane, totals);
    for (int s = 0; s < kStreams; ++s) sums[i + s * apart] = totals[s];
  }
  for (int64_t i = kStreams * apart; i < count; ++i) {
    sums[i] = 0;
    add_streams<Lane<T>, 1>(x + i * cut.plane, 0, cut.plane, sums + i);
  }
}

constexpr int kTileChannels = 16;

// dots[n, m] += sum over k of sums[n * stride + k] * weights[k, m].
void add_dots(const double* sums, int64_t stride, int64_t samples, const double* weights, int64_t depth, double* dots) {
  constexpr int k = kLanes<double>, vectors = kTileChannels / k;
  for (int64_t n = 0; n < samples; ++n) {
    Lanes<double> dot[vectors];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) dot[v] = load(dots + n * kTileChannels + v * k);
    for (int64_t i = 0; i < depth; ++i)
#pragma GCC unroll 8
      for (int v = 0; v < vectors; ++v) dot[v] += sums[n * stride + i] * load(weights + i * kTileChannels + v * k);
#pragma GCC unroll 8
    for (int v = 0; v < vectors; ++v) store(dots + n * kTileChannels + v * k, dot[v]);
  }
}

}  // namespace
}  // namespace FUSED_CPU_TARGET
}  // namespace fused

#endif

#ifndef FUSED_CPU_TARGET  // ---- Host ------------------------------------------------------------------------------

namespace fused {
namespace {

using Buffer = std::unique_ptr<double[]>;  // not cleared, unlike a std::vector
Buffer buffer(int64_t size) { return Buffer(new double[static_cast<size_t>(size)]); }

// Row 0 of x (rows, columns) becomes the sum of all, pairwise.
void sum_rows(double* x, int64_t rows, int64_t columns) {
  for (int64_t step = 1; step < rows; step *= 2)
    for (int64_t row = 0; row + step < rows; row += 2 * step)
      for (int64_t j = 0; j < columns; ++j) x[row * columns + j] += x[(row + step) * columns + j];
}

// ---- Sums of planes ----

// `dims`: the spatial dimensions of a transposed convolution, or of sizes alone, whose planes are then one region.
PlaneCut cut_planes(const std::vector<ConvDim>& dims, const Tensor& input) {
  PlaneCut cut;
  for (int d = 0; d < 3; ++d) cut.segments[d] = {Range{0, 1}};
  const int first = 3 - static_cast<int>(dims.size());
  for (size_t i = 0; i < dims.size(); ++i) {
    cut.sizes[first + i] = dims[i].input;
    cut.segments[first + i] = segment_input(dims[i]).segments;
    cut.plane *= dims[i].input;
  }
  for (int d = 0; d < 3; ++d) cut.regions *= static_cast<int64_t>(cut.segments[d].size());
  // Rows without a border are one long row.
  for (int merges = 0; merges < 2 && cut.segments[2].size() == 1 && cut.segments[2][0] == Range{0, cut.sizes[2]};
       ++merges) {
    for (Range& segment : cut.segments[1]) segment = {segment.begin * cut.sizes[2], segment.end * cut.sizes[2]};
    cut.sizes[2] *= cut.sizes[1];
    cut.segments[2] = cut.segments[1];
    cut.sizes[1] = cut.sizes[0];
    cut.segments[1] = cut.segments[0];
    cut.sizes[0] = 1;
    cut.segments[0] = {Range{0, 1}};
  }
  for (int d = 0; d < 2 && cut.plane > 0; ++d) {
    cut.segment_of[d].assign(static_cast<size_t>(cut.sizes[d]), -1);
    for (size_t s = 0; s < cut.segments[d].size(); ++s)
      for (int64_t i = cut.segments[d][s].begin; i < cut.segments[d][s].end; ++i)
        cut.segment_of[d][static_cast<size_t>(i)] = static_cast<int32_t>(s);
  }
  cut.channels = input.is_contiguous() ? 1 : input.size(1);
  constexpr int64_t kPiece = 65536, kLeastCells = 64;
  cut.piece = std::max({kPiece / cut.channels, kLeastCells, 8 * cut.regions});
  cut.pieces = std::max<int64_t>(1, ceil_div(cut.plane, cut.piece));
  return cut;
}

// (N, C, regions)
template <class T>
Buffer plane_sums(const Tensor& input, const PlaneCut& cut) {
  const T* x = static_cast<const T*>(input.const_data_ptr());
  const int64_t batch = input.size(0), channels = input.size(1), regions = cut.regions;
  const int64_t items = batch * (cut.channels > 1 ? 1 : channels) * cut.pieces;
  Buffer partial = buffer(items * regions * cut.channels);
  const auto kernel = cut.channels == 1 && cut.pieces == 1 && cut.whole() ? FUSED_CPU_SELECT(sum_planes<T>)
                                                                          : FUSED_CPU_SELECT(sum_pieces<T>);
  const int64_t width = regions * cut.channels;
  const auto sum_items = [&](int64_t begin, int64_t end) {
    kernel(x, cut, begin, end, partial.get() + begin * width);
    // Runs in float32 may overflow where the plane's sum does not; those of float16 are too small for that.
    if constexpr (std::is_same_v<T, BFloat16>)
      for (int64_t item = begin; item < end; ++item) {
        double* sums = partial.get() + item * width;
        if (!std::all_of(sums, sums + width, [](double sum) { return std::isfinite(sum); }))
          FUSED_CPU_SELECT(sum_pieces<T, double>)(x, cut, item, item + 1, sums);
      }
  };
  torch::stable::parallel_for(0, items, items_per_thread(std::min(cut.piece, cut.plane) * cut.channels), sum_items);
  if (cut.pieces == 1 && (cut.channels == 1 || regions == 1)) return partial;
  Buffer sums = buffer(batch * channels * regions);
  const int64_t outer = batch * channels / std::max<int64_t>(1, cut.channels);  // planes or samples
  torch::stable::parallel_for(0, outer, items_per_thread(cut.pieces * width), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double* rows = partial.get() + i * cut.pieces * width;
      sum_rows(rows, cut.pieces, width);
      for (int64_t c = 0; c < cut.channels; ++c)
        for (int64_t r = 0; r < regions; ++r) sums[(i * cut.channels + c) * regions + r] = rows[r * cut.channels + c];
    }
  });
  return sums;
}

// The tensor as the kernels read it: in place if it is contiguous or channels_last.
Tensor readable(const Tensor& input) { return is_channels_last(input) ? input : as_contiguous(input); }

Tensor global_avg_pool_cpu(const Tensor& input) {
  const Ints output_sizes = check_global_avg_pool(info(input));
  Tensor output = empty(output_sizes, input.scalar_type(), input);
  const int64_t outputs = output.numel();
  if (outputs == 0) return output;
  const Tensor x = readable(input);
  const auto sizes = input.sizes();
  std::vector<ConvDim> dims;
  for (size_t d = 2; d < sizes.size(); ++d) dims.push_back({sizes[d]});
  const PlaneCut cut = cut_planes(dims, x);
  dispatch_cpu(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    T* out = static_cast<T*>(output.mutable_data_ptr());
    if (cut.plane == 0) return std::fill(out, out + outputs, from_double<T>(NAN));
    const Buffer sums = plane_sums<T>(x, cut);
    torch::stable::parallel_for(0, outputs, items_per_thread(4), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) out[i] = from_double<T>(sums[i] / static_cast<double>(cut.plane));
    });
  });
  return output;
}

// ---- The channel axis of a chain ----

// Per segment of one dimension, the taps that meet it.
std::vector<Range> taps_of_segments(const ConvDim& dim) {
  std::vector<Range> result;
  for (const Range& segment : segment_input(dim).segments) result.push_back(input_tap_range(dim, segment.begin));
  return result;
}

// Sums one axis of x (outer, size, inner) over ranges of it: result (outer, ranges, inner).
void sum_ranges(const double* x, int64_t outer, int64_t size, int64_t inner, const std::vector<Range>& ranges,
                double* result) {
  for (int64_t o = 0; o < outer; ++o, x += size * inner)
    for (const Range& range : ranges) {
      std::fill(result, result + inner, 0.0);
      for (int64_t k = range.begin; k < range.end; ++k)
        for (int64_t i = 0; i < inner; ++i) result[i] += x[k * inner + i];
      result += inner;
    }
}

// means (N, C_out) = the dot of sums (N, C_in, regions) with the tap sums, over the output's size.
template <class T>
Buffer channel_means(const ConvTranspose<int64_t>& conv, const T* weight, const double* sums, int64_t regions) {
  constexpr int64_t kTile = cpu_default::kTileChannels, kSamples = 256, kDepth = 2048;
  const int64_t in_group = conv.in_channels / conv.groups, out_group = conv.out_channels / conv.groups;
  const int64_t taps = product(conv.kernel), tiles = ceil_div(out_group, kTile), depth = in_group * regions;
  std::vector<std::vector<Range>> ranges;
  for (int d = 0; d < conv.spatial_dims; ++d) ranges.push_back(taps_of_segments(conv_dim(conv, d)));
  const double size = float_product(conv.output);
  // Input channels at a time.
  const int64_t block = std::min(in_group, std::max<int64_t>(1, kDepth / std::max<int64_t>(1, regions)));
  Buffer means = buffer(conv.batch * conv.out_channels);
  if (regions == 0) {  // no tap meets any input
    std::fill(means.get(), means.get() + conv.batch * conv.out_channels, 0.0);
    return means;
  }
  const auto add_dots = FUSED_CPU_SELECT(add_dots);

  int64_t most = kTile;  // elements between two dimensions below
  for (int d = 0; d < conv.spatial_dims; ++d) most *= std::max(conv.kernel[d], static_cast<int64_t>(ranges[d].size()));
  // result (regions, kTile) of weights (width output channels, taps), one dimension after the other.
  const auto tap_sums = [&](const T* w, int64_t width, double* from, double* to, double* result) {
    for (int64_t t = 0; t < taps; ++t)
      for (int64_t m = 0; m < kTile; ++m) from[t * kTile + m] = m < width ? static_cast<double>(w[m * taps + t]) : 0.0;
    int64_t outer = taps, inner = kTile;
    for (int d = conv.spatial_dims - 1; d >= 0; --d) {
      outer /= conv.kernel[d];
      sum_ranges(from, outer, conv.kernel[d], inner, ranges[d], d == 0 ? result : to);
      inner *= static_cast<int64_t>(ranges[d].size());
      std::swap(from, to);
    }
  };
  torch::stable::parallel_for(
      0, conv.groups * tiles, items_per_thread(kTile * depth * (conv.batch + taps)), [&](int64_t begin, int64_t end) {
        const Buffer weights = buffer(block * regions * kTile), dots = buffer(std::min(kSamples, conv.batch) * kTile);
        const Buffer from = buffer(most), to = buffer(most);
        for (int64_t item = begin; item < end; ++item) {
          const int64_t group = item / tiles, first = item % tiles * kTile, width = std::min(kTile, out_group - first);
          for (int64_t n = 0; n < conv.batch; n += kSamples) {
            const int64_t samples = std::min(kSamples, conv.batch - n);
            std::fill(dots.get(), dots.get() + samples * kTile, 0.0);
            for (int64_t ci = 0; ci < in_group; ci += block) {
              const int64_t channels = std::min(block, in_group - ci);
              for (int64_t c = 0; c < channels; ++c)
                tap_sums(weight + ((group * in_group + ci + c) * out_group + first) * taps, width, from.get(), to.get(),
                         weights.get() + c * regions * kTile);
              add_dots(sums + ((n * conv.groups + group) * in_group + ci) * regions, conv.in_channels * regions,
                       samples, weights.get(), channels * regions, dots.get());
            }
            for (int64_t i = 0; i < samples; ++i)
              for (int64_t m = 0; m < width; ++m)
                means[(n + i) * conv.out_channels + group * out_group + first + m] = dots[i * kTile + m] / size;
          }
        }
      });
  return means;
}

double logsumexp(const double* x, int64_t count) {
  double maximum = x[0];
  for (int64_t i = 0; i < count; ++i) {
    if (std::isnan(x[i])) return x[i];
    maximum = std::max(maximum, x[i]);
  }
  if (std::isinf(maximum)) return maximum;  // would meet itself in the difference below
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += std::exp(x[i] - maximum);
  return maximum + std::log(sum);
}

Tensor run_chain(const char* op, bool with_logsumexp, const Tensor& input, const Tensor& weight,
                 const MaybeTensor& bias, const Ints& stride, const Ints& padding, const Ints& output_padding,
                 int64_t groups, const Ints& dilation, const MaybeTensor& scale, const MaybeTensor& shift,
                 double out_scale) {
  const auto checked = check_conv_transpose_global_avg_pool(
      op, with_logsumexp, info(input), info(weight), MaybeInfo(bias).get(), stride, padding, output_padding, groups,
      dilation, MaybeInfo(scale).get(), MaybeInfo(shift).get());
  const auto& conv = checked.conv;
  Tensor output = empty(checked.output, input.scalar_type(), input);
  if (output.numel() == 0) return output;
  const Tensor x = readable(input), w = as_contiguous(weight);
  std::vector<ConvDim> dims;
  for (int d = 0; d < conv.spatial_dims; ++d) dims.push_back(conv_dim(conv, d));
  const PlaneCut cut = cut_planes(dims, x);
  const ChannelParam biases = channel_param(bias, 0.0), scales = channel_param(scale, 1.0),
                     shifts = channel_param(shift, 0.0);
  dispatch_cpu(input.scalar_type(), [&](auto tag) {
    using T = decltype(tag);
    const Buffer sums = plane_sums<T>(x, cut);
    const Buffer values = channel_means(conv, static_cast<const T*>(w.const_data_ptr()), sums.get(), cut.regions);
    T* out = static_cast<T*>(output.mutable_data_ptr());
    torch::stable::parallel_for(0, conv.batch, items_per_thread(16 * conv.out_channels),
                                [&](int64_t begin, int64_t end) {
                                  for (int64_t n = begin; n < end; ++n) {
                                    double* row = values.get() + n * conv.out_channels;
                                    for (int64_t c = 0; c < conv.out_channels; ++c) {
                                      row[c] = (row[c] + load<T>(biases, c)) * load<T>(scales, c) + load<T>(shifts, c);
                                      if (!with_logsumexp) out[n * conv.out_channels + c] = from_double<T>(row[c]);
                                    }
                                    if (with_logsumexp)
                                      out[n] = from_double<T>(logsumexp(row, conv.out_channels) * out_scale);
                                  }
                                });
  });
  return output;
}

Tensor conv_transpose_global_avg_pool_cpu(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                                          const Ints& stride, const Ints& padding, const Ints& output_padding,
                                          int64_t groups, const Ints& dilation, const MaybeTensor& scale,
                                          const MaybeTensor& shift) {
  return run_chain("conv_transpose_global_avg_pool", false, input, weight, bias, stride, padding, output_padding,
                   groups, dilation, scale, shift, 1.0);
}

Tensor conv_transpose_global_avg_pool_logsumexp_cpu(const Tensor& input, const Tensor& weight, const MaybeTensor& bias,
                                                    const Ints& stride, const Ints& padding, const Ints& output_padding,
                                                    int64_t groups, const Ints& dilation, const MaybeTensor& scale,
                                                    const MaybeTensor& shift, double out_scale) {
  return run_chain("conv_transpose_global_avg_pool_logsumexp", true, input, weight, bias, stride, padding,
                   output_padding, groups, dilation, scale, shift, out_scale);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, CPU, m) {
  m.impl("global_avg_pool", TORCH_BOX(&global_avg_pool_cpu));
  m.impl("conv_transpose_global_avg_pool", TORCH_BOX(&conv_transpose_global_avg_pool_cpu));
  m.impl("conv_transpose_global_avg_pool_logsumexp", TORCH_BOX(&conv_transpose_global_avg_pool_logsumexp_cpu));
}

}  // namespace fused
#endif
