// The collapsed convolution of half types as a product of whole warpgroups (wgmma), for many channels: V (64 output
// channels, K) times inputs (K, 256 positions). A thread loads V and three warps load inputs into rings in shared memory,
// two warpgroups multiply 128 positions each. Where all of V fits, it stays there until the block comes to other channels.
// Positions of a plane lie in one line, rows one behind the other with the inputs beyond their ends, so an offset along a row
// is a shift of 16 bytes, eight channels of a position, and one along a column of a row's length. Where a row is longer than
// what a block multiplies, and along the first of three dimensions, offsets have inputs of their own.
//
// V is split into as many numbers of its type as hold it in float32's precision. Tensor cores cut off what float32 sums do
// not hold, so they make sums of few products, which are then added up: those of one group while the next is multiplied, into
// other registers. The second warpgroup is a little behind the first, so that one multiplies while the other stores.
//
// On H200, (32, 64, 128, 128) -> 64 channels, kernel 4 and stride 2, takes 165 us in float16 (151 in channels_last) and 193 in
// bfloat16, where products of single warps (implicit_gemm) take 464 and 500, and tensor cores without anything else 87 in
// float16. What that rests on, in float16:
// - Sums of one group are added up while the next is multiplied; V stays; offsets share inputs: 232 us became 224.
// - Longer runs are loaded and stored, in far fewer instructions, since three warps load: 183.
// - Where inputs lie is worked out for runs, not for each; sums are of 18 products, not of 12: 175.
// - The loaders have registers for all that is on its way: 165.
#pragma once

#include <cuda_awbarrier_primitives.h>
#include <cuda_pipeline.h>

#include "collapsed_conv.cuh"
#include "launch.cuh"
#include "wide_gemm_plan.h"

namespace fused {

// The geometry in 32-bit numbers.
struct Wide {
  WideTiling tiling;
  int jobs = 0;  // tiles of positions and channels, of all samples
  int in_group = 0, per_group = 0, tiles_of_group = 0;
  int taps[kMaxSpatialDims] = {}, begin[kMaxSpatialDims] = {};  // of the offsets
  int size[kMaxSpatialDims] = {}, out[kMaxSpatialDims] = {};
  int run = 0;                 // neighbours of a row of inputs that are one aligned vector: 4, 2 or none
  bool points = false;         // eight channels of a position are one aligned vector
  bool output_pairs = false;   // two neighbours of a row of outputs are one aligned word
  bool output_runs = false;    // four are one aligned vector
  bool output_points = false;  // four channels of an output are
  Divisor channel_tiles, jobs_of_tile, lines, planes, pitch, next_segment, runs_of_line, taps1;
};

template <class T>
inline constexpr int kWideTerms = weight_terms(sizeof(T), std::is_same_v<T, __nv_bfloat16>);
template <class T>
inline constexpr int kWideWeights = kWideTerms<T> * kWideChannels * kWideDepth;  // elements of a step

// V, (channel tiles, blocks, offsets, terms, halves of a block, 64 channels, 8 input channels), zero where there is none;
// what a sum of each output channel is multiplied by and what is added; and for each block whether it has met what may not be
// multiplied so.
template <class T>
__global__ void __launch_bounds__(kCollapseThreads)
    wide_taps(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Wide wide, T* weights,
              float2* factors, int* flags, int64_t count) {
  allow_next_launch();
  constexpr int kTerms = kWideTerms<T>, kProduct = kWideChannels * kWideDepth;
  const int taps1 = wide.taps[1], taps2 = wide.taps[2], taps = wide.taps[0] * taps1 * taps2;
  bool trusted = true;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int within = static_cast<int>(i % kProduct), row = within / 8 % kWideChannels;
    const int depth = within / (8 * kWideChannels) * 8 + within % 8;
    int64_t rest = i / kProduct;
    const int j = static_cast<int>(rest % taps);
    rest /= taps;
    const int ci = static_cast<int>(rest % wide.tiling.blocks) * kWideDepth + depth;
    const int tile = static_cast<int>(rest / wide.tiling.blocks), group = tile / wide.tiles_of_group;
    const int co = tile % wide.tiles_of_group * kWideChannels + row;
    double v = 0;
    if (co < wide.per_group) {
      if (ci < wide.in_group)
        v = collapsed_tap(conv, static_cast<int64_t>(group) * wide.in_group + ci, co,
                          {j / taps2 / taps1, j / taps2 % taps1, j % taps2});
      if (j == 0 && ci == 0) {
        const int64_t channel = static_cast<int64_t>(group) * wide.per_group + co;
        const Affine<double> affine(conv, channel);
        const double factor = affine.factor();
        factors[channel] = {static_cast<float>(factor), static_cast<float>(affine(0))};
        trusted &= isfinite(affine(0)) &&
                   ((fabs(factor) < 1e30 && fabs(factor) > 1e-30) || affine.scale1 == 0 || affine.scale2 == 0);
      }
    }
    trusted &= split_weight<kTerms>(v, weights + (i - within) * kTerms + within, kProduct);
  }
  const bool all = __syncthreads_and(trusted);
  if (threadIdx.x == 0) flags[blockIdx.x] = !all;
}

// A tile of positions and channels.
struct WideJob {
  int n, o0, first, tile, group;  // sample, plane, first position in line, channel tile
  __device__ WideJob(const Wide& wide, unsigned job) {
    // Of one tile of channels after another where its V stays, else one beside the other at the same inputs.
    unsigned part, line, plane;
    if (wide.tiling.keeps_weights())
      part = wide.jobs_of_tile.divide(job, job);
    else
      job = wide.channel_tiles.divide(job, part);
    job = wide.lines.divide(job, line);
    n = static_cast<int>(wide.planes.divide(job, plane));
    o0 = static_cast<int>(plane);
    first = static_cast<int>(line) * kWideTile;
    tile = static_cast<int>(part);
    group = tile / wide.tiles_of_group;
  }
  __device__ int first_channel(const Wide& wide) const {  // of its group
    return tile % wide.tiles_of_group * kWideChannels;
  }
};

// Which of the rings' slots are full, and which are free again; and that one consumer is as far ahead as it should be.
struct WideSignals {
  __mbarrier_t weights_full[kMaxWideWeightSlots], weights_free[kMaxWideWeightSlots];
  __mbarrier_t inputs_full[kMaxWideSlots], inputs_free[kMaxWideSlots];
  __mbarrier_t ahead;
  __device__ void init(const WideTiling& tiling) {
    constexpr int kConsumerWarps = kWideConsumers * kWarpgroup / 32;
    for (int i = 0; i < tiling.weight_slots; ++i) {
      __mbarrier_init(&weights_full[i], 1);
      __mbarrier_init(&weights_free[i], kConsumerWarps);
    }
    for (int i = 0; i < tiling.slots; ++i) {
      __mbarrier_init(&inputs_full[i], kWideLoaders);
      __mbarrier_init(&inputs_free[i], kConsumerWarps);
    }
    __mbarrier_init(&ahead, kWarpgroup / 32);
  }
  __device__ static bool reached(__mbarrier_t& barrier, unsigned use) {
    return __mbarrier_test_wait_parity(&barrier, use % 2);
  }
  __device__ static void wait(__mbarrier_t& barrier, unsigned use) {
    while (!__mbarrier_try_wait_parity(&barrier, use % 2, 1000000)) {
    }
  }
};

// Place in a ring, and how often it has been around.
struct RingPlace {
  unsigned slot = 0, turn = 0;
  __device__ void next(unsigned slots) {
    if (++slot == slots) {
      slot = 0;
      ++turn;
    }
  }
};

__device__ inline unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Copies whole vectors to shared memory by itself; `full` counts the bytes.
__device__ inline void bulk_load(void* to, const void* from, unsigned bytes, __mbarrier_t& full) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&full)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(&full))
               : "memory");
}

// A matrix in shared memory whose rows are runs of eight elements along the depth, eight rows one behind the other: where it
// begins, and from one run of a row to the next, both in 16 bytes. Its place may be added to.
__device__ inline unsigned matrix(unsigned address, unsigned next_run) { return address >> 4 | next_run << 16; }

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until all but the `kLater` last groups are there, whose sums these are not.
template <int kLater>
__device__ void wait_for_products(float (&sums)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLater) : "memory");
#pragma unroll
  for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(sums[i])::"memory");  // no use moves before the wait
}

// Moves registers from the warpgroup that loads to those that multiply.
template <int kRegisters, bool kMore>
__device__ inline void resize_registers() {
  if constexpr (kMore)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// sums (64 channels, 128 positions) = or += weights (64, 16) times inputs (16, 128). A lane of warp w holds, as sums[4i + 2h +
// e], channel 16w + lane / 4 + 8h at position 8i + 2(lane % 4) + e.
template <class T>
__device__ void multiply_wide(float (&d)[64], unsigned weights, unsigned inputs, int add) {
  constexpr uint64_t kNextRows = static_cast<uint64_t>(128 / 16) << 32;  // from eight rows to the next
#define FUSED_WIDE_PRODUCT(TYPE)                                                                                    \
  asm volatile(                                                                                                     \
      "{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE                                                  \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
      "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, "   \
      "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, "  \
      "%65, p, 1, 1, 0, 0;\n}"                                                                                      \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]), "+f"(d[8]), \
        "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]), "+f"(d[16]),      \
        "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]),     \
        "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]),     \
        "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]),     \
        "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]),     \
        "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),     \
        "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])                   \
      : "l"(weights | kNextRows), "l"(inputs | kNextRows), "r"(add))
  if constexpr (std::is_same_v<T, __half>)
    FUSED_WIDE_PRODUCT("f16");
  else
    FUSED_WIDE_PRODUCT("bf16");
#undef FUSED_WIDE_PRODUCT
}

// Where the runs of inputs of a job's line are, or single inputs, seen from its first channel; -1 for none. Where segments
// overlap, the inputs of one are those of the next, a row before.
template <class T>
__device__ void locate_inputs(const Convolution<T>& conv, const Wide& wide, const WideJob& job, int thread,
                              int* table) {
  const WideTiling& tiling = wide.tiling;
  const int step = max(wide.run, 1);
  const int stride0 = static_cast<int>(conv.input_strides[2]), stride1 = static_cast<int>(conv.input_strides[3]);
  const int stride2 = static_cast<int>(conv.input_strides[4]);
#pragma unroll 2
  for (int i = thread; i * step < tiling.line; i += kWideLoaders) {
    unsigned column, j1;
    const int segment = min(static_cast<int>(wide.next_segment.divide(i * step)), tiling.segments - 1);
    // In the plane; negative before it.
    const int point = job.first + i * step - tiling.skip - segment * tiling.next_segment;
    const int y = static_cast<int>(wide.pitch.divide(point + tiling.pitch, column)) - 1;
    const int j0 = static_cast<int>(wide.taps1.divide(segment, j1));
    const int i0 = job.o0 + wide.begin[0] + j0, i1 = y + wide.begin[1] + static_cast<int>(j1);
    const int i2 = static_cast<int>(column) + wide.begin[2];
    const bool exists = static_cast<unsigned>(i0) < static_cast<unsigned>(wide.size[0]) &&
                        static_cast<unsigned>(i1) < static_cast<unsigned>(wide.size[1]) &&
                        static_cast<unsigned>(i2) < static_cast<unsigned>(wide.size[2]);
    table[i] = exists ? i0 * stride0 + i1 * stride1 + i2 * stride2 : -1;
  }
}

// Neighbours of a row, and a pair of them.
template <int kRun>
using WideRun = std::conditional_t<kRun == 4, uint2, unsigned>;
__device__ inline unsigned pair_of(unsigned run, int) { return run; }
__device__ inline unsigned pair_of(uint2 run, int pair) { return pair == 0 ? run.x : run.y; }

// What a thread loads of a chunk: a run of eight channels.
struct WideItem {
  unsigned short half, run;  // of the blocks, and of the line
  WideItem() = default;
  __device__ WideItem(const Wide& wide, int item) {
    unsigned r;
    half = static_cast<unsigned short>(wide.runs_of_line.divide(item / 2, r) * 2 + item % 2);
    run = static_cast<unsigned short>(r);
  }
};
template <int kRun>
inline constexpr int kWideRuns = kRun > 0 ? 12 / kRun : 1;  // as many on their way as there are registers

// Channels of a chunk, (halves of blocks, line, 8 channels), the first of them `channel`; zero where there is none. `wait` is
// called before the first is written. Here runs of a row, of eight channels each: of those all exist or none where runs are of
// four. Long runs, since what limits the loaders is the number of instructions; `items` are the first that this thread loads.
template <int kRun, class T, class Wait>
__device__ void load_runs(const Convolution<T>& conv, const Wide& wide, const T* first, int channel, int halves,
                          int thread, const WideItem (&items)[kWideRuns<kRun>], const int* table, uint4* to,
                          const Wait& wait) {
  constexpr int kRuns = kWideRuns<kRun>;
  const int64_t next = conv.input_strides[1];
  const int count = halves * (wide.tiling.line / kRun), left = wide.in_group - channel;
  first += channel * next;
  WideItem now[kRuns];
#pragma unroll
  for (int a = 0; a < kRuns; ++a) now[a] = items[a];
#pragma unroll 1
  for (int i = thread; i < count; i += kRuns * kWideLoaders) {
    if (i != thread)
#pragma unroll
      for (int a = 0; a < kRuns; ++a) now[a] = WideItem(wide, i + a * kWideLoaders);
    WideRun<kRun> runs[kRuns][8];
#pragma unroll
    for (int a = 0; a < kRuns; ++a) {
      const int channels = left - now[a].half * 8;
      const int at = i + a * kWideLoaders < count && channels > 0 ? table[now[a].run] : -1;
      const T* from = first + (now[a].half * 8 * static_cast<int>(next) + at);
#pragma unroll
      for (int c = 0; c < 8; ++c, from += next) {
        runs[a][c] = {};
        if (at >= 0 && (kRun == 4 || c < channels)) runs[a][c] = __ldg(reinterpret_cast<const WideRun<kRun>*>(from));
      }
    }
    if (i == thread) wait();
#pragma unroll
    for (int a = 0; a < kRuns; ++a)
      if (i + a * kWideLoaders < count)
#pragma unroll
        for (int p = 0; p < kRun; ++p) {
          unsigned w[8];
#pragma unroll
          for (int c = 0; c < 8; ++c) w[c] = pair_of(runs[a][c], p / 2);
          const unsigned which = p % 2 == 0 ? 0x5410 : 0x7632;
          to[now[a].half * wide.tiling.half + now[a].run * kRun + p] = {
              __byte_perm(w[0], w[1], which), __byte_perm(w[2], w[3], which), __byte_perm(w[4], w[5], which),
              __byte_perm(w[6], w[7], which)};
        }
  }
}

// Copies so many of 16 bytes by itself, and clears the others.
__device__ inline void copy_or_clear(unsigned to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

// Channels side by side, or single elements.
template <class T, class Wait>
__device__ void load_points(const Convolution<T>& conv, const Wide& wide, const T* first, int channel, int halves,
                            int thread, const int* table, uint4* to, const Wait& wait) {
  wait();
  const int line = wide.tiling.line, next_half = wide.tiling.half;
  if (wide.points) {
    // Both halves of a block at once, whose channels are neighbours.
    for (int half = 0; half < halves; half += 2, channel += kWideDepth, to += 2 * next_half) {
      const T* const block = first + channel;
      const int bytes[2] = {channel < wide.in_group ? 16 : 0, channel + 8 < wide.in_group ? 16 : 0};
      const unsigned slot = shared_address(to), slot8 = slot + next_half * 16;
#pragma unroll 4
      for (int i = thread; i < line; i += kWideLoaders) {
        const int at = table[i];
        const T* const from = block + max(at, 0);
        copy_or_clear(slot + i * 16, from, at < 0 ? 0 : bytes[0]);
        copy_or_clear(slot8 + i * 16, from + 8, at < 0 ? 0 : bytes[1]);
      }
    }
    return;
  }
  const int64_t next = conv.input_strides[1];
  for (int half = 0; half < halves; ++half, channel += 8, to += next_half) {
    const T* from = first + channel * next;
#pragma unroll 4
    for (int i = thread; i < line; i += kWideLoaders) {
      const int at = table[i];
      unsigned values[8] = {};
#pragma unroll
      for (int c = 0; c < 8; ++c)
        if (at >= 0 && channel + c < wide.in_group)
          values[c] = *reinterpret_cast<const unsigned short*>(from + at + c * next);
      to[i] = {values[0] | values[1] << 16, values[2] | values[3] << 16, values[4] | values[5] << 16,
               values[6] | values[7] << 16};
    }
  }
}

// Among the loaders.
__device__ inline void synchronize_loaders() { asm volatile("bar.sync 1, %0;" ::"n"(kWideLoaders) : "memory"); }

// Chunks of inputs, (halves of blocks, line, 8 channels), one after another. Vectors are copied by themselves: the copy of the
// next chunk begins before this one's has ended.
template <int kRun, class T>
__device__ void load_inputs(const Convolution<T>& conv, const Wide& wide, int* tables, T* ring, WideSignals& signals) {
  const WideTiling& tiling = wide.tiling;
  const int thread = threadIdx.x - 32;
  RingPlace at, arrived;
  bool any = false;  // whether copies are on their way
  const auto arrive = [&] {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");  // the products read what is written here
    __mbarrier_arrive(&signals.inputs_full[arrived.slot]);
    arrived.next(tiling.slots);
  };
  WideItem items[kWideRuns<kRun>];
  if constexpr (kRun > 0)
#pragma unroll
    for (int a = 0; a < kWideRuns<kRun>; ++a) items[a] = WideItem(wide, thread + a * kWideLoaders);
  // Of two tables one may still be read while another thread makes the next job's.
  for (int i = blockIdx.x, which = 0; i < wide.jobs; i += gridDim.x, which ^= 1) {
    const WideJob job(wide, i);
    locate_inputs(conv, wide, job, thread, tables + which * tiling.line);
    synchronize_loaders();
    const T* first = conv.input + job.n * conv.input_strides[0] +
                     static_cast<int64_t>(job.group) * wide.in_group * conv.input_strides[1];
#pragma unroll 1
    for (int block = 0; block < tiling.blocks; block += tiling.depth) {
      uint4* slot = reinterpret_cast<uint4*>(ring + at.slot * tiling.slot());
      const int halves = min(tiling.depth, tiling.blocks - block) * 2;
      const int* const table = tables + which * tiling.line;
      const auto wait = [&] {
        if (at.turn == 0) return;
        // The consumers may need what is on its way before they leave a slot.
        if (kRun == 0 && any && !WideSignals::reached(signals.inputs_free[at.slot], at.turn - 1)) {
          __pipeline_wait_prior(0);
          arrive();
          any = false;
        }
        WideSignals::wait(signals.inputs_free[at.slot], at.turn - 1);
      };
      if constexpr (kRun > 0)
        load_runs<kRun>(conv, wide, first, block * kWideDepth, halves, thread, items, table, slot, wait);
      else
        load_points(conv, wide, first, block * kWideDepth, halves, thread, table, slot, wait);
      at.next(tiling.slots);
      if (kRun > 0 || !wide.points) {
        arrive();
        continue;
      }
      __pipeline_commit();
      if (any) {
        __pipeline_wait_prior(1);
        arrive();
      }
      any = true;
    }
  }
  if (any) {
    __pipeline_wait_prior(0);
    arrive();
  }
}

// Of an 8 x 8 matrix of half types, by rows of four lanes, two elements each.
__device__ inline unsigned transposed(unsigned pair) {
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %0;" : "+r"(pair));
  return pair;
}

#endif

// One output of a job as it is defined, if it exists.
template <class T>
__device__ void write_direct(const Convolution<T>& conv, const Wide& wide, const WideJob& job, int row, int position) {
  unsigned o2;
  const unsigned o1 = wide.pitch.divide(job.first + position, o2);
  const int channel = job.first_channel(wide) + row;
  if (channel >= wide.per_group || o1 >= static_cast<unsigned>(wide.out[1]) || o2 >= static_cast<unsigned>(wide.out[2]))
    return;
  const int64_t co = static_cast<int64_t>(job.group) * wide.per_group + channel;
  conv.output[job.n * conv.output_strides[0] + co * conv.output_strides[1] + job.o0 * conv.output_strides[2] +
              o1 * conv.output_strides[3] + o2 * conv.output_strides[4]] =
      direct_value_inline(conv, job.n, co, job.o0, o1, o2);  // a call would keep all threads at the same registers
}

template <class T>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_gemm(const __grid_constant__ Convolution<T> conv, const __grid_constant__ Wide wide,
              const T* __restrict__ weights, const float2* __restrict__ factors, const int* __restrict__ flags,
              int flag_count) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  constexpr int kTerms = kWideTerms<T>;
  extern __shared__ __align__(128) char memory[];
  __shared__ WideSignals signals;
  const WideTiling& tiling = wide.tiling;
  T* const weight_ring = reinterpret_cast<T*>(memory);
  const int weight_steps =
      tiling.keeps_weights() ? tiling.blocks * wide.taps[2] * tiling.segments : tiling.weight_slots * tiling.group;
  T* const input_ring = weight_ring + weight_steps * kWideWeights<T>;
  int* const tables = reinterpret_cast<int*>(input_ring + tiling.slots * tiling.slot());
  const int taps = wide.taps[2], steps = tiling.segments * taps;
  if (threadIdx.x == 0) {
    signals.init(tiling);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  wait_for_previous_launch();
  if (blockIdx.x >= wide.jobs) return;
  bool flag = false;
  for (int i = threadIdx.x; i < flag_count; i += kWideThreads) flag |= flags[i] != 0;
  if (__syncthreads_or(flag)) {
    for (int i = blockIdx.x; i < wide.jobs; i += gridDim.x) {
      const WideJob job(wide, i);
      for (int k = threadIdx.x; k < kWideChannels * kWideTile; k += kWideThreads)
        write_direct(conv, wide, job, k / kWideTile, k % kWideTile);
    }
    return;
  }

  if (threadIdx.x < kWarpgroup) {
    resize_registers<kWideLoadRegisters, false>();
    if (threadIdx.x == 0) {
      RingPlace at;
      int there = -1;  // the tile whose V stays
      for (int i = blockIdx.x; i < wide.jobs; i += gridDim.x) {
        const int tile = WideJob(wide, i).tile;
        if (tile == there) continue;
        if (tiling.keeps_weights()) there = tile;
        const T* const all = weights + static_cast<int64_t>(tile) * tiling.blocks * steps * kWideWeights<T>;
        int step = 0;  // of the job
        for (int block = 0; block < tiling.blocks; block += tiling.depth)
#pragma unroll 1
          for (int left = min(tiling.depth, tiling.blocks - block) * steps; left > 0; left -= tiling.group) {
            if (at.turn > 0) WideSignals::wait(signals.weights_free[at.slot], at.turn - 1);
            const int count = min(tiling.group, left), to = tiling.keeps_weights() ? step : at.slot * tiling.group;
            bulk_load(weight_ring + to * kWideWeights<T>, all + static_cast<int64_t>(step) * kWideWeights<T>,
                      count * kWideWeights<T> * sizeof(T), signals.weights_full[at.slot]);
            step += count;
            at.next(tiling.weight_slots);
          }
      }
    } else if (threadIdx.x >= 32) {
      if (wide.run == 4)
        load_inputs<4>(conv, wide, tables, input_ring, signals);
      else if (wide.run == 2)
        load_inputs<2>(conv, wide, tables, input_ring, signals);
      else
        load_inputs<0>(conv, wide, tables, input_ring, signals);
    }
    return;
  }

  resize_registers<kWideMultiplyRegisters, true>();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  // The compiler, too, knows it as the same in every lane.
  const int consumer = __shfl_sync(0xffffffff, threadIdx.x / kWarpgroup, 0) - 1;
  constexpr unsigned kProduct = kWideChannels * kWideDepth * sizeof(T) / 16;
  const unsigned weight_address = shared_address(weight_ring) / 16;
  const unsigned input_address = shared_address(input_ring) + (consumer * kWidePositions + tiling.skip) * 16;
  const unsigned slot_bytes = tiling.slot() * sizeof(T), next_segment = tiling.next_segment - taps;
  const unsigned next_block = 2 * tiling.half - tiling.segments * tiling.next_segment;
  // The second begins behind the first, so that it multiplies while that one stores. (By an mbarrier: where warps of the loader
  // have ended, synccheck takes a barrier of the other warps for a divergent one.)
  int lead = tiling.lead;
  if (consumer == 1) {
    WideSignals::wait(signals.ahead, 0);
    lead = 0;
  }
  RingPlace weight, input;
  for (int i = blockIdx.x; i < wide.jobs; i += gridDim.x) {
    const WideJob job(wide, i);
    const bool keep =
        tiling.keeps_weights() && i + gridDim.x < wide.jobs && WideJob(wide, i + gridDim.x).tile == job.tile;
    float totals[64] = {}, sums[2][64];
#pragma unroll
    for (int k = 0; k < 64; ++k) sums[1][k] = 0;
    unsigned x = 0;
    int block = 0, left = 0, step = 0, tap = 0, segment = 0;
    // What the products that are on their way read, and then leave free.
    __mbarrier_t *weights_read = nullptr, *inputs_read = nullptr;
    const auto add = [&](const float (&to_add)[64], __mbarrier_t* weights_free, __mbarrier_t* inputs_free) {
      if (lane == 0) {
        if (weights_free) __mbarrier_arrive(weights_free);
        if (inputs_free) __mbarrier_arrive(inputs_free);
      }
#pragma unroll
      for (int k = 0; k < 64; ++k) totals[k] += to_add[k];
    };
    // Multiplies a group, and meanwhile adds up the one before.
    const auto multiply_group = [&](float (&now)[64], float (&before)[64]) {
      if (left == 0) {
        WideSignals::wait(signals.inputs_full[input.slot], input.turn);
        x = matrix(input_address + input.slot * slot_bytes, tiling.half);
        left = min(tiling.depth, tiling.blocks - block) * steps;
        block += tiling.depth;
        tap = taps;
        segment = tiling.segments;
      }
      WideSignals::wait(signals.weights_full[weight.slot], weight.turn);
      unsigned v = matrix(0, kWideChannels) + weight_address +
                   (tiling.keeps_weights() ? step : weight.slot * tiling.group) * (kTerms * kProduct);
      const int count = min(tiling.group, left);
      left -= count;
      step += count;
      const auto multiply_step = [&](bool first) {
        begin_products();
#pragma unroll
        for (int term = kTerms - 1; term >= 0; --term)
          multiply_wide<T>(now, v + term * kProduct, x, !first || term < kTerms - 1);
        commit_products();
        v += kTerms * kProduct;
        ++x;
        if (--tap == 0) {
          tap = taps;
          x += next_segment;
          if (--segment == 0) {
            segment = tiling.segments;
            x += next_block;
          }
        }
      };
      multiply_step(true);
      wait_for_products<1>(before);
      add(before, weights_read, inputs_read);
#pragma unroll 1
      for (int k = 1; k < count; ++k) multiply_step(false);
      weights_read = keep ? nullptr : &signals.weights_free[weight.slot];
      inputs_read = left == 0 ? &signals.inputs_free[input.slot] : nullptr;
      weight.next(tiling.weight_slots);
      if (left == 0) input.next(tiling.slots);
      if (lead > 0 && --lead == 0 && lane == 0) __mbarrier_arrive(&signals.ahead);
    };
#pragma unroll 1
    for (int groups = tiling.groups;;) {
      multiply_group(sums[0], sums[1]);
      if (--groups == 0) {
        wait_for_products<0>(sums[0]);
        add(sums[0], weights_read, inputs_read);
        break;
      }
      multiply_group(sums[1], sums[0]);
      if (--groups == 0) {
        wait_for_products<0>(sums[1]);
        add(sums[1], weights_read, inputs_read);
        break;
      }
    }
    if (keep) --weight.turn;

    // A lane holds two channels at pairs of neighbours, eight positions from one to the next.
    const int row = warp * 16 + lane / 4, channels = wide.per_group - job.first_channel(wide);
    const int64_t first_co = static_cast<int64_t>(job.group) * wide.per_group + job.first_channel(wide);
    const bool exists[2] = {row < channels, row + 8 < channels};
    const float2 affine[2] = {exists[0] ? factors[first_co + row] : float2{},
                              exists[1] ? factors[first_co + row + 8] : float2{}};
    T* const tile = conv.output + job.n * conv.output_strides[0] + job.o0 * conv.output_strides[2] +
                    first_co * conv.output_strides[1];
    const int next = static_cast<int>(conv.output_strides[4]), next_row = static_cast<int>(conv.output_strides[3]);
    float check = 0;  // NaN if any value is not finite, stored or not
    struct alignas(4) Pair {
      T values[2];
      __device__ unsigned word() const { return reinterpret_cast<const unsigned&>(*this); }
    };
    const auto outputs = [&](int k, int h) {
      const float value0 = totals[4 * k + 2 * h] * affine[h].x + affine[h].y;
      const float value1 = totals[4 * k + 2 * h + 1] * affine[h].x + affine[h].y;
      check += value0 * 0 + value1 * 0;
      return Pair{from_accumulator<T>(value0), from_accumulator<T>(value1)};
    };
    // Of two lanes side by side the even one gets what both hold of `even`, the odd one of `odd`.
    const auto exchange = [&](unsigned even, unsigned odd) {
      const unsigned other = __shfl_xor_sync(0xffffffff, lane % 2 == 0 ? odd : even, 1);
      return lane % 2 == 0 ? uint2{even, other} : uint2{other, odd};
    };
    int o1, o2;
    const auto begin_at = [&](int position) {
      unsigned column;
      o1 = static_cast<int>(wide.pitch.divide(job.first + consumer * kWidePositions + position, column));
      o2 = static_cast<int>(column);
    };
    const auto advance = [&](int positions) {
      o2 += positions;
      while (o2 >= tiling.pitch) {
        o2 -= tiling.pitch;
        ++o1;
      }
    };
    if (wide.output_runs) {
      begin_at(lane % 2 * 8 + lane % 4 / 2 * 4);
      T* const to[2] = {tile + row * conv.output_strides[1], tile + (row + 8) * conv.output_strides[1]};
#pragma unroll
      for (int k = 0; k < 16; k += 2) {
        const bool use = o1 < wide.out[1] && o2 < wide.out[2];
        const int at = o1 * next_row + o2;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint2 run = exchange(outputs(k, h).word(), outputs(k + 1, h).word());
          if (use && exists[h]) *reinterpret_cast<uint2*>(to[h] + at) = run;
        }
        advance(16);
      }
    } else if (wide.output_points) {
      // After the transposition a lane holds pairs of channels at positions eight apart.
      begin_at(lane / 4);
      const int channel = warp * 16 + lane % 2 * 8 + lane % 4 / 2 * 4;
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        const uint2 point = exchange(transposed(outputs(k, 0).word()), transposed(outputs(k, 1).word()));
        if (o1 < wide.out[1] && o2 < wide.out[2] && channel < channels)
          *reinterpret_cast<uint2*>(tile + o1 * next_row + o2 * next + channel) = point;
        advance(8);
      }
    } else {
      begin_at(lane % 4 * 2);
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        const bool use = o1 < wide.out[1] && o2 < wide.out[2], both = o2 + 1 < wide.out[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Pair pair = outputs(k, h);
          T* const address = tile + (row + 8 * h) * conv.output_strides[1] + o1 * next_row + o2 * next;
          if (use && exists[h]) {
            if (wide.output_pairs) {
              *reinterpret_cast<Pair*>(address) = pair;
            } else {
              *address = pair.values[0];
              if (both) address[next] = pair.values[1];
            }
          }
        }
        advance(8);
      }
    }
    // An infinite input makes NaN of the numbers that V is split into, so what this lane has computed is looked at again, after
    // its neighbour has stored it.
    __syncwarp();
    if (isnan(check))
#pragma unroll 1
      for (int k = 0; k < 64; ++k)
        write_direct(conv, wide, job, row + k / 2 % 2 * 8,
                     consumer * kWidePositions + k / 4 * 8 + lane % 4 * 2 + k % 2);
  }
#else
  __trap();  // the plan knows better
#endif
}

}  // namespace fused
