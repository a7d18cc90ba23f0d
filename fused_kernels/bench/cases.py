"""What is measured: every case declares its inputs, bytes moved, operations, peers and verifier.

The float64 values that every output is compared with come from upcast inputs and share no code with the package:

- average pool (B) and global pool (G): the composition itself, in float64;
- global pool of a convolution (A, A0): at real size the float64 convolution would be 600 GFLOP, so the expected value
  is the collapsed formula in float64 (sum each plane, multiply by the weights summed over their taps). Before it is
  trusted it is compared with the true float64 composition (`check_exact`): on the case's tiny size, and on a GPU also
  on the first sample of the very inputs that are timed. Eager PyTorch at full size must agree with it too.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor

import fused_kernels
from fused_kernels import reference

Args = dict[str, Any]  # an op's arguments by name
SizeName = Literal["full", "reduced", "tiny"]

DTYPES = {
    "float32": torch.float32,
    "float64": torch.float64,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}

# What a peer's error may be, relative to the largest expected value: enough to know that it computes the same thing.
# Half types round every intermediate (mean, bias, logsumexp) to 11 and 8 bits. Ours is held to `allowed_error` instead.
PEER_TOLERANCE = {torch.float64: 1e-11, torch.float32: 2e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
TF32_TOLERANCE = 5e-3  # products of 11-bit mantissas


@dataclass(frozen=True)
class Peer:
    """One way of computing a case: ours, the plain composition, or the same collapse written by hand in PyTorch.

    ``tf32`` lets convolutions use TF32, PyTorch's default; it means something on CUDA in float32 only.
    """

    key: str
    label: str
    source: Literal["ours", "eager", "hand"]
    tf32: bool = False
    compiled: bool = False
    graph: bool = False


# Ours runs first, so that no correct result of another peer can be left in the memory that it gets.
PEERS = {
    peer.key: peer
    for peer in (
        Peer("ours", "ours", "ours"),
        Peer("ours_graph", "ours, graph", "ours", graph=True),
        Peer("eager", "eager", "eager"),
        Peer("eager_tf32", "eager, TF32", "eager", tf32=True),
        Peer("compile", "torch.compile", "eager", tf32=True, compiled=True),
        Peer("hand", "by hand", "hand", tf32=True),
        Peer("hand_compile", "by hand, compiled", "hand", tf32=True, compiled=True),
        Peer("hand_graph", "by hand, graph", "hand", tf32=True, compiled=True, graph=True),
    )
}


@dataclass(frozen=True)
class Size:
    """A case's dimensions: input (N, C_in, *spatial) and, with a convolution, C_out."""

    input: tuple[int, ...]
    out_channels: int = 0

    def with_batch(self, batch: int) -> Size:
        return replace(self, input=(batch, *self.input[1:]))


def _away_from_zero(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Magnitudes in [0.5, 1.5) with random signs."""
    magnitude = torch.rand(shape, dtype=dtype, device=generator.device, generator=generator) + 0.5
    negative = torch.randint(0, 2, shape, device=generator.device, generator=generator, dtype=torch.bool)
    return torch.where(negative, -magnitude, magnitude)


def _features(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Noise with its own scale and offset in every sample and channel: no constant, divisor or swapped plane passes."""
    wide = torch.promote_types(dtype, torch.float32)
    plane = (*shape[:2], *(1 for _ in shape[2:]))
    x = torch.randn(shape, dtype=wide, device=generator.device, generator=generator)
    x.mul_(_away_from_zero(plane, wide, generator).abs()).add_(_away_from_zero(plane, wide, generator))
    return x.to(dtype)


def _conv_weight(
    in_channels: int, out_channels: int, kernel: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
) -> Tensor:
    """A (C_in, C_out, *kernel) weight, off centre in every output channel, that gives outputs of a few units."""
    wide = torch.promote_types(dtype, torch.float32)
    ones = tuple(1 for _ in kernel)
    noise = torch.randn(in_channels, out_channels, *kernel, dtype=wide, device=generator.device, generator=generator)
    offset = _away_from_zero((1, out_channels, *ones), wide, generator)
    return ((noise + offset) * (2 / (math.prod(kernel) * math.sqrt(in_channels)))).to(dtype)


def _double(args: Args) -> Args:
    return {name: value.double() if isinstance(value, Tensor) else value for name, value in args.items()}


@dataclass(frozen=True)
class Case(ABC):
    """A benchmark case at its full size, a reduced one for CPUs, and a tiny one for tests and `check_exact`."""

    name: str
    about: str
    full: Size
    reduced: Size
    tiny: Size
    channels_last: bool = False

    op: ClassVar[str]  # name in fused_kernels, fused_kernels.reference and torch.ops.fused
    limit: ClassVar[Literal["read", "copy"]]  # what bounds it: reading the input, or copying all bytes moved
    peers: ClassVar[tuple[str, ...]] = tuple(PEERS)
    convolves: ClassVar[bool] = True  # whether TF32 can matter
    rtol32: ClassVar[float | None] = None  # float32 only: each value of ours within this of the exact one

    @abstractmethod
    def inputs(self, size: Size, dtype: torch.dtype, generator: torch.Generator) -> Args:
        """Fresh arguments on the generator's device."""

    @abstractmethod
    def output_shape(self, size: Size) -> tuple[int, ...]: ...

    @abstractmethod
    def elements_read(self, size: Size) -> int:
        """Elements of all inputs, each read once."""

    @abstractmethod
    def operations(self, size: Size) -> int:
        """Floating-point operations of the collapsed computation, the least known to suffice."""

    @abstractmethod
    def composition(self, args: Args) -> Tensor:
        """The op as its definition says, in float64."""

    def exact(self, args: Args) -> Tensor:
        """The expected values in float64."""
        return self.composition(args)

    def hand(self) -> Callable[..., Tensor]:
        """The same collapse written in PyTorch, as a skilled user would; takes the op's arguments."""
        raise NotImplementedError(f"{self.name} has no form collapsed by hand")

    def size(self, name: SizeName, batch: int | None = None) -> Size:
        size = {"full": self.full, "reduced": self.reduced, "tiny": self.tiny}[name]
        return size if batch is None else size.with_batch(batch)

    def bytes_moved(self, size: Size, dtype: torch.dtype) -> tuple[int, int]:
        """Bytes read and written by a single pass: each input and output element once."""
        return self.elements_read(size) * dtype.itemsize, math.prod(self.output_shape(size)) * dtype.itemsize

    def function(self, source: Literal["ours", "eager", "hand"]) -> Callable[..., Tensor]:
        if source == "hand":
            return self.hand()
        function: Callable[..., Tensor] = getattr(fused_kernels if source == "ours" else reference, self.op)
        return function

    def available_peers(self, device: torch.device, dtype: torch.dtype) -> list[Peer]:
        """The peers that differ from each other on this device and dtype."""
        on_gpu = device.type == "cuda"
        tf32_matters = on_gpu and dtype == torch.float32 and self.convolves
        return [
            peer
            for peer in (PEERS[key] for key in self.peers)
            if (on_gpu or not peer.graph) and (tf32_matters or peer.key != "eager_tf32")
        ]

    def tolerance(self, peer: Peer, device: torch.device, dtype: torch.dtype) -> float:
        if peer.tf32 and self.convolves and device.type == "cuda" and dtype == torch.float32:
            return TF32_TOLERANCE
        return PEER_TOLERANCE[dtype]


@dataclass(frozen=True)
class ConvGlobalPool(Case):
    """A0: mean over H, W of a 3x3 transposed convolution, plus a bias."""

    op = "conv_transpose_global_avg_pool"
    limit = "read"
    kernel: ClassVar[tuple[int, ...]] = (3, 3)

    def inputs(self, size: Size, dtype: torch.dtype, generator: torch.Generator) -> Args:
        channels = size.out_channels
        return {
            "input": _features(size.input, dtype, generator),
            "weight": _conv_weight(size.input[1], channels, self.kernel, dtype, generator),
            "bias": _away_from_zero((channels,), torch.float32, generator).to(dtype),
            "shift": _away_from_zero((channels, 1, 1), torch.float32, generator).to(dtype),
        }

    def output_shape(self, size: Size) -> tuple[int, ...]:
        return (size.input[0], size.out_channels, 1, 1)

    def elements_read(self, size: Size) -> int:
        weight = size.input[1] * size.out_channels * math.prod(self.kernel)
        return math.prod(size.input) + weight + 2 * size.out_channels

    def operations(self, size: Size) -> int:
        weight = size.input[1] * size.out_channels * math.prod(self.kernel)
        return math.prod(size.input) + weight + 2 * size.input[0] * size.input[1] * size.out_channels

    def composition(self, args: Args) -> Tensor:
        a = _double(args)
        wide: Tensor = F.conv_transpose2d(a["input"], a["weight"], a["bias"])
        return wide.mean((2, 3), keepdim=True) + cast(Tensor, a["shift"])

    def exact(self, args: Args) -> Tensor:
        x, weight, bias, shift = (cast(Tensor, args[name]) for name in ("input", "weight", "bias", "shift"))
        area = (x.shape[2] + weight.shape[2] - 1) * (x.shape[3] + weight.shape[3] - 1)
        planes = x.sum((2, 3), dtype=torch.float64)
        taps = weight.double().sum((2, 3))
        mean = torch.einsum("nc,co->no", planes, taps) / area
        return (mean + bias.double())[..., None, None] + shift.double()

    def hand(self) -> Callable[..., Tensor]:
        def pooled(input: Tensor, weight: Tensor, bias: Tensor, shift: Tensor) -> Tensor:
            return _hand_pooled(input, weight, bias, shift)[..., None, None]

        return pooled


def _hand_pooled(input: Tensor, weight: Tensor, bias: Tensor, shift: Tensor) -> Tensor:
    (height, width), (kernel_h, kernel_w) = input.shape[2:], weight.shape[2:]
    shrink = height * width / ((height + kernel_h - 1) * (width + kernel_w - 1))
    return torch.addmm(bias + shift.flatten(), input.mean((2, 3)), weight.sum((2, 3)) * shrink)


@dataclass(frozen=True)
class ConvGlobalPoolLogSumExp(ConvGlobalPool):
    """A: the same, then logsumexp over the channels, times ten."""

    op = "conv_transpose_global_avg_pool_logsumexp"
    rtol32 = 1e-6  # a lax tolerance proves nothing here: a constant input stays within 5e-3

    def inputs(self, size: Size, dtype: torch.dtype, generator: torch.Generator) -> Args:
        return {**super().inputs(size, dtype, generator), "out_scale": 10.0}

    def output_shape(self, size: Size) -> tuple[int, ...]:
        return (size.input[0], 1)

    def composition(self, args: Args) -> Tensor:
        return super().composition(args).logsumexp(1).flatten(1) * float(args["out_scale"])

    def exact(self, args: Args) -> Tensor:
        return super().exact(args).flatten(1).logsumexp(1, keepdim=True) * float(args["out_scale"])

    def hand(self) -> Callable[..., Tensor]:
        def logsumexp(input: Tensor, weight: Tensor, bias: Tensor, shift: Tensor, out_scale: float) -> Tensor:
            return _hand_pooled(input, weight, bias, shift).logsumexp(1, keepdim=True) * out_scale

        return logsumexp


@dataclass(frozen=True)
class ConvAvgPool(Case):
    """B: 3x3x3 transposed convolution (stride 2, padding 1), 2x2x2 average pool, affine."""

    op = "conv_transpose_avg_pool"
    limit = "copy"

    def inputs(self, size: Size, dtype: torch.dtype, generator: torch.Generator) -> Args:
        channels, device = size.out_channels, generator.device
        return {
            "input": _features(size.input, dtype, generator),
            "weight": _conv_weight(size.input[1], channels, (3, 3, 3), dtype, generator),
            "bias": _away_from_zero((channels,), torch.float32, generator).to(dtype),
            "stride": 2,
            "padding": 1,
            "pool_kernel_size": 2,
            "scale1": torch.tensor(0.5, dtype=dtype, device=device),
            "shift": _away_from_zero((channels, 1, 1, 1), torch.float32, generator).to(dtype),
            "scale2": torch.tensor(1.0, dtype=dtype, device=device),
        }

    def output_shape(self, size: Size) -> tuple[int, ...]:
        return (size.input[0], size.out_channels, *(extent - 1 for extent in size.input[2:]))

    def elements_read(self, size: Size) -> int:
        return math.prod(size.input) + size.input[1] * size.out_channels * 27 + 2 * size.out_channels + 2

    def operations(self, size: Size) -> int:
        taps = 2 * size.input[1] * 8  # a multiplication and an addition for each of 2x2x2 summed taps
        return math.prod(self.output_shape(size)) * taps + size.input[1] * size.out_channels * 27

    def composition(self, args: Args) -> Tensor:
        a = _double(args)
        wide = F.conv_transpose3d(a["input"], a["weight"], a["bias"], stride=a["stride"], padding=a["padding"])
        pooled: Tensor = (F.avg_pool3d(wide, a["pool_kernel_size"]) * a["scale1"] + a["shift"]) * a["scale2"]
        return pooled

    def hand(self) -> Callable[..., Tensor]:
        return _hand_avg_pool


def _hand_avg_pool(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    padding: int,
    pool_kernel_size: int,
    scale1: Tensor,
    shift: Tensor,
    scale2: Tensor,
) -> Tensor:
    """For kernel 3, stride 2, padding 1 and pool 2 only: per dimension tap 0 is W[1] + W[2], tap 1 is W[0]."""
    assert (stride, padding, pool_kernel_size) == (2, 1, 2)
    taps = weight
    for dim in (2, 3, 4):
        first, second, third = taps.unbind(dim)
        taps = torch.stack((second + third, first), dim)
    folded = taps.transpose(0, 1) * (scale1 * scale2 / 8)
    return F.conv3d(input, folded, (bias * scale1 + shift.flatten()) * scale2)


@dataclass(frozen=True)
class GlobalPool(Case):
    """G: the mean over H, W; its eager peer is torch.mean."""

    op = "global_avg_pool"
    limit = "read"
    peers = ("ours", "ours_graph", "eager", "compile")
    convolves = False

    def inputs(self, size: Size, dtype: torch.dtype, generator: torch.Generator) -> Args:
        x = _features(size.input, dtype, generator)
        return {"input": x.contiguous(memory_format=torch.channels_last) if self.channels_last else x}

    def output_shape(self, size: Size) -> tuple[int, ...]:
        return (*size.input[:2], 1, 1)

    def elements_read(self, size: Size) -> int:
        return math.prod(size.input)

    def operations(self, size: Size) -> int:
        return math.prod(size.input)

    def composition(self, args: Args) -> Tensor:
        x: Tensor = args["input"]
        return x.sum((2, 3), keepdim=True, dtype=torch.float64) / math.prod(x.shape[2:])


_A_FULL = Size((16, 64, 512, 512), 128)
_A_REDUCED = _A_FULL.with_batch(4)
_A_TINY = Size((3, 5, 9, 12), 7)
_B_FULL = Size((128, 3, 16, 32, 32), 16)
_B_TINY = Size((3, 3, 4, 6, 5), 4)
_A_TEXT = "conv_transpose2d 3x3, mean, bias, logsumexp, x10"
_B_TEXT = "conv_transpose3d 3x3x3 stride 2, scale, avg_pool 2, bias, scale"


def _global_pools(name: str, full: Size, reduced_batch: int, tiny: Size) -> list[Case]:
    plane = f"{full.input[2]}x{full.input[3]}"
    sizes = (full, full.with_batch(reduced_batch), tiny)
    return [
        GlobalPool(name, f"global average pool of {plane}", *sizes),
        GlobalPool(f"{name}-cl", f"global average pool of {plane}, channels_last", *sizes, channels_last=True),
    ]


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        ConvGlobalPoolLogSumExp("A", _A_TEXT, _A_FULL, _A_REDUCED, _A_TINY),
        ConvGlobalPool("A0", "conv_transpose2d 3x3, mean, bias", _A_FULL, _A_REDUCED, _A_TINY),
        ConvGlobalPoolLogSumExp(
            "A-b1", f"{_A_TEXT}; batch 1", _A_FULL.with_batch(1), _A_FULL.with_batch(1), _A_TINY.with_batch(1)
        ),
        ConvGlobalPoolLogSumExp(
            "A-small",
            f"{_A_TEXT}; small",
            Size((128, 3, 32, 32), 16),
            Size((128, 3, 32, 32), 16),
            Size((4, 3, 8, 8), 16),
        ),
        ConvAvgPool("B", _B_TEXT, _B_FULL, _B_FULL.with_batch(16), _B_TINY),
        ConvAvgPool("B-b1", f"{_B_TEXT}; batch 1", _B_FULL.with_batch(1), _B_FULL.with_batch(1), _B_TINY.with_batch(1)),
        *_global_pools("G-7", Size((256, 2048, 7, 7)), 32, Size((3, 8, 7, 7))),
        *_global_pools("G-56", Size((32, 512, 56, 56)), 4, Size((2, 4, 12, 12))),
        *_global_pools("G-512", Size((16, 64, 512, 512)), 4, Size((2, 3, 16, 16))),
    )
}


def relative_error(output: Tensor, exact: Tensor) -> float:
    """Largest error over the largest expected value; infinite if anything is wrong in kind (shape, NaN, infinity)."""
    if output.shape != exact.shape:
        return math.inf
    error = ((output.double() - exact).abs().max() / exact.abs().max()).item()
    return error if math.isfinite(error) else math.inf


def allowed_error(exact: Tensor, dtype: torch.dtype, eager_error: float | None) -> float:
    """What ours may differ by: eager's own error (TF32 off), or one unit in the last place of the largest output.

    Where eager cannot run, and in float64, where the expected values are no better than eager's, it is the peers'
    tolerance.
    """
    if dtype == torch.float64 or eager_error is None:
        return PEER_TOLERANCE[dtype]
    largest = exact.abs().max().item()
    ulp: float = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest))
    return max(eager_error, ulp / largest)


def complaint(case: Case, output: Tensor, exact: Tensor, dtype: torch.dtype, allowed: float, ours: bool) -> str:
    """Why an output is not acceptable, or an empty string."""
    if output.shape != exact.shape:
        return f"shape {tuple(output.shape)}, expected {tuple(exact.shape)}"
    if output.dtype != dtype:
        return f"dtype {output.dtype}, expected {dtype}"
    wrong = int(output.isfinite().logical_not().sum().item())
    if wrong:
        return f"{wrong} of {output.numel()} values are not finite"
    error = relative_error(output, exact)
    if error > allowed:
        return f"error {error:.2e} is above {allowed:.2e}"
    if ours and case.rtol32 is not None and dtype == torch.float32:
        worst = ((output.double() - exact).abs() / exact.abs()).max().item()
        if worst > case.rtol32:
            return f"a value is off by {worst:.2e} of itself, above {case.rtol32:.0e}"
    return ""


def check_exact(case: Case, args: Args) -> None:
    """Compare `Case.exact` with the true float64 composition; raises if they differ.

    On the tiny size on the CPU, and on a GPU on the first sample of ``args`` as well.
    """
    samples = [case.inputs(case.tiny, torch.float64, torch.Generator().manual_seed(0))]
    if args["input"].is_cuda:
        samples.append({**args, "input": args["input"][:1]})
    for sample in samples:
        error = relative_error(case.exact(sample), case.composition(sample))
        if error > 1e-10:
            raise AssertionError(f"{case.name}: the collapsed formula differs from the composition by {error:.2e}")


@dataclass(frozen=True)
class HostCall:
    """A small call whose host time is measured, with the value it must give."""

    label: str
    ours: bool
    call: Callable[[], Tensor]
    exact: Tensor


def host_calls(dtype: torch.dtype, generator: torch.Generator) -> list[HostCall]:
    """Calls on inputs so small that nothing but the way to the kernel costs time; PyTorch's own beside ours."""
    pool, chain, average = CASES["G-7"], CASES["A-small"], CASES["B"]
    g, a, b = (case.inputs(case.tiny, dtype, generator) for case in (pool, chain, average))
    raw = torch.ops.fused.global_avg_pool
    conv2 = F.conv_transpose2d(a["input"].double(), a["weight"].double(), a["bias"].double())
    conv3 = F.conv_transpose3d(b["input"].double(), b["weight"].double(), b["bias"].double(), 2, 1)
    ours_pool, ours_chain, ours_average = (case.function("ours") for case in (pool, chain, average))
    return [
        HostCall("torch.mean", False, lambda: torch.mean(g["input"], (2, 3), keepdim=True), pool.exact(g)),
        HostCall("global_avg_pool", True, lambda: ours_pool(**g), pool.exact(g)),
        HostCall("torch.ops.fused.global_avg_pool", True, lambda: raw(g["input"]), pool.exact(g)),
        HostCall("conv_transpose2d", False, lambda: F.conv_transpose2d(a["input"], a["weight"], a["bias"]), conv2),
        HostCall(chain.op, True, lambda: ours_chain(**a), chain.exact(a)),
        HostCall(
            "conv_transpose3d", False, lambda: F.conv_transpose3d(b["input"], b["weight"], b["bias"], 2, 1), conv3
        ),
        HostCall(average.op, True, lambda: ours_average(**b), average.exact(b)),
    ]
