// What the kernels of the collapsed convolution share: its description, V, divisions, the affine part, and tensor-core
// products.
#pragma once

#include <type_traits>

#include "geometry.h"
#include "tensors.h"
#include "vector.cuh"

namespace fused {

// n / d for n below 2^31, as a product.
struct Divisor {
  unsigned divisor = 1, multiplier = 0, shift = 0;
  Divisor() = default;
  explicit Divisor(int64_t d) : divisor(static_cast<unsigned>(d)) {
    while ((int64_t{1} << shift) < d) ++shift;
    if (d > 1) multiplier = static_cast<unsigned>((((uint64_t{1} << (31 + shift)) + divisor - 1) / divisor));
    shift = shift > 0 ? shift - 1 : 0;
  }
  __device__ unsigned divide(unsigned n) const { return divisor == 1 ? n : __umulhi(n, multiplier) >> shift; }
  __device__ unsigned divide(unsigned n, unsigned& remainder) const {
    const unsigned quotient = divide(n);
    remainder = n - quotient * divisor;
    return quotient;
  }
};

// Rounds once, from whichever of float and double was added up in.
template <class T>
__device__ T from_sum(float x) {
  return from_accumulator<T>(x);
}
template <class T>
__device__ T from_sum(double x) {
  return from_double<T>(x);
}

// What every kernel needs to know. Spatial sizes have three dimensions, leading ones of size 1 where there are fewer.
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
  __device__ Affine(const Convolution<T>& conv, int64_t channel) : Affine(conv, channel, 1.0 / conv.pool_size) {}
  // With what a sum is multiplied by: 1, where V brings the average of the pool with it.
  template <class T>
  __device__ Affine(const Convolution<T>& conv, int64_t channel, double over_pool)
      : over_pool(static_cast<Acc>(over_pool)),
        bias(load<T>(conv.bias, channel)),
        scale1(load<T>(conv.scale1, channel)),
        shift(load<T>(conv.shift, channel)),
        scale2(load<T>(conv.scale2, channel)) {}
  __device__ Acc operator()(Acc sum) const { return ((sum * over_pool + bias) * scale1 + shift) * scale2; }
  __device__ Acc factor() const { return over_pool * scale1 * scale2; }

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

// V as numbers of a half type that add up to it, `step` apart; false where they would not hold it in float32's precision.
template <int kTerms, class T>
__device__ bool split_weight(double v, T* to, int step) {
  // float16 holds every sum of weights as two numbers, since none has more than its own smallest digit.
  constexpr double kMax = kTerms == 2 ? 65000 : 1e37, kMin = kTerms == 2 ? 0 : 1e-28;
  const bool trusted = v == 0 || (fabs(v) < kMax && fabs(v) > kMin);
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    const T part = from_double<T>(v);
    to[term * step] = part;
    v -= static_cast<double>(to_accumulator(part));
  }
  return trusted;
}

// One output as it is defined: taps outside the input and offsets without a tap are skipped, factors follow one another.
// For what the tensor cores may not be trusted with: infinite weights or factors, and what came from splitting numbers.
template <class T>
__device__ __forceinline__ T direct_value_inline(const Convolution<T>& conv, int64_t n, int64_t co, int64_t o0,
                                                 int64_t o1, int64_t o2) {
  const int64_t per_group = conv.out_channels / conv.groups, in_group = conv.in_channels / conv.groups;
  const int64_t group = co / per_group;
  const Range j0 = conv.dims[0].offsets(), j1 = conv.dims[1].offsets(), j2 = conv.dims[2].offsets();
  double sum = 0;
  for (int64_t ci = group * in_group; ci < (group + 1) * in_group; ++ci)
    for (int64_t a = j0.begin; a < j0.end; ++a)
      for (int64_t b = j1.begin; b < j1.end; ++b)
        for (int64_t c = j2.begin; c < j2.end; ++c) {
          const int64_t i0 = o0 * conv.dims[0].step() + a, i1 = o1 * conv.dims[1].step() + b,
                        i2 = o2 * conv.dims[2].step() + c;
          if (i0 < 0 || i0 >= conv.dims[0].conv.input || i1 < 0 || i1 >= conv.dims[1].conv.input || i2 < 0 ||
              i2 >= conv.dims[2].conv.input || conv.dims[0].is_hole(a) || conv.dims[1].is_hole(b) ||
              conv.dims[2].is_hole(c))
            continue;
          const double x = to_accumulator(
              conv.input[n * conv.input_strides[0] + ci * conv.input_strides[1] + i0 * conv.input_strides[2] +
                         i1 * conv.input_strides[3] + i2 * conv.input_strides[4]]);
          sum += x * collapsed_tap(conv, ci, co - group * per_group, {a - j0.begin, b - j1.begin, c - j2.begin});
        }
  return from_double<T>(Affine<double>(conv, co)(sum));
}

template <class T>
__device__ __noinline__ T direct_value(const Convolution<T>& conv, int64_t n, int64_t co, int64_t o0, int64_t o1,
                                       int64_t o2) {
  return direct_value_inline(conv, n, co, o0, o1, o2);
}

// d = a * b + c, 16 x 8 = 16 x 8 times 8 x 8. With g = lane / 4 and t = lane % 4, a lane holds a[g][t], a[g + 8][t],
// a[g][t + 4], a[g + 8][t + 4]; b[t][g], b[t + 4][g]; d[g][2t], d[g][2t + 1], d[g + 8][2t], d[g + 8][2t + 1].
__device__ inline void multiply_add(double (&d)[4], const double (&a)[4], double b0, double b1, const double (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f64.f64.f64.f64 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, %12, "
      "%13};"
      : "=d"(d[0]), "=d"(d[1]), "=d"(d[2]), "=d"(d[3])
      : "d"(a[0]), "d"(a[1]), "d"(a[2]), "d"(a[3]), "d"(b0), "d"(b1), "d"(c[0]), "d"(c[1]), "d"(c[2]), "d"(c[3]));
#elif defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  // 8 x 8 = 8 x 4 times 4 x 8, whose lanes hold the same: four of these make one.
  const auto quarter = [](double& d0, double& d1, double a, double b, double c0, double c1) {
    asm("mma.sync.aligned.m8n8k4.row.col.f64.f64.f64.f64 {%0, %1}, {%2}, {%3}, {%4, %5};"
        : "=d"(d0), "=d"(d1)
        : "d"(a), "d"(b), "d"(c0), "d"(c1));
  };
  quarter(d[0], d[1], a[0], b0, c[0], c[1]);
  quarter(d[2], d[3], a[1], b0, c[2], c[3]);
  quarter(d[0], d[1], a[2], b1, d[0], d[1]);
  quarter(d[2], d[3], a[3], b1, d[2], d[3]);
#endif
}
__device__ inline void multiply_add(float (&d)[4], const float (&a)[4], float b0, float b1, const float (&c)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %11, "
      "%12, %13};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(__float_as_uint(a[0])), "r"(__float_as_uint(a[1])), "r"(__float_as_uint(a[2])), "r"(__float_as_uint(a[3])),
        "r"(__float_as_uint(b0)), "r"(__float_as_uint(b1)), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
#endif
}

// The same of half types, 16 x 8 = 16 x 16 times 16 x 8, in pairs: a[g][2t, 2t + 1], a[g + 8][2t, 2t + 1],
// a[g][2t + 8, 2t + 9], a[g + 8][2t + 8, 2t + 9]; b[2t, 2t + 1][g], b[2t + 8, 2t + 9][g]. Adds to d.
template <class T>
__device__ void multiply_add(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  if constexpr (std::is_same_v<T, __half>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

}  // namespace fused
