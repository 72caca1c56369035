// Quantise while gathering pages into chunks, dequantise while scattering them back.
//
// How a chunk is packed is said in fp8.py, what is computed in e4m3.cuh; cpu_fp8.py does the same,
// to the last bit.
#include "e4m3.cuh"

// One per plane, as cuda_fp8.py packs it. Strides are in bytes.
struct Plane {
  u64 address;  // of page 0
  u64 page_stride, token_stride, head_stride;
  u64 tokens, heads, head_dim;
  u64 payload;  // where in a chunk its elements start
  u64 scales;   // where in a chunk its scales start, one for each head
};

constexpr u32 GROUP = 8;  // elements that a thread loads, converts and stores at once
constexpr u32 MOST_THREADS = 512;

// A thread's way through outer * middle * inner places, all threads of the block side by side. The
// step is divided into the three once, then carried.
struct Walk {
  u32 num_inner, num_middle;
  u32 inner, middle, outer;
  u32 inner_step, middle_step, outer_step;

  __device__ __forceinline__ Walk(u32 num_inner, u32 num_middle)
      : num_inner(num_inner),
        num_middle(num_middle),
        inner(threadIdx.x % num_inner),
        middle(threadIdx.x / num_inner % num_middle),
        outer(threadIdx.x / num_inner / num_middle),
        inner_step(blockDim.x % num_inner),
        middle_step(blockDim.x / num_inner % num_middle),
        outer_step(blockDim.x / num_inner / num_middle) {}

  __device__ __forceinline__ void next() {
    inner += inner_step;
    middle += middle_step;
    outer += outer_step;
    if (inner >= num_inner) inner -= num_inner, middle++;
    if (middle >= num_middle) middle -= num_middle, outer++;
  }
};

static __device__ __forceinline__ u32 groups_of(const Plane& plane) {
  return ((u32)plane.head_dim + GROUP - 1) / GROUP;
}

// Elements of a group: the last one of a head may be short.
static __device__ __forceinline__ u32 count_of(const Plane& plane, u32 group) {
  u32 left = (u32)plane.head_dim - group * GROUP;
  return left < GROUP ? left : GROUP;
}

template <class Dtype>
static __device__ __forceinline__ u8* in_pages(
    const Plane& plane, u64 page, u32 token, u32 head, u32 group) {
  return (u8*)(plane.address + page * plane.page_stride + token * plane.token_stride
      + head * plane.head_stride + group * GROUP * sizeof(typename Dtype::Word));
}

static __device__ __forceinline__ u8* in_chunk(
    u8* chunk, const Plane& plane, u64 place, u32 token, u32 head, u32 group) {
  u64 part = (place * plane.tokens + token) * plane.heads + head;
  return chunk + plane.payload + part * plane.head_dim + group * GROUP;
}

static __device__ __forceinline__ bool is_aligned(const void* at, u64 size) {
  return ((u64)at & (size - 1)) == 0;
}

// Bits, as floats, of `count` elements, then zeros.
template <class Dtype>
static __device__ __forceinline__ void load(const u8* from, u32 count, u32* bits) {
  typedef typename Dtype::Word Word;
  union { uint4 vectors[sizeof(Word) / 2]; Word words[GROUP]; } group;
  if (count == GROUP && is_aligned(from, 16)) {
#pragma unroll
    for (u32 k = 0; k < sizeof(Word) / 2; k++) group.vectors[k] = ((const uint4*)from)[k];
  } else {
#pragma unroll
    for (u32 k = 0; k < GROUP; k++) group.words[k] = k < count ? ((const Word*)from)[k] : 0;
  }
#pragma unroll
  for (u32 k = 0; k < GROUP; k++) bits[k] = Dtype::widen(group.words[k]);
}

template <class Dtype>
static __device__ __forceinline__ void store(u8* to, u32 count, const u32* bits) {
  typedef typename Dtype::Word Word;
  union { uint4 vectors[sizeof(Word) / 2]; Word words[GROUP]; } group;
#pragma unroll
  for (u32 k = 0; k < GROUP; k++) group.words[k] = (Word)Dtype::narrow(bits[k]);
  if (count == GROUP && is_aligned(to, 16)) {
#pragma unroll
    for (u32 k = 0; k < sizeof(Word) / 2; k++) ((uint4*)to)[k] = group.vectors[k];
    return;
  }
#pragma unroll
  for (u32 k = 0; k < GROUP; k++) if (k < count) ((Word*)to)[k] = group.words[k];
}

// The first element's code is the lowest byte.
static __device__ __forceinline__ u64 load_codes(const u8* from, u32 count) {
  if (count == GROUP && is_aligned(from, 8)) return *(const u64*)from;
  u64 codes = 0;
#pragma unroll
  for (u32 k = 0; k < GROUP; k++) if (k < count) codes |= (u64)from[k] << 8 * k;
  return codes;
}

static __device__ __forceinline__ void store_codes(u8* to, u32 count, u64 codes) {
  if (count == GROUP && is_aligned(to, 8)) {
    *(u64*)to = codes;
    return;
  }
#pragma unroll
  for (u32 k = 0; k < GROUP; k++) if (k < count) to[k] = (u8)(codes >> 8 * k);
}

// The largest of all threads' values, for every thread. The block is a power of two wide.
static __device__ __forceinline__ u32 largest_of_block(u32 mine) {
  __shared__ u32 largest[MOST_THREADS];
  largest[threadIdx.x] = mine;
  for (u32 half = blockDim.x / 2; half > 1; half /= 2) {
    __syncthreads();  // the lower half reads what the upper half wrote in the step before
    if (threadIdx.x < half && largest[threadIdx.x + half] > largest[threadIdx.x])
      largest[threadIdx.x] = largest[threadIdx.x + half];
  }
  __syncthreads();  // every thread compares the last two
  u32 first = largest[0], last = largest[blockDim.x > 1 ? 1 : 0];
  return first > last ? first : last;
}

// words: `num_planes` planes, `num_pages` page numbers, then the row of `chunks` of each chunk, which
// has the next `pages_per_chunk` of the pages. A block per chunk, plane and head.
template <class Dtype>
static __device__ __forceinline__ void gather_fp8(
    const u64* words, u32 num_planes, u64 num_pages, u32 most_heads, u32 pages_per_chunk, u8* chunks,
    u64 chunk_stride, u64 payload_bytes, u64 payload_end) {
  const Plane* planes = (const Plane*)words;
  const u64* pages = (const u64*)(planes + num_planes);
  const u64* rows = pages + num_pages;
  u32 head = blockIdx.x % most_heads, number = blockIdx.x / most_heads % num_planes;
  u32 row = blockIdx.x / most_heads / num_planes;
  Plane plane = planes[number];
  if (head >= plane.heads) return;

  pages += (u64)row * pages_per_chunk;
  u8* chunk = chunks + rows[row] * chunk_stride;
  u32 groups = groups_of(plane), tokens = (u32)plane.tokens;
  u32 bits[GROUP];

  u32 largest = 0;
  for (Walk at(groups, tokens); at.outer < pages_per_chunk; at.next()) {
    const u8* from = in_pages<Dtype>(plane, pages[at.outer], at.middle, head, at.inner);
    load<Dtype>(from, count_of(plane, at.inner), bits);
#pragma unroll
    for (u32 k = 0; k < GROUP; k++) {
      u32 magnitude = bits[k] & ~SIGN;
      if (magnitude < INFINITE && magnitude > largest) largest = magnitude;
    }
  }
  float scale = scale_for(largest_of_block(largest));

  for (Walk at(groups, tokens); at.outer < pages_per_chunk; at.next()) {
    u32 count = count_of(plane, at.inner);
    load<Dtype>(in_pages<Dtype>(plane, pages[at.outer], at.middle, head, at.inner), count, bits);
    u64 codes = 0;
#pragma unroll
    for (u32 k = 0; k < GROUP; k++) codes |= (u64)quantised(bits[k], scale) << 8 * k;
    store_codes(in_chunk(chunk, plane, at.outer, at.middle, head, at.inner), count, codes);
  }
  if (threadIdx.x == 0) ((float*)(chunk + plane.scales))[head] = scale;
  // One block of each chunk clears what is neither payload nor scales: equal KV, equal chunks.
  if (number == 0 && head == 0)
    for (u64 at = payload_bytes + threadIdx.x; at < payload_end; at += blockDim.x) chunk[at] = 0;
}

// words: planes, page numbers, then the row of `chunks` and the place in that chunk of each page.
// A block per page and plane.
template <class Dtype>
static __device__ __forceinline__ void scatter_fp8(
    const u64* words, u32 num_planes, u64 num_pages, u8* chunks, u64 chunk_stride) {
  const Plane* planes = (const Plane*)words;
  const u64* pages = (const u64*)(planes + num_planes);
  const u64 *rows = pages + num_pages, *places = rows + num_pages;
  Plane plane = planes[blockIdx.x % num_planes];
  u32 i = blockIdx.x / num_planes;
  u64 page = pages[i], place = places[i];
  u8* chunk = chunks + rows[i] * chunk_stride;
  const float* scales = (const float*)(chunk + plane.scales);
  u32 heads = (u32)plane.heads, tokens = (u32)plane.tokens;
  u32 bits[GROUP];

  for (Walk at(groups_of(plane), heads); at.outer < tokens; at.next()) {
    u32 token = at.outer, head = at.middle, group = at.inner, count = count_of(plane, group);
    u64 codes = load_codes(in_chunk(chunk, plane, place, token, head, group), count);
    float scale = scales[head];
#pragma unroll
    for (u32 k = 0; k < GROUP; k++) bits[k] = dequantised((u32)(codes >> 8 * k) & 0xff, scale);
    store<Dtype>(in_pages<Dtype>(plane, page, token, head, group), count, bits);
  }
}

#define KERNELS(name, Dtype)                                                                       \
  extern "C" __global__ void gather_fp8_##name(                                                    \
      const u64* words, u64 num_planes, u64 num_pages, u64 most_heads, u64 pages_per_chunk,        \
      u8* chunks, u64 chunk_stride, u64 payload_bytes, u64 payload_end) {                          \
    gather_fp8<Dtype>(                                                                             \
        words, (u32)num_planes, num_pages, (u32)most_heads, (u32)pages_per_chunk, chunks,          \
        chunk_stride, payload_bytes, payload_end);                                                 \
  }                                                                                                \
  extern "C" __global__ void scatter_fp8_##name(                                                   \
      const u64* words, u64 num_planes, u64 num_pages, u8* chunks, u64 chunk_stride) {             \
    scatter_fp8<Dtype>(words, (u32)num_planes, num_pages, chunks, chunk_stride);                   \
  }

KERNELS(bfloat16, BFloat16)
KERNELS(float16, Float16)
KERNELS(float32, Float32)
