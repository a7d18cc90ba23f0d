"""The ops: for each a wrapper, its fake kernel and its rules for autograd, autocast and vmap. They compute in
``torch.ops.fused``.

Every op is forward-only: it runs with gradients on, and ``backward`` then raises. Checks are the kernels' own (from
``_C``), so an error reads the same from the op, the wrapper, a fake tensor, ``torch.vmap`` and ``torch.compile``.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter
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


def _tensor(factor: Factor, op: str, name: str) -> Tensor | None:
    """A Python number as the 0-d CPU tensor that the ops take by value."""
    if factor is None or isinstance(factor, Tensor):
        return factor
    try:
        return torch.scalar_tensor(factor, dtype=torch.float64, device="cpu")  # whatever the default device
    except (TypeError, RuntimeError):
        raise TypeError(f"fused::{op}: expected `{name}` to be a real number or a Tensor, but got {factor!r}") from None


def _refuse_tensor(out_scale: Any) -> None:
    """torch would make a number of it, and lose its gradient."""
    if isinstance(out_scale, Tensor):
        raise TypeError(
            "fused::conv_transpose_global_avg_pool_logsumexp: expected `out_scale` to be a number, but got a Tensor"
        )


def _list(size: Size) -> list[int]:
    # Sequence comes last, since it takes the longest.
    return [size] if isinstance(size, int) or not isinstance(size, (list, tuple, Sequence)) else list(size)


_PLAIN = {int, list, tuple}


def _convolution(stride: Size, padding: Size, output_padding: Size, groups: int, dilation: Size) -> tuple[Any, ...]:
    """These as the schemas take them: as lists, which suits symbolic numbers and NumPy's too, or else, at little cost,
    without the defaults at their end."""
    if (
        not torch.compiler.is_dynamo_compiling()  # under which a symbolic number says that it is an int
        and type(stride) in _PLAIN
        and type(padding) in _PLAIN
        and type(output_padding) is type(groups) is type(dilation) is int  # 1.0 is no 1
        and (output_padding, groups, dilation) == (0, 1, 1)
    ):
        return (stride, padding) if stride != 1 or padding != 0 else ()
    return _list(stride), _list(padding), _list(output_padding), groups, _list(dilation)


def _pool(kernel_size: Size, stride: Size) -> dict[str, Any]:
    """Likewise; but what is compiled spells the stride out, since AOTInductor makes None of an empty list."""
    if type(kernel_size) in _PLAIN and type(stride) is tuple and not stride and not torch.compiler.is_compiling():
        return {} if kernel_size == 2 else {"pool_kernel_size": kernel_size}
    kernel_size = _list(kernel_size)
    return {"pool_kernel_size": kernel_size, "pool_stride": _list(stride) or kernel_size}  # int[] takes no bare number


# ---- wrappers ----------------------------------------------------------------------------------------------------


def global_avg_pool(input: Tensor) -> Tensor:
    r"""Mean of every plane: ``input.mean(dim=(2, ...), keepdim=True)``.

    Args:
        input: (N, C, \*spatial) with 1 to 3 spatial dimensions; float32, float64, float16 or bfloat16. Half types
            accumulate in float32.

    Returns:
        (N, C, 1, ...) of the input's dtype, under autocast too. A plane without elements gives NaN. Both as in
        :func:`torch.mean`.

    Raises:
        RuntimeError: the rank or dtype is another.

    Example:
        >>> fused_kernels.global_avg_pool(torch.ones(2, 3, 7, 7)).shape
        torch.Size([2, 3, 1, 1])
    """
    op, guard = _enter(_OPS.global_avg_pool.default, (input,))
    with guard:
        return op(input)


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

    Under :class:`torch.autocast` the tensors are cast to the ambient dtype, which is then the output's, as PyTorch's
    convolutions do: all but those of float64, and a scale or shift that is taken by value. (The plain composition would
    promote to float32 where a scale or shift of that dtype comes in.) Nothing else is ever cast.

    Args:
        input: (N, C_in, \*spatial) with 1 to 3 spatial dimensions; float32, float64, float16 or bfloat16.
        weight: (C_in, C_out/groups, \*kernel_size), as in :class:`torch.nn.ConvTranspose2d`.
        bias: (C_out,) or None.
        stride, padding, output_padding, groups, dilation: as in :func:`torch.nn.functional.conv_transpose2d`; a number
            or a list of length 1 holds for every spatial dimension.
        scale, shift: 1 or C_out elements that broadcast over channels, such as (C_out,) or (C_out, 1, 1), of the
            input's dtype and device; or a number; or a 0-d CPU tensor, which is taken by value.

    Returns:
        (N, C_out, 1, ...) of the input's dtype, or autocast's.

    Raises:
        RuntimeError: an argument is not as described, or does not give an output of positive size.
        TypeError: a scale or shift is neither a real number nor a Tensor.

    Example:
        >>> x, weight = torch.ones(2, 3, 4, 4), torch.ones(3, 5, 3, 3)
        >>> fused_kernels.conv_transpose_global_avg_pool(x, weight).flatten()[0]  # 16 * 3 * 9 / 36
        tensor(12.)
    """
    name = "conv_transpose_global_avg_pool"
    scale, shift = _tensor(scale, name, "scale"), _tensor(shift, name, "shift")
    op, guard = _enter(_OPS.conv_transpose_global_avg_pool.default, (input, weight, bias, scale, shift))
    with guard:
        return op(
            input,
            weight,
            bias,
            *_convolution(stride, padding, output_padding, groups, dilation),
            scale=scale,
            shift=shift,
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
        (N, 1) of the input's dtype, or autocast's. A row of -inf gives -inf.

    Raises:
        RuntimeError: as in :func:`conv_transpose_global_avg_pool`.
        TypeError: likewise, or ``out_scale`` is a Tensor, whose gradient would be lost.

    Example:
        >>> x, weight = torch.zeros(2, 3, 4, 4), torch.ones(3, 8, 3, 3)
        >>> fused_kernels.conv_transpose_global_avg_pool_logsumexp(x, weight, out_scale=10.0)[0]  # 10 * log(8)
        tensor([20.7944])
    """
    _refuse_tensor(out_scale)
    name = "conv_transpose_global_avg_pool_logsumexp"
    scale, shift = _tensor(scale, name, "scale"), _tensor(shift, name, "shift")
    op, guard = _enter(_OPS.conv_transpose_global_avg_pool_logsumexp.default, (input, weight, bias, scale, shift))
    sizes = _convolution(stride, padding, output_padding, groups, dilation)
    with guard:
        if scale is None:  # most calls have none, and saying so costs the dispatcher a microsecond
            return op(input, weight, bias, *sizes, shift=shift, out_scale=out_scale)
        return op(input, weight, bias, *sizes, scale=scale, shift=shift, out_scale=out_scale)


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
        (N, C_out, \*pooled) of the input's dtype, or autocast's, which is followed as in
        :func:`conv_transpose_global_avg_pool`.

    Raises:
        RuntimeError: an argument is not as described, the pool is larger than the convolution's output, or its stride
            is no multiple of ``stride``.
        TypeError: a scale or shift is neither a real number nor a Tensor.

    Example:
        >>> x, weight = torch.ones(2, 3, 8, 8), torch.ones(3, 5, 3, 3)
        >>> fused_kernels.conv_transpose_avg_pool(x, weight, stride=2, padding=1).shape
        torch.Size([2, 5, 7, 7])
    """
    name = "conv_transpose_avg_pool"
    scale1, shift = _tensor(scale1, name, "scale1"), _tensor(shift, name, "shift")
    scale2 = _tensor(scale2, name, "scale2")
    op, guard = _enter(_OPS.conv_transpose_avg_pool.default, (input, weight, bias, scale1, shift, scale2))
    with guard:
        return op(
            input,
            weight,
            bias,
            *_convolution(stride, padding, output_padding, groups, dilation),
            **_pool(pool_kernel_size, pool_stride),
            scale1=scale1,
            shift=shift,
            scale2=scale2,
        )


# ---- checks and fake kernels -------------------------------------------------------------------------------------

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


_SIGNATURES = {name: inspect.signature(globals()[name]) for name in __all__ if name != "plan"}
# What the checks and plans take of an op's argument of some name, by what the wrapper's is; nothing of the float.
_FACTS: dict[Any, Callable[[Any, str, str], Any]] = {
    Tensor: lambda tensor, op, name: _info(tensor),
    Tensor | None: lambda tensor, op, name: _info(tensor),
    Factor: lambda factor, op, name: _info(_tensor(factor, op, name)),
    Size: lambda size, op, name: _list(size),
    int: lambda number, op, name: number,
}


def _facts(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """An op's arguments as the checks and plans take them: in their order, defaults included."""
    bound = _SIGNATURES[op].bind(*args, **kwargs)
    bound.apply_defaults()
    kinds = {name: parameter.annotation for name, parameter in _SIGNATURES[op].parameters.items()}
    return [_FACTS[kinds[name]](value, op, name) for name, value in bound.arguments.items() if kinds[name] in _FACTS]


_CHECKS: dict[str, Callable[..., list[Any]]] = {
    "global_avg_pool": _C.check_global_avg_pool,
    "conv_transpose_global_avg_pool": partial(
        _C.check_conv_transpose_global_avg_pool, "conv_transpose_global_avg_pool", False
    ),
    "conv_transpose_global_avg_pool_logsumexp": partial(
        _C.check_conv_transpose_global_avg_pool, "conv_transpose_global_avg_pool_logsumexp", True
    ),
    "conv_transpose_avg_pool": _C.check_conv_transpose_avg_pool,
}


def _check(op: str, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    """The output's sizes, or the op's error."""
    return _CHECKS[op](*_facts(op, args, kwargs))


def _fake(op: str) -> None:
    @torch.library.register_fake(f"fused::{op}")
    def _(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        sizes = _check(op, (input, *args), kwargs)  # which also sees to it that there is an input
        output = input.new_empty(sizes)
        if op == "conv_transpose_avg_pool" and _is_channels_last(input):
            return output.to(memory_format=_CHANNELS_LAST[input.dim()])
        return output


# ---- autograd: forward-only --------------------------------------------------------------------------------------

# The rules of torch.library (register_autograd, register_autocast, register_vmap) do not see keyword-only tensors
# (scale, shift), whose gradient would silently be lost; so all three are registered one level lower.
_registrations = torch.library.Library("fused", "IMPL")

# The op whose batching rule is running, where one is: what it calls has its arguments cast already, and errors name it.
_batching: ContextVar[str | None] = ContextVar("_batching", default=None)


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
        called = _batching.get() or name
        if torch._C._are_functorch_transforms_active():
            raise RuntimeError(_no_backward_message(called))
        apply: Callable[..., Tensor] = _ForwardOnly.apply
        return apply(called, call, *tensors)

    _registrations.impl(name, kernel, "Autograd", with_keyset=True)


# The rule above costs more than the rest of a small call, since every argument turns from C++ into Python and back. So
# where no gradient is needed, Python's callers skip it and go where it would send them: below Autograd.


def _autograd_matters(args: tuple[Any, ...]) -> bool:
    return bool(
        torch.is_inference_mode_enabled()  # is below Autograd already
        or (torch.is_grad_enabled() and torch._C._any_requires_grad(*args))
        or forward_ad._current_level >= 0
        # What these wrap may need a gradient.
        or torch._C._are_functorch_transforms_active()
        or has_torch_function(args)
    )


def _skipping_autograd(op: Any, /, *args: Any, **kwargs: Any) -> Any:
    _refuse_tensor(kwargs.get("out_scale"))
    if _autograd_matters((*args, *kwargs.values())):
        return op._op(*args, **kwargs)
    with torch._C._AutoDispatchBelowAutograd():
        return op._op(*args, **kwargs)


class _Overload(torch._ops.OpOverload):
    __call__ = _skipping_autograd


class _OverloadPacket(torch._ops.OpOverloadPacket):
    __call__ = _skipping_autograd


def _enter(op: Any, tensors: tuple[Tensor | None, ...]) -> tuple[Callable[..., Tensor], AbstractContextManager[Any]]:
    """What a wrapper calls within what, which costs less than passing its arguments on; it knows which are tensors."""
    if torch.compiler.is_dynamo_compiling():
        return op, nullcontext()
    return op._op, _NO_GUARD if _autograd_matters(tensors) else torch._C._AutoDispatchBelowAutograd()


_NO_GUARD = nullcontext()


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


# ---- autocast ----------------------------------------------------------------------------------------------------

_AUTOCAST_DEVICES = ("cpu", "cuda")
_FOLLOW_AUTOCAST = _CHECKS.keys() - {"global_avg_pool"}  # torch.mean does not either


def _cast(device_type: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments in the ambient dtype: those that torch casts for a convolution, so no float64 and no integers.

    Unlike there no cast is kept: torch keeps those of leaves that require a gradient until the outermost autocast ends,
    and misses what is written into them.
    """
    dtype = torch.get_autocast_dtype(device_type)

    def cast(value: Any) -> Any:
        if (
            not isinstance(value, Tensor)
            or value.dtype in (dtype, torch.float64)
            or not value.is_floating_point()
            or value.device.type != device_type
        ):
            return value
        return value.to(dtype)

    # Scales and shifts, which are keyword-only, may have any dtype where they are taken by value, and keep it.
    def is_by_value(value: Any) -> bool:
        return isinstance(value, Tensor) and value.is_cpu and value.dim() == 0

    return tuple(map(cast, args)), {n: v if is_by_value(v) else cast(v) for n, v in kwargs.items()}


def _follow_autocast(op: torch._ops.OpOverload, device_type: str) -> None:
    key = "Autocast" + torch._C._dispatch_key_for_device(device_type)
    below_autocast = torch._C._dispatch_keyset_full_after(getattr(torch._C.DispatchKey, key))

    def kernel(keyset: Any, *args: Any, **kwargs: Any) -> Tensor:
        if _batching.get() is None:
            args, kwargs = _cast(device_type, args, kwargs)
        return op.redispatch(keyset & below_autocast, *args, **kwargs)

    _registrations.impl(op._schema.name.removeprefix("fused::"), kernel, key, with_keyset=True)


# ---- vmap --------------------------------------------------------------------------------------------------------


def _batch(op: torch._ops.OpOverload) -> None:
    name = op._schema.name.removeprefix("fused::")
    names = [argument.name for argument in op._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Tensor:
        called = _batching.get()
        if called is None and name in _FOLLOW_AUTOCAST:  # while a scale that is taken by value still looks like one
            for device_type in filter(torch.is_autocast_enabled, _AUTOCAST_DEVICES):
                args, kwargs = _cast(device_type, args, kwargs)
        interpreter: Any = retrieve_current_functorch_interpreter()
        level, size = interpreter.level(), interpreter.batch_size()
        arguments: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
        dims: dict[str, int | None] = {}
        for argument, value in arguments.items():
            if isinstance(value, Tensor):
                arguments[argument], dims[argument] = torch._C._functorch._unwrap_batched(value, level)
        token = _batching.set(called or name)
        try:
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)):
                if all(dim is None for dim in dims.values()):  # those of another vmap are
                    return op(*args, **kwargs)
                shape = _check(name, args, kwargs)  # of one call, and its errors
                if size == 0:
                    output, dim = arguments["input"].new_empty(0, *shape), 0
                elif all(dim is None for argument, dim in dims.items() if argument != "input"):
                    output, dim = _fold_into_samples(op, arguments, dims)
                else:
                    output, dim = _fold_into_channels(op, size, arguments, dims)
        finally:
            _batching.reset(token)
        return torch._C._functorch._add_batch_dim(output, dim, level)

    _registrations.impl(name, kernel, "FuncTorchBatched")


# Both make one call of all, and say which dimension of its output tells them apart.


def _fold_into_samples(
    op: torch._ops.OpOverload, arguments: dict[str, Any], dims: dict[str, int | None]
) -> tuple[Tensor, int]:
    dim = dims["input"]
    assert dim is not None
    at = min(dim, 1)  # in front of the samples or behind them, where it needs no copy
    x = arguments["input"].movedim(dim, at)
    return op(**{**arguments, "input": x.flatten(0, 1)}).unflatten(0, x.shape[:2]), at


def _fold_into_channels(
    op: torch._ops.OpOverload, size: int, arguments: dict[str, Any], dims: dict[str, int | None]
) -> tuple[Tensor, int]:
    """With groups of their own; or, where all share the input, within the groups there are, so that it is read once."""
    dtype = arguments["input"].dtype
    factors = [argument for argument in dims if argument not in ("input", "weight", "bias")]
    by_value = {n for n in factors if arguments[n].is_cpu and arguments[n].dim() == (0 if dims[n] is None else 1)}
    # A logsumexp is taken afterwards, of each call's channels alone. What goes into it, and scales by value that become
    # a tensor here, must not be rounded to a half type.
    logsumexp = op is _OPS.conv_transpose_global_avg_pool_logsumexp.default
    rounds = logsumexp or any(dims[n] is not None and arguments[n].dtype != dtype for n in by_value)
    work = torch.float32 if rounds and dtype in (torch.float16, torch.bfloat16) else dtype
    arguments = {**arguments, **{n: arguments[n].to(work) for n in dims if n not in by_value}}

    x, weight, groups = arguments["input"], arguments["weight"], arguments.get("groups", 1)
    weight = weight.expand(size, *weight.shape) if dims["weight"] is None else weight.movedim(dims["weight"], 0)
    channels = weight.shape[2] * groups
    shared = dims["input"] is None
    if shared:
        arguments["weight"] = weight.movedim(0, 1).flatten(1, 2)
    else:
        arguments["input"] = x.movedim(dims["input"], 1).flatten(1, 2)
        arguments["weight"] = weight.flatten(0, 1)
        arguments["groups"] = groups * size

    for argument, dim in dims.items():
        value = arguments[argument]
        if argument in ("input", "weight"):
            continue
        if argument in factors and dim is None and value.numel() == 1:
            continue  # holds for all channels as it is
        rows = value.reshape(1, -1) if dim is None else value.movedim(dim, 0).reshape(size, -1)
        rows = rows.to(work).expand(size, channels)
        if shared:
            rows = rows.unflatten(1, (groups, -1)).movedim(1, 0)
        arguments[argument] = rows.flatten().to(x.device, non_blocking=True)

    if logsumexp:
        out_scale = arguments.pop("out_scale", 1.0)
        op = _OPS.conv_transpose_global_avg_pool.default
    output = op(**arguments)
    output = output.unflatten(1, (groups if shared else 1, size, -1)).movedim(2, 1).flatten(2, 3)
    if logsumexp:
        output = torch.logsumexp(output.flatten(2), 2, keepdim=True) * out_scale
    return output.to(dtype), 1  # (N, calls, C_out, ...)


# ---- registration ------------------------------------------------------------------------------------------------

for _name in _CHECKS:
    _fake(_name)
    _packet = getattr(_OPS, _name)
    _forward_only(_packet.default)
    _batch(_packet.default)
    if _name in _FOLLOW_AUTOCAST:
        for _device_type in _AUTOCAST_DEVICES:
            _follow_autocast(_packet.default, _device_type)
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
        TypeError: the input is no tensor.
        RuntimeError: the op would refuse the arguments.

    Example:
        >>> fused_kernels.plan("global_avg_pool", torch.empty(256, 2048, 7, 7, device="meta")).variant
        'tiles of planes'
    """
    if op not in _PLANS:
        raise ValueError(f"fused_kernels.plan: expected `op` to be one of {', '.join(_PLANS)}, but got {op!r}")
    if not isinstance(input, Tensor):
        raise TypeError(f"fused_kernels.plan: expected `input` to be a Tensor, but got {type(input).__name__}")
    if device is None:
        device = _device_properties(input.device)
    return _PLANS[op](device, input, _facts(op, (input, *args), kwargs))


def _device_properties(device: torch.device) -> _C.DeviceProperties:
    if device.type != "cuda":
        return _C.DeviceProperties()
    properties: Any = torch.cuda.get_device_properties(device)
    capability = properties.major * 10 + properties.minor
    return _C.DeviceProperties(
        capability,
        properties.multi_processor_count,
        properties.shared_memory_per_block_optin,
        _code_capability(capability, _library.build_info()["architectures"]),
    )


def _code_capability(capability: int, architectures: str) -> int:
    """What the code that a device runs was compiled for: its own generation, or else PTX of an older one."""
    found = [(int(major + minor), ptx) for major, minor, ptx in re.findall(r"(\d+)\.(\d)[a-z]?(\+PTX)?", architectures)]
    usable = [of for of, ptx in found if of <= capability and (ptx or of // 10 == capability // 10)]
    return max(usable, default=capability)


def _reads_channels_last(input: Tensor) -> bool:
    """Whether the global pools' kernels read the input as (N, *spatial, C); of any rank, unlike a memory format."""
    return not input.is_contiguous() and input.movedim(1, -1).is_contiguous()


def _plan_global(name: str, logsumexp: bool, device: _C.DeviceProperties, input: Tensor, facts: list[Any]) -> _C.Plan:
    return _C.plan_conv_transpose_global_avg_pool(device, _reads_channels_last(input), name, logsumexp, *facts)


_PLANS: dict[str, Callable[[_C.DeviceProperties, Tensor, list[Any]], _C.Plan]] = {
    "global_avg_pool": lambda device, input, facts: _C.plan_global_avg_pool(
        device, _reads_channels_last(input), *facts
    ),
    "conv_transpose_global_avg_pool": partial(_plan_global, "conv_transpose_global_avg_pool", False),
    "conv_transpose_global_avg_pool_logsumexp": partial(_plan_global, "conv_transpose_global_avg_pool_logsumexp", True),
    "conv_transpose_avg_pool": lambda device, input, facts: _C.plan_conv_transpose_avg_pool(
        device, _is_channels_last(input), *facts
    ),
}
