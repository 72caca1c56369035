// XXH3-128 of rows of equal length, seed 0, as in doc/xxhash_spec.md of github.com/Cyan4973/xxHash.
//
// The hash of a long input mixes stripes of 64 bytes into 8 accumulators, and scrambles these after
// each block of 16 stripes. What stripes add does not depend on the accumulators:
//
//     xxh3_sums   what each block adds; all blocks at once
//     xxh3_fold   add, scramble, add, scramble, ... in order, then the digest
//
// What follows the last whole block, and the last 64 bytes once more, add up to one more sum, which
// no scramble follows.
#include "common.cuh"

constexpr u32 BLOCK_BYTES = 1024;
constexpr u32 STRIPE_BYTES = 64;
constexpr u32 STRIPES = BLOCK_BYTES / STRIPE_BYTES;
constexpr u32 LANES = 8;            // accumulators
constexpr u32 SUMMERS = LANES / 2;  // threads to a sum; each has two accumulators, which mix
constexpr u32 AHEAD = 16;           // sums under way while as many are folded

constexpr u64 PRIME32_1 = 0x9e3779b1u;
constexpr u64 PRIME64_1 = 0x9e3779b185ebca87u;
constexpr u64 PRIME64_2 = 0xc2b2ae3d27d4eb4fu;

__device__ const u64 START[LANES] = {
  0x00000000c2b2ae3du, 0x9e3779b185ebca87u, 0xc2b2ae3d27d4eb4fu, 0x165667b19e3779f9u,
  0x85ebca77c2b2ae63u, 0x0000000085ebca77u, 0x27d4eb2f165667c5u, 0x000000009e3779b1u,
};

// The default secret, 192 bytes.
__device__ const u64 SECRET[24] = {
  0xbe4ba423396cfeb8u, 0x1cad21f72c81017cu, 0xdb979083e96dd4deu, 0x1f67b3b7a4a44072u,
  0x78e5c0cc4ee679cbu, 0x2172ffcc7dd05a82u, 0x8e2443f7744608b8u, 0x4c263a81e69035e0u,
  0xcb00c391bb52283cu, 0xa32e531b8b65d088u, 0x4ef90da297486471u, 0xd8acdea946ef1938u,
  0x3f349ce33f76faa8u, 0x1d4f0bc7c7bbdcf9u, 0x3159b4cd4be0518au, 0x647378d9c97e9fc8u,
  0xc3ebd33483acc5eau, 0xeb6313faffa081c5u, 0x49daf0b751dd0d17u, 0x9e68d429265516d3u,
  0xfca1477d58be162bu, 0xce31d07ad1b8f88fu, 0x280416958f3acb45u, 0x7e404bbbcafbd7afu,
};

// Bytes of the secret from `offset` on, which need not be a multiple of 8.
static __device__ __forceinline__ u64 secret_at(u32 offset) {
  u32 shift = offset % 8 * 8;
  u64 low = SECRET[offset / 8];
  return shift ? low >> shift | SECRET[offset / 8 + 1] << (64 - shift) : low;
}

struct Pair {
  u64 even, odd;
};

template <bool ALIGNED>
static __device__ __forceinline__ Pair read(const u8* from) {
  if (ALIGNED) {
    uint4 word = *(const uint4*)from;
    return {word.x | (u64)word.y << 32, word.z | (u64)word.w << 32};
  }
  Pair pair = {0, 0};
  for (u32 k = 0; k < 8; k++) {
    pair.even |= (u64)from[k] << 8 * k;
    pair.odd |= (u64)from[k + 8] << 8 * k;
  }
  return pair;
}

// Each accumulator gets the product of its own word's halves, and its neighbour's word.
static __device__ __forceinline__ void add(Pair& sum, Pair data, u64 even_key, u64 odd_key) {
  u64 even = data.even ^ even_key, odd = data.odd ^ odd_key;
  sum.even += (even & 0xffffffffu) * (even >> 32) + data.odd;
  sum.odd += (odd & 0xffffffffu) * (odd >> 32) + data.even;
}

template <bool ALIGNED>
static __device__ __forceinline__ Pair sum_of_block(const u8* block, u32 summer) {
  Pair sum = {0, 0};
#pragma unroll (ALIGNED ? STRIPES : 1)
  for (u32 s = 0; s < STRIPES; s++) {
    Pair data = read<ALIGNED>(block + s * STRIPE_BYTES + summer * sizeof(Pair));
    add(sum, data, SECRET[s + 2 * summer], SECRET[s + 2 * summer + 1]);
  }
  return sum;
}

// block: what follows the last whole one, up to `end`; 1 to 1024 bytes.
static __device__ __forceinline__ Pair sum_of_rest(const u8* block, const u8* end, u32 summer) {
  Pair sum = {0, 0};
  u32 stripes = (u32)(end - block - 1) / STRIPE_BYTES, at = summer * sizeof(Pair);
  for (u32 s = 0; s < stripes; s++)
    add(
        sum, read<false>(block + s * STRIPE_BYTES + at), SECRET[s + 2 * summer],
        SECRET[s + 2 * summer + 1]);
  add(sum, read<false>(end - STRIPE_BYTES + at), secret_at(121 + at), secret_at(129 + at));
  return sum;
}

// sums: (num_rows, num_blocks + 1, LANES), the last of a row of what follows its whole blocks. So
// many blocks of threads work on a row that SUMMERS threads have one sum to find.
extern "C" __global__ void xxh3_sums(
    const u8* rows, u64 row_stride, u64 row_bytes, u64* sums, u64 blocks_per_row) {
  u64 num_blocks = (row_bytes - 1) / BLOCK_BYTES;
  u32 row = blockIdx.x / (u32)blocks_per_row, part = blockIdx.x % (u32)blocks_per_row;
  u64 index = (u64)part * (blockDim.x / SUMMERS) + threadIdx.x / SUMMERS;
  u32 summer = threadIdx.x % SUMMERS;
  if (index > num_blocks) return;

  const u8* start = rows + row * row_stride;
  const u8* block = start + index * BLOCK_BYTES;
  Pair sum;
  if (index == num_blocks) sum = sum_of_rest(block, start + row_bytes, summer);
  else if ((u64)block & 15) sum = sum_of_block<false>(block, summer);
  else sum = sum_of_block<true>(block, summer);
  u64* to = sums + (row * (num_blocks + 1) + index) * LANES + 2 * summer;
  to[0] = sum.even;
  to[1] = sum.odd;
}

static __device__ __forceinline__ u64 scrambled(u64 lane, u64 key) {
  return (lane ^ lane >> 47 ^ key) * PRIME32_1;
}

// Of one accumulator: sums[0], sums[LANES], ... are what the blocks add, and what follows them. The
// chain of scrambles sets the time if no step waits for memory: the next AHEAD sums are asked for
// before these are folded, also where they are no longer of this row and go unused.
static __device__ __forceinline__ u64 folded(const u64* sums, u64 num_blocks, u64 lane, u64 key) {
  u64 these[AHEAD], next[AHEAD], left = num_blocks;
#pragma unroll
  for (u32 k = 0; k < AHEAD; k++) these[k] = sums[k * LANES];
  for (; left >= AHEAD; left -= AHEAD) {
    sums += AHEAD * LANES;
#pragma unroll
    for (u32 k = 0; k < AHEAD; k++) next[k] = sums[k * LANES];
#pragma unroll
    for (u32 k = 0; k < AHEAD; k++) lane = scrambled(lane + these[k], key);
#pragma unroll
    for (u32 k = 0; k < AHEAD; k++) these[k] = next[k];
  }
#pragma unroll
  for (u32 k = 0; k < AHEAD; k++)
    if (k < left) lane = scrambled(lane + these[k], key);
  return lane + sums[left * LANES];
}

// Upper and lower half of a product of 128 bits, xored.
static __device__ __forceinline__ u64 product_folded(u64 a, u64 b) {
  u64 a_low = a & 0xffffffffu, a_high = a >> 32, b_low = b & 0xffffffffu, b_high = b >> 32;
  u64 low = a_low * b_low, cross = a_high * b_low + (low >> 32);
  u64 middle = a_low * b_high + (cross & 0xffffffffu);
  u64 high = a_high * b_high + (cross >> 32) + (middle >> 32);
  return (middle << 32 | (low & 0xffffffffu)) ^ high;
}

static __device__ __forceinline__ u64 merged(const u64* lanes, u32 secret_offset, u64 start) {
  u64 hash = start;
  for (u32 k = 0; k < LANES; k += 2) {
    u64 key = secret_at(secret_offset + 8 * k), next_key = secret_at(secret_offset + 8 * k + 8);
    hash += product_folded(lanes[k] ^ key, lanes[k + 1] ^ next_key);
  }
  hash = (hash ^ hash >> 37) * 0x165667919e3779f9u;
  return hash ^ hash >> 32;
}

// sums: and room for AHEAD more. digests: (num_rows, 16), the upper half first, each from its highest
// byte on. A warp per row.
extern "C" __global__ void xxh3_fold(const u64* sums, u64 row_bytes, u8* digests) {
  __shared__ u64 lanes[LANES];
  u64 num_blocks = (row_bytes - 1) / BLOCK_BYTES;
  u32 i = threadIdx.x;
  if (i < LANES) {
    const u64* own = sums + blockIdx.x * (num_blocks + 1) * LANES + i;
    lanes[i] = folded(own, num_blocks, START[i], SECRET[16 + i]);
  }
  __syncthreads();  // merging takes every lane
  if (i >= 2) return;
  u64 half = i == 0 ? merged(lanes, 117, ~(row_bytes * PRIME64_2))
                    : merged(lanes, 11, row_bytes * PRIME64_1);
  for (u32 k = 0; k < 8; k++) digests[blockIdx.x * 16 + i * 8 + k] = (u8)(half >> (56 - 8 * k));
}
