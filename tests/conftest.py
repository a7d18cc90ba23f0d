"""Devices, random inputs and memory layouts for all tests."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import textwrap
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tolerances import DTYPES
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fused_kernels

G = "global_avg_pool"
A0 = "conv_transpose_global_avg_pool"
A = "conv_transpose_global_avg_pool_logsumexp"
B = "conv_transpose_avg_pool"

CUDA = torch.cuda.is_available()
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)

# A fixed budget that finds the same in every run; FUSED_KERNELS_EXAMPLES=3000 draws that many new ones.
EXAMPLES = os.environ.get("FUSED_KERNELS_EXAMPLES")
hypothesis.settings.register_profile(
    "fused_kernels",
    max_examples=int(EXAMPLES or 60),
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.filter_too_much],
)
hypothesis.settings.load_profile("fused_kernels")


NEEDS_CUDA = [pytest.mark.cuda, pytest.mark.skipif(not CUDA, reason="no CUDA device")]


def cuda_only(test: Any) -> Any:
    for mark in NEEDS_CUDA:
        test = mark(test)
    return test


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=NEEDS_CUDA)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True, scope="session")
def full_precision() -> None:
    """References with TF32 off; and one thread, since on a busy machine threads that wait for
    each other take long over tiny sizes (what threads change is a test of its own)."""
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_num_threads(1)


# ---- inputs --------------------------------------------------------------------------------------------------------


class Inputs:
    """Random tensors in which every sample and channel has an offset and scale of its own, so that none can be taken
    for another or for its average. Values are drawn in float64 on the CPU: the same for every dtype and device."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.device = device

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64)

    def input(self, *shape: int, dtype: torch.dtype = torch.float32, positive: bool = False) -> Tensor:
        """(N, C, *spatial)"""
        ones = [1] * (len(shape) - 2)
        n, c = shape[:2]
        values = self.normal(*shape) * (self.normal(n, c, *ones) / 2).exp() + self.normal(n, c, *ones)
        return self.to(values.abs() + 0.125 if positive else values, dtype)

    def weight(self, *shape: int, dtype: torch.dtype = torch.float32, positive: bool = False) -> Tensor:
        """(C_in, C_out/groups, *kernel_size), of a size that keeps sums over C_in near 1"""
        values = self.input(*shape, dtype=torch.float64, positive=positive).cpu() / math.sqrt(max(1, shape[0]))
        return self.to(values, dtype)

    def channels(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """A bias, scale or shift"""
        return self.to(self.normal(*shape) + 0.5, dtype)

    def integers(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Small whole numbers, whose sums are exact in any order."""
        return self.to(torch.randint(-4, 5, shape, generator=self.generator), dtype)

    def to(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        return values.to(dtype).to(self.device)


@pytest.fixture
def inputs(request: pytest.FixtureRequest, device: torch.device) -> Inputs:
    """Other values for each test; FUSED_KERNELS_SEED changes them all."""
    seed = zlib.crc32(f"{request.node.nodeid} {os.environ.get('FUSED_KERNELS_SEED', '')}".encode())
    print(f"inputs drawn with seed {seed}")  # pytest shows it where a test fails
    return Inputs(seed, device)


# ---- layouts -------------------------------------------------------------------------------------------------------


def _in(storage: Tensor, values: Tensor) -> Tensor:
    return storage.copy_(values)


def _poisoned(values: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=values.dtype, device=values.device)


def _offset(values: Tensor, by: int) -> Tensor:
    """In the memory format of the values, which have no gaps."""
    flat = _poisoned(values, values.numel() + by + 5)
    return _in(flat.as_strided(values.shape, values.stride(), by), values)


def _every_second(values: Tensor) -> Tensor:
    spatial = [2 * size + 1 for size in values.shape[2:]]
    big = _poisoned(values, *values.shape[:2], *spatial)
    return _in(big[(..., *[slice(1, None, 2)] * len(spatial))], values)


def _some_channels(values: Tensor) -> Tensor:
    big = _poisoned(values, values.shape[0], values.shape[1] + 3, *values.shape[2:])
    return _in(big[:, 2:-1], values)


def _channels_last(values: Tensor) -> Tensor:
    return values.movedim(1, -1).contiguous().movedim(-1, 1)


def _reversed(values: Tensor) -> Tensor:
    order = tuple(reversed(range(values.dim())))
    return values.permute(order).contiguous().permute(order)


def _odd_strides(values: Tensor) -> Tensor:
    strides = [7919 if size == 1 else stride for size, stride in zip(values.shape, values.stride(), strict=True)]
    return values.as_strided(values.shape, strides)


# Each gives the values at another place in memory, with NaN around them where there is an around.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": Tensor.contiguous,
    "offset 1": lambda values: _offset(values, 1),
    "offset 2": lambda values: _offset(values, 2),
    "offset 3": lambda values: _offset(values, 3),
    "every second": _every_second,
    "some channels": _some_channels,
    "channels_last": _channels_last,
    "reversed": _reversed,
    "odd strides": _odd_strides,
}
# Those that are read in an order of their own, so that a sum may be rounded in another.
OWN_ORDER = ("channels_last", "reversed")


def in_format_of(x: Tensor, values: Tensor) -> Tensor:
    """The values as contiguous or channels_last as `x`."""
    return values.contiguous() if x.is_contiguous() else LAYOUTS["channels_last"](values)


# ---- random arguments for the property tests -----------------------------------------------------------------------


# Sizes by spatial dimensions, and channels. Together they reach every kernel, on both sides of what chooses among them:
# planes of many chunks, more channels than a block takes at once, many of both as matrix products like them, and the
# taps of upsampling by 2 behind a pool of 2.
REGIMES = ("small", "large planes", "many channels", "products", "upsampling")
LARGEST = {
    "small": {1: 300, 2: 24, 3: 9},
    "large planes": {1: 40000, 2: 200, 3: 34},
    "many channels": {1: 24, 2: 6, 3: 3},
    "products": {1: 600, 2: 40, 3: 12},
    "upsampling": {1: 300, 2: 80, 3: 40},
}
BATCH = st.sampled_from([1, 2, 3, 5, 2, 3, 1, 0])
FEW, MANY = st.integers(1, 5), st.sampled_from([63, 64, 65, 127, 128, 129, 255, 256, 257, 300])


@st.composite
def conv_arguments(draw: st.DrawFn) -> dict[str, Any]:
    """Shapes and arguments of a transposed convolution whose output has at least one element a plane."""
    dims, regime = draw(st.integers(1, 3)), draw(st.sampled_from(REGIMES))
    each = lambda strategy: tuple(draw(strategy) for _ in range(dims))  # noqa: E731
    largest = LARGEST[regime][dims]
    size = each(st.one_of(st.integers(largest // 3 if regime == "products" else 1, largest), st.integers(1, 6)))
    groups, channels, per_group = 1, draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 3, 4, 5, 8, 17]))
    if regime == "upsampling":
        kernel, stride, dilation, padding = [3] * dims, [2] * dims, [1] * dims, each(st.integers(0, 1))
        output_padding = tuple(draw(st.integers(int(i == 1 and p == 1), 1)) for i, p in zip(size, padding, strict=True))
    else:
        groups = draw(st.sampled_from([1, 1, 1, 2, 3, 6]))
        if regime == "large planes":
            channels, per_group = min(channels, 3), min(per_group, 3)
        elif regime == "many channels":
            few_in, few_out = draw(st.sampled_from([(False, True), (True, False), (False, False)]))
            channels, per_group = draw(FEW if few_in else MANY), draw(FEW if few_out else MANY)
            groups = min(groups, 2)
        elif regime == "products":
            channels, per_group = draw(st.integers(16, 40)), draw(st.sampled_from([48, 63, 64, 65, 72, 128]))
            groups = min(groups, 2)
        most = (16, 8) if dims == 1 and regime == "small" else (4, 3)
        kernel, stride = each(st.integers(1, most[0])), each(st.integers(1, most[1]))
        dilation = each(st.sampled_from([1, 1, 2, 3]))
        output_padding = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
        padded = draw(st.booleans())  # also by more than dilation * (kernel - 1)
        padding = tuple(
            draw(st.integers(0, min((i - 1) * s + d * (k - 1) + op, 2 * d * (k - 1) + 4) // 2)) if padded else 0
            for i, k, s, d, op in zip(size, kernel, stride, dilation, output_padding, strict=True)
        )
    return {
        "input": (draw(BATCH), groups * channels, *size),
        "weight": (per_group, *kernel),  # C_out/groups
        "stride": stride,
        "padding": padding,
        "output_padding": output_padding,
        "groups": groups,
        "dilation": dilation,
    }


def expanded(draw: st.DrawFn, values: Tensor) -> Tensor:
    """The first element of some dimensions in place of all, at stride 0."""
    for dim, size in enumerate(values.shape):
        if draw(st.booleans()):
            values = values.narrow(dim, 0, min(1, size)).expand(values.shape)
    return values


def in_any_layout(draw: st.DrawFn, values: Tensor) -> Tensor:
    """One of `LAYOUTS`, channels_last at an unaligned address, or expanded."""
    layout = draw(st.sampled_from([*LAYOUTS, "channels_last, offset 1", "expanded"]))
    if layout == "expanded":
        return expanded(draw, values)
    if layout in LAYOUTS:
        return LAYOUTS[layout](values)
    return LAYOUTS["offset 1"](LAYOUTS["channels_last"](values))


def factor(draw: st.DrawFn, inputs: Inputs, channels: int, dims: int, dtype: torch.dtype) -> Tensor | float | None:
    """A scale or shift in one of its accepted forms."""
    ones = [1] * dims
    shapes = ([channels], [channels, *ones], [1, channels, *ones], [1], [1] * (dims + 2), [])
    form = draw(st.sampled_from(["none", "number", "0-d on the CPU", *range(len(shapes))]))
    if form == "none":
        return None
    if form == "number":
        return draw(st.sampled_from([0.7, -1.75, 10.0]))
    if form == "0-d on the CPU":
        return inputs.channels(dtype=draw(st.sampled_from([dtype, torch.float64]))).cpu()
    return inputs.channels(*shapes[form], dtype=dtype)


# Values put into single cells of the input, and whether weights are then positive, so that infinities keep their sign;
# or into single taps of the weight, the input then being positive.
SPECIAL = {
    "none": (None, False),
    "nan": (math.nan, False),
    "+inf": (math.inf, True),
    "-inf": (-math.inf, True),
    "one inf, weights of both signs": (math.inf, False),
}


def put_special(draw: st.DrawFn, kind: str, values: Tensor) -> None:
    """Puts the special value into one or two cells, used or not."""
    value, positive = SPECIAL[kind]
    if value is None or values.numel() == 0:
        return
    for _ in range(draw(st.integers(1, 2)) if positive or math.isnan(value) else 1):
        index = tuple(draw(st.integers(0, size - 1)) for size in values.shape)
        values[index] = value


def draw_call(
    draw: st.DrawFn, device: torch.device, factors: Sequence[str]
) -> tuple[dict[str, Any], tuple[int, ...], bool]:
    """Arguments of a chain, its convolution's output sizes, and whether one infinity meets both signs."""
    arguments = draw(conv_arguments())
    per_group, *kernel = arguments["weight"]
    channels, dims = arguments["groups"] * per_group, len(kernel)
    names = ("stride", "padding", "output_padding", "dilation")
    columns = zip(arguments["input"][2:], kernel, *(arguments[name] for name in names), strict=True)
    output = tuple((i - 1) * s - 2 * p + op + d * (k - 1) + 1 for i, k, s, p, op, d in columns)

    dtype = draw(st.sampled_from(DTYPES))
    inputs = Inputs(draw(st.integers(0, 2**32)), device)
    kinds = [(kind, False) for kind in SPECIAL] + [(kind, True) for kind in ("nan", "+inf", "-inf")]
    special, in_weight = draw(st.sampled_from(kinds))
    positive = SPECIAL[special][1]
    x = inputs.input(*arguments["input"], dtype=dtype, positive=positive and in_weight)
    w = inputs.weight(x.shape[1], per_group, *kernel, dtype=dtype, positive=positive and not in_weight)
    put_special(draw, special, w if in_weight else x)
    arguments |= {"input": in_any_layout(draw, x), "weight": in_any_layout(draw, w)}
    if draw(st.booleans()):
        offset = draw(st.sampled_from(["contiguous", "offset 1", "offset 2", "offset 3"]))
        arguments["bias"] = LAYOUTS[offset](inputs.channels(channels, dtype=dtype))
    arguments |= {name: factor(draw, inputs, channels, dims, dtype) for name in factors}
    return arguments, output, special.startswith("one inf")


def launched(op: str, arguments: dict[str, Any]) -> str:
    """The CUDA kernels of a call, as an event that --hypothesis-show-statistics counts."""
    shapes = {name: value for name, value in arguments.items() if not name.startswith(("bias", "scale", "shift"))}
    shapes = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in shapes.items()}
    return ", ".join([op, *(launch.kernel for launch in fused_kernels.plan(op, **shapes).launches)])


class Log(TorchDispatchMode):
    """The ops that pass; `fused` has the names of this package's alone."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.fused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append(str(func))
        if func.namespace == "fused":
            self.fused.append(func._schema.name.removeprefix("fused::"))
        return func(*args, **(kwargs or {}))


# ---- processes -----------------------------------------------------------------------------------------------------


@pytest.fixture
def tests_on_path() -> dict[str, str]:
    """The environment for a process that imports these files."""
    paths = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths)}


def run_python(code: str, *arguments: str, env: dict[str, str] | None = None, timeout: int = 300) -> str:
    """Runs code in a fresh interpreter and returns what it prints; its failure is the test's."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        env={**os.environ, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout
