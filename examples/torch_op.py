"""A plain call of torch.ops.fused, eager and compiled, next to what it replaces."""

import torch

import fused_kernels  # loads torch.ops.fused

device = "cuda" if torch.cuda.is_available() else "cpu"
x = torch.randn(32, 16, 64, 64, device=device)
weight, bias = torch.randn(16, 32, 4, 4, device=device), torch.randn(32, device=device)


def head(x: torch.Tensor) -> torch.Tensor:
    pooled = torch.ops.fused.conv_transpose_avg_pool(x, weight, bias, stride=2, padding=1, pool_kernel_size=2)
    return torch.relu(pooled).sum(dim=1)


with torch.inference_mode():
    expected = fused_kernels.reference.conv_transpose_avg_pool(x, weight, bias, stride=2, padding=1)
    print("difference:", (head(x) - torch.relu(expected).sum(dim=1)).abs().max().item())
    print("compiled:  ", (torch.compile(head, fullgraph=True)(x) - head(x)).abs().max().item())
    print(fused_kernels.plan("conv_transpose_avg_pool", x, weight, bias, stride=2, padding=1))
