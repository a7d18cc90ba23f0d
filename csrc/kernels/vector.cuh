// 16-byte vectors of a dtype, and the accumulator that goes with it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

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

// The same, as bits for unpack.
template <class T>
__device__ uint4 load_streaming_bits(const T* address) {
  return __ldcs(reinterpret_cast<const uint4*>(address));
}

// The same from any address.
template <class T>
__device__ uint4 gather_bits(const T* address) {
  uint4 bits;
#pragma unroll
  for (int q = 0; q < Vector<T>::kSize; ++q) reinterpret_cast<T*>(&bits)[q] = address[q];
  return bits;
}

// The two values of a half type in a word. (From an array of that type, the compiler would shuffle them first.)
template <class T>
__device__ void unpack(unsigned word, float (&values)[2]) {
  if constexpr (std::is_same_v<T, __half>) {
    const float2 pair = __half22float2(reinterpret_cast<const __half2&>(word));
    values[0] = pair.x;
    values[1] = pair.y;
  } else {
    values[0] = __uint_as_float(word << 16);
    values[1] = __uint_as_float(word & 0xffff0000u);
  }
}
// The values in 8 bytes.
template <class T>
__device__ void unpack(const uint2& bits, Accumulator<T> (&values)[8 / sizeof(T)]) {
  if constexpr (std::is_same_v<T, double>) {
    values[0] = __hiloint2double(static_cast<int>(bits.y), static_cast<int>(bits.x));
  } else if constexpr (std::is_same_v<T, float>) {
    values[0] = __uint_as_float(bits.x);
    values[1] = __uint_as_float(bits.y);
  } else {
    float low[2], high[2];
    unpack<T>(bits.x, low);
    unpack<T>(bits.y, high);
    values[0] = low[0];
    values[1] = low[1];
    values[2] = high[0];
    values[3] = high[1];
  }
}
// Those in 16 bytes.
template <class T>
__device__ void unpack(const uint4& bits, Accumulator<T> (&values)[16 / sizeof(T)]) {
  constexpr int kHalf = 8 / sizeof(T);
  Accumulator<T> low[kHalf], high[kHalf];
  unpack<T>(uint2{bits.x, bits.y}, low);
  unpack<T>(uint2{bits.z, bits.w}, high);
#pragma unroll
  for (int q = 0; q < kHalf; ++q) {
    values[q] = low[q];
    values[kHalf + q] = high[q];
  }
}

template <class T>
__device__ bool is_vector_aligned(const T* address) {
  return reinterpret_cast<uintptr_t>(address) % sizeof(Vector<T>) == 0;
}

}  // namespace fused
