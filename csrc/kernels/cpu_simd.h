// Vectors as wide as the instruction set that is being compiled (see cpu_targets.h): loads, stores, conversions, sums.
// Included once per instruction set, so there is no include guard; everything has internal linkage. GCC's own vector types
// do the arithmetic; conversions between types of different size are spelled out, since GCC 12 makes poor code of its own.

namespace fused {
namespace FUSED_CPU_TARGET {
namespace {

template <class T, int n>
struct VectorOf {
  typedef T type __attribute__((vector_size(n * sizeof(T))));
  typedef T in_memory __attribute__((vector_size(n * sizeof(T)), aligned(1), may_alias));
};
template <class T, int n>
using Vector = typename VectorOf<T, n>::type;

template <class T>
constexpr int kLanes = FUSED_CPU_VECTOR_BYTES / static_cast<int>(sizeof(T));
template <class T>
using Lanes = Vector<T, kLanes<T>>;

using Floats = Lanes<float>;
using Doubles = Lanes<double>;
using Words = Lanes<uint32_t>;
using Shorts = Vector<uint16_t, kLanes<float>>;  // as many as there are Floats

template <class V>
inline V load_bits(const void* x) {
  V result;
  __builtin_memcpy(&result, x, sizeof result);
  return result;
}
template <class T>
inline Lanes<T> load(const T* x) {
  return *reinterpret_cast<const typename VectorOf<T, kLanes<T>>::in_memory*>(x);
}
template <class T>
inline void store(T* x, Lanes<T> values) {
  *reinterpret_cast<typename VectorOf<T, kLanes<T>>::in_memory*>(x) = values;
}

// ---- Between float and double ----

#if FUSED_CPU_VECTOR_BYTES == 64
// GCC 12 takes the unmasked forms for uses of an uninitialised value; with all lanes set it drops the masks.
inline Doubles low_doubles(Floats x) { return _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x, 0)); }
inline Doubles high_doubles(Floats x) { return _mm512_maskz_cvtps_pd(0xff, _mm512_maskz_extractf32x8_ps(0xff, x, 1)); }
inline Doubles load_doubles(const float* x) { return _mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(x)); }
inline void store_rounded(float* x, Doubles values) { _mm256_storeu_ps(x, _mm512_maskz_cvtpd_ps(0xff, values)); }
#elif FUSED_CPU_VECTOR_BYTES == 32
inline Doubles low_doubles(Floats x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }
inline Doubles high_doubles(Floats x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }
inline Doubles load_doubles(const float* x) { return _mm256_cvtps_pd(_mm_loadu_ps(x)); }
inline void store_rounded(float* x, Doubles values) { _mm_storeu_ps(x, _mm256_cvtpd_ps(values)); }
#else
inline Doubles low_doubles(Floats x) { return Doubles{x[0], x[1]}; }
inline Doubles high_doubles(Floats x) { return Doubles{x[2], x[3]}; }
inline Doubles load_doubles(const float* x) { return Doubles{x[0], x[1]}; }
inline void store_rounded(float* x, Doubles values) {
  x[0] = static_cast<float>(values[0]);
  x[1] = static_cast<float>(values[1]);
}
#endif

// sums[i] += values[i], in double.
inline void add_to(double* sums, Doubles values) { store(sums, load(sums) + values); }
inline void add_to(double* sums, Floats values) {
  add_to(sums, low_doubles(values));
  add_to(sums + kLanes<double>, high_doubles(values));
}

// ---- Between half types and float ----

inline Words widen(Shorts x) { return __builtin_convertvector(x, Words); }

inline Floats from_half(Shorts x) {
#if FUSED_CPU_VECTOR_BYTES == 64
  return _mm512_maskz_cvtph_ps(0xffff, (__m256i)x);
#elif FUSED_CPU_VECTOR_BYTES == 32
  return _mm256_cvtph_ps((__m128i)x);
#else
  const Words bits = widen(x), magnitude = (bits & 0x7fffu) << 13;
  const Floats scaled = (Floats)magnitude * 0x1p112f;  // right for denormals too
  const Words special = (Words)(magnitude >= 0x7c00u << 13) & 0x7f800000u;
  return (Floats)((Words)scaled | special | ((bits & 0x8000u) << 16));
#endif
}

inline void store_rounded(Half* x, Floats values) {
#if FUSED_CPU_VECTOR_BYTES == 64
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), _mm512_maskz_cvtps_ph(0xffff, values, _MM_FROUND_TO_NEAREST_INT));
#elif FUSED_CPU_VECTOR_BYTES == 32
  _mm_storeu_si128(reinterpret_cast<__m128i*>(x), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
#else
  for (int i = 0; i < kLanes<float>; ++i) x[i] = Half(values[i]);
#endif
}

inline void store_rounded(BFloat16* x, Floats values) {
  const Words bits = (Words)values, is_nan = (Words)(values != values);
  const Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const Shorts low = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), Shorts);
  __builtin_memcpy(x, &low, sizeof low);
}
inline void store_rounded(float* x, Floats values) { store(x, values); }
inline void store_rounded(double* x, Doubles values) { store(x, values); }

// ---- For any type ----

// For what is rarely run.
template <class T>
inline Doubles load_doubles(const T* x) {
  Doubles values;
  for (int i = 0; i < kLanes<double>; ++i) values[i] = static_cast<double>(x[i]);
  return values;
}

// As many elements of x as a vector of Acc has lanes.
template <class Acc, class T>
inline Lanes<Acc> load_as(const T* x) {
  if constexpr (std::is_same_v<T, Acc>)
    return load(x);
  else if constexpr (std::is_same_v<Acc, double>)
    return load_doubles(x);
  else if constexpr (std::is_same_v<T, Half>)
    return from_half(load_bits<Shorts>(x));
  else
    return (Floats)(widen(load_bits<Shorts>(x)) << 16);
}

template <class V>
inline double horizontal_sum(V values) {
  constexpr int n = sizeof(V) / sizeof(values[0]);
  double sums[n];
  for (int i = 0; i < n; ++i) sums[i] = static_cast<double>(values[i]);
  for (int step = n / 2; step > 0; step /= 2)
    for (int i = 0; i < step; ++i) sums[i] += sums[i + step];
  return sums[0];
}

}  // namespace
}  // namespace FUSED_CPU_TARGET
}  // namespace fused
