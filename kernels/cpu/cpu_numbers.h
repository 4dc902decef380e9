// Numbers of three types in memory, as lanes of fp32: read, rounded and written, whole vectors or what there is.

#pragma once

#include "cpu_vectors.h"

enum Type : int32_t { F32, F16, BF16 };

INLINE int64_t size_of(Type type) { return type == F32 ? 4 : 2; }

// The bits of fp32 to those of bf16: nearest, ties to even; a NaN stays one.
INLINE uint32_t nearest_bf16(uint32_t bits) {
  return (bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

INLINE Float load_floats(const void* p, Type type) {
  if (type == F32) return bits_to_float(load(p));
  if (type == F16) return from_half(p);
  return bits_to_float(shift_left<16>(widen_words(p)));
}

// Values of a type as fp32: rounded to it, nearest and ties to even.
INLINE Float rounded_to(Type type, Float v) {
  if (type == F32) return v;
  if (type == F16) {
    char narrow[VECTOR_BYTES];
    to_half(narrow, v);
    return from_half(narrow);
  }
  const Int bits = float_to_bits(v);
  const Int odd = both(shift_right<16>(bits), every(1));
  return bits_to_float(both(plus(plus(bits, odd), every(0x7fff)), every(static_cast<int32_t>(0xffff0000))));
}

// The first `count` of 16 numbers; the others are 0.
inline Float load_some(const void* p, Type type, int64_t count) {
  char padded[VECTOR_BYTES] = {};
  memcpy(padded, p, count * size_of(type));
  return load_floats(padded, type);
}
INLINE Float load_floats(const void* p, Type type, int64_t count) {
  return count >= LANES ? load_floats(p, type) : load_some(p, type, count);
}

// The first `count` of 16 bytes as int32; the others are 0.
inline Int widen_bytes(const void* p, int64_t count) {
  if (count >= LANES) return widen_bytes(p);
  char padded[LANES] = {};
  memcpy(padded, p, count);
  return widen_bytes(padded);
}

INLINE void store_floats(void* p, Type type, Float v) {
  if (type == F32) {
    store(p, float_to_bits(v));
  } else if (type == F16) {
    to_half(p, v);
  } else {
#if BF16_DOT
    to_bf16s(p, v);
#else
    const Int bits = float_to_bits(v), high = shift_right<16>(bits), odd = both(high, every(1));
    const Int nearest = shift_right<16>(plus(plus(bits, odd), every(0x7fff)));
    const Int is_nan = minus(every(0x7f800000), both(bits, every(0x7fffffff)));  // in the top bit
    narrow_words(p, float_to_bits(where(is_nan, bits_to_float(either(high, every(0x40))), bits_to_float(nearest))));
#endif
  }
}

inline void store_some(void* p, Type type, Float v, int64_t count) {
  char padded[VECTOR_BYTES];
  store_floats(padded, type, v);
  memcpy(p, padded, count * size_of(type));
}
INLINE void store_floats(void* p, Type type, Float v, int64_t count) {
  count >= LANES ? store_floats(p, type, v) : store_some(p, type, v, count);
}

// One number of a type, and one of fp32 as bf16.
INLINE float load_float(const void* p, Type type) {
  float value;
  if (type == F32) {
    memcpy(&value, p, sizeof value);
    return value;
  }
  uint16_t narrow;
  memcpy(&narrow, p, sizeof narrow);
  if (type == F16) return half_to_float(narrow);
  const uint32_t bits = static_cast<uint32_t>(narrow) << 16;
  memcpy(&value, &bits, sizeof value);
  return value;
}
INLINE uint16_t to_bf16(float v) {
  uint32_t bits;
  memcpy(&bits, &v, sizeof bits);
  return static_cast<uint16_t>(nearest_bf16(bits));
}
