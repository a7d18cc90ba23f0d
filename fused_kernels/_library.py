"""Loads the ops binary, ``_ops.so``, into torch."""

import ctypes
import json
import re
from pathlib import Path
from typing import Any

import torch

OLDEST_TORCH = (2, 10)  # the stable ABI that _ops.so is built for
PATH = Path(__file__).with_name("_ops.so")


def _load() -> ctypes.CDLL:
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found and (int(found[1]), int(found[2])) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        raise ImportError(f"fused_kernels needs torch {oldest} or newer, but found torch {torch.__version__}")
    if not PATH.is_file():
        raise ImportError(f"fused_kernels is not built: {PATH} is missing (install the wheel, see README.md)")
    torch.ops.load_library(PATH)
    return ctypes.CDLL(str(PATH))


_binary = _load()


def build_info() -> dict[str, Any]:
    """What the loaded ops binary says of its own build.

    Returns:
        ``version`` of fused_kernels; ``cuda``, the toolkit's version ("13.0") or None; ``architectures``, the CUDA
        architectures it holds code for, or "CPU only"; ``compiler``; ``abi_target``, the oldest torch it runs under.
    """
    function = _binary.fused_kernels_build_info
    function.restype = ctypes.c_char_p
    info: dict[str, Any] = json.loads(function())
    if info["cuda"]:
        info["cuda"] = f"{int(info['cuda']) // 1000}.{int(info['cuda']) % 1000 // 10}"
    target = int(info["abi_target"].rstrip("uUlL"), 16)
    info["abi_target"] = f"{target >> 56}.{target >> 48 & 0xFF}"
    return info


__version__: str = build_info()["version"]
