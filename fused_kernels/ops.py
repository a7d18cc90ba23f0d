"""The ops: for each a wrapper, its fake kernel and its autograd rule. They compute in ``torch.ops.fused``.

Every op is forward-only: it runs with gradients on, and ``backward`` then raises. Checks are the kernels' own (from
``_C``), so an error reads the same from the op, the wrapper, a fake tensor and ``torch.compile``.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import has_torch_function

from fused_kernels import _C, _library

__all__ = [
    "conv_transpose_avg_pool",
    "conv_transpose_global_avg_pool",
    "conv_transpose_global_avg_pool_logsumexp",
    "global_avg_pool",
    "plan",
]

assert _library.PATH  # the schemas below are in the binary that this import has loaded
_OPS = torch.ops.fused

Size = int | Sequence[int]
Factor: TypeAlias = Tensor | float | None


def _tensor(factor: Factor) -> Tensor | None:
    """A Python number as the 0-d CPU tensor that the ops take by value."""
    if factor is None or isinstance(factor, Tensor):
        return factor
    return torch.scalar_tensor(factor, dtype=torch.float64)


_PLAIN = (int, list, tuple)


def _size(size: Size) -> Size:
    """A size as the schemas take it, at little cost: numbers that are not plain (symbolic ones, NumPy's) as a list."""
    # Under Dynamo a symbolic number says that it is an int.
    return size if type(size) in _PLAIN and not torch.compiler.is_dynamo_compiling() else _list(size)


def _list(size: Size) -> list[int]:
    return list(size) if isinstance(size, Sequence) else [size]


# ---- wrappers ----------------------------------------------------------------------------------------------------


def _pool_stride(pool_stride: Size, pool_kernel_size: Size) -> list[int]:
    """As a list, since the schema's int[] takes no bare number; never empty, since AOTInductor makes None of that."""
    return _list(pool_stride) or _list(pool_kernel_size)


def global_avg_pool(input: Tensor) -> Tensor:
    r"""Mean of every plane: ``input.mean(dim=(2, ...), keepdim=True)``.

    Args:
        input: (N, C, \*spatial) with 1 to 3 spatial dimensions; float32, float64, float16 or bfloat16. Half types
            accumulate in float32.

    Returns:
        (N, C, 1, ...) of the input's dtype. A plane without elements gives NaN, as ``torch.mean`` does.

    Raises:
        RuntimeError: the rank or dtype is another.

    Example:
        >>> fused_kernels.global_avg_pool(torch.ones(2, 3, 7, 7)).shape
        torch.Size([2, 3, 1, 1])
    """
    return _OPS.global_avg_pool.default(input)


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
    r"""``mean(conv_transpose(input, weight, bias)) * scale + shift``, without computing the convolution.

    The mean over all outputs of a transposed convolution needs only the sum of each input channel, times the weight
    summed over its taps; where padding cuts the border off, sums and taps are taken per region.

    Args:
        input: (N, C_in, \*spatial) with 1 to 3 spatial dimensions; float32, float64, float16 or bfloat16.
        weight: (C_in, C_out/groups, \*kernel_size), as in :class:`torch.nn.ConvTranspose2d`.
        bias: (C_out,) or None.
        stride, padding, output_padding, groups, dilation: as in :func:`torch.nn.functional.conv_transpose2d`; a number
            or a list of length 1 holds for every spatial dimension.
        scale, shift: 1 or C_out elements that broadcast over channels, such as (C_out,) or (C_out, 1, 1), of the
            input's dtype and device; or a number; or a 0-d CPU tensor, which is taken by value.

    Returns:
        (N, C_out, 1, ...) of the input's dtype.

    Raises:
        RuntimeError: an argument is not as described, or does not give an output of positive size.

    Example:
        >>> x, weight = torch.ones(2, 3, 4, 4), torch.ones(3, 5, 3, 3)
        >>> fused_kernels.conv_transpose_global_avg_pool(x, weight).flatten()[0]  # 16 * 3 * 9 / 36
        tensor(12.)
    """
    return _OPS.conv_transpose_global_avg_pool.default(
        input,
        weight,
        bias,
        _size(stride),
        _size(padding),
        _size(output_padding),
        groups,
        _size(dilation),
        scale=_tensor(scale),
        shift=_tensor(shift),
    )


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
    r"""``logsumexp(mean(conv_transpose(input, weight, bias)) * scale + shift, dim=1) * out_scale``.

    Args:
        input, weight, bias, stride, padding, output_padding, groups, dilation, scale, shift: as in
            :func:`conv_transpose_global_avg_pool`.
        out_scale: multiplies the result.

    Returns:
        (N, 1) of the input's dtype. A row of -inf gives -inf.

    Raises:
        RuntimeError: as in :func:`conv_transpose_global_avg_pool`.
        TypeError: ``out_scale`` is a Tensor, whose gradient would be lost.

    Example:
        >>> x, weight = torch.zeros(2, 3, 4, 4), torch.ones(3, 8, 3, 3)
        >>> fused_kernels.conv_transpose_global_avg_pool_logsumexp(x, weight, out_scale=10.0)[0]  # 10 * log(8)
        tensor([20.7944])
    """
    if isinstance(out_scale, Tensor):
        raise TypeError(
            "fused::conv_transpose_global_avg_pool_logsumexp: expected `out_scale` to be a number, but got a Tensor"
        )
    return _OPS.conv_transpose_global_avg_pool_logsumexp.default(
        input,
        weight,
        bias,
        _size(stride),
        _size(padding),
        _size(output_padding),
        groups,
        _size(dilation),
        scale=_tensor(scale),
        shift=_tensor(shift),
        out_scale=out_scale,
    )


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
    r"""``(avg_pool(conv_transpose(input, weight, bias)) * scale1 + shift) * scale2`` as one small convolution.

    A transposed convolution of stride s followed by an average pool whose stride is a multiple of s is one convolution
    with summed taps; the large intermediate is never written.

    Args:
        input: (N, C_in, \*spatial) with 1 to 3 spatial dimensions; float32, float64, float16 or bfloat16.
        weight: (C_in, C_out/groups, \*kernel_size), as in :class:`torch.nn.ConvTranspose3d`.
        bias: (C_out,) or None.
        stride, padding, output_padding, groups, dilation: as in :func:`torch.nn.functional.conv_transpose3d`; a number
            or a list of length 1 holds for every spatial dimension.
        pool_kernel_size, pool_stride: of the average pool, without padding, remainders dropped. An empty
            ``pool_stride`` means ``pool_kernel_size``; it must be a multiple of ``stride`` in every dimension.
        scale1, shift, scale2: 1 or C_out elements that broadcast over channels, such as (C_out,) or (C_out, 1, 1, 1),
            of the input's dtype and device; or a number; or a 0-d CPU tensor, which is taken by value.

    Returns:
        (N, C_out, \*pooled) of the input's dtype.

    Raises:
        RuntimeError: an argument is not as described, the pool is larger than the convolution's output, or its stride
            is no multiple of ``stride``.

    Example:
        >>> x, weight = torch.ones(2, 3, 8, 8), torch.ones(3, 5, 3, 3)
        >>> fused_kernels.conv_transpose_avg_pool(x, weight, stride=2, padding=1).shape
        torch.Size([2, 5, 7, 7])
    """
    return _OPS.conv_transpose_avg_pool.default(
        input,
        weight,
        bias,
        _size(stride),
        _size(padding),
        _size(output_padding),
        groups,
        _size(dilation),
        _size(pool_kernel_size),
        _pool_stride(pool_stride, pool_kernel_size),
        scale1=_tensor(scale1),
        shift=_tensor(shift),
        scale2=_tensor(scale2),
    )


# ---- fake kernels ------------------------------------------------------------------------------------------------

_Info = tuple[list[Any], str, str] | None


def _info(tensor: Tensor | None) -> _Info:
    """What the checks need to know of a tensor; sizes stay symbolic."""
    return (
        None if tensor is None else (list(tensor.shape), str(tensor.dtype).removeprefix("torch."), str(tensor.device))
    )


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def _is_channels_last(input: Tensor) -> bool:
    """Whether the output takes this memory format from the input, as PyTorch's convolutions do."""
    return (
        input.dim() in _CHANNELS_LAST
        and input.is_contiguous(memory_format=_CHANNELS_LAST[input.dim()])
        and not input.is_contiguous()
    )


@torch.library.register_fake("fused::global_avg_pool")
def _(input: Tensor) -> Tensor:
    return input.new_empty(_C.check_global_avg_pool(_info(input)))


def _fake_global(
    op: str, logsumexp: bool, input: Tensor, weight: Tensor, bias: Tensor | None, args: tuple[Any, ...], factors: Any
) -> Tensor:
    return input.new_empty(
        _C.check_conv_transpose_global_avg_pool(
            op, logsumexp, _info(input), _info(weight), _info(bias), *args, *map(_info, factors)
        )
    )


@torch.library.register_fake("fused::conv_transpose_global_avg_pool")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    args = (stride, padding, output_padding, groups, dilation)
    return _fake_global("conv_transpose_global_avg_pool", False, input, weight, bias, args, (scale, shift))


@torch.library.register_fake("fused::conv_transpose_global_avg_pool_logsumexp")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    out_scale: float = 1.0,
) -> Tensor:
    args = (stride, padding, output_padding, groups, dilation)
    return _fake_global("conv_transpose_global_avg_pool_logsumexp", True, input, weight, bias, args, (scale, shift))


@torch.library.register_fake("fused::conv_transpose_avg_pool")
def _(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1,),
    padding: Sequence[int] = (0,),
    output_padding: Sequence[int] = (0,),
    groups: int = 1,
    dilation: Sequence[int] = (1,),
    pool_kernel_size: Sequence[int] = (2,),
    pool_stride: Sequence[int] = (),
    *,
    scale1: Tensor | None = None,
    shift: Tensor | None = None,
    scale2: Tensor | None = None,
) -> Tensor:
    output = input.new_empty(
        _C.check_conv_transpose_avg_pool(
            _info(input),
            _info(weight),
            _info(bias),
            stride,
            padding,
            output_padding,
            groups,
            dilation,
            pool_kernel_size,
            pool_stride,
            _info(scale1),
            _info(shift),
            _info(scale2),
        )
    )
    return output.to(memory_format=_CHANNELS_LAST[input.dim()]) if _is_channels_last(input) else output


# ---- autograd: forward-only --------------------------------------------------------------------------------------

# torch.library.register_autograd does not see keyword-only tensors (scale, shift), whose gradient would silently be
# lost; so the rule is registered one level lower.
_registrations = torch.library.Library("fused", "IMPL")


class _ForwardOnly(torch.autograd.Function):
    @staticmethod
    def forward(name: str, call: Callable[[], Tensor], *tensors: Tensor) -> Tensor:
        return call()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        name, _, *tensors = inputs
        ctx.name = name
        ctx.inputs = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Through an op, so that torch.compile can trace this backward without running it; shapes are those it expects.
        refused = torch.ops.fused._no_backward.default(grads[0], ctx.name).sum()
        return (
            None,
            None,
            *(
                refused.to(device=device, dtype=dtype).expand(shape) if needed else None
                for (shape, dtype, device), needed in zip(ctx.inputs, ctx.needs_input_grad[2:], strict=True)
            ),
        )

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        raise RuntimeError(_no_backward_message(ctx.name))


def _has_tangent(tensors: Sequence[Tensor]) -> bool:
    return forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    )


def _forward_only(op: torch._ops.OpOverload) -> None:
    name = op._schema.name.removeprefix("fused::")
    below_autograd = torch._C._after_autograd_keyset

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        needed = torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs)
        if not needed and forward_ad._current_level < 0:
            return op.redispatch(keyset & below_autograd, *args, **kwargs)

        def call() -> Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                return op.redispatch(keyset & below_autograd, *args, **kwargs)

        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if not needed and not _has_tangent(tensors):
            return call()
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(_no_backward_message(name))
        return _ForwardOnly.apply(name, call, *tensors)

    _registrations.impl(name, kernel, "Autograd", with_keyset=True)


# The rule above costs more than the rest of a small call, since every argument turns from C++ into Python and back. So
# where no gradient is needed, Python's callers skip it and go where it would send them: below Autograd.


def _skipping_autograd(call: Callable[..., Any]) -> Callable[..., Any]:
    def skipping(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if (
            torch.is_inference_mode_enabled()  # is below Autograd already
            or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args, **kwargs))
            or forward_ad._current_level >= 0
            # What these wrap may need a gradient.
            or torch._C._are_functorch_transforms_active()
            or has_torch_function((*args, *kwargs.values()))
        ):
            return call(self, *args, **kwargs)
        with torch._C._AutoDispatchBelowAutograd():
            return call(self, *args, **kwargs)

    return skipping


class _Overload(torch._ops.OpOverload):
    __call__ = _skipping_autograd(torch._ops.OpOverload.__call__)


class _OverloadPacket(torch._ops.OpOverloadPacket):
    __call__ = _skipping_autograd(torch._ops.OpOverloadPacket.__call__)


def _no_backward_message(op: str) -> str:
    return (
        f"fused::{op} is forward-only and has no backward: compute it under torch.no_grad(), or use "
        f"fused_kernels.reference.{op} where gradients are needed (the modules in fused_kernels.nn do so by themselves)"
    )


@torch.library.impl("fused::_no_backward", "CompositeExplicitAutograd")
def _(grad: Tensor, op: str) -> Tensor:
    raise RuntimeError(_no_backward_message(op))


@torch.library.register_fake("fused::_no_backward")
def _(grad: Tensor, op: str) -> Tensor:
    return torch.empty_like(grad)


for _packet in (
    torch.ops.fused.global_avg_pool,
    torch.ops.fused.conv_transpose_global_avg_pool,
    torch.ops.fused.conv_transpose_global_avg_pool_logsumexp,
    torch.ops.fused.conv_transpose_avg_pool,
):
    _forward_only(_packet.default)
    _packet.default.__class__ = _Overload
    _packet.__class__ = _OverloadPacket


# ---- plans -------------------------------------------------------------------------------------------------------


def plan(op: str, input: Tensor, *args: Any, device: "_C.DeviceProperties | None" = None, **kwargs: Any) -> "_C.Plan":
    """The launches that a call of an op would make on a CUDA device, without making it.

    Args:
        op: the op's name, such as "global_avg_pool".
        input, args, kwargs: the op's arguments; only shapes and dtypes matter, so tensors on any device will do,
            "meta" included.
        device: the device's properties. By default those of the input's CUDA device, else an H200's.

    Returns:
        A ``Plan``: ``variant``, ``launches`` (kernel, grid, block, shared memory), ``workspace`` in bytes,
        ``bytes_read``, ``bytes_written`` and ``operations``.

    Raises:
        ValueError: there is no such op.
        RuntimeError: the op would refuse the arguments.

    Example:
        >>> fused_kernels.plan("global_avg_pool", torch.empty(256, 2048, 7, 7, device="meta")).variant
        'tiles of planes'
    """
    if op not in _PLANS:
        raise ValueError(f"fused_kernels.plan: expected `op` to be one of {', '.join(_PLANS)}, but got {op!r}")
    if device is None:
        device = _device_properties(input.device)
    return _PLANS[op](device, input, *args, **kwargs)


def _device_properties(device: torch.device) -> _C.DeviceProperties:
    if device.type != "cuda":
        return _C.DeviceProperties()
    properties = torch.cuda.get_device_properties(device)
    return _C.DeviceProperties(
        properties.major * 10 + properties.minor,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
    )


def _reads_channels_last(input: Tensor) -> bool:
    """Whether the global pools' kernels read the input as (N, *spatial, C); of any rank, unlike a memory format."""
    return not input.is_contiguous() and input.movedim(1, -1).is_contiguous()


def _plan_global_avg_pool(device: _C.DeviceProperties, input: Tensor) -> _C.Plan:
    return _C.plan_global_avg_pool(device, _reads_channels_last(input), _info(input))


def _plan_global(op: str, logsumexp: bool) -> Callable[..., _C.Plan]:
    def plan_it(
        device: _C.DeviceProperties,
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
    ) -> _C.Plan:
        return _C.plan_conv_transpose_global_avg_pool(
            device,
            _reads_channels_last(input),
            op,
            logsumexp,
            *map(_info, (input, weight, bias)),
            *map(_list, (stride, padding, output_padding)),
            groups,
            _list(dilation),
            *map(_info, map(_tensor, (scale, shift))),
        )

    return plan_it


def _plan_avg_pool(
    device: _C.DeviceProperties,
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
) -> _C.Plan:
    return _C.plan_conv_transpose_avg_pool(
        device,
        _is_channels_last(input),
        *map(_info, (input, weight, bias)),
        *map(_list, (stride, padding, output_padding)),
        groups,
        *map(_list, (dilation, pool_kernel_size, pool_stride)),
        *map(_info, map(_tensor, (scale1, shift, scale2))),
    )


_PLANS: dict[str, Callable[..., _C.Plan]] = {
    "global_avg_pool": _plan_global_avg_pool,
    "conv_transpose_global_avg_pool": _plan_global("conv_transpose_global_avg_pool", False),
    "conv_transpose_global_avg_pool_logsumexp": _plan_global("conv_transpose_global_avg_pool_logsumexp", True),
    "conv_transpose_avg_pool": _plan_avg_pool,
}
