// conv_transpose_avg_pool on CUDA: one small convolution with summed taps, whose output is the only thing written.
//
//   out[n, co, o] = ((1/P * sum over ci and offsets j of x[n, ci, o*r + j] * V[ci, j, co] + bias) * scale1 + shift) * scale2
//   V[ci, j, co] = sum of the taps of weight[ci, co] that the pool window brings to offset j (geometry.h)
//
// Bytes: the input and the output once. At (128, 3, 16, 32, 32) -> 16 channels on H200: 144 MB, 33 us; 0.7 G multiply-adds,
// 21 us of plain FMA. Four kernels: staged_conv (staged_conv.cuh) for two offsets a dimension and few channels,
// implicit_gemm (implicit_gemm.cuh) for many output channels, column_conv for few, direct_conv for whatever is left.
#include "collapsed_conv.cuh"
#include "conv_transpose_avg_pool.h"
#include "conv_transpose_avg_pool_plan.h"
#include "implicit_gemm.cuh"
#include "launch.cuh"
#include "staged_conv.cuh"
#include "vector.cuh"

namespace fused {
namespace {

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
      const Affine<double> affine(conv, channel);
      conv.output[n * conv.output_strides[0] + channel * conv.output_strides[1] + o0 * conv.output_strides[2] +
                  o1 * conv.output_strides[3] + o2 * conv.output_strides[4]] = from_double<T>(affine(sums[q]));
    }
  }
}

// ---- Host --------------------------------------------------------------------------------------------------------

Staged staged_geometry(const AvgPoolProblem& problem, const StagedLayout& layout, int64_t steps) {
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
  const int64_t samples = kMax32BitSize / plan.gemm.boxes;
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
  at.in_group = static_cast<int>(problem.in_group());
  at.channels_last = problem.channels_last;
  at.channels = Divisor(problem.out_channels);
  at.per_group = Divisor(problem.per_group());
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
      const int64_t samples = kMax32BitSize / plan.staged_steps;
      for (int64_t first = 0; first < problem.batch; first += samples) {
        Convolution<T> slice = conv;
        slice.input += first * conv.input_strides[0];
        slice.output += first * conv.output_strides[0];
        const int64_t steps = std::min(samples, problem.batch - first) * plan.staged_steps;
        Launch launch = plan.launch[0];
        launch.grid = std::min(launch.grid, steps);
        cuda.launch(launch, kernel, slice, staged_geometry(problem, plan.staged, steps));
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
                plan.threads);
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
