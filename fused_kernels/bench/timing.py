"""The one timer, and the memory limit that a time is compared with.

On a GPU a call is timed with events around it. Before each timed call the L2 is flushed by *reading* a big buffer,
never by writing one: written lines stay dirty in the L2, and the timed kernel would pay for writing them back. All
repeats are queued without a synchronisation between them, and a flush lasts 0.1 ms, so that the host runs ahead of the
device and launch latency is hidden from every row alike; what a call costs the host has its own measurement
(`host_times`).

On a CPU a call is timed with `time.perf_counter`, after reading a buffer larger than the caches.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol
from unittest import mock

import torch
from torch import Tensor

Call = Callable[[], object]
MIB = 1 << 20
_NO_RUNTIME_COMPILER = (RuntimeError, OSError, AttributeError, ImportError)


@dataclass(frozen=True)
class Timing:
    """Median and quartiles over the repeats of one row, in milliseconds."""

    median_ms: float
    q1_ms: float
    q3_ms: float
    min_ms: float
    reps: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Timing:
        if len(samples) == 1:
            return cls(samples[0], samples[0], samples[0], samples[0], 1)
        q1, median, q3 = statistics.quantiles(samples, n=4, method="inclusive")
        return cls(median, q1, q3, min(samples), len(samples))


class Timer(Protocol):
    """Owns warm-up, cold caches and the clock."""

    def sample(self, call: Call, budget_s: float) -> list[float]:
        """Milliseconds of each of as many calls as fit into the budget, but never fewer than a few."""


class CpuTimer:
    """Wall-clock times, each after reading a buffer larger than the last-level cache."""

    MIN_REPS, MAX_REPS = 3, 200

    def __init__(self, flush_bytes: int = 256 * MIB) -> None:
        self._buffer = torch.ones(flush_bytes // 4)

    def sample(self, call: Call, budget_s: float) -> list[float]:
        begin = time.perf_counter()
        samples = [self._once(call)]
        if samples[0] < budget_s * 1e3 / 4:  # a warm-up, unless calls are so long that it makes no difference
            samples.clear()
        while len(samples) < self.MIN_REPS or (len(samples) < self.MAX_REPS and time.perf_counter() - begin < budget_s):
            samples.append(self._once(call))
        return samples

    def _once(self, call: Call) -> float:
        self._buffer.sum()
        begin = time.perf_counter()
        call()
        return (time.perf_counter() - begin) * 1e3


class CudaTimer:
    """Event times on the current stream, each with a cold L2."""

    MIN_REPS, MAX_REPS = 10, 300
    WARM_UP_S = 0.05  # brings the clocks up again after the host was busy, with compiling for example

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._buffer = torch.rand(max(512 * MIB, 4 * l2_bytes) // 4, device=device)
        self._flush: Call = self._buffer.sum
        with contextlib.suppress(*_NO_RUNTIME_COMPILER):
            # A default-policy read: lines that a streaming load marks as first to be evicted would not displace others.
            self._flush = _read_calls(self._buffer, [_Kernel(512, 8, 0, streaming=False)])[0][1]

    def sample(self, call: Call, budget_s: float) -> list[float]:
        rep_s = self._warm_up(call)
        reps = min(self.MAX_REPS, max(self.MIN_REPS, math.ceil(budget_s / rep_s)))
        new_event = functools.partial(torch.cuda.Event, enable_timing=True)
        events = [(new_event(), new_event()) for _ in range(reps)]
        for start, end in events:
            self._flush()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) for start, end in events]

    def _warm_up(self, call: Call) -> float:
        """Seconds that one repeat takes, flush included, once the device is warm."""
        begin = time.perf_counter()
        while True:
            rep_begin = time.perf_counter()
            self._flush()
            call()
            torch.cuda.synchronize()
            now = time.perf_counter()
            if now - begin > self.WARM_UP_S:
                return now - rep_begin


def make_timer(device: torch.device) -> Timer:
    return CudaTimer(device) if device.type == "cuda" else CpuTimer()


def host_times(calls: Sequence[Call], device: torch.device, budget_s: float, batches: int = 41) -> list[float]:
    """Microseconds of host time that each call takes: many without a synchronisation between them, median of batches.

    The calls take turns, so that whatever else slows the machine down for a while does so for all of them.
    """

    def seconds_a_call(call: Call, times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            call()
        spent = time.perf_counter() - begin
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return spent / times

    times = []
    for call in calls:
        seconds_a_call(call, 3)  # warm-up
        # No more calls than the device's launch queue holds, or the host would wait for it.
        times.append(min(150, max(1, int(budget_s / batches / seconds_a_call(call, 10)))))
    rounds = [[seconds_a_call(*turn) for turn in zip(calls, times, strict=True)] for _ in range(batches)]
    return [statistics.median(spent) * 1e6 for spent in zip(*rounds, strict=True)]


@contextlib.contextmanager
def tf32_convolutions(allowed: bool) -> Iterator[None]:
    """Whether cuDNN convolutions may use TF32, restored afterwards; matrix products stay at PyTorch's default."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer versions of PyTorch prefer a second way of saying the same
        before = torch.backends.cudnn.allow_tf32
        torch.backends.cudnn.allow_tf32 = allowed
        try:
            yield
        finally:
            torch.backends.cudnn.allow_tf32 = before


@dataclass(frozen=True)
class Prepared:
    """Something to time, and a way to get a checkable result from exactly what is timed."""

    call: Callable[[], Tensor]
    output: Callable[[], Tensor]


def poison_allocator(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """Free a block full of NaN, which the allocator then hands to the next output of this size."""
    torch.full(shape, math.nan, dtype=dtype, device=device)


def prepare(call: Callable[[], Tensor], shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Prepared:
    """An ordinary call; ``output`` runs it on memory that was full of NaN."""

    def output() -> Tensor:
        poison_allocator(shape, dtype, device)
        return call()

    return Prepared(call, output)


def prepare_graph(call: Callable[[], Tensor]) -> Prepared:
    """The call captured in a CUDA graph; ``output`` fills the static output with NaN, replays and returns it."""
    new_stream: Callable[[], torch.cuda.Stream] = torch.cuda.Stream
    side = new_stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = call()

    def replay() -> Tensor:
        graph.replay()
        return static

    def output() -> Tensor:
        static.fill_(math.nan)
        return replay()

    return Prepared(replay, output)


# --- The limit ---


@dataclass(frozen=True)
class _Kernel:
    """A plain vectorised read or copy kernel.

    A block takes tiles of ``threads * unroll`` 16-byte vectors: one tile (``blocks_per_sm`` 0), or as many as it takes
    when so many blocks per multiprocessor share them. ``streaming`` uses evict-first loads and stores.
    """

    threads: int
    unroll: int
    blocks_per_sm: int
    streaming: bool

    def __str__(self) -> str:
        grid = f"{self.blocks_per_sm} blocks/SM" if self.blocks_per_sm else "a block a tile"
        return f"{self.threads} threads x {self.unroll}, {grid}{', streaming' if self.streaming else ''}"


_READ_KERNELS = [
    _Kernel(256, 4, 0, False),
    _Kernel(256, 8, 0, True),
    _Kernel(512, 8, 0, True),
    _Kernel(1024, 8, 0, False),
    _Kernel(1024, 8, 0, True),
    _Kernel(256, 8, 8, True),
    _Kernel(512, 4, 4, True),
    _Kernel(1024, 4, 2, True),
]
_COPY_KERNELS = [
    _Kernel(256, 1, 0, False),
    _Kernel(256, 4, 0, False),
    _Kernel(256, 4, 0, True),
    _Kernel(512, 4, 0, True),
    _Kernel(1024, 2, 0, True),
    _Kernel(256, 8, 0, True),
    _Kernel(256, 4, 8, True),
    _Kernel(512, 4, 4, True),
]

# A thread whose combined words, masked, equal `match` adds them to the sink. With mask 0 and match 0 every thread does,
# and the sink is a checksum of all that was read; when timing, mask is all ones, and one thread in 2^32 does. The
# condition depends on the data, so no load can be left out, and it is the same machine code in both uses.
_SOURCE = r"""
#if STREAMING
#define LOAD(p) __ldcs(p)
#define STORE(p, v) __stcs(p, v)
#else
#define LOAD(p) (*(p))
#define STORE(p, v) (*(p) = (v))
#endif

constexpr int TILE = THREADS * UNROLL;

// A warp takes UNROLL consecutive rows of 32 vectors.
__device__ long long first_of_tile(long long tile) {
  return tile * TILE + (threadIdx.x / 32) * (32 * UNROLL) + threadIdx.x % 32;
}

// Whole tiles load without conditions, so that all UNROLL loads are in flight before the first use.
__device__ void load_tile(const uint4* __restrict__ x, long long tile, long long n, uint4 (&v)[UNROLL]) {
  const long long first = first_of_tile(tile);
  if ((tile + 1) * TILE <= n) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) v[u] = LOAD(x + first + u * 32);
  } else {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) v[u] = first + u * 32 < n ? LOAD(x + first + u * 32) : make_uint4(0, 0, 0, 0);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
read_all(const uint4* __restrict__ x, unsigned* __restrict__ sink, int n, unsigned mask, unsigned match) {
  const long long tiles = ((long long)n + TILE - 1) / TILE;
  uint4 sum = make_uint4(0, 0, 0, 0);
  for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    uint4 v[UNROLL];
    load_tile(x, tile, n, v);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      sum.x ^= v[u].x;
      sum.y ^= v[u].y;
      sum.z ^= v[u].z;
      sum.w ^= v[u].w;
    }
  }
  const unsigned word = sum.x ^ sum.y ^ sum.z ^ sum.w;
  if ((word & mask) == match) atomicXor(sink, word);
}

extern "C" __global__ void __launch_bounds__(THREADS)
copy_all(const uint4* __restrict__ from, uint4* __restrict__ to, int n) {
  const long long tiles = ((long long)n + TILE - 1) / TILE;
  for (long long tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
    const long long first = first_of_tile(tile);
    uint4 v[UNROLL];
    load_tile(from, tile, n, v);
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      if (first + u * 32 < n) STORE(to + first + u * 32, v[u]);
    }
  }
}
"""
_NEVER = 0x5EED1E55


@functools.cache
def _compiled(name: str, threads: int, unroll: int, streaming: bool, device_index: int) -> Any:
    """The kernel for the device, which is the current one, compiled at run time."""
    from torch.utils import cpp_extension

    # PyTorch's own NVRTC may lie where only its loader looks: this library depends on it and brings it in.
    with contextlib.suppress(OSError):
        ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"))
    source = f"#define THREADS {threads}\n#define UNROLL {unroll}\n#define STREAMING {int(streaming)}\n{_SOURCE}"
    # _compile_kernel wants a toolkit for an include path that this source has no use for.
    with mock.patch.object(cpp_extension, "CUDA_HOME", cpp_extension.CUDA_HOME or "/usr"):
        return torch.cuda._compile_kernel(source, name)


def _launcher(name: str, kernel: _Kernel, vectors: int, device: torch.device) -> Callable[[list[Any]], None]:
    """A call that launches the kernel over so many 16-byte vectors, given its arguments."""
    index = torch.cuda.current_device() if device.index is None else device.index
    function = _compiled(name, kernel.threads, kernel.unroll, kernel.streaming, index)
    tiles = max(1, -(-vectors // (kernel.threads * kernel.unroll)))
    if kernel.blocks_per_sm:
        tiles = min(tiles, kernel.blocks_per_sm * torch.cuda.get_device_properties(device).multi_processor_count)
    grid, block = (tiles, 1, 1), (kernel.threads, 1, 1)
    return lambda args: function(grid=grid, block=block, args=args)


def _flat_words(x: Tensor) -> Tensor:
    """The memory of a dense tensor of any layout as 32-bit floats (two half values share one)."""
    flat = torch.as_strided(x, (x.numel(),), (1,))
    usable = x.numel() * x.itemsize // 4 * 4 // x.itemsize
    return flat[:usable].view(torch.float32)


def _checksum(words: Tensor) -> int:
    """XOR of all 32-bit words, by halving."""
    values = words.view(torch.int32)
    while values.numel() > 1:
        half = values.numel() // 2
        folded = values[:half] ^ values[half : 2 * half]
        values = torch.cat((folded, values[2 * half :]))
    return int(values.item()) & 0xFFFFFFFF


def _read_calls(words: Tensor, kernels: Sequence[_Kernel]) -> list[tuple[str, Call]]:
    vectors = words.numel() // 4
    sink = torch.zeros(1, dtype=torch.int32, device=words.device)
    checksum = _checksum(words[: vectors * 4])
    calls: list[tuple[str, Call]] = []
    for kernel in kernels:
        launch = _launcher("read_all", kernel, vectors, words.device)

        def call(launch: Callable[[list[Any]], None] = launch) -> None:
            launch([words, sink, vectors, -1, _NEVER])

        sink.zero_()
        launch([words, sink, vectors, 0, 0])
        if int(sink.item()) & 0xFFFFFFFF != checksum:
            raise AssertionError(f"the limit's read kernel ({kernel}) does not read everything once")
        calls.append((str(kernel), call))
    return calls


def _copy_calls(source: Tensor, target: Tensor) -> list[tuple[str, Call]]:
    vectors = source.numel() // 4
    calls: list[tuple[str, Call]] = []
    for kernel in _COPY_KERNELS:
        launch = _launcher("copy_all", kernel, vectors, source.device)

        def call(launch: Callable[[list[Any]], None] = launch) -> None:
            launch([source, target, vectors])

        target.fill_(math.nan)
        call()
        if not torch.equal(target, source):
            raise AssertionError(f"the limit's copy kernel ({kernel}) does not copy everything")
        calls.append((str(kernel), call))
    return calls


class Limit:
    """The time that moving the bytes alone takes: of `torch.sum` or `copy_`, on a GPU the best of several plain kernels
    and these."""

    def __init__(self, kind: Literal["read", "copy"], x: Tensor, bytes_moved: int) -> None:
        """``read`` reads the memory of ``x``; ``copy`` copies a buffer of half of ``bytes_moved``."""
        on_gpu = x.is_cuda
        self.kind = kind
        self.note = ""
        if kind == "read":
            words = _flat_words(x)
            self.bytes_moved = words.numel() * 4
            self._calls: list[tuple[str, Call]] = [("torch.sum", words.sum)]
        else:
            source = torch.rand(max(4, bytes_moved // 32 * 4), device=x.device)
            target = torch.empty_like(source)
            self.bytes_moved = source.numel() * 8
            self._calls = [("copy_", lambda: target.copy_(source))]
        if on_gpu:
            try:
                self._calls += _read_calls(words, _READ_KERNELS) if kind == "read" else _copy_calls(source, target)
            except _NO_RUNTIME_COMPILER as error:
                self.note = f"no run-time compilation, so only {self._calls[0][0]}: {error}"

    def measure(self, timer: Timer, budget_s: float, only: str | None = None) -> tuple[str, Timing]:
        """The fastest way of moving the bytes, and its time; all candidates, or those named so, share the budget."""
        calls = [(name, call) for name, call in self._calls if only in (None, name)]
        timed = [(name, Timing.of(timer.sample(call, budget_s / len(calls)))) for name, call in calls]
        return min(timed, key=lambda entry: entry[1].median_ms)


def operation_rate(
    dtype: torch.dtype, device: torch.device, timer: Timer, budget_s: float
) -> tuple[torch.dtype, float]:
    """Floating-point operations a second in a large matrix product, and the dtype of that product.

    On a GPU that is the rate of the tensor cores for the half types, and of plain multiply-adds for float32 (TF32 off).
    Few CPUs have products of half types, and substitutes are slow: there they count as float32.
    """
    size = 8192 if device.type == "cuda" else 1024
    dtype = dtype if device.type == "cuda" else torch.promote_types(dtype, torch.float32)
    a, b = (torch.rand(size, size, device=device).sub_(0.5).to(dtype) for _ in range(2))
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        spent = Timing.of(timer.sample(lambda: torch.mm(a, b), budget_s))
    finally:
        torch.set_float32_matmul_precision(before)
    return dtype, 2e3 * size**3 / spent.median_ms
