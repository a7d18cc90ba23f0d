"""What the binaries need, and what importing them does and does not do."""

from __future__ import annotations

import inspect
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import cuda_only, run_python

import fused_kernels
from fused_kernels import _C, _library, ops, reference

OPS_SO, C_SO = Path(_library.PATH), Path(_C.__file__)


class Elf:
    """As much of a 64-bit little-endian ELF file as tells its needed libraries and its symbols."""

    def __init__(self, path: Path) -> None:
        self.data = path.read_bytes()
        assert self.data[:6] == b"\x7fELF\x02\x01", f"{path} is not a 64-bit ELF file"
        start, size, count = (*self._at("<Q", 40), *self._at("<HH", 58))
        # (type, offset, size, link to the section of its strings)
        self.sections = []
        for at in range(start, start + size * count, size):
            kind, offset, length, link = (*self._at("<I", at + 4), *self._at("<QQI", at + 24))
            self.sections.append((kind, offset, length, link))

    def _at(self, form: str, offset: int) -> tuple[int, ...]:
        return struct.unpack_from(form, self.data, offset)

    def _entries(self, kind: int, form: str) -> Iterator[tuple[int, tuple[int, ...]]]:
        (_, offset, length, link) = next(section for section in self.sections if section[0] == kind)
        for at in range(offset, offset + length, struct.calcsize(form)):
            yield self.sections[link][1], self._at(form, at)

    def _string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode()

    def needed(self) -> set[str]:
        """DT_NEEDED of the dynamic section."""
        return {self._string(strings + value) for strings, (tag, value) in self._entries(6, "<qQ") if tag == 1}

    def symbols(self) -> Iterator[tuple[str, bool]]:
        """Names of the dynamic symbols, and whether they are undefined: somebody else must have them."""
        for strings, (name, _, _, section, _, _) in self._entries(11, "<IBBHQQ"):
            yield self._string(strings + name), section == 0


SYSTEM = ("libstdc++.so", "libgcc_s.so", "libm.so", "libc.so", "libdl.so", "librt.so", "libpthread.so", "ld-linux")


def beyond_the_system(path: Path) -> set[str]:
    return {name for name in Elf(path).needed() if not name.startswith(SYSTEM)}


# ---- binaries ------------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_ops_binary_needs_two_libraries_of_torch() -> None:
    """No CUDA library, and neither libpython nor libtorch_python."""
    assert beyond_the_system(OPS_SO) == {"libtorch_cpu.so", "libc10.so"}


@pytest.mark.smoke
def test_ops_binary_knows_no_python() -> None:
    undefined = [name for name, undefined in Elf(OPS_SO).symbols() if undefined]
    assert "aoti_torch_empty_strided" in undefined  # so symbols are read at all
    assert not [name for name in undefined if name.startswith(("Py", "_Py")) or "pybind11" in name]
    # Nothing of the CUDA runtime or driver is left to be found at load time, or offered to others.
    assert not [
        name for name, _ in Elf(OPS_SO).symbols() if name.startswith(("cuda", "__cuda", "cu", "nv")) and name != "cuda"
    ]


@pytest.mark.smoke
def test_python_module_needs_no_torch() -> None:
    assert not {name for name in beyond_the_system(C_SO) if not name.startswith("libpython")}
    names = [name for name, _ in Elf(C_SO).symbols()]
    assert "PyInit__C" in names and not [name for name in names if "torch" in name or "c10" in name]


def test_build_info_is_the_binarys_own() -> None:
    assert "fused_kernels_build_info" in [name for name, undefined in Elf(OPS_SO).symbols() if not undefined]


# ---- one set of names ----------------------------------------------------------------------------------------------


def schemas() -> dict[str, Any]:
    found = {schema.name.removeprefix("fused::"): schema for schema in torch._C._jit_get_all_schemas()}
    return {n: schema for n, schema in found.items() if schema.name.startswith("fused::") and not n.startswith("_")}


def functions_of(module: Any) -> set[str]:
    return {
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }


@pytest.mark.smoke
def test_schemas_wrappers_fakes_and_references_are_one_set() -> None:
    names = set(schemas())
    assert len(names) == 4
    assert set(ops.__all__) - {"plan"} == names
    assert functions_of(reference) == names
    assert functions_of(ops) - {"plan"} == names
    assert names | {"plan"} < set(fused_kernels.__all__)
    for name in names:
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(f"fused::{name}", key), (name, key)


@pytest.mark.parametrize("name", sorted(set(ops.__all__) - {"plan"}))
def test_arguments_are_the_same_everywhere(name: str) -> None:
    """Names, order, kind and defaults: schema, wrapper and reference."""
    wrapper, plain = (inspect.signature(getattr(module, name)).parameters for module in (ops, reference))
    assert [(p.name, p.kind, p.default) for p in wrapper.values()] == [
        (p.name, p.kind, p.default) for p in plain.values()
    ]
    arguments = schemas()[name].arguments
    assert [a.name for a in arguments] == list(wrapper)
    for argument in arguments:
        parameter = wrapper[argument.name]
        assert argument.kwarg_only == (parameter.kind == parameter.KEYWORD_ONLY)
        assert argument.has_default_value() == (parameter.default is not parameter.empty)
        if argument.has_default_value():
            default = argument.default_value
            default = default[0] if isinstance(default, list) and default else default
            assert default == (parameter.default if parameter.default != () else [])


def test_wrappers_are_documented() -> None:
    for name in schemas():
        text = inspect.getdoc(getattr(ops, name)) or ""
        assert all(f"{part}:" in text for part in ("Args", "Returns", "Raises", "Example"))
        assert all(f"{argument.name}" in text for argument in schemas()[name].arguments)


# ---- importing -----------------------------------------------------------------------------------------------------


@pytest.mark.smoke
def test_import_is_boring() -> None:
    """No CUDA, no compiler, and of torch nothing that `import torch` does not load itself."""
    run_python("""
        import sys
        import torch
        before = set(sys.modules)
        import fused_kernels
        assert not torch.cuda.is_initialized()
        new = {name for name in set(sys.modules) - before if not name.startswith("fused_kernels")}
        heavy = ("torch._dynamo", "torch._inductor", "torch._functorch", "triton", "torch.utils.cpp_extension", "numpy",
                 "subprocess", "rich", "matplotlib", "sympy")
        assert not [name for name in new if name.startswith(heavy)], sorted(new)
        assert "fused_kernels.bench" not in sys.modules
    """)


def test_loading_twice_is_fine() -> None:
    run_python("""
        import importlib, torch
        import fused_kernels
        from fused_kernels import _library
        torch.ops.load_library(_library.PATH)
        torch.ops.load_library(str(_library.PATH))
        importlib.reload(_library)
        assert fused_kernels.global_avg_pool(torch.ones(1, 1, 2)).item() == 1
    """)


def test_ops_binary_alone_serves_torch() -> None:
    """Without the Python package, as in a C++ program."""
    run_python(
        """
        import sys, torch
        torch.ops.load_library(sys.argv[1])
        assert torch.ops.fused.global_avg_pool(torch.ones(1, 2, 3)).flatten().tolist() == [1, 1]
        try:
            torch.ops.fused.global_avg_pool(torch.ones(3))
        except RuntimeError as error:
            assert "fused::global_avg_pool: expected `input` to have 3 to 5 dimensions" in str(error)
        else:
            raise AssertionError("no error")
        assert "fused_kernels" not in sys.modules
        """,
        str(OPS_SO),
    )


@pytest.mark.smoke
def test_loading_before_torch_is_a_plain_loader_error() -> None:
    said = run_python(
        """
        import ctypes, sys
        try:
            ctypes.CDLL(sys.argv[1])
        except OSError as error:
            print(error)
        assert "torch" not in sys.modules
        """,
        str(OPS_SO),
    )
    assert "libtorch_cpu.so" in said or "libc10.so" in said


def test_python_module_alone_needs_no_torch() -> None:
    said = run_python(
        """
        import importlib.util, sys
        spec = importlib.util.spec_from_file_location("_C", sys.argv[1])
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        assert "torch" not in sys.modules
        print(module.conv_transpose_output_size(4, 3))
        """,
        str(C_SO),
    )
    assert said == "6\n"


def test_older_torch_is_refused() -> None:
    said = run_python("""
        import torch
        torch.__version__ = "2.9.1+cu128"
        try:
            import fused_kernels
        except ImportError as error:
            print(error)
    """)
    assert said == "fused_kernels needs torch 2.10 or newer, but found torch 2.9.1+cu128\n"


@pytest.mark.parametrize(
    "version", ["2.9.1", "1.13.1", "2.0.0a0+git123", "2.10.0", "2.10.0a0+git123", "2.14.1+cu130", "3.0.0"]
)
def test_torch_versions(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    if version.startswith(("1.", "2.0.", "2.9.")):
        with pytest.raises(ImportError, match=f"found torch {re.escape(version)}$"):
            _library._load()
    else:
        assert _library._load().fused_kernels_build_info


def test_missing_binary_is_named(tmp_path: Path) -> None:
    """As from a source tree that nobody built."""
    package = tmp_path / "fused_kernels"
    package.mkdir()
    for file in Path(fused_kernels.__file__).parent.glob("*.py"):
        (package / file.name).write_bytes(file.read_bytes())
    said = run_python(
        """
        import sys
        sys.path.insert(0, sys.argv[1])
        try:
            import fused_kernels
        except ImportError as error:
            print(error)
        """,
        str(tmp_path),
    )
    assert f"fused_kernels is not built: {package / '_ops.so'} is missing" in said


# ---- fork ----------------------------------------------------------------------------------------------------------

FORK = """
    import os, sys, torch, fused_kernels
    {before}
    child = os.fork()
    if child == 0:
        status = 1
        try:
            {inside}
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
"""


@cuda_only
def test_import_fork_and_cuda_in_the_child() -> None:
    inside = (
        "assert fused_kernels.global_avg_pool(torch.ones(1, 2, 700, 700, device='cuda')).flatten().tolist() == [1, 1]"
    )
    run_python(FORK.format(before="", inside=inside))


def test_cpu_op_before_a_fork() -> None:
    """As a data loader's worker does it: fork after use, and one thread in the child."""
    run_python(
        FORK.format(
            before="torch.set_num_threads(2); x = torch.ones(8, 8, 200, 200); fused_kernels.global_avg_pool(x)",
            inside="torch.set_num_threads(1); assert fused_kernels.global_avg_pool(x).eq(1).all()",
        ),
        timeout=60,
    )
