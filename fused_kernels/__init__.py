"""Chains of transposed convolution, average pooling, affine and log-sum-exp as single memory passes, for inference.

Importing loads the compiled ops into ``torch.ops.fused``; it neither compiles nor touches a GPU.
"""

from fused_kernels import nn, reference
from fused_kernels._library import __version__, build_info
from fused_kernels.ops import (
    conv_transpose_avg_pool,
    conv_transpose_global_avg_pool,
    conv_transpose_global_avg_pool_logsumexp,
    global_avg_pool,
    plan,
)

__all__ = [
    "__version__",
    "build_info",
    "conv_transpose_avg_pool",
    "conv_transpose_global_avg_pool",
    "conv_transpose_global_avg_pool_logsumexp",
    "global_avg_pool",
    "nn",
    "plan",
    "reference",
]
