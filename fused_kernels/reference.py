"""The ops as plain PyTorch compositions: what they compute, word for word.

Same names, arguments and shapes as :mod:`fused_kernels.ops`. They are differentiable, so modules train through them,
and in float64 they are the oracle of the tests.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Size = int | Sequence[int]
Factor: TypeAlias = Tensor | float | None

_CONV_TRANSPOSE: dict[int, Callable[..., Tensor]] = {
    3: F.conv_transpose1d,
    4: F.conv_transpose2d,
    5: F.conv_transpose3d,
}
_AVG_POOL: dict[int, Callable[..., Tensor]] = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}


def _over_channels(factor: Tensor | float, dims: int) -> Tensor | float:
    """A scale or shift as it broadcasts against (N, C, \\*spatial)."""
    if not isinstance(factor, Tensor) or factor.dim() == 0:
        return factor
    return factor.reshape(-1, *[1] * (dims - 2))


def _scaled(x: Tensor, scale: Factor) -> Tensor:
    return x if scale is None else x * _over_channels(scale, x.dim())


def _shifted(x: Tensor, shift: Factor) -> Tensor:
    return x if shift is None else x + _over_channels(shift, x.dim())


def _conv_transpose(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Size,
    padding: Size,
    output_padding: Size,
    groups: int,
    dilation: Size,
) -> Tensor:
    conv = _CONV_TRANSPOSE[input.dim()]
    return conv(input, weight, bias, stride, padding, output_padding, groups, dilation)


def global_avg_pool(input: Tensor) -> Tensor:
    """Mean over the spatial dimensions, which stay with size 1."""
    return input.mean(dim=tuple(range(2, input.dim())), keepdim=True)


def conv_transpose_global_avg_pool(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    *,
    scale: Factor = None,
    shift: Factor = None,
) -> Tensor:
    """``mean(conv_transpose(input, weight, bias)) * scale + shift``."""
    x = _conv_transpose(input, weight, bias, stride, padding, output_padding, groups, dilation)
    return _shifted(_scaled(global_avg_pool(x), scale), shift)


def conv_transpose_global_avg_pool_logsumexp(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    *,
    scale: Factor = None,
    shift: Factor = None,
    out_scale: float = 1.0,
) -> Tensor:
    """``logsumexp(mean(conv_transpose(input, weight, bias)) * scale + shift, dim=1) * out_scale``."""
    x = conv_transpose_global_avg_pool(
        input, weight, bias, stride, padding, output_padding, groups, dilation, scale=scale, shift=shift
    )
    return torch.logsumexp(x.flatten(1), dim=1, keepdim=True) * out_scale


def conv_transpose_avg_pool(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
    pool_kernel_size: Size = 2,
    pool_stride: Size = (),
    *,
    scale1: Factor = None,
    shift: Factor = None,
    scale2: Factor = None,
) -> Tensor:
    """``(avg_pool(conv_transpose(input, weight, bias) * scale1) + shift) * scale2``.

    The scale stands before the pool, as in models; in exact arithmetic that is the same.
    """
    x = _conv_transpose(input, weight, bias, stride, padding, output_padding, groups, dilation)
    pool = _AVG_POOL[input.dim()]
    no_stride = not isinstance(pool_stride, int) and len(pool_stride) == 0
    x = pool(_scaled(x, scale1), pool_kernel_size, None if no_stride else pool_stride)
    return _scaled(_shifted(x, shift), scale2)
