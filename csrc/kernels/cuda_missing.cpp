// A build without the CUDA toolkit has no CUDA kernels: a call with CUDA tensors says so.
#ifndef USE_CUDA

#include "tensors.h"

namespace fused {
namespace {

template <const char* kOp, class... Arguments>
Tensor refuse(Arguments...) {
  fail(kOp,
       "expected tensors on the CPU, but got CUDA tensors, for which this build of fused_kernels has no kernels: it ",
       "was made without the CUDA toolkit (build_info() says \"CPU only\")");
}

constexpr char kGlobal[] = "global_avg_pool";
constexpr char kChain[] = "conv_transpose_global_avg_pool";
constexpr char kLogSumExp[] = "conv_transpose_global_avg_pool_logsumexp";
constexpr char kPool[] = "conv_transpose_avg_pool";

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fused, CUDA, m) {
  m.impl(kGlobal, TORCH_BOX((&refuse<kGlobal, const Tensor&>)));
  m.impl(kChain,
         TORCH_BOX((
             &refuse<kChain, Tensor, Tensor, MaybeTensor, Ints, Ints, Ints, int64_t, Ints, MaybeTensor, MaybeTensor>)));
  m.impl(kLogSumExp, TORCH_BOX((&refuse<kLogSumExp, Tensor, Tensor, MaybeTensor, Ints, Ints, Ints, int64_t, Ints,
                                        MaybeTensor, MaybeTensor, double>)));
  m.impl(kPool, TORCH_BOX((&refuse<kPool, Tensor, Tensor, MaybeTensor, Ints, Ints, Ints, int64_t, Ints, Ints, Ints,
                                   MaybeTensor, MaybeTensor, MaybeTensor>)));
}

}  // namespace fused

#endif
