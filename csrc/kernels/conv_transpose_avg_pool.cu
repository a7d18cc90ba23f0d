// conv_transpose_avg_pool on CUDA: one small convolution with summed taps, whose output is the only thing written.
//
//   out[n, co, o] = ((1/P * sum over ci and offsets j of x[n, ci, o*r + j] * V[ci, j, co] + bias) * scale1 + shift) * scale2
//   V[ci, j, co] = sum of the taps of weight[ci, co] that the pool window brings to offset j (geometry.h)
//
// Bytes: the input and the output once. At (128, 3, 16, 32, 32) -> 16 channels on H200: 144 MB, 33 us; 0.7 G multiply-adds,
// 21 us of plain FMA.
#include <cuda_pipeline.h>

#include "conv_transpose_avg_pool.h"
#include "conv_transpose_avg_pool_plan.h"
#include "launch.cuh"
#include "vector.cuh"

namespace fused {
namespace {

// What both kernels need to know. Spatial sizes have three dimensions, leading ones of size 1 where there are fewer.
template <class T>
struct Convolution {
  const T* input;   // (N, C_in, D0, D1, D2), contiguous or channels_last
  const T* weight;  // (C_in, C_out/groups, K0, K1, K2)
  T* output;        // (N, C_out, O0, O1, O2), likewise
  int64_t batch, in_channels, out_channels, groups;
  PoolDim dims[kMaxSpatialDims];
  int64_t input_strides[2 + kMaxSpatialDims], output_strides[2 + kMaxSpatialDims];
  double pool_size;
  ChannelParam bias, scale1, shift, scale2;
};

// The affine part of one output channel.
template <class Acc>
struct Affine {
  Acc over_pool, bias, scale1, shift, scale2;
  template <class T>
  __device__ Affine(const Convolution<T>& conv, int64_t channel)
      : over_pool(static_cast<Acc>(1.0 / conv.pool_size)),
        bias(load<T>(conv.bias, channel)),
        scale1(load<T>(conv.scale1, channel)),
        shift(load<T>(conv.shift, channel)),
        scale2(load<T>(conv.scale2, channel)) {}
  __device__ Acc operator()(Acc sum) const { return ((sum * over_pool + bias) * scale1 + shift) * scale2; }

 private:
  template <class T>
  __device__ static Acc load(const ChannelParam& param, int64_t c) {
    return param.data ? static_cast<Acc>(to_accumulator(static_cast<const T*>(param.data)[c * param.stride]))
                      : static_cast<Acc>(param.value);
  }
};

// V[ci, j, co], with j given by its index from the first offset of each dimension.
template <class T>
__device__ double collapsed_tap(const Convolution<T>& conv, int64_t ci, int64_t co, const int64_t (&j)[3]) {
  Range taps[3];
  for (int d = 0; d < 3; ++d) taps[d] = conv.dims[d].taps(conv.dims[d].offsets().begin + j[d]);
  const int64_t k1 = conv.dims[1].conv.kernel, k2 = conv.dims[2].conv.kernel;
  const T* source = conv.weight + (ci * (conv.out_channels / conv.groups) + co) * conv.dims[0].conv.kernel * k1 * k2;
  double sum = 0;
  for (int64_t a = taps[0].begin; a < taps[0].end; ++a)
    for (int64_t b = taps[1].begin; b < taps[1].end; ++b)
      for (int64_t c = taps[2].begin; c < taps[2].end; ++c)
        sum += static_cast<double>(to_accumulator(source[(a * k1 + b) * k2 + c]));
  return sum;
}

// The geometry of the kernel below in plain 32-bit numbers: 64-bit divisions took half of its time.
struct Staged {
  int tap_begin[kMaxSpatialDims][2] = {}, tap_end[kMaxSpatialDims][2] = {};  // the taps that V sums, per offset
  int offset[kMaxSpatialDims] = {};                                          // the first one
  int kernel[kMaxSpatialDims] = {}, size[kMaxSpatialDims] = {}, out[kMaxSpatialDims] = {};
  int in_channels = 0, out_channels = 0, tiles1 = 0, tiles2 = 0, units = 0;
};

// Few channels, on devices whose tensor cores multiply float64 at the rate of plain float32: a block takes tiles of 16 x 32
// outputs of one plane, one after another. The inputs that a tile meets lie in shared memory, and those of the next tile
// are on their way while this one is computed. Per input channel, 16 output channels x 8 taps meet 8 taps x 8 positions
// in one instruction.
//
// Why float64: chains of 24 float32 products, even split in three, had 1.2 times the error of the composition, whose pool
// averages rounding errors away. It is no slower either: the same kernel with float32 multiply-adds took 82 us, held up by
// the instructions it issued, of which a tensor core needs a fourth.
template <class T>
struct StagedTile {
  static constexpr int kPitch = kStagedPitch / sizeof(T);
  static constexpr int kHeight = kStagedRows + 1;

  int n, z, x0, y0;

  __device__ StagedTile(const Staged& staged, int unit) {
    x0 = unit % staged.tiles2 * kStagedColumns;
    unit /= staged.tiles2;
    y0 = unit % staged.tiles1 * kStagedRows;
    unit /= staged.tiles1;
    z = unit % staged.out[0];
    n = unit / staged.out[0];
  }

  // Starts the copy of the tile's inputs, (C_in, kJ0, kHeight, kPitch). What lies outside the input belongs to outputs
  // outside the output; it is zero.
  template <int kJ0>
  __device__ void copy(const Convolution<T>& conv, const Staged& staged, T* inputs) const {
    constexpr int kSize = Vector<T>::kSize, kVectors = kStagedColumns / kSize + 1;
    const int from1 = y0 + staged.offset[1], from2 = x0 + staged.offset[2], size2 = staged.size[2];
    const int height = min(kHeight, staged.size[1] - from1), width = min(kPitch, size2 - from2);
    const int plane = staged.size[1] * size2;
    const int64_t volume = static_cast<int64_t>(staged.size[0]) * plane;
    const T* corner = conv.input + static_cast<int64_t>(n) * staged.in_channels * volume +
                      static_cast<int64_t>(z + staged.offset[0]) * plane + from1 * size2 + from2;
    const int rows = staged.in_channels * kJ0 * kHeight;
    // Whole vectors, and none beyond the row's end.
    if (is_vector_aligned(corner) && size2 % kSize == 0 && from2 % kSize == 0) {
      // A warp takes several rows at once, each lane always the same columns.
      constexpr int kRowsAtOnce = 32 / kVectors;
      const int lane = threadIdx.x % 32, column = lane % kVectors * kSize;
      const int first = threadIdx.x / 32 * kRowsAtOnce + lane / kVectors;
      if (lane >= kRowsAtOnce * kVectors) return;
#pragma unroll 4
      for (int r = first; r < rows; r += kStagedThreads / 32 * kRowsAtOnce) {
        const int slice = r / kHeight, y = r - slice * kHeight;
        const bool inside = y < height && column < width;
        const T* source = corner + slice / kJ0 * volume + (slice % kJ0 * plane + y * size2 + column);
        __pipeline_memcpy_async(inputs + r * kPitch + column, inside ? source : conv.input, 16, inside ? 0 : 16);
      }
    } else {
#pragma unroll 4
      for (int i = threadIdx.x; i < rows * kPitch; i += kStagedThreads) {
        const int x = i % kPitch, r = i / kPitch, y = r % kHeight, slice = r / kHeight;
        inputs[i] = y < height && x < width ? corner[slice / kJ0 * volume + slice % kJ0 * plane + y * size2 + x]
                                            : from_accumulator<T>(0);
      }
    }
  }
};

// d += a * b, 16 x 8 = 16 x 8 times 8 x 8. With g = lane / 4 and t = lane % 4, a lane holds a[g][t], a[g + 8][t],
// a[g][t + 4], a[g + 8][t + 4]; b[t][g], b[t + 4][g]; d[g][2t], d[g][2t + 1], d[g + 8][2t], d[g + 8][2t + 1].
__device__ inline void multiply_add(double (&d)[4], const double (&a)[4], const double (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+d"(d[0]), "+d"(d[1]), "+d"(d[2]), "+d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b[0]), "d"(b[1]));
#endif
}

template <class T, int kJ0>
__global__ void __launch_bounds__(kStagedThreads, kStagedBlocks)
    staged_conv(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Staged staged) {
  using Tile = StagedTile<T>;
  constexpr int kPitch = Tile::kPitch, kHeight = Tile::kHeight, kWarps = kStagedThreads / 32;
  const int in_channels = staged.in_channels, out_channels = staged.out_channels;
  const int channels = (out_channels + kStagedChannels - 1) / kStagedChannels * kStagedChannels;
  const int tile_size = in_channels * kJ0 * kHeight * kPitch;
  extern __shared__ __align__(16) double shared[];
  double* weights = shared;                                                          // (C_in, channels, 8 taps)
  float4* affine = reinterpret_cast<float4*>(weights + in_channels * channels * 8);  // (channels): bias, scale1, ..
  float* results = reinterpret_cast<float*>(affine + channels);                      // (warps, kStagedChannels, 40)
  T* current = reinterpret_cast<T*>(results + kWarps * kStagedChannels * kStagedResultPitch);  // (C_in, kJ0, ..)
  T* next = current + tile_size;

  Tile(staged, blockIdx.x).template copy<kJ0>(conv, staged, current);
  __pipeline_commit();
  // V, summed from a copy of the weight in the second tile's place where it fits there.
  const int kernel1 = staged.kernel[1], kernel2 = staged.kernel[2], kernel = staged.kernel[0] * kernel1 * kernel2;
  const int weight_count = in_channels * out_channels * kernel;
  const T* weight = conv.weight;
  if (weight_count <= tile_size) {
#pragma unroll 8
    for (int i = threadIdx.x; i < weight_count; i += kStagedThreads) next[i] = conv.weight[i];
    weight = next;
    __syncthreads();
  }
  for (int i = threadIdx.x; i < in_channels * channels * 8; i += kStagedThreads) {
    const int j0 = i / 4 % 2, j1 = i / 2 % 2, j2 = i % 2, co = i / 8 % channels, ci = i / 8 / channels;
    double sum = 0;
    if (co < out_channels && j0 < kJ0) {
      const T* source = weight + (ci * out_channels + co) * kernel;
      for (int a = staged.tap_begin[0][j0]; a < staged.tap_end[0][j0]; ++a)
        for (int b = staged.tap_begin[1][j1]; b < staged.tap_end[1][j1]; ++b)
          for (int c = staged.tap_begin[2][j2]; c < staged.tap_end[2][j2]; ++c)
            sum += static_cast<double>(to_accumulator(source[(a * kernel1 + b) * kernel2 + c]));
    }
    weights[i] = sum;
  }
  for (int c = threadIdx.x; c < channels; c += kStagedThreads) {
    const Affine<float> values(conv, min(c, out_channels - 1));
    affine[c] = {values.bias, values.scale1, values.shift, values.scale2};
  }
  __syncthreads();

  const float over_pool = static_cast<float>(1.0 / conv.pool_size);
  const int out1 = staged.out[1], out2 = staged.out[2], out_plane = out1 * out2;
  const int64_t out_volume = static_cast<int64_t>(staged.out[0]) * out_plane;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  float* mine = results + warp * kStagedChannels * kStagedResultPitch;
  const int b_at = t / 2 * kPitch + t % 2 + g;  // tap (t / 2, t % 2) of position g
  for (int unit = blockIdx.x; unit < staged.units; unit += gridDim.x) {
    const Tile tile(staged, unit);
    if (unit + static_cast<int>(gridDim.x) < staged.units)
      Tile(staged, unit + gridDim.x).template copy<kJ0>(conv, staged, next);
    __pipeline_commit();
    __pipeline_wait_prior(1);
    __syncthreads();
    const int columns = min(kStagedColumns, out2 - tile.x0);
    for (int row = warp; row < min(kStagedRows, out1 - tile.y0); row += kWarps) {
      for (int first = 0; first < out_channels; first += kStagedChannels) {
        double sums[kStagedColumns / 8][4] = {};
        for (int ci = 0; ci < in_channels; ++ci) {
          const double* v = weights + (ci * channels + first + g) * 8 + t;
          const double a[4] = {v[0], v[8 * 8], v[4], v[8 * 8 + 4]};
          const T* x = current + (ci * kJ0 * kHeight + row) * kPitch + b_at;
#pragma unroll
          for (int n = 0; n < kStagedColumns / 8; ++n) {
            const double b[2] = {static_cast<double>(to_accumulator(x[n * 8])),
                                 kJ0 == 1 ? 0.0 : static_cast<double>(to_accumulator(x[kHeight * kPitch + n * 8]))};
            multiply_add(sums[n], a, b);
          }
        }
        // Results pass through shared memory, so that a store is a run of a row.
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float4 on = affine[first + g + 8 * half];
          const auto value = [&](double sum) {
            return ((static_cast<float>(sum) * over_pool + on.x) * on.y + on.z) * on.w;
          };
#pragma unroll
          for (int n = 0; n < kStagedColumns / 8; ++n)
            *reinterpret_cast<float2*>(mine + (g + 8 * half) * kStagedResultPitch + n * 8 + 2 * t) = {
                value(sums[n][2 * half]), value(sums[n][2 * half + 1])};
        }
        __syncwarp();
        if (lane < columns) {
          T* target = conv.output + (static_cast<int64_t>(tile.n) * out_channels + first) * out_volume +
                      static_cast<int64_t>(tile.z) * out_plane + (tile.y0 + row) * out2 + tile.x0 + lane;
          const int count = min(kStagedChannels, out_channels - first);
#pragma unroll
          for (int c = 0; c < kStagedChannels; ++c, target += out_volume)
            if (c < count) *target = from_accumulator<T>(mine[c * kStagedResultPitch + lane]);
        }
      }
    }
    __syncthreads();
    T* swap = current;
    current = next;
    next = swap;
  }
}

// What the kernel below adds up in: in float32 its error would exceed that of the composition, whose pool averages
// rounding errors away.
template <class T>
using DirectSum = std::conditional_t<sizeof(T) == 2, float, double>;

// V for the kernel below, (groups, C_in/groups, taps, C_out/groups).
template <class T>
__global__ void __launch_bounds__(kDirectThreads)
    collapse_taps(const __grid_constant__ Convolution<T> conv, DirectSum<T>* collapsed, int64_t count) {
  const int64_t per_group = conv.out_channels / conv.groups;
  const int64_t j1 = conv.dims[1].offsets().size(), j2 = conv.dims[2].offsets().size();
  const int64_t taps = conv.dims[0].offsets().size() * j1 * j2;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * kDirectThreads + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * kDirectThreads) {
    const int64_t co = i % per_group, j = i / per_group % taps, ci = i / per_group / taps;
    collapsed[i] = static_cast<DirectSum<T>>(collapsed_tap(conv, ci, co, {j / j2 / j1, j / j2 % j1, j % j2}));
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
      const Acc* v = collapsed + ci * j0.size() * j1.size() * j2.size() * per_group + first;
      Acc partial[kDirectChannels] = {};
      for (int64_t a = j0.begin; a < j0.end; ++a) {
        const int64_t i0 = o0 * dim0.step() + a;
        const bool use0 = i0 >= 0 && i0 < size0 && !dim0.is_hole(a);
        for (int64_t b = j1.begin; b < j1.end; ++b) {
          const int64_t i1 = o1 * dim1.step() + b;
          const bool use1 = use0 && i1 >= 0 && i1 < size1 && !dim1.is_hole(b);
          for (int64_t c = j2.begin; c < j2.end; ++c, v += per_group) {
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

Staged staged_geometry(const AvgPoolProblem& problem, int64_t units) {
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
  staged.tiles1 = static_cast<int>(ceil_div(staged.out[1], kStagedRows));
  staged.tiles2 = static_cast<int>(ceil_div(staged.out[2], kStagedColumns));
  staged.units = static_cast<int>(units);
  return staged;
}

template <class T>
void launch_conv(const CudaContext& cuda, const AvgPoolPlan& plan, const AvgPoolProblem& problem,
                 const Convolution<T>& conv, const Tensor& like) {
  if constexpr (!std::is_same_v<T, double>) {
    if (plan.kernel == PoolKernel::kStaged) {
      const auto kernel = conv.dims[0].offsets().size() == 1 ? staged_conv<T, 1> : staged_conv<T, 2>;
      // The kernel counts tiles with 32 bits, so a huge batch goes in slices.
      const int64_t samples = kMostStagedUnits / staged_units(problem);
      for (int64_t first = 0; first < problem.batch; first += samples) {
        Convolution<T> slice = conv;
        slice.input += first * conv.input_strides[0];
        slice.output += first * conv.output_strides[0];
        const int64_t units = std::min(samples, problem.batch - first) * staged_units(problem);
        Launch launch = plan.launch[0];
        launch.grid = std::min(launch.grid, units);
        cuda.launch(launch, kernel, slice, staged_geometry(problem, units));
      }
      return;
    }
  }
  const Tensor workspace = empty_bytes(plan.workspace, like);
  auto* collapsed = static_cast<DirectSum<T>*>(workspace.mutable_data_ptr());
  if (plan.launches == 2)
    cuda.launch(plan.launch[0], collapse_taps<T>, conv, collapsed,
                plan.workspace / static_cast<int64_t>(sizeof(DirectSum<T>)));
  cuda.launch(plan.launch[plan.launches - 1], direct_conv<T>, conv, collapsed,
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
