"""From small inputs to large ones: the fraction of the speed of a pure read that the global pools reach.

A point is an input of (16, 64, H, W) in one dtype and memory format. At every size the read is timed on the very input,
before and after the rows, in the same run; every row is verified first and, with its last timed output, afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import report
from .cases import CASES, PEERS, ConvGlobalPoolLogSumExp, GlobalPool, Size, allowed_error
from .contender import Contender, race
from .timing import MIB, Limit, Timer, Timing

SIZES = tuple(4**i for i in range(8))  # MiB: 1 to 16384
ON_CPU = 256  # MiB, the largest on a CPU unless more is asked for
SWEPT_DTYPES = ("float32", "bfloat16")  # unless others are asked for
BATCH, CHANNELS, OUT_CHANNELS = 16, 64, 128
# Ours, then what it is compared with. torch.mean reads the same input, and stands beside A too.
HAND = replace(PEERS["hand"], key="hand_graph", label="by hand, graph", graph=True)
SCHEMA = "sweep 1"


@dataclass(frozen=True)
class Point:
    """All that was measured on one input. The rows' keys: G, mean, A, hand."""

    mib: int
    dtype: str
    channels_last: bool
    input: tuple[int, ...]
    limit: report.LimitResult
    rows: dict[str, report.Row]

    def fraction(self, key: str) -> float | None:
        """Of the speed of the read, or None if the row has no time."""
        timing = self.rows[key].timing if key in self.rows else None
        return self.limit.timing.median_ms / timing.median_ms if timing else None


@dataclass(frozen=True)
class Sweep:
    """One invocation: where, with what, and what came out. ``skipped`` says what did not fit, a line each."""

    machine: dict[str, Any]
    settings: dict[str, Any]
    points: tuple[Point, ...]
    skipped: tuple[str, ...] = ()
    schema: str = field(default=SCHEMA)

    @property
    def failures(self) -> list[str]:
        """What was wrong, a line each."""
        return [
            f"{point.mib} MiB {_series(point)}, {row.label}: {row.note}"
            for point in self.points
            for row in point.rows.values()
            if row.status == "FAILED"
        ]


def input_shape(mib: int, itemsize: int) -> tuple[int, ...]:
    """(16, 64, H, W) of so many MiB, with W equal to H or twice as large."""
    if mib < 1 or mib & (mib - 1):
        raise ValueError(f"{mib} MiB: expected a power of two")
    plane = mib * MIB // itemsize // (BATCH * CHANNELS)
    height = 1 << (plane.bit_length() - 1) // 2
    return (BATCH, CHANNELS, height, plane // height)


def points(sizes: Sequence[int], dtypes: Sequence[str]) -> Iterator[tuple[int, str, bool]]:
    """Size in MiB, dtype, and whether channels_last."""
    for mib in sizes:
        for dtype in dtypes:
            for channels_last in (False, True):
                yield mib, dtype, channels_last


def bytes_needed(mib: int, dtype: torch.dtype) -> int:
    """Peak memory of a point: the noise in float32, the input, its other memory format or the limit's checksum."""
    wide = max(1, torch.float32.itemsize // dtype.itemsize)
    return mib * MIB * (wide + 2) + 256 * MIB


def bytes_available(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/meminfo does not say what memory is available")


def measure_point(
    mib: int,
    dtype: torch.dtype,
    channels_last: bool,
    generator: torch.Generator,
    timer: Timer,
    budget_s: float,
    rounds: int,
) -> Point:
    """Verify and time the rows of one input."""
    size = Size(input_shape(mib, dtype.itemsize), OUT_CHANNELS)
    tiny = CASES["A"].tiny
    pool = GlobalPool("G", "", size, size, tiny, channels_last=channels_last)
    chain = ConvGlobalPoolLogSumExp("A", "", size, size, tiny, channels_last=channels_last)
    of_chain = chain.inputs(size, dtype, generator)
    of_pool = {"input": of_chain["input"]}
    on_gpu = generator.device.type == "cuda"
    contenders = {
        "G": Contender(pool, PEERS["ours"], size, dtype, of_pool),
        "mean": Contender(pool, PEERS["eager"], size, dtype, of_pool),
        "A": Contender(chain, PEERS["ours"], size, dtype, of_chain),
        "hand": Contender(chain, HAND if on_gpu else PEERS["hand"], size, dtype, of_chain),
    }
    exact = {"G": pool.exact(of_pool), "A": chain.exact(of_chain)}
    exact |= {"mean": exact["G"], "hand": exact["A"]}
    for key in ("mean", "G", "hand", "A"):
        contender = contenders[key]
        tolerance = contender.case.tolerance(contender.peer, generator.device, dtype)
        if contender.peer.source == "ours":
            # The convolution itself would take minutes, so A has no eager error that it may match: one ulp at most.
            eager = contenders["mean"].error if key == "G" else 0.0
            tolerance = allowed_error(exact[key], dtype, eager)
        contender.verify(exact[key], tolerance)
    limit = race(list(contenders.values()), Limit("read", of_pool["input"], 0), timer, budget_s, budget_s, rounds)
    return Point(
        mib,
        str(dtype).removeprefix("torch."),
        channels_last,
        size.input,
        limit,
        {key: contender.row() for key, contender in contenders.items()},
    )


# --- Results ---


def is_sweep(path: Path) -> bool:
    return str(json.loads(path.read_text())["schema"]).startswith("sweep")


def read_json(path: Path) -> Sweep:
    data = report.load_json(path, SCHEMA)
    return Sweep(
        data["machine"], data["settings"], tuple(_point(point) for point in data["points"]), tuple(data["skipped"])
    )


def _point(data: dict[str, Any]) -> Point:
    rows = {key: report.row_of(row) for key, row in data["rows"].items()}
    return Point(**{**data, "input": tuple(data["input"]), "limit": report.limit_of(data["limit"]), "rows": rows})


def _series(point: Point) -> str:
    return point.dtype + (" channels_last" if point.channels_last else "")


def print_sweep(sweep: Sweep, console: Console) -> None:
    """A line for each point: times in ms and fractions of the read's speed."""
    console.print(f"[bold]{escape(report.describe(sweep.machine))}[/]")
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("MiB", "in", "read", "G", "torch.mean", "A", "by hand"):
        table.add_column(heading, justify="left" if heading == "in" else "right", no_wrap=True)
    for point in sweep.points:
        cells = [str(point.mib), _series(point)]
        cells.append(report.milliseconds(point.limit.timing.median_ms))
        for key in ("G", "mean", "A", "hand"):
            row, fraction = point.rows[key], point.fraction(key)
            cells.append(row.status if fraction is None or row.timing is None else _time(row.timing, fraction))
        table.add_row(*cells)
    console.print(table)
    console.print("[dim]Times in ms, and the fraction of the speed of a pure read of the same input.[/]")
    for line in sweep.skipped:
        console.print(f"[yellow]skipped[/] {escape(line)}", highlight=False, soft_wrap=True)
    for line in sweep.failures:
        console.print(f"[red]FAILED[/] {escape(line)}", highlight=False, soft_wrap=True)


def _time(timing: Timing, fraction: float) -> str:
    return f"{report.milliseconds(timing.median_ms)} {fraction:.2f}"


def markdown(path: Path, root: Path) -> str:
    """The plot that stands beside the JSON, and what it shows."""
    sweep, drawing = read_json(path), path.with_suffix(".svg")
    if not drawing.exists():
        raise ValueError(f"{drawing}: draw it first, with --plot {path}")
    lines = [f"![Speed over size]({drawing.resolve().relative_to(root.resolve())})", ""]
    lines.append(
        f"{report.describe(sweep.machine)}. Inputs of (16, 64, H, W); the speed as a fraction of a pure read's."
    )
    for key, name in (("G", "`global_avg_pool`"), ("A", "`conv_transpose_global_avg_pool_logsumexp`")):
        large = [fraction for point in sweep.points if point.mib >= 256 and (fraction := point.fraction(key))]
        against = [ours / mean for point in sweep.points if (ours := _ms(point, key)) and (mean := _ms(point, "mean"))]
        if large and against:
            lines.append(f"{name}: from 256 MiB on at least {min(large):.3f}; at most {max(against):.2f} times")
            lines.append("the time of `torch.mean` of the same input, at any size.")
    return "\n".join(lines)


def _ms(point: Point, key: str) -> float | None:
    timing = point.rows[key].timing
    return timing.median_ms if timing else None


def plot(sweep: Sweep, path: Path) -> None:
    """Fractions of the read's speed over size: a panel for each op and dtype. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    dtypes = list(dict.fromkeys(point.dtype for point in sweep.points))
    sizes = sorted({point.mib for point in sweep.points})
    panels = (("global_avg_pool", ("mean", "G")), ("conv_transpose_global_avg_pool_logsumexp", ("mean", "hand", "A")))
    lines = {"G": ("o-", "ours"), "A": ("o-", "ours"), "mean": ("x--", "torch.mean of the input")}
    lines["hand"] = (".:", "by hand" + (", CUDA graph" if sweep.machine["device_type"] == "cuda" else ""))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "fused_kernels", "font.size": 9}):
        figure = Figure(figsize=(9, 2.8 * len(dtypes) + 0.8), layout="constrained")
        grid = figure.subplots(len(dtypes), len(panels), sharex=True, sharey=True, squeeze=False)
        for dtype, row in zip(dtypes, grid, strict=True):
            for (title, keys), axes in zip(panels, row, strict=True):
                for channels_last, colour in ((False, "tab:blue"), (True, "tab:orange")):
                    for key in keys:
                        style, label = lines[key]
                        drawn = [
                            (point.mib, fraction)
                            for point in sweep.points
                            if (point.dtype, point.channels_last) == (dtype, channels_last)
                            and (fraction := point.fraction(key)) is not None
                        ]
                        if drawn:
                            label += "; channels_last" if channels_last else ""
                            axes.plot(*zip(*drawn, strict=True), style, color=colour, label=label, markersize=4)
                axes.set_title(f"{title}, {dtype}", fontsize=9)
                axes.set_xscale("log", base=2)
                axes.set_xticks(sizes, labels=[str(mib) for mib in sizes])
                axes.set_ylim(0, 1.05)
                axes.grid(alpha=0.3)
                axes.axhline(0.95, color="black", linewidth=0.5)
        for axes in grid[-1]:
            axes.set_xlabel("input, MiB")
        for axes in grid[:, 0]:
            axes.set_ylabel("fraction of a read's speed")
        figure.legend(*grid[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=8)
        figure.savefig(path, format="svg", metadata={"Date": None})
