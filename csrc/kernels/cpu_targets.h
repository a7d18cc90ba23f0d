// One binary for every CPU: a file's kernels are compiled once per instruction set and picked at run time.
//
// The file sets FUSED_CPU_KERNELS to its own name and includes this header, which includes the file back with
// FUSED_CPU_TARGET defined, once per instruction set; what the file has under #ifdef FUSED_CPU_TARGET goes into a namespace
// of that name. Nothing with external linkage may stand there: the linker would merge it across instruction sets.
// FUSED_CPU_SELECT(f) is f of the best set that the CPU has, or of that which FUSED_KERNELS_CPU_CAPABILITY names.
#include <torch/csrc/stable/ops.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>

#include "tensors.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#include <immintrin.h>
#define FUSED_CPU_HAS_AVX 1
#else
#define FUSED_CPU_HAS_AVX 0
#endif

namespace fused {

using torch::headeronly::BFloat16;
using torch::headeronly::Half;

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

enum class CpuCapability { kDefault, kAvx2, kAvx512 };

inline CpuCapability choose_cpu_capability() {
  bool avx2 = false, avx512 = false;
#if FUSED_CPU_HAS_AVX
  avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  const char* variable = std::getenv("FUSED_KERNELS_CPU_CAPABILITY");
  const std::string wanted = variable ? variable : "";
  if (wanted.empty()) return avx512 ? CpuCapability::kAvx512 : avx2 ? CpuCapability::kAvx2 : CpuCapability::kDefault;
  if (wanted == "default") return CpuCapability::kDefault;
  if (wanted == "avx2" && avx2) return CpuCapability::kAvx2;
  if (wanted == "avx512" && avx512) return CpuCapability::kAvx512;
  const bool known = wanted == "avx2" || wanted == "avx512";
  throw std::runtime_error(
      "fused: expected the environment variable FUSED_KERNELS_CPU_CAPABILITY to be default, avx2 or avx512" +
      std::string(known ? " and one that this CPU has" : "") + ", but got " + wanted);
}

inline CpuCapability cpu_capability() {
  static const CpuCapability capability = choose_cpu_capability();
  return capability;
}

template <class F>
void dispatch_cpu(ScalarType dtype, const F& function) {
  switch (dtype) {
    case ScalarType::Float: return function(float());
    case ScalarType::Double: return function(double());
    case ScalarType::Half: return function(Half());
    default: return function(BFloat16());
  }
}

// Rounds once: a half type by way of float would round twice, unless float keeps, in its last bit, that it is inexact.
template <class T>
T from_double(double value) {
  float rounded = static_cast<float>(value);
  if constexpr (sizeof(T) == 2) {
    if (static_cast<double>(rounded) != value && std::isfinite(rounded)) {
      uint32_t bits;
      std::memcpy(&bits, &rounded, sizeof bits);
      if (std::fabs(static_cast<double>(rounded)) > std::fabs(value)) --bits;
      bits |= 1;
      std::memcpy(&rounded, &bits, sizeof bits);
    }
    return T(rounded);
  } else {
    return std::is_same_v<T, double> ? static_cast<T>(value) : static_cast<T>(rounded);
  }
}

template <class T>
double load(const ChannelParam& param, int64_t c) {
  return param.data ? static_cast<double>(static_cast<const T*>(param.data)[c * param.stride]) : param.value;
}

// How many items of `work` element operations each are worth a thread of their own.
inline int64_t items_per_thread(int64_t work) { return std::max<int64_t>(1, 32768 / std::max<int64_t>(1, work)); }

}  // namespace fused

#define FUSED_CPU_TARGET cpu_default
#define FUSED_CPU_VECTOR_BYTES 16
#define FUSED_CPU_REGISTERS 16
#include FUSED_CPU_KERNELS
#undef FUSED_CPU_TARGET
#undef FUSED_CPU_VECTOR_BYTES
#undef FUSED_CPU_REGISTERS

#if FUSED_CPU_HAS_AVX
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define FUSED_CPU_TARGET cpu_avx2
#define FUSED_CPU_VECTOR_BYTES 32
#define FUSED_CPU_REGISTERS 16
#include FUSED_CPU_KERNELS
#undef FUSED_CPU_TARGET
#undef FUSED_CPU_VECTOR_BYTES
#undef FUSED_CPU_REGISTERS
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#define FUSED_CPU_TARGET cpu_avx512
#define FUSED_CPU_VECTOR_BYTES 64
#define FUSED_CPU_REGISTERS 32
#include FUSED_CPU_KERNELS
#undef FUSED_CPU_TARGET
#undef FUSED_CPU_VECTOR_BYTES
#undef FUSED_CPU_REGISTERS
#pragma GCC pop_options

#define FUSED_CPU_SELECT(...)                                            \
  (cpu_capability() == CpuCapability::kAvx512 ? &cpu_avx512::__VA_ARGS__ \
   : cpu_capability() == CpuCapability::kAvx2 ? &cpu_avx2::__VA_ARGS__   \
                                              : &cpu_default::__VA_ARGS__)
#else
#define FUSED_CPU_SELECT(...) (cpu_capability(), &cpu_default::__VA_ARGS__)
#endif
