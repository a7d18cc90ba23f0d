// Shape arithmetic of the collapsed chains, once for every consumer: the CUDA and CPU kernels, the launch plans, the
// Python module and the tests. Neither torch nor CUDA is needed here.
//
// Per spatial dimension, with input size D, kernel K, stride s, padding p, dilation d:
//   a transposed convolution sends input i through tap k to output i*s - p + k*d.
#pragma once

#include <cstdint>
#include <vector>

namespace fused {

inline constexpr int kMaxSpatialDims = 3;

// One spatial dimension of a transposed convolution.
struct ConvDim {
  int64_t input = 1;
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t padding = 0;
  int64_t output_padding = 0;
  int64_t dilation = 1;
};

// A half-open range; empty when end <= begin.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;
  constexpr int64_t size() const { return end > begin ? end - begin : 0; }
  constexpr bool operator==(const Range& other) const { return begin == other.begin && end == other.end; }
};

// Division that rounds towards minus or plus infinity; the divisor is positive.
constexpr int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b < 0); }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return -floor_div(-a, b); }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// Output size of a transposed convolution, as torch.nn.ConvTranspose2d documents it. Works on any integer-like type, so
// that symbolic sizes use it too.
template <class Int>
constexpr Int conv_transpose_output_size(const Int& input, const Int& kernel, int64_t stride, int64_t padding,
                                         int64_t output_padding, int64_t dilation) {
  return (input - Int(1)) * Int(stride) - Int(2 * padding) + Int(dilation) * (kernel - Int(1)) + Int(output_padding) +
         Int(1);
}

constexpr int64_t conv_transpose_output_size(const ConvDim& dim) {
  return conv_transpose_output_size<int64_t>(dim.input, dim.kernel, dim.stride, dim.padding, dim.output_padding,
                                             dim.dilation);
}

// ---- Global pool -------------------------------------------------------------------------------------------------

// The inputs that tap k sends into the output: all i in [0, D) with 0 <= i*s - p + k*d < O.
Range tap_input_range(const ConvDim& dim, int64_t tap);

// The taps that send input i into the output: the same relation, asked the other way round.
constexpr Range input_tap_range(const ConvDim& dim, int64_t input) {
  const int64_t first = dim.padding - input * dim.stride;
  const int64_t begin = ceil_div(first, dim.dilation);
  const int64_t end = floor_div(first + conv_transpose_output_size(dim) - 1, dim.dilation) + 1;
  return {begin > 0 ? begin : 0, end < dim.kernel ? end : dim.kernel};
}

// The input cut at every end of a tap's range, so that each tap's range is a run of whole segments. Cells that no tap
// uses are in no segment. Padding 0 gives the one segment [0, D).
struct Segmentation {
  std::vector<Range> segments;   // disjoint, ascending, not empty
  std::vector<Range> tap_range;  // per tap: the run of segments [begin, end) that it uses
};
Segmentation segment_input(const ConvDim& dim);

// ---- Average pool ------------------------------------------------------------------------------------------------

// A transposed convolution followed by an average pool (kernel P, stride Q = r*s) along one dimension:
//   out[o] = 1/P * sum_j x[o*r + j] * V[j],   V[j] = sum of W[k] over k in taps(j),   x = 0 outside [0, D).
struct PoolDim {
  ConvDim conv;
  int64_t pool_kernel = 1;
  int64_t pool_stride = 1;

  constexpr int64_t output() const { return (conv_transpose_output_size(conv) - pool_kernel) / pool_stride + 1; }
  constexpr int64_t step() const { return pool_stride / conv.stride; }  // r
  // All j for which V[j] can have a term; empty when no input meets the pool windows.
  constexpr Range offsets() const {
    return {ceil_div(conv.padding - (conv.kernel - 1) * conv.dilation, conv.stride),
            floor_div(conv.padding + pool_kernel - 1, conv.stride) + 1};
  }
  // The taps k that V[j] sums: those with 0 <= k*d - p + j*s < P.
  constexpr Range taps(int64_t offset) const {
    const int64_t first = conv.padding - offset * conv.stride;
    const Range range{ceil_div(first, conv.dilation), floor_div(first + pool_kernel - 1, conv.dilation) + 1};
    return {range.begin > 0 ? range.begin : 0, range.end < conv.kernel ? range.end : conv.kernel};
  }
  // Whether no tap falls on offset j: only a dilation wider than the pool window leaves such holes.
  constexpr bool is_hole(int64_t offset) const { return conv.dilation > pool_kernel && taps(offset).size() == 0; }
  constexpr bool has_holes() const {
    if (conv.dilation <= pool_kernel) return false;
    for (int64_t j = offsets().begin; j < offsets().end; ++j)
      if (is_hole(j)) return true;
    return false;
  }
};

}  // namespace fused
