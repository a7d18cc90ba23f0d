"""The shape arithmetic of ``_C`` against brute force, and both collapsed forms built on it against PyTorch."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_kernels import _C

NAMES = ("input", "kernel", "stride", "padding", "output_padding", "dilation")
Dim = dict[str, int]


def random_dim(rng: random.Random, most: int) -> Dim:
    """One dimension's arguments, padding past the kernel's reach included, with an output of at least one element."""
    while True:
        stride, dilation = rng.randint(1, 4), rng.randint(1, 4)
        sizes = (rng.randint(1, most), rng.randint(1, 5), stride)
        values = (*sizes, rng.randint(0, 9), rng.randint(0, max(stride, dilation) - 1), dilation)
        dim = dict(zip(NAMES, values, strict=True))
        if output_size(dim) > 0:
            return dim


def output_size(dim: Dim) -> int:
    """Where the last tap of the last input lands, without the padding, and what output_padding adds."""
    last = (dim["input"] - 1) * dim["stride"] + (dim["kernel"] - 1) * dim["dilation"]
    return last + 1 - 2 * dim["padding"] + dim["output_padding"]


def lands(dim: Dim, index: int, tap: int) -> int | None:
    """The output that a tap sends an input to."""
    output = index * dim["stride"] - dim["padding"] + tap * dim["dilation"]
    return output if 0 <= output < output_size(dim) else None


def cells(bounds: tuple[int, int]) -> set[int]:
    return set(range(*bounds))


EDGES = [  # the workloads', and what is easily got wrong
    dict(zip(NAMES, values, strict=True))
    for values in [
        (512, 3, 1, 0, 0, 1),
        (32, 3, 2, 1, 0, 1),
        (4, 1, 1, 1, 0, 1),  # the border meets no tap
        (1, 3, 1, 0, 1, 2),  # output_padding at stride 1
        (3, 1, 3, 0, 0, 1),  # outputs that no tap reaches
        (9, 1, 2, 5, 1, 1),  # padding beyond the kernel
        (40, 40, 1, 20, 0, 1),  # many segments
        (5, 4, 3, 2, 2, 4),
    ]
]
DIMS = [*EDGES, *(random_dim(random.Random(seed), 12) for seed in range(400))]


def test_output_size() -> None:
    for dim in DIMS:
        x, weight = torch.zeros(1, 1, dim["input"]), torch.zeros(1, 1, dim["kernel"])
        arguments = {name: dim[name] for name in ("stride", "padding", "output_padding", "dilation")}
        assert _C.conv_transpose_output_size(**dim) == F.conv_transpose1d(x, weight, **arguments).shape[-1], dim


def test_ranges_of_taps_and_inputs() -> None:
    for dim in DIMS:
        pairs = itertools.product(range(dim["input"]), range(dim["kernel"]))
        used = {(index, tap) for index, tap in pairs if lands(dim, index, tap) is not None}
        for tap in range(dim["kernel"]):
            assert cells(_C.tap_input_range(tap, **dim)) == {i for i, t in used if t == tap}, (dim, tap)
        for index in range(dim["input"]):
            assert cells(_C.input_tap_range(index, **dim)) == {t for i, t in used if i == index}, (dim, index)


def test_segments_are_disjoint_and_taps_are_runs_of_them() -> None:
    for dim in DIMS:
        segments, taps = _C.segment_input(**dim)
        bounds = [bound for segment in segments for bound in segment]
        assert bounds == sorted(bounds) and all(begin < end for begin, end in segments), dim
        assert len(taps) == dim["kernel"]
        for tap, run in enumerate(taps):
            covered = set().union(*(cells(segment) for segment in segments[slice(*run)]))
            assert covered == {i for i in range(dim["input"]) if lands(dim, i, tap) is not None}, (dim, tap)
        for begin, end in segments:  # and no segment mixes cells that different taps use
            assert len({tuple(_C.input_tap_range(index, **dim)) for index in range(begin, end)}) == 1, dim


def test_without_padding_there_is_one_segment() -> None:
    assert _C.segment_input(7, 3, stride=2) == ([(0, 7)], [(0, 1)] * 3)


def random_pool(rng: random.Random, dim: Dim) -> Dim:
    return {
        "pool_kernel": rng.randint(1, min(5, output_size(dim))),
        "pool_stride": dim["stride"] * rng.randint(1, 3),
    }


def test_average_pool_taps() -> None:
    """Which taps bring which input to which pooled output, counted one output of the convolution at a time."""
    for seed, dim in enumerate(DIMS):
        pool = random_pool(random.Random(seed), dim)
        outputs = (output_size(dim) - pool["pool_kernel"]) // pool["pool_stride"] + 1
        expected = defaultdict(list)
        for index, tap in itertools.product(range(dim["input"]), range(dim["kernel"])):
            for output in range(outputs):
                window = range(output * pool["pool_stride"], output * pool["pool_stride"] + pool["pool_kernel"])
                if lands(dim, index, tap) in window:
                    expected[output, index].append(tap)
        size, step, offsets = _C.avg_pool_taps(**dim, **pool)
        assert size == outputs and step * dim["stride"] == pool["pool_stride"]
        collapsed = {
            (output, output * step + offset): list(range(first, end))
            for output, (offset, first, end) in itertools.product(range(outputs), offsets)
            if 0 <= output * step + offset < dim["input"] and end > first
        }
        assert collapsed == expected, (dim, pool)


def test_workload_b_collapses_to_two_taps() -> None:
    """design.md: V[0] = W[1] + W[2], V[1] = W[0]."""
    assert _C.avg_pool_taps(32, 3, stride=2, padding=1) == (31, 1, [(0, 1, 3), (1, 0, 1)])


def test_taps_can_be_none_at_all() -> None:
    """Kernel 1, stride 3: a pool of 1 at a stride of 3 and padding 1 meets only outputs that no tap reaches."""
    assert _C.avg_pool_taps(4, 1, stride=3, padding=1, pool_kernel=1, pool_stride=3)[2] == []


# ---- the collapsed forms, in float64 -------------------------------------------------------------------------------


def along(x: Tensor, dim: int, matrix: Tensor) -> Tensor:
    """Multiplies a matrix (new size, size) into one dimension."""
    return torch.tensordot(matrix, x, dims=([1], [dim])).movedim(0, dim)


def membership(ranges: list[tuple[int, int]], size: int) -> Tensor:
    rows = [float(begin <= i < end) for begin, end in ranges for i in range(size)]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(ranges), size)


def problem(seed: int) -> tuple[random.Random, list[Dim], Tensor, Tensor, Tensor]:
    """Random dimensions, x, W and their transposed convolution."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    dims = [random_dim(rng, {1: 12, 2: 7, 3: 5}[count]) for count in [rng.randint(1, 3)] for _ in range(count)]
    sizes, kernel, *arguments = ([dim[name] for dim in dims] for name in NAMES)
    x = torch.randn(2, 3, *sizes, generator=generator, dtype=torch.float64)
    weight = torch.randn(3, 2, *kernel, generator=generator, dtype=torch.float64)
    stride, padding, output_padding, dilation = arguments
    conv: Any = [F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d][len(dims) - 1]
    return rng, dims, x, weight, conv(x, weight, None, stride, padding, output_padding, 1, dilation)


def test_global_pool_collapses_to_sums_of_regions() -> None:
    for seed in range(400):
        _, dims, x, weight, output = problem(seed)
        for d, dim in enumerate(dims):
            segments, taps = _C.segment_input(**dim)
            x = along(x, 2 + d, membership(segments, dim["input"]))
            weight = along(weight, 2 + d, membership(taps, len(segments)).T)
        ours = x.flatten(1) @ weight.movedim(1, 0).flatten(1).T / math.prod(output.shape[2:])
        torch.testing.assert_close(ours, output.flatten(2).mean(2), rtol=1e-12, atol=1e-12, msg=f"{dims}")


def test_average_pool_collapses_to_a_small_convolution() -> None:
    for seed in range(400):
        rng, dims, x, weight, output = problem(seed)
        pools = [random_pool(rng, dim) for dim in dims]
        pool: Any = [F.avg_pool1d, F.avg_pool2d, F.avg_pool3d][len(dims) - 1]
        kernel, stride = ([p[name] for p in pools] for name in ("pool_kernel", "pool_stride"))
        expected = pool(output, kernel, stride)
        windows = []  # per dimension (output, offset, input)
        for d, (dim, p) in enumerate(zip(dims, pools, strict=True)):
            size, step, offsets = _C.avg_pool_taps(**dim, **p)
            assert size == expected.shape[2 + d]
            weight = along(weight, 2 + d, membership([taps for _, *taps in offsets], dim["kernel"]))
            meets = [(o * step + j, o * step + j + 1) for o in range(size) for j, *_ in offsets]
            windows.append(membership(meets, dim["input"]).reshape(size, len(offsets), dim["input"]))
        ins, offs, outs = "abc"[: len(dims)], "def"[: len(dims)], "ghi"[: len(dims)]
        window = ",".join(map("".join, zip(outs, offs, ins, strict=True)))
        ours = torch.einsum(f"xy{ins},yz{offs},{window}->xz{outs}", x, weight, *windows) / math.prod(kernel)
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-12, msg=f"{dims} {pools}")
