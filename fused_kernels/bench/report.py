"""Results as data (JSON), as tables on the terminal, and as the table in the README."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .timing import Timing

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

SCHEMA = 1
README_BEGIN = "<!-- bench:begin -->"
README_END = "<!-- bench:end -->"

Status = Literal["ok", "FAILED", "not supported yet", "unavailable"]
_STATUS_TEXT: dict[Status, str] = {
    "ok": "",
    "FAILED": "FAILED",
    "not supported yet": "not yet",
    "unavailable": "n/a",
}


@dataclass(frozen=True)
class Row:
    """One peer's result. ``error`` is relative to the largest expected value, and ours may not exceed ``allowed``."""

    peer: str
    label: str
    status: Status
    note: str = ""
    error: float | None = None
    allowed: float | None = None
    timing: Timing | None = None


@dataclass(frozen=True)
class LimitResult:
    """The memory limit, measured before and after the peers; the better one counts.

    Where the operations may take longer than the bytes, also their time at the rate of a matrix product.
    """

    kind: str
    bytes_moved: int
    method: str
    before_ms: float
    after_ms: float
    timing: Timing
    note: str = ""
    operations_ms: float | None = None
    operations_per_s: float | None = None
    operations_dtype: str = ""

    @property
    def by_operations(self) -> bool:
        """Whether the operations take longer than the bytes."""
        return self.operations_ms is not None and self.operations_ms > self.timing.median_ms

    @property
    def ms(self) -> float:
        """The larger of the two floors."""
        return max(self.timing.median_ms, self.operations_ms or 0.0)


@dataclass(frozen=True)
class CaseResult:
    """Everything measured for one case in one dtype."""

    case: str
    about: str
    op: str
    dtype: str
    size: str
    input: tuple[int, ...]
    channels_last: bool
    output: tuple[int, ...]
    bytes_read: int
    bytes_written: int
    operations: int
    rows: tuple[Row, ...]
    limit: LimitResult | None = None

    def row(self, peer: str) -> Row | None:
        return next((row for row in self.rows if row.peer == peer), None)

    def median(self, *peers: str) -> float | None:
        """The fastest of these peers' medians, in milliseconds."""
        rows = (self.row(peer) for peer in peers)
        return min((row.timing.median_ms for row in rows if row and row.timing), default=None)

    def limit_ratio(self) -> float | None:
        """The faster of ours and ours under a CUDA graph, over the limit."""
        ours = self.median("ours", "ours_graph")
        return ours / self.limit.ms if ours is not None and self.limit else None


@dataclass(frozen=True)
class HostRow:
    """Host time of one small call, made in one of several ways, in microseconds."""

    label: str
    way: str
    dtype: str
    status: Status
    note: str = ""
    microseconds: float | None = None

    @property
    def title(self) -> str:
        return f"{self.label}, {self.way}"


@dataclass(frozen=True)
class Run:
    """One invocation of the benchmark: where, with what, and what came out."""

    machine: Mapping[str, Any]
    settings: Mapping[str, Any]
    cases: tuple[CaseResult, ...]
    host: tuple[HostRow, ...] = ()
    schema: int = field(default=SCHEMA)

    @property
    def failures(self) -> list[str]:
        """What was wrong, a line each."""
        rows = [(f"{case.case} {case.dtype}", row) for case in self.cases for row in case.rows]
        failed = [f"{name}, {row.label}: {row.note}" for name, row in rows if row.status == "FAILED"]
        return failed + [f"host, {row.title}: {row.note}" for row in self.host if row.status == "FAILED"]


def write_json(result: DataclassInstance, path: Path) -> None:
    """A `Run` or a sweep."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(result), indent=1, default=str) + "\n")


def load_json(path: Path, schema: object) -> dict[str, Any]:
    """What `write_json` wrote, as plain data; raises if it is of another schema."""
    data: dict[str, Any] = json.loads(path.read_text())
    if data["schema"] != schema:
        raise ValueError(f"{path}: schema {data['schema']}, expected {schema}")
    return data


def read_json(path: Path) -> Run:
    data = load_json(path, SCHEMA)
    return Run(
        machine=data["machine"],
        settings=data["settings"],
        cases=tuple(_case(case) for case in data["cases"]),
        host=tuple(HostRow(**row) for row in data["host"]),
    )


def _case(data: dict[str, Any]) -> CaseResult:
    return CaseResult(
        **{
            **data,
            "input": tuple(data["input"]),
            "output": tuple(data["output"]),
            "rows": tuple(row_of(row) for row in data["rows"]),
            "limit": data["limit"] and limit_of(data["limit"]),
        }
    )


def row_of(data: dict[str, Any]) -> Row:
    return Row(**{**data, "timing": data["timing"] and Timing(**data["timing"])})


def limit_of(data: dict[str, Any]) -> LimitResult:
    return LimitResult(**{**data, "timing": Timing(**data["timing"])})


# --- Numbers as text ---


def milliseconds(value: float | None) -> str:
    """Three significant digits, and tenths of microseconds below a millisecond."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}" if value >= 1 else f"{value:.4f}"


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f}" if value >= 99.95 else f"{value:#.3g}"


def _error(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}"


def _shape(case: CaseResult) -> str:
    return "×".join(map(str, case.input)) + (" channels_last" if case.channels_last else "")


def _bytes(count: int) -> str:
    amount = float(count)
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:.3g} GB"


def _case_name(case: CaseResult) -> str:
    return f"{case.case} {case.dtype}"


# --- Terminal ---


def _table(title: str, caption: str | None = None) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="",
        caption=caption,
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )


def case_table(case: CaseResult) -> Table:
    """One case: a line for each peer and for the limit. The speed-up is that of the faster of our rows."""
    table = _table(f"[bold]{_case_name(case)}[/], {_shape(case)}\n[dim]{escape(case.about)}[/]", _limit_caption(case))
    table.add_column("peer", no_wrap=True)
    for heading in ("ms", "IQR", "GB/s", "× limit", "speed-up", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    ours = case.median("ours", "ours_graph")
    limit = case.limit.ms if case.limit else None
    moved = case.bytes_read + case.bytes_written
    for row in case.rows:
        style = "bold" if row.peer.startswith("ours") else None
        if row.timing is None:
            colour = "red" if row.status == "FAILED" else "yellow"
            status = f"[{colour}]{_STATUS_TEXT[row.status]}[/]"
            table.add_row(row.label, status, *[""] * 4, _error(row.error), style=style)
            continue
        spent = row.timing.median_ms
        table.add_row(
            row.label,
            milliseconds(spent),
            _spread(row.timing),
            f"{moved / spent / 1e6:.0f}",
            _ratio(spent / limit if limit else None),
            "" if row.peer.startswith("ours") else _ratio(spent / ours if ours else None),
            _error(row.error),
            style=style,
        )
    if case.limit:
        timing = case.limit.timing
        rate = f"{case.limit.bytes_moved / timing.median_ms / 1e6:.0f}"
        ratio = _ratio(timing.median_ms / case.limit.ms) if case.limit.by_operations else "1"
        table.add_section()
        table.add_row(
            f"limit ({case.limit.kind})", milliseconds(timing.median_ms), _spread(timing), rate, ratio, "", ""
        )
        floor = case.limit.operations_ms
        if floor is not None:
            ratio = "1" if case.limit.by_operations else _ratio(floor / case.limit.ms)
            table.add_row("limit (operations)", milliseconds(floor), "", "", ratio, "", "")
    return table


def _spread(timing: Timing) -> str:
    return "–" if timing.reps < 3 else f"{(timing.q3_ms - timing.q1_ms) / timing.median_ms:.1%}"


def _limit_caption(case: CaseResult) -> str | None:
    if case.limit is None:
        return None
    before, after = milliseconds(case.limit.before_ms), milliseconds(case.limit.after_ms)
    note = f"; {escape(case.limit.note)}" if case.limit.note else ""
    moved = f"{case.limit.kind} {_bytes(case.limit.bytes_moved)}"
    operations = ""
    if case.limit.operations_per_s is not None:
        rate = f"{case.limit.operations_per_s / 1e12:.3g} TFLOP/s, a matrix product's in {case.limit.operations_dtype}"
        operations = f"; {case.operations / 1e9:.3g} GFLOP at {rate}"
    return f"limit: {moved}, before {before}, after {after} ms; {escape(case.limit.method)}{note}{operations}"


def host_table(rows: Sequence[HostRow]) -> Table:
    table = _table("[bold]host time of one small call[/]")
    table.add_column("call")
    table.add_column("dtype")
    table.add_column("µs", justify="right")
    for row in rows:
        table.add_row(row.title, row.dtype, row.status if row.microseconds is None else f"{row.microseconds:.1f}")
    return table


def demo_table(cases: Sequence[CaseResult]) -> Table:
    """Error, times and ratios on a screenful."""
    tf32 = any(case.row("eager_tf32") for case in cases)
    table = _table("medians in ms; ours against PyTorch")
    table.add_column("case", no_wrap=True)
    headings = ["error", "eager", *(["eager, TF32"] if tf32 else []), "by hand", "ours", "eager ÷ ours", "hand ÷ ours"]
    for heading in headings:
        table.add_column(heading, justify="right")
    for case in cases:
        row, ours = case.row("ours"), case.median("ours")
        eager, hand = case.median("eager"), case.median("hand")
        failed = _STATUS_TEXT[row.status] if row else "–"
        table.add_row(
            f"{_case_name(case)}\n[dim]{_shape(case)}[/]",
            _error(row.error if row else None),
            milliseconds(eager),
            *([milliseconds(case.median("eager_tf32"))] if tf32 else []),
            milliseconds(hand),
            failed or f"[bold]{milliseconds(ours)}[/]",
            _ratio(eager / ours if eager and ours else None),
            _ratio(hand / ours if hand and ours else None),
        )
    return table


def print_run(run: Run, console: Console, demo: bool = False) -> None:
    """The whole report; a line for everything that failed comes last."""
    console.print(f"[bold]{escape(describe(run.machine))}[/]")
    if demo:
        console.print(demo_table(run.cases))
        console.print(
            "[dim]error: ours against float64, relative to the largest value.\n"
            "by hand: the same collapse written in PyTorch.[/]"
        )
    else:
        for case in run.cases:
            console.print(case_table(case))
    if run.host:
        console.print(host_table(run.host))
    notes = [(f"{_case_name(case)}, {row.label}", row.status, row.note) for case in run.cases for row in case.rows]
    notes += [(f"host, {row.title}", row.status, row.note) for row in run.host]
    for where, status, note in notes:
        if status != "ok":
            colour = "red" if status == "FAILED" else "yellow"
            console.print(f"[{colour}]{status}[/] {escape(where)}: {escape(note)}", highlight=False, soft_wrap=True)


def describe(machine: Mapping[str, Any]) -> str:
    """The machine and its software in a line."""
    parts = [str(machine["device"])]
    if machine.get("driver"):
        parts.append(f"driver {machine['driver']}")
    parts.append(f"PyTorch {machine['torch']}")
    if machine.get("cuda") and machine.get("device_type") == "cuda":
        parts.append(f"CUDA {machine['cuda']}")
    if machine.get("device_type") == "cpu":
        parts.append(f"{machine['threads']} threads")
    if machine.get("commit"):
        # Of a whole hash, as GIT_COMMIT may give it, what git itself shows.
        parts.append("commit " + re.sub(r"^([0-9a-f]{7})[0-9a-f]{33}", r"\1", str(machine["commit"])))
    return ", ".join([*parts, str(machine["date"])[:10]])


# --- README ---

_COLUMNS = (
    ("eager", ("eager",)),
    ("eager, TF32", ("eager_tf32",)),
    ("`torch.compile`", ("compile",)),
    ("by hand, best", ("hand", "hand_compile", "hand_graph")),
    ("**ours**", ("ours",)),
    ("**ours, graph**", ("ours_graph",)),
)


_README_LEGEND = (
    "Medians, caches flushed by reading before each call. *limit*: reading the input (A, G) or copying as many bytes "
    "as are read and written (B), in the same run: on a GPU by the best of several plain kernels, on a CPU by "
    "`torch.sum` or `copy_`; or where that is longer, *ops*, the operations at the rate of a matrix product of that "
    "dtype (TF32 off; on a CPU float32 for the half types). "
    "*ours / limit*: the faster of our two. *eager*: TF32 off; other peers leave convolutions at PyTorch's default, "
    "TF32. *by hand*: the same collapse written in PyTorch; the best of eager, compiled, and compiled under a CUDA "
    "graph. *error*: ours against float64, relative to the largest value."
)


def markdown(runs: Iterable[Run], more: Iterable[str] = ()) -> str:
    """A table for each run, its machine named above it, and what the columns mean; then what else there is."""
    return "\n\n".join(["\n".join(_markdown_lines(run)) for run in runs] + [_README_LEGEND, *more])


def _markdown_lines(run: Run) -> list[str]:
    headings = ["case", "input", *(heading for heading, _ in _COLUMNS), "limit", "ours / limit", "error"]
    lines = [
        f"{describe(run.machine)}; times in ms:",
        "",
        f"| {' | '.join(headings)} |",
        f"|{'|'.join(['---', '---', *('--:' for _ in headings[2:])])}|",
    ]
    for case in run.cases:
        ours = case.row("ours")
        cells = [
            _case_name(case),
            _shape(case),
            *(_cell(case, peers) for _, peers in _COLUMNS),
            _limit_cell(case.limit),
            _ratio(case.limit_ratio()),
            _error(ours.error if ours else None),
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines + _host_lines(run.host)


def _host_lines(rows: Sequence[HostRow]) -> list[str]:
    """An op a row, a way of calling it a column."""
    timed = {(row.label, row.way): f"{row.microseconds:.1f}" for row in rows if row.microseconds is not None}
    if not timed:
        return []
    ways = list(dict.fromkeys(way for _, way in timed))
    lines = ["", f"| host time of one small call, µs | {' | '.join(ways)} |", f"|---{'|--:' * len(ways)}|"]
    for label in dict.fromkeys(label for label, _ in timed):
        lines.append(f"| {label} | {' | '.join(timed.get((label, way), '–') for way in ways)} |")
    return lines


def _limit_cell(limit: LimitResult | None) -> str:
    if limit is None:
        return milliseconds(None)
    return milliseconds(limit.ms) + (" ops" if limit.by_operations else "")


def _cell(case: CaseResult, peers: tuple[str, ...]) -> str:
    rows = [row for row in (case.row(peer) for peer in peers) if row is not None]
    median = case.median(*peers)
    if median is not None or not rows:
        return milliseconds(median)
    return _STATUS_TEXT[rows[0].status]


def update_readme(text: str, runs: Iterable[Run], more: Iterable[str] = ()) -> str:
    """The text with the tables between the two markers generated anew."""
    before, begin, rest = text.partition(README_BEGIN)
    _, end, after = rest.partition(README_END)
    if not begin or not end:
        raise ValueError(f"no region between {README_BEGIN} and {README_END}")
    return f"{before}{begin}\n{markdown(runs, more)}\n{end}{after}"
