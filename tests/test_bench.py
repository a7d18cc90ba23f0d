"""The benchmark's own correctness: what it declares, what its verifier catches, what it writes; no time is asserted."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import operator
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import fused_kernels
from fused_kernels import reference
from fused_kernels.bench import report, sweep, timing
from fused_kernels.bench.__main__ import dtypes_of, main
from fused_kernels.bench.cases import (
    CASES,
    PEER_TOLERANCE,
    PEERS,
    Args,
    Case,
    ConvAvgPool,
    Size,
    allowed_error,
    check_exact,
    complaint,
    host_calls,
    relative_error,
)

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
MEDIUM = {"A": Size((4, 8, 40, 56), 16), "A0": Size((4, 8, 40, 56), 16), "B": Size((4, 3, 8, 10, 12), 16)}
MEDIUM["G-56"] = Size((4, 8, 40, 56))
medium_case = pytest.mark.parametrize("name", MEDIUM)


def make_inputs(case: Case, size: Size, dtype: torch.dtype = torch.float32, seed: int = 1) -> Args:
    return case.inputs(size, dtype, torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny calls do not need more, and on a busy machine threads that wait for each other take long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --- What a case declares ---


@every_case
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_declared_bytes_are_the_tensors_bytes(case: Case, dtype: torch.dtype) -> None:
    for size in (case.tiny, case.tiny.with_batch(6)):
        args = make_inputs(case, size, dtype)
        output = case.composition(args).to(dtype)
        read = sum(value.nbytes for value in args.values() if isinstance(value, torch.Tensor))
        assert case.bytes_moved(size, dtype) == (read, output.nbytes)
        assert case.output_shape(size) == output.shape
        assert case.operations(size) >= args["input"].numel()


@every_case
def test_sizes_differ_in_scale_only(case: Case) -> None:
    assert case.size("reduced", batch=2).input == (2, *case.full.input[1:])
    assert case.reduced.out_channels == case.full.out_channels


@every_case
def test_no_input_is_zero_and_no_two_planes_are_alike(case: Case) -> None:
    args = make_inputs(case, case.tiny)
    for value in args.values():
        if isinstance(value, torch.Tensor):
            assert value.count_nonzero() == value.numel()
    planes = args["input"].flatten(2).mean(2).flatten()
    assert planes.unique().numel() == planes.numel()
    assert not torch.equal(args["input"], make_inputs(case, case.tiny, seed=2)["input"])


def test_peers_that_mean_nothing_are_left_out() -> None:
    def keys(name: str, device: str, dtype: torch.dtype) -> list[str]:
        return [peer.key for peer in CASES[name].available_peers(torch.device(device), dtype)]

    assert keys("A", "cuda", torch.float32) == list(PEERS)
    assert keys("A", "cuda", torch.bfloat16) == [key for key in PEERS if key != "eager_tf32"]
    assert keys("A", "cpu", torch.float32) == ["ours", "eager", "compile", "hand", "hand_compile"]
    assert keys("G-7", "cuda", torch.float32) == ["ours", "ours_graph", "eager", "compile"]


def test_every_dtype_of_a_case_can_be_asked_for() -> None:
    assert dtypes_of(CASES["B"], []) == [torch.float32]
    assert dtypes_of(CASES["B-1d"], []) == [torch.float16]
    assert dtypes_of(CASES["B"], ["all"]) == [torch.float32, torch.float16, torch.bfloat16]
    assert dtypes_of(CASES["B"], ["float64", "float16"]) == [torch.float64, torch.float16]


@pytest.mark.parametrize("name", ["B", "B-2d", "B-1d", "B-pool4", "B-dw"])
def test_operations_are_those_of_the_collapsed_convolution(name: str) -> None:
    """Counted by a convolution of ones: padding is not multiplied."""
    case = CASES[name]
    assert isinstance(case, ConvAvgPool)
    size, taps = case.tiny, case.taps()
    dims = len(size.input) - 2
    first, behind = min(taps), max(taps)
    ones = torch.nn.functional.pad(torch.ones(1, 1, *size.input[2:]), [-first, behind] * dims)
    conv = {1: torch.conv1d, 2: torch.conv2d, 3: torch.conv3d}[dims]
    pairs = conv(ones, torch.ones(1, 1, *[behind - first + 1] * dims), stride=case.step)
    outputs = case.output_shape(size)
    pairs = pairs[(..., *(slice(extent) for extent in outputs[2:]))]
    weights = make_inputs(case, size)["weight"].numel()
    products = outputs[0] * outputs[1] * size.input[1] // case.conv.groups * int(pairs.sum())
    assert case.operations(size) == 2 * products + weights


# --- The expected values ---


@every_case
def test_expected_values_are_the_composition_in_float64(case: Case) -> None:
    for size in (case.tiny, case.tiny.with_batch(5)):
        args = make_inputs(case, size, torch.float64)
        check_exact(case, args)
        composition = case.composition(args)
        assert composition.dtype == torch.float64
        assert relative_error(case.exact(args), composition) < 1e-13
        assert relative_error(case.function("eager")(**args), composition) < 1e-13


@every_case
def test_form_collapsed_by_hand_is_right(case: Case) -> None:
    if "hand" not in case.peers:
        with pytest.raises(NotImplementedError, match=case.name):
            case.hand()
        return
    args = make_inputs(case, case.tiny, torch.float64)
    assert relative_error(case.hand()(**args), case.composition(args)) < 1e-13


def test_a_wrong_formula_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES["A"]
    monkeypatch.setattr(type(case), "exact", lambda self, args: self.composition(args) * (1 + 1e-9))
    with pytest.raises(AssertionError, match="A: the collapsed formula differs"):
        check_exact(case, make_inputs(case, case.tiny))


# --- The verifier ---


def verdict(case: Case, args: Args, output: torch.Tensor) -> str:
    exact = case.exact(args)
    allowed = allowed_error(exact, torch.float32, relative_error(case.function("eager")(**args), exact))
    return complaint(case, output, exact, torch.float32, allowed, ours=True)


@medium_case
def test_right_output_passes(name: str) -> None:
    case, args = CASES[name], make_inputs(CASES[name], MEDIUM[name])
    assert verdict(case, args, case.function("eager")(**args)) == ""
    assert verdict(case, args, case.exact(args).float()) == ""


@medium_case
def test_constant_input_is_caught(name: str) -> None:
    case, args = CASES[name], make_inputs(CASES[name], MEDIUM[name])
    constant = {**args, "input": torch.full_like(args["input"], 0.5)}
    assert "error" in verdict(case, args, case.function("eager")(**constant))


@pytest.mark.parametrize("name", ["A", "A0"])
@pytest.mark.parametrize("extent", [(40, 56), (512, 512)])
def test_wrong_divisor_is_caught(name: str, extent: tuple[int, int]) -> None:
    case = CASES[name]
    height, width = extent
    args = make_inputs(case, Size((2, 4, height, width), 8))
    bias = args["bias"]
    scaled = {**args, "weight": args["weight"] * ((height + 2) * (width + 2) / (height * width))}
    assert "error" in verdict(case, args, case.exact({**scaled, "bias": bias}).float())


@medium_case
def test_one_wrong_channel_or_sample_is_caught(name: str) -> None:
    case, args = CASES[name], make_inputs(CASES[name], MEDIUM[name])
    changed = args["input"].clone()
    changed[-1, 3 % changed.shape[1]] *= 1.001
    assert verdict(case, args, case.exact({**args, "input": changed}).float())
    assert verdict(case, args, case.exact(args).float().roll(1, 0))


@medium_case
def test_wrong_kind_of_output_is_caught(name: str) -> None:
    case, args = CASES[name], make_inputs(CASES[name], MEDIUM[name])
    right = case.exact(args).float()
    unwritten = right.clone()
    unwritten.view(-1)[-1] = math.nan
    assert "1 of" in verdict(case, args, unwritten)
    assert "dtype" in verdict(case, args, right.double())
    assert "shape" in verdict(case, args, right.flatten())


def test_logsumexp_is_held_to_rtol_1e6() -> None:
    case, args = CASES["A"], make_inputs(CASES["A"], MEDIUM["A"])
    exact = case.exact(args)
    output = exact.float() * (1 + 2e-6)
    assert "of itself" in complaint(case, output, exact, torch.float32, allowed=1e-3, ours=True)
    assert complaint(case, output, exact, torch.float32, allowed=1e-3, ours=False) == ""


def test_allowed_error_is_eagers_or_one_ulp() -> None:
    exact = torch.tensor([0.5, -6.0], dtype=torch.float64)
    assert allowed_error(exact, torch.float32, 1e-3) == 1e-3
    assert allowed_error(exact, torch.float32, 0.0) == 2.0**-23 * 4 / 6
    assert allowed_error(exact, torch.float16, None) == PEER_TOLERANCE[torch.float16]
    assert allowed_error(exact, torch.float64, 0.0) == PEER_TOLERANCE[torch.float64]


def test_host_calls_are_verified_against_right_values() -> None:
    for probe in host_calls(torch.float32, torch.Generator().manual_seed(3)):
        assert probe.exact.dtype == torch.float64
        if probe.way in ("eager", "wrapper", "module"):
            with torch.no_grad():
                assert relative_error(probe.function(**probe.args), probe.exact) < PEER_TOLERANCE[torch.float32]


def test_host_calls_cover_every_op() -> None:
    found = {(probe.label, probe.way) for probe in host_calls(torch.float32, torch.Generator())}
    ops = {case.op for case in CASES.values()}
    assert len(ops) == 4
    for label in (*ops, "torch.mean", "conv_transpose2d", "conv_transpose3d"):
        assert {(label, way) for way in ("eager", "compiled")} <= found
    assert {op for op, way in found if way == "wrapper"} == ops
    assert len({op for op, way in found if way == "module"}) == 2


def test_host_calls_take_turns() -> None:
    order: list[str] = []
    calls = [lambda: order.append("a"), lambda: order.append("b")]
    assert len(timing.host_times(calls, torch.device("cpu"), 1.0, batches=3)) == 2
    turns = [(name, len(list(run))) for name, run in itertools.groupby(order)]
    assert turns == [("a", 13), ("b", 13), *[("a", 150), ("b", 150)] * 3]  # 13: to warm up, and to learn how many


def test_host_times_in_the_readme() -> None:
    rows = [
        report.HostRow("pool", "eager", "float32", "ok", microseconds=10.0),
        report.HostRow("pool", "wrapper", "float32", "ok", microseconds=11.96),
        report.HostRow("chain", "eager", "float32", "ok", microseconds=12.0),
        report.HostRow("chain", "wrapper", "float32", "FAILED", "wrong"),
    ]
    assert report._host_lines(rows)[1:] == [
        "| host time of one small call, µs | eager | wrapper |",
        "|---|--:|--:|",
        "| pool | 10.0 | 12.0 |",
        "| chain | 12.0 | – |",
    ]
    assert report._host_lines([]) == []


# --- Timer and limit ---


def test_statistics_of_samples() -> None:
    assert timing.Timing.of([4.0, 1.0, 2.0, 3.0, 5.0]) == timing.Timing(3.0, 2.0, 4.0, 1.0, 5)
    assert timing.Timing.of([7.0]) == timing.Timing(7.0, 7.0, 7.0, 7.0, 1)


def test_cpu_timer_calls_what_it_times() -> None:
    calls: list[int] = []
    samples = timing.CpuTimer(flush_bytes=1024).sample(lambda: calls.append(1), budget_s=0.01)
    assert 3 <= len(samples) <= len(calls) == len(samples) + 1  # the warm-up


def test_cpu_timer_takes_no_fewer_than_three_samples() -> None:
    """Of calls beyond the budget, too; the first of them is no warm-up."""
    calls: list[int] = []

    def call() -> None:
        calls.append(1)
        time.sleep(0.01)

    samples = timing.CpuTimer(flush_bytes=1024).sample(call, budget_s=0.001)
    assert len(samples) == len(calls) == 3 and min(samples) >= 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_limit_covers_the_input_in_any_layout(dtype: torch.dtype) -> None:
    x = torch.randn(2, 3, 4, 6).to(dtype).contiguous(memory_format=torch.channels_last)
    words = timing._flat_words(x)
    assert words.nbytes == x.nbytes and words.data_ptr() == x.data_ptr()
    assert timing._checksum(words) == functools.reduce(operator.xor, words.view(torch.int32).tolist()) & 0xFFFFFFFF
    timer = timing.CpuTimer(flush_bytes=1024)
    read = timing.Limit("read", x, 0)
    assert read.bytes_moved == x.nbytes and read.measure(timer, 0.01)[0] == "torch.sum"
    copy = timing.Limit("copy", x, 1 << 16)
    assert copy.bytes_moved == 1 << 16 and copy.measure(timer, 0.01)[0] == "copy_"


def test_rate_of_operations() -> None:
    before = torch.get_float32_matmul_precision()
    timer = timing.CpuTimer(flush_bytes=1024)
    for dtype, product in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        measured, rate = timing.operation_rate(dtype, torch.device("cpu"), timer, 0.01)
        assert measured == product and rate > 1e6
    assert torch.get_float32_matmul_precision() == before


def test_limit_is_the_larger_floor() -> None:
    moved = timing.Timing(2.0, 2.0, 2.0, 2.0, 9)
    limit = report.LimitResult("copy", 100, "copy_", 2.0, 2.0, moved)
    assert (limit.ms, limit.by_operations) == (2.0, False)
    limit = dataclasses.replace(limit, operations_ms=0.5, operations_per_s=1e12)
    assert (limit.ms, limit.by_operations) == (2.0, False) and "ops" not in report._limit_cell(limit)
    limit = dataclasses.replace(limit, operations_ms=3.0)
    assert (limit.ms, limit.by_operations) == (3.0, True) and report._limit_cell(limit) == "3.00 ops"


def test_tf32_setting_is_restored() -> None:
    before = torch.backends.cudnn.allow_tf32
    with timing.tf32_convolutions(not before):
        assert torch.backends.cudnn.allow_tf32 is not before
    assert torch.backends.cudnn.allow_tf32 is before


# --- The command ---


def bench(tmp_path: Path, *arguments: str) -> tuple[int, report.Run]:
    """Run the command on tiny inputs on the CPU and read what it wrote."""
    path = tmp_path / "results" / "run.json"
    common = ("--device", "cpu", "--size", "tiny", "--quick", "--seed", "7", "--json", str(path))
    return main([*common, *arguments]), report.read_json(path)


@pytest.fixture
def ours_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the reference in the place of ours: what is tested here is the benchmark."""
    for name in {case.op for case in CASES.values()}:
        monkeypatch.setattr(fused_kernels, name, getattr(reference, name))


@pytest.mark.usefixtures("ours_is_eager")
def test_results_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, run = bench(tmp_path, "--case", "a", "B", "--dtype", "float32")
    assert status == 0 and not run.failures
    assert [(case.case, case.dtype) for case in run.cases] == [("A", "float32"), ("B", "float32")]
    for result in run.cases:
        case, dtype = CASES[result.case], getattr(torch, result.dtype)
        assert [row.peer for row in result.rows] == ["ours", "eager", "hand"]
        assert (result.bytes_read, result.bytes_written) == case.bytes_moved(case.tiny, dtype)
        assert result.limit is not None and result.limit.timing.median_ms > 0
        for row in result.rows:
            assert row.status == "ok" and row.timing is not None and row.timing.reps >= 1
            assert row.error is not None and row.allowed is not None and row.error <= row.allowed
    assert run.settings["seed"] == 7
    assert run.machine["torch"] == torch.__version__ and run.machine["build"]
    printed = capsys.readouterr().out
    assert "by hand" in printed and "limit (read)" in printed and "limit (copy)" in printed


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, run = bench(tmp_path, "--demo")
    assert status == 0 and [case.case for case in run.cases] == ["A", "B"]
    assert all([row.peer for row in case.rows] == ["ours", "eager", "hand"] for case in run.cases)
    printed = capsys.readouterr().out
    for case in run.cases:
        ratios = [case.median(peer) / case.median("ours") for peer in ("eager", "hand")]
        assert all(f"{ratio:#.3g}" in printed for ratio in ratios), (ratios, printed)


def test_other_points_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ours itself, each case in its own first dtype."""
    names = [case.name for case in CASES.values() if not case.main]
    status, run = bench(tmp_path, "--case", *names, "--peers", "ours", "hand")
    assert status == 0 and [case.case for case in run.cases] == names
    for result in run.cases:
        assert result.dtype == CASES[result.case].dtypes[0]
        assert all(row.status == "ok" for row in result.rows), result
        assert result.limit is not None
        assert (result.limit.operations_ms is not None) == CASES[result.case].compute_bound
    assert "limit (operations)" in capsys.readouterr().out


@pytest.mark.usefixtures("ours_is_eager")
def test_wrong_results_fail_and_are_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fused_kernels, "global_avg_pool", lambda input: reference.global_avg_pool(input) * 1.0001)
    status, run = bench(tmp_path, "--case", "G-7", "--peers", "ours")
    (row,) = run.cases[0].rows
    assert status == 1 and row.status == "FAILED" and row.timing is None and "is above" in row.note
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.usefixtures("ours_is_eager")
def test_a_result_that_goes_wrong_later_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def wrong_after_the_first(input: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return reference.global_avg_pool(input) * (1.0 if calls == 1 else math.nan)

    monkeypatch.setattr(fused_kernels, "global_avg_pool", wrong_after_the_first)
    status, run = bench(tmp_path, "--case", "G-7")
    row = run.cases[0].row("ours")
    assert status == 1 and row is not None and row.status == "FAILED" and row.timing is None and calls > 1


@pytest.mark.parametrize(
    ("message", "status", "code"),
    [("input: channels_last is not supported yet", "not supported yet", 0), ("illegal access", "FAILED", 1)],
)
def test_exceptions_become_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str, status: str, code: int
) -> None:
    def refuse(input: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(message)

    monkeypatch.setattr(fused_kernels, "global_avg_pool", refuse)
    exit_status, run = bench(tmp_path, "--case", "G-7-cl")
    ours, eager = run.cases[0].rows
    assert exit_status == code and ours.status == status and ours.note == message and ours.timing is None
    assert eager.status == "ok" and eager.timing is not None


def test_installed_command(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    command = [sys.executable, "-m", "fused_kernels.bench", "--device", "cpu", "--size", "tiny", "--quick"]
    command += ["--case", "G-7", "host", "--json", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads(path.read_text())["schema"] == report.SCHEMA
    run = report.read_json(path)
    assert run.cases[0].median("ours") is not None
    assert {(row.label, row.way) for row in run.host} >= {("torch.mean", "eager"), ("global_avg_pool", "wrapper")}
    assert all(row.status == "ok" and row.way != "compiled" for row in run.host)


def test_list_and_unknown_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in CASES)
    with pytest.raises(SystemExit):
        main(["--case", "Z"])
    assert "no case named Z" in capsys.readouterr().err


# --- The README's table ---


def test_readme_holds_the_committed_results() -> None:
    root = Path(__file__).parent.parent
    results = [root / "benchmarks" / "results" / name for name in ("h200.json", "cpu.json")]
    text = (root / "README.md").read_text()
    drawn = sweep.markdown(root / "benchmarks" / "results" / "h200-sweep.json", root)
    assert report.update_readme(text, map(report.read_json, results), [drawn]) == text


@pytest.mark.usefixtures("ours_is_eager")
def test_readme_table_comes_from_json(tmp_path: Path) -> None:
    _, run = bench(tmp_path, "--case", "A-small", "G-7", "--peers", "ours", "eager")
    copy = tmp_path / "copy.json"
    report.write_json(run, copy)
    assert report.read_json(copy) == run

    readme = tmp_path / "README.md"
    readme.write_text(f"# Title\n\n{report.README_BEGIN}\nstale\n{report.README_END}\nrest\n")
    assert main(["--readme", str(readme), str(copy)]) == 0
    text = readme.read_text()
    assert text.startswith("# Title\n\n") and text.endswith(f"{report.README_END}\nrest\n") and "stale" not in text
    assert report.update_readme(text, [run]) == text
    assert run.machine["device"] in text and "| A-small float32 |" in text

    table = [line for line in text.splitlines() if line.startswith("|")]
    assert len(table) == 2 + len(run.cases) and len({line.count("|") for line in table}) == 1
    ours = run.cases[0].median("ours")
    assert report.milliseconds(ours) in table[2]

    with pytest.raises(ValueError, match="no region"):
        report.update_readme("no markers", [run])


# --- The sweep ---


@pytest.mark.parametrize("mib", [1, 2, 1024, 16384])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_sweep_input_has_the_size_asked_for(mib: int, itemsize: int) -> None:
    shape = sweep.input_shape(mib, itemsize)
    assert math.prod(shape) * itemsize == mib << 20
    assert shape[3] in (shape[2], 2 * shape[2])
    with pytest.raises(ValueError, match="3 MiB: expected a power of two"):
        sweep.input_shape(3, itemsize)
    with pytest.raises(SystemExit):
        main(["--sweep", "3"])


def swept(tmp_path: Path, *arguments: str) -> tuple[int, sweep.Sweep]:
    path = tmp_path / "sweep.json"
    common = ("--device", "cpu", "--quick", "--seed", "7", "--json", str(path))
    return main([*common, "--sweep", *arguments]), sweep.read_json(path)


def test_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What does not fit is skipped, and said; JSON holds all of the rest."""
    status, result = swept(tmp_path, "1", str(1 << 30), "--dtype", "float32")
    assert status == 0 and not result.failures
    assert [(point.mib, point.channels_last) for point in result.points] == [(1, False), (1, True)]
    for point in result.points:
        assert list(point.rows) == ["G", "mean", "A", "hand"] and point.limit.bytes_moved == 1 << 20
        for key, row in point.rows.items():
            fraction = point.fraction(key)
            assert row.status == "ok" and row.error is not None and fraction is not None and fraction > 0
    assert len(result.skipped) == 2 and result.skipped[0].startswith(f"{1 << 30} MiB float32: needs about")
    printed = capsys.readouterr().out
    assert "skipped" in printed and "float32 channels_last" in printed
    copy = tmp_path / "copy.json"
    report.write_json(result, copy)
    assert sweep.read_json(copy) == result and sweep.is_sweep(copy)


def test_a_wrong_point_of_the_sweep_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fused_kernels, "global_avg_pool", lambda input: reference.global_avg_pool(input) * 1.0001)
    status, result = swept(tmp_path, "1", "--dtype", "bfloat16", "float32")
    row = result.points[-1].rows["G"]
    assert status == 1 and row.status == "FAILED" and row.timing is None and result.points[-1].fraction("G") is None
    assert any("float32 channels_last, ours: error" in line for line in result.failures)
    assert "FAILED" in capsys.readouterr().out


def test_sweep_in_the_readme(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    _, result = swept(tmp_path, "1", "--dtype", "float32")
    large = [dataclasses.replace(point, mib=256) for point in result.points]
    path, readme = tmp_path / "results" / "sweep.json", tmp_path / "README.md"
    report.write_json(dataclasses.replace(result, points=(*result.points, *large)), path)
    readme.write_text(f"{report.README_BEGIN}\n{report.README_END}\n")
    with pytest.raises(ValueError, match="draw it first, with --plot"):
        main(["--readme", str(readme), str(path)])
    assert main(["--plot", str(path)]) == 0
    drawing = path.with_suffix(".svg").read_text()
    assert "float32" in drawing and "torch.mean" in drawing
    assert main(["--plot", str(path)]) == 0 and path.with_suffix(".svg").read_text() == drawing
    assert main(["--readme", str(readme), str(path)]) == 0
    text = readme.read_text()
    assert "(results/sweep.svg)" in text and "from 256 MiB on at least" in text


def test_numbers_as_text() -> None:
    shown = [report.milliseconds(value) for value in (None, 0.00512, 0.2441, 3.194, 15.67, 99.97, 1404.2)]
    assert shown == ["–", "0.0051", "0.2441", "3.19", "15.7", "100", "1404"]
