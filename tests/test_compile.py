"""torch.compile: every mode, dynamic sizes, memory formats, ops among ordinary layers, training around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conftest import LAYOUTS, B, G, Inputs, Log, in_format_of
from test_autocast import same
from test_integration import CALLS, Arguments, every_call, make
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.fx.experimental import _config as symbolic_shapes_config

import fused_kernels


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    # More than one compilation of a function is an error, unless a test says otherwise; and sizes that happen to be
    # equal at first are taken for different ones.
    with torch._dynamo.config.patch(error_on_recompile=True), symbolic_shapes_config.patch(use_duck_shape=False):
        yield


def resized(inputs: Inputs, arguments: Arguments, step: int) -> Arguments:
    """The same call on other numbers of samples and positions, in the input's memory format."""
    batch, channels, *sizes = arguments["input"].shape
    values = inputs.input(batch + 2 * step, channels, *(size + 3 * step for size in sizes))
    return arguments | {"input": in_format_of(arguments["input"], values)}


# ---- sizes ---------------------------------------------------------------------------------------------------------


@every_call
@pytest.mark.parametrize("layout", ["contiguous", "channels_last", "every second"])
def test_dynamic_serves_five_sizes(inputs: Inputs, call: str, layout: str) -> None:
    """One graph for batch and spatial sizes, in each memory format; the same bits and strides as eager."""
    op, arguments = make(call, inputs)
    compiled = torch.compile(lambda arguments: op(**arguments), backend="aot_eager", dynamic=True, fullgraph=True)
    for step in range(5):
        given = resized(inputs, arguments, step)
        given["input"] = LAYOUTS[layout](given["input"])
        assert same(compiled(given), op(**given))
    assert counters["stats"]["unique_graphs"] == 1


@every_call
def test_sizes_are_learnt_in_two_compilations(inputs: Inputs, call: str) -> None:
    """Without `dynamic`: the first for the sizes at hand, the second for all that change."""
    op, arguments = make(call, inputs)
    compiled = torch.compile(lambda arguments: op(**arguments), backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=False):
        for step in range(5):
            given = resized(inputs, arguments, step)
            assert same(compiled(given), op(**given))
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("call", ["A0, small", "A, small", "B, product"])
def test_sizes_given_as_symbols(inputs: Inputs, call: str) -> None:
    """Arguments of the convolution and the pool that are a dynamic size. The schemas take numbers there, so there is a
    compilation for each value; but none for the sizes beside it."""
    op, arguments = make(call, inputs)
    names = ("pool_kernel_size", "pool_stride") if CALLS[call][0] == B else ("stride",)

    def run(arguments: Arguments) -> Tensor:
        return op(**arguments | dict.fromkeys(names, arguments["input"].shape[0]))

    compiled = torch.compile(run, backend="aot_eager", dynamic=True, fullgraph=True)
    for batches in (1, 2):
        with torch._dynamo.config.patch(error_on_recompile=False):
            given = resized(inputs, arguments, batches)
            assert same(compiled(given), run(given))
        batch, *others = given["input"].shape
        given = given | {"input": inputs.input(batch, others[0], *(size + 1 for size in others[1:]))}
        assert same(compiled(given), run(given))
        assert counters["stats"]["unique_graphs"] == batches


# ---- Inductor ------------------------------------------------------------------------------------------------------

MODES = ["default", "reduce-overhead", "max-autotune"]
FORMATS = ["contiguous", "channels_last", "reversed"]


def everything(calls: dict[str, Arguments]) -> list[Tensor]:
    """Each op of what another kernel made, and behind it one that reads its output."""
    results = []
    for call, arguments in calls.items():
        output = getattr(fused_kernels, CALLS[call][0])(**arguments | {"input": arguments["input"] * 2})
        results += [output, output.relu() + 1]
    return results


@pytest.mark.slow
@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("mode", MODES)
def test_modes(inputs: Inputs, mode: str, layout: str) -> None:
    """All ops in one graph, thrice, so that CUDA graphs are recorded and replayed; none is left out of them."""
    compiled = torch.compile(everything, mode=mode, fullgraph=True)
    for _ in range(4):
        calls = {call: make(call, inputs)[1] for call in CALLS}
        for arguments in calls.values():
            arguments["input"] = LAYOUTS[layout](arguments["input"])
        expected = everything(calls)
        for ours, other in zip(compiled(calls), expected, strict=True):
            assert same(ours, other)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert inputs.device.type == "cpu" or counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "layout"), [*((mode, "contiguous") for mode in MODES), (MODES[0], "channels_last")])
def test_modes_with_dynamic_sizes(inputs: Inputs, mode: str, layout: str) -> None:
    op, arguments = make("B, staged", inputs)
    arguments["input"] = LAYOUTS[layout](arguments["input"])

    def run(arguments: Arguments) -> Tensor:
        pooled = op(**arguments).relu()
        return pooled + fused_kernels.global_avg_pool(pooled)

    compiled = torch.compile(run, mode=mode, dynamic=True, fullgraph=True)
    for step in range(5):
        given = resized(inputs, arguments, step)
        assert same(compiled(given), run(given))
    assert counters["stats"]["unique_graphs"] == 1


# ---- models --------------------------------------------------------------------------------------------------------


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, pool: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.pool = pool
        self.squeeze, self.excite = nn.Conv2d(channels, 4, 1), nn.Conv2d(4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.excite(self.squeeze(self.pool(x)).relu()).sigmoid()


class Mixed(nn.Module):
    """Ordinary layers in front of the ops, between them and behind them."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.source = source
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.SiLU())
        self.attention = SqueezeExcite(8, source.global_avg_pool)
        self.up = nn.ConvTranspose2d(8, 6, 3, stride=2, padding=1)
        self.last = nn.ConvTranspose2d(6, 5, 3)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.stem(x))
        x = self.source.conv_transpose_avg_pool(x, self.up.weight, self.up.bias, 2, 1).relu()
        x = self.source.conv_transpose_global_avg_pool(x, self.last.weight, self.last.bias, scale=0.5)
        return self.head(x.flatten(1))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_model_of_ops_and_ordinary_layers(inputs: Inputs, backend: str, memory_format: torch.memory_format) -> None:
    """Against the same model over the plain compositions; batch and sizes are dynamic."""
    if backend == "inductor" and memory_format != torch.contiguous_format:
        pytest.skip("a minute on a CPU, and test_modes has the ops in every format")
    torch.manual_seed(0)
    plain = Mixed(fused_kernels.reference).eval()
    model = Mixed(fused_kernels).eval()
    model.load_state_dict(plain.state_dict())
    plain, model = (module.to(inputs.device, memory_format=memory_format) for module in (plain, model))
    compiled = torch.compile(model, backend=backend, dynamic=True, fullgraph=True)
    with torch.no_grad():
        for batch, size in ((2, 9), (3, 12), (5, 10)):
            x = inputs.input(batch, 3, size, size + 1).contiguous(memory_format=memory_format)
            for run in (model, compiled):
                torch.testing.assert_close(run(x), plain(x), rtol=1e-4, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1


class FrozenBranch(nn.Module):
    """A trained branch beside a frozen one: frozen in parameters, or by no_grad, or by detached weights."""

    def __init__(self, frozen: str, source: Any) -> None:
        super().__init__()
        self.frozen, self.source = frozen, source
        self.conv = nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1).requires_grad_(frozen != "parameters")
        self.trained, self.mix, self.head = nn.Conv2d(3, 6, 1), nn.Linear(6, 6), nn.Linear(6, 2)

    def features(self, x: Tensor) -> Tensor:
        weight, bias = self.conv.weight, self.conv.bias
        if self.frozen == "detached":
            weight, bias = weight.detach(), bias.detach()
        x = self.source.conv_transpose_avg_pool(x, weight, bias, 2, 1).relu()
        return self.source.global_avg_pool(x).flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        if self.frozen == "no_grad":
            with torch.no_grad():
                features = self.features(x)
        else:
            features = self.features(x)
        return self.head(self.mix(features).sigmoid() + self.trained(x).mean((2, 3)))


@pytest.mark.parametrize("backend", ["none", "aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("frozen", ["parameters", "no_grad", "detached"])
def test_training_step_beside_a_frozen_branch(inputs: Inputs, backend: str, frozen: str) -> None:
    """The frozen branch runs fused; all gradients, and the parameters after each step, are the plain model's."""
    torch.manual_seed(0)
    plain, ours = (FrozenBranch(frozen, source) for source in (fused_kernels.reference, fused_kernels))
    ours.load_state_dict(plain.state_dict())
    plain, ours = plain.to(inputs.device), ours.to(inputs.device)
    x = inputs.input(4, 3, 7, 6)
    with Log() as log:
        ours(x)
    assert log.fused == [B, G]
    run = ours if backend == "none" else torch.compile(ours, backend=backend, fullgraph=True)
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (plain, ours)]
    for _ in range(3):
        x, target = inputs.input(4, 3, 7, 6), inputs.channels(4, 2)
        for module, optimizer in zip((plain, run), optimizers, strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(module(x), target).backward()
        for (name, expected), parameter in zip(plain.named_parameters(), ours.parameters(), strict=True):
            assert (parameter.grad is None) == (expected.grad is None) == name.startswith("conv.")
            if expected.grad is not None:
                torch.testing.assert_close(parameter.grad, expected.grad, rtol=1e-4, atol=1e-5)
        for optimizer in optimizers:
            optimizer.step()
    for expected, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-4, atol=1e-5)
