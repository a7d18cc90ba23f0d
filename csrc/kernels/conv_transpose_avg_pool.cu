// conv_transpose_avg_pool on CUDA: one small convolution with summed taps, whose output is the only thing written.
//
//   out[n, co, o] = ((1/P * sum over ci and offsets j of x[n, ci, o*r + j] * V[ci, j, co] + bias) * scale1 + shift) * scale2
//   V[ci, j, co] = sum of the taps of weight[ci, co] that the pool window brings to offset j (geometry.h)
//
// Bytes: the input and the output once. At (128, 3, 16, 32, 32) -> 16 channels on H200: 144 MB, 33 us; 0.7 G multiply-adds,
// 21 us of plain FMA. Five kernels: staged_conv (staged_conv.cuh) for two offsets a dimension and few channels,
// wide_gemm (wide_gemm.cuh) for many channels of half types on compute capability 9.0, implicit_gemm
// (implicit_gemm.cuh) for many output channels, column_conv for few, direct_conv for whatever is left.
#include "collapsed_conv.cuh"
#include "conv_transpose_avg_pool.h"
#include "conv_transpose_avg_pool_plan.h"
#include "implicit_gemm.cuh"
#include "launch.cuh"
#include "staged_conv.cuh"
#include "vector.cuh"
#include "wide_gemm.cuh"

namespace fused {
namespace {

// What the kernels below add up in: in float32 their error would exceed that of the composition, whose pool averages
// rounding errors away.
template <class T>
using DirectSum = std::conditional_t<sizeof(T) == 2, float, double>;

// V over the pool's size for the kernels below, (C_in/groups, taps, C_out): an average of weights, which is finite where
// their sum need not be.
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
    const double sum = collapsed_tap(conv, group * in_group + ci, co, {j / j2 / j1, j / j2 % j1, j % j2});
    collapsed[i] = static_cast<DirectSum<T>>(sum / conv.pool_size);
  }
}

// Few output channels a group, as with one for each input channel: a thread takes kColumnRows outputs of a column, or of two
// side by side, whose inputs overlap; each is loaded and converted once. kTaps1 is the number of offsets along a column, and
// of two also across them; 0 is for any, and a single output. The lanes of a warp take neighbours in memory: of a row, or
// channels where they come last. One column or two, an output's products are added up in the same order.
struct Columns {
  int out[kMaxSpatialDims] = {}, size[kMaxSpatialDims] = {}, step[kMaxSpatialDims] = {};
  int begin[kMaxSpatialDims] = {}, taps[kMaxSpatialDims] = {};
  int row_stride = 0, column_stride = 0;  // of the input
  int in_group = 0;
  bool channels_last = false;
  bool pairs = false;                                  // outputs of two columns are vectors in memory
  Divisor sample;                                      // threads of one
  Divisor channels, per_group, columns, rows, planes;  // counts of the indices of a thread
};

// Two neighbours in memory at once.
template <class T>
__device__ void store_pair(T* to, T first, T second) {
  using Bits = std::conditional_t<sizeof(T) == 2, unsigned, std::conditional_t<sizeof(T) == 4, uint2, uint4>>;
  const T values[2] = {first, second};
  *reinterpret_cast<Bits*>(to) = reinterpret_cast<const Bits&>(values);
}

// Inputs that an output is the sum of, in each channel of its group.
template <class T>
struct Window {
  const T* input;              // of the first channel, at the first offsets: perhaps outside
  int first[kMaxSpatialDims];  // where that is
  const DirectSum<T>* taps;    // V of the first channel
};

// One sum, whatever the steps. Taps outside the input are skipped, not multiplied by zero, since a weight may be infinite.
template <class Sum, class T>
__device__ Sum window_sum(const Convolution<T>& conv, const Columns& at, Window<T> window) {
  Sum sum = 0;
  for (int ci = 0; ci < at.in_group; ++ci, window.input += conv.input_strides[1]) {
    Sum partial = 0;
    for (int a = 0; a < at.taps[0]; ++a)
      for (int b = 0; b < at.taps[1]; ++b) {
        const bool inside = static_cast<unsigned>(window.first[0] + a) < static_cast<unsigned>(at.size[0]) &&
                            static_cast<unsigned>(window.first[1] + b) < static_cast<unsigned>(at.size[1]);
        const T* x = window.input + a * conv.input_strides[2] + static_cast<int64_t>(b) * at.row_stride;
        for (int c = 0; c < at.taps[2]; ++c, x += at.column_stride, window.taps += conv.out_channels)
          if (inside && static_cast<unsigned>(window.first[2] + c) < static_cast<unsigned>(at.size[2]))
            partial = fma(static_cast<Sum>(to_accumulator(*x)), static_cast<Sum>(*window.taps), partial);
      }
    sum += partial;
  }
  return sum;
}

// The same number, which the compiler knows nothing about: it would keep all multiples of a stride in registers, more than
// there are.
__device__ inline int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// Adds a channel's products to the sums of kRows outputs in each of kColumns columns. Rows outside the input, which there
// are unless kInside, count as zeros: an infinite weight then makes NaN.
template <int kTaps1, bool kInside, class T, int kColumns, int kRows>
__device__ void add_channel(const Convolution<T>& conv, const Columns& at, Window<T> window,
                            DirectSum<T> (&sums)[kColumns][kRows]) {
  using Acc = DirectSum<T>;
  constexpr int kInputs = kTaps1 + kRows - 1;
  const int taps2 = kColumns > 1 ? kTaps1 : at.taps[2];
  for (int a = 0; a < at.taps[0];
       ++a, window.input += conv.input_strides[2], window.taps += kTaps1 * taps2 * conv.out_channels) {
    if (static_cast<unsigned>(window.first[0] + a) >= static_cast<unsigned>(at.size[0])) continue;
    const T* column = window.input;
    Acc weights[kColumns][kTaps1] = {};  // that a column of inputs has for each column of outputs
#pragma unroll(kColumns > 1 ? kTaps1 + kColumns - 1 : 1)
    for (int c = 0; c < taps2 + kColumns - 1; ++c, column += at.column_stride) {
      if constexpr (kColumns > 1)
#pragma unroll
        for (int b = 0; b < kTaps1; ++b) weights[1][b] = weights[0][b];
      if (kColumns == 1 || c < taps2) {
        const int64_t next = opaque(static_cast<int>(conv.out_channels));
#pragma unroll
        for (int b = 0; b < kTaps1; ++b) weights[0][b] = window.taps[(b * taps2 + c) * next];
      }
      if (static_cast<unsigned>(window.first[2] + c) >= static_cast<unsigned>(at.size[2])) continue;
      const int64_t row = opaque(at.row_stride);
      T cells[kInputs];  // all loaded before the first is used
#pragma unroll
      for (int u = 0; u < kInputs; ++u) {
        const bool inside = kInside || static_cast<unsigned>(window.first[1] + u) < static_cast<unsigned>(at.size[1]);
        cells[u] = inside ? column[u * row] : T{};
      }
      Acc x[kInputs];
#pragma unroll
      for (int u = 0; u < kInputs; ++u) x[u] = static_cast<Acc>(to_accumulator(cells[u]));
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
        if (kColumns == 1 || (c >= k && c - k < taps2))
#pragma unroll
          for (int u = 0; u < kInputs; ++u)
#pragma unroll
            for (int q = 0; q < kRows; ++q)
              if (u >= q && u < q + kTaps1) sums[k][q] = fma(x[u], weights[k][u - q], sums[k][q]);
    }
  }
}

template <int kTaps1, bool kInside, class T, int kColumns, int kRows>
__device__ void column_sums(const Convolution<T>& conv, const Columns& at, Window<T> window,
                            DirectSum<T> (&sums)[kColumns][kRows]) {
  const int taps = at.taps[0] * kTaps1 * at.taps[2] * static_cast<int>(conv.out_channels);
  constexpr bool kPerChannel = !std::is_same_v<T, float>;  // then added up: float64 has bits to spare for float32
  DirectSum<T> before[kColumns][kRows] = {};               // of the channels before this one
  for (int ci = 0; ci < at.in_group; ++ci, window.input += conv.input_strides[1], window.taps += taps) {
    if (kPerChannel && ci > 0)
#pragma unroll
      for (int i = 0; i < kColumns * kRows; ++i) {
        before[i / kRows][i % kRows] += sums[i / kRows][i % kRows];
        sums[i / kRows][i % kRows] = 0;
      }
    add_channel<kTaps1, kInside>(conv, at, window, sums);
  }
  if (kPerChannel && at.in_group > 1)
#pragma unroll
    for (int i = 0; i < kColumns * kRows; ++i) sums[i / kRows][i % kRows] += before[i / kRows][i % kRows];
}

// Of a multiprocessor: sums in float32 and float64 take 80 and up to 128 registers.
template <class T>
inline constexpr int kColumnBlocks = sizeof(T) == 2 ? 3 : 2;

template <class T, int kTaps1, int kColumns>
__global__ void __launch_bounds__(kDirectThreads, kColumnBlocks<T>)
    column_conv(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Columns at,
                const DirectSum<T>* __restrict__ collapsed, int threads) {
  using Acc = DirectSum<T>;
  constexpr int kRows = kTaps1 > 0 ? kColumnRows : 1;
  // Threads that are too many do the last one's work again, so that whole warps vote below.
  const int i = min(static_cast<int>(blockIdx.x) * kDirectThreads + static_cast<int>(threadIdx.x), threads - 1);
  unsigned rest, o0, o1, o2, co;
  const int64_t n = at.sample.divide(static_cast<unsigned>(i), rest);
  if (at.channels_last) {
    rest = at.channels.divide(rest, co);
    rest = at.columns.divide(rest, o2);
    o0 = at.rows.divide(rest, o1);
  } else {
    rest = at.columns.divide(rest, o2);
    rest = at.rows.divide(rest, o1);
    co = at.planes.divide(rest, o0);
  }
  o1 *= kRows;
  o2 *= kColumns;
  Window<T> window;
  window.first[0] = static_cast<int>(o0) * at.step[0] + at.begin[0];
  window.first[1] = static_cast<int>(o1) * at.step[1] + at.begin[1];
  window.first[2] = static_cast<int>(o2) * at.step[2] + at.begin[2];
  window.input = conv.input + n * conv.input_strides[0] +
                 static_cast<int64_t>(at.per_group.divide(co) * at.in_group) * conv.input_strides[1] +
                 window.first[0] * conv.input_strides[2] + static_cast<int64_t>(window.first[1]) * at.row_stride +
                 static_cast<int64_t>(window.first[2]) * at.column_stride;
  window.taps = collapsed + co;
  wait_for_previous_launch();
  Acc sums[kColumns][kRows] = {};
  if constexpr (kTaps1 == 0) {
    sums[0][0] = window_sum<Acc>(conv, at, window);
  } else {
    const bool inside = window.first[1] >= 0 && window.first[1] + kTaps1 + kRows - 1 <= at.size[1];
    if (__all_sync(0xffffffff, inside))
      column_sums<kTaps1, true>(conv, at, window, sums);
    else
      column_sums<kTaps1, false>(conv, at, window, sums);
  }
  const Affine<Acc> affine(conv, co, 1.0);
  bool finite = true;
#pragma unroll
  for (int i = 0; i < kColumns * kRows; ++i) {
    Acc& sum = sums[i / kRows][i % kRows];
    sum = affine(sum);
    finite &= static_cast<bool>(isfinite(sum));
  }
  const int rows = at.out[1] - static_cast<int>(o1), columns = at.out[2] - static_cast<int>(o2);
  const int64_t to_row = opaque(static_cast<int>(conv.output_strides[3])), to_column = conv.output_strides[4];
  T* const to =
      conv.output + n * conv.output_strides[0] +
      (co * static_cast<unsigned>(conv.output_strides[1]) + o0 * static_cast<unsigned>(conv.output_strides[2]) +
       o1 * static_cast<unsigned>(conv.output_strides[3]) + o2 * static_cast<unsigned>(to_column));
  if (kColumns == 2 && at.pairs) {
#pragma unroll
    for (int q = 0; q < kRows; ++q)
      if (q < rows) store_pair(to + q * to_row, from_sum<T>(sums[0][q]), from_sum<T>(sums[kColumns - 1][q]));
  } else {
#pragma unroll
    for (int q = 0; q < kRows; ++q)
#pragma unroll
      for (int k = 0; k < kColumns; ++k)
        if (q < rows && k < columns) to[q * to_row + k * to_column] = from_sum<T>(sums[k][q]);
  }
  if (finite) return;
  // Again in float64, skipping what is outside: sums that left the range of float32, or met an infinity.
  unsigned again = 0;
#pragma unroll
  for (int q = 0; q < kRows; ++q)
#pragma unroll
    for (int k = 0; k < kColumns; ++k)
      if (q < rows && k < columns && !isfinite(sums[k][q])) again |= 1u << (q * kColumns + k);
  for (; again != 0; again &= again - 1) {
    const int bit = __ffs(static_cast<int>(again)) - 1, q = bit / kColumns, k = bit % kColumns;
    Window<T> one = window;
    one.input += static_cast<int64_t>(q) * at.row_stride + k * at.column_stride;
    one.first[1] += q;
    one.first[2] += k;
    to[q * to_row + k * to_column] = from_double<T>(Affine<double>(conv, co, 1.0)(window_sum<double>(conv, at, one)));
  }
}

// Every shape: a thread takes one output position and kDirectChannels channels. Taps that lie outside the input are
// skipped, not multiplied by zero, since a weight may be infinite. Half types continue the sum over many channels in float64.
// (The loops are direct_value's: shared through a function that takes their body, they took more registers in every kernel.)
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
      const Affine<double> affine(conv, channel, 1.0);
      conv.output[n * conv.output_strides[0] + channel * conv.output_strides[1] + o0 * conv.output_strides[2] +
                  o1 * conv.output_strides[3] + o2 * conv.output_strides[4]] = from_double<T>(affine(sums[q]));
    }
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

Staged staged_geometry(const AvgPoolProblem& problem, const StagedLayout& layout, int64_t steps, double pool_size) {
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
  staged.tiles1 = static_cast<int>(ceil_div(staged.out[1], layout.rows));
  staged.tiles2 = static_cast<int>(ceil_div(staged.out[2], kStagedColumns));
  staged.steps = static_cast<int>(steps);
  staged.columns = Divisor(std::min(staged.out[2], kStagedColumns) + 1);
  staged.over_pool = 1.0 / pool_size;
  staged.layout = layout;
  return staged;
}

template <class T>
Gemm gemm_geometry(const AvgPoolProblem& problem, const GemmTiling& tiling, const Convolution<T>& conv) {
  Gemm gemm;
  gemm.tiling = tiling;
  gemm.in_group = static_cast<int>(problem.in_group());
  gemm.per_group = static_cast<int>(problem.per_group());
  gemm.taps = static_cast<int>(problem.offsets());
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
  if (tiling.transposed) {
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

// The kernels count with 32 bits what `of_sample` is of one sample, so a huge batch goes in slices: `launch` takes one and
// what it has of that.
template <class T, class Launch>
void for_slices(const AvgPoolProblem& problem, const Convolution<T>& conv, int64_t of_sample, const Launch& launch) {
  const int64_t samples = kMax32BitSize / of_sample;
  for (int64_t first = 0; first < problem.batch; first += samples) {
    Convolution<T> slice = conv;
    slice.input += first * conv.input_strides[0];
    slice.output += first * conv.output_strides[0];
    launch(slice, std::min(samples, problem.batch - first) * of_sample);
  }
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
  for_slices(problem, conv, plan.gemm.boxes, [&](const Convolution<T>& slice, int64_t boxes) {
    gemm.boxes = static_cast<int>(boxes);
    cuda.launch(plan.launch[1], kernel, slice, gemm, reinterpret_cast<const uint4*>(weights), flags,
                static_cast<int>(plan.launch[0].grid));
  });
}

template <class T>
Wide wide_geometry(const AvgPoolProblem& problem, const WideTiling& tiling, const Convolution<T>& conv) {
  Wide wide;
  wide.tiling = tiling;
  wide.in_group = static_cast<int>(problem.in_group());
  wide.per_group = static_cast<int>(problem.per_group());
  wide.tiles_of_group = static_cast<int>(tiling.channel_tiles / problem.groups);
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    const PoolDim& dim = problem.dims[d];
    wide.taps[d] = static_cast<int>(dim.offsets().size());
    wide.begin[d] = static_cast<int>(dim.offsets().begin);
    wide.size[d] = static_cast<int>(dim.conv.input);
    wide.out[d] = static_cast<int>(dim.output());
  }
  wide.channel_tiles = Divisor(tiling.channel_tiles);
  wide.lines = Divisor(tiling.lines);
  wide.planes = Divisor(wide.out[0]);
  wide.pitch = Divisor(tiling.pitch);
  wide.next_segment = Divisor(tiling.next_segment);
  wide.taps1 = Divisor(wide.taps[1]);
  const auto whole = [](const T* first, const int64_t (&strides)[2 + kMaxSpatialDims], int64_t count, int last) {
    bool all = reinterpret_cast<uintptr_t>(first) % (count * sizeof(T)) == 0 && strides[last] == 1;
    for (int d = 0; d < 2 + kMaxSpatialDims; ++d) all &= d == last || strides[d] % count == 0;
    return all;
  };
  if (tiling.run == 4 && whole(conv.input, conv.input_strides, 4, 4) && wide.in_group % 8 == 0)
    wide.run = 4;
  else if (whole(conv.input, conv.input_strides, 2, 4) && wide.size[2] % 2 == 0)
    wide.run = 2;
  if (wide.run > 0) wide.runs_of_line = Divisor(tiling.line / wide.run);
  wide.points = whole(conv.input, conv.input_strides, 8, 1) && wide.in_group % 8 == 0;
  wide.output_pairs = whole(conv.output, conv.output_strides, 2, 4) && wide.out[2] % 2 == 0;
  wide.output_runs = whole(conv.output, conv.output_strides, 4, 4) && wide.out[2] % 4 == 0 && tiling.pitch % 4 == 0;
  wide.output_points = whole(conv.output, conv.output_strides, 4, 1) && wide.per_group % 8 == 0;
  return wide;
}

// Whether the warpgroups may share out registers: fewer than these, and they would wait for ever.
template <class T>
void check_wide_registers(const char* op) {
  static const int registers = [op] {
    cudaFuncAttributes attributes = {};
    check_cuda(op, cudaFuncGetAttributes(&attributes, wide_gemm<T>), "cudaFuncGetAttributes");
    return attributes.numRegs;
  }();
  constexpr int kNeeded = (kWideLoadRegisters + kWideConsumers * kWideMultiplyRegisters) / (1 + kWideConsumers);
  if (registers < kNeeded)
    fail(op, "expected wide_gemm to be compiled with ", kNeeded, " registers a thread, got ", registers);
}

template <class T>
void launch_wide(const CudaContext& cuda, const AvgPoolPlan& plan, const AvgPoolProblem& problem,
                 const Convolution<T>& conv, const Tensor& like) {
  const Tensor workspace = empty_bytes(plan.workspace, like);
  auto* weights = static_cast<T*>(workspace.mutable_data_ptr());
  auto* factors = reinterpret_cast<float2*>(static_cast<char*>(workspace.mutable_data_ptr()) + plan.collapsed);
  auto* flags = reinterpret_cast<int*>(factors + problem.out_channels);
  check_wide_registers<T>("conv_transpose_avg_pool");
  Wide wide = wide_geometry(problem, plan.wide, conv);
  cuda.launch(plan.launch[0], wide_taps<T>, conv, wide, weights, factors, flags, wide_weights(problem, plan.wide));
  const int64_t of_sample = problem.dims[0].output() * plan.wide.lines * plan.wide.channel_tiles;
  for_slices(problem, conv, of_sample, [&](const Convolution<T>& slice, int64_t jobs) {
    wide.jobs = static_cast<int>(jobs);
    wide.jobs_of_tile = Divisor(jobs / plan.wide.channel_tiles);
    cuda.launch(plan.launch[1], wide_gemm<T>, slice, wide, weights, factors, flags,
                static_cast<int>(plan.launch[0].grid));
  });
}

template <class T>
Columns column_geometry(const AvgPoolProblem& problem, const AvgPoolPlan& plan, const Convolution<T>& conv) {
  Columns at;
  for (int d = 0; d < kMaxSpatialDims; ++d) {
    const PoolDim& dim = problem.dims[d];
    at.out[d] = static_cast<int>(dim.output());
    at.size[d] = static_cast<int>(dim.conv.input);
    at.step[d] = static_cast<int>(dim.step());
    at.begin[d] = static_cast<int>(dim.offsets().begin);
    at.taps[d] = static_cast<int>(dim.offsets().size());
  }
  // The stride of a dimension of size 1 may be any number.
  if (at.size[1] > 1) at.row_stride = static_cast<int>(conv.input_strides[3]);
  if (at.size[2] > 1) at.column_stride = static_cast<int>(conv.input_strides[4]);
  at.in_group = static_cast<int>(problem.in_group());
  at.channels_last = problem.channels_last;
  at.pairs = conv.output_strides[4] == 1 && at.out[2] % 2 == 0;  // then every row begins with a pair
  at.channels = Divisor(problem.out_channels);
  at.per_group = Divisor(problem.per_group());
  at.columns = Divisor(ceil_div(at.out[2], plan.columns));
  at.rows = Divisor(ceil_div(at.out[1], plan.column_taps > 0 ? kColumnRows : 1));
  at.planes = Divisor(at.out[0]);
  at.sample = Divisor(plan.threads);
  return at;
}

template <class T>
void launch_conv(const CudaContext& cuda, const AvgPoolPlan& plan, const AvgPoolProblem& problem,
                 const Convolution<T>& conv, const Tensor& like) {
  if constexpr (!std::is_same_v<T, double>) {
    if (plan.kernel == PoolKernel::kStaged) {
      const auto kernels = {staged_conv<T, 1, false>, staged_conv<T, 2, false>, staged_conv<T, 1, true>,
                            staged_conv<T, 2, true>};
      const auto kernel = kernels.begin()[(problem.channels_last ? 2 : 0) + conv.dims[0].offsets().size() - 1];
      for_slices(problem, conv, plan.staged_steps, [&](const Convolution<T>& slice, int64_t steps) {
        Launch launch = plan.launch[0];
        launch.grid = std::min(launch.grid, steps);
        cuda.launch(launch, kernel, slice, staged_geometry(problem, plan.staged, steps, slice.pool_size));
      });
      return;
    }
  }
  if constexpr (sizeof(T) == 2)
    if (plan.kernel == PoolKernel::kWide) return launch_wide(cuda, plan, problem, conv, like);
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
    const auto one = {column_conv<T, 0, 1>, column_conv<T, 1, 1>, column_conv<T, 2, 1>, column_conv<T, 3, 1>,
                      column_conv<T, 4, 1>};
    const auto two = {column_conv<T, 1, 2>, column_conv<T, 2, 2>, column_conv<T, 3, 2>, column_conv<T, 4, 2>};
    const auto kernel = plan.columns == 2 ? two.begin()[plan.column_taps - 1] : one.begin()[plan.column_taps];
    const Columns at = column_geometry(problem, plan, conv);
    for_slices(problem, conv, plan.threads, [&](const Convolution<T>& slice, int64_t threads) {
      Launch launch = last;
      launch.grid = ceil_div(threads, kDirectThreads);
      cuda.launch(launch, kernel, slice, at, collapsed, static_cast<int>(threads));
    });
    return;
  }
  cuda.launch(last, direct_conv<T>, conv, collapsed, plan.threads);
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
  const AvgPoolProblem problem = avg_pool_problem(checked, static_cast<int>(input.element_size()),
                                                  input.scalar_type() == ScalarType::BFloat16, channels_last);
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
