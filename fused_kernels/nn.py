"""Modules over the ops: they hold the parameters of the plain models, under the same names, and no mathematics.

Without gradients a forward is one fused op; where a gradient is needed it is the plain composition of
:mod:`fused_kernels.reference`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from fused_kernels import ops, reference

__all__ = ["ConvTranspose2dGlobalAvgPoolLogSumExp", "ConvTranspose3dAvgPool"]

Size = int | tuple[int, ...]


def _needs_grad(module: nn.Module, input: Tensor) -> bool:
    if torch.is_grad_enabled() and (input.requires_grad or any(p.requires_grad for p in module.parameters())):
        return True
    if torch.compiler.is_dynamo_compiling():
        return False  # it cannot trace what follows; where that would have been true, the op raises
    if forward_ad._current_level < 0 and not torch._C._are_functorch_transforms_active():
        return False
    return any(map(_is_differentiated, (input, *module.parameters())))


def _is_differentiated(tensor: Tensor) -> bool:
    """Whether the tensor, or what transforms of torch.func wrap in it, has a tangent or needs a gradient."""
    in_forward_mode = forward_ad._current_level >= 0
    while True:
        if torch.is_grad_enabled() and tensor.requires_grad:
            return True
        can_tell = in_forward_mode and not torch._C._functorch.is_batchedtensor(tensor)
        if can_tell and forward_ad.unpack_dual(tensor).tangent is not None:
            return True
        if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return False
        tensor = torch._C._functorch.get_unwrapped(tensor)


class ConvTranspose2dGlobalAvgPoolLogSumExp(nn.Module):
    """``conv_transpose2d`` → mean over H and W → ``+ bias`` → ``logsumexp(dim=1)`` → ``* 10``.

    A drop-in for KernelBench's ``42_ConvTranspose2d_GlobalAvgPool_BiasAdd_LogSumExp_Sum_Multiply``: the same
    constructor arguments, parameters (``conv_transpose.weight``, ``conv_transpose.bias``, ``bias``) and first values.

    Args:
        in_channels, out_channels, kernel_size: of the :class:`torch.nn.ConvTranspose2d`.
        bias_shape: shape of ``bias``, such as (out_channels, 1, 1).
        out_scale: multiplies the result.

    Shape:
        input (N, in_channels, H, W), output (N, 1).

    Example:
        >>> model = fused_kernels.nn.ConvTranspose2dGlobalAvgPoolLogSumExp(3, 16, 3, (16, 1, 1)).eval()
        >>> with torch.no_grad():
        ...     model(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 1])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        bias_shape: Sequence[int],
        *,
        out_scale: float = 10.0,
    ) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size)  # type: ignore[arg-type]
        self.bias = nn.Parameter(torch.randn(*bias_shape))
        self.out_scale = out_scale

    def forward(self, input: Tensor) -> Tensor:
        """One fused op, or, where a gradient is needed, the plain composition."""
        conv = self.conv_transpose
        op = reference if _needs_grad(self, input) else ops
        return op.conv_transpose_global_avg_pool_logsumexp(
            input, conv.weight, conv.bias, shift=self.bias, out_scale=self.out_scale
        )

    def extra_repr(self) -> str:
        return f"out_scale={self.out_scale}"


class ConvTranspose3dAvgPool(nn.Module):
    """``conv_transpose3d`` → ``* scale1`` → ``avg_pool3d(2)`` → ``+ bias`` → ``* scale2``.

    A drop-in for KernelBench's ``50_ConvTranspose3d_Scaling_AvgPool_BiasAdd_Scaling``: the same constructor arguments,
    parameters (``conv_transpose.weight``, ``conv_transpose.bias``, ``scale1``, ``bias``, ``scale2``) and first values.

    Args:
        in_channels, out_channels, kernel_size, stride, padding: of the :class:`torch.nn.ConvTranspose3d`.
        scale1, scale2: first values of the two learnable scales.
        bias_shape: shape of ``bias``, such as (out_channels, 1, 1, 1).
        pool_kernel_size: of the average pool.

    Shape:
        input (N, in_channels, D, H, W), output (N, out_channels, \\*pooled).

    Example:
        >>> model = fused_kernels.nn.ConvTranspose3dAvgPool(3, 16, 3, 2, 1, 0.5, 1.0, (16, 1, 1, 1)).eval()
        >>> with torch.no_grad():
        ...     model(torch.randn(1, 3, 4, 8, 8)).shape
        torch.Size([1, 16, 3, 7, 7])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Size,
        stride: Size,
        padding: Size,
        scale1: float,
        scale2: float,
        bias_shape: Sequence[int],
        *,
        pool_kernel_size: Size = 2,
    ) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,  # type: ignore[arg-type]
            stride=stride,  # type: ignore[arg-type]
            padding=padding,  # type: ignore[arg-type]
        )
        self.scale1 = nn.Parameter(torch.tensor(scale1))
        self.bias = nn.Parameter(torch.randn(*bias_shape))
        self.scale2 = nn.Parameter(torch.tensor(scale2))
        self.pool_kernel_size = pool_kernel_size

    def forward(self, input: Tensor) -> Tensor:
        """One fused op, or, where a gradient is needed, the plain composition."""
        conv = self.conv_transpose
        op = reference if _needs_grad(self, input) else ops
        return op.conv_transpose_avg_pool(
            input,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            pool_kernel_size=self.pool_kernel_size,
            scale1=self.scale1,
            shift=self.bias,
            scale2=self.scale2,
        )

    def extra_repr(self) -> str:
        return f"pool_kernel_size={self.pool_kernel_size}"
