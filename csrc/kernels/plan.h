// What a call would launch, as data: made by one pure function per family, followed by the CUDA code and shown to Python.
#pragma once

#include <cstdint>
#include <initializer_list>

namespace fused {

// The few facts of a device that launch choices depend on.
struct DeviceProperties {
  int compute_capability = 90;  // major * 10 + minor
  int multiprocessors = 132;
  int64_t shared_memory_per_block = 232448;  // the opt-in maximum, bytes
  // What the code that the device runs was compiled for: less than its own where that is PTX of an older architecture, in
  // which some kernels are empty.
  int code_capability = compute_capability;
};

struct Launch {
  const char* kernel = "";
  int64_t grid = 0;
  int block = 0;
  int64_t shared_memory = 0;  // dynamic, bytes
  bool programmatic = false;  // may start before the previous launch has ended (programmatic dependent launch)
  int64_t times = 1;          // one behind the other
};

// The product of counts, none negative. It stops at kMaxCount, far beyond what can run; two of them add up in 64 bits.
inline constexpr int64_t kMaxCount = INT64_MAX / 2;
constexpr int64_t count_product(std::initializer_list<int64_t> factors) {
  int64_t product = 1;
  for (const int64_t factor : factors)
    if (__builtin_mul_overflow(product, factor, &product) || product > kMaxCount) product = kMaxCount;
  return product;
}

inline constexpr int kMaxLaunches = 3;

struct Plan {
  const char* variant = "";
  int launches = 0;
  Launch launch[kMaxLaunches];
  int64_t workspace = 0;      // bytes
  int64_t bytes_read = 0;     // the input and the weight once
  int64_t bytes_written = 0;  // the output once
  int64_t operations = 0;     // additions and multiplications

  void add(const char* kernel, int64_t grid, int block, int64_t shared_memory = 0, bool programmatic = false) {
    launch[launches++] = {kernel, grid, block, shared_memory, programmatic};
  }
};

}  // namespace fused
