// What the ops binary says of its own build. A plain C symbol, so that it can be asked without torch.
#include <torch/csrc/stable/version.h>

#ifdef USE_CUDA
#include <cuda_runtime.h>
#endif

#define FUSED_TEXT_(x) #x
#define FUSED_TEXT(x) FUSED_TEXT_(x)

#ifndef FUSED_KERNELS_VERSION
#error "setup.py defines FUSED_KERNELS_VERSION"
#endif

#if defined(__clang__)
#define FUSED_COMPILER "clang " __clang_version__
#else
#define FUSED_COMPILER "g++ " __VERSION__
#endif

#ifdef USE_CUDA
#define FUSED_CUDA "\"" FUSED_TEXT(CUDART_VERSION) "\""
#define FUSED_ARCHS FUSED_KERNELS_CUDA_ARCHS
#else
#define FUSED_CUDA "null"
#define FUSED_ARCHS "CPU only"
#endif

// JSON; cuda is CUDART_VERSION (1000 * major + 10 * minor) or null, abi_target is TORCH_TARGET_VERSION.
extern "C" __attribute__((visibility("default"))) const char* fused_kernels_build_info() {
  return "{\"version\": \"" FUSED_KERNELS_VERSION "\", \"cuda\": " FUSED_CUDA ", \"architectures\": \"" FUSED_ARCHS
         "\", \"compiler\": \"" FUSED_COMPILER "\", \"abi_target\": \"" FUSED_TEXT(TORCH_TARGET_VERSION) "\"}";
}
