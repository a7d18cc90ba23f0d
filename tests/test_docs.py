"""The Python surface: what is public, what `help` shows of it, and that the examples in docstrings run."""

from __future__ import annotations

import ast
import doctest
import inspect
import pydoc
import re
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import fused_kernels
from fused_kernels import _C, _library, nn, ops, reference


def test_all_is_the_api() -> None:
    """What a star import gives, and all that stands in the package but modules of its own."""
    star: dict[str, Any] = {}
    exec("from fused_kernels import *", star)
    assert set(star) - {"__builtins__"} == set(fused_kernels.__all__)
    assert list(fused_kernels.__all__) == sorted(fused_kernels.__all__)
    public = {
        name
        for name, value in vars(fused_kernels).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert public == {name for name in fused_kernels.__all__ if not name.startswith("_")} - {"nn", "reference"}
    for module in (ops, nn):
        defined = {
            name
            for name, value in vars(module).items()
            if (inspect.isfunction(value) or inspect.isclass(value))
            and value.__module__ == module.__name__
            and not name.startswith("_")
        }
        assert defined == set(module.__all__)


def test_stubs_are_of_what_there_is() -> None:
    """The functions and classes in _C.pyi are those of the binary, and so are members and numbers of arguments."""

    def public(names: Iterable[str]) -> set[str]:
        return {name for name in names if not name.startswith("_")}

    stubs = {
        node.name: node
        for node in ast.parse(Path(_C.__file__).with_name("_C.pyi").read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    assert set(stubs) == public(vars(_C))
    for name, node in stubs.items():
        if isinstance(node, ast.ClassDef):
            members = {part.target.id for part in node.body if isinstance(part, ast.AnnAssign)}
            members |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
            assert public(members) == public(vars(getattr(_C, name))), name
        else:
            said = getattr(_C, name).__doc__.partition(" -> ")[0]
            taken = [*node.args.posonlyargs, *node.args.args]
            if node.args.vararg is None:
                assert len(re.findall(r"\w+: ", said)) == len(taken), name


PUBLIC: dict[str, Any] = {
    **{name: getattr(fused_kernels, name) for name in fused_kernels.__all__ if name != "__version__"},
    "fused_kernels": fused_kernels,
    **{f"nn.{name}": getattr(nn, name) for name in nn.__all__},
    **{f"reference.{name}": getattr(reference, name) for name in set(ops.__all__) - {"plan"}},
}


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_help_is_readable(name: str) -> None:
    """A sentence first, lines that fit a terminal, and no trace of how the objects are made."""
    shown = pydoc.render_doc(PUBLIC[name], renderer=pydoc.plaintext).partition("Methods inherited from")[0]
    doc = inspect.getdoc(PUBLIC[name]) or ""
    first, *rest = doc.splitlines()
    assert first.strip().endswith(".") and (not rest or rest[0] == "")
    assert all(len(line) <= 120 for line in doc.splitlines())
    assert "\\*" not in doc.replace(r"\*spatial", "").replace(r"\*kernel_size", "").replace(r"\*pooled", "")
    for trace in ("Union[", "Optional[", "ForwardRef", "partial(", "<lambda>", "object at 0x"):
        assert trace not in shown
    assert "Should be overridden by all subclasses" not in shown
    if isinstance(PUBLIC[name], types.FunctionType):
        signature = inspect.signature(PUBLIC[name])
        assert signature.return_annotation is not inspect.Signature.empty
        assert all(p.annotation is not inspect.Parameter.empty for p in signature.parameters.values())


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    modules = (fused_kernels, ops, nn, reference, _library)
    found = [test for module in modules for test in finder.find(module) if test.examples]
    return sorted(found, key=lambda test: test.name)


@pytest.mark.parametrize("example", examples(), ids=lambda test: test.name)
def test_examples_in_docstrings_run(example: doctest.DocTest) -> None:
    example.globs = {"torch": torch, "fused_kernels": fused_kernels}
    said: list[str] = []
    assert doctest.DocTestRunner().run(example, out=said.append).failed == 0, "".join(said)


def test_every_public_function_and_module_has_an_example() -> None:
    found = {test.name.rpartition(".")[2] for test in examples()}
    assert found >= set(ops.__all__) | set(nn.__all__)
