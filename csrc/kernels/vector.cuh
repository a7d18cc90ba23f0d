// 16-byte vectors of a dtype, and the accumulator that goes with it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fused {

// Half types accumulate in float, float64 in itself.
template <class T>
struct AccumulatorOf {
  using type = float;
};
template <>
struct AccumulatorOf<double> {
  using type = double;
};
template <class T>
using Accumulator = typename AccumulatorOf<T>::type;

__device__ inline float to_accumulator(float x) { return x; }
__device__ inline double to_accumulator(double x) { return x; }
__device__ inline float to_accumulator(__half x) { return __half2float(x); }
__device__ inline float to_accumulator(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounds once, from float64.
template <class T>
__device__ T from_double(double x) {
  return static_cast<T>(x);
}
template <>
__device__ inline __half from_double<__half>(double x) {
  return __double2half(x);
}
template <>
__device__ inline __nv_bfloat16 from_double<__nv_bfloat16>(double x) {
  return __double2bfloat16(x);
}

template <class T>
__device__ T from_accumulator(Accumulator<T> x) {
  return static_cast<T>(x);
}
template <>
__device__ inline __half from_accumulator<__half>(float x) {
  return __float2half(x);
}
template <>
__device__ inline __nv_bfloat16 from_accumulator<__nv_bfloat16>(float x) {
  return __float2bfloat16(x);
}

template <class T>
struct alignas(16) Vector {
  static constexpr int kSize = 16 / sizeof(T);
  T values[kSize];
};

// Reads data that no one reads again: it is the first to leave the cache.
template <class T>
__device__ Vector<T> load_streaming(const Vector<T>* address) {
  const uint4 bits = __ldcs(reinterpret_cast<const uint4*>(address));
  return *reinterpret_cast<const Vector<T>*>(&bits);
}

template <class T>
__device__ bool is_vector_aligned(const T* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(Vector<T>) == 0;
}

}  // namespace fused
