"""One way of computing a case, from its first call to its time; nothing is timed unverified."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from . import report
from .cases import Args, Case, Peer, Size, complaint, relative_error
from .timing import Limit, Prepared, Timer, Timing, prepare, prepare_graph, tf32_convolutions


class Contender:
    """A peer on its way through one case: prepared, verified, timed, verified again."""

    def __init__(self, case: Case, peer: Peer, size: Size, dtype: torch.dtype, args: Args) -> None:
        self.case, self.peer, self.dtype = case, peer, dtype
        self.status: report.Status = "ok"
        self.note = ""
        self.error: float | None = None
        self.allowed: float | None = None
        self.samples: list[float] = []
        self.prepared: Prepared | None = None
        self.output: Tensor | None = None  # of the first call, then of the last timed one
        self.exact: Tensor | None = None
        self._run(lambda: self._prepare(size, args))

    def _prepare(self, size: Size, args: Args) -> None:
        function = self.case.function(self.peer.source)
        if self.peer.compiled:
            function = torch.compile(function, dynamic=False)

        def call() -> Tensor:
            return function(**args)

        device = args["input"].device
        if self.peer.graph:
            self.prepared = prepare_graph(call)
        else:
            self.prepared = prepare(call, self.case.output_shape(size), self.dtype, device)
        self.output = self.prepared.output().clone()

    def verify(self, exact: Tensor, allowed: float) -> None:
        """Compare the first output; a wrong one takes the peer out of the race."""
        if self.output is not None:
            self.exact, self.allowed = exact, allowed
            self.error = relative_error(self.output, exact)
            self._judge()

    def time(self, timer: Timer, budget_s: float, rounds: int) -> None:
        """One of the rounds, unless the row has already had far more than its time."""
        if self.status == "ok" and sum(self.samples) < 4e3 * budget_s:
            self._run(lambda: self.samples.extend(timer.sample(self._call, budget_s / rounds)))

    def verify_again(self) -> None:
        """Compare the last timed output; a graph's, which has stood in one place all along, is first made anew."""
        if self.status == "ok" and self.prepared is not None:
            if self.peer.graph:
                self.output = self.prepared.output()
            self._judge()

    def row(self) -> report.Row:
        timing = Timing.of(self.samples) if self.status == "ok" and self.samples else None
        label = "torch.mean" if self.case.op == "global_avg_pool" and self.peer.key == "eager" else self.peer.label
        return report.Row(self.peer.key, label, self.status, self.note, self.error, self.allowed, timing)

    def _call(self) -> None:
        assert self.prepared is not None
        self.output = self.prepared.call()

    def _judge(self) -> None:
        assert self.exact is not None and self.allowed is not None and self.output is not None
        ours = self.peer.source == "ours"
        why = complaint(self.case, self.output, self.exact, self.dtype, self.allowed, ours)
        if why:
            self.status, self.note = "FAILED", why

    def _run(self, action: Callable[[], None]) -> None:
        """Do it with the peer's TF32 setting; what it raises becomes the row's text."""
        try:
            with tf32_convolutions(self.peer.tf32):
                action()
        except Exception as error:  # whatever a peer raises is its result, and must not end the others' run
            self.status, self.note = failure(error, ours=self.peer.source == "ours")


def race(
    contenders: Sequence[Contender],
    limit: Limit,
    timer: Timer,
    budget_s: float,
    limit_budget_s: float,
    rounds: int,
    step: Callable[[str], None] = lambda text: None,
) -> report.LimitResult:
    """Time the verified contenders in rounds, one after the other, so that drift meets all of them alike; the limit
    before and after, by the method that was the fastest; then verify the last timed outputs. A budget is a row's."""
    step("limit")
    before = limit.measure(timer, limit_budget_s)
    for _ in range(rounds):
        for contender in contenders:
            step(contender.peer.label)
            contender.time(timer, budget_s, rounds)
    step("limit")
    after = limit.measure(timer, limit_budget_s, only=before[0])
    for contender in contenders:
        contender.verify_again()
    method, timing = min(before, after, key=lambda entry: entry[1].median_ms)
    return report.LimitResult(
        limit.kind, limit.bytes_moved, method, before[1].median_ms, after[1].median_ms, timing, limit.note
    )


def failure(error: Exception, ours: bool) -> tuple[report.Status, str]:
    """What an exception says about a row: ours may be unfinished, but must not break; a peer may be unavailable."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    if ours:
        return ("not supported yet" if "not supported yet" in str(error) else "FAILED"), text
    return "unavailable", f"{type(error).__name__}: {text}"
