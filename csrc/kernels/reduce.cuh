// Sums over the lanes of a warp and the warps of a block, always in the same order.
#pragma once

namespace fused {

// The sum over groups of `width` neighbouring lanes, a power of two, in every lane.
template <class Acc>
__device__ Acc group_sum(Acc value, int width) {
  for (int offset = width / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

template <class Acc>
__device__ Acc warp_sum(Acc value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
  return value;
}

// The sum of `values`, combined pairwise; N is a power of two.
template <int N, class Acc>
__device__ Acc tree_sum(const Acc (&values)[N]) {
  if constexpr (N == 1) {
    return values[0];
  } else {
    Acc pairs[N / 2];
#pragma unroll
    for (int i = 0; i < N / 2; ++i) pairs[i] = values[2 * i] + values[2 * i + 1];
    return tree_sum(pairs);
  }
}

// Adds `values` to a sum in float64, `kTogether` of them, combined pairwise, at a time.
template <int kTogether, int N, class Acc>
__device__ void add_groups(const Acc (&values)[N], double& sum) {
#pragma unroll
  for (int first = 0; first < N; first += kTogether) {
    Acc group[kTogether];
#pragma unroll
    for (int i = 0; i < kTogether; ++i) group[i] = values[first + i];
    sum += static_cast<double>(tree_sum(group));
  }
}

}  // namespace fused
