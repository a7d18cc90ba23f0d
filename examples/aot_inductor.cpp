// Runs a package made by aot_inductor.py. It links libtorch alone; the ops come from fused_kernels/_ops.so, which knows
// no Python.
//
//   TORCH=$(python -c 'import torch, os; print(os.path.dirname(torch.__file__))')
//   g++ -std=c++17 examples/aot_inductor.cpp -I$TORCH/include -I$TORCH/include/torch/csrc/api/include -L$TORCH/lib \
//       -Wl,-rpath,$TORCH/lib -ltorch -ltorch_cpu -lc10 -ldl -o aot_inductor
//   (for a package made on a GPU, add -Wl,--no-as-needed -ltorch_cuda)
//   ./aot_inductor $(python -c 'import fused_kernels._library as l; print(l.PATH)') model.pt2
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdio>

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: %s OPS_SO MODEL_PT2\n", argv[0]);
    return 2;
  }
  if (!dlopen(argv[1], RTLD_NOW)) {
    std::fprintf(stderr, "%s\n", dlerror());
    return 1;
  }
  c10::InferenceMode mode;
  torch::inductor::AOTIModelPackageLoader loader(argv[2]);
  const auto device = torch::cuda::is_available() ? torch::kCUDA : torch::kCPU;
  const std::vector<torch::Tensor> outputs = loader.run({torch::ones({2, 3, 9, 7}, device)});
  const torch::Tensor values = outputs[0].cpu().flatten();
  for (int64_t i = 0; i < values.numel(); ++i) std::printf("%s%.6f", i ? " " : "", values[i].item<float>());
  std::printf("\n");
}
