"""Every invalid argument set raises before anything runs, with the same words at every door."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from conftest import A0, A, B, G, Inputs, conv_arguments, cuda_only
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fused_kernels
from fused_kernels import reference


@dataclass(frozen=True)
class Drawn:
    """A tensor argument of random values; without a device, on that of the test."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    device: str | None = None

    def make(self, device: torch.device | str) -> Tensor:
        return torch.testing.make_tensor(self.shape, dtype=self.dtype, device=self.device or device, low=-2, high=2)


def tensor(*shape: int, **kwargs: Any) -> Drawn:
    return Drawn(shape, **kwargs)


# A valid call of each op; an entry of the table changes some of its arguments.
VALID: dict[str, dict[str, Any]] = {
    G: {"input": tensor(2, 4, 6, 5)},
    **{op: {"input": tensor(2, 4, 6, 5), "weight": tensor(4, 6, 3, 2), "bias": tensor(6)} for op in (A0, A, B)},
}
f64, f16, i64, c64 = torch.float64, torch.float16, torch.int64, torch.complex64
RANK = "expected `input` to have 3 to 5 dimensions (N, C, and 1 to 3 spatial ones), but got shape "
WEIGHT_RANK = (
    "expected `weight` to have 4 dimensions (C_in, C_out/groups, *kernel_size) for an `input` of "
    "shape [2, 4, 6, 5], but got shape "
)
WEIGHT_SIZE = "expected every size of `weight` to be at least 1, but got shape "
CHANNELS = (
    "expected `input` to have as many channels as `weight` has rows, {}, but got an `input` of shape {} "
    "and a `weight` of shape {}"
)
ARGUMENT = "expected `{}` to be one number or one for each of the 2 spatial dimensions, but got {}"
OUTPUT_PADDING = (
    "expected `output_padding` to be smaller than `stride` or `dilation`, but got output_padding {}, "
    "stride {} and dilation {}"
)
SIZE = (
    "expected arguments that give a transposed convolution of positive output size, but `padding` {} gives "
    "{} for an `input` of shape [2, 4, 6, 5]"
)
FACTOR = (
    "expected `{}` to have 1 or 6 elements and a shape that broadcasts over channels, such as [6] or "
    "[6, 1, 1], but got shape {}"
)
EMPTY = "expected every spatial size of `input` to be at least 1, but got shape "
POOL = "expected `pool_kernel_size` to be at most the transposed convolution's output, [8, 6], but got "
MULTIPLE = "expected `pool_stride` to be a multiple of `stride`, {}, but got {}"
DTYPE = "expected `input` to be float32, float64, float16 or bfloat16, but got "
SAME_DTYPE = "expected `{}` to have the dtype of `input`, float32, but got {}"
DEVICE = "expected `{}` to be on the device of `input`, {{device}}, but got meta"
CONV, CHAIN = (A0, A, B), (A0, A)

# (ops, changed arguments, message, whether PyTorch refuses the reference as well)
Entry = tuple[tuple[str, ...], dict[str, Any], str, bool]
TABLE: list[Entry] = [
    # rank and dtype of the input
    ((G, *CONV), {"input": tensor(4, 6)}, RANK + "[4, 6]", False),
    ((G,), {"input": tensor()}, RANK + "[]", False),
    ((G, *CONV), {"input": tensor(2, 4, 6, 5, 3, 2)}, RANK + "[2, 4, 6, 5, 3, 2]", False),
    ((G, *CONV), {"input": tensor(2, 4, 6, 5, dtype=i64)}, DTYPE + "int64", True),
    ((G, *CONV), {"input": tensor(2, 4, 6, 5, dtype=torch.bool)}, DTYPE + "bool", True),
    ((G, A0), {"input": tensor(2, 4, 6, 5, dtype=c64)}, DTYPE + "complex64", False),
    # weight
    (CONV, {"weight": None}, "expected `weight` to be a Tensor, but got None", True),
    (CONV, {"weight": tensor(4, 6, 3)}, WEIGHT_RANK + "[4, 6, 3]", True),
    (CONV, {"weight": tensor(4, 6, 3, 2, 1)}, WEIGHT_RANK + "[4, 6, 3, 2, 1]", True),
    (CONV, {"weight": tensor(5, 6, 3, 2)}, CHANNELS.format(5, [2, 4, 6, 5], [5, 6, 3, 2]), True),
    (CONV, {"input": tensor(2, 0, 6, 5)}, CHANNELS.format(4, [2, 0, 6, 5], [4, 6, 3, 2]), True),
    (CONV, {"weight": tensor(4, 6, 0, 2)}, WEIGHT_SIZE + "[4, 6, 0, 2]", True),
    (CONV, {"weight": tensor(4, 0, 3, 2)}, WEIGHT_SIZE + "[4, 0, 3, 2]", True),
    (CONV, {"input": tensor(2, 0, 6, 5), "weight": tensor(0, 6, 3, 2)}, WEIGHT_SIZE + "[0, 6, 3, 2]", True),
    (CONV, {"weight": tensor(4, 6, 3, 2, dtype=f64)}, SAME_DTYPE.format("weight", "float64"), True),
    (CONV, {"weight": tensor(4, 6, 3, 2, dtype=c64)}, SAME_DTYPE.format("weight", "complex64"), True),
    # bias
    (CONV, {"bias": tensor(5)}, "expected `bias` to have shape [6], but got [5]", True),
    (CONV, {"bias": tensor(1)}, "expected `bias` to have shape [6], but got [1]", True),
    (CONV, {"bias": tensor(6, 1, 1)}, "expected `bias` to have shape [6], but got [6, 1, 1]", True),
    (CONV, {"bias": tensor()}, "expected `bias` to have shape [6], but got []", True),
    (CONV, {"bias": tensor(6, dtype=f16)}, SAME_DTYPE.format("bias", "float16"), True),
    # groups
    (CONV, {"groups": 0}, "expected `groups` to be positive, but got 0", True),
    (CONV, {"groups": -2}, "expected `groups` to be positive, but got -2", True),
    (CONV, {"groups": 3}, "expected `groups` to divide the 4 input channels, but got 3", True),
    (CONV, {"groups": 2}, "expected `bias` to have shape [12], but got [6]", True),
    # stride, padding, output_padding, dilation
    (CONV, {"stride": 0}, "expected `stride` to be positive, but got [0]", True),
    (CONV, {"stride": (2, -1)}, "expected `stride` to be positive, but got [2, -1]", True),
    (CONV, {"stride": (1, 1, 1)}, ARGUMENT.format("stride", [1, 1, 1]), True),
    (CONV, {"stride": ()}, ARGUMENT.format("stride", []), True),
    (CHAIN, {"stride": 2**31}, f"expected `stride` to be positive and below {2**31}, but got [{2**31}]", False),
    (CONV, {"padding": -1}, "expected `padding` to be 0 or more, but got [-1]", True),
    (CONV, {"padding": (1, 1, 1)}, ARGUMENT.format("padding", [1, 1, 1]), True),
    (CONV, {"dilation": 0}, "expected `dilation` to be positive, but got [0]", True),
    (CONV, {"dilation": (1, 2, 3)}, ARGUMENT.format("dilation", [1, 2, 3]), True),
    (CONV, {"output_padding": -1}, "expected `output_padding` to be 0 or more, but got [-1]", True),
    (CONV, {"output_padding": (0, 0, 0)}, ARGUMENT.format("output_padding", [0, 0, 0]), True),
    (CONV, {"output_padding": 1}, OUTPUT_PADDING.format([1, 1], [1, 1], [1, 1]), True),
    (
        CONV,
        {"output_padding": (1, 3), "stride": (2, 3), "dilation": (1, 2)},
        OUTPUT_PADDING.format([1, 3], [2, 3], [1, 2]),
        True,
    ),
    # sizes
    (CONV, {"padding": (4, 0)}, SIZE.format([4, 0], [0, 6]), False),
    (CONV, {"padding": 5}, SIZE.format([5, 5], [-2, -4]), True),
    (CONV, {"input": tensor(2, 4, 0, 5)}, EMPTY + "[2, 4, 0, 5]", True),
    (CONV, {"input": tensor(0, 4, 6, 0)}, EMPTY + "[0, 4, 6, 0]", False),
    # scale and shift
    (CHAIN, {"scale": tensor(5)}, FACTOR.format("scale", [5]), True),
    (CHAIN, {"scale": tensor(2, 3)}, FACTOR.format("scale", [2, 3]), False),
    (CHAIN, {"shift": tensor(1, 1, 6)}, FACTOR.format("shift", [1, 1, 6]), False),
    (CHAIN, {"shift": tensor(6, 1)}, FACTOR.format("shift", [6, 1]), False),
    (CHAIN, {"shift": tensor(2, 6, 1, 1)}, FACTOR.format("shift", [2, 6, 1, 1]), True),
    (CHAIN, {"shift": tensor(1, 6, 1, 1, 1)}, FACTOR.format("shift", [1, 6, 1, 1, 1]), False),
    (CHAIN, {"shift": tensor(0)}, FACTOR.format("shift", [0]), False),
    (CHAIN, {"shift": tensor(6, dtype=f64)}, SAME_DTYPE.format("shift", "float64"), False),
    (CHAIN, {"scale": tensor(dtype=i64, device="cpu")}, DTYPE.replace("input", "scale") + "int64", False),
    ((B,), {"scale1": tensor(7)}, FACTOR.format("scale1", [7]), True),
    ((B,), {"shift": tensor(6, 6)}, FACTOR.format("shift", [6, 6]), True),
    ((B,), {"scale2": tensor(1, 1, 6, 1)}, FACTOR.format("scale2", [1, 1, 6, 1]), False),
    # pool
    ((B,), {"pool_kernel_size": 0}, "expected `pool_kernel_size` to be positive, but got [0]", True),
    ((B,), {"pool_kernel_size": (2, 2, 2)}, ARGUMENT.format("pool_kernel_size", [2, 2, 2]), True),
    ((B,), {"pool_kernel_size": ()}, ARGUMENT.format("pool_kernel_size", []), True),
    ((B,), {"pool_kernel_size": (9, 1)}, POOL + "[9, 1]", True),
    ((B,), {"pool_kernel_size": (2, 7)}, POOL + "[2, 7]", True),
    ((B,), {"pool_stride": (0,)}, "expected `pool_stride` to be positive, but got [0]", True),
    ((B,), {"pool_stride": (2, 2, 2)}, ARGUMENT.format("pool_stride", [2, 2, 2]), True),
    ((B,), {"stride": 2, "pool_stride": (3,)}, MULTIPLE.format([2, 2], [3, 3]), False),
    ((B,), {"stride": (1, 3), "pool_stride": (1, 2)}, MULTIPLE.format([1, 3], [1, 2]), False),
    ((B,), {"stride": 3, "pool_kernel_size": 2}, MULTIPLE.format([3, 3], [2, 2]), False),
    # devices; "meta" is one that every machine has
    (
        CONV,
        {"weight": tensor(4, 6, 3, 2, device="meta")},
        DEVICE.format("weight"),
        False,
    ),
    (
        CONV,
        {"bias": tensor(6, device="meta")},
        DEVICE.format("bias"),
        False,
    ),
    (
        CHAIN,
        {"scale": tensor(device="meta")},
        DEVICE.format("scale"),
        False,
    ),
    (
        (B,),
        {"scale2": tensor(6, device="meta")},
        DEVICE.format("scale2"),
        False,
    ),
]


def of_table(entries: list[tuple[str, dict[str, Any], str, bool]]) -> pytest.MarkDecorator:
    def show(value: Any) -> str:
        return f"{list(value.shape)} {value.dtype} {value.device or ''}" if isinstance(value, Drawn) else str(value)

    ids = [f"{op} {' '.join(f'{n}={show(v)}' for n, v in changes.items())}" for op, changes, *_ in entries]
    return pytest.mark.parametrize(("op", "changes", "message", "eager_refuses"), entries, ids=ids)


def arguments_of(op: str, changes: dict[str, Any], device: torch.device | str) -> dict[str, Any]:
    arguments = VALID[op] | changes
    return {name: value.make(device) if isinstance(value, Drawn) else value for name, value in arguments.items()}


def message_of(function: Any, arguments: dict[str, Any]) -> str:
    with pytest.raises(RuntimeError) as caught:
        function(**arguments)
    assert type(caught.value) is RuntimeError
    return str(caught.value)


@of_table([(op, *entry) for ops, *entry in TABLE for op in ops])
def test_invalid_arguments(
    device: torch.device, op: str, changes: dict[str, Any], message: str, eager_refuses: bool
) -> None:
    message = f"fused::{op}: {message}".replace("{device}", str(device))
    arguments = arguments_of(op, changes, device)
    direct, wrapper = getattr(torch.ops.fused, op), getattr(fused_kernels, op)
    assert message_of(direct, arguments) == message
    assert message_of(wrapper, arguments) == message
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in arguments.items()}
        assert message_of(direct, fakes) == message
        assert message_of(wrapper, fakes) == message
    if "cpu" not in str(changes) and "meta" not in str(changes):
        assert message_of(wrapper, arguments_of(op, changes, "meta")) == message
    assert message_of(lambda **arguments: fused_kernels.plan(op, **arguments), arguments) == message
    if eager_refuses:
        with pytest.raises((RuntimeError, TypeError)):
            getattr(reference, op)(**arguments_of(op, changes, "cpu"))
    # A valid call afterwards is none the worse for it.
    valid = arguments_of(op, {}, device)
    torch.testing.assert_close(wrapper(**valid), getattr(reference, op)(**valid))


def test_table_is_long_enough() -> None:
    changes = [sorted(changes.items()) for _, changes, *_ in TABLE]
    assert len(changes) >= 40 and all(one not in changes[:i] for i, one in enumerate(changes))
    assert {op for ops, *_ in TABLE for op in ops} == {G, A0, A, B}


@of_table([(op, *entry) for ops, *entry in TABLE for op in dict.fromkeys((ops[0], ops[-1]))])
def test_invalid_arguments_when_compiled(
    device: torch.device, op: str, changes: dict[str, Any], message: str, eager_refuses: bool
) -> None:
    """At the compiler's two doors; Dynamo wraps the error in one of its own, which is a RuntimeError and quotes it."""
    message = f"fused::{op}: {message}".replace("{device}", str(device))
    wrapper, direct = getattr(fused_kernels, op), getattr(torch.ops.fused, op)
    for function in (wrapper, direct):
        torch._dynamo.reset()
        compiled = torch.compile(lambda arguments: function(**arguments), backend="eager", fullgraph=True)  # noqa: B023
        with pytest.raises(RuntimeError) as caught:
            compiled(arguments_of(op, changes, device))
        assert message in str(caught.value)
    valid = arguments_of(op, {}, device)
    assert torch.equal(compiled(valid), wrapper(**valid))


@pytest.mark.parametrize(
    "change", [{"groups": 1.0}, {"dilation": 1.0}, {"output_padding": 0.0}, {"stride": 1.0}], ids=str
)
@pytest.mark.parametrize("op", CONV)
def test_numbers_are_integers(op: str, change: dict[str, float]) -> None:
    for function in (getattr(fused_kernels, op), getattr(torch.ops.fused, op)):
        with pytest.raises(RuntimeError, match=rf"fused::{op}\(\) Expected a value of type '(List\[)?int"):
            function(**arguments_of(op, change, "cpu"))


@cuda_only
@pytest.mark.parametrize(("op", "name"), [(op, name) for op in CONV for name in ("input", "weight", "bias")])
def test_mixed_devices(op: str, name: str) -> None:
    arguments = arguments_of(op, {}, "cuda")
    arguments[name] = arguments[name].cpu()
    message = message_of(getattr(fused_kernels, op), arguments)
    wrong, right = ("cuda:0", "cpu") if name == "input" else ("cpu", "cuda:0")
    name = "weight" if name == "input" else name
    assert message == f"fused::{op}: expected `{name}` to be on the device of `input`, {right}, but got {wrong}"
    compiled = torch.compile(lambda arguments: getattr(fused_kernels, op)(**arguments), backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError) as caught:
        compiled(arguments)
    assert message in str(caught.value)


@pytest.mark.parametrize("op", CONV)
def test_input_is_a_tensor(device: torch.device, op: str) -> None:
    arguments = arguments_of(op, {"input": None}, device)
    with FakeTensorMode() as mode:
        fakes = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    for called in (arguments, fakes, arguments_of(op, {"input": None}, "meta")):
        for function in (getattr(torch.ops.fused, op), getattr(fused_kernels, op)):
            assert message_of(function, called) == f"fused::{op}: expected `input` to be a Tensor, but got None"


def test_plan_names_the_ops() -> None:
    with pytest.raises(ValueError, match=r"expected `op` to be one of global_avg_pool, .*, but got 'mean'"):
        fused_kernels.plan("mean", torch.zeros(1, 1, 1))


@pytest.mark.parametrize("op", [G, A0, A, B])
@pytest.mark.parametrize("value", [None, 3.0, [1]], ids=str)
def test_plan_wants_a_tensor(op: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"expected `input` to be a Tensor, but got {type(value).__name__}"):
        fused_kernels.plan(op, value, *[torch.zeros(1, 1, 1)] * (op != G))


@pytest.mark.properties
@given(data=st.data())
def test_what_eager_refuses_is_refused(data: st.DataObject) -> None:
    """And by the fake kernels, too; what eager takes is taken, but for the documented limits."""
    draw = data.draw
    shapes = draw(conv_arguments())
    name = draw(st.sampled_from(["input", "weight", "stride", "padding", "output_padding", "groups", "dilation"]))
    if name == "groups":
        shapes[name] = draw(st.integers(-1, 4))
    else:  # one number of one argument is any
        values = list(shapes[name])
        values[draw(st.integers(0, len(values) - 1))] = draw(
            st.integers(-1 if name not in ("input", "weight") else 0, 6)
        )
        shapes[name] = tuple(values)
    dims = len(shapes["stride"])
    shapes["input"] = (1, *shapes["input"][1:])  # without a sample eager checks little
    shapes["input"] = torch.zeros(shapes["input"])
    shapes["weight"] = torch.zeros(draw(st.sampled_from([shapes["input"].shape[1], 2])), *shapes["weight"])
    pool = [draw(st.integers(1, 3)) for _ in range(dims)]
    pool_stride = [max(1, s) * draw(st.integers(1, 2)) for s in shapes["stride"]]
    for op, more in ((A0, {}), (A, {}), (B, {"pool_kernel_size": pool, "pool_stride": pool_stride})):
        try:
            expected = getattr(reference, op)(**shapes, **more).shape
        except RuntimeError:
            expected = None
        # The mean over no outputs at all is NaN in eager; here it is an error.
        positive = expected is not None and not torch.isnan(reference.conv_transpose_global_avg_pool(**shapes)).any()
        with FakeTensorMode() as mode:
            fakes = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in shapes.items()}
        for arguments in (shapes, fakes):
            if expected is None or not positive:
                message_of(getattr(fused_kernels, op), arguments | more)
            else:
                assert getattr(fused_kernels, op)(**arguments, **more).shape == expected


def test_default_device(inputs: Inputs) -> None:
    """Numbers are taken by value, wherever new tensors would be made."""
    x, w = inputs.input(2, 3, 4, 4), inputs.weight(3, 5, 3, 3)
    expected = fused_kernels.conv_transpose_avg_pool(x, w, scale1=0.5, shift=1.0)
    with torch.device("meta"):
        assert torch.equal(fused_kernels.conv_transpose_avg_pool(x, w, scale1=0.5, shift=1.0), expected)
        assert fused_kernels.plan("conv_transpose_global_avg_pool", x.to("meta"), w.to("meta"), scale=2.0).launches


@pytest.mark.parametrize("factor", [1j, "a"])
def test_factors_are_numbers(inputs: Inputs, factor: Any) -> None:
    x, w = inputs.input(2, 3, 4, 4), inputs.weight(3, 5, 3, 3)
    expected = re.escape(f"to be a real number or a Tensor, but got {factor!r}")
    with pytest.raises(TypeError, match="fused::conv_transpose_avg_pool: expected `scale1` " + expected):
        fused_kernels.conv_transpose_avg_pool(x, w, scale1=factor)
    with pytest.raises(TypeError, match="fused::conv_transpose_global_avg_pool: expected `shift` " + expected):
        fused_kernels.conv_transpose_global_avg_pool(x, w, shift=factor)


def test_sizes_beyond_64_bits(device: torch.device) -> None:
    x, w = torch.ones(1, 1, 1, device=device), torch.ones(1, 1, 2, device=device)
    with pytest.raises(RuntimeError, match=r"less than 2\*\*62 outputs per dimension, but got an `input` of shape"):
        fused_kernels.conv_transpose_global_avg_pool(x.expand(1, 1, 2**32), w, stride=2**31 - 1)
    with pytest.raises(RuntimeError, match=r"less than 2\*\*31 offsets, but got dilation \[2147483647\]"):
        fused_kernels.conv_transpose_avg_pool(x, w, dilation=2**31 - 1, pool_kernel_size=2**31 - 1)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.uint16], ids=str)
def test_dtypes_of_few_kernels(device: torch.device, dtype: torch.dtype) -> None:
    with pytest.raises(
        RuntimeError, match="fused::global_avg_pool: expected `input` to be float32, float64, float16 or "
    ):
        fused_kernels.global_avg_pool(torch.empty(1, 1, 2, 2, dtype=dtype, device=device))
