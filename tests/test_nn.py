"""The modules: parameters and behaviour of the plain models, the fused ops where no gradient is needed."""

from __future__ import annotations

import copy
import io
import pickle
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Inputs, Log, run_python
from tolerances import assert_close
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

import fused_kernels.nn


class PlainA(nn.Module):
    """KernelBench's 42_ConvTranspose2d_GlobalAvgPool_BiasAdd_LogSumExp_Sum_Multiply"""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, bias_shape: tuple[int, ...]) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose2d(in_channels, out_channels, kernel_size)
        self.bias = nn.Parameter(torch.randn(bias_shape))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_transpose(x)
        x = torch.mean(x, dim=(2, 3), keepdim=True)
        x = x + self.bias
        x = torch.logsumexp(x, dim=1, keepdim=True)
        x = torch.sum(x, dim=(2, 3))
        return x * 10.0


class PlainB(nn.Module):
    """KernelBench's 50_ConvTranspose3d_Scaling_AvgPool_BiasAdd_Scaling"""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        stride: int,
        padding: int,
        scale1: float,
        scale2: float,
        bias_shape: tuple[int, ...],
    ) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, stride=stride, padding=padding)
        self.scale1 = nn.Parameter(torch.tensor(scale1))
        self.avg_pool = nn.AvgPool3d(kernel_size=2)
        self.bias = nn.Parameter(torch.randn(bias_shape))
        self.scale2 = nn.Parameter(torch.tensor(scale2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_transpose(x)
        x = x * self.scale1
        x = self.avg_pool(x)
        x = x + self.bias
        return x * self.scale2


# name: (plain, ours, constructor arguments, input shape, names in order of creation, op)
MODELS: dict[str, tuple[type[nn.Module], type[nn.Module], tuple[Any, ...], tuple[int, ...], list[str], str]] = {
    "A": (
        PlainA,
        fused_kernels.nn.ConvTranspose2dGlobalAvgPoolLogSumExp,
        (4, 9, 3, (9, 1, 1)),
        (3, 4, 8, 7),
        ["bias", "conv_transpose.weight", "conv_transpose.bias"],
        "conv_transpose_global_avg_pool_logsumexp",
    ),
    "B": (
        PlainB,
        fused_kernels.nn.ConvTranspose3dAvgPool,
        (3, 5, 3, 2, 1, 0.5, 1.25, (5, 1, 1, 1)),
        (2, 3, 4, 6, 5),
        ["scale1", "bias", "scale2", "conv_transpose.weight", "conv_transpose.bias"],
        "conv_transpose_avg_pool",
    ),
}
both_models = pytest.mark.parametrize("model", MODELS)


def make(model: str, seed: int = 0) -> tuple[nn.Module, nn.Module]:
    plain, ours, arguments, *_ = MODELS[model]
    made = []
    for kind in (plain, ours):
        torch.manual_seed(seed)
        made.append(kind(*arguments))
    return made[0], made[1]


def is_right(output: Tensor, plain: nn.Module, x: Tensor) -> None:
    """What the plain model gives in float64."""
    with torch.no_grad():
        expected = copy.deepcopy(plain).cpu().double()(x.cpu().double())
    assert_close(output, expected, expected.abs() + 10)


def outputs_agree(model: str, plain: nn.Module, ours: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """And it is the fused op that ours calls."""
    with torch.no_grad(), Log() as log:
        output = ours(x)
    assert log.fused == [MODELS[model][-1]]
    is_right(output, plain, x)


@both_models
def test_parameters_are_the_plain_models(model: str) -> None:
    """The same names in the same order, and, from one seed, the same values."""
    plain, ours = make(model)
    assert [name for name, _ in ours.named_parameters()] == MODELS[model][4]
    ours_state, plain_state = ours.state_dict(), plain.state_dict()
    assert list(ours_state) == list(plain_state)
    for name, value in plain_state.items():
        assert torch.equal(ours_state[name], value) and ours_state[name].dtype == value.dtype
    assert all(parameter.requires_grad for parameter in ours.parameters())


@pytest.mark.smoke
@both_models
def test_values(inputs: Inputs, model: str) -> None:
    plain, ours = (module.to(inputs.device) for module in make(model))
    outputs_agree(model, plain, ours, inputs.input(*MODELS[model][3]))


@both_models
@pytest.mark.parametrize("assign", [False, True])
def test_state_dict_loads_both_ways(inputs: Inputs, model: str, assign: bool) -> None:
    plain, ours = (module.to(inputs.device) for module in make(model))
    x = inputs.input(*MODELS[model][3])
    outputs_agree(model, plain, ours, x)
    other_plain, other_ours = (module.to(inputs.device) for module in make(model, seed=1))
    ours.load_state_dict(other_plain.state_dict(), assign=assign)
    outputs_agree(model, other_plain, ours, x)  # nothing is remembered
    plain.load_state_dict(other_ours.state_dict(), assign=assign)
    outputs_agree(model, plain, other_ours, x)


@both_models
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_changed_parameters_are_seen(inputs: Inputs, model: str, compiled: bool) -> None:
    plain, ours = (module.to(inputs.device) for module in make(model))
    x = inputs.input(*MODELS[model][3])
    torch._dynamo.reset()
    run: Any = torch.compile(ours, backend="aot_eager", fullgraph=True) if compiled else ours

    def agree() -> None:
        with torch.no_grad():
            is_right(run(x), plain, x)

    agree()
    for module in (plain, ours):  # in place, behind autograd's back
        for i, parameter in enumerate(module.parameters()):
            parameter.data.copy_(parameter.data * (1.5 + i))
    agree()
    for module in (plain, ours):  # an optimiser's step
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
    agree()
    _, other = make(model, seed=3)
    for module in (plain, ours):
        module.load_state_dict(other.state_dict())
    agree()


@both_models
def test_changed_parameters_are_seen_within_one_autocast(inputs: Inputs, model: str) -> None:
    """Which remembers the casts of weights until it ends."""
    ours, other = (make(model, seed)[1].to(inputs.device) for seed in (0, 1))
    x = inputs.input(*MODELS[model][3])
    with torch.no_grad(), torch.autocast(inputs.device.type, torch.bfloat16):
        expected = other(x)
        first = ours(x)
        ours.load_state_dict(other.state_dict())
        assert torch.equal(ours(x), expected) and not torch.equal(first, expected)


@both_models
def test_parameters_made_under_inference_mode(inputs: Inputs, model: str) -> None:
    with torch.inference_mode():
        plain, ours = (module.to(inputs.device) for module in make(model))
    outputs_agree(model, plain, ours, inputs.input(*MODELS[model][3]))


@both_models
def test_functional_call(inputs: Inputs, model: str) -> None:
    plain, ours = (module.to(inputs.device) for module in make(model))
    other, _ = make(model, seed=2)
    state = {name: value.to(inputs.device) for name, value in other.state_dict().items()}
    x = inputs.input(*MODELS[model][3])
    outputs_agree(model, other, lambda x: torch.func.functional_call(ours, state, (x,)), x)
    outputs_agree(model, plain, ours, x)


@both_models
def test_trains_as_the_plain_model(inputs: Inputs, model: str) -> None:
    """With gradients on, through the plain composition; the gradients are its own."""
    plain, ours = (module.to(inputs.device) for module in make(model))
    x = inputs.input(*MODELS[model][3])
    gradients = []
    for module in (plain, ours):
        wanting = x.clone().requires_grad_()
        with Log() as log:
            output = module(wanting)
        assert log.fused == []
        output.square().mean().backward()
        gradients.append([wanting.grad, *(parameter.grad for parameter in module.parameters())])
    for expected, gradient in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected)
    for module in (plain, ours):
        torch.optim.SGD(module.parameters(), lr=0.01).step()
    for expected, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


@both_models
def test_takes_the_fused_path_when_no_gradient_is_needed(inputs: Inputs, model: str) -> None:
    _, ours = (module.to(inputs.device) for module in make(model))
    x = inputs.input(*MODELS[model][3])

    def ops(x: Tensor) -> list[str]:
        with Log() as log:
            ours(x)
        return log.fused

    fused = [MODELS[model][-1]]
    assert ops(x) == []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert ops(x) == fused
    ours.requires_grad_(False)
    assert ops(x) == fused
    assert ops(x.clone().requires_grad_()) == []  # somebody wants the input's gradient
    next(ours.parameters()).requires_grad_()
    assert ops(x) == []


# Of the sum of what the module gives for some parameters and two inputs.
DERIVATIVES: dict[str, Callable[[Any, Any, Tensor], Any]] = {
    "jvp": lambda run, state, x: torch.func.jvp(lambda x: run(state, x), (x,), (x + 1,))[1],
    "jvp of a parameter": lambda run, state, x: torch.func.jvp(
        lambda bias: run(state | {"bias": bias}, x), (state["bias"],), (torch.ones_like(state["bias"]),)
    )[1],
    "grad": lambda run, state, x: torch.func.grad(run, 1)(state, x),
    "grad of vmap": lambda run, state, x: torch.func.grad(lambda x: torch.vmap(run, (None, 0))(state, x).sum())(x),
    "grad of vmap over parameters": lambda run, state, x: torch.func.grad(
        lambda state: torch.vmap(run, (0, None))(state, x).sum()
    )({name: torch.stack([value, 2 * value]) for name, value in state.items()}),
    "vmap of grad": lambda run, state, x: torch.vmap(torch.func.grad(run), (None, 0))(state, x),
    "jvp of vmap": lambda run, state, x: torch.func.jvp(lambda x: torch.vmap(run, (None, 0))(state, x), (x,), (x + 1,)),
    "vmap of jvp": lambda run, state, x: torch.vmap(lambda x: torch.func.jvp(lambda x: run(state, x), (x,), (x,)))(x),
    "backward of vmap": lambda run, state, x: torch.autograd.grad(
        torch.vmap(run, (None, 0))(state, x.requires_grad_()).sum(), x
    ),
}


@both_models
@pytest.mark.parametrize("kind", DERIVATIVES)
def test_derivatives_of_torch_func(inputs: Inputs, model: str, kind: str) -> None:
    """Of a module without gradients of its own too: whatever wraps the tensors, the composition is what runs."""
    modules = [module.to(inputs.device).requires_grad_(False) for module in make(model)]
    shape = MODELS[model][3]
    x = inputs.input(2, *shape[1:])
    derivatives = []
    for module in modules:

        def run(state: Any, x: Tensor, module: nn.Module = module) -> Tensor:
            x = x.reshape(-1, *shape[1:])
            result: Tensor = torch.func.functional_call(module, state, (x,)).sum()
            return result

        state = {name: value.clone() for name, value in module.state_dict().items()}
        derivatives.append(DERIVATIVES[kind](run, state, x.clone()))
    for ours, expected in zip(*map(tree_leaves, derivatives), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-4)


@both_models
def test_dual_numbers(inputs: Inputs, model: str) -> None:
    """no_grad is about backward only. Within forward mode what has no tangent takes the fused op."""
    plain, ours = (module.to(inputs.device) for module in make(model))
    x = inputs.input(*MODELS[model][3])
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x + 1)
        tangents = [torch.autograd.forward_ad.unpack_dual(module(dual)).tangent for module in (plain, ours)]
        torch.testing.assert_close(*tangents)
        outputs_agree(model, plain, ours, x)


def test_vmap_without_derivatives_is_fused(inputs: Inputs) -> None:
    ours = make("B")[1].to(inputs.device).requires_grad_(False)
    with Log() as log:
        torch.vmap(ours)(inputs.input(3, *MODELS["B"][3]))
    assert log.fused == [MODELS["B"][-1]]


def saved(module: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    loaded: nn.Module = torch.load(buffer, weights_only=False)
    return loaded


def saved_state(module: nn.Module) -> nn.Module:
    """Only the parameters go through the file, into a module of other values."""
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    other = copy.deepcopy(module)
    for parameter in other.parameters():
        parameter.data.fill_(torch.nan)
    other.load_state_dict(torch.load(buffer, weights_only=True))
    return other


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "deepcopy": copy.deepcopy,
    "copy of a copy": lambda module: copy.deepcopy(copy.deepcopy(module)),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": saved,
    "torch.save of the state": saved_state,
}


@both_models
@pytest.mark.parametrize("kind", COPIES)
def test_copies(inputs: Inputs, model: str, kind: str) -> None:
    plain, ours = (module.to(inputs.device) for module in make(model))
    x = inputs.input(*MODELS[model][3])
    twin = COPIES[kind](ours)
    assert repr(twin) == repr(ours)
    outputs_agree(model, plain, twin, x)
    with torch.no_grad():
        next(twin.parameters()).add_(1)
    outputs_agree(model, plain, ours, x)  # not shared


@both_models
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_other_dtypes(inputs: Inputs, model: str, dtype: torch.dtype) -> None:
    plain, ours = (module.to(inputs.device, dtype) for module in make(model))
    outputs_agree(model, plain, ours, inputs.input(*MODELS[model][3], dtype=dtype))


@both_models
def test_half_and_back(inputs: Inputs, model: str) -> None:
    plain, ours = (module.to(inputs.device) for module in make(model))
    for kind, dtype in (("half", torch.float16), ("bfloat16", torch.bfloat16), ("float", torch.float32)):
        for module in (plain, ours):
            assert getattr(module, kind)() is module
        assert all(parameter.dtype == dtype for parameter in ours.parameters())
        outputs_agree(model, plain, ours, inputs.input(*MODELS[model][3], dtype=dtype))


@both_models
def test_memory_format(inputs: Inputs, model: str) -> None:
    """Of the weight and of the input, which the output keeps."""
    plain, ours = (module.to(inputs.device) for module in make(model))
    x = inputs.input(*MODELS[model][3])
    memory_format = torch.channels_last if model == "A" else torch.channels_last_3d
    for module in (plain, ours):
        # Torch would have B's bias of rank 4 in a format of rank 5.
        moved = module if model == "A" else module.conv_transpose
        moved.to(memory_format=memory_format)
        assert module.conv_transpose.weight.is_contiguous(memory_format=memory_format)
    for of_x in (torch.contiguous_format, memory_format):
        given = x.contiguous(memory_format=of_x)
        outputs_agree(model, plain, ours, given)
        with torch.no_grad():
            assert model == "A" or ours(given).is_contiguous(memory_format=of_x)


@both_models
def test_meta_construction(inputs: Inputs, model: str) -> None:
    """Shapes without memory, and three ways to materialise."""
    plain, source = (module.to(inputs.device) for module in make(model, seed=5))
    x = inputs.input(*MODELS[model][3])

    def made() -> nn.Module:
        with torch.device("meta"):
            module = make(model)[1]
        assert all(parameter.is_meta for parameter in module.parameters())
        return module

    with torch.no_grad():
        output = made()(x.to("meta"))
    assert output.is_meta and output.shape == source(x).shape
    empty = made().to_empty(device=inputs.device)
    empty.load_state_dict(source.state_dict())
    assigned = made()
    assigned.load_state_dict(source.state_dict(), assign=True)
    for module in (empty, assigned):
        assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in module.parameters())
        outputs_agree(model, plain, module, x)
    outputs_agree(model, plain, lambda x: torch.func.functional_call(made(), dict(source.state_dict()), (x,)), x)


class Doubled(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "a function": lambda conv: parametrize.register_parametrization(conv, "weight", Doubled()),
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": lambda conv: nn.utils.parametrizations.spectral_norm(conv.eval()),
}


@both_models
@pytest.mark.parametrize("kind", PARAMETRIZATIONS)
def test_parametrized_weight(inputs: Inputs, model: str, kind: str) -> None:
    """Computed anew in each call, with gradients through it; and removable."""
    plain, ours = (module.to(inputs.device) for module in make(model))
    x = inputs.input(*MODELS[model][3])
    for module in (plain, ours):
        torch.manual_seed(1)
        PARAMETRIZATIONS[kind](module.conv_transpose)
    ours.load_state_dict(plain.state_dict())
    with torch.no_grad(), Log() as log:
        output = ours(x)
        expected = plain(x)
    assert log.fused == [MODELS[model][-1]]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    for module in (plain, ours):
        module(x).square().mean().backward()
    for wanted, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, wanted.grad)
    with torch.no_grad():
        for module in (plain, ours):
            for parameter in module.conv_transpose.parametrizations.parameters():
                parameter.mul_(1.5)
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-4)
        parametrize.remove_parametrizations(ours.conv_transpose, "weight")
        torch.testing.assert_close(ours(x), plain(x), rtol=1e-4, atol=1e-4)
    assert set(ours.state_dict()) == set(MODELS[model][4])


@both_models
def test_hooks_of_modules(inputs: Inputs, model: str) -> None:
    """Around the fused op as around the composition."""
    _, ours = (module.to(inputs.device) for module in make(model))
    x = inputs.input(*MODELS[model][3])
    with torch.no_grad():
        expected = ours(2 * x) + 1
        ours.register_forward_pre_hook(lambda module, args: (2 * args[0],))
        ours.register_forward_hook(lambda module, args, output: output + 1)
        assert torch.equal(ours(x), expected)
    seen: list[Tensor] = []
    ours.register_full_backward_hook(lambda module, inputs, outputs: seen.extend(outputs))
    ours(x.clone().requires_grad_()).sum().backward()
    assert len(seen) == 1 and torch.equal(seen[0], torch.ones_like(expected))


@both_models
def test_compiles_without_a_graph_break(inputs: Inputs, model: str) -> None:
    plain, ours = (module.to(inputs.device) for module in make(model))
    torch._dynamo.reset()
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    x = inputs.input(*MODELS[model][3])
    with torch.no_grad():
        is_right(compiled(x), plain, x)
    targets = [str(node.target) for node in backend.graphs[0].graph.nodes if "fused" in str(node.target)]
    assert targets == [f"fused.{MODELS[model][-1]}.default"]


@both_models
def test_compiled_module_trains(inputs: Inputs, model: str) -> None:
    plain, ours = (module.to(inputs.device) for module in make(model))
    torch._dynamo.reset()
    x = inputs.input(*MODELS[model][3])
    for module in (plain, torch.compile(ours, backend="aot_eager", fullgraph=True)):
        module(x).square().mean().backward()
    for expected, parameter in zip(plain.parameters(), ours.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


EXAMPLES = {"A": "global_avg_pool_logsumexp.py", "B": "avg_pool.py"}


@both_models
def test_examples_are_drop_ins(inputs: Inputs, model: str) -> None:
    """KernelBench makes ModelNew as it makes its Model, from the same seed and arguments, and compares outputs."""
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / EXAMPLES[model]))
    arguments = example["get_init_inputs"]()
    made = []
    for kind in (MODELS[model][0], example["ModelNew"]):
        torch.manual_seed(0)
        made.append(kind(*arguments).to(inputs.device))
    x = inputs.input(2, example["in_channels"], *(9, 12, 11)[: 2 if model == "A" else 3])
    outputs_agree(model, *made, x)


def test_example_of_a_plain_call() -> None:
    """But for Inductor, which takes long."""
    code = """
        import functools, runpy, sys, torch
        torch.compile = functools.partial(torch.compile, backend="aot_eager")
        torch.backends.cudnn.allow_tf32 = False
        runpy.run_path(sys.argv[1])
    """
    said = run_python(code, str(Path(__file__).parent.parent / "examples" / "torch_op.py"))
    difference, compiled = (
        float(re.search(rf"^{name}: +(\S+)$", said, re.M)[1]) for name in ("difference", "compiled")
    )
    assert difference < 1e-3 and compiled == 0 and "Plan(variant=" in said  # of values up to 124


def test_representation() -> None:
    assert "out_scale=10.0" in repr(make("A")[1]) and "pool_kernel_size=2" in repr(make("B")[1])


def test_keyword_arguments(inputs: Inputs) -> None:
    """out_scale and another pool; whose stride the convolution's does not divide raises like the op."""
    a = fused_kernels.nn.ConvTranspose2dGlobalAvgPoolLogSumExp(3, 4, 3, (4, 1, 1), out_scale=1.0).to(inputs.device)
    b = fused_kernels.nn.ConvTranspose3dAvgPool(3, 4, 3, 2, 1, 0.5, 1.0, (4, 1, 1, 1), pool_kernel_size=4).to(
        inputs.device
    )
    x = inputs.input(1, 3, 5, 6, 7)
    with torch.no_grad():
        shift = a.bias.flatten()
        rows = fused_kernels.conv_transpose_global_avg_pool(
            x[:, :, 0], a.conv_transpose.weight, a.conv_transpose.bias, shift=shift
        )
        torch.testing.assert_close(a(x[:, :, 0]), rows.flatten(1).logsumexp(1, keepdim=True))
        assert b(x).shape == (1, 4, 2, 2, 3)
        b.pool_kernel_size = 3
        with pytest.raises(RuntimeError, match="`pool_stride` to be a multiple of `stride`"):
            b(x)
