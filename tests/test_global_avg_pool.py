"""The global-pool family: global_avg_pool (G), conv_transpose_global_avg_pool (A0) and ..._logsumexp (A)."""

from __future__ import annotations

import functools
import math
import os
from typing import Any

import pytest
import torch
from conftest import A0, BATCH, LAYOUTS, A, G, Inputs, draw_call, every_dtype, in_any_layout, launched, put_special
from hypothesis import event, given
from hypothesis import strategies as st
from tolerances import DTYPES, assert_close, check, exact, ulp
from torch import Tensor

import fused_kernels
from fused_kernels import conv_transpose_global_avg_pool, conv_transpose_global_avg_pool_logsumexp, global_avg_pool

f64, f32, f16, bf16 = DTYPES

# With 2 channels: a sample that one block takes alone, and one whose planes are summed first.
SIZES = (5, 92)
both_chains = pytest.mark.parametrize("op", [A0, A])


def kernels(op: str, *tensors: Tensor, **kwargs: Any) -> list[str]:
    """The CUDA kernels that a call launches, on an H200."""
    return [launch.kernel for launch in fused_kernels.plan(op, *(t.to("meta") for t in tensors), **kwargs).launches]


# ---- every dispatch boundary, and one to each side of it -----------------------------------------------------------

TILE, PLANES = ["tile_sums"], ["plane_stream"]
CHUNK, CHUNKS = ["chunk_sums"], ["chunk_sums", "finish_mean"]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("shape", "dtype", "launched"),
    [
        ((1, 1, 1), f32, TILE),
        ((1, 63, 7, 7), f32, TILE),  # a tile holds 64 planes
        ((1, 64, 7, 7), f32, TILE),
        ((5, 13, 7, 7), f32, TILE),
        ((1, 129, 7, 7), f16, TILE),  # here 128
        ((3, 11, 3, 3, 3), bf16, TILE),
        ((2, 9, 2, 31), f64, TILE),
        ((1, 9, 32), f32, TILE),
        ((1, 5, 33), f16, TILE),
        ((2, 3, 511), f32, TILE),
        ((2, 3, 512), f32, PLANES),
        ((2, 3, 513), f32, CHUNK),
        ((1, 3, 1024), f16, PLANES),
        ((1, 3, 1025), f16, CHUNK),
        ((1, 3, 2049), bf16, CHUNK),  # 2 warps a plane
        ((1, 3, 257), f64, CHUNK),
        ((3, 3, 1024), f32, CHUNK),  # 4096 bytes: one warp, and 8 planes a block
        ((3, 3, 1025), f32, CHUNK),
        ((1, 2, 64, 128), f32, CHUNK),  # 32768 bytes: one chunk a plane
        ((1, 9, 5, 29, 57), f32, CHUNKS),
        ((1, 1, 16385), bf16, CHUNKS),
        ((1, 2, 4097), f64, CHUNKS),
        ((1, 2, 3, 8192), f16, CHUNKS),
        # Planes of so many bytes are what 1, 2, 4 and 8 lanes of a tile's 128 threads take at once.
        *(((1, 300, size + i), f32, TILE) for size in (48, 96, 192) for i in (-1, 0, 1)),
        *(((1, 300, 384 + i), f32, TILE) for i in (-1, 1)),
        # A tile of several rounds, up to 16, where there are two blocks for each of 132 multiprocessors.
        *(((1, 4 * 264 * 2 + i, 96), f32, TILE) for i in (-1, 0, 1)),
        ((3, 1500, 48), f32, TILE),
        *(((1, 128 * 264 * 16 + i, 1), f32, TILE) for i in (-1, 0, 1)),
        *(((1, 9, size + i), f32, CHUNK) for size in (2048, 4096) for i in (-1, 0, 1)),  # 2, then 4 warps
        ((1, 9, 8191), f32, CHUNK),  # 8 warps, one chunk
        ((1, 9, 8193), f32, CHUNKS),
        # From 8 partial sums a lane on, more lanes to add them up; 1024 of them at most.
        *(((1, 2, 8192 * chunks + i), f32, CHUNKS) for chunks in (8, 16, 32, 64, 128, 256) for i in (0, 1)),
        *(((1, 1, 8192 * 1024 + i), f32, CHUNKS) for i in (-1, 0, 1)),
        # Planes of so many vectors, but of float32 and float64 only those that tiles would take.
        *(((1, 9, 8 * vectors), f16, launched) for vectors, launched in ((95, TILE), (96, PLANES), (97, PLANES))),
        *(((3, 7, 8 * 128 + i), bf16, launched) for i, launched in ((-4, TILE), (0, PLANES), (4, CHUNK))),
        *(((1, 17, 8 * vectors), bf16, PLANES) for vectors in (1024, 1025)),  # a warp, then two
        *(
            ((1, 3, 8 * vectors), f16, launched)
            for vectors, launched in ((2047, PLANES), (2048, PLANES), (2049, CHUNKS))
        ),
        *(
            ((1, 9, 4 * vectors), f32, launched)
            for vectors, launched in ((95, TILE), (96, PLANES), (128, PLANES), (129, CHUNK))
        ),
        ((1, 5, 2, 96), f64, PLANES),
        *(((1, 132 * 24 + i, 384), f32, PLANES) for i in (-1, 0, 1)),  # what all warps take at once
    ],
    ids=str,
)
def test_global_avg_pool_boundaries(
    inputs: Inputs, shape: tuple[int, ...], dtype: torch.dtype, launched: list[str]
) -> None:
    x = inputs.input(*shape, dtype=dtype)
    assert kernels(G, x) == launched
    means = check(G, x, against_eager=False)
    assert torch.equal(global_avg_pool(LAYOUTS["offset 1"](x)), means)


def channels_last(input: Tensor) -> Tensor:
    return LAYOUTS["channels_last"](input)


COLUMN, COLUMNS = ["column_sums"], ["column_sums", "finish_mean"]
STREAM, STREAMS = ["column_stream"], ["column_stream", "finish_mean"]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("shape", "dtype", "launched"),
    [
        ((2, 2, 2), f32, COLUMN),
        ((3, 3, 7, 7), f32, COLUMN),  # one channel a load
        ((2, 4, 7, 7), f32, STREAM),  # four
        ((2, 5, 7, 7), f32, COLUMN),
        ((2, 7, 7, 7), f16, COLUMN),
        ((2, 8, 7, 7), f16, STREAM),
        ((2, 9, 3, 3, 3), bf16, COLUMN),
        ((2, 16, 3, 3, 3), bf16, STREAM),
        ((2, 2, 5, 5), f64, STREAM),
        ((1, 33, 11), f64, COLUMN),
        ((2, 127, 5, 5), f32, COLUMN),  # 128 loads of one channel side by side
        ((2, 129, 5, 5), f32, COLUMN),
        ((2, 1001, 2, 2), bf16, COLUMN),
        ((2, 129, 512), f32, COLUMN),  # from 32 loads a thread on, narrower blocks
        ((1, 3, 85, 64), f32, COLUMN),  # from 64 on, several blocks a plane
        ((1, 3, 5441), f32, COLUMNS),
        *(((1, 3, 1360 + i), f32, COLUMN) for i in (-1, 0, 1)),  # 16 loads a thread at once
        *(((1, 3, 85 * 32 * 1024 + i), f32, COLUMNS) for i in (-1, 0, 1)),  # 1024 blocks a plane
        ((2, 128, 7, 7), f32, STREAM),  # 32 loads side by side
        ((2, 132, 7, 7), f32, STREAM),
        ((2, 1000, 7, 7), bf16, STREAM),
        *(((2, 68, 64 + i), f32, STREAM) for i in (0, 1)),  # up to 32 loads side by side, 16, then 8
        *(((2, 64, 256 + i), f32, STREAM) for i in (0, 1)),
        ((2, 136, 23, 23), bf16, STREAM),
        *(((2, 4, 512 + i), f32, STREAM) for i in (-1, 0, 1)),  # 4 stages of 4 loads a thread
        *(((2, 8, 1024 + i), f16, launched) for i, launched in ((-1, STREAM), (0, STREAMS))),  # a chunk more
        *(((2, 12, 4096 + i), f32, STREAMS) for i in (-1, 0, 1)),  # 8 chunks, then 2 larger ones
        *(((33 + i, 36, 1024), f32, launched) for i, launched in ((16, STREAMS), (17, STREAM))),  # a block a plane
        # Planes of up to 8 chunks; racecheck, which leaves out what is slow, would take long.
        *(
            pytest.param((99, 8, 2048 * 9 + i), f16, launched, marks=pytest.mark.slow)
            for i, launched in ((-1, STREAM), (0, STREAMS))
        ),
        *(((1, 12, 32768 + i), f32, launched) for i, launched in ((0, STREAMS), (1, COLUMNS))),  # larger ones
        ((2, 8, 181, 182), f16, COLUMNS),
        # More than the blocks that stay: of planes, of chunks, and of planes in two chunks.
        ((3200, 4, 2), f32, STREAM),
        ((45, 36, 4096), f32, STREAMS),
        ((300, 36, 1024), f32, STREAM),
    ],
    ids=str,
)
@pytest.mark.parametrize("offset", [0, 1])
def test_channels_last_boundaries(
    inputs: Inputs, shape: tuple[int, ...], dtype: torch.dtype, launched: list[str], offset: int
) -> None:
    x = inputs.input(*shape, dtype=dtype)
    x = LAYOUTS["offset 1"](channels_last(x)) if offset else channels_last(x)
    assert kernels(G, x) == launched
    means = check(G, x, against_eager=False)
    # A sample's bits depend on neither its batch nor its address.
    alone = [global_avg_pool(channels_last(x[i : i + 1])) for i in range(shape[0])]
    assert torch.equal(torch.cat(alone), means)


WHOLE, TILES, CHUNKED, BOXES, BOX_STREAM = "whole_sample", "tile_sums", "chunk_sums", "box_sums", "box_stream"


def chain(op: str, sums: str) -> list[str]:
    """The kernels of a chain of few weights, by the one that sums its planes."""
    finish = [] if sums == WHOLE else ["finish_logsumexp" if op == A else "finish"]
    return [sums, *finish]


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("shape", "weight", "kwargs", "dtype", "sums"),
    [
        ((2, 3, 5), (2, 3), {}, f32, WHOLE),
        ((2, 4, 64, 64), (31, 3, 3), {}, f32, WHOLE),  # 65536 bytes a sample
        ((1, 4, 4097), (33, 3), {}, f32, CHUNKED),
        ((2, 32, 3, 3), (127, 2, 2), {}, f32, WHOLE),  # 4096 sums of channels and taps
        ((2, 32, 3, 3), (128, 2, 2), {}, f32, TILES),
        ((1, 4, 3, 3), (64, 8, 8), {}, f32, WHOLE),  # 65536 bytes of weights
        ((1, 4, 3, 3), (65, 8, 8), {}, f32, TILES),
        ((1, 4, 3, 3), (32, 3, 5), {}, f16, WHOLE),  # from 16 taps on, 8 lanes share a sum of them
        ((1, 4, 3, 3), (33, 4, 4), {}, bf16, WHOLE),
        ((1, 2, 2, 2, 2), (33, 2, 2, 2), {}, f64, WHOLE),
        ((2, 3, 12, 12), (2, 3), {"groups": 3, "stride": 2}, f32, WHOLE),
        ((1, 1025, 2), (15, 1), {}, bf16, TILES),
        ((2, 255, 23, 23), (3, 3), {}, f32, CHUNKED),  # 256 channel sums at a time
        ((1, 256, 23, 23), (3, 15), {}, f32, CHUNKED),
        ((1, 257, 23, 23), (3, 16), {}, f32, CHUNKED),
        ((2, 64, 23, 23), (127, 3), {}, f32, CHUNKED),  # 128 output channels a block
        ((1, 65, 23, 23), (128, 3), {}, f64, CHUNKED),
        ((1, 4, 8200), (129, 2), {"groups": 2}, f16, "plane_stream"),
        ((2, 3, 4, 4), (2, 3, 3), {"padding": 1}, f32, BOX_STREAM),
        ((1, 9, 32, 32), (3, 3, 3), {"padding": 1}, f32, BOX_STREAM),
        ((1, 9, 32, 33), (3, 3, 3), {"padding": 1}, f32, BOXES),  # rows that are no whole loads
        ((1, 2, 128, 128), (33, 3, 3), {"padding": 1}, f32, BOX_STREAM),
        ((1, 2, 128, 129), (33, 3, 3), {"padding": 1}, f32, BOXES),
        ((1, 2, 130, 127), (3, 3, 3), {"padding": 1}, f32, BOXES),  # 66040 bytes: two chunks a plane
        ((2, 2, 5, 257), (3, 3, 3), {"padding": 1}, f64, BOXES),
        ((1, 4, 3, 31, 33), (3, 3, 3, 3), {"padding": 1, "groups": 2, "stride": 2}, f16, BOXES),
        # A stream of boxes: up to 64 loads a lane of 1, 2, 4, 8, 16 or 32 a plane; at least as many as a row's loads.
        ((5, 7, 3, 4), (3, 3, 3), {"padding": 1}, f32, BOX_STREAM),
        *(((1, 9, 256 + 4 * i), (3, 3), {"padding": 1}, f32, BOX_STREAM) for i in (-1, 0, 1)),
        *(((3, 7, 64 + i, 32), (3, 3, 3), {"padding": 1}, f32, BOX_STREAM) for i in (-1, 0, 1)),
        ((2, 2, 20, 72), (3, 5, 5), {"padding": 4}, bf16, BOX_STREAM),
        ((1, 4, 3, 31, 32), (3, 3, 3, 3), {"padding": 1, "groups": 2, "stride": 2}, f16, BOX_STREAM),
        ((2, 2, 5, 258), (3, 3, 3), {"padding": 1}, f64, BOX_STREAM),
        # 32 loads of a row side by side, then fewer, one run of rows after the other.
        *(((1, 9, 30, 128 + 4 * i), (3, 3, 3), {"padding": 1}, f32, BOX_STREAM) for i in (-1, 0, 1)),
        *(((1, 2, 20, 512 + 8 * i), (3, 3, 3), {"padding": 1}, bf16, BOX_STREAM) for i in (-1, 0, 1)),
        # Chunks of 16384 bytes, or a quarter of the plane up to 65536, of whatever dimension has so many.
        *(((1, 9, 64 + i, 64), (3, 3, 3), {"padding": 1}, f32, BOX_STREAM) for i in (-1, 0, 1)),
        *(((1, 2, 128 + i, 128), (3, 3, 3), {"padding": 1}, f32, BOX_STREAM) for i in (-1, 1)),
        *(((1, 1, 512 + i, 256), (3, 3, 3), {"padding": 1}, f16, BOX_STREAM) for i in (-1, 0, 1)),
        ((1, 2, 3, 4100), (3, 3, 3), {"padding": 1}, f32, BOX_STREAM),
        ((1, 1, 16390), (2, 5), {"padding": 3, "dilation": 2}, f64, BOX_STREAM),
        ((1, 2, 16, 32, 32), (3, 3, 3, 3), {"padding": 1, "stride": 2}, f32, BOX_STREAM),
        ((1, 2, 2, 90, 64), (3, 3, 3, 3), {"padding": 1, "stride": 2, "output_padding": 1}, f32, BOX_STREAM),
        pytest.param((1, 1, 66, 66, 264), (2, 3, 3, 3), {"padding": 1}, f32, BOX_STREAM, marks=pytest.mark.slow),
        # More than the warps that stay take at once: planes, and chunks.
        ((11, 300, 2, 128), (2, 3, 3), {"padding": 1}, f32, BOX_STREAM),
        pytest.param((2, 900, 65, 64), (2, 3, 3), {"padding": 1}, f32, BOX_STREAM, marks=pytest.mark.slow),
        *(((2, 512 + i, 3), (3, 3), {}, f32, WHOLE) for i in (-1, 0, 1)),  # 512 channels at a time
        *(((1, 9, 32, width), (3, 3, 3), {"padding": 1}, f32, BOXES) for width in (63, 65, 127, 129)),
        ((2, 2, 70), (3, 32), {"stride": 2, "padding": 31, "output_padding": 1}, f32, BOXES),  # 32 pieces, the most
        *(  # 1024 chunks a plane; racecheck, which leaves out what is slow, would take ten minutes
            pytest.param((1, 1, 2**23 + i), (1, 3), {"padding": 1}, f64, launched, marks=pytest.mark.slow)
            for i, launched in ((0, BOX_STREAM), (1, BOXES))
        ),
    ],
    ids=str,
)
def test_chain_boundaries(
    inputs: Inputs,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    kwargs: dict[str, int],
    dtype: torch.dtype,
    sums: str,
) -> None:
    groups = kwargs.get("groups", 1)
    kernel = (*weight[1:], *[1] * (len(shape) - 1 - len(weight)))
    x, w = inputs.input(*shape, dtype=dtype), inputs.weight(shape[1], weight[0], *kernel, dtype=dtype)
    bias = inputs.channels(weight[0] * groups, dtype=dtype)
    for op in (A0, A):
        assert kernels(op, x, w, bias, **kwargs) == chain(op, sums)
    check(A0, x, w, bias, **kwargs, scale=bias, against_eager=False)
    check(A, x, w, bias, **kwargs, shift=bias, out_scale=10.0, against_eager=False)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((3, 5, 9, 16), f32),
        ((3, 5, 9, 16), bf16),
        ((2, 3, 40, 136), f16),
        ((2, 3, 70, 128), f32),
        ((2, 2, 6, 30, 36), f64),
        ((2, 3, 9, 17), f32),
    ],
    ids=str,
)
def test_boxes_of_any_batch_and_address(inputs: Inputs, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, w = inputs.input(*shape, dtype=dtype), inputs.weight(shape[1], 4, *[3] * (len(shape) - 2), dtype=dtype)
    ours = check(A0, x, w, padding=1, stride=2, output_padding=1, against_eager=False)
    arguments = {"padding": 1, "stride": 2, "output_padding": 1}
    assert torch.equal(conv_transpose_global_avg_pool(LAYOUTS["offset 1"](x), w, **arguments), ours)
    alone = [conv_transpose_global_avg_pool(x[i : i + 1], w, **arguments) for i in range(shape[0])]
    assert torch.equal(torch.cat(alone), ours)


def test_boxes_that_32_bits_count() -> None:
    """Up to 32 loads of 16 bytes beyond a plane of nearly 2³¹ elements."""
    w = torch.empty(1, 1, 3, dtype=f16, device="meta")
    for size, sums in ((2**31 - 1032, "box_stream"), (2**31 - 1024, "box_sums"), (2**31 + 8, "box_sums")):
        assert kernels(A0, torch.empty(1, 1, size, dtype=f16, device="meta"), w, padding=1) == [sums, "finish"]
    x = torch.empty(1, 1, 8, 8, dtype=f16, device="meta")
    # as many taps that nine rounds of them are below 2³¹, and more
    for kernel, sums in (((15446, 15447), "box_stream"), ((15447, 15447), "box_sums"), ((2**16, 2**15), "box_sums")):
        assert kernels(A0, x, torch.empty(1, 1, *kernel, dtype=f16, device="meta"), padding=1) == [sums, "finish"]


COLUMN_CHAIN, STREAM_CHAIN = "column_sums", "column_stream"


@pytest.mark.sanitize
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize(
    ("shape", "weight", "kwargs", "dtype", "sums"),
    [
        ((2, 3, 5), (2, 3), {}, f32, WHOLE),
        ((2, 600, 3), (5, 3), {}, f32, WHOLE),  # 512 channels at a time
        ((2, 32, 3, 3), (128, 2, 2), {}, f32, STREAM_CHAIN),
        ((2, 33, 23, 23), (3, 3, 3), {}, f32, COLUMN_CHAIN),
        ((2, 36, 23, 23), (3, 3, 3), {"groups": 2, "stride": 2}, f32, STREAM_CHAIN),
        ((1, 64, 1025), (3, 3), {}, f32, STREAM_CHAIN),
        ((2, 66, 23, 23), (130, 3, 3), {"dilation": 2}, f16, COLUMN_CHAIN),
        ((2, 72, 5, 13, 17), (3, 3, 3, 3), {"stride": 2}, bf16, STREAM_CHAIN),
        ((1, 34, 23, 23), (3, 3, 3), {}, f64, STREAM_CHAIN),
        ((2, 8, 8193), (9, 3), {}, f16, STREAM_CHAIN),
        # 128 cells a round: borders of as many are left to one block of several
        *(((2, 64, 9, width), (3, 3, 3), {}, f32, STREAM_CHAIN) for width in (129, 130, 131)),
    ],
    ids=str,
)
def test_channels_last_chains(
    inputs: Inputs,
    shape: tuple[int, ...],
    weight: tuple[int, ...],
    kwargs: dict[str, int],
    dtype: torch.dtype,
    sums: str,
    padding: int,
) -> None:
    x = channels_last(inputs.input(*shape, dtype=dtype))
    w = inputs.weight(shape[1], *weight, *[1] * (len(shape) - 1 - len(weight)), dtype=dtype)
    bias = inputs.channels(weight[0] * kwargs.get("groups", 1), dtype=dtype)
    assert kernels(A0, x, w, bias, **kwargs, padding=padding) == chain(A0, COLUMN_CHAIN if padding else sums)
    check(A0, x, w, bias, **kwargs, padding=padding, scale=bias, against_eager=False)
    check(A, x, w, bias, **kwargs, padding=padding, shift=bias, out_scale=10.0, against_eager=False)


@pytest.mark.sanitize
@pytest.mark.parametrize(
    ("batch", "weight", "kwargs", "finish"),
    [
        # 128 output channels a block, or 32 where no logsumexp follows
        *((2, (co, 2), {}, ["finish_logsumexp"]) for co in (31, 32, 33, 127, 128, 129)),
        # the most weights that one block reads, 16384
        (2, (256, 2), {}, ["finish_logsumexp"]),
        (2, (257, 2), {}, ["finish", "logsumexp_rows"]),
        (2, (1030, 2), {}, ["finish", "logsumexp_rows"]),
        # more than 256 of the depth, or groups
        (3, (16, 5), {"padding": 2}, ["finish_logsumexp"]),
        (3, (80, 3), {"padding": 1, "groups": 2}, ["finish_logsumexp"]),
        (3, (129, 5), {"padding": 2}, ["finish", "logsumexp_rows"]),
        # at most eight runs of channels: each group has its own
        (2, (9, 2), {"groups": 8}, ["finish_logsumexp"]),
        (2, (9, 2), {"groups": 16}, ["finish", "logsumexp_rows"]),
        (2, (1, 2), {"groups": 64}, ["finish", "logsumexp_rows"]),
        # as many sums of taps as threads run at once, which the finishing kernel reads early; and more
        *((2, (co, 2), {}, ["finish", "logsumexp_rows"]) for co in (4224, 4225)),
        # from the second on, a block takes four samples
        *((batch, (65, 2), {}, ["finish_logsumexp"]) for batch in (132, 133, 134, 135, 136)),
        *((batch, (513, 2), {}, ["finish", "logsumexp_rows"]) for batch in (23, 24, 26)),
    ],
    ids=str,
)
def test_finish_boundaries(
    inputs: Inputs, batch: int, weight: tuple[int, ...], kwargs: dict[str, int], finish: list[str]
) -> None:
    x, w = inputs.input(batch, 64, 260), inputs.weight(64, *weight)
    bias = inputs.channels(weight[0] * kwargs.get("groups", 1))
    assert kernels(A, x, w, bias, **kwargs)[1:] == finish
    assert kernels(A0, x, w, bias, **kwargs)[1:] == ["finish"]
    for op in (A0, A):
        result = check(op, x, w, bias, **kwargs, shift=bias, against_eager=False)
        # Its bits do not depend on how many samples a block takes.
        for n in (0, batch // 2, batch - 1):
            assert torch.equal(
                getattr(fused_kernels, op)(x[n : n + 1], w, bias, **kwargs, shift=bias), result[n : n + 1]
            )


def test_one_block_has_more_weights_where_chunks_are_many() -> None:
    x, w = (torch.empty(*shape, device="meta") for shape in ((16, 64, 128, 128), (64, 128, 3, 3)))
    kwargs = {"stride": 2, "padding": 1, "output_padding": 1}
    assert kernels(A, x, w, **kwargs)[1:] == ["finish", "logsumexp_rows"]
    assert kernels(A, x.to(memory_format=torch.channels_last), w, **kwargs)[1:] == ["finish_logsumexp"]


@both_chains
@pytest.mark.parametrize(
    ("shape", "layout", "padding", "sums"),
    [
        ((16, 64, 64, 128), "contiguous", 0, "chunk_sums"),
        ((64, 64, 8, 48), "contiguous", 0, "plane_stream"),
        ((64, 64, 7, 7), "contiguous", 0, "tile_sums"),
        ((16, 64, 64, 128), "channels_last", 0, "column_stream"),
        ((16, 64, 64, 128), "channels_last", 1, "column_sums"),
        ((16, 64, 64, 128), "contiguous", 1, "box_stream"),
        ((16, 64, 64, 127), "contiguous", 1, "box_sums"),
    ],
    ids=str,
)
def test_weights_changed_between_calls(
    inputs: Inputs, op: str, shape: tuple[int, ...], layout: str, padding: int, sums: str
) -> None:
    """The finishing kernel reads the sums of taps before all planes are summed, and never those of the call before."""
    x, weights = LAYOUTS[layout](inputs.input(*shape)), [inputs.weight(64, 128, 3, 3) for _ in range(2)]
    assert kernels(op, x, weights[0], padding=padding)[0] == sums
    call = functools.partial(getattr(fused_kernels, op), x, padding=padding)
    expected = [call(w) for w in weights]
    assert not torch.equal(*expected)
    w = torch.empty_like(weights[0])
    results = [call(w.copy_(weights[i % 2])) for i in range(20)]
    for i, result in enumerate(results):
        assert torch.equal(result, expected[i % 2])


# ---- values --------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
@every_dtype
def test_values(inputs: Inputs, dtype: torch.dtype) -> None:
    check(G, inputs.input(3, 5, 7, 9, dtype=dtype))
    x, w = inputs.input(3, 4, 7, 9, dtype=dtype), inputs.weight(4, 6, 3, 2, dtype=dtype)
    bias, shift = inputs.channels(6, dtype=dtype), inputs.channels(6, 1, 1, dtype=dtype)
    check(A0, x, w, bias, stride=2, padding=1, output_padding=1, scale=0.5, shift=shift)
    check(A, x, w, bias, shift=shift, out_scale=10.0)


@every_dtype
@pytest.mark.parametrize("size", [1, 2, 7, 14, 28, 56, 112])
def test_global_avg_pool_of_real_models(inputs: Inputs, dtype: torch.dtype, size: int) -> None:
    check(G, inputs.input(3, 37, size, size, dtype=dtype))


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_workload_a(inputs: Inputs, dtype: torch.dtype) -> None:
    """At a smaller size, with its 64 and 128 channels."""
    x, w = inputs.input(2, 64, 40, 56, dtype=dtype), inputs.weight(64, 128, 3, 3, dtype=dtype)
    bias, shift = inputs.channels(128, dtype=dtype), inputs.channels(128, 1, 1, dtype=dtype)
    check(A, x, w, bias, shift=shift, out_scale=10.0)
    check(A0, x, w, bias, shift=shift)


# Cells that no tap uses.
@every_dtype
@pytest.mark.parametrize("border", [0.0, math.nan, math.inf, -math.inf, 1e30], ids=str)
@pytest.mark.parametrize("dims", [1, 2, 3])
def test_unused_cells_do_not_matter(device: torch.device, dtype: torch.dtype, border: float, dims: int) -> None:
    inner = torch.arange(1.0, 1 + 2**dims).reshape([2] * dims)  # [[1, 2], [3, 4]], of mean 2.5
    x = torch.nn.functional.pad(inner, [1, 1] * dims, value=border)[None, None].to(device, dtype)
    w = torch.ones([1] * (2 + dims), dtype=dtype, device=device)
    assert conv_transpose_global_avg_pool(x, w, padding=1).item() == inner.mean()
    assert conv_transpose_global_avg_pool_logsumexp(x, w, padding=1).item() == inner.mean()
    # A stride of 2 uses the same cells, and leaves gaps.
    check(A0, x, w, padding=2, stride=2)


@every_dtype
@pytest.mark.parametrize("border", [math.nan, math.inf, 1e30], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 20, 64), (1, 2, 130, 136), (2, 2, 7, 9, 40), (2, 3, 19, 63)], ids=str)
def test_unused_border(inputs: Inputs, dtype: torch.dtype, border: float, shape: tuple[int, ...]) -> None:
    """In rows of several loads, whose first and last are used in part."""
    x, dims = inputs.input(*shape, dtype=dtype), len(shape) - 2
    inner = x[(..., *[slice(2, -2)] * dims)].clone()
    w = inputs.weight(shape[1], 3, *[1] * dims, dtype=dtype)
    x[:] = border
    x[(..., *[slice(2, -2)] * dims)] = inner
    assert check(A0, x, w, padding=2, against_eager=False).isfinite().all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan], ids=str)
def test_used_corner_counts(inputs: Inputs, value: float) -> None:
    x, w = inputs.input(2, 3, 6, 5), inputs.weight(3, 4, 3, 3, positive=True)
    x[1, 2, 0, 0] = value
    ours = check(A0, x, w, padding=1)
    assert ours[0].isfinite().all() and not ours[1].isfinite().any()
    if value != -math.inf:
        check(A, x, w, padding=1)


@both_chains
@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_infinite_weights(inputs: Inputs, op: str, value: float) -> None:
    x, w = inputs.input(2, 3, 6, 5, positive=True), inputs.weight(3, 4, 3, 3)
    w[1, 2, 0, 1] = value
    check(op, x, w, padding=1)
    check(op, x, w)


@pytest.mark.parametrize(
    ("size", "channels"), [(SIZES[0], c) for c in (1, 2, 31, 33, 127, 1000, 1024)] + [(SIZES[1], c) for c in (33, 1000)]
)
@pytest.mark.parametrize(
    "kind", ["finite", "half -inf", "all -inf", "one +inf", "one NaN", "one NaN among -inf", "huge"]
)
def test_logsumexp(inputs: Inputs, size: int, channels: int, kind: str) -> None:
    x, w, shift = inputs.input(2, 2, size, size), inputs.weight(2, channels, 1, 1), inputs.channels(channels)
    if kind == "half -inf":
        shift[: channels // 2] = -math.inf
    elif kind in ("all -inf", "one NaN among -inf"):
        shift[:] = -math.inf
    elif kind == "huge":
        shift *= 1e30  # exp would overflow, or all terms vanish
    if kind.startswith("one"):
        shift[channels * 2 // 3] = math.inf if kind == "one +inf" else math.nan
    ours = check(A, x, w, shift=shift)
    assert ours.isfinite().all() == (kind in ("finite", "half -inf", "huge"))


@pytest.mark.parametrize("channels", [2, 3, 40, 200])
def test_logsumexp_is_rounded_once(inputs: Inputs, channels: int) -> None:
    """Sums, exponentials and the logarithm in float64: half a unit in the last place is all that is left."""
    x, w = inputs.input(500, 1, 1), inputs.weight(1, channels, 1)
    expected = exact(A, {"input": x, "weight": w})
    half_ulps = torch.tensor([0.5 * ulp(value, torch.float32) for value in expected.flatten().tolist()])
    errors = (conv_transpose_global_avg_pool_logsumexp(x, w).cpu().double() - expected).abs().flatten()
    assert (errors / half_ulps).max() <= 1 + 1e-6


@pytest.mark.parametrize("size", SIZES)
def test_infinite_sums(inputs: Inputs, size: int) -> None:
    """Infinities of the input itself, in every channel and in one."""
    w = inputs.weight(3, 40, 1, 1, positive=True)
    for value in (math.inf, -math.inf):
        x = inputs.input(2, 3, size, size)
        x[0, 1, -1, 0] = value
        assert check(A, x, w)[0] == value
        assert (check(G, x)[0, 1] == value).all()


# Every argument of a transposed convolution.
@both_chains
def test_output_padding(inputs: Inputs, op: str) -> None:
    x, w, bias = inputs.input(2, 3, 4, 5), inputs.weight(3, 4, 3, 2), inputs.channels(4)
    for stride, dilation in [((2, 3), 1), (1, (2, 3)), ((3, 1), (1, 2)), ((2, 2), (3, 1))]:
        most = [max(pair) for pair in zip(_pair(stride), _pair(dilation), strict=True)]
        for output_padding in [(a, b) for a in range(most[0]) for b in range(most[1])]:
            arguments = {"stride": stride, "dilation": dilation, "output_padding": output_padding}
            check(op, x, w, bias, **arguments)
            check(op, x, w, bias, **arguments, padding=(1, 2))


def _pair(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else value


def test_outputs_that_no_tap_reaches_count(device: torch.device) -> None:
    ones = lambda *shape: torch.ones(shape, device=device)  # noqa: E731
    ours = conv_transpose_global_avg_pool(ones(1, 4, 1, 1), ones(4, 1, 3, 3), dilation=2, output_padding=1)
    assert ours.item() == 1.0  # a mean over 6 x 6
    arguments = {"stride": (2, 1), "output_padding": (1, 0)}
    ours = conv_transpose_global_avg_pool(ones(2, 16, 1, 1), ones(16, 1, 3, 1), **arguments)
    assert ours.flatten().tolist() == [12.0, 12.0]


@pytest.mark.sanitize
@pytest.mark.parametrize("shape", [(2, 2, 1), (2, 2, 1, 3), (1, 2, 2, 1, 2)], ids=str)
def test_without_taps_the_affine_part_is_left(inputs: Inputs, shape: tuple[int, ...]) -> None:
    """An output of which no tap reaches an element, along one dimension or all."""
    x, w, bias = (
        torch.full(shape, math.nan, device=inputs.device),
        inputs.weight(2, 3, *[1] * (len(shape) - 2)),
        inputs.channels(3),
    )
    arguments = {"stride": 3, "padding": 1, "output_padding": 2}
    ours = check(A0, x, w, bias, **arguments, scale=0.5, shift=bias)
    assert torch.equal(ours[0].flatten(), bias * 0.5 + bias)
    check(A, x, w, bias, **arguments)


@both_chains
@every_dtype
@pytest.mark.parametrize("shape", [(2, 3, 1), (2, 3, 1, 1), (2, 3, 1, 40), (1, 3, 1, 9000)], ids=str)
def test_taps_that_no_input_meets(inputs: Inputs, op: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The one input of a dimension is the whole of it, and still not all taps send it into the output."""
    w, arguments = inputs.weight(3, 4, *[3] * (len(shape) - 2), dtype=dtype), {"stride": 2, "padding": 1}
    x = inputs.input(*shape, dtype=dtype)
    for layout in ("contiguous", "channels_last"):
        check(op, LAYOUTS[layout](x), w, **arguments, output_padding=1)
        check(op, LAYOUTS[layout](x), w, **arguments)


@both_chains
@every_dtype
@pytest.mark.parametrize(
    ("kernel", "padding", "arguments"),
    [
        ((1, 1), (1, 2), {}),
        ((2, 3), (3, 4), {}),
        ((3, 1), (5, 0), {"dilation": 2}),
        ((2, 2), (6, 5), {"stride": 2, "output_padding": 1}),
        ((1, 2), (7, 3), {"stride": (3, 1)}),
        ((2, 2), (4, 4), {"dilation": 3, "stride": 2}),
    ],
    ids=str,
)
def test_padding_beyond_the_kernel(
    inputs: Inputs,
    op: str,
    dtype: torch.dtype,
    kernel: tuple[int, int],
    padding: tuple[int, int],
    arguments: dict[str, Any],
) -> None:
    x, w = inputs.input(2, 3, 12, 11, dtype=dtype), inputs.weight(3, 4, *kernel, dtype=dtype)
    check(op, x, w, inputs.channels(4, dtype=dtype), padding=padding, **arguments)


@both_chains
@pytest.mark.parametrize(("channels", "groups", "per_group"), [(6, 6, 1), (6, 6, 2), (6, 2, 5), (66, 3, 33), (5, 1, 1)])
@pytest.mark.parametrize("padding", [0, 1])
def test_groups(inputs: Inputs, op: str, channels: int, groups: int, per_group: int, padding: int) -> None:
    x, w = inputs.input(3, channels, 6, 7), inputs.weight(channels, per_group, 3, 3)
    bias = inputs.channels(groups * per_group)
    ours = check(op, x, w, bias, groups=groups, padding=padding, stride=2, output_padding=1, dilation=2)
    # The same by position: stride, padding, output_padding, groups, dilation.
    assert torch.equal(getattr(fused_kernels, op)(x, w, bias, 2, padding, 1, groups, 2), ours)
    alone = [getattr(fused_kernels, op)(x[i : i + 1], w, bias, 2, padding, 1, groups, 2) for i in range(3)]
    assert torch.equal(torch.cat(alone), ours)


@pytest.mark.sanitize
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize(
    ("shape", "kernel", "padding", "launches"),
    [
        ((2, 2, 70), (31,), (15,), 1),  # 31 pieces
        ((2, 2, 72), (31,), (15,), 1),
        ((2, 4, 72), (32,), (16,), 2),
        ((2, 2, 9, 44), (3, 36), (1, 20), 2),
        ((1, 2, 35, 3, 36), (33, 2, 33), (32, 1, 32), 4),
        ((2, 4, 70), (32,), (16,), 2),  # 33
        ((2, 3, 70), (34,), (33,), 3),  # 67
        ((2, 2, 9, 41), (3, 36), (1, 20), 2),  # 3 pieces, 41
        ((1, 3, 40, 70), (34, 34), (33, 33), 6),  # 40, 67
        ((1, 2, 35, 3, 33), (33, 2, 33), (32, 1, 32), 4),  # 35, 3, 33
    ],
    ids=str,
)
def test_many_segments(
    inputs: Inputs,
    layout: str,
    shape: tuple[int, ...],
    kernel: tuple[int, ...],
    padding: tuple[int, ...],
    launches: int,
) -> None:
    """One launch takes up to 32 pieces of a dimension."""
    x = LAYOUTS[layout](inputs.input(*shape))
    w = inputs.weight(shape[1], 3, *kernel)
    boxes = "box_sums" if shape[-1] % 4 else "box_stream"
    sums = "column_sums" if layout == "channels_last" else boxes
    assert kernels(A0, x, w, padding=padding) == [sums] * launches + ["finish"]
    check(A0, x, w, padding=padding)
    check(A, x, w, padding=padding)


# ---- precision -----------------------------------------------------------------------------------------------------


def test_low_precision(inputs: Inputs) -> None:
    device = inputs.device
    assert global_avg_pool(torch.ones(1, 1, 256, 257, dtype=f16, device=device)).item() == 1.0
    alternating = torch.arange(512, device=device).remainder(2).to(bf16)
    assert global_avg_pool(alternating[None, None]).item() == 0.5
    uniform = torch.rand(8, 54, 16, 56, 56, generator=inputs.generator).to(device, f16)
    assert_close(global_avg_pool(uniform), uniform.double().mean((2, 3, 4), keepdim=True).cpu())


@pytest.mark.parametrize("dtype", [f16, bf16], ids=str)
def test_intermediate_beyond_half_stays_finite(device: torch.device, dtype: torch.dtype) -> None:
    """Sums, and a mean of 131072 before its scale, that float16 cannot hold."""
    x, w = torch.full((1, 32, 8, 8), 64.0, dtype=dtype, device=device), torch.full((32, 1, 1, 1), 64.0, dtype=dtype)
    scale = torch.tensor([0.25], dtype=dtype, device=device)
    assert conv_transpose_global_avg_pool(x, w.to(device), scale=scale).item() == 32768
    assert conv_transpose_global_avg_pool_logsumexp(x, w.to(device), scale=scale).item() == 32768
    # A weight's taps, too: their sum is 120000.
    w = torch.full((1, 1, 2), 60000.0, dtype=dtype, device=device)
    ours = conv_transpose_global_avg_pool(torch.full((1, 1, 7), 0.5, dtype=dtype, device=device), w)
    assert_close(ours, torch.full((1, 1, 1), w[0, 0, 0].item() * 7 / 8, dtype=f64))


@pytest.mark.sanitize
@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(2, 3, 7, 7), (2, 8, 9, 31), (1, 3, 90, 91), (1, 16, 200, 100)], ids=str)
def test_partial_sums_beyond_float32(inputs: Inputs, shape: tuple[int, ...], layout: str, dtype: torch.dtype) -> None:
    """A sum over a part of the plane overflows; that over the plane, or after small weights, does not."""
    largest = torch.finfo(dtype).max
    x = inputs.input(*shape, dtype=dtype).uniform_(0.5, 1) * largest
    x[:, :, shape[2] // 2 :] *= -1
    x = LAYOUTS[layout](x)
    assert check(G, x, against_eager=False).isfinite().all()
    w = (inputs.weight(shape[1], 4, 3, 3) * 1e-3).to(dtype)
    for padding in (0, 1):
        assert check(A0, x, w, padding=padding, against_eager=False).isfinite().all()


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_few_cells(inputs: Inputs, layout: str) -> None:
    """Of many sums of few elements the worst has no more than one rounding to show, as torch.mean's has."""
    for channels in (600, 357):
        for cells in (2, 3, 5, 8, 13, 16, 31):
            check(G, LAYOUTS[layout](inputs.input(20, channels, cells)))


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_few_outputs(inputs: Inputs, layout: str) -> None:
    """A largest error of few values is luck, so that what is better than eager on average is not enough."""
    for shape in ((1, 3, 1, 3), (1, 5, 4, 4), (2, 3, 9, 7)):
        for _ in range(20):
            check(A0, LAYOUTS[layout](inputs.input(*shape)), inputs.weight(shape[1], 2, 3, 3), stride=2)


@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 33), (1, 1, 7, 9), (1, 3, 6, 99), (1, 1, 40, 40), (2, 1, 90, 70)], ids=str)
def test_one_plane(inputs: Inputs, layout: str, shape: tuple[int, ...]) -> None:
    """Whose mean is near zero by chance: a rounding of any of its partial sums to float32 would show."""
    for _ in range(60):
        check(G, LAYOUTS[layout](inputs.input(*shape)))


def test_a_plane_that_nearly_cancels(device: torch.device) -> None:
    """Its error was 2.4 times torch.mean's when float32 partial sums of up to 32 elements were added up."""
    check(G, Inputs(1, device).input(1, 1, 6, 99))


@every_dtype
def test_long_sums(inputs: Inputs, dtype: torch.dtype) -> None:
    """The error does not grow with the plane: an offset of 1000 would show lost low bits."""
    check(G, inputs.input(1, 2, 1000, 700, dtype=dtype) + (1000 if dtype != f16 else 10))


@pytest.mark.slow
def test_sums_of_67_million(device: torch.device) -> None:
    assert global_avg_pool(torch.ones(1, 1, 8192, 8192, device=device)).item() == 1.0
    x = torch.ones(1, 3, 6400, 8000, device=device).to(memory_format=torch.channels_last)
    assert global_avg_pool(x).flatten().tolist() == [1.0, 1.0, 1.0]


# ---- sizes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4), (0, 0, 4), (2, 3, 0, 4), (0, 3, 0), (2, 0, 0, 3, 3)])
def test_empty_input(inputs: Inputs, shape: tuple[int, ...]) -> None:
    """As torch.mean: no planes give no means, and a plane of nothing NaN."""
    check(G, torch.empty(shape, device=inputs.device))
    check(G, inputs.input(2, 3, 4, 4))


@both_chains
def test_empty_batch(inputs: Inputs, op: str) -> None:
    w = inputs.weight(3, 4, 3, 3)
    check(op, inputs.input(0, 3, 5, 5), w)
    check(op, inputs.input(0, 3, 5, 5), w, padding=1)
    check(op, inputs.input(2, 3, 5, 5), w)


@pytest.mark.parametrize("shape", [(65537, 2, 3), (1, 65537, 3), (70000, 1, 1), (2, 70000, 33)])
def test_many_samples_or_channels(inputs: Inputs, shape: tuple[int, ...]) -> None:
    """Beyond a grid's 65535 in y and z."""
    x = inputs.input(*shape)
    check(G, x)
    if shape[1] == 2:
        check(A, x, inputs.weight(2, 3, 2), padding=1)
        check(A0, x, inputs.weight(2, 3, 2))
    else:
        check(A0, x, inputs.weight(shape[1], 2, 1), against_eager=False)


@both_chains
def test_many_output_channels(inputs: Inputs, op: str) -> None:
    check(op, inputs.input(2, 2, 5), inputs.weight(2, 65537, 2))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 2**30 + 1, 1), (2**16 + 1, 2**15, 1, 1), (3, 5, 12000, 12000)], ids=str)
def test_more_than_2_31_elements(device: torch.device, shape: tuple[int, ...]) -> None:
    if device.type == "cpu" and (shape[1] > 1 or os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 12e9):
        pytest.skip("not enough memory")
    x = torch.zeros(shape, dtype=bf16, device=device)
    x[-1, -1, -1, -1], x[0, -1] = 1, 3
    plane = shape[2] * shape[3]
    means = global_avg_pool(x)
    assert means[-1, -1].item() == torch.tensor(1 / plane).to(bf16) and means[0, -1].item() == 3
    if shape[1] < 10:
        ours = conv_transpose_global_avg_pool(
            x, torch.ones(shape[1], 1, 1, 1, dtype=bf16, device=device), padding=(1, 0)
        )
        assert ours[0].item() == 3 and ours[-1].item() == 0  # the last row is cut off


# ---- everything at once --------------------------------------------------------------------------------------------


@pytest.mark.properties
@given(data=st.data())
def test_global_avg_pool_of_anything(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    dims = draw(st.integers(1, 3))
    channels, largest = draw(
        st.sampled_from(
            [(9, {1: 40000, 2: 200, 3: 34}), (140, {1: 3000, 2: 55, 3: 14}), (600, {1: 64, 2: 8, 3: 4})],
        )
    )
    sizes = [draw(st.one_of(st.integers(1, 8), st.integers(1, largest[dims]))) for _ in range(dims)]
    dtype = draw(st.sampled_from(DTYPES))
    x = Inputs(draw(st.integers(0, 2**32)), device).input(
        draw(BATCH), draw(st.one_of(st.integers(1, 9), st.integers(1, channels))), *sizes, dtype=dtype
    )
    put_special(draw, draw(st.sampled_from(["none", "nan", "+inf", "-inf"])), x)
    x = in_any_layout(draw, x)
    event(launched(G, {"input": x}))
    check(G, x)


@pytest.mark.properties
@given(data=st.data())
def test_chains_of_anything(device: torch.device, data: st.DataObject) -> None:
    draw = data.draw
    arguments, _, both_signs = draw_call(draw, device, ("scale", "shift"))
    event(launched(A0, arguments))
    check(A0, **arguments, nan_may_be="infinite" if both_signs else "NaN")
    out_scale = draw(st.sampled_from([1.0, 10.0, -0.5]))
    check(A, **arguments, out_scale=out_scale, nan_may_be="anything" if both_signs else "NaN")


@pytest.mark.parametrize(
    ("shape", "weight", "arguments"),
    [((1, 1, 8, 8, 8), (1, 1, 1, 1, 1), {"stride": 2**21}), ((1, 1, 4, 4), (1, 1, 3, 3), {"dilation": 2**31 - 1})],
)
def test_outputs_of_more_than_64_bits(inputs: Inputs, shape: Any, weight: Any, arguments: dict[str, int]) -> None:
    """The mean over more outputs than an integer counts."""
    x = torch.ones(*shape, dtype=torch.float64, device=inputs.device)
    w = torch.ones(*weight, dtype=torch.float64, device=inputs.device)
    size = math.prod(
        (d - 1) * arguments.get("stride", 1) + arguments.get("dilation", 1) * (weight[-1] - 1) + 1 for d in shape[2:]
    )
    mean = fused_kernels.conv_transpose_global_avg_pool(x, w, **arguments)
    assert mean.item() == pytest.approx(x.numel() * w.numel() / size, rel=1e-14)


def test_out_scale_is_a_number(inputs: Inputs) -> None:
    """A parameter's gradient would be lost."""
    x, w = inputs.input(2, 3, 4, 4), inputs.weight(3, 5, 3, 3)
    packet = torch.ops.fused.conv_transpose_global_avg_pool_logsumexp
    for door in (fused_kernels.conv_transpose_global_avg_pool_logsumexp, packet, packet.default):
        for out_scale in (torch.ones(()), torch.ones((), requires_grad=True)):
            with pytest.raises(TypeError, match="logsumexp: expected `out_scale` to be a number, but got a Tensor"):
                door(x, w, out_scale=out_scale)  # type: ignore[arg-type]
