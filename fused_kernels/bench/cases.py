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
class Conv:
    """A transposed convolution's arguments, the same in every dimension."""

    kernel: int = 3
    stride: int = 1
    padding: int = 0
    output_padding: int = 0
    groups: int = 1

    def arguments(self) -> dict[str, int]:
        """Those that are not the ops' defaults."""
        names = {"stride": 1, "padding": 0, "output_padding": 0, "groups": 1}
        return {name: getattr(self, name) for name, default in names.items() if getattr(self, name) != default}

    def extent(self, extent: int) -> int:
        return (extent - 1) * self.stride - 2 * self.padding + self.kernel + self.output_padding


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


def _conv_weight(size: Size, conv: Conv, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A (C_in, C_out/groups, *kernel) weight, off centre in every channel, that gives outputs of a few units."""
    wide = torch.promote_types(dtype, torch.float32)
    dims, in_channels, per_group = len(size.input) - 2, size.input[1], size.out_channels // conv.groups
    kernel = [conv.kernel] * dims
    noise = torch.randn(in_channels, per_group, *kernel, dtype=wide, device=generator.device, generator=generator)
    offset = _away_from_zero((1, per_group, *[1] * dims), wide, generator)
    return ((noise + offset) * (2 / (math.prod(kernel) * math.sqrt(in_channels // conv.groups)))).to(dtype)


def _conv_transpose(args: Args, conv: Conv) -> Tensor:
    """The convolution of a case's arguments, in their dtype."""
    function = {3: F.conv_transpose1d, 4: F.conv_transpose2d, 5: F.conv_transpose3d}[args["input"].dim()]
    result: Tensor = function(args["input"], args["weight"], args["bias"], **conv.arguments())
    return result


def _in_format(x: Tensor, channels_last: bool) -> Tensor:
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return x.contiguous(memory_format=formats[x.dim()]) if channels_last else x


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
    dtypes: tuple[str, ...] = ("float32",)  # that count for it; the first is what runs unless others are asked for
    main: bool = True  # runs unless others are asked for
    # Whether so many channels meet that the operations may take longer than the bytes: the limit is then the larger.
    compute_bound: bool = False

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
    """A0: mean over H, W of a transposed convolution, plus a bias."""

    conv: Conv = Conv()

    op = "conv_transpose_global_avg_pool"
    limit = "read"

    def inputs(self, size: Size, dtype: torch.dtype, generator: torch.Generator) -> Args:
        channels = size.out_channels
        return {
            "input": _in_format(_features(size.input, dtype, generator), self.channels_last),
            "weight": _conv_weight(size, self.conv, dtype, generator),
            "bias": _away_from_zero((channels,), torch.float32, generator).to(dtype),
            **self.conv.arguments(),
            "shift": _away_from_zero((channels, 1, 1), torch.float32, generator).to(dtype),
        }

    def output_shape(self, size: Size) -> tuple[int, ...]:
        return (size.input[0], size.out_channels, 1, 1)

    def elements_read(self, size: Size) -> int:
        weight = size.input[1] * size.out_channels * self.conv.kernel**2
        return math.prod(size.input) + weight + 2 * size.out_channels

    def operations(self, size: Size) -> int:
        weight = size.input[1] * size.out_channels * self.conv.kernel**2
        return math.prod(size.input) + weight + 2 * size.input[0] * size.input[1] * size.out_channels

    def composition(self, args: Args) -> Tensor:
        a = _double(args)
        return _conv_transpose(a, self.conv).mean((2, 3), keepdim=True) + cast(Tensor, a["shift"])

    def exact(self, args: Args) -> Tensor:
        x, weight, bias, shift = (cast(Tensor, args[name]) for name in ("input", "weight", "bias", "shift"))
        area = math.prod(self.conv.extent(extent) for extent in x.shape[2:])
        rows, columns = (self._meetings(extent, x.device) for extent in x.shape[2:])
        # A sample at a time: in float64 it takes twice the memory and more.
        sums = torch.stack([torch.einsum("chw,kh,lw->ckl", sample.double(), rows, columns) for sample in x])
        mean = torch.einsum("nckl,cokl->no", sums, weight.double()) / area
        return (mean + bias.double())[..., None, None] + shift.double()

    def _meetings(self, extent: int, device: torch.device) -> Tensor:
        """(kernel, extent): 1 where the tap sends the input into the output, else 0."""
        taps = torch.arange(self.conv.kernel, device=device)[:, None]
        output = torch.arange(extent, device=device) * self.conv.stride - self.conv.padding + taps
        return ((output >= 0) & (output < self.conv.extent(extent))).double()

    def hand(self) -> Callable[..., Tensor]:
        pooled = self._hand_pooled()

        def with_spatial_dims(**args: Any) -> Tensor:
            return pooled(**args)[..., None, None]

        return with_spatial_dims

    def _hand_pooled(self) -> Callable[..., Tensor]:
        return _hand_pooled_whole if self.conv == Conv() else _hand_pooled_padded


def _hand_pooled_whole(input: Tensor, weight: Tensor, bias: Tensor, shift: Tensor) -> Tensor:
    """For stride 1 and padding 0."""
    (height, width), (kernel_h, kernel_w) = input.shape[2:], weight.shape[2:]
    shrink = height * width / ((height + kernel_h - 1) * (width + kernel_w - 1))
    return torch.addmm(bias + shift.flatten(), input.mean((2, 3)), weight.sum((2, 3)) * shrink)


def _hand_pooled_padded(
    input: Tensor, weight: Tensor, bias: Tensor, shift: Tensor, stride: int, padding: int, output_padding: int
) -> Tensor:
    """For kernel 3, stride 2, padding 1 and output padding 1 only: tap 0 misses the first row or column."""
    assert (stride, padding, output_padding) == (2, 1, 1)
    area = 4 * input.shape[2] * input.shape[3]
    top, left, corner = input[:, :, 0].sum(2), input[:, :, :, 0].sum(2), input[:, :, 0, 0]
    sums = torch.cat((input.sum((2, 3)), -top, -left, corner), 1)
    taps = torch.cat((weight.sum((2, 3)), weight[:, :, 0].sum(2), weight[:, :, :, 0].sum(2), weight[:, :, 0, 0]))
    return torch.addmm(bias + shift.flatten(), sums, taps / area)


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
        pooled = self._hand_pooled()

        def logsumexp(out_scale: float, **args: Any) -> Tensor:
            return pooled(**args).logsumexp(1, keepdim=True) * out_scale

        return logsumexp


@dataclass(frozen=True)
class ConvAvgPool(Case):
    """B: transposed convolution, average pool whose stride is its kernel's size, affine."""

    conv: Conv = Conv(stride=2, padding=1)
    pool: int = 2

    op = "conv_transpose_avg_pool"
    limit = "copy"

    def inputs(self, size: Size, dtype: torch.dtype, generator: torch.Generator) -> Args:
        channels, device = size.out_channels, generator.device
        ones = [1] * (len(size.input) - 2)
        return {
            "input": _in_format(_features(size.input, dtype, generator), self.channels_last),
            "weight": _conv_weight(size, self.conv, dtype, generator),
            "bias": _away_from_zero((channels,), torch.float32, generator).to(dtype),
            **self.conv.arguments(),
            "pool_kernel_size": self.pool,
            "scale1": torch.tensor(0.5, dtype=dtype, device=device),
            "shift": _away_from_zero((channels, *ones), torch.float32, generator).to(dtype),
            "scale2": torch.tensor(1.0, dtype=dtype, device=device),
        }

    def output_shape(self, size: Size) -> tuple[int, ...]:
        return (size.input[0], size.out_channels, *(self.conv.extent(extent) // self.pool for extent in size.input[2:]))

    def elements_read(self, size: Size) -> int:
        return math.prod(size.input) + self._weights(size) + 2 * size.out_channels + 2

    def operations(self, size: Size) -> int:
        """A multiplication and an addition for each summed tap that meets an input."""
        outputs = self.output_shape(size)
        pairs = [
            sum(0 <= o * self.step + offset < extent for o in range(output) for offset in self.taps())
            for extent, output in zip(size.input[2:], outputs[2:], strict=True)
        ]
        depth = size.input[1] // self.conv.groups
        return 2 * math.prod(outputs[:2]) * depth * math.prod(pairs) + self._weights(size)

    def _weights(self, size: Size) -> int:
        return size.input[1] * size.out_channels // self.conv.groups * self.conv.kernel ** (len(size.input) - 2)

    @property
    def step(self) -> int:
        """The collapsed convolution's stride."""
        return self.pool // self.conv.stride

    def taps(self) -> dict[int, list[int]]:
        """The collapsed convolution along a dimension: output o meets input o*step + offset with the sum of these taps.

        Tap k of input i lands on element i*stride - padding + k, and output o averages the elements from o*pool on.
        """
        sums: dict[int, list[int]] = {}
        for tap in range(self.conv.kernel):
            for element in range(self.pool):
                offset, remainder = divmod(element + self.conv.padding - tap, self.conv.stride)
                if remainder == 0:
                    sums.setdefault(offset, []).append(tap)
        return dict(sorted(sums.items()))

    def composition(self, args: Args) -> Tensor:
        a = _double(args)
        pool = {3: F.avg_pool1d, 4: F.avg_pool2d, 5: F.avg_pool3d}[a["input"].dim()]
        pooled: Tensor = (pool(_conv_transpose(a, self.conv), self.pool) * a["scale1"] + a["shift"]) * a["scale2"]
        return pooled

    def hand(self) -> Callable[..., Tensor]:
        conv, taps, step, pool = self.conv, self.taps(), self.step, self.pool
        first, last = min(taps), max(taps)

        def convolution(
            input: Tensor, weight: Tensor, bias: Tensor, scale1: Tensor, shift: Tensor, scale2: Tensor, **_: int
        ) -> Tensor:
            extents, dims = input.shape[2:], input.dim() - 2
            for dim in range(2, dims + 2):
                sums = [weight.narrow(dim, tap[0], len(tap)).sum(dim) for tap in taps.values()]
                weight = torch.stack(sums, dim)
            folded = weight.unflatten(0, (conv.groups, -1)).transpose(1, 2).flatten(0, 1)
            folded = folded * (scale1 * scale2 / pool**dims)
            # One padding holds for both ends, so there may be outputs too many at one of them.
            outputs = [conv.extent(extent) // pool for extent in extents]
            ends = [(output - 1) * step + last - extent + 1 for output, extent in zip(outputs, extents)]  # noqa: B905
            padding = [max(-first, end, 0) for end in ends]
            function = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[dims]
            shifts = (bias * scale1 + shift.flatten()) * scale2
            result = function(input, folded, shifts, [step] * dims, padding, groups=conv.groups)
            for dim in range(dims):
                result = result.narrow(dim + 2, (padding[dim] + first) // step, outputs[dim])
            return result

        return convolution


@dataclass(frozen=True)
class GlobalPool(Case):
    """G: the mean over H, W; its eager peer is torch.mean."""

    op = "global_avg_pool"
    limit = "read"
    peers = ("ours", "ours_graph", "eager", "compile")
    convolves = False

    def inputs(self, size: Size, dtype: torch.dtype, generator: torch.Generator) -> Args:
        return {"input": _in_format(_features(size.input, dtype, generator), self.channels_last)}

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
    text = f"global average pool of {full.input[2]}x{full.input[3]}"
    sizes = (full, full.with_batch(reduced_batch), tiny)
    dtypes = ("float32", "float16")
    return [
        GlobalPool(name, text, *sizes, dtypes=dtypes),
        GlobalPool(f"{name}-cl", f"{text}, channels_last", *sizes, channels_last=True, dtypes=dtypes),
    ]


def _average_pool(name: str, full: Size, reduced_batch: int, tiny: Size, conv: Conv, pool: int = 2) -> Case:
    """B at other points, at which many channels may meet."""
    dims = len(full.input) - 2
    text = f"conv_transpose{dims}d {'x'.join([str(conv.kernel)] * dims)} stride {conv.stride}"
    text += f" groups {conv.groups}" if conv.groups > 1 else ""
    text += f", scale, avg_pool {pool}, bias, scale"
    dtypes = ("float32", "float16") if dims > 1 else ("float16",)
    sizes = (full, full.with_batch(reduced_batch), tiny)
    return ConvAvgPool(name, text, *sizes, dtypes=dtypes, main=False, compute_bound=True, conv=conv, pool=pool)


CASES: dict[str, Case] = {
    case.name: case
    for case in (
        ConvGlobalPoolLogSumExp("A", _A_TEXT, _A_FULL, _A_REDUCED, _A_TINY, dtypes=("float32", "bfloat16")),
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
        ConvGlobalPoolLogSumExp(
            "A-pad",
            f"{_A_TEXT}; stride 2, padding 1, output_padding 1",
            Size((16, 64, 128, 128), 128),
            Size((4, 64, 128, 128), 128),
            _A_TINY,
            main=False,
            conv=Conv(stride=2, padding=1, output_padding=1),
        ),
        ConvAvgPool("B", _B_TEXT, _B_FULL, _B_FULL.with_batch(16), _B_TINY, dtypes=("float32", "float16", "bfloat16")),
        ConvAvgPool("B-b1", f"{_B_TEXT}; batch 1", _B_FULL.with_batch(1), _B_FULL.with_batch(1), _B_TINY.with_batch(1)),
        ConvAvgPool(
            "B-cl",
            f"{_B_TEXT}; channels_last_3d",
            _B_FULL,
            _B_FULL.with_batch(16),
            _B_TINY,
            channels_last=True,
            dtypes=("float32", "float16"),
            main=False,
        ),
        _average_pool(
            "B-2d", Size((32, 64, 128, 128), 64), 2, Size((3, 4, 6, 5), 4), Conv(kernel=4, stride=2, padding=1)
        ),
        _average_pool(
            "B-3d",
            Size((16, 16, 16, 64, 64), 32),
            1,
            Size((3, 4, 4, 6, 5), 8),
            Conv(stride=2, padding=1, output_padding=1),
        ),
        _average_pool(
            "B-pool4", Size((64, 3, 32, 32, 32), 16), 8, Size((3, 3, 8, 6, 5), 4), Conv(stride=2, padding=1), pool=4
        ),
        _average_pool(
            "B-1d", Size((16, 256, 8192), 128), 1, Size((3, 8, 20), 4), Conv(kernel=16, stride=8, padding=4), pool=8
        ),
        _average_pool(
            "B-dw",
            Size((32, 64, 128, 128), 64),
            4,
            Size((2, 64, 6, 5), 64),
            Conv(kernel=4, stride=2, padding=1, groups=64),
        ),
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


HostWay = Literal["eager", "wrapper", "module", "compiled", "graph"]  # the last two are of the wrapper


@dataclass(frozen=True)
class HostCall:
    """A small call whose host time is measured, with the value it must give."""

    label: str
    ours: bool
    way: HostWay
    function: Callable[..., Tensor]
    args: Args
    exact: Tensor


def host_calls(dtype: torch.dtype, generator: torch.Generator) -> list[HostCall]:
    """Calls on inputs so small that nothing but the way to the kernel costs time; PyTorch's own in front of ours."""
    calls: dict[tuple[str, HostWay], HostCall] = {}
    last: tuple[HostWay, ...] = ("compiled", "graph") if generator.device.type == "cuda" else ("compiled",)
    for name in ("G-7", "A0", "A-small", "B"):
        case = CASES[name]
        args = case.inputs(case.tiny, dtype, generator)
        peer, wrapper, exact = _host_peer(args), case.function("ours"), case.exact(args)
        found = [peer, *(replace(peer, way=way) for way in last)]
        found.append(HostCall(case.op, True, "eager", getattr(torch.ops.fused, case.op), args, exact))
        found.append(HostCall(case.op, True, "wrapper", wrapper, args, exact))
        module = _host_module(case, args)
        if module:
            found.append(HostCall(case.op, True, "module", module, {"input": args["input"]}, exact))
        found += [HostCall(case.op, True, way, wrapper, args, exact) for way in last]
        for call in found:
            calls.setdefault((call.label, call.way), call)  # a peer stands once
    return list(calls.values())


def _host_peer(args: Args) -> HostCall:
    """The part of a case that is one call of PyTorch's."""
    x: Tensor = args["input"]
    if "weight" not in args:
        mean = {"input": x, "dim": (2, 3), "keepdim": True}
        return HostCall("torch.mean", False, "eager", torch.mean, mean, torch.mean(**_double(mean)))
    functions: dict[int, Callable[..., Tensor]] = {4: F.conv_transpose2d, 5: F.conv_transpose3d}
    function, label = functions[x.dim()], f"conv_transpose{x.dim() - 2}d"
    given = {name: value for name, value in args.items() if name in ("input", "weight", "bias", "stride", "padding")}
    return HostCall(label, False, "eager", function, given, function(**_double(given)))


def _host_module(case: Case, args: Args) -> torch.nn.Module | None:
    """The module that holds the arguments as its parameters, where there is one."""
    if isinstance(case, ConvGlobalPoolLogSumExp):
        kind: Callable[..., torch.nn.Module] = fused_kernels.nn.ConvTranspose2dGlobalAvgPoolLogSumExp
        arguments: tuple[Any, ...] = ()
    elif isinstance(case, ConvAvgPool):
        kind, arguments = fused_kernels.nn.ConvTranspose3dAvgPool, (args["stride"], args["padding"], 1.0, 1.0)
    else:
        return None
    weight: Tensor = args["weight"]
    module = kind(weight.shape[0], weight.shape[1], tuple(weight.shape[2:]), *arguments, args["shift"].shape)
    names = {"weight": "conv_transpose.weight", "bias": "conv_transpose.bias", "shift": "bias"}
    tensors = {name: value for name, value in args.items() if isinstance(value, Tensor) and name != "input"}
    module.load_state_dict({names.get(name, name): value for name, value in tensors.items()}, assign=True)
    return module
