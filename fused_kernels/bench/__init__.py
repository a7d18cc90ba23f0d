"""Benchmark of the fused ops against PyTorch and against the memory limit: ``python -m fused_kernels.bench --help``."""
