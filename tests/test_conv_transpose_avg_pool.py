"""The average-pool family: conv_transpose_avg_pool (B)."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy
import pytest
import torch
from conftest import LAYOUTS, B, Inputs, cuda_only, draw_call, every_dtype, launched
from hypothesis import event, given
from hypothesis import strategies as st
from tolerances import DTYPES, check

import fused_kernels
from fused_kernels import conv_transpose_avg_pool

f64, f32, f16, bf16 = DTYPES


# ---- every dispatch boundary, and one to each side of it -----------------------------------------------------------

WORKLOAD = {"stride": 2, "padding": 1}  # with kernel 3 and pool 2: two taps a dimension, and D - 1 outputs
STAGED, DIRECT = ["staged_conv"], ["collapse_taps", "direct_conv"]
GEMM, COLUMNS = ["split_taps", "implicit_gemm"], ["collapse_taps", "column_conv"]
WIDE = ["wide_taps", "wide_gemm"]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("shape", "weight", "kwargs", "dtype", "launched"),
    [
        ((1, 3, 3, 16, 33), (16, 3, 3, 3), WORKLOAD, f32, STAGED),  # tiles of 16 x 32 outputs, 15 x 32 of one taken
        ((2, 1, 2, 18, 33), (15, 3, 3, 3), WORKLOAD, f32, STAGED),  # 17 x 32
        ((1, 2, 3, 17, 32), (17, 3, 3, 3), WORKLOAD, f16, STAGED),  # 16 x 31; 16 channels at a time
        ((1, 2, 2, 33, 34), (33, 3, 3, 3), WORKLOAD, bf16, STAGED),  # 32 x 33
        ((2, 3, 2, 2, 2), (1, 3, 3, 3), WORKLOAD, bf16, STAGED),
        ((2, 3, 3, 9, 40), (5, 3, 3, 3), {"stride": 2}, f32, STAGED),  # begins one before the input
        ((1, 2, 2, 17, 64), (5, 3, 3, 3), {"stride": 2}, f16, STAGED),
        ((1, 2, 3, 8, 16), (16, 3, 3, 3), WORKLOAD | {"output_padding": 1}, bf16, STAGED),  # and ends one behind it
        ((1, 2, 2, 18, 75), (19, 3, 3, 3), WORKLOAD, f32, STAGED),  # rows that are no whole vectors
        ((1, 2, 18, 75), (3, 3, 3), {"stride": 2}, f16, STAGED),
        # Rows of two tiles, of all lengths that a row of results has in shared memory.
        *(((2, 3, 3, 6, 33 + i), (5, 3, 3, 3), WORKLOAD, f32, STAGED) for i in range(6)),
        *(((2, 3, 18, 37 + i), (17, 3, 3), WORKLOAD, dtype, STAGED) for i in range(6) for dtype in (f16, bf16)),
        # Tiles of 16 rows as soon as there are enough for 132 multiprocessors, else of 8; then several tiles a block.
        *(((batch, 1, 2, 17, 33), (2, 3, 3, 3), WORKLOAD, f32, STAGED) for batch in (131, 132, 133, 395, 396, 397)),
        *(((batch, 3, 3, 18, 34), (5, 3, 3, 3), WORKLOAD, bf16, STAGED) for batch in (16, 17, 18)),
        ((1, 20, 2, 5, 4), (16, 3, 3, 3), WORKLOAD, f32, STAGED),  # all that shared memory holds
        ((1, 21, 2, 5, 4), (16, 3, 3, 3), WORKLOAD, f32, GEMM),
        ((1, 8, 2, 4, 4), (256, 3, 3, 3), WORKLOAD, f32, STAGED),
        ((1, 8, 2, 4, 4), (257, 3, 3, 3), WORKLOAD, f32, GEMM),
        # Channels of results as far apart as in the output, up to whole lines; up to vectors, where lanes would meet.
        *(
            ((1, 3, 3, 17, 17 + i), (16, 3, 3, 3), WORKLOAD, dtype, STAGED)
            for i in (-1, 0, 1, 2)
            for dtype in (f32, bf16)
        ),
        # Blocks that use each slot of the ring and each buffer of results several times.
        *(((300, 2, 5, 9, 9), (17, 3, 3, 3), WORKLOAD, dtype, STAGED) for dtype in (f32, f16)),
        ((1500, 2, 9, 9), (3, 3, 3), {"stride": 2, "padding": 1}, f32, STAGED),
        ((2, 15, 18, 32), (15, 3, 3), WORKLOAD, f32, STAGED),
        ((2, 16, 18, 32), (15, 3, 3), WORKLOAD, f32, GEMM),
        ((2, 2, 34, 66), (4, 2, 2), {"padding": 1, "pool_kernel_size": 1}, f32, STAGED),
        ((1, 1, 4, 4), (2, 64, 64), {"stride": 64, "padding": 63, "pool_kernel_size": 64}, f32, STAGED),
        ((1, 1, 4, 4), (2, 65, 65), {"stride": 64, "padding": 64, "pool_kernel_size": 64}, f32, COLUMNS),
        # The matrix product: output channels of a group, of a warp (16, 32, 64) and of a block (64, 128).
        ((2, 3, 33), (4, 3), WORKLOAD, f32, COLUMNS),
        *(((2, 3, 33), (n, 3), WORKLOAD, f32, GEMM) for n in (5, 15, 16, 17, 31, 33, 63, 64, 65, 129)),
        *(((2, 3, 33), (n, 3), WORKLOAD, dtype, GEMM) for n in (6, 16, 33, 63, 65, 127, 129) for dtype in (f16, bf16)),
        *(((1, 3, 2, 5, 6), (n, 3, 3, 3), WORKLOAD, f64, GEMM) for n in (16, 33, 64)),
        ((2, 6, 3, 32), (5, 3, 3), WORKLOAD | {"groups": 2}, bf16, GEMM),
        ((2, 6, 3, 32), (17, 3, 3), WORKLOAD | {"groups": 3}, f32, GEMM),
        # Input channels, of a product (8, 16) and of a stage; whole vectors of a row, and not.
        *(((1, n, 9, 12), (64, 4, 4), WORKLOAD, f32, GEMM) for n in (7, 8, 9, 16, 20, 65)),
        *(((1, n, 9, 16), (33, 4, 4), WORKLOAD, f16, GEMM) for n in (15, 16, 17, 40, 129)),
        *(
            ((1, 16, 40), (33, k), {"padding": 1, "pool_kernel_size": 1}, f16, GEMM) for k in (3, 4)
        ),  # turned from 4 taps
        ((1, 17, 9, 13), (33, 4, 4), WORKLOAD, bf16, GEMM),
        ((1, 9, 9, 13), (65, 4, 4), WORKLOAD, f64, GEMM),
        # Positions of a block (128, 256), in one row and several, and of a box that goes on over planes.
        *(
            ((1, 2, n), (64, 4), WORKLOAD | {"pool_kernel_size": 1, "pool_stride": 2}, f32, GEMM)
            for n in (127, 128, 129)
        ),
        *(
            ((1, 2, n), (16, 4), WORKLOAD | {"pool_kernel_size": 1, "pool_stride": 2}, bf16, GEMM)
            for n in (255, 257, 512)
        ),
        ((2, 3, 17, 17), (9, 4, 4), WORKLOAD, f32, GEMM),
        ((2, 3, 9, 9, 9), (9, 3, 3, 3), WORKLOAD | {"pool_kernel_size": 4}, f32, GEMM),  # steps of 2
        ((2, 3, 9, 9, 9), (9, 3, 3, 3), WORKLOAD | {"pool_kernel_size": 4}, f16, GEMM),
        ((2, 3, 30, 30), (9, 3, 3), {"pool_stride": 9}, f32, GEMM),
        ((1, 2, 600), (5, 512), {"padding": 300, "pool_kernel_size": 1}, f32, GEMM),  # the most offsets
        ((1, 2, 600), (5, 513), {"padding": 300, "pool_kernel_size": 1}, f32, COLUMNS),
        # The product of warpgroups: 64 output channels, 16 input channels a product, several products a chunk.
        ((1, 15, 255), (64, 3), WORKLOAD, f16, GEMM),
        *(((1, n, 255), (64, 3), WORKLOAD, f16, WIDE) for n in (16, 17, 31, 32, 33, 48, 65)),
        ((1, 16, 255), (32, 3), WORKLOAD, bf16, GEMM),
        *(((1, 16, 255), (n, 3), WORKLOAD, bf16, WIDE) for n in (33, 63, 64, 97, 128, 129)),
        *(((1, 16, 257), (n, 3), WORKLOAD, f16, WIDE) for n in (65, 80)),
        *(((2, 20, 36), (n, 3), WORKLOAD | {"groups": 2}, f16, GEMM) for n in (33,)),
        *(((2, 36, 500), (n, 3), WORKLOAD | {"groups": 2}, dtype, WIDE) for n in (33, 70) for dtype in (f16, bf16)),
        # 256 positions of all rows in one line, at even and odd beginnings, in rows of words and not.
        *(((1, 16, 256 + i), (64, 3), WORKLOAD, f16, WIDE) for i in (0, 1, 2, 256, 257, 258)),
        *(((3, 16, 9, 20 + i), (64, 4, 4), WORKLOAD, bf16, WIDE) for i in range(4)),
        *(((3, 16, 11, 20 + i), (64, 6, 6), {"stride": 2, "padding": 4}, f16, WIDE) for i in range(2)),
        *(((3, 16, 7, 20 + i), (64, 3, 3), {"pool_kernel_size": 1}, f16, WIDE) for i in range(2)),
        *(((3, 16, 24, 9 + i), (64, 3, 5), {"padding": 1, "pool_kernel_size": 1}, bf16, WIDE) for i in range(2)),
        ((1, 16, 255), (64, 64), {"padding": 30, "pool_kernel_size": 1}, f16, WIDE),
        # Offsets of the other dimensions, up to what two chunks leave of the shared memory.
        ((1, 16, 5, 11, 16), (64, 4, 4, 4), WORKLOAD, bf16, WIDE),
        ((1, 32, 5, 10, 15), (64, 2, 3, 3), {"pool_kernel_size": 1}, f16, WIDE),
        *(((1, 16, 20, 300), (64, n, 3), {"padding": 1, "pool_kernel_size": 1}, f16, WIDE) for n in (9, 10)),
        ((1, 16, 20, 300), (64, 11, 3), {"padding": 1, "pool_kernel_size": 1}, f16, GEMM),
        # Offsets of short rows share their inputs, up to 32 of them.
        *(((1, 16, 20, 20), (64, n, 3), {"padding": 1, "pool_kernel_size": 1}, f16, WIDE) for n in (8, 9, 31, 32)),
        ((1, 16, 20, 20), (64, 33, 3), {"padding": 1, "pool_kernel_size": 1}, f16, GEMM),
        # Blocks that use each slot several times, in several jobs each.
        *(((300, 40, 11, 15), (64, 4, 4), WORKLOAD, dtype, WIDE) for dtype in (f16, bf16)),
        ((9, 16, 60, 60), (64, 3, 3), {"pool_kernel_size": 1}, f16, WIDE),
        # V stays in shared memory up to 80 input channels in float16 and 48 in bfloat16, that of one tile of channels
        # after another.
        *(((150, n, 11, 15), (64, 4, 4), WORKLOAD, f16, WIDE) for n in (80, 96)),
        *(((150, n, 11, 15), (64, 4, 4), WORKLOAD, bf16, WIDE) for n in (48, 64)),
        *(((150, 40, 11, 16), (n, 4, 4), WORKLOAD, f16, WIDE) for n in (128, 160)),
        ((150, 40, 11, 16), (128, 4, 4), WORKLOAD, bf16, WIDE),
        ((150, 40, 11, 18), (64, 4, 4), WORKLOAD, f16, WIDE),  # runs of two
        # Outputs before the first input: where rows do not begin with a run, another kernel.
        *(
            ((2, 16, 32, 32), (64, 3, 3), {"padding": n, "pool_kernel_size": 1}, f16, launched)
            for n, launched in ((2, WIDE), (3, GEMM), (4, GEMM), (5, GEMM), (6, WIDE))
        ),
        # Columns: eight rows a thread, up to four offsets in registers.
        *(((2, 3, n, 31), (3, 3, 3), WORKLOAD, f64, COLUMNS) for n in (8, 9, 10)),
        *(((2, 2, n, 31), (1, 3, 3), WORKLOAD | {"groups": 2}, f16, COLUMNS) for n in (8, 9, 10)),
        *(((2, 6, 9, 30), (1, k, k), WORKLOAD | {"groups": 6}, f32, COLUMNS) for k in (2, 4, 6, 8)),
        ((2, 6, 9, 30), (2, 4, 4), WORKLOAD | {"groups": 6}, bf16, COLUMNS),
        ((2, 3, 31), (3, 3), WORKLOAD, f32, COLUMNS),
        *(((1, 1, 256 + i), (1, 1), {"pool_kernel_size": 1}, f32, COLUMNS) for i in (-1, 0, 1)),  # 256 threads a block
        ((1, 1, 256), (1, 4), {"padding": 2, "pool_kernel_size": 1}, f16, COLUMNS),
        ((1, 2, 9, 9), (3, 4, 4), WORKLOAD, f32, COLUMNS),  # reaches over the border
        ((1, 2, 9, 9), (3, 3, 3), {"pool_kernel_size": 2, "pool_stride": 3}, f32, COLUMNS),
        ((1, 1024, 3), (1, 3), WORKLOAD, f16, COLUMNS),
        ((1, 1025, 3), (1, 3), WORKLOAD, f16, DIRECT),
        ((1, 2, 9, 9), (3, 2, 2), {"dilation": 3, "pool_kernel_size": 1}, f32, DIRECT),  # offsets without a tap
        (
            (1, 2, 4, 4),
            (3, 1, 1),
            {"stride": 3, "padding": 1, "pool_kernel_size": 1, "pool_stride": 3},
            f32,
            DIRECT[1:],
        ),
    ],
    ids=str,
)
def test_boundaries(
    inputs: Inputs,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    kwargs: dict[str, int],
    dtype: torch.dtype,
    launched: list[str],
) -> None:
    x, w = inputs.input(*shape, dtype=dtype), inputs.weight(shape[1], *weight, dtype=dtype)
    bias = inputs.channels(weight[0] * kwargs.get("groups", 1), dtype=dtype)
    plan = fused_kernels.plan(B, x.to("meta"), w.to("meta"), **kwargs)
    assert [launch.kernel for launch in plan.launches] == launched
    check(B, x, w, bias, **kwargs, scale1=0.5, shift=bias, scale2=bias, against_eager=False)


@pytest.mark.sanitize
@pytest.mark.parametrize("offset", range(4))
def test_a_row_that_starts_beside_its_vectors(inputs: Inputs, offset: int) -> None:
    """Padding 1 moves the first tap by one: at storage offset 3 it is aligned to 16 bytes, but its row's end is not."""
    values = inputs.input(1, 1, 16, 16)
    x = torch.cat([values.new_full((offset,), math.nan), values.flatten()])[offset:].view_as(values)
    arguments = {"padding": 1, "pool_kernel_size": 1, "pool_stride": 1}
    check(B, x, inputs.weight(1, 1, 1, 1), **arguments, against_eager=False)
    check(B, x, inputs.weight(1, 2, 2, 2), **arguments, against_eager=False)


@every_dtype
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_dilation_far_wider_than_the_pool(inputs: Inputs, dtype: torch.dtype, layout: str) -> None:
    """Most offsets of the collapsed kernel have no tap, and most of a padded input would be zero."""
    for shape, weight, arguments in (
        ((2, 4, 9, 7), (3, 3, 2), {"dilation": 40, "groups": 2, "pool_kernel_size": (2, 3)}),
        ((1, 3, 3, 4, 5), (5, 2, 2, 3), {"dilation": 17, "stride": 2, "padding": 3}),
        ((1, 3, 6, 5), (2, 2, 2), {"dilation": (1, 300), "pool_kernel_size": 1}),
    ):
        x = LAYOUTS[layout](inputs.input(*shape, dtype=dtype))
        w = inputs.weight(shape[1], *weight, dtype=dtype)
        bias = inputs.channels(weight[0] * arguments.get("groups", 1), dtype=dtype)
        check(B, x, w, bias, **arguments, scale1=-0.5, scale2=bias)


def test_sizes_may_be_any_integers(inputs: Inputs) -> None:
    """NumPy's, and under torch.compile symbolic ones."""
    x, w = inputs.input(2, 3, 8, 6), inputs.weight(3, 4, 3, 3)
    expected = conv_transpose_avg_pool(x, w, stride=2, padding=1)
    assert torch.equal(conv_transpose_avg_pool(x, w, stride=numpy.int64(2), padding=numpy.int32(1)), expected)

    def head(x: torch.Tensor) -> torch.Tensor:
        return conv_transpose_avg_pool(x, w, padding=x.shape[-1] // 6, pool_kernel_size=x.shape[-1] // 3)

    with torch.no_grad():
        compiled = torch.compile(head, backend="aot_eager", fullgraph=True, dynamic=True)
        assert torch.equal(compiled(x), conv_transpose_avg_pool(x, w, padding=1, pool_kernel_size=2))


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("shape", "channels", "groups", "dtype", "launched"),
    [
        ((2, 6, 17, 33), 5, 1, f32, STAGED),
        ((2, 6, 17, 33), 5, 2, f32, GEMM),
        ((2, 4, 3, 5, 34), 6, 1, f32, STAGED),
        ((2, 4, 3, 5, 34), 3, 2, f32, COLUMNS),
        ((2, 6, 7, 9), 1, 6, f16, COLUMNS),
        # Channels of a product (8, 16) and of a stage; whole vectors of them, and not.
        *(((1, n, 9, 10), 33, 1, f32, GEMM) for n in (7, 8, 9, 12, 24, 68)),
        *(((1, n, 9, 10), 65, 1, f16, GEMM) for n in (15, 16, 17, 24, 200)),
        ((1, 3, 4, 6, 8), 17, 1, f32, GEMM),
        ((1, 3, 4, 6, 16), 17, 1, bf16, GEMM),
        ((1, 7, 4, 6), 6, 1, f64, GEMM),
        ((1, 10, 4, 6), 6, 2, f64, GEMM),
        *(((2, n, 17, 15), 64, 1, dtype, WIDE) for n in (64, 68, 72, 80) for dtype in (f16, bf16)),
        ((2, 80, 17, 15), 40, 2, f16, WIDE),
        *(((2, 64, 17, 16), n, 1, f16, WIDE) for n in (56, 60, 62, 63, 127)),  # output channels: whole vectors, and not
        ((200, 64, 15, 16), 64, 1, bf16, WIDE),
    ],
    ids=str,
)
def test_channels_last_in_and_out(
    inputs: Inputs, shape: tuple[int, ...], channels: int, groups: int, dtype: torch.dtype, launched: list[str]
) -> None:
    dims = len(shape) - 2
    x = LAYOUTS["channels_last"](inputs.input(*shape, dtype=dtype))
    w = inputs.weight(shape[1], channels, *[3] * dims, dtype=dtype)
    plan = fused_kernels.plan(B, x.to("meta"), w.to("meta"), **WORKLOAD, groups=groups)
    assert [launch.kernel for launch in plan.launches] == launched
    ours = check(B, x, w, **WORKLOAD, groups=groups, against_eager=False)
    assert ours.is_contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    check(B, x, LAYOUTS["channels_last"](w), **WORKLOAD, groups=groups, against_eager=False)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("shape", "channels", "kwargs", "dtype", "launched"),
    [
        # Input channels, of less than 32 bytes together (one alone is contiguous); output channels, of one group.
        *(((2, n, 3, 9, 33), 5, {}, f32, STAGED if n < 8 else GEMM) for n in range(2, 9)),
        *(
            ((2, n, 3, 9, 34), 16, {}, dtype, STAGED if n < 16 else GEMM)
            for n in (2, 3, 8, 15, 16)
            for dtype in (f16, bf16)
        ),
        *(((2, 3, 4, 17, 32), n, {}, f32, STAGED if n < 17 else GEMM) for n in (1, 4, 5, 8, 9, 15, 16, 17)),
        *(((2, 3, 17, 32), n, {}, bf16, STAGED if n < 17 else GEMM) for n in (1, 5, 15, 16, 17)),
        # Rows of 7 to 65 outputs, in tiles of 32, with rows of inputs that are whole vectors and that are not.
        *(((1, 3, 2, 18, n), 16, {}, f32, STAGED) for n in (8, 9, 32, 33, 34, 64, 65, 66)),
        *(((1, 4, 3, n), 5, {}, f32, STAGED) for n in (8, 9, 32, 33, 34, 64, 65, 66)),
        *(((1, 8, 2, 5, n), 15, {}, f16, STAGED) for n in (8, 9, 32, 33, 34, 64, 65, 66)),
        *(((2, 5, 18, n), 16, {}, bf16, STAGED) for n in (8, 9, 32, 33, 34, 64, 65, 66)),
        # That begin one before the input, or end one behind it.
        *(((1, 3, 2, 9, n), 5, {"padding": 0}, f32, STAGED) for n in (31, 32, 33, 40)),
        *(((1, 3, 9, n), 16, {"padding": 0}, f16, STAGED) for n in (31, 32, 33, 40)),
        *(((1, 3, 3, 8, n), 16, {"output_padding": 1}, f32, STAGED) for n in (16, 31, 32, 33)),
        # That begin one, two and three columns behind it, in the middle of a vector.
        *(((1, 3, 10, 48), 5, {"padding": p}, f32, STAGED) for p in (3, 5, 7)),
        *(((1, 5, 10, 18, 48), 16, {"padding": p}, f16, STAGED) for p in (3, 5, 7)),
        ((2, 3, 2, 2, 2), 1, {}, bf16, STAGED),
        # Tiles of 8 rows and of 16; then several tiles a block, which uses each slot and each buffer several times.
        *(((batch, 2, 2, 17, 33), 2, {}, f32, STAGED) for batch in (131, 132, 133, 395, 396, 397)),
        *(((batch, 3, 3, 18, 34), 5, {}, bf16, STAGED) for batch in (16, 17, 18)),
        *(((300, 2, 5, 9, 9), 16, {}, dtype, STAGED) for dtype in (f32, f16)),
        ((1500, 2, 9, 9), 3, {}, f32, STAGED),
    ],
    ids=str,
)
def test_pixels_staged_in_shared_memory(
    inputs: Inputs,
    shape: tuple[int, ...],
    channels: int,
    kwargs: dict[str, int],
    dtype: torch.dtype,
    launched: list[str],
) -> None:
    dims = len(shape) - 2
    x = LAYOUTS["channels_last"](inputs.input(*shape, dtype=dtype))
    w, bias = inputs.weight(shape[1], channels, *[3] * dims, dtype=dtype), inputs.channels(channels, dtype=dtype)
    arguments = WORKLOAD | kwargs
    plan = fused_kernels.plan(B, x.to("meta"), w.to("meta"), **arguments)
    assert [launch.kernel for launch in plan.launches] == launched
    ours = check(B, x, w, bias, **arguments, scale1=0.5, shift=bias, scale2=bias, against_eager=False)
    assert ours.is_contiguous(memory_format=torch.channels_last if dims == 2 else torch.channels_last_3d)
    for offset in ("offset 1", "offset 2", "offset 3"):
        beside = conv_transpose_avg_pool(LAYOUTS[offset](x), w, bias, **arguments, scale1=0.5, shift=bias, scale2=bias)
        assert torch.equal(beside, ours)
    # A sample is the same in every batch.
    last = conv_transpose_avg_pool(x[-1:], w, bias, **arguments, scale1=0.5, shift=bias, scale2=bias)
    assert torch.equal(last, ours[-1:])


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["offset 1", "offset 3", "channels_last"])
@pytest.mark.parametrize("dtype", [f32, f16], ids=str)
def test_a_matrix_product_of_unaligned_inputs(inputs: Inputs, layout: str, dtype: torch.dtype) -> None:
    x, w = LAYOUTS[layout](inputs.input(2, 9, 6, 24, dtype=dtype)), inputs.weight(9, 20, 4, 4, dtype=dtype)
    check(B, x, w, **WORKLOAD, against_eager=False)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["offset 1", "offset 2", "channels_last", "channels_last offset 4"])
@pytest.mark.parametrize("channels", [64, 72])
def test_a_product_of_warpgroups_of_unaligned_inputs(inputs: Inputs, layout: str, channels: int) -> None:
    """Inputs as words, as vectors of eight channels, and one by one."""
    values = inputs.input(2, channels, 11, 16, dtype=f16)
    offset = int(layout[-1]) if layout[-1].isdigit() else 0
    storage = values.new_full((offset + values.numel(),), math.nan)[offset:]
    format = torch.channels_last if layout.startswith("channels_last") else torch.contiguous_format
    x = storage.as_strided(values.shape, values.contiguous(memory_format=format).stride()).copy_(values)
    w = inputs.weight(channels, 64, 4, 4, dtype=f16)
    assert [launch.kernel for launch in fused_kernels.plan(B, x.to("meta"), w.to("meta"), **WORKLOAD).launches] == WIDE
    check(B, x, w, **WORKLOAD, against_eager=False)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("channels", [1, 24, 80], ids=["columns", "matrix product", "of warpgroups"])
@every_dtype
def test_a_sample_is_the_same_in_every_batch(inputs: Inputs, dtype: torch.dtype, channels: int, layout: str) -> None:
    x, w = LAYOUTS[layout](inputs.input(67, 20, 9, 12, dtype=dtype)), inputs.weight(20, channels, 4, 4, dtype=dtype)
    together = conv_transpose_avg_pool(x, w, **WORKLOAD)
    for i in (0, 40, 66):
        assert torch.equal(conv_transpose_avg_pool(x[i : i + 1], w, **WORKLOAD), together[i : i + 1])
    assert torch.equal(conv_transpose_avg_pool(x, w, **WORKLOAD), together)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("kernel", "size"),
    [(1, (8, 30)), (1, (9, 31)), (3, (9, 31)), (3, (18, 30)), (4, (8, 30)), (4, (9, 31)), (4, (17, 2)), (7, (16, 31))],
    ids=str,
)
@every_dtype
def test_two_columns_a_thread(
    inputs: Inputs, dtype: torch.dtype, kernel: int, size: tuple[int, int], layout: str
) -> None:
    """Where there are enough of them for all multiprocessors: the same bits as one at a time."""
    kwargs = {"stride": min(kernel, 2), "padding": (kernel - 1) // 2, "pool_kernel_size": min(kernel, 2), "groups": 2}
    w = inputs.weight(2, 1, kernel, kernel, dtype=dtype)
    few = LAYOUTS[layout](inputs.input(3, 2, *size, dtype=dtype))
    height, width = conv_transpose_avg_pool(few, w, **kwargs).shape[2:]
    batch = math.ceil(132 * 512 / (2 * math.ceil(height / 8) * math.ceil(width / 2)))
    many = few[torch.arange(batch, device=few.device) % 3]
    if layout == "channels_last":
        many = many.to(memory_format=torch.channels_last)
    bias, shift = inputs.channels(2, dtype=dtype), inputs.channels(2, dtype=dtype)
    variants = [fused_kernels.plan(B, x.to("meta"), w.to("meta"), **kwargs).variant for x in (many[1:], many)]
    assert variants == ["one thread a column", "one thread two columns"]
    alone = check(B, few, w, bias, **kwargs, scale1=0.5, shift=shift)
    together = conv_transpose_avg_pool(many, w, bias, **kwargs, scale1=0.5, shift=shift)
    assert all(torch.equal(together[i::3], alone[i].expand_as(together[i::3])) for i in range(3))
    w[1, 0, 0, 0], few[:, 0, -1, -1] = math.inf, math.nan
    many = LAYOUTS[layout](few[torch.arange(batch, device=few.device) % 3])
    assert torch.equal(
        conv_transpose_avg_pool(many, w, bias, **kwargs)[:3].nan_to_num(nan=-1),
        conv_transpose_avg_pool(few, w, bias, **kwargs).nan_to_num(nan=-1),
    )


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@every_dtype
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_values(inputs: Inputs, dtype: torch.dtype, dims: int) -> None:
    x, w = inputs.input(2, 3, *(7, 8, 9)[:dims], dtype=dtype), inputs.weight(3, 5, *[3] * dims, dtype=dtype)
    bias, shift = inputs.channels(5, dtype=dtype), inputs.channels(5, *[1] * dims, dtype=dtype)
    scales = {"scale1": inputs.channels(dtype=dtype), "scale2": inputs.channels(dtype=dtype)}
    check(B, x, w, bias, stride=2, padding=1, shift=shift, **scales)
    check(B, x, w, stride=1, pool_kernel_size=3, pool_stride=2)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_workload_b(inputs: Inputs, dtype: torch.dtype) -> None:
    """At batch 2 and a smaller size."""
    x, w = inputs.input(2, 3, 8, 34, 32, dtype=dtype), inputs.weight(3, 16, 3, 3, 3, dtype=dtype)
    shift, scale = inputs.channels(16, 1, 1, 1, dtype=dtype), inputs.channels(dtype=dtype)
    ours = check(B, x, w, inputs.channels(16, dtype=dtype), 2, 1, shift=shift, scale1=0.5, scale2=scale)
    assert ours.shape == (2, 16, 7, 33, 31)


@every_dtype
@pytest.mark.parametrize(
    ("shape", "weight", "kwargs"),
    [  # what models hold besides: upsampling by 2, by 8, depthwise, many channels, two pools in a row
        ((2, 64, 6, 5), (64, 4, 4), {"stride": 2, "padding": 1}),
        ((2, 16, 3, 6, 5), (32, 3, 3, 3), {"stride": 2, "padding": 1, "output_padding": 1}),
        ((2, 3, 5, 6, 4), (16, 3, 3, 3), {"stride": 2, "padding": 1, "pool_kernel_size": 4}),
        ((2, 32, 70), (16, 16), {"stride": 8, "padding": 4, "pool_kernel_size": 8}),
        ((2, 7, 9, 8), (1, 3, 3), {"stride": 2, "padding": 1, "groups": 7}),
        ((1, 300, 3, 4), (65, 3, 3), {"stride": 2, "padding": 1}),
        ((2, 24, 9, 40), (64, 3, 3), {"stride": 1, "pool_kernel_size": 3, "pool_stride": 1}),
        ((2, 8, 12, 15), (16, 2, 2), {"pool_kernel_size": 1}),
    ],
    ids=str,
)
def test_other_models(
    inputs: Inputs, dtype: torch.dtype, shape: tuple[int, ...], weight: tuple[int, ...], kwargs: dict[str, int]
) -> None:
    x, w = inputs.input(*shape, dtype=dtype), inputs.weight(shape[1], *weight, dtype=dtype)
    check(B, x, w, inputs.channels(weight[0] * kwargs.get("groups", 1), dtype=dtype), **kwargs)


# Every argument.
def test_output_padding(inputs: Inputs) -> None:
    x, w, bias = inputs.input(2, 3, 4, 5), inputs.weight(3, 4, 3, 2), inputs.channels(4)
    for stride, dilation in [((2, 3), (1, 1)), ((1, 1), (2, 3)), ((3, 1), (1, 2)), ((2, 2), (3, 1))]:
        for output_padding in [
            (a, b) for a in range(max(stride[0], dilation[0])) for b in range(max(stride[1], dilation[1]))
        ]:
            arguments = {
                "stride": stride,
                "dilation": dilation,
                "output_padding": output_padding,
                "pool_stride": stride,
            }
            check(B, x, w, bias, **arguments)
            check(B, x, w, bias, **arguments, padding=(1, 2), pool_kernel_size=(3, 2))


@every_dtype
@pytest.mark.parametrize(
    ("kernel", "kwargs"),
    [
        ((1, 1), {"padding": (1, 2)}),
        ((2, 3), {"padding": (3, 4)}),
        ((3, 1), {"padding": (5, 0), "dilation": 2}),
        ((2, 2), {"padding": (6, 5), "stride": 2, "output_padding": 1}),
        ((1, 2), {"padding": (7, 3), "stride": (3, 1), "pool_stride": (3, 2)}),
    ],
    ids=str,
)
def test_padding_beyond_the_kernel(
    inputs: Inputs, dtype: torch.dtype, kernel: tuple[int, int], kwargs: dict[str, Any]
) -> None:
    x, w = inputs.input(2, 3, 12, 11, dtype=dtype), inputs.weight(3, 4, *kernel, dtype=dtype)
    check(B, x, w, inputs.channels(4, dtype=dtype), **kwargs)


@pytest.mark.parametrize(("channels", "groups", "per_group"), [(6, 6, 1), (6, 6, 2), (6, 2, 5), (66, 3, 33), (5, 1, 1)])
def test_groups(inputs: Inputs, channels: int, groups: int, per_group: int) -> None:
    x, w = inputs.input(3, channels, 6, 7), inputs.weight(channels, per_group, 3, 3)
    bias = inputs.channels(groups * per_group)
    ours = check(B, x, w, bias, stride=2, padding=1, output_padding=1, groups=groups, dilation=2)
    # The same by position: stride, padding, output_padding, groups, dilation.
    alone = [conv_transpose_avg_pool(x[i : i + 1], w, bias, 2, 1, 1, groups, 2) for i in range(3)]
    assert torch.equal(torch.cat(alone), ours)


@pytest.mark.parametrize("pool", [1, 2, 3, (1, 4), (5, 2)])
@pytest.mark.parametrize("steps", [(), 1, 2, (3, 1)])
@pytest.mark.parametrize("stride", [1, (2, 1)])
def test_pools(inputs: Inputs, pool: Any, steps: Any, stride: Any) -> None:
    """Windows that overlap, that leave gaps, and of other sizes per dimension."""
    strides = (stride, stride) if isinstance(stride, int) else stride
    pools = (pool, pool) if isinstance(pool, int) else pool
    if steps == ():
        pools = tuple(p * s for p, s in zip(pools, strides, strict=True))
    else:
        steps = tuple(n * s for n, s in zip((steps, steps) if isinstance(steps, int) else steps, strides, strict=True))
    x, w = inputs.input(2, 3, 9, 8), inputs.weight(3, 4, 2, 3)
    check(B, x, w, stride=stride, padding=1, pool_kernel_size=pools, pool_stride=steps)


def test_remainder_is_dropped(inputs: Inputs) -> None:
    """31 outputs give 15, and the input that only the last of them uses is not read into any."""
    x, w = inputs.input(1, 2, 31, 31), inputs.weight(2, 3, 1, 1)
    expected = check(B, x, w)
    assert expected.shape == (1, 3, 15, 15)
    x[:, :, 30], x[:, :, :, 30] = math.nan, math.inf
    assert torch.equal(check(B, x, w), expected)
    # Nor are cells in gaps between windows.
    x[:, :, 1::3] = math.nan
    check(B, x, w, pool_kernel_size=1, pool_stride=3)


@pytest.mark.parametrize("kwargs", [{"stride": 3, "padding": 1, "pool_kernel_size": 1, "pool_stride": 3}], ids=str)
def test_without_taps_the_affine_part_is_left(inputs: Inputs, kwargs: dict[str, int]) -> None:
    x, w = torch.full((2, 2, 4, 4), math.nan, device=inputs.device), inputs.weight(2, 3, 1, 1)
    bias, shift = inputs.channels(3), inputs.channels(3)
    ours = check(B, x, w, bias, **kwargs, scale1=0.5, shift=shift, scale2=3.0)
    assert torch.equal(ours[0, :, 0, 0], ((bias.double() * 0.5 + shift.double()) * 3.0).float())
    assert not check(B, x, w, **kwargs).any()


def test_staged_kernel_leaves_room_for_its_barriers() -> None:
    """Of the 232448 bytes that a block may have on an H200, it has 128 beside those that its launch asks for."""
    kernels, most = set(), 0
    for channels in range(16, 401, 16):
        for dtype in (f32, f16):
            x = torch.empty(64, 6, 4, 32, 30, dtype=dtype, device="meta")
            plan = fused_kernels.plan(B, x, x.new_empty(6, channels, 3, 3, 3), **WORKLOAD)
            kernels.add(plan.launches[0].kernel)
            if plan.launches[0].kernel in STAGED:
                most = max(most, plan.launches[0].shared_memory)
    assert kernels == {"staged_conv", "split_taps"} and 220000 < most <= 232448 - 128


# ---- special values ------------------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("border", [math.nan, math.inf, 1e30], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("channels", [3, 6])
def test_unused_cells_do_not_matter(
    inputs: Inputs, dtype: torch.dtype, border: float, dims: int, channels: int
) -> None:
    inner = inputs.input(2, 2, *[4] * dims, dtype=dtype)
    w = inputs.weight(2, channels, *[1] * dims, dtype=dtype)
    x = torch.nn.functional.pad(
        inner, [1, 1] * dims, value=min(border, torch.finfo(dtype).max) if border < math.inf else border
    )
    assert torch.equal(check(B, x, w, padding=1), check(B, inner, w))


@every_dtype
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 6, 5), (2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("channels", [4, 6])
def test_special_cells_stay_where_they_are(
    inputs: Inputs, dtype: torch.dtype, value: float, shape: tuple[int, ...], channels: int
) -> None:
    x, w = (
        inputs.input(*shape, dtype=dtype),
        inputs.weight(3, channels, *[3] * (len(shape) - 2), positive=True, dtype=dtype),
    )
    x[1, 2, 0, 2] = value
    for kwargs in (WORKLOAD, {"padding": 1}, {"padding": 1, "stride": 2, "pool_stride": 4}):
        ours = check(B, x, w, **kwargs)
        assert ours[0].isfinite().all() and not ours[1].isfinite().all()


@every_dtype
@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
@pytest.mark.parametrize("kwargs", [WORKLOAD, {}, {"stride": 2}, {"padding": 2, "dilation": 2}], ids=str)
@pytest.mark.parametrize("channels", [4, 6])
def test_infinite_weights(
    inputs: Inputs, dtype: torch.dtype, value: float, kwargs: dict[str, int], channels: int
) -> None:
    """They meet the inputs there are, and no zeros of the border."""
    x, w = inputs.input(2, 3, 6, 5, positive=True, dtype=dtype), inputs.weight(3, channels, 3, 3, dtype=dtype)
    w[1, 2, 0, 1] = value
    check(B, x, w, **kwargs)


@pytest.mark.parametrize("dtype", [f32, f16, bf16], ids=str)
@pytest.mark.parametrize("shape", [(300, 2, 5, 9, 9), (60, 2, 5, 9, 40)], ids=str)  # whole rows, and rows of two tiles
@pytest.mark.parametrize("infinite_weight", [False, True], ids=["inputs", "weight"])
@pytest.mark.parametrize(("layout", "channels"), [("contiguous", 17), ("channels_last", 16), ("channels_last", 5)])
def test_special_values_here_and_there(
    inputs: Inputs, dtype: torch.dtype, shape: tuple[int, ...], infinite_weight: bool, layout: str, channels: int
) -> None:
    """In a call whose blocks take several planes each."""
    x = inputs.input(*shape, positive=True, dtype=dtype)
    w = inputs.weight(2, channels, 3, 3, 3, positive=True, dtype=dtype)
    if not infinite_weight:
        flat = x.view(-1)
        flat[5::991], flat[77::1999] = math.inf, math.nan
    x = LAYOUTS[layout](x)
    plan = fused_kernels.plan(B, x.to("meta"), w.to("meta"), **WORKLOAD)
    assert [launch.kernel for launch in plan.launches] == STAGED
    if infinite_weight:
        w[1, -1, 1, 2, 0] = math.inf
    check(B, x, w, **WORKLOAD)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("where", ["input", "weight", "overflow"])
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_special_values_in_a_product_of_warpgroups(inputs: Inputs, dtype: torch.dtype, where: str, layout: str) -> None:
    x = LAYOUTS[layout](inputs.input(70, 16, 11, 16, positive=True, dtype=dtype))
    w = inputs.weight(16, 64, 4, 4, positive=True, dtype=dtype)
    assert [launch.kernel for launch in fused_kernels.plan(B, x.to("meta"), w.to("meta"), **WORKLOAD).launches] == WIDE
    if where == "input":
        x[0, 3, 5, 6], x[1, 15, 0, 0], x[69, 0, 10, 15] = math.inf, math.nan, -math.inf
    elif where == "weight":
        w[3, 63, 1, 2] = -math.inf
    else:
        x[2, 4, 7, 7], w[4, 1] = torch.finfo(dtype).max, 16.0
    ours = check(B, x, w, **WORKLOAD)
    assert not ours.isfinite().all() and ours[:, 2:60].isfinite().any()


@every_dtype
@pytest.mark.parametrize("scale", [math.inf, 0.0, 1e30, 1e-30], ids=str)
@pytest.mark.parametrize("size", [(6, 5), (11,), (255,)], ids=str)
def test_extreme_factors(inputs: Inputs, dtype: torch.dtype, scale: float, size: tuple[int, ...]) -> None:
    """They may not be multiplied with each other, or with the weight, where that would lose what they leave."""
    if scale not in (0.0, math.inf) and dtype == f16:
        pytest.skip("beyond float16")
    in_channels, channels = (16, 40) if size == (255,) else (3, 6)
    x, w = (
        inputs.input(2, in_channels, *size, dtype=dtype),
        inputs.weight(in_channels, channels, *[3] * len(size), dtype=dtype),
    )
    w[0, 1] = 0
    bias, shift = inputs.channels(channels, dtype=dtype), inputs.channels(channels, dtype=dtype)
    check(B, x, w, bias, **WORKLOAD, scale1=2.0, shift=shift, scale2=scale)
    if scale < math.inf:  # the composition multiplies before it pools, and makes NaN of infinities of both signs
        check(B, x, w, bias, **WORKLOAD, scale1=scale, shift=shift, scale2=1 / scale if scale else 3.0)


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_intermediate_beyond_half_stays_finite(device: torch.device, dtype: torch.dtype) -> None:
    """A product of 131072 and a tap sum of 120000, before the scale."""
    x = torch.full((1, 32, 8, 8), 64.0, dtype=dtype, device=device)
    w = torch.full((32, 1, 1, 1), 64.0, dtype=dtype, device=device)
    scale = torch.tensor([0.25], dtype=dtype, device=device)
    assert (conv_transpose_avg_pool(x, w, scale1=scale) == 32768).all()
    w = torch.full((1, 1, 2), 60000.0, dtype=dtype, device=device)
    x = torch.full((1, 1, 7), 0.5, dtype=dtype, device=device)
    check(B, x, w, padding=1, against_eager=False)
    check(B, x, w.repeat(1, 8, 1), padding=1, against_eager=False)


@pytest.mark.parametrize("large", ["weight", "input"])
@pytest.mark.parametrize(
    ("dtype", "rows", "kwargs", "kernel"),
    [
        (f32, 5, {"stride": 2, "padding": 1}, "staged_conv"),
        (bf16, 5, {"stride": 2, "padding": 1}, "staged_conv"),
        (f32, 20, {"padding": 1}, "implicit_gemm"),
        (bf16, 20, {"padding": 1}, "implicit_gemm"),
        *((dtype, 1, {"padding": 1, "groups": 6}, "column_conv") for dtype in (f32, bf16)),
        *((dtype, 3, {"dilation": 3, "groups": 2}, "direct_conv") for dtype in (f32, bf16)),
    ],
    ids=str,
)
def test_taps_beyond_float32(
    inputs: Inputs, dtype: torch.dtype, rows: int, kwargs: dict[str, int], kernel: str, large: str
) -> None:
    """Their sums overflow, while every output of the convolution is small; and inputs that all are near the largest."""
    x = inputs.input(2, 6, 3, 9, 8, dtype=f64, positive=True)
    w = inputs.weight(6, rows, 3, 3, 3, dtype=f64, positive=True)
    for values in (x, w):
        values.clamp_(0.25, 1).mul_(torch.finfo(dtype).max if (values is w) == (large == "weight") else 1e-4)
    x, w = x.to(dtype), w.to(dtype)
    assert launched(B, {"input": x, "weight": w, **kwargs}).endswith(kernel)
    assert check(B, x, w, **kwargs, against_eager=False).isfinite().all()


@cuda_only
@pytest.mark.parametrize("kernel", [1, 3, 9])
def test_sums_beyond_float32_that_a_factor_brings_back(kernel: int) -> None:
    """Of the kernel for few channels, which adds up again in float64 what is not finite."""
    largest = torch.finfo(bf16).max
    x = torch.full((2, 6, 9, 12), largest, dtype=bf16, device="cuda")
    w = torch.ones(6, 1, kernel, kernel, dtype=bf16, device="cuda")
    x[:, ::2], w[3:] = largest / 2, 4
    arguments = {"stride": 1, "padding": kernel // 2, "groups": 6}
    assert launched(B, {"input": x, "weight": w, **arguments}).endswith("column_conv")
    ours = check(B, x, w, **arguments, scale1=2.0**-10, against_eager=False)
    assert ours.isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
@pytest.mark.parametrize("factor", [1.0, 4.0, 100.0])
def test_sums_beyond_float32_of_both_signs(inputs: Inputs, dtype: torch.dtype, layout: str, factor: float) -> None:
    """Of two channels that cancel, where a factor takes the sums of each beyond what float32, or the dtype, holds."""
    x = LAYOUTS[layout](inputs.input(2, 2, 4, 9, 8, dtype=dtype).fill_(0.9 * torch.finfo(dtype).max))
    w = inputs.weight(2, 3, 3, 3, 3, dtype=dtype).fill_(0.125)
    w[1] *= -1
    assert launched(B, {"input": x, "weight": w, **WORKLOAD}).endswith("staged_conv")
    ours = check(B, x, w, **WORKLOAD, scale1=factor, against_eager=False)
    if dtype == f16 and x.is_cuda:  # float32 holds these sums, and rounds them
        magnitudes = conv_transpose_avg_pool(x.double(), w.abs().double(), **WORKLOAD, scale1=factor)
        assert ours.abs().max() <= magnitudes.max() * 2**-24
    else:
        assert (ours == 0).all()


# ---- sizes ---------------------------------------------------------------------------------------------------------


def test_empty_batch(inputs: Inputs) -> None:
    w = inputs.weight(3, 4, 3, 3)
    check(B, inputs.input(0, 3, 5, 5), w, **WORKLOAD)
    check(B, inputs.input(2, 3, 5, 5), w, **WORKLOAD)


@pytest.mark.parametrize("shape", [(65537, 2, 3), (70000, 1, 2, 2), (2, 2, 70000), (3, 1, 2, 2, 70000)], ids=str)
def test_many_samples_or_columns(inputs: Inputs, shape: tuple[int, ...]) -> None:
    check(B, inputs.input(*shape), inputs.weight(shape[1], 2, *[3] * (len(shape) - 2)), **WORKLOAD)


@pytest.mark.parametrize("channels", [63, 64, 65, 128, 257])
@pytest.mark.parametrize("outputs", [1, 2, 40])
def test_many_channels_in_few_outputs(inputs: Inputs, channels: int, outputs: int) -> None:
    """A largest error of few values is luck, so that what is better than eager on average is not enough."""
    for _ in range(20):
        check(B, inputs.input(1, channels, 1), inputs.weight(channels, outputs, 1), pool_kernel_size=1)


def test_many_channels(inputs: Inputs) -> None:
    check(B, inputs.input(1, 2, 3), inputs.weight(2, 65537, 3), **WORKLOAD)
    check(B, inputs.input(1, 65537, 3), inputs.weight(65537, 2, 3), **WORKLOAD, against_eager=False)


def is_right_in_the_last_cells(shape: tuple[int, ...], channels: int, device: str) -> None:
    x = torch.zeros(shape, dtype=bf16, device=device)
    x[(-1, -1, *[-1] * (len(shape) - 2))] = 1
    w = torch.ones(shape[1], channels, *[3] * (len(shape) - 2), dtype=bf16, device=device)
    ours = conv_transpose_avg_pool(x, w, **WORKLOAD)
    last = ours[(-1, slice(None), *[-1] * (len(shape) - 2))]
    assert (last == 1 / 2 ** (len(shape) - 2)).all()
    assert ours[-1, -1].count_nonzero() == 1 and not ours[0].any()


@pytest.mark.slow
@cuda_only
@pytest.mark.parametrize(
    ("shape", "channels"),
    [((2, 2, 2**15 + 2, 2**15), 1), ((2, 1, 2**14 + 1, 2**13), 9), ((2**17 + 1, 1, 2, 130, 130), 1)],
    ids=str,
)
def test_more_than_2_31_elements(shape: tuple[int, ...], channels: int) -> None:
    """In the input, the output, or both."""
    is_right_in_the_last_cells(shape, channels, "cuda")


@pytest.mark.slow
@pytest.mark.skipif(
    os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 12e9, reason="needs 12 GB of free memory"
)
def test_more_than_2_31_elements_on_the_cpu() -> None:
    """The last of these within less memory, and less time."""
    is_right_in_the_last_cells((2**16 + 1, 1, 2, 130, 130), 1, "cpu")


# ---- everything at once --------------------------------------------------------------------------------------------


@pytest.mark.properties
@given(data=st.data())
def test_anything(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    arguments, output, both_signs = draw_call(draw, device, ("scale1", "shift", "scale2"))
    stride = arguments["stride"]
    if all(s <= size for s, size in zip(stride, output, strict=True)) and draw(st.booleans()):
        pool, pool_stride = list(stride), []  # as models have it
    else:
        pool = [draw(st.integers(1, min(size, 5))) for size in output]
        pool_stride = [s * draw(st.sampled_from([1, 1, 2, 3])) for s in stride]
        if all(p % s == 0 for p, s in zip(pool, stride, strict=True)) and draw(st.booleans()):
            pool_stride = []
    arguments |= {"pool_kernel_size": pool, "pool_stride": pool_stride}
    event(launched(B, arguments))
    check(B, **arguments, nan_may_be="infinite" if both_signs else "NaN")
