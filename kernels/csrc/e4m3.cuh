// float32, bfloat16, float16 and e4m3 (the "fn" kind: no infinity, 448 at most, NaN 0x7f), by bits.
//
// All in integers, so that no two compilers differ, but for one correctly rounded operation at a
// time: x / scale, value * scale, and small integers times a power of two. Nothing adds to a
// product, which could be fused. It takes division that is correctly rounded and subnormals that
// are not flushed: never compile this with fast math.
#pragma once
#include "common.cuh"

constexpr u32 SIGN = 0x80000000u;
constexpr u32 INFINITE = 0x7f800000u;
constexpr u32 QUIET_NAN = 0x7fc00000u;
constexpr u32 SMALLEST_NORMAL = 0x00800000u;

static __device__ __forceinline__ u32 bits_of(float value) {
  union { float value; u32 bits; } both;
  both.value = value;
  return both.bits;
}

static __device__ __forceinline__ float float_of(u32 bits) {
  union { u32 bits; float value; } both;
  both.bits = bits;
  return both.value;
}

// bits >> shift, rounded to nearest, ties to even. 1 <= shift <= 31.
static __device__ __forceinline__ u32 shifted_even(u32 bits, u32 shift) {
  return (bits + (1u << (shift - 1)) - 1 + ((bits >> shift) & 1)) >> shift;
}

// A finite magnitude in units of 2^-fraction_bits, rounded alike: what is subnormal in a narrower
// format is so many of its smallest number.
static __device__ __forceinline__ u32 in_units(u32 magnitude, u32 fraction_bits) {
  u32 shift = 150 - fraction_bits - (magnitude >> 23);
  return shift > 24 ? 0 : shifted_even((magnitude & 0x7fffffu) | SMALLEST_NORMAL, shift);
}

// What turns the largest magnitude into 448. Never subnormal: such a scale would itself have too
// few bits.
static __device__ __forceinline__ float scale_for(u32 largest) {
  if (largest == 0) return 1.0f;
  u32 bits = bits_of(float_of(largest) / 448.0f);
  return float_of(bits < SMALLEST_NORMAL ? SMALLEST_NORMAL : bits);
}

// The e4m3 number nearest to x / scale, ties to even; too large and infinite ones saturate.
static __device__ __forceinline__ u32 quantised(u32 x, float scale) {
  u32 sign = x >> 24 & 0x80u;
  if ((x & ~SIGN) > INFINITE) return sign | 0x7fu;
  u32 magnitude = bits_of(float_of(x & ~SIGN) / scale);
  if (magnitude >= 0x43e00000u) return sign | 0x7eu;                        // 448
  if (magnitude < 0x3c800000u) return sign | in_units(magnitude, 9);        // 2^-6
  return sign | (shifted_even(magnitude, 20) - (120u << 3));
}

static __device__ __forceinline__ float value_of(u32 code) {
  u32 sign = code << 24 & SIGN, exponent = code >> 3 & 15u, fraction = code & 7u;
  if (exponent) return float_of(sign | (exponent + 120u) << 23 | fraction << 20);
  return float_of(sign | bits_of((float)fraction * 0.001953125f));          // 2^-9
}

// Bits of value * scale. Every NaN is made the same but for the code's sign: which one an operation
// gives differs between processors.
static __device__ __forceinline__ u32 dequantised(u32 code, float scale) {
  u32 bits = bits_of(value_of(code) * scale);
  bool is_nan = (code & 0x7fu) == 0x7fu || (bits & ~SIGN) > INFINITE;
  return is_nan ? (code << 24 & SIGN) | QUIET_NAN : bits;
}

// The dtypes of pages. widen: to bits of the float of equal value. narrow: from a float's, to
// nearest, ties to even; too large and infinite ones saturate, a NaN keeps its upper bits.
struct BFloat16 {
  typedef u16 Word;
  static __device__ __forceinline__ u32 widen(u32 word) { return word << 16; }
  static __device__ __forceinline__ u32 narrow(u32 bits) {
    u32 sign = bits >> 16 & 0x8000u, magnitude = bits & ~SIGN;
    if (magnitude > INFINITE) return bits >> 16;
    if (magnitude > 0x7f7f0000u) return sign | 0x7f7fu;
    return sign | shifted_even(magnitude, 16);
  }
};

struct Float16 {
  typedef u16 Word;
  static __device__ __forceinline__ u32 widen(u32 word) {
    u32 sign = word << 16 & SIGN, exponent = word >> 10 & 31u, fraction = word & 0x3ffu;
    if (exponent == 31) return sign | INFINITE | fraction << 13;
    if (exponent) return sign | (exponent + 112u) << 23 | fraction << 13;
    return sign | bits_of((float)fraction * 5.9604644775390625e-8f);      // 2^-24
  }
  static __device__ __forceinline__ u32 narrow(u32 bits) {
    u32 sign = bits >> 16 & 0x8000u, magnitude = bits & ~SIGN;
    if (magnitude > INFINITE) return sign | 0x7e00u;
    if (magnitude > 0x477fe000u) return sign | 0x7bffu;                   // 65504
    if (magnitude < 0x38800000u) return sign | in_units(magnitude, 24);   // 2^-14
    return sign | (shifted_even(magnitude, 13) - (112u << 10));
  }
};

struct Float32 {
  typedef u32 Word;
  static __device__ __forceinline__ u32 widen(u32 word) { return word; }
  static __device__ __forceinline__ u32 narrow(u32 bits) {
    return (bits & ~SIGN) == INFINITE ? bits - 1 : bits;
  }
};
