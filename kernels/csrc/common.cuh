// What every kernel here builds on: 64-bit words, and a copy of bytes by a few threads.
// Nothing is included: NVRTC, nvcc and a host compiler must all take these files as they are.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Most numbers are short, and 64 bits are several times as slow to divide.
static __device__ __forceinline__ u64 divided(u64 a, u64 b) {
  return (a | b) >> 32 ? a / b : (u32)a / (u32)b;
}

// Copies words whole where target and source are aligned, bytes before and behind them, as thread
// `lane` of `lanes`. Target and source are misaligned by the same number of bytes.
template <class Word>
static __device__ __forceinline__ void copy_words(u8* to, const u8* from, u64 bytes, u64 lane, u64 lanes) {
  u64 head = (0 - (u64)to) & (sizeof(Word) - 1);
  if (head > bytes) head = bytes;
  u64 words = (bytes - head) / sizeof(Word);
  for (u64 i = lane; i < head; i += lanes) to[i] = from[i];
  for (u64 i = head + words * sizeof(Word) + lane; i < bytes; i += lanes) to[i] = from[i];

  Word* target = (Word*)(to + head);
  const Word* source = (const Word*)(from + head);
  u64 i = lane;
  for (; i + 3 * lanes < words; i += 4 * lanes) {  // all loads are under way before the first store
    Word a = source[i], b = source[i + lanes], c = source[i + 2 * lanes], d = source[i + 3 * lanes];
    target[i] = a;
    target[i + lanes] = b;
    target[i + 2 * lanes] = c;
    target[i + 3 * lanes] = d;
  }
  for (; i < words; i += lanes) target[i] = source[i];
}

// `bytes` from any address to any other, in the widest words that fit both.
static __device__ __forceinline__ void copy_bytes(u8* to, const u8* from, u64 bytes, u64 lane, u64 lanes) {
  u64 apart = (u64)to ^ (u64)from;
  if (!(apart & 15)) copy_words<uint4>(to, from, bytes, lane, lanes);
  else if (!(apart & 7)) copy_words<u64>(to, from, bytes, lane, lanes);
  else if (!(apart & 3)) copy_words<u32>(to, from, bytes, lane, lanes);
  else if (!(apart & 1)) copy_words<u16>(to, from, bytes, lane, lanes);
  else copy_words<u8>(to, from, bytes, lane, lanes);
}
