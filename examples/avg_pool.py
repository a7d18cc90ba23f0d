"""KernelBench level 2, problem 50, as ModelNew: the model's parameters, one op in place of its forward."""

import torch

import fused_kernels


class ModelNew(fused_kernels.nn.ConvTranspose3dAvgPool):
    """Model(in_channels, out_channels, kernel_size, stride, padding, scale1, scale2, bias_shape)"""


batch_size, in_channels, out_channels, depth, height, width = 128, 3, 16, 16, 32, 32
kernel_size, stride, padding, scale1, scale2, bias_shape = 3, 2, 1, 0.5, 1.0, (out_channels, 1, 1, 1)


def get_inputs() -> list[torch.Tensor]:
    return [torch.rand(batch_size, in_channels, depth, height, width)]


def get_init_inputs() -> list[object]:
    return [in_channels, out_channels, kernel_size, stride, padding, scale1, scale2, bias_shape]


if __name__ == "__main__":
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = ModelNew(*get_init_inputs()).to(device).eval()
    with torch.inference_mode():
        print(model(get_inputs()[0].to(device)).shape)
