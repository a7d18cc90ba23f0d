"""How close is close enough: one table, and the comparisons with the float64 reference that every test uses."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fused_kernels
from fused_kernels import reference


@dataclass(frozen=True)
class Tolerance:
    rounding: float  # of |exact|: the one rounding to the output's dtype
    accumulation: float  # of the sum of the terms' absolute values: what sums and products may add to that
    smallest: float  # half the smallest subnormal: the rounding of results below the normal range


TOLERANCES = {
    # Sums and products in float64, in chains of at most some hundred: a few dozen units of 2^-53.
    torch.float64: Tolerance(2.0**-53, 1e-14, 0.0),
    # Sums in float64, or pairwise in float32 and over 64 products at most: a few units of 2^-24 = 6e-8. A wrong
    # divisor, tap or border row is off by 1e-3 and more.
    torch.float32: Tolerance(2.0**-24, 1e-6, 2.0**-150),
    # As float32, which half types accumulate in, and one rounding to 11 bits.
    torch.float16: Tolerance(2.0**-11, 1e-6, 2.0**-25),
    # The same, and one rounding to 8 bits.
    torch.bfloat16: Tolerance(2.0**-8, 1e-6, 2.0**-134),
}
DTYPES = tuple(TOLERANCES)
EAGER_MARGIN = 1.0  # what the largest error may be of eager's: the design's rule

Arguments = dict[str, Any]


def _tensors_changed(arguments: Arguments, function: Callable[[Tensor], Tensor]) -> Arguments:
    return {name: function(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def exact(op: str, arguments: Arguments) -> Tensor:
    """The reference in float64, on the CPU."""
    arguments = _tensors_changed(arguments, lambda tensor: tensor.detach().to("cpu", torch.float64))
    return getattr(reference, op)(**arguments)


def magnitude(op: str, arguments: Arguments) -> Tensor:
    """The reference of the arguments' absolute values, which rounding errors are in proportion to, cancelled or not."""
    arguments = _tensors_changed(arguments, Tensor.abs)
    arguments |= {name: abs(value) for name, value in arguments.items() if isinstance(value, float)}
    if not op.endswith("_logsumexp"):
        return exact(op, arguments)
    # An error of a channel, or a relative one of the sum of exponentials, is an absolute one of the result.
    out_scale = arguments.pop("out_scale", 1.0)
    channels = exact(op.removesuffix("_logsumexp"), arguments).flatten(1)
    return (channels.nan_to_num(0, 0, 0).amax(1, keepdim=True) + 1 + math.log(channels.shape[1])) * out_scale


def eager(op: str, arguments: Arguments) -> Tensor | None:
    """The reference in the arguments' own dtype, or None where PyTorch has no kernel for it: in float64 it had one."""
    try:
        return getattr(reference, op)(**arguments)
    except RuntimeError:
        return None


def assert_close(ours: Tensor, exact: Tensor, magnitude: Tensor | None = None, nan_may_be: str = "NaN") -> None:
    """Finite values within the table's bounds; infinities and NaNs in the same places.

    `nan_may_be` "infinite" is the documented exception, for a single infinity that taps of both signs meet: summed
    first, they need not give NaN. "anything" is what then becomes of it behind a logsumexp.
    """
    tolerance = TOLERANCES[ours.dtype]
    actual = ours.detach().cpu().double()
    assert actual.shape == exact.shape
    expected = torch.where(exact.abs() < torch.finfo(ours.dtype).max, exact, exact.to(ours.dtype).double())
    magnitude = expected.abs() if magnitude is None else magnitude
    bound = tolerance.rounding * expected.abs() + tolerance.accumulation * magnitude + tolerance.smallest
    # An infinite bound is one of a channel that is infinite itself: nothing to compare.
    wrong = torch.where(expected.isfinite(), ~((actual - expected).abs() <= bound), actual != expected)
    allowed = {"NaN": actual.isnan(), "infinite": ~actual.isfinite(), "anything": torch.ones_like(wrong)}[nan_may_be]
    wrong &= ~(expected.isnan() & allowed)
    if wrong.any():
        worst = ((actual - expected).abs() / bound).nan_to_num(math.inf).where(wrong, 0).argmax()
        where = [int(i) for i in torch.unravel_index(worst, actual.shape)]
        values = (tensor.flatten()[worst].item() for tensor in (actual, expected, bound))
        raise AssertionError(
            "{} of {} values are wrong; at {} got {!r}, expected {!r} within {:.3g}".format(
                int(wrong.sum()), wrong.numel(), where, *values
            )
        )


def ulp(value: float, dtype: torch.dtype) -> float:
    """One unit in the last place of a value in a dtype."""
    info = torch.finfo(dtype)
    return info.eps * 2.0 ** math.floor(math.log2(max(abs(value), info.tiny)))


def assert_no_worse_than_eager(ours: Tensor, eager: Tensor, exact: Tensor) -> None:
    """The design's rule: the largest error is at most eager's, or one ulp of the largest output."""
    finite = exact.isfinite() & (exact.abs() < torch.finfo(ours.dtype).max)
    if not finite.any():
        return
    expected = exact[finite]
    error, eager_error = ((x.detach().cpu().double()[finite] - expected).abs().max().item() for x in (ours, eager))
    allowed = EAGER_MARGIN * max(eager_error, ulp(expected.abs().max().item(), ours.dtype))
    # NaN means that eager has lost a finite value.
    assert math.isnan(eager_error) or error <= allowed, (
        f"error {error:.3g}, eager's {eager_error:.3g}, ours may be {allowed:.3g}"
    )


def poison(device: torch.device, *sizes: int) -> None:
    """Frees blocks of NaN, so that an output element nobody wrote, or a workspace read too early, shows."""
    blocks = [torch.full((max(1, size),), math.nan, device=device) for size in (*sizes, 64, 1024, 16384, 262144)]
    del blocks


def check(op: str, *args: Any, nan_may_be: str = "NaN", against_eager: bool = True, **kwargs: Any) -> Tensor:
    """Runs an op, holds it against the float64 reference and against eager PyTorch, and returns its result."""
    arguments = inspect.signature(getattr(fused_kernels, op)).bind(*args, **kwargs).arguments
    input = arguments["input"]
    expected = exact(op, arguments)
    poison(input.device, expected.numel() * input.element_size() // 4)
    ours = getattr(fused_kernels, op)(**arguments)
    assert ours.dtype == input.dtype and ours.device == input.device
    assert_close(ours, expected, magnitude(op, arguments), nan_may_be)
    # In float64 the reference has errors of its own.
    plain = eager(op, arguments) if against_eager and input.dtype != torch.float64 else None
    if plain is not None:
        assert plain.shape == ours.shape
        assert_no_worse_than_eager(ours, plain, expected)
    return ours
