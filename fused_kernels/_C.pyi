from collections.abc import Sequence
from typing import Any

_Tensor = tuple[list[Any], str, str] | None  # sizes, dtype, device

class DeviceProperties:
    """The facts of a CUDA device that launch choices depend on."""

    compute_capability: int
    multiprocessors: int
    shared_memory_per_block: int
    code_capability: int
    def __init__(
        self,
        compute_capability: int = 90,
        multiprocessors: int = 132,
        shared_memory_per_block: int = 232448,
        code_capability: int | None = None,
    ) -> None: ...

class Launch:
    """One kernel launch."""

    @property
    def kernel(self) -> str: ...
    @property
    def grid(self) -> int: ...
    @property
    def block(self) -> int: ...
    @property
    def shared_memory(self) -> int: ...
    @property
    def programmatic(self) -> bool: ...

class Plan:
    """What a call would launch and move."""

    @property
    def variant(self) -> str: ...
    @property
    def launches(self) -> list[Launch]: ...
    @property
    def workspace(self) -> int: ...
    @property
    def bytes_read(self) -> int: ...
    @property
    def bytes_written(self) -> int: ...
    @property
    def operations(self) -> int: ...

def check_global_avg_pool(input: _Tensor) -> list[Any]: ...
def check_conv_transpose_global_avg_pool(
    op: str,
    logsumexp: bool,
    input: _Tensor,
    weight: _Tensor,
    bias: _Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    scale: _Tensor,
    shift: _Tensor,
) -> list[Any]: ...
def check_conv_transpose_avg_pool(
    input: _Tensor,
    weight: _Tensor,
    bias: _Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    pool_kernel_size: Sequence[int],
    pool_stride: Sequence[int],
    scale1: _Tensor,
    shift: _Tensor,
    scale2: _Tensor,
) -> list[Any]: ...
def plan_global_avg_pool(device: DeviceProperties, channels_last: bool, input: _Tensor) -> Plan: ...
def plan_conv_transpose_global_avg_pool(device: DeviceProperties, channels_last: bool, *args: Any) -> Plan: ...
def plan_conv_transpose_avg_pool(device: DeviceProperties, *args: Any) -> Plan: ...
def conv_transpose_output_size(
    input: int, kernel: int, stride: int = 1, padding: int = 0, output_padding: int = 0, dilation: int = 1
) -> int: ...
def tap_input_range(
    tap: int, input: int, kernel: int, stride: int = 1, padding: int = 0, output_padding: int = 0, dilation: int = 1
) -> tuple[int, int]: ...
def input_tap_range(
    index: int, input: int, kernel: int, stride: int = 1, padding: int = 0, output_padding: int = 0, dilation: int = 1
) -> tuple[int, int]: ...
def segment_input(
    input: int, kernel: int, stride: int = 1, padding: int = 0, output_padding: int = 0, dilation: int = 1
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]: ...
def avg_pool_taps(
    input: int,
    kernel: int,
    stride: int = 1,
    padding: int = 0,
    output_padding: int = 0,
    dilation: int = 1,
    pool_kernel: int = 2,
    pool_stride: int = 2,
) -> tuple[int, int, list[tuple[int, int, int]]]: ...
