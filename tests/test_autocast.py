"""Under autocast the ops run in the ambient dtype, as PyTorch's convolutions do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import A0, A, B, G, Inputs, cuda_only
from test_integration import CALLS, Arguments, make
from torch import Tensor
from torch._functorch import config as functorch_config
from torch._subclasses import FakeTensorMode

import fused_kernels
from fused_kernels import reference

HALVES = (torch.float16, torch.bfloat16)
every_half = pytest.mark.parametrize("half", HALVES, ids=str)
every_chain = pytest.mark.parametrize("call", [call for call in CALLS if CALLS[call][0] != G])


def autocast(inputs: Inputs, dtype: torch.dtype, **kwargs: Any) -> torch.autocast:
    return torch.autocast(inputs.device.type, dtype, **kwargs)


def to(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """In another dtype, but for scales and shifts that are taken by value."""
    return {n: v.to(dtype) if isinstance(v, Tensor) and (v.dim() or v.is_cuda) else v for n, v in arguments.items()}


def same(ours: Tensor, expected: Tensor) -> bool:
    return ours.dtype == expected.dtype and ours.stride() == expected.stride() and torch.equal(ours, expected)


@every_chain
@every_half
def test_is_the_call_in_the_ambient_dtype(inputs: Inputs, call: str, half: torch.dtype) -> None:
    """By every door, with and without gradients, from float32 and from the other half type."""
    op, arguments = make(call, inputs)
    other = HALVES[half == torch.float16]
    for given in (arguments, to(arguments, half), to(arguments, other)):
        expected = op(**to(given, half))
        wanting = given | {"weight": given["weight"].clone().requires_grad_()}
        packet = getattr(torch.ops.fused, CALLS[call][0])
        for door in (op, packet, packet.default):
            for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
                with autocast(inputs, half), mode():
                    assert same(door(**given), expected)
                    output = door(**wanting)
                assert same(output.detach(), expected) and output.requires_grad == (mode is torch.enable_grad)
        with pytest.raises(RuntimeError, match=f"fused::{CALLS[call][0]} is forward-only"), autocast(inputs, half):
            door(**wanting).sum().backward()
        assert wanting["weight"].grad is None


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES, torch.float64], ids=str)
@every_half
def test_global_avg_pool_is_left_alone(inputs: Inputs, dtype: torch.dtype, half: torch.dtype) -> None:
    x = inputs.input(2, 3, 5, 5, dtype=dtype)
    expected = fused_kernels.global_avg_pool(x)
    with autocast(inputs, half):
        assert reference.global_avg_pool(x).dtype == dtype
        for ours in (fused_kernels.global_avg_pool(x), torch.vmap(fused_kernels.global_avg_pool)(x[None])[0]):
            assert same(ours, expected)


@every_half
def test_nested_and_disabled_regions(inputs: Inputs, half: torch.dtype) -> None:
    op, arguments = make("B, staged", inputs)
    plain, other = op(**arguments), HALVES[half == torch.float16]
    with autocast(inputs, half):
        assert op(**arguments).dtype == half
        with autocast(inputs, half, enabled=False):
            assert same(op(**arguments), plain)
            with pytest.raises(RuntimeError, match="expected `weight` to have the dtype of `input`"):
                op(**arguments | {"input": arguments["input"].to(half)})
            with autocast(inputs, other):
                assert op(**arguments).dtype == other
        assert op(**arguments).dtype == half
        with autocast(inputs, other):
            assert op(**arguments).dtype == other
        assert op(**arguments).dtype == half
    assert same(op(**arguments), plain)


@cuda_only
def test_another_devices_autocast_does_not_matter() -> None:
    for device, other in (("cuda", "cpu"), ("cpu", "cuda")):
        op, arguments = make("A, small", Inputs(1, torch.device(device)))
        expected = op(**arguments)
        with torch.autocast(other, torch.bfloat16):
            assert same(op(**arguments), expected)
            with torch.autocast(device, torch.float16):
                assert op(**arguments).dtype == torch.float16


@every_chain
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_changed_parameters_are_seen_within_one_autocast(inputs: Inputs, call: str, mode: Callable[[], Any]) -> None:
    """Those too whose casts torch keeps for its own ops: float32 leaves that require a gradient."""
    op, arguments = make(call, inputs)
    names = [name for name, value in arguments.items() if isinstance(value, Tensor) and name != "input"]
    leaves = arguments | {name: torch.nn.Parameter(arguments[name]) for name in names}
    with autocast(inputs, torch.bfloat16), mode():
        torch.mm(leaves["weight"].flatten(1).T, leaves["weight"].flatten(1))  # fills torch's cache
        op(**leaves)
        for change in (lambda leaf: leaf.mul_(-1.5), lambda leaf: leaf.data.add_(1)):
            for name in names:
                with torch.no_grad():
                    change(leaves[name])
            assert same(op(**leaves).detach(), op(**to(leaves, torch.bfloat16)).detach())


def outcome(function: Callable[[], Tensor]) -> torch.dtype | None:
    try:
        return function().dtype
    except (RuntimeError, NotImplementedError):
        return None


MIXED = (torch.float32, *HALVES, torch.float64, torch.int64)


@pytest.mark.parametrize("ambient", [None, *HALVES], ids=str)
def test_mixed_dtypes(inputs: Inputs, ambient: torch.dtype | None) -> None:
    """What a convolution takes is taken, and gives the same dtype; what it refuses is refused in words."""
    op = fused_kernels.conv_transpose_global_avg_pool

    def cast(dtype: torch.dtype) -> torch.dtype:
        return ambient if ambient and dtype in (torch.float32, *HALVES) else dtype

    for of_x in MIXED:
        for of_w in MIXED:
            for of_b in (None, *MIXED):
                x, w = inputs.integers(2, 3, 5, 5, dtype=of_x), inputs.integers(3, 4, 3, 3, dtype=of_w)
                b = None if of_b is None else inputs.integers(4, dtype=of_b)
                given = [cast(dtype) for dtype in (of_x, of_w, of_b) if dtype is not None]
                with autocast(inputs, ambient or torch.bfloat16, enabled=ambient is not None):
                    convolution = outcome(lambda: torch.nn.functional.conv_transpose2d(x, w, b))  # noqa: B023
                    ours = outcome(lambda: op(x, w, b))  # noqa: B023
                    if ours is None:
                        with pytest.raises(RuntimeError, match="fused::conv_transpose_global_avg_pool: expected `"):
                            op(x, w, b)
                taken = len(set(given)) == 1 and given[0] != torch.int64
                assert ours == (given[0] if taken else None)
                if taken or convolution is None:
                    assert ours == convolution
                elif of_x != torch.int64:  # some convolutions do not look at the bias's dtype
                    assert cast(of_x) == cast(of_w)


@every_half
@pytest.mark.parametrize(("op", "name"), [(A0, "scale"), (A0, "shift"), (A, "shift"), (B, "scale1"), (B, "scale2")])
def test_dtypes_of_factors(inputs: Inputs, op: str, name: str, half: torch.dtype) -> None:
    function = getattr(fused_kernels, op)
    x, w = inputs.input(2, 3, 6, 6), inputs.weight(3, 4, 3, 3)
    factor = inputs.channels(4)
    with autocast(inputs, half):
        for dtype in (torch.float32, *HALVES):
            given = factor.to(dtype)
            assert same(function(x, w, **{name: given}), function(x.to(half), w.to(half), **{name: given.to(half)}))
        for dtype in (torch.float64, torch.int64):
            with pytest.raises(RuntimeError, match=f"fused::{op}: expected `{name}` to have the dtype of `input`"):
                function(x, w, **{name: factor.to(dtype)})
        # By value: not rounded to the ambient dtype.
        for given in (0.7, torch.tensor(0.7), torch.tensor(0.7, dtype=torch.float64)):
            ours = function(x, w, **{name: given})
            with autocast(inputs, half, enabled=False):
                assert same(ours, function(x.to(half), w.to(half), **{name: given}))


@every_chain
def test_float64_stays(inputs: Inputs, call: str) -> None:
    op, arguments = make(call, inputs, torch.float64)
    expected = op(**arguments)
    with autocast(inputs, torch.bfloat16):
        assert same(op(**arguments), expected)


@every_chain
@every_half
def test_fake_tensors_agree(inputs: Inputs, call: str, half: torch.dtype) -> None:
    op, arguments = make(call, inputs)
    for dtypes in ({}, {"weight": torch.bfloat16}, {"input": torch.float16}):
        given = {n: v.to(dtypes.get(n, v.dtype)) if isinstance(v, Tensor) else v for n, v in arguments.items()}
        with autocast(inputs, half):
            ours = op(**given)
            with FakeTensorMode() as mode:
                fake = op(**{n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in given.items()})
        assert (ours.shape, ours.dtype, ours.stride()) == (fake.shape, fake.dtype, fake.stride())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last_3d])
def test_memory_format_is_kept(inputs: Inputs, memory_format: torch.memory_format) -> None:
    op, arguments = make("B, staged", inputs)
    arguments["input"] = arguments["input"].to(memory_format=memory_format)
    with autocast(inputs, torch.bfloat16):
        assert op(**arguments).is_contiguous(memory_format=memory_format)


@every_chain
@every_half
def test_compiled_agrees(inputs: Inputs, call: str, half: torch.dtype) -> None:
    """Autocast around the compiled function, and within it."""
    op, arguments = make(call, inputs)

    def within(arguments: Arguments) -> tuple[Tensor, ...]:
        with autocast(inputs, half):
            first = op(**arguments)
            with autocast(inputs, half, enabled=False):
                second = op(**arguments)
        return first, second, op(**arguments)

    torch._dynamo.reset()
    compiled = torch.compile(within, backend="aot_eager", fullgraph=True)
    for ours, expected in zip(compiled(arguments), within(arguments), strict=True):
        assert same(ours, expected)

    compiled = torch.compile(lambda arguments: op(**arguments), backend="aot_eager", fullgraph=True)
    for dtype in (half, None, HALVES[half == torch.float16]):
        with autocast(inputs, dtype or half, enabled=dtype is not None):
            assert same(compiled(arguments), op(**arguments))


def test_callers_from_outside_python(inputs: Inputs) -> None:
    """TorchScript's interpreter calls as C++ does."""

    @torch.jit.script
    def pool(x: Tensor, w: Tensor) -> Tensor:
        return torch.ops.fused.conv_transpose_avg_pool(x, w)

    x, w = inputs.input(2, 3, 5, 5), inputs.weight(3, 4, 3, 3)
    with autocast(inputs, torch.bfloat16):
        assert same(pool(x, w), fused_kernels.conv_transpose_avg_pool(x.bfloat16(), w.bfloat16()))


@pytest.mark.slow
@every_half
def test_inductor_agrees(inputs: Inputs, half: torch.dtype) -> None:
    op, arguments = make("B, staged", inputs)
    torch._dynamo.reset()
    compiled = torch.compile(lambda arguments: op(**arguments), fullgraph=True)
    # In torch 2.10 the key of this cache lacks autocast's dtype, for torch's convolutions as well.
    with functorch_config.patch(enable_autograd_cache=False), autocast(inputs, half):
        for _ in range(2):
            assert same(compiled(arguments), op(**arguments))
            arguments["weight"].mul_(-1.5)


def test_compiled_backward_raises(inputs: Inputs) -> None:
    op, arguments = make("A, small", inputs)
    torch._dynamo.reset()
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    arguments["weight"].requires_grad_()
    with autocast(inputs, torch.bfloat16):
        output = compiled(**arguments)
    assert output.dtype == torch.bfloat16 and output.requires_grad
    with pytest.raises(RuntimeError, match="forward-only"):
        output.sum().backward()


@every_half
def test_exported_agrees(inputs: Inputs, half: torch.dtype) -> None:
    op, arguments = make("A0, border", inputs)
    x = arguments.pop("input")

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            with autocast(inputs, half):
                return op(x, **arguments)

    assert same(torch.export.export(Model(), (x,)).module()(x), Model()(x))


@every_half
def test_modules(inputs: Inputs, half: torch.dtype) -> None:
    """Without gradients one fused op in the ambient dtype; with them the plain composition, which trains."""
    model = fused_kernels.nn.ConvTranspose3dAvgPool(3, 4, 3, 2, 1, 0.5, 1.0, (4, 1, 1, 1)).to(inputs.device)
    x = inputs.input(2, 3, 3, 4, 4)
    with autocast(inputs, half):
        with torch.no_grad():
            ours = model(x)
        output = model(x)
    assert ours.dtype == half
    torch.testing.assert_close(ours.float(), output.detach().float(), rtol=0.05, atol=0.05)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
