"""What every op promises, whatever it computes: bits, layouts, parameters, dispatch, autograd, compilers, streams."""

from __future__ import annotations

import copy
import io
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import (
    A0,
    LAYOUTS,
    OWN_ORDER,
    A,
    B,
    G,
    Inputs,
    Log,
    cuda_only,
    every_dtype,
    in_format_of,
    run_python,
)
from tolerances import assert_close, check, exact, magnitude, poison
from torch import Tensor
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode

import fused_kernels
from fused_kernels import _C, _library, ops, reference

Arguments = dict[str, Any]

# ---- one call of every op for every kernel that it launches --------------------------------------------------------


def _chain(
    inputs: Inputs, dtype: torch.dtype, shape: tuple[int, ...], weight: tuple[int, ...], **kwargs: Any
) -> Arguments:
    channels, dims = weight[0] * kwargs.get("groups", 1), len(shape) - 2
    factors = dict(zip(kwargs.pop("factors", ("scale", "shift")), [(channels, *[1] * dims), (), (1,)], strict=False))
    return {
        "input": inputs.input(*shape, dtype=dtype),
        "weight": inputs.weight(shape[1], *weight, dtype=dtype),
        "bias": inputs.channels(channels, dtype=dtype),
        **{name: inputs.channels(*form, dtype=dtype) for name, form in factors.items()},
        **kwargs,
    }


def _channels_last(arguments: Arguments) -> Arguments:
    return arguments | {"input": LAYOUTS["channels_last"](arguments["input"])}


B_FACTORS = ("shift", "scale1", "scale2")
CALLS: dict[str, tuple[str, Callable[[Inputs, torch.dtype], Arguments]]] = {
    "G, tiles": (G, lambda i, t: {"input": i.input(5, 7, 7, 7, dtype=t)}),
    "G, chunks": (G, lambda i, t: {"input": i.input(3, 2, 190, 191, dtype=t)}),
    "G, planes": (G, lambda i, t: {"input": i.input(3, 5, 24, 32, dtype=t)}),
    "G, channels": (G, lambda i, t: _channels_last({"input": i.input(3, 8, 130, 131, dtype=t)})),
    "G, columns": (G, lambda i, t: _channels_last({"input": i.input(3, 5, 130, 131, dtype=t)})),
    "A0, small": (A0, lambda i, t: _chain(i, t, (5, 3, 9, 7), (6, 3, 2), stride=2)),
    "A0, large": (A0, lambda i, t: _chain(i, t, (3, 4, 90, 101), (33, 3, 3), groups=2)),
    "A0, border": (
        A0,
        lambda i, t: _chain(i, t, (3, 2, 4, 9, 35), (5, 3, 3, 3), padding=1, stride=2, output_padding=1),
    ),
    "A0, boxes": (A0, lambda i, t: _chain(i, t, (3, 5, 9, 32), (9, 3, 3), padding=1, stride=2, output_padding=1)),
    "A0, channels": (A0, lambda i, t: _channels_last(_chain(i, t, (3, 24, 40, 41), (9, 3, 3)))),
    "A0, columns": (A0, lambda i, t: _channels_last(_chain(i, t, (3, 20, 9, 11), (9, 3, 3), padding=1))),
    "A, small": (A, lambda i, t: _chain(i, t, (5, 3, 17), (40, 3), out_scale=10.0)),
    "A, border": (A, lambda i, t: _chain(i, t, (3, 4, 70, 61), (9, 3, 3), padding=2, dilation=2, out_scale=10.0)),
    "A, rows": (A, lambda i, t: _chain(i, t, (3, 70, 9), (470, 3), out_scale=10.0)),
    "B, staged": (
        B,
        lambda i, t: _chain(i, t, (3, 3, 4, 9, 35), (17, 3, 3, 3), stride=2, padding=1, factors=B_FACTORS),
    ),
    "B, pixels": (
        B,
        lambda i, t: _channels_last(
            _chain(i, t, (3, 3, 4, 9, 35), (13, 3, 3, 3), stride=2, padding=1, factors=B_FACTORS)
        ),
    ),
    "B, product": (
        B,
        lambda i, t: _chain(i, t, (3, 6, 19, 21), (5, 4, 3), padding=(2, 1), groups=2, factors=B_FACTORS),
    ),
    "B, warpgroups": (
        B,
        lambda i, t: _chain(i, t, (3, 16, 255), (64, 3), stride=2, padding=1, factors=B_FACTORS),
    ),
    "B, columns": (
        B,
        lambda i, t: _chain(i, t, (3, 6, 19, 21), (1, 4, 3), stride=2, padding=1, groups=6, factors=B_FACTORS),
    ),
    "B, holes": (B, lambda i, t: _chain(i, t, (3, 6, 9, 8), (5, 3, 3), dilation=3, groups=2, factors=B_FACTORS)),
}
# On an H200, in every dtype but where a second list says what float64 launches, and a third what half types do.
LAUNCHED: dict[str, tuple[list[str], ...]] = {
    "G, tiles": (["tile_sums"],),
    "G, chunks": (["chunk_sums", "finish_mean"],),
    "G, planes": (*[["chunk_sums"]] * 2, ["plane_stream"]),
    "G, channels": (["column_stream", "finish_mean"],),
    "G, columns": (["column_sums", "finish_mean"],),
    "A0, small": (["whole_sample"],),
    "A0, large": (["chunk_sums", "finish"],),
    "A0, border": (["box_sums", "finish"],),
    "A0, boxes": (["box_stream", "finish"],),
    "A0, channels": (["column_stream", "finish"],),
    "A0, columns": (["column_sums", "finish"],),
    "A, small": (["whole_sample"],),
    "A, border": (["box_sums", "finish_logsumexp"],),
    "A, rows": (["tile_sums", "finish", "logsumexp_rows"],),
    "B, staged": (["staged_conv"], ["split_taps", "implicit_gemm"]),
    "B, pixels": (["staged_conv"], ["split_taps", "implicit_gemm"]),
    "B, product": (["split_taps", "implicit_gemm"],),
    "B, warpgroups": (*[["split_taps", "implicit_gemm"]] * 2, ["wide_taps", "wide_gemm"]),
    "B, columns": (["collapse_taps", "column_conv"],),
    "B, holes": (["collapse_taps", "direct_conv"],),
}
every_call = pytest.mark.parametrize("call", CALLS)


def make(call: str, inputs: Inputs, dtype: torch.dtype = torch.float32) -> tuple[Callable[..., Tensor], Arguments]:
    op, arguments = CALLS[call]
    return getattr(fused_kernels, op), arguments(inputs, dtype)


@every_dtype
def test_calls_reach_every_kernel(dtype: torch.dtype) -> None:
    """All that the two families' CUDA files launch."""
    reached = {}
    for call, (op, arguments) in CALLS.items():
        shapes = arguments(Inputs(0, torch.device("cpu")), dtype)
        shapes = {n: v.to("meta") if isinstance(v, Tensor) else v for n, v in shapes.items()}
        reached[call] = [launch.kernel for launch in fused_kernels.plan(op, **shapes).launches]
    at = 1 if dtype == torch.float64 else 2 if dtype.itemsize == 2 else 0
    assert reached == {call: lists[at] if at < len(lists) else lists[0] for call, lists in LAUNCHED.items()}
    sources = (Path(__file__).parent.parent / "csrc" / "kernels").glob("*_plan.h")
    planned = {
        name
        for source in sources
        for name in re.findall(r'(?:plan\.add|add_stream|collapse)\("(\w+)"', source.read_text())
    }
    if dtype == torch.float16:
        assert {kernel for kernels in reached.values() for kernel in kernels} == planned


# ---- bits ----------------------------------------------------------------------------------------------------------


@every_call
@every_dtype
def test_same_bits_every_run_and_in_every_batch(inputs: Inputs, call: str, dtype: torch.dtype) -> None:
    op, arguments = make(call, inputs, dtype)
    x = arguments.pop("input")
    ours = op(x, **arguments)
    for _ in range(3):
        poison(x.device, ours.numel())
        assert torch.equal(op(x, **arguments), ours)
    larger = torch.cat([x.flip(0), x, torch.full_like(x, torch.nan)])
    assert torch.equal(op(larger, **arguments)[len(x) : 2 * len(x)], ours)
    for i in range(len(x)):
        alone = x[i : i + 1]
        assert torch.equal(op(alone, **arguments)[0], ours[i])
        for offset in ("offset 1", "offset 2", "offset 3"):
            assert torch.equal(op(LAYOUTS[offset](alone), **arguments)[0], ours[i])


@every_call
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layout_never_changes_a_value(inputs: Inputs, call: str, layout: str, dtype: torch.dtype) -> None:
    op, arguments = make(call, inputs, dtype)
    arguments["input"] = arguments["input"].contiguous()
    ours = op(**arguments)
    moved = {n: LAYOUTS[layout](v) if n in ("input", "weight") else v for n, v in arguments.items()}
    moved |= {n: LAYOUTS["offset 1"](v) for n, v in arguments.items() if isinstance(v, Tensor) and v.dim() == 1}
    assert_close(op(**moved), exact(CALLS[call][0], arguments), magnitude(CALLS[call][0], arguments))
    if layout not in OWN_ORDER:
        assert torch.equal(op(**moved), ours)
    # Sums of whole numbers are exact in any order.
    whole = {n: inputs.integers(*v.shape, dtype=dtype) if isinstance(v, Tensor) else v for n, v in arguments.items()}
    moved = {n: LAYOUTS[layout](v) if n in ("input", "weight") else v for n, v in whole.items()}
    assert torch.equal(op(**moved), op(**whole))


@every_call
@every_dtype
@pytest.mark.parametrize("offset", ["offset 1", "offset 2", "offset 3"])
def test_alignment_of_parameters(inputs: Inputs, call: str, dtype: torch.dtype, offset: str) -> None:
    """All tensors but the input, whose offsets are among the batches above: the weight, and what goes by channels."""
    op, arguments = make(call, inputs, dtype)
    moved = {n: LAYOUTS[offset](v) if isinstance(v, Tensor) and n != "input" else v for n, v in arguments.items()}
    assert torch.equal(op(**moved), op(**arguments))


@every_call
@pytest.mark.parametrize("layout", ["every second", "some channels"])
def test_copies_live_until_the_kernels_have_run(inputs: Inputs, call: str, layout: str) -> None:
    """What a call makes contiguous keeps its memory: neither outputs and workspaces of the call nor what is allocated
    behind it, on its stream or another, get it before the kernels have run, which on CUDA wait a while."""
    op, arguments = make(call, inputs)
    arguments["input"] = arguments["input"].contiguous()
    expected = op(**arguments)
    moved = {n: LAYOUTS[layout](v) if n in ("input", "weight") else v for n, v in arguments.items()}
    sizes = [moved[name].shape for name in ("input", "weight") if name in moved]
    on_gpu = inputs.device.type == "cuda"
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()] if on_gpu else [None]
    poison(inputs.device, *(math.prod(size) for size in sizes))
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda._sleep(20_000_000)
    ours = op(**moved)
    behind = []
    for stream in streams:
        with torch.cuda.stream(stream):
            behind += [torch.full(size, math.nan, device=inputs.device) for size in 2 * sizes]
    assert torch.equal(ours, expected)
    del behind


@every_dtype
def test_expanded_tensors(inputs: Inputs, dtype: torch.dtype) -> None:
    """Stride 0, in the input, the weight and the parameters."""
    x, w = (
        inputs.input(2, 1, 1, 9, dtype=dtype).expand(2, 4, 8, 9),
        inputs.weight(1, 6, 3, 1, dtype=dtype).expand(4, 6, 3, 3),
    )
    one = inputs.channels(1, dtype=dtype).expand(6)
    check(G, x)
    check(A0, x, w, one, scale=one, shift=one.view(6, 1, 1).expand(6, 1, 1))
    check(A, x, w, one, padding=1)
    check(B, x, w, one, 2, 1, scale1=one, shift=one, scale2=one)


def test_ones_in_every_layout(device: torch.device) -> None:
    x, w = torch.ones(1, 2, 2, 2, device=device), torch.ones(2, 2, 5, 5, device=device)
    for move_x in LAYOUTS.values():
        for move_w in LAYOUTS.values():
            mean = fused_kernels.conv_transpose_global_avg_pool(move_x(x), move_w(w))
            assert torch.equal(mean, torch.full_like(mean, 2 * 4 * 25 / 36))
            pooled = fused_kernels.conv_transpose_avg_pool(move_x(x), move_w(w), pool_kernel_size=6)
            assert torch.equal(pooled, mean)


@every_call
@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_strides_are_the_fake_kernels(inputs: Inputs, call: str, layout: str) -> None:
    op, arguments = make(call, inputs)
    arguments["input"] = LAYOUTS[layout](arguments["input"])
    ours = op(**arguments)
    with FakeTensorMode() as mode:
        fake = op(**{n: mode.from_tensor(v) if isinstance(v, Tensor) else v for n, v in arguments.items()})
    assert ours.shape == fake.shape and ours.dtype == fake.dtype and ours.device == fake.device
    assert ours.stride() == fake.stride() and ours.storage_offset() == 0


@every_call
def test_threads_do_not_change_bits(call: str) -> None:
    """With work for several in every loop: over planes, over groups and channels, over samples."""
    op, arguments = make(call, Inputs(1, torch.device("cpu")))
    elements = arguments["input"][0].numel()
    channels = len(arguments["bias"]) if "bias" in arguments else elements
    larger = of_batch(arguments, max(40, 100_000 // elements, 40_000 // (16 * channels)))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(op(**larger))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


CAPABILITIES = """
    import sys, torch
    from conftest import Inputs
    from test_integration import CALLS, make
    from tolerances import DTYPES
    torch.set_num_threads(1)
    inputs = Inputs(1, torch.device("cpu"))
    results = []
    for call in CALLS:
        for dtype in DTYPES:
            op, arguments = make(call, inputs, dtype)
            results.append((CALLS[call][0], arguments, op(**arguments)))
    torch.save(results, sys.argv[1])
"""


AVX2 = {"avx2", "fma", "f16c"}
INSTRUCTIONS = {"default": set(), "avx2": AVX2, "avx512": AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}}


@pytest.mark.parametrize("capability", INSTRUCTIONS)
def test_instruction_sets_agree(capability: str, tmp_path: Path, tests_on_path: dict[str, str]) -> None:
    """Each that a prebuilt binary can pick is right, and one that the CPU lacks is refused in words."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    env = {**tests_on_path, "FUSED_KERNELS_CPU_CAPABILITY": capability}
    if not INSTRUCTIONS[capability] <= flags:
        with pytest.raises(
            AssertionError, match=r"FUSED_KERNELS_CPU_CAPABILITY to be .* one that this CPU has, but got"
        ):
            run_python(CAPABILITIES, str(tmp_path / "results"), env=env)
        return
    run_python(CAPABILITIES, str(tmp_path / "results"), env=env)
    for op, arguments, ours in torch.load(tmp_path / "results"):
        assert_close(ours, exact(op, arguments), magnitude(op, arguments))


def test_unknown_instruction_set_is_refused() -> None:
    code = "import torch, fused_kernels; fused_kernels.global_avg_pool(torch.ones(1, 1, 1))"
    with pytest.raises(AssertionError, match="to be default, avx2 or avx512, but got sse9"):
        run_python(code, env={"FUSED_KERNELS_CPU_CAPABILITY": "sse9"})


# ---- parameters ----------------------------------------------------------------------------------------------------

FORMS: dict[str, Callable[[Inputs, int, int, torch.dtype], Tensor | float]] = {
    "(1,)": lambda i, c, d, t: i.channels(1, dtype=t),
    "(C,)": lambda i, c, d, t: i.channels(c, dtype=t),
    "(C, 1, ..)": lambda i, c, d, t: i.channels(c, *[1] * d, dtype=t),
    "(1, C, 1, ..)": lambda i, c, d, t: i.channels(1, c, *[1] * d, dtype=t),
    "(1, 1, 1, ..)": lambda i, c, d, t: i.channels(1, 1, *[1] * d, dtype=t),
    "0-d": lambda i, c, d, t: i.channels(dtype=t),
    "0-d on the CPU": lambda i, c, d, t: i.channels(dtype=t).cpu(),
    "0-d float64 on the CPU": lambda i, c, d, t: i.channels(dtype=torch.float64).cpu(),
    "number": lambda i, c, d, t: -0.7,  # no number of float32
    "every third": lambda i, c, d, t: i.channels(c, 3, dtype=t)[:, 1],
    "a column": lambda i, c, d, t: i.channels(1, 2, c, dtype=t)[0, 1].view(1, c, *[1] * d),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("op", "name"),
    [(A0, "scale"), (A0, "shift"), (A, "scale"), (A, "shift"), (B, "scale1"), (B, "shift"), (B, "scale2")],
)
def test_forms_of_factors(inputs: Inputs, op: str, name: str, form: str) -> None:
    for dims, dtype in [(1, torch.float32), (2, torch.float16), (3, torch.float64)]:
        x, w = inputs.input(2, 3, *[5] * dims, dtype=dtype), inputs.weight(3, 6, *[3] * dims, dtype=dtype)
        check(op, x, w, inputs.channels(6, 2, dtype=dtype)[:, 0], **{name: FORMS[form](inputs, 6, dims, dtype)})


def test_single_channel_factors(inputs: Inputs) -> None:
    """With C_out = 1 a shape means both: one for all, and one a channel."""
    x, w = inputs.input(2, 3, 5, 5), inputs.weight(3, 1, 3, 3)
    for shape in [(), (1,), (1, 1), (1, 1, 1), (1, 1, 1, 1)]:
        check(A0, x, w, inputs.channels(1), scale=inputs.channels(*shape), shift=inputs.channels(*shape))
        check(B, x, w, scale1=inputs.channels(*shape), shift=inputs.channels(*shape))


@every_call
def test_lists_of_one_hold_for_every_dimension(inputs: Inputs, call: str) -> None:
    """And the dispatcher's door takes what the wrapper takes."""
    op, arguments = make(call, inputs)
    ours = op(**arguments)
    direct = getattr(torch.ops.fused, CALLS[call][0])
    assert torch.equal(direct(**arguments), ours) and torch.equal(direct.default(**arguments), ours)
    listed = {n: [v] if isinstance(v, int) and n != "groups" else v for n, v in arguments.items()}
    assert torch.equal(op(**listed), ours)


# ---- dispatch and autograd -----------------------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_opcheck(inputs: Inputs, call: str, dtype: torch.dtype) -> None:
    _, arguments = make(call, inputs, dtype)
    torch.library.opcheck(getattr(torch.ops.fused, CALLS[call][0]).default, (), arguments)


@pytest.mark.smoke
def test_opcheck_of_workload_a(inputs: Inputs) -> None:
    arguments = make("A, small", inputs)[1]
    result = torch.library.opcheck(torch.ops.fused.conv_transpose_global_avg_pool_logsumexp.default, (), arguments)
    assert set(result.values()) == {"SUCCESS"}


def differentiable(arguments: Arguments) -> list[str]:
    return [name for name, value in arguments.items() if isinstance(value, Tensor)]


@every_call
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_backward_raises_for_every_tensor(inputs: Inputs, call: str, compiled: bool) -> None:
    if compiled and call not in ("G, tiles", "A0, small", "A, small", "B, staged"):
        pytest.skip("a compilation for each tensor takes long, and the other calls differ in their kernels only")
    op, arguments = make(call, inputs)
    expected = op(**arguments)
    torch._dynamo.reset()
    run = torch.compile(op, backend="aot_eager", fullgraph=True) if compiled else op
    for name in differentiable(arguments):
        wanting = arguments | {name: arguments[name].clone().requires_grad_()}
        output = run(**wanting)
        assert output.requires_grad and torch.equal(output.detach(), expected)
        with pytest.raises(RuntimeError) as caught:
            output.sum().backward()
        for words in (
            f"fused::{CALLS[call][0]} is forward-only",
            f"fused_kernels.reference.{CALLS[call][0]}",
            "no_grad",
        ):
            assert words in str(caught.value)
        assert wanting[name].grad is None


@every_call
def test_without_gradients_nothing_is_recorded(inputs: Inputs, call: str) -> None:
    op, arguments = make(call, inputs)
    ours = op(**arguments)
    assert not ours.requires_grad
    arguments["input"].requires_grad_()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            output = op(**arguments)
        assert not output.requires_grad and torch.equal(output, ours)


@every_call
def test_other_kinds_of_gradients_raise(inputs: Inputs, call: str) -> None:
    op, arguments = make(call, inputs)
    x = arguments.pop("input")
    words = f"fused::{CALLS[call][0]} is forward-only"
    with pytest.raises(RuntimeError, match=words):
        torch.func.jvp(lambda x: op(x, **arguments), (x,), (torch.ones_like(x),))
    for name in differentiable(arguments):
        with pytest.raises(RuntimeError, match=words):
            torch.func.grad(lambda v: op(x, **arguments | {name: v}).sum())(arguments[name])  # noqa: B023
    for transform in (torch.func.grad, torch.func.vjp):
        with pytest.raises(RuntimeError, match=words):
            transform(lambda x: op(x, **arguments).sum(), *([x] if transform is torch.func.vjp else []))(x)
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="forward-only"):
        op(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), **arguments)


@every_call
def test_dual_numbers_raise_without_gradients_too(inputs: Inputs, call: str) -> None:
    """no_grad is about backward only."""
    op, arguments = make(call, inputs)
    x = arguments.pop("input")
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        assert torch.equal(op(x, **arguments), op(x, **arguments))
        with pytest.raises(RuntimeError, match="forward-only"):
            op(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), **arguments)


@every_call
def test_outputs_are_ordinary_tensors(inputs: Inputs, call: str) -> None:
    """Hooks on them run, before the error where there is one; and they can be leaves."""
    op, arguments = make(call, inputs)
    wanting = arguments | {"input": arguments["input"].clone().requires_grad_()}
    output = op(**wanting)
    assert output.requires_grad and not output.is_leaf and output.grad_fn is not None
    with pytest.raises(RuntimeError, match="leaf"):
        output.requires_grad_(False)
    seen: list[Tensor] = []
    output.register_hook(seen.append)
    output.retain_grad()
    with pytest.raises(RuntimeError, match=f"fused::{CALLS[call][0]} is forward-only"):
        (3 * output).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.full_like(output, 3))
    assert output.grad is not None and torch.equal(output.grad, seen[0]) and wanting["input"].grad is None

    with torch.no_grad():
        unrecorded = op(**wanting)
    for leaf in (op(**arguments), unrecorded, output.detach()):
        assert leaf.is_leaf and not leaf.requires_grad
        leaf.requires_grad_().register_hook(seen.append)
        (leaf * leaf).sum().backward()
        assert leaf.grad is not None and torch.equal(leaf.grad, 2 * leaf.detach())
    assert len(seen) == 4


def test_wrapped_tensors_raise(inputs: Inputs) -> None:
    """Where only what torch.func wraps needs a gradient."""
    x = inputs.input(2, 3, 5, 5)

    def pool(x: Tensor) -> Tensor:
        return fused_kernels.global_avg_pool(x)

    for transform in (
        lambda x: torch.func.grad(lambda x: torch.func.vmap(pool)(x[None]).sum())(x),
        lambda x: torch.func.vmap(torch.func.grad(lambda x: pool(x).sum()))(x[None]),
        lambda x: torch.func.jvp(torch.func.vmap(pool), (x[None],), (x[None],)),
        lambda x: torch.func.vmap(pool)(x.clone().requires_grad_()[None]).sum().backward(),
    ):
        with pytest.raises(RuntimeError, match="forward-only"):
            transform(x)


def test_tensor_likes_raise(inputs: Inputs) -> None:
    """Where only a tensor that another object holds needs a gradient; and what a TorchFunctionMode hands in."""
    x = inputs.input(2, 3, 5, 5).requires_grad_()

    class Holder:
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(x)

    class Handing(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(x) if "global_avg_pool" in str(func) else func(*args, **(kwargs or {}))

    for door in (
        fused_kernels.global_avg_pool,
        torch.ops.fused.global_avg_pool,
        torch.ops.fused.global_avg_pool.default,
    ):
        with Handing():
            handed = door(x.detach())
        for output in (door(Holder()), handed):
            with pytest.raises(RuntimeError, match="forward-only"):
                output.sum().backward()


def functions_run(module: Any, call: Callable[[], Any]) -> set[str]:
    """Names of the Python functions of a module that a call enters."""
    names = set()

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code.co_filename == module.__file__:
            names.add(frame.f_code.co_name)

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


@every_call
def test_calls_without_gradients_skip_the_autograd_rule(call: str) -> None:
    """By every door; and a mode sees the op itself."""
    op, arguments = make(call, Inputs(1, torch.device("cpu")))
    packet = getattr(torch.ops.fused, CALLS[call][0])
    wanting = arguments | {"input": arguments["input"].clone().requires_grad_()}
    for door in (op, packet, packet.default):
        assert "kernel" in functions_run(fused_kernels.ops, lambda door=door: door(**wanting))
        for mode in (torch.no_grad, torch.enable_grad, torch.inference_mode):
            with mode():
                assert "kernel" not in functions_run(fused_kernels.ops, lambda door=door: door(**arguments))
                with Log() as log:
                    door(**arguments)
            assert log.ops == [f"fused.{CALLS[call][0]}.default"]


def test_callers_from_outside_python(inputs: Inputs) -> None:
    """TorchScript's interpreter calls as C++ does."""

    @torch.jit.script
    def pool(x: Tensor) -> Tensor:
        return torch.ops.fused.global_avg_pool(x)

    x = inputs.input(2, 3, 5, 5)
    assert torch.equal(pool(x), fused_kernels.global_avg_pool(x))
    with torch.no_grad():
        assert torch.equal(pool(x), fused_kernels.global_avg_pool(x))
    with pytest.raises(RuntimeError, match="forward-only"):
        pool(x.requires_grad_()).sum().backward()


def test_ops_are_torchs_kind() -> None:
    for name in (G, A0, A, B):
        packet = getattr(torch.ops.fused, name)
        assert isinstance(packet, torch._ops.OpOverloadPacket) and isinstance(packet.default, torch._ops.OpOverload)
        assert copy.deepcopy(packet.default) is packet.default is getattr(torch.ops.fused, name).default
        assert str(packet) == f"fused.{name}" and str(packet.default) == f"fused.{name}.default"


@every_call
def test_inference_tensors(inputs: Inputs, call: str) -> None:
    """Parameters made under inference_mode and used outside it, and the reverse."""
    op, arguments = make(call, inputs)
    ours = op(**arguments)
    with torch.inference_mode():
        made = {n: v.clone() if isinstance(v, Tensor) else v for n, v in arguments.items()}
        assert torch.equal(op(**arguments), ours)
        assert torch.equal(op(**made), ours)
        within = op(**arguments)
    assert torch.equal(op(**made), ours)
    with torch.no_grad():
        assert torch.equal(op(**made), ours)
    # What came out under it is one of its tensors, as torch's own outputs are, and serves as an input.
    assert within.is_inference() and not op(**made).is_inference()
    with pytest.raises(RuntimeError, match="inference tensor"):
        within.requires_grad_()
    planes = within.reshape(len(within), -1, 1)
    assert torch.equal(fused_kernels.global_avg_pool(planes), planes)
    # Beside a tensor that needs a gradient, each is refused in backward only.
    for name in differentiable(arguments):
        output = op(**made | {name: arguments[name].clone().requires_grad_()})
        assert torch.equal(output.detach(), ours)
        with pytest.raises(RuntimeError, match="is forward-only"):
            output.sum().backward()


# ---- torch.compile -------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh_compiler() -> None:
    torch._dynamo.reset()


def of_batch(arguments: Arguments, batch: int) -> Arguments:
    """The same call on another number of samples."""
    x = arguments["input"]
    return arguments | {"input": torch.cat([x] * (batch // len(x) + 1))[:batch]}


@every_call
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiles_without_a_graph_break(inputs: Inputs, fresh_compiler: None, call: str, backend: str) -> None:
    op, arguments = make(call, inputs)
    if backend == "inductor" and call not in ("A, small", "B, staged"):
        pytest.skip("Inductor treats all ops alike, and is slow")
    compiled = torch.compile(lambda arguments: op(**arguments).relu() + 1, backend=backend, fullgraph=True)
    assert torch.equal(compiled(arguments), op(**arguments).relu() + 1)


@every_call
def test_one_graph_for_every_size(inputs: Inputs, fresh_compiler: None, call: str) -> None:
    """Batch and spatial sizes are dynamic: five shapes, one compilation."""
    op, arguments = make(call, inputs)
    backend = EagerAndRecordGraphs()
    rest = {n: v for n, v in arguments.items() if n != "input"}
    compiled = torch.compile(lambda x: op(x, **rest), backend=backend, fullgraph=True)
    for i, batch in enumerate((3, 2, 7, 16, 5)):
        shape = list(arguments["input"].shape)
        x = in_format_of(arguments["input"], inputs.input(batch, shape[1], *(size + 2 * i for size in shape[2:])))
        for dim in (0, *range(2, x.dim())):
            torch._dynamo.mark_dynamic(x, dim)
        assert torch.equal(compiled(x), op(x, **rest))
    assert len(backend.graphs) == 1


@every_call
def test_exports_with_dynamic_sizes(inputs: Inputs, call: str) -> None:
    op, arguments = make(call, inputs)
    x = arguments.pop("input")

    class Model(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return op(x, **arguments)

    sizes = {dim: torch.export.Dim.AUTO for dim in (0, *range(2, x.dim()))}
    buffer = io.BytesIO()
    torch.export.save(torch.export.export(Model(), (x,), dynamic_shapes=(sizes,)), buffer)
    buffer.seek(0)
    exported = torch.export.load(buffer).module()
    for other in (x, in_format_of(x, inputs.input(2, x.shape[1], *(size + 3 for size in x.shape[2:])))):
        assert torch.equal(exported(other), op(other, **arguments))


@pytest.mark.slow
def test_a_package_of_aot_inductor_runs_in_python_and_without_it(tmp_path: Path) -> None:
    """The example, as its comments say it is built; each in a process of its own."""
    examples = Path(__file__).parent.parent / "examples"
    package, program = tmp_path / "model.pt2", tmp_path / "aot_inductor"

    def start(*command: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(part) for part in command], capture_output=True, text=True, cwd=tmp_path)

    def run(*command: object) -> list[float]:
        done = start(*command)
        assert done.returncode == 0, done.stderr
        return [float(value) for value in done.stdout.split()]

    device = "cuda" if torch.cuda.is_available() else "cpu"
    load = "import sys, torch; loaded = torch._inductor.aoti_load_package(sys.argv[1])"
    pack_relu = (
        f"import sys, torch; model = torch.export.export(torch.nn.ReLU(), (torch.ones(2, device='{device}'),));"
        "torch._inductor.aoti_compile_and_package(model, package_path=sys.argv[1])"
    )
    expected = run(sys.executable, examples / "aot_inductor.py", package)
    use = f"import fused_kernels; {load}; print(*loaded(torch.ones(2, 3, 9, 7, device='{device}')).flatten().tolist())"
    if start(sys.executable, "-c", use, package).returncode < 0:  # a crash
        relu = tmp_path / "relu.pt2"
        run(sys.executable, "-c", pack_relu, relu)
        if start(sys.executable, "-c", load, relu).returncode < 0:
            compiler = os.environ.get("CXX", "g++")
            pytest.skip(f"what {compiler} builds crashes for a ReLU, too, as if it linked libstdc++ statically")
    assert run(sys.executable, "-c", use, package) == pytest.approx(expected, rel=1e-5)

    torch_dir = Path(torch.__file__).parent
    cuda = ["-Wl,--no-as-needed", "-ltorch_cuda"] if torch.cuda.is_available() else []
    includes = [f"-I{torch_dir / 'include'}", f"-I{torch_dir / 'include/torch/csrc/api/include'}"]
    libraries = [f"-L{torch_dir / 'lib'}", f"-Wl,-rpath,{torch_dir / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    run("g++", "-std=c++17", examples / "aot_inductor.cpp", *includes, *libraries, *cuda, "-o", program)
    assert run(program, _library.PATH, package) == pytest.approx(expected, rel=1e-5)


def test_compiled_follows_changed_parameters(inputs: Inputs, fresh_compiler: None) -> None:
    op, arguments = make("B, staged", inputs)
    compiled = torch.compile(lambda arguments: op(**arguments), backend="aot_eager", fullgraph=True)
    for _ in range(3):
        assert torch.equal(compiled(arguments), op(**arguments))
        for name in differentiable(arguments):
            arguments[name].data.mul_(-1.5)
    check(B, **arguments)


# ---- streams, graphs, devices --------------------------------------------------------------------------------------


@cuda_only
@every_call
def test_no_call_waits_for_the_device(call: str) -> None:
    """0-d scales on the device included. torch reports only its own waits; so 0.1 s of work is queued first, which must
    still be going on when the call returns."""
    op, arguments = make(call, Inputs(2, torch.device("cuda", 0)))
    expected = op(**arguments)
    op(**arguments)  # whose output leaves a block for the next
    torch.cuda.synchronize()
    done, before = torch.cuda.Event(), torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(200_000_000)
        done.record()
        ours = op(**arguments)
        waited = done.query()
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert not waited
    assert torch.equal(ours, expected)


def capture(op: Callable[..., Tensor], arguments: Arguments, **kwargs: Any) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    op(**arguments)  # loads the kernels
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **kwargs):
        output = op(**arguments)
    return graph, output


def refill(inputs: Inputs, arguments: Arguments) -> None:
    """New values in the same memory."""
    for value in arguments.values():
        if isinstance(value, Tensor):
            value.copy_(inputs.channels(*value.shape, dtype=value.dtype))


@cuda_only
@every_call
def test_captured_graph_follows_its_inputs(call: str) -> None:
    """0-d scale parameters on the device are among them."""
    inputs = Inputs(3, torch.device("cuda", 0))
    op, arguments = make(call, inputs)
    graph, output = capture(op, arguments)
    for _ in range(3):
        refill(inputs, arguments)
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, op(**arguments))


@cuda_only
def test_graphs_that_share_a_pool(fresh_compiler: None) -> None:
    """Captured on side streams, replayed interleaved, after other allocations came and went."""
    inputs = Inputs(4, torch.device("cuda", 0))
    pool = torch.cuda.graph_pool_handle()
    captured = []
    for call in CALLS:
        op, arguments = make(call, inputs)
        captured.append((op, arguments, *capture(op, arguments, pool=pool, stream=torch.cuda.Stream())))
    torch.cuda.empty_cache()
    for _ in range(2):
        others = [torch.full((size,), torch.nan, device="cuda") for size in (1 << 10, 1 << 16, 1 << 22)]
        for op, arguments, graph, output in captured:
            refill(inputs, arguments)
            graph.replay()
            ours = output.clone()  # before the next graph, which may use the same memory
            assert torch.equal(ours, op(**arguments))
        del others
        torch.cuda.empty_cache()


@cuda_only
@every_call
def test_larger_calls_after_a_small_capture(call: str) -> None:
    """Nothing that a call allocates is kept for the next, so the graph's memory stays its own."""
    inputs = Inputs(4, torch.device("cuda", 0))
    op, arguments = make(call, inputs)
    x = arguments["input"]
    larger = inputs.input(4 * len(x), x.shape[1], *(3 * size for size in x.shape[2:]))
    larger = arguments | {"input": in_format_of(x, larger)}
    expected, expected_larger = op(**arguments), op(**larger)
    graph, output = capture(op, arguments, stream=torch.cuda.Stream())
    assert torch.equal(op(**larger), expected_larger)
    output.fill_(torch.nan)
    graph.replay()
    assert torch.equal(op(**larger), expected_larger) and torch.equal(output, expected)


@cuda_only
@every_call
def test_side_stream(call: str) -> None:
    """Launched on the current stream: behind the work that makes its input there."""
    inputs = Inputs(5, torch.device("cuda", 0))
    op, arguments = make(call, inputs)
    expected = op(**arguments)
    x, source = arguments["input"], arguments["input"].clone()
    x.fill_(torch.nan)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(source)
        ours = op(**arguments)
        x.fill_(torch.nan)
    stream.synchronize()
    assert torch.equal(ours, expected)


@cuda_only
@every_call
def test_eight_threads_with_streams_of_their_own(call: str) -> None:
    """10^4 calls."""
    inputs = Inputs(6, torch.device("cuda", 0))
    calls = [make(call, inputs) for _ in range(8)]
    serial = [op(**arguments) for op, arguments in calls]
    torch.cuda.synchronize()
    failures: list[BaseException | str] = []

    def work(index: int) -> None:
        op, arguments = calls[index]
        try:
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for _ in range(125):
                    ours = torch.stack([op(**arguments) for _ in range(10)])
                    stream.synchronize()
                    if not torch.equal(ours, serial[index].expand_as(ours)):
                        failures.append(f"thread {index} differs")
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@cuda_only
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@every_call
def test_second_device(call: str) -> None:
    """Launched where the inputs are, whatever device is current; and the limits of shared memory are set there."""
    results = []
    for index in (1, 0, 1):
        op, arguments = make(call, Inputs(7, torch.device("cuda", index)))
        ours = op(**arguments)
        assert ours.device.index == index and torch.cuda.current_device() == 0
        results.append(ours.cpu())
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    op, arguments = make(call, Inputs(7, torch.device("cuda", 1)))
    for name in ("weight", "bias"):
        if name in arguments:
            wrong = arguments | {name: arguments[name].to("cuda:0")}
            with pytest.raises(RuntimeError, match=f"`{name}` to be on the device of `input`, cuda:1, but got cuda:0"):
                op(**wrong)


@every_call
def test_threads_of_python_on_the_cpu(call: str) -> None:
    inputs = Inputs(8, torch.device("cpu"))
    calls = [make(call, inputs) for _ in range(4)]
    serial = [op(**arguments) for op, arguments in calls]
    results: list[Tensor | None] = [None] * 4

    def work(index: int) -> None:
        op, arguments = calls[index]
        results[index] = op(**arguments)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(ours is not None and torch.equal(ours, other) for ours, other in zip(results, serial, strict=True))


# ---- facts ---------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_build_info() -> None:
    info = fused_kernels.build_info()
    assert set(info) == {"version", "cuda", "architectures", "compiler", "abi_target"}
    assert info["version"] == fused_kernels.__version__ and info["abi_target"] == "2.10"
    assert (info["cuda"] is None) == (info["architectures"] == "CPU only")
    assert "9.0" not in info["architectures"].split(";")  # 9.0a stands for it
    assert any(name in info["compiler"].lower() for name in ("g++", "gcc", "clang"))


def test_plan_of_workload_a() -> None:
    x, w = torch.empty(16, 64, 512, 512, device="meta"), torch.empty(64, 128, 3, 3, device="meta")
    plan = fused_kernels.plan(A, x, w, torch.empty(128, device="meta"), shift=torch.empty(128, 1, 1, device="meta"))
    assert plan.bytes_read == 4 * (x.numel() + w.numel()) and plan.bytes_written == 4 * 16
    assert [launch.kernel for launch in plan.launches] == ["chunk_sums", "finish_logsumexp"]
    first, last = plan.launches
    assert first.grid * first.block >= 16 * 64 and last.grid == 16 and last.programmatic
    assert plan.operations > x.numel() and 0 < plan.workspace < 4 * x.numel() / 1000
    assert repr(plan).startswith("Plan(variant='chunks of planes', launches=[Launch(kernel='chunk_sums', grid=")
    for fact in ("workspace=", "bytes_read=", "bytes_written=64", "operations=", "shared_memory=", "programmatic=True"):
        assert fact in repr(plan)


def test_plan_of_workload_b() -> None:
    x, w = torch.empty(128, 3, 16, 32, 32, device="meta"), torch.empty(3, 16, 3, 3, 3, device="meta")
    plan = fused_kernels.plan(B, x, w, stride=2, padding=1)
    outputs = 128 * 16 * 15 * 31 * 31
    assert plan.bytes_read == 4 * (x.numel() + w.numel()) and plan.bytes_written == 4 * outputs
    assert plan.operations == 2 * outputs * 3 * 8 and plan.workspace == 0
    assert [launch.kernel for launch in plan.launches] == ["staged_conv"]


@pytest.mark.parametrize("op", [G, A0, A, B])
def test_plan_without_work(op: str) -> None:
    weight = [] if op == G else [torch.empty(3, 4, 3, 3)]
    plan = fused_kernels.plan(op, torch.empty(0, 3, 5, 5), *weight)
    assert plan.launches == [] and plan.variant == "nothing to do" and plan.bytes_written == 0


@pytest.mark.parametrize(
    ("architectures", "capability", "expected"),
    [
        ("7.5;8.0;8.6;8.9;9.0a;10.0;12.0+PTX", 90, 90),
        ("7.5;8.0;8.6;8.9;9.0a;10.0;12.0+PTX", 103, 100),
        ("7.5;9.0a;12.0+PTX", 121, 120),
        ("8.0", 86, 80),
        ("7.5+PTX;8.0+PTX", 90, 80),
        ("8.0;9.0+PTX", 100, 90),
        ("CPU only", 90, 90),
    ],
)
def test_code_that_a_device_runs(architectures: str, capability: int, expected: int) -> None:
    assert ops._code_capability(capability, architectures) == expected


@pytest.mark.parametrize(("code", "launched"), [(90, "staged_conv"), (80, "implicit_gemm"), (75, "column_conv")])
def test_code_of_an_older_architecture(code: int, launched: str) -> None:
    """Made from its PTX, kernels of a later one are empty, and do not wait for the launch before them."""
    device = _C.DeviceProperties(90, 132, 232448, code)
    for shape, weight in [((1, 3, 9, 9), (3, 16, 3, 3)), ((1, 16, 255), (16, 64, 3))]:
        tensors = [torch.empty(size, dtype=torch.float16) for size in (shape, weight)]
        plan = fused_kernels.plan(B, *tensors, stride=2, padding=1, device=device)
        assert plan.launches[-1].kernel == (launched if len(shape) == 4 or code < 90 else "wide_gemm")
        assert plan.launches[-1].programmatic == (plan.launches[-1].kernel == "wide_gemm")


@every_call
@every_dtype
def test_plans_fit_their_device(call: str, dtype: torch.dtype) -> None:
    """Shared memory, blocks and threads within what each architecture allows. The kernels do not depend on the batch;
    their grids do, with the tiles of the staged one and the columns of a thread, in which every output is alike, and
    whether a stream adds up its own chunks or finish_mean does, in the same order."""
    op, arguments = CALLS[call]
    arguments = arguments(Inputs(9, torch.device("cpu")), dtype)
    for capability, processors, shared in [
        (75, 40, 65536),
        (80, 108, 166912),
        (86, 84, 101376),
        (90, 132, 232448),
        (120, 170, 101376),
    ]:
        device = _C.DeviceProperties(capability, processors, shared)
        plans = [fused_kernels.plan(op, **of_batch(arguments, batch), device=device) for batch in (1, 3, 64)]
        for plan in plans:
            assert plan.launches
            for launch in plan.launches:
                assert 0 < launch.grid < 2**31 and 0 < launch.block <= 1024 and launch.block % 32 == 0
                assert 0 <= launch.shared_memory <= shared
                assert not launch.programmatic or capability >= 90
        kernels = [[launch.kernel for launch in plan.launches] for plan in plans]
        assert len({tuple(name for name in names if name != "finish_mean") for names in kernels}) == 1
        assert all("column_stream" in names for names in kernels) or kernels[0] == kernels[1] == kernels[2]
    assert fused_kernels.plan(
        op, **{n: v.to("meta") if isinstance(v, Tensor) else v for n, v in arguments.items()}
    ).launches


@pytest.mark.parametrize("call", CALLS)
def test_reference_is_what_the_models_say(call: str) -> None:
    """The oracle itself, against the plain composition spelled out."""
    op, arguments = CALLS[call]
    arguments = arguments(Inputs(10, torch.device("cpu")), torch.float64)
    x = arguments["input"]
    if op == G:
        expected = torch.nn.functional.adaptive_avg_pool2d(x, 1)
    else:
        conv = [
            torch.nn.functional.conv_transpose1d,
            torch.nn.functional.conv_transpose2d,
            torch.nn.functional.conv_transpose3d,
        ]
        names = ("stride", "padding", "output_padding", "groups", "dilation")
        y = conv[x.dim() - 3](
            x, arguments["weight"], arguments["bias"], **{name: arguments[name] for name in names if name in arguments}
        )
        if op == B:
            pool = [torch.nn.functional.avg_pool1d, torch.nn.functional.avg_pool2d, torch.nn.functional.avg_pool3d]
            expected = (pool[x.dim() - 3](y, 2) * arguments["scale1"] + arguments["shift"]) * arguments["scale2"]
        else:
            expected = y.mean(tuple(range(2, x.dim())), keepdim=True) * arguments["scale"] + arguments["shift"]
        if op == A:
            expected = torch.logsumexp(expected.flatten(1), 1, keepdim=True) * arguments["out_scale"]
    torch.testing.assert_close(getattr(reference, op)(**arguments), expected, rtol=1e-12, atol=1e-12)
