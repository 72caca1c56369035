// CUDA C for g++: one thread of the machine runs every thread of a block in turn, each on a stack of
// its own, up to the next __syncthreads. Thread 0 always goes first, so a missing barrier shows: it
// reads what the others have not written yet, or writes over what they have not read.
#pragma once

#include <ucontext.h>

#include <cstddef>
#include <cstring>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict

typedef unsigned long long emulated_u64;

struct uint2 { unsigned int x, y; };
struct uint3 { unsigned int x, y, z; };
struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct dim3 { unsigned int x = 1, y = 1, z = 1; };

static inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
static inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) {
  return {x, y, z, w};
}

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

template <class To, class From>
static inline To emulated_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

static inline unsigned int __float_as_uint(float x) { return emulated_bits<unsigned int>(x); }
static inline float __uint_as_float(unsigned int x) { return emulated_bits<float>(x); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline emulated_u64 __umul64hi(emulated_u64 a, emulated_u64 b) {
  return (emulated_u64)(((unsigned __int128)a * b) >> 64);
}
template <class T>
static inline T __ldg(const T* from) { return *from; }

enum { EMULATED_STACK_BYTES = 64 << 10, EMULATED_MOST_ARGS = 16, EMULATED_DIVERGED = 1 };

enum class Emulated { running, waiting, done };

struct EmulatedThread {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(EMULATED_STACK_BYTES);
  Emulated state;
};

static ucontext_t emulated_block;
static EmulatedThread* emulated_current;
static void (*emulated_kernel)();
static const emulated_u64* emulated_args;
static int emulated_num_args;

static inline void __syncthreads() {
  emulated_current->state = Emulated::waiting;
  swapcontext(&emulated_current->context, &emulated_block);
}

template <std::size_t... I>
static void emulated_call(std::index_sequence<I...>) {
  typedef void (*Kernel)(decltype((void)I, emulated_u64())...);
  ((Kernel)emulated_kernel)(emulated_args[I]...);
}

template <std::size_t N>
static void emulated_call_with(int num_args) {
  if constexpr (N <= EMULATED_MOST_ARGS) {
    if (num_args == (int)N) emulated_call(std::make_index_sequence<N>());
    else emulated_call_with<N + 1>(num_args);
  }
}

static void emulated_thread() {
  emulated_call_with<0>(emulated_num_args);
  emulated_current->state = Emulated::done;
}

// Runs each thread to its next barrier or its end; how many wait at one.
static unsigned int emulated_phase(std::vector<EmulatedThread>& threads) {
  unsigned int waiting = 0;
  for (unsigned int i = 0; i < threads.size(); i++) {
    threadIdx.x = i;
    emulated_current = &threads[i];
    emulated_current->state = Emulated::running;
    swapcontext(&emulated_block, &emulated_current->context);
    waiting += emulated_current->state == Emulated::waiting;
  }
  return waiting;
}

static int emulated_run_block(std::vector<EmulatedThread>& threads) {
  for (EmulatedThread& thread : threads) {
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = thread.stack.data();
    thread.context.uc_stack.ss_size = thread.stack.size();
    thread.context.uc_link = &emulated_block;
    makecontext(&thread.context, emulated_thread, 0);
  }
  while (unsigned int waiting = emulated_phase(threads))
    if (waiting != threads.size()) return EMULATED_DIVERGED;
  return 0;
}

extern "C" int emulated_launch(
    void (*kernel)(), unsigned int grid, unsigned int block, const emulated_u64* args, int num_args) {
  static std::vector<EmulatedThread> stacks;
  stacks.resize(block);
  emulated_kernel = kernel;
  emulated_args = args;
  emulated_num_args = num_args;
  blockDim.x = block;
  gridDim.x = grid;
  for (blockIdx.x = 0; blockIdx.x < grid; blockIdx.x++)
    if (int error = emulated_run_block(stacks)) return error;
  return 0;
}
