// Every op's schema. Kernels register themselves where they stand: csrc/kernels/<family>.cu and <family>_cpu.cpp.
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(fused, m) {
  m.def("global_avg_pool(Tensor input) -> Tensor");

  m.def(
      "conv_transpose_global_avg_pool(Tensor input, Tensor weight, Tensor? bias=None, int[1] stride=1, "
      "int[1] padding=0, int[1] output_padding=0, int groups=1, int[1] dilation=1, *, Tensor? scale=None, "
      "Tensor? shift=None) -> Tensor");

  m.def(
      "conv_transpose_global_avg_pool_logsumexp(Tensor input, Tensor weight, Tensor? bias=None, int[1] stride=1, "
      "int[1] padding=0, int[1] output_padding=0, int groups=1, int[1] dilation=1, *, Tensor? scale=None, "
      "Tensor? shift=None, float out_scale=1.0) -> Tensor");

  m.def(
      "conv_transpose_avg_pool(Tensor input, Tensor weight, Tensor? bias=None, int[1] stride=1, int[1] padding=0, "
      "int[1] output_padding=0, int groups=1, int[1] dilation=1, int[1] pool_kernel_size=2, int[] pool_stride=[], *, "
      "Tensor? scale1=None, Tensor? shift=None, Tensor? scale2=None) -> Tensor");

  // What the backward of every op above calls: its kernel raises. A call rather than a raise in Python, so that
  // torch.compile can trace a backward that is never run.
  m.def("_no_backward(Tensor grad, str op) -> Tensor");
}
