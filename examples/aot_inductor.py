"""Exports a model with fused ops and packs it with AOTInductor; aot_inductor.cpp runs the package without Python.

python examples/aot_inductor.py model.pt2
"""

import sys

import torch

import fused_kernels


class Head(torch.nn.Module):
    """A transposed convolution with its average pool, and a global pool behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = torch.nn.ConvTranspose2d(3, 6, 3, stride=2, padding=1)
        self.pool = fused_kernels.nn.ConvTranspose2dGlobalAvgPoolLogSumExp(6, 8, 3, bias_shape=(8, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = fused_kernels.conv_transpose_avg_pool(x, self.stem.weight, self.stem.bias, stride=2, padding=1)
        return self.pool(torch.relu(y))


def main(path: str) -> None:
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, x = Head().to(device).eval(), torch.ones(4, 3, 16, 20, device=device)
    batch, height, width = (torch.export.Dim(n, min=low) for n, low in (("batch", 2), ("height", 4), ("width", 4)))
    with torch.no_grad():
        exported = torch.export.export(model, (x,), dynamic_shapes=({0: batch, 2: height, 3: width},))
        torch._inductor.aoti_compile_and_package(exported, package_path=path)
        # What aot_inductor.cpp prints for its input of ones.
        print(*(f"{value:.6f}" for value in model(torch.ones(2, 3, 9, 7, device=device)).flatten().tolist()))


if __name__ == "__main__":
    main(sys.argv[1])
