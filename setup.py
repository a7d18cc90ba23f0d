"""Compiles the two binaries of fused_kernels; everything else about the package is in pyproject.toml.

fused_kernels/_ops.so   every op, on torch's stable ABI: no Python, no CUDA library; CUDA kernels if a toolkit is found
fused_kernels/_C        facts for Python (shape arithmetic, launch plans), through pybind11: no torch

Environment: FUSED_KERNELS_CUDA=0 leaves CUDA out, =1 insists on it; TORCH_CUDA_ARCH_LIST picks the architectures.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pybind11
from setuptools import Extension, setup
from torch.utils import cpp_extension

ARCHS = "7.5;8.0;8.6;8.9;9.0;10.0;12.0+PTX"
LINK_FLAGS = ["-Wl,--exclude-libs,ALL"]  # nothing of a static library (CUDA runtime, C++ library) is exported
TARGET_TORCH = "0x020a000000000000"  # the oldest torch that the binary runs under: 2.10


def sources(*patterns: str) -> list[str]:
    return sorted(str(path) for pattern in patterns for path in Path("csrc").glob(pattern))


def behind_nvcc() -> Path | None:
    """The toolkit of the nvcc on the PATH, which can be a link or a script elsewhere, so nvcc itself is asked."""
    if not (nvcc := shutil.which("nvcc")):
        return None
    said = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True, check=False)
    top = re.search(r"^#\$ TOP=(.+)$", said.stderr, re.MULTILINE)
    return Path(top[1] if top else Path(nvcc).resolve().parent.parent).resolve()


def cuda_toolkit() -> Path | None:
    """The first place that really holds a toolkit; None leaves CUDA out."""
    wanted = os.environ.get("FUSED_KERNELS_CUDA", "")
    if wanted == "0":
        return None
    named = [Path(place) for name in ("CUDA_HOME", "CUDA_PATH") if (place := os.environ.get(name))]
    for place in (*named, behind_nvcc(), Path("/usr/local/cuda")):
        if place and (place / "include/cuda_runtime.h").is_file() and (place / "bin/nvcc").is_file():
            return place
    if wanted == "1":
        raise SystemExit(
            "FUSED_KERNELS_CUDA=1, but no CUDA toolkit (include/cuda_runtime.h and bin/nvcc) in CUDA_HOME, CUDA_PATH, "
            "behind the nvcc on the PATH, or in /usr/local/cuda"
        )
    return None


def cuda_archs() -> str:
    """9.0 stands for 9.0a, the code that uses everything a device of 9.0 has; with PTX for later ones it stays 9.0."""
    archs = re.findall(r"[^; ]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "")) or ARCHS.split(";")
    return ";".join("9.0a" if arch == "9.0" and "9.0+PTX" not in archs else arch for arch in archs)


def launch_macros(cuda: Path | None) -> list[tuple[str, None]]:
    """What launch plans depend on: whether a device of 9.0 may run code that is not 9.0a's, as under a name."""
    other = re.compile(r"(?!9\.0(\+|$))\d+\.\d[a-z]?(\+PTX)?")
    plain = cuda and not all(other.fullmatch(arch) for arch in cuda_archs().split(";"))
    return [("FUSED_KERNELS_PLAIN_SM90", None)] if plain else []


def ops_extension(cuda: Path | None) -> Extension:
    macros = [("TORCH_TARGET_VERSION", TARGET_TORCH), *launch_macros(cuda)]
    # No -std: torch's BuildExtension adds the one that its headers need. No fast-math: NaN and infinity count.
    flags = {"cxx": ["-O3", "-g0", "-Wall", "-fvisibility=hidden"]}
    libraries = ["torch_cpu", "c10"]
    if cuda:
        archs = os.environ["TORCH_CUDA_ARCH_LIST"] = cuda_archs()
        macros.append(("USE_CUDA", None))
        flags["cxx"].append(f'-DFUSED_KERNELS_CUDA_ARCHS="{archs}"')
        flags["nvcc"] = ["-O3", "--threads=2", "-Xfatbin=-compress-all", "-Xcompiler=-Wall,-fvisibility=hidden"]
        libraries += ["cudart_static", "dl", "rt", "pthread"]
    extension = (cpp_extension.CUDAExtension if cuda else cpp_extension.CppExtension)(
        "fused_kernels._ops",
        sources("*.cpp", "kernels/*.cpp", *(["kernels/*.cu"] if cuda else [])),
        define_macros=macros,
        extra_compile_args=flags,
        extra_link_args=[*LINK_FLAGS, "-Wl,--no-undefined"],  # nothing is left to be found at load time
    )
    extension.sources.remove("csrc/python.cpp")
    extension.libraries = libraries  # instead of torch's choice: no shared CUDA library, no Python
    return extension


def python_extension(cuda: Path | None) -> Extension:
    return Extension(
        "fused_kernels._C",
        ["csrc/python.cpp", "csrc/kernels/geometry.cpp"],
        include_dirs=["csrc", pybind11.get_include()],
        define_macros=launch_macros(cuda),
        extra_compile_args=["-O3", "-g0", "-Wall", "-fvisibility=hidden"],
        extra_link_args=LINK_FLAGS,
        language="c++",
    )


class BuildExt(cpp_extension.BuildExtension):
    def get_ext_filename(self, name: str) -> str:
        *package, module = name.split(".")
        return os.path.join(*package, "_ops.so") if module == "_ops" else super().get_ext_filename(name)

    def build_extension(self, extension: Extension) -> None:
        if extension.name == "fused_kernels._ops":
            extension.extra_compile_args["cxx"].append(f'-DFUSED_KERNELS_VERSION="{self.distribution.get_version()}"')
        # One object folder each: both compile geometry.cpp, with different flags.
        build_temp = self.build_temp
        self.build_temp = os.path.join(build_temp, extension.name)
        # torch's ninja file can miss the headers of .cu files.
        newest = max(os.path.getmtime(path) for path in extension.depends)
        for compiled in Path(self.build_temp).rglob("*.o"):
            if compiled.stat().st_mtime < newest:
                compiled.unlink()
        super().build_extension(extension)
        self.build_temp = build_temp


cuda = cuda_toolkit()
print(f"fused_kernels: CUDA toolkit {cuda}" if cuda else "fused_kernels: CPU only")
cpp_extension.CUDA_HOME = cuda and str(cuda)
# The CUDA runtime is linked statically, so torch's own CUDA version need not match the toolkit's.
cpp_extension._check_cuda_version = lambda *_: None

extensions = [ops_extension(cuda), python_extension(cuda)]
for extension in extensions:
    extension.depends = sources("**/*.h", "**/*.cuh", "**/*.cu")  # in the sdist, too

setup(ext_modules=extensions, cmdclass={"build_ext": BuildExt})
