"""torch.vmap over any of the tensors: one call, equal to the loop."""

from __future__ import annotations

import copy
import itertools
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import A0, A, B, G, Inputs, Log, every_dtype
from hypothesis import given
from hypothesis import strategies as st
from test_autocast import HALVES, every_half, same
from test_integration import CALLS, Arguments, every_call, make
from tolerances import assert_close, exact, magnitude
from torch import Tensor
from torch._subclasses import FakeTensorMode

import fused_kernels

# No test may see the slow loop.
pytestmark = pytest.mark.filterwarnings("error:There is a performance drop")
# But for one whose float64 reference takes long: its kernels, and groups, are in others.
every_small_call = pytest.mark.parametrize("call", [call for call in CALLS if call != "A0, large"])
every_small_chain = pytest.mark.parametrize("call", [c for c in CALLS if c != "A0, large" and CALLS[c][0] != G])
# What vmap makes of channels_last inputs, and what a slice of them is, may be summed in another order.
CHANNELS_LAST = ("G, channels", "G, columns", "A0, channels", "A0, columns", "B, pixels")
every_contiguous_call = pytest.mark.parametrize("call", [call for call in CALLS if call not in CHANNELS_LAST])

Dims = dict[str, int]


def tensors(arguments: Arguments) -> list[str]:
    return [name for name, value in arguments.items() if isinstance(value, Tensor)]


def batch(calls: list[Arguments], dims: Dims) -> Arguments:
    """The calls' arguments as one, stacked where the dims say."""
    return calls[0] | {name: torch.stack([call[name] for call in calls], dim) for name, dim in dims.items()}


def loop(arguments: Arguments, dims: Dims) -> Iterator[Arguments]:
    """The arguments of each call; what is a 0-d tensor there is one of the same device."""
    for values in zip(*(arguments[name].unbind(dim) for name, dim in dims.items()), strict=True):
        yield arguments | dict(zip(dims, values, strict=True))


def vmapped(op: Callable[..., Tensor], arguments: Arguments, dims: Dims, out_dims: int = 0) -> Tensor:
    mapped = {name: arguments[name] for name in dims}
    rest = {name: value for name, value in arguments.items() if name not in dims}
    return torch.vmap(lambda mapped: op(**mapped, **rest), ({**dims},), out_dims)(mapped)


def holds(op: str, arguments: Arguments, dims: Dims) -> Tensor:
    """Runs an op under vmap and holds each call's result to what is asked of it alone."""
    ours = vmapped(getattr(fused_kernels, op), arguments, dims)
    calls = list(loop(arguments, dims))
    assert len(ours) == len(calls) and ours.dtype == arguments["input"].dtype
    for result, call in zip(ours, calls, strict=True):
        assert_close(result, exact(op, call), magnitude(op, call))
        assert result.shape == getattr(fused_kernels, op)(**call).shape
    return ours


# ---- values --------------------------------------------------------------------------------------------------------


@every_small_call
@every_dtype
def test_over_every_choice_of_tensors(inputs: Inputs, call: str, dtype: torch.dtype) -> None:
    calls = [make(call, inputs, dtype)[1] for _ in range(3)]
    first = calls[0]
    names = tensors(first)
    choices = {
        ("input",),
        ("weight",),
        ("input", "weight"),
        tuple(names),
        tuple(names[1:]),
        *((name,) for name in names[2:]),
        ("input", *names[2:]),
    }
    for choice in sorted(choices):
        if set(choice) <= set(names) and choice:
            holds(CALLS[call][0], batch(calls, dict.fromkeys(choice, 0)), dict.fromkeys(choice, 0))


@every_contiguous_call
def test_over_the_input_alone_has_the_same_bits(inputs: Inputs, call: str) -> None:
    """As samples: a result does not depend on the batch that it stands in. And one op, without a copy of the input
    where the dimension is one of the first two."""
    op, first = make(call, inputs)
    calls = [first, *(make(call, inputs)[1] for _ in range(2))]
    for dim in (0, 1, 2, -1):
        arguments = batch(calls, {"input": dim})
        with Log() as log:
            ours = vmapped(op, arguments, {"input": dim})
        assert torch.equal(ours, torch.stack([op(**one) for one in loop(arguments, {"input": dim})]))
        ran = [name for name in log.ops if not re.match(r"aten\..*(view|permute|transpose)", name)]
        if dim in (0, 1):
            assert ran == [f"fused.{CALLS[call][0]}.default"]


@every_small_call
def test_unusual_dims(inputs: Inputs, call: str) -> None:
    op, first = make(call, inputs)
    calls = [first, *(make(call, inputs)[1] for _ in range(2))]
    for offset in range(1, 4):
        dims = {n: (i + offset) % (first[n].dim() + 1) for i, n in enumerate(tensors(first))}
        if offset == 3:
            dims = {n: dim - first[n].dim() - 1 for n, dim in dims.items()}
        arguments = batch(calls, dims)
        ours = holds(CALLS[call][0], arguments, dims)
        for out_dim in (1, -1):
            assert torch.equal(vmapped(op, arguments, dims, out_dim).movedim(out_dim, 0), ours)


@every_small_chain
def test_nested(inputs: Inputs, call: str) -> None:
    """A grid of inputs and weights, with a scale for each pair; in both orders."""
    op, first = make(call, inputs)
    calls = [first, *(make(call, inputs)[1] for _ in range(5))]
    xs, ws = (torch.stack([one[name] for one in calls[:2]]) for name in ("input", "weight"))
    shift = torch.stack([one["shift"] for one in calls]).unflatten(0, (2, 3))[:, :2]
    rest = {n: v for n, v in first.items() if n not in ("input", "weight", "shift")}

    def one(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
        return op(x, w, shift=s, **rest)

    pairs = torch.vmap(torch.vmap(one, (None, 0, 0)), (0, None, 0))(xs, ws, shift)
    others = torch.vmap(torch.vmap(one, (0, None, 0)), (None, 0, 1))(xs, ws, shift).movedim(0, 1)
    for i, j in itertools.product(range(2), range(2)):
        arguments = {**rest, "input": xs[i], "weight": ws[j], "shift": shift[i, j]}
        for ours in (pairs[i, j], others[i, j]):
            assert_close(ours, exact(CALLS[call][0], arguments), magnitude(CALLS[call][0], arguments))


@every_small_call
def test_within_a_vmap_over_something_else(inputs: Inputs, call: str) -> None:
    """Tensors that only the outer of two maps over; and chunks of calls."""
    op, arguments = make(call, inputs)
    x = arguments.pop("input")
    xs, ys = torch.stack([x, x.flip(0)]), inputs.channels(3)
    expected = torch.stack([op(x, **arguments) for x in xs])
    inner = torch.vmap(lambda x, y: op(x, **arguments) + 0 * y, (None, 0))
    assert torch.equal(torch.vmap(inner, (0, None))(xs, ys), expected[:, None].expand(-1, 3, *expected.shape[1:]))
    assert torch.equal(torch.vmap(lambda x: op(x, **arguments), chunk_size=1)(xs), expected)


@pytest.mark.parametrize("form", [(), (1,), (6,), (6, 1, 1), (1, 6, 1, 1), (1, 1, 1, 1)], ids=str)
@pytest.mark.parametrize(
    ("op", "name"), [(A0, "scale"), (A0, "shift"), (A, "shift"), (B, "scale1"), (B, "shift"), (B, "scale2")]
)
@pytest.mark.parametrize("groups", [1, 2])
def test_forms_of_factors(inputs: Inputs, op: str, name: str, form: tuple[int, ...], groups: int) -> None:
    calls = [
        {
            "input": inputs.input(2, 4, 5, 5),
            "weight": inputs.weight(4, 6 // groups, 3, 2),
            "bias": inputs.channels(6),
            "groups": groups,
            name: inputs.channels(*form),
        }
        for _ in range(3)
    ]
    for choice in ([name], ["weight"], ["input", "weight"], ["weight", "bias", name], ["input", name]):
        dims = dict.fromkeys(choice, 0)
        holds(op, batch(calls, dims), dims)


@every_dtype
@pytest.mark.parametrize("factor_dtype", [torch.float32, torch.float64], ids=str)
def test_factors_by_value(inputs: Inputs, dtype: torch.dtype, factor_dtype: torch.dtype) -> None:
    """Each call's is a 0-d CPU tensor of a dtype of its own, and is not rounded to the input's."""
    x, w = inputs.input(2, 3, 5, 5, dtype=dtype), inputs.weight(3, 4, 3, 3, dtype=dtype)
    scale = inputs.channels(3, dtype=factor_dtype).cpu()
    for op, name in ((A0, "scale"), (A, "shift"), (B, "scale2")):
        holds(op, {"input": x, "weight": w, name: scale}, {name: 0})
        holds(op, {"input": torch.stack([x] * 3), "weight": w, name: scale}, {"input": 0, name: 0})
        holds(op, {"input": torch.stack([x] * 3), "weight": w, name: scale[0]}, {"input": 0})
        holds(op, {"input": x, "weight": torch.stack([w] * 3), name: scale[0]}, {"weight": 0})


def test_intermediate_beyond_the_largest_half(device: torch.device) -> None:
    """The channels that a logsumexp is of are never rounded to the input's dtype."""
    x = torch.full((3, 2, 1, 2, 2), 60000.0, dtype=torch.float16, device=device)
    w = torch.full((3, 1, 4, 1, 1), 2.0, dtype=torch.float16, device=device)
    op = fused_kernels.conv_transpose_global_avg_pool_logsumexp
    ours = torch.vmap(lambda x, w: op(x, w, out_scale=0.125))(x, w)
    assert torch.equal(ours, torch.full_like(ours, (120000 + math.log(4)) / 8))
    assert torch.equal(op(x[0], w[0], out_scale=0.125), ours[0])


def test_rows_of_infinities(inputs: Inputs) -> None:
    op = fused_kernels.conv_transpose_global_avg_pool_logsumexp
    x, w = inputs.input(3, 2, 3, 4, 4), inputs.weight(3, 5, 3, 3)
    shift = torch.stack([torch.full((5,), value, device=x.device) for value in (-math.inf, math.inf, math.nan)])
    ours = torch.vmap(lambda x, shift: op(x, w, shift=shift))(x, shift)
    assert (ours[0] == -math.inf).all() and (ours[1] == math.inf).all() and ours[2].isnan().all()


@pytest.mark.properties
@given(data=st.data())
def test_random_dims(data: st.DataObject) -> None:
    """Any of the tensors, mapped at any dimension, for any number of samples, calls and groups."""
    draw = data.draw
    inputs = Inputs(draw(st.integers(0, 2**32)), torch.device("cpu"))
    op = draw(st.sampled_from([G, A0, A, B]))
    dims, groups, per_group = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    channels = groups * per_group
    factors = {A0: ["scale", "shift"], A: ["scale", "shift"], B: ["scale1", "shift", "scale2"], G: []}[op]
    shapes: dict[str, tuple[int, ...]] = {
        "input": (draw(st.integers(0, 3)), groups * draw(st.integers(1, 2)), *[draw(st.integers(2, 6))] * dims)
    }
    if op != G:
        shapes["weight"] = (shapes["input"][1], per_group, *[draw(st.integers(2, 3))] * dims)
        for name in draw(st.sets(st.sampled_from(["bias", *factors]))):
            forms = [(channels,)] if name == "bias" else [(), (1,), (channels,), (1, channels, *[1] * dims)]
            shapes[name] = draw(st.sampled_from(forms))
    mapped = sorted(draw(st.sets(st.sampled_from(sorted(shapes)), min_size=1)))
    in_dims = {name: draw(st.integers(-len(shapes[name]) - 1, len(shapes[name]))) for name in mapped}
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16]))
    draws = {"input": inputs.input, "weight": inputs.weight}
    calls = [
        {name: draws.get(name, inputs.channels)(*shape, dtype=dtype) for name, shape in shapes.items()}
        | ({} if op == G else {"groups": groups})
        for _ in range(draw(st.integers(1, 3)))
    ]
    holds(op, batch(calls, in_dims), in_dims)


@every_call
def test_without_calls(inputs: Inputs, call: str) -> None:
    op, arguments = make(call, inputs)
    shape = op(**arguments).shape
    for choice in ({"input"}, set(tensors(arguments)[1:])):
        none = {name: value[None][:0] if name in choice else value for name, value in arguments.items()}
        if choice:
            assert vmapped(op, none, dict.fromkeys(choice, 0)).shape == (0, *shape)


# ---- dispatch ------------------------------------------------------------------------------------------------------

WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "rank": (G, {"input": (3, 4, 5)}, r"to have 3 to 5 dimensions .* but got shape \[4, 5\]"),
    "weight's rank": (A, {"weight": (3, 4, 6, 3)}, r"`weight` to have 4 dimensions .* but got shape \[4, 6, 3\]"),
    "channels": (
        A0,
        {"weight": (3, 5, 6, 3, 2)},
        r"as `weight` has rows, 5, .* and a `weight` of shape \[5, 6, 3, 2\]",
    ),
    "bias": (B, {"bias": (3, 5)}, r"`bias` to have shape \[6\], but got \[5\]"),
    "0-d bias": (A, {"bias": (3,)}, r"`bias` to have shape \[6\], but got \[\]"),
    "shift": (A0, {"shift": (3, 2, 3)}, r"`shift` to have 1 or 6 elements .* but got shape \[2, 3\]"),
    "scale": (B, {"scale2": (3, 18)}, r"`scale2` to have 1 or 6 elements .* but got shape \[18\]"),
    "weight of another's size": (A, {"weight": (3, 4, 0, 3, 2)}, r"`weight` to be at least 1, .* \[4, 0, 3, 2\]"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_errors_are_those_of_one_call(inputs: Inputs, wrong: str) -> None:
    op, shapes, words = WRONG[wrong]
    valid = {"input": (2, 4, 6, 5)} | ({} if op == G else {"weight": (4, 6, 3, 2)})
    arguments = {name: inputs.to(torch.zeros(shape), torch.float32) for name, shape in (valid | shapes).items()}
    with pytest.raises(RuntimeError) as alone:
        getattr(fused_kernels, op)(**next(loop(arguments, dict.fromkeys(shapes, 0))))
    for together in (shapes, {"input": 0} | shapes):
        if together is not shapes and op != G:
            arguments["input"] = arguments["input"].expand(3, *valid["input"])
        with pytest.raises(RuntimeError, match=rf"fused::{op}: expected .*{words}") as caught:
            vmapped(getattr(fused_kernels, op), arguments, dict.fromkeys(together, 0))
        assert str(caught.value) == str(alone.value)


def test_mixed_dtypes_raise(inputs: Inputs) -> None:
    x, w = inputs.input(2, 3, 5, 5), inputs.weight(4, 3, 6, 3, 3, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="expected `weight` to have the dtype of `input`, float32, but got float64"):
        torch.vmap(fused_kernels.conv_transpose_global_avg_pool, (None, 0))(x, w)


@every_call
def test_gradients_raise_and_name_the_op(inputs: Inputs, call: str) -> None:
    op, first = make(call, inputs)
    calls = [first, make(call, inputs)[1]]
    for choice in (["input"], tensors(first)):
        dims = dict.fromkeys(choice, 0)
        arguments = batch(calls, dims)
        name = choice[-1]
        words = f"fused::{CALLS[call][0]} is forward-only"
        wanting = arguments | {name: arguments[name].clone().requires_grad_()}
        output = vmapped(op, wanting, dims)
        assert output.requires_grad
        with pytest.raises(RuntimeError, match=words):
            output.sum().backward()
        with torch.no_grad():
            assert not vmapped(op, wanting, dims).requires_grad
        with pytest.raises(RuntimeError, match=words):
            torch.func.grad(lambda v: vmapped(op, arguments | {name: v}, dims).sum())(arguments[name])  # noqa: B023


@every_call
@every_half
def test_follows_autocast(inputs: Inputs, call: str, half: torch.dtype) -> None:
    op, first = make(call, inputs)
    first["input"] = first["input"].to(HALVES[half == torch.float16])
    calls = [first, first | {"input": first["input"].flip(0)}]
    for choice in (["input"], tensors(first), [tensors(first)[-1]]):
        dims = dict.fromkeys(choice, 0)
        arguments = batch(calls, dims)
        with torch.autocast(inputs.device.type, half):
            ours = vmapped(op, arguments, dims)
            alone = [op(**one) for one in loop(arguments, dims)]
        torch.testing.assert_close(ours, torch.stack(alone), rtol=torch.finfo(half).eps, atol=1e-6)


def test_float64_under_autocast(inputs: Inputs) -> None:
    x, w = inputs.input(3, 2, 3, 5, 5, dtype=torch.float64), inputs.weight(3, 6, 3, 3, dtype=torch.float64)
    op = torch.vmap(fused_kernels.conv_transpose_avg_pool, (0, None))
    with torch.autocast(inputs.device.type, torch.bfloat16):
        assert same(op(x, w), op(x, w)) and op(x, w).dtype == torch.float64


@every_call
def test_fake_and_compiled(inputs: Inputs, call: str) -> None:
    op, first = make(call, inputs)
    calls = [first, make(call, inputs)[1]]
    torch._dynamo.reset()
    for choice in (["input"], tensors(first)):
        dims = dict.fromkeys(choice, 0)
        arguments = batch(calls, dims)
        ours = vmapped(op, arguments, dims)
        with FakeTensorMode() as mode:
            fakes = {n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in arguments.items()}
            fake = vmapped(op, fakes, dims)
        assert (ours.shape, ours.dtype, ours.stride()) == (fake.shape, fake.dtype, fake.stride())
        compiled = torch.compile(lambda arguments: vmapped(op, arguments, dims), backend="aot_eager", fullgraph=True)  # noqa: B023
        assert same(compiled(arguments), ours)


# ---- modules -------------------------------------------------------------------------------------------------------


def module(inputs: Inputs) -> torch.nn.Module:
    torch.manual_seed(3)
    return fused_kernels.nn.ConvTranspose3dAvgPool(3, 4, 3, 2, 1, 0.5, 1.0, (4, 1, 1, 1)).to(inputs.device)


def test_ensemble_of_modules(inputs: Inputs) -> None:
    """torch.func's way: parameters stacked, and one functional_call under vmap."""
    models = [module(inputs) for _ in range(3)]
    for i, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data.mul_(1 + i)
    parameters, buffers = torch.func.stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    x = inputs.input(3, 2, 3, 3, 4, 4)

    def call(parameters: Any, buffers: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(base, (parameters, buffers), (x,))

    with torch.no_grad():
        shared = torch.vmap(call, (0, 0, None))(parameters, buffers, x[0])
        own = torch.vmap(call)(parameters, buffers, x)
        for i, model in enumerate(models):
            torch.testing.assert_close(shared[i], model(x[0]), rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(own[i], model(x[i]), rtol=1e-5, atol=1e-5)


def test_modules_of_many_inputs(inputs: Inputs) -> None:
    model, x = module(inputs), inputs.input(3, 2, 3, 3, 4, 4)
    with torch.no_grad():
        assert torch.equal(torch.vmap(model)(x), torch.stack([model(one) for one in x]))
