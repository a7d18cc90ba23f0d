"""``python -m fused_kernels.bench``: verify, time and report.

For each case and dtype ours runs first, on inputs fresh from the generator and into memory full of NaN. Then the
float64 values are computed, every peer is compared with them on the same inputs, and only then is it timed. The rows
are timed in rounds, one after the other, so that drift meets all of them alike; the limit is timed before and after;
and the last timed output of every row is compared with float64 once more.

The exit status is 1 if anything that was compared is wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import fused_kernels

from . import report
from . import sweep as sweeps
from .cases import (
    CASES,
    DTYPES,
    PEER_TOLERANCE,
    PEERS,
    Case,
    HostCall,
    SizeName,
    allowed_error,
    check_exact,
    host_calls,
    relative_error,
)
from .contender import Contender, failure, race
from .timing import Limit, Timer, host_times, make_timer, operation_rate, prepare_graph, tf32_convolutions

ALL = "all"  # with --case and --dtype
HOST = "host"  # the name under which --case selects the host times
DEMO_CASES = ("A", "B")
DEMO_PEERS = ("ours", "eager", "eager_tf32", "hand")


@dataclass(frozen=True)
class Settings:
    """How long to measure and what."""

    budget_s: float  # for a row, spread over the rounds
    rounds: int = 3
    peers: tuple[str, ...] = tuple(PEERS)


def run_case(
    case: Case,
    size_name: SizeName,
    batch: int | None,
    dtype: torch.dtype,
    generator: torch.Generator,
    timer: Timer,
    settings: Settings,
    step: Callable[[str], None],
) -> report.CaseResult:
    """Verify and time one case; ``step`` hears what is being done."""
    size, device = case.size(size_name, batch), generator.device
    step("inputs")
    args = case.inputs(size, dtype, generator)

    # Eager always runs: its error is what ours may have.
    peers = [peer for peer in case.available_peers(device, dtype) if peer.key in (*settings.peers, "eager")]
    if any(peer.compiled for peer in peers):
        torch.compiler.reset()  # code of earlier cases
    contenders = []
    for peer in peers:
        step(f"{peer.label}: first call")
        contenders.append(Contender(case, peer, size, dtype, args))

    step("expected values in float64")
    with tf32_convolutions(False):
        check_exact(case, args)
        exact = case.exact(args)
    by_key = {contender.peer.key: contender for contender in contenders}
    eager = by_key["eager"]
    eager.verify(exact, case.tolerance(eager.peer, device, dtype))
    for contender in contenders:
        if contender.peer.source == "ours":
            contender.verify(exact, allowed_error(exact, dtype, eager.error if eager.status == "ok" else None))
        else:
            contender.verify(exact, case.tolerance(contender.peer, device, dtype))

    contenders = [contender for contender in contenders if contender.peer.key in settings.peers]
    read, written = case.bytes_moved(size, dtype)
    step("limit")
    limit = Limit(case.limit, args["input"], read + written)
    limit_budget_s = settings.budget_s / 4
    floor = race(contenders, limit, timer, settings.budget_s, limit_budget_s, settings.rounds, step)

    operations = case.operations(size)
    if case.compute_bound:
        step("rate of operations")
        rate_dtype, rate = operation_rate(dtype, device, timer, limit_budget_s)
        floor = dataclasses.replace(
            floor,
            operations_ms=1e3 * operations / rate,
            operations_per_s=rate,
            operations_dtype=str(rate_dtype).removeprefix("torch."),
        )
    return report.CaseResult(
        case=case.name,
        about=case.about,
        op=case.op,
        dtype=str(dtype).removeprefix("torch."),
        size=size_name,
        input=size.input,
        channels_last=case.channels_last,
        output=case.output_shape(size),
        bytes_read=read,
        bytes_written=written,
        operations=operations,
        rows=tuple(contender.row() for contender in contenders),
        limit=floor,
    )


def run_host(
    dtype: torch.dtype, generator: torch.Generator, budget_s: float, compiled: bool = True
) -> list[report.HostRow]:
    """Host times of small calls, each verified first."""
    name = str(dtype).removeprefix("torch.")
    rows: list[report.HostRow] = []
    calls: dict[int, Callable[[], Tensor]] = {}  # by row
    with tf32_convolutions(False):
        for probe in host_calls(dtype, generator):
            if probe.way == "compiled" and not compiled:
                continue
            status: report.Status = "ok"
            note = ""
            try:
                call = _host_way(probe)
                error = relative_error(call(), probe.exact)
                if error > PEER_TOLERANCE[dtype]:
                    status, note = "FAILED", f"error {error:.2e} is above {PEER_TOLERANCE[dtype]:.2e}"
                else:
                    calls[len(rows)] = call
            except Exception as raised:  # as for a contender; no compiler is no fault of ours
                status, note = failure(raised, probe.ours and probe.way != "compiled")
            rows.append(report.HostRow(probe.label, probe.way, name, status, note))
        spent = host_times(list(calls.values()), generator.device, budget_s)
    for row, microseconds in zip(calls, spent, strict=True):
        rows[row] = dataclasses.replace(rows[row], microseconds=microseconds)
    return rows


def _host_way(probe: HostCall) -> Callable[[], Tensor]:
    function, args = probe.function, probe.args
    if probe.way == "compiled":
        function = torch.compile(function, dynamic=False, fullgraph=True)

    def call() -> Tensor:
        return function(**args)

    return prepare_graph(call).call if probe.way == "graph" else call


def machine_facts(device: torch.device) -> dict[str, Any]:
    """Where this ran and with what."""
    facts = {
        "device_type": device.type,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu_name(),
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "-i", "0")
        if device.type == "cuda"
        else None,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "system": platform.platform(),
        "commit": os.environ.get("GIT_COMMIT") or _commit(),
        "build": dict(fused_kernels.build_info()),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts["multiprocessors"] = properties.multi_processor_count
        facts["l2_bytes"] = properties.L2_cache_size
        facts["memory_bytes"] = properties.total_memory
    return facts


def _output_of(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


def _commit() -> str | None:
    """The commit of the source tree in which the package, or the environment that it is installed in, lies."""
    here = str(Path(__file__).parent)
    top = _output_of("git", "-C", here, "rev-parse", "--show-toplevel")
    if top is None or not Path(top, "csrc", "bindings.cpp").exists():
        return None  # some other project's repository
    return _output_of("git", "-C", here, "describe", "--always", "--dirty")


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def list_table() -> Table:
    """The cases, for --list."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("name", "what", "input on a GPU", "input on a CPU", "dtypes", "limit"):
        table.add_column(heading)
    for case in CASES.values():
        sizes = ("×".join(map(str, size.input)) for size in (case.full, case.reduced))
        limit = "copy or operations" if case.compute_bound else case.limit
        table.add_row(case.name + ("" if case.main else " *"), case.about, *sizes, ", ".join(case.dtypes), limit)
    table.add_row(HOST, "host time of one small call", "", "", "float32", "")
    table.caption = "*: not run by default"
    table.caption_justify = "left"
    return table


def parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fused_kernels.bench",
        description="Time the fused ops against PyTorch and against the memory limit; nothing is timed unverified.",
        epilog="eager is PyTorch's composition with TF32 off; eager_tf32, and all other peers, leave convolutions at "
        "PyTorch's default. hand is the same collapse written in PyTorch, hand_graph that compiled and under a CUDA "
        "graph. Peers that mean nothing for a case, device or dtype are left out.",
    )
    names = {name.lower(): name for name in (*CASES, HOST, ALL)}
    parser.add_argument(
        "--case",
        nargs="+",
        metavar="NAME",
        default=[*(case.name for case in CASES.values() if case.main), HOST],
        type=lambda name: names.get(name.lower(), name),
        help="names from --list, or all; default: those not starred there",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda or cuda:N")
    parser.add_argument(
        "--dtype",
        nargs="+",
        choices=[*DTYPES, ALL],
        default=[],
        help="all: for each case those that --list names; default: the first of these",
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--size", choices=get_args(SizeName), help="default: full on a GPU, reduced on a CPU")
    parser.add_argument("--batch", type=int, help="another batch than the size's")
    parser.add_argument(
        "--sweep",
        nargs="*",
        type=int,
        metavar="MIB",
        help="G and A on inputs of these sizes instead of the cases, in float32 and bfloat16, contiguous and "
        f"channels_last; default: 1 to {sweeps.SIZES[-1]} (to {sweeps.ON_CPU} on a CPU). What does not fit is skipped",
    )
    parser.add_argument("--quick", action="store_true", help="shorter measurements, no torch.compile")
    parser.add_argument("--demo", action="store_true", help="cases A and B only, and a short table")
    parser.add_argument("--seed", type=int, help="of the inputs; default: a new one for each run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--list", action="store_true", help="name the cases and exit")
    parser.add_argument(
        "--readme",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="README.md RESULTS.json...: generate the README's tables from written results, and exit",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw a sweep's JSON as an SVG beside it, and exit")
    return parser


def settings_of(options: argparse.Namespace, device: torch.device) -> Settings:
    peers = tuple(options.peers)
    if options.demo:
        return Settings(budget_s=1.0, rounds=2, peers=tuple(key for key in peers if key in DEMO_PEERS))
    if options.quick:
        return Settings(budget_s=0.2, rounds=1, peers=tuple(key for key in peers if not PEERS[key].compiled))
    # A call on a GPU takes microseconds, on a CPU up to seconds.
    return Settings(budget_s=0.3 if device.type == "cuda" else 1.0, peers=peers)


def dtypes_of(case: Case, asked: Sequence[str]) -> list[torch.dtype]:
    """The dtypes in which the command line asks for a case."""
    named = case.dtypes if ALL in asked else asked or case.dtypes[:1]
    return [DTYPES[name] for name in named]


def device_of(options: argparse.Namespace) -> torch.device:
    """The device asked for, made the current one."""
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        torch.cuda.set_device(device)
    return device


def run(options: argparse.Namespace, progress: Progress) -> report.Run:
    """All that the command line asks for."""
    device = device_of(options)
    size: SizeName = options.size or ("full" if device.type == "cuda" else "reduced")
    settings = settings_of(options, device)
    seed = secrets.randbits(32) if options.seed is None else options.seed
    generator = torch.Generator(device).manual_seed(seed)
    names = DEMO_CASES if options.demo else [*CASES, HOST] if ALL in options.case else options.case
    dtypes = [DTYPES[name] for name in options.dtype if name != ALL] or [torch.float32]  # of the host times

    work = [(CASES[name], dtype) for name in names if name != HOST for dtype in dtypes_of(CASES[name], options.dtype)]
    task = progress.add_task("starting", total=len(work) + (HOST in names) * len(dtypes))
    cases, host = [], []
    with torch.no_grad():
        timer = make_timer(device)
        for case, dtype in work:
            title = f"{case.name} {str(dtype).removeprefix('torch.')}"

            def step(text: str, title: str = title) -> None:
                progress.update(task, description=f"{title}: {text}")

            cases.append(run_case(case, size, options.batch, dtype, generator, timer, settings, step))
            progress.advance(task)
            if device.type == "cuda":
                torch.cuda.empty_cache()
        for dtype in dtypes if HOST in names else ():
            progress.update(task, description="host time of one small call")
            compiled = any(PEERS[key].compiled for key in settings.peers)
            host += run_host(dtype, generator, settings.budget_s / 4, compiled)
            progress.advance(task)
    used = {"seed": seed, "size": size, "batch": options.batch, **dataclasses.asdict(settings)}
    return report.Run(machine_facts(device), used, tuple(cases), tuple(host))


def run_sweep(options: argparse.Namespace, progress: Progress) -> sweeps.Sweep:
    """The sweep that the command line asks for."""
    device = device_of(options)
    sizes = options.sweep or [mib for mib in sweeps.SIZES if device.type == "cuda" or mib <= sweeps.ON_CPU]
    asked = [name for name in options.dtype if name != ALL] or sweeps.SWEPT_DTYPES
    seed = secrets.randbits(32) if options.seed is None else options.seed
    generator = torch.Generator(device).manual_seed(seed)
    budget_s, rounds = (0.03, 1) if options.quick else (0.09, 3)
    work = list(sweeps.points(sizes, asked))
    task = progress.add_task("starting", total=len(work))
    points, skipped = [], []
    with torch.no_grad():
        timer = make_timer(device)
        for mib, name, channels_last in work:
            what = f"{mib} MiB {name}{' channels_last' if channels_last else ''}"
            progress.update(task, description=what)
            needed, available = sweeps.bytes_needed(mib, DTYPES[name]), sweeps.bytes_available(device)
            if needed > available:
                skipped.append(f"{what}: needs about {needed / 2**30:.1f} GiB, and {available / 2**30:.1f} are free")
            else:
                points.append(
                    sweeps.measure_point(mib, DTYPES[name], channels_last, generator, timer, budget_s, rounds)
                )
            progress.advance(task)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    used = {"seed": seed, "budget_s": budget_s, "rounds": rounds}
    return sweeps.Sweep(machine_facts(device), used, tuple(points), tuple(skipped))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit status."""
    command = parser()
    options = command.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else 100)
    if options.list:
        Console(width=None if sys.stdout.isatty() else 150).print(list_table())
        return 0
    if options.readme:
        readme, *results = options.readme
        if not results:
            command.error("--readme needs the README and at least one JSON file")
        runs = [report.read_json(path) for path in results if not sweeps.is_sweep(path)]
        drawn = [sweeps.markdown(path, readme.parent) for path in results if sweeps.is_sweep(path)]
        readme.write_text(report.update_readme(readme.read_text(), runs, drawn))
        return 0
    if options.plot:
        sweeps.plot(sweeps.read_json(options.plot), options.plot.with_suffix(".svg"))
        return 0
    unknown = [name for name in options.case if name not in (*CASES, HOST, ALL)]
    if any(mib < 1 or mib & (mib - 1) for mib in options.sweep or ()):
        command.error("--sweep takes powers of two, in MiB")
    if unknown:
        command.error(f"no case named {', '.join(unknown)}; --list names them")

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        swept = None if options.sweep is None else run_sweep(options, progress)
        result = run(options, progress) if swept is None else None
    if swept is not None:
        sweeps.print_sweep(swept, console)
        if options.json:
            report.write_json(swept, options.json)
        return 1 if swept.failures else 0
    assert result is not None
    report.print_run(result, console, demo=options.demo)
    if options.json:
        report.write_json(result, options.json)
    return 1 if result.failures else 0


if __name__ == "__main__":
    sys.exit(main())
