// The lanes of cpu_vectors.h in four registers of NEON, from which dot products of bytes (dotprod) and of pairs of bf16 are
// added up where the processor has them.
//
// Sums, minima and maxima of lanes are taken in AVX2's order, and a comparison with what is no number chooses as there.

#pragma once

#include <arm_neon.h>

#include "cpu_vectors.h"

struct Float {
  float32x4_t a, b, c, d;
};
struct Int {
  int32x4_t a, b, c, d;
};

INLINE uint32x4_t u32(int32x4_t v) { return vreinterpretq_u32_s32(v); }
INLINE uint16x8_t u16(int32x4_t v) { return vreinterpretq_u16_s32(v); }
INLINE uint8x16_t u8(int32x4_t v) { return vreinterpretq_u8_s32(v); }
INLINE int8x16_t s8(int32x4_t v) { return vreinterpretq_s8_s32(v); }
INLINE int32x4_t s32(uint32x4_t v) { return vreinterpretq_s32_u32(v); }
INLINE int32x4_t s32(uint16x8_t v) { return vreinterpretq_s32_u16(v); }
INLINE int32x4_t s32(uint8x16_t v) { return vreinterpretq_s32_u8(v); }

// A function of vectors from one of their quarters.
#define OF_ONE(Result, name, Given, quarter) \
  INLINE Result name(Given x) { return {quarter(x.a), quarter(x.b), quarter(x.c), quarter(x.d)}; }
#define OF_TWO(Result, name, Given, quarter) \
  INLINE Result name(Given x, Given y) {     \
    return {quarter(x.a, y.a), quarter(x.b, y.b), quarter(x.c, y.c), quarter(x.d, y.d)}; \
  }

INLINE void fetch(const void* p) { __builtin_prefetch(p, 0, 3); }
INLINE void fetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }

INLINE Int load(const void* p) {
  const int32_t* q = static_cast<const int32_t*>(p);
  return {vld1q_s32(q), vld1q_s32(q + 4), vld1q_s32(q + 8), vld1q_s32(q + 12)};
}
INLINE void store(void* p, Int v) {
  int32_t* q = static_cast<int32_t*>(p);
  vst1q_s32(q, v.a), vst1q_s32(q + 4, v.b), vst1q_s32(q + 8, v.c), vst1q_s32(q + 12, v.d);
}
INLINE Int every(int32x4_t v) { return {v, v, v, v}; }
INLINE Int every(int32_t v) { return every(vdupq_n_s32(v)); }
INLINE Int every_at(const int32_t* p) { return every(vld1q_dup_s32(p)); }
INLINE Float every(float v) {
  const float32x4_t four = vdupq_n_f32(v);
  return {four, four, four, four};
}
INLINE Int lanes() {
  const int32x4_t first = {0, 1, 2, 3};
  return {first, first + 4, first + 8, first + 12};
}
OF_TWO(Int, both, Int, vandq_s32)
OF_TWO(Int, differ, Int, veorq_s32)
OF_TWO(Int, either, Int, vorrq_s32)
OF_TWO(Int, plus, Int, vaddq_s32)
OF_TWO(Int, minus, Int, vsubq_s32)
OF_TWO(Int, times, Int, vmulq_s32)
template <int BITS>
INLINE int32x4_t shift_right(int32x4_t v) {
  if constexpr (BITS == 0) return v;
  return s32(vshrq_n_u32(u32(v), BITS == 0 ? 1 : BITS));
}
template <int BITS>
INLINE Int shift_right(Int v) {
  return {shift_right<BITS>(v.a), shift_right<BITS>(v.b), shift_right<BITS>(v.c), shift_right<BITS>(v.d)};
}
template <int BITS>
INLINE Int shift_left(Int v) {
  return {vshlq_n_s32(v.a, BITS), vshlq_n_s32(v.b, BITS), vshlq_n_s32(v.c, BITS), vshlq_n_s32(v.d, BITS)};
}
INLINE int32x4_t shifted(int32x4_t v, int32x4_t left) { return s32(vshlq_u32(u32(v), left)); }
OF_TWO(Int, shifted, Int, shifted)
INLINE Int shift_left(Int v, int bits) { return shifted(v, every(bits)); }
INLINE Int shift_right(Int v, int bits) { return shifted(v, every(-bits)); }
INLINE Int shift_right(Int v, Int bits) { return shifted(v, minus(every(0), bits)); }

using Order = uint8x16_t;
template <int... AT>
INLINE Order order() {
  return Order{AT...};
}
INLINE Int within_lanes(Int v, Order order) {
  return {s32(vqtbl1q_u8(u8(v.a), order)), s32(vqtbl1q_u8(u8(v.b), order)), s32(vqtbl1q_u8(u8(v.c), order)),
          s32(vqtbl1q_u8(u8(v.d), order))};
}
INLINE Int only(int32_t first, int32_t second) {
  const int32x4_t none = vdupq_n_s32(0);
  return {vsetq_lane_s32(second, vsetq_lane_s32(first, none, 0), 2), none, none, none};
}
INLINE Float halves(float x, float y) {
  const float32x4_t four = vcombine_f32(vdup_n_f32(x), vdup_n_f32(y));
  return {four, four, four, four};
}
INLINE int32_t sum(Int v) { return vaddvq_s32(vaddq_s32(vaddq_s32(v.a, v.b), vaddq_s32(v.c, v.d))); }

INLINE float32x4_t least(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE float32x4_t largest(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE int32x4_t greater(float32x4_t x, float32x4_t y) { return s32(vcgtq_f32(x, y)); }
OF_TWO(Float, plus, Float, vaddq_f32)
OF_TWO(Float, minus, Float, vsubq_f32)
OF_TWO(Float, times, Float, vmulq_f32)
OF_TWO(Float, over, Float, vdivq_f32)
OF_TWO(Float, least, Float, least)
OF_TWO(Float, largest, Float, largest)
OF_TWO(Int, greater, Float, greater)
OF_ONE(Float, rounded, Float, vrndnq_f32)
INLINE Float fma(Float x, Float y, Float z) {
  return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b), vfmaq_f32(z.c, x.c, y.c), vfmaq_f32(z.d, x.d, y.d)};
}
#define REDUCE(name, four, two)                                                    \
  INLINE float name(Float v) {                                                     \
    const float32x4_t quarter = four(four(v.a, v.c), four(v.b, v.d));              \
    const float32x4_t eighth = four(quarter, vextq_f32(quarter, quarter, 2));      \
    return vgetq_lane_f32(four(eighth, vextq_f32(eighth, eighth, 1)), 0);          \
  }
REDUCE(sum, vaddq_f32, vadd_f32)
REDUCE(least, least, least)
REDUCE(largest, largest, largest)
#undef REDUCE

OF_ONE(Float, to_float, Int, vcvtq_f32_s32)
OF_ONE(Int, to_int, Float, vcvtnq_s32_f32)
OF_ONE(Float, bits_to_float, Int, vreinterpretq_f32_s32)
OF_ONE(Int, float_to_bits, Float, vreinterpretq_s32_f32)

INLINE uint16x8_t narrow_words(int32x4_t x, int32x4_t y) { return vuzp1q_u16(u16(x), u16(y)); }
INLINE void narrow_words(void* p, Int v) {
  uint16_t* q = static_cast<uint16_t*>(p);
  vst1q_u16(q, narrow_words(v.a, v.b)), vst1q_u16(q + 8, narrow_words(v.c, v.d));
}
INLINE void store_bytes(void* p, Int v) {
  const uint8x16_t low = vreinterpretq_u8_u16(narrow_words(v.a, v.b)), high = vreinterpretq_u8_u16(narrow_words(v.c, v.d));
  vst1q_u8(static_cast<uint8_t*>(p), vuzp1q_u8(low, high));
}
INLINE Int widen(uint16x8_t low, uint16x8_t high) {
  return {s32(vmovl_u16(vget_low_u16(low))), s32(vmovl_high_u16(low)), s32(vmovl_u16(vget_low_u16(high))),
          s32(vmovl_high_u16(high))};
}
INLINE Int widen_words(const void* p) {
  const uint16_t* q = static_cast<const uint16_t*>(p);
  return widen(vld1q_u16(q), vld1q_u16(q + 8));
}
INLINE Int widen_bytes(const void* p) {
  const uint8x16_t bytes = vld1q_u8(static_cast<const uint8_t*>(p));
  return widen(vmovl_u8(vget_low_u8(bytes)), vmovl_high_u8(bytes));
}

INLINE float half_to_float(uint16_t half) {
  return vgetq_lane_f32(vcvt_f32_f16(vreinterpret_f16_u16(vdup_n_u16(half))), 0);
}
INLINE float32x4_t from_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
INLINE Float from_half(const void* p) {
  const uint16_t* q = static_cast<const uint16_t*>(p);
  return {from_half(q), from_half(q + 4), from_half(q + 8), from_half(q + 12)};
}
INLINE void to_half(uint16_t* p, float32x4_t v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
INLINE void to_half(void* p, Float v) {
  uint16_t* q = static_cast<uint16_t*>(p);
  to_half(q, v.a), to_half(q + 4, v.b), to_half(q + 8, v.c), to_half(q + 12, v.d);
}

// Bytes 4 i ... 4 i + 3 of a table for indices i.
INLINE uint8x16_t bytes_of(int32x4_t indices) {
  return u8(vmlaq_s32(vdupq_n_s32(0x03020100), indices, vdupq_n_s32(0x04040404)));
}
INLINE Float lookup(Float table, Int indices) {
  const uint8x16x4_t bytes = {{vreinterpretq_u8_f32(table.a), vreinterpretq_u8_f32(table.b),
                               vreinterpretq_u8_f32(table.c), vreinterpretq_u8_f32(table.d)}};
  const auto of = [&](int32x4_t at) __attribute__((always_inline)) {
    return vreinterpretq_f32_u8(vqtbl4q_u8(bytes, bytes_of(vandq_s32(at, vdupq_n_s32(LANES - 1)))));
  };
  return {of(indices.a), of(indices.b), of(indices.c), of(indices.d)};
}
INLINE float32x4_t gather(const float* p, int32x4_t at) {
  float32x4_t v = vld1q_dup_f32(p + vgetq_lane_s32(at, 0));
  v = vld1q_lane_f32(p + vgetq_lane_s32(at, 1), v, 1);
  v = vld1q_lane_f32(p + vgetq_lane_s32(at, 2), v, 2);
  return vld1q_lane_f32(p + vgetq_lane_s32(at, 3), v, 3);
}
INLINE Float gather(const float* p, Int at) { return {gather(p, at.a), gather(p, at.b), gather(p, at.c), gather(p, at.d)}; }
INLINE float32x4_t where(int32x4_t chosen, float32x4_t x, float32x4_t y) {
  return vbslq_f32(u32(vshrq_n_s32(chosen, 31)), x, y);
}
INLINE Float where(Int chosen, Float x, Float y) {
  return {where(chosen.a, x.a, y.a), where(chosen.b, x.b, y.b), where(chosen.c, x.c, y.c), where(chosen.d, x.d, y.d)};
}
INLINE Float where(Int chosen, Float x) { return where(chosen, x, every(0.0f)); }
INLINE Float leading(Float v, int64_t count) {
  return where(minus(lanes(), every(static_cast<int32_t>(std::min<int64_t>(count, LANES)))), v);
}
INLINE Float of_quad(const void* p, Int at) {
  const uint8x16_t quad = vld1q_u8(static_cast<const uint8_t*>(p));
  const auto of = [&](int32x4_t four) __attribute__((always_inline)) {
    return vreinterpretq_f32_u8(vqtbl1q_u8(quad, bytes_of(vandq_s32(four, vdupq_n_s32(3)))));
  };
  return {of(at.a), of(at.b), of(at.c), of(at.d)};
}

// sums + the four products of bytes u and s in each lane, both signed: of 8 bits, u is 128 less than a code.
template <bool NIBBLES>
INLINE int32x4_t dot_bytes(int32x4_t sums, int32x4_t u, int32x4_t s) {
#if VNNI
  return vdotq_s32(sums, s8(u), s8(s));
#else
  const int16x8_t low = vmull_s8(vget_low_s8(s8(u)), vget_low_s8(s8(s))), high = vmull_high_s8(s8(u), s8(s));
  if constexpr (NIBBLES) return vpadalq_s16(sums, vpaddq_s16(low, high));
  return vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#endif
}
template <bool NIBBLES>
INLINE Int dot_bytes(Int sums, Int u, Int s) {
  return {dot_bytes<NIBBLES>(sums.a, u.a, s.a), dot_bytes<NIBBLES>(sums.b, u.b, s.b), dot_bytes<NIBBLES>(sums.c, u.c, s.c),
          dot_bytes<NIBBLES>(sums.d, u.d, s.d)};
}
constexpr int32_t LOWERED = 128;
INLINE Int code_bytes(Int codes) { return differ(codes, every(static_cast<int32_t>(0x80808080))); }
INLINE Int int8_bytes(Int numbers) { return numbers; }
INLINE Int low_nibbles(Int v) { return both(v, every(0x0f0f0f0f)); }
INLINE int32x4_t high_nibbles(int32x4_t v) { return s32(vshrq_n_u8(u8(v), 4)); }
OF_ONE(Int, high_nibbles, Int, high_nibbles)

#if VNNI
using Part = Int;
INLINE Part no_part() { return every(0); }
INLINE Part dot_nibbles(Part part, Int u, Int s) { return dot_bytes<true>(part, u, s); }
INLINE Int sum_part(Part part) { return part; }
#else
// Of every byte its own sum, in 16 bits: 15 * 128 * PART_STEPS stays below 2^15.
struct PartOfFour {
  int16x8_t low, high;
};
struct Part {
  PartOfFour a, b, c, d;
};
INLINE Part no_part() {
  const PartOfFour none = {vdupq_n_s16(0), vdupq_n_s16(0)};
  return {none, none, none, none};
}
INLINE PartOfFour dot_nibbles(PartOfFour part, int32x4_t u, int32x4_t s) {
  return {vmlal_s8(part.low, vget_low_s8(s8(u)), vget_low_s8(s8(s))), vmlal_high_s8(part.high, s8(u), s8(s))};
}
INLINE Part dot_nibbles(Part part, Int u, Int s) {
  return {dot_nibbles(part.a, u.a, s.a), dot_nibbles(part.b, u.b, s.b), dot_nibbles(part.c, u.c, s.c),
          dot_nibbles(part.d, u.d, s.d)};
}
INLINE int32x4_t sum_part(PartOfFour part) { return vpaddq_s32(vpaddlq_s16(part.low), vpaddlq_s16(part.high)); }
OF_ONE(Int, sum_part, Part, sum_part)
#endif

template <int QUARTER>
INLINE int32x4_t& quarter(Int& v) {
  if constexpr (QUARTER == 0) return v.a;
  else if constexpr (QUARTER == 1) return v.b;
  else if constexpr (QUARTER == 2) return v.c;
  else return v.d;
}
struct Square {  // of 4 x 4 lanes
  int32x4_t a, b, c, d;
};
INLINE int32x4_t pairs_of(int32x4_t x, int32x4_t y, bool high) {
  const int64x2_t a = vreinterpretq_s64_s32(x), b = vreinterpretq_s64_s32(y);
  return vreinterpretq_s32_s64(high ? vzip2q_s64(a, b) : vzip1q_s64(a, b));
}
INLINE Square transposed(Square r) {
  const int32x4_t ab = vtrn1q_s32(r.a, r.b), ab2 = vtrn2q_s32(r.a, r.b);
  const int32x4_t cd = vtrn1q_s32(r.c, r.d), cd2 = vtrn2q_s32(r.c, r.d);
  return {pairs_of(ab, cd, false), pairs_of(ab2, cd2, false), pairs_of(ab, cd, true), pairs_of(ab2, cd2, true)};
}
INLINE void transpose(Int (&r)[LANES]) {
  Int t[LANES];
  each<4>([&](auto i) {
    each<4>([&](auto j) {
      const Square made = transposed({quarter<j>(r[4 * i]), quarter<j>(r[4 * i + 1]), quarter<j>(r[4 * i + 2]),
                                      quarter<j>(r[4 * i + 3])});
      quarter<i>(t[4 * j]) = made.a, quarter<i>(t[4 * j + 1]) = made.b;
      quarter<i>(t[4 * j + 2]) = made.c, quarter<i>(t[4 * j + 3]) = made.d;
    });
  });
  each<LANES>([&](auto i) { r[i] = t[i]; });
}

#if BF16_DOT
INLINE float32x4_t dot_pairs(float32x4_t sums, int32x4_t x, int32x4_t y) {
  return vbfdotq_f32(sums, vreinterpretq_bf16_s32(x), vreinterpretq_bf16_s32(y));
}
INLINE Float dot_pairs(Float sums, Int x, Int y) {
  return {dot_pairs(sums.a, x.a, y.a), dot_pairs(sums.b, x.b, y.b), dot_pairs(sums.c, x.c, y.c),
          dot_pairs(sums.d, x.d, y.d)};
}
INLINE int32x4_t to_bf16s(float32x4_t low, float32x4_t high) {
  return vreinterpretq_s32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(low), high));
}
INLINE void to_bf16s(void* p, Float v) {
  int32_t* q = static_cast<int32_t*>(p);
  vst1q_s32(q, to_bf16s(v.a, v.b)), vst1q_s32(q + 4, to_bf16s(v.c, v.d));
}
INLINE Int to_bf16s(Float low, Float high) {
  return {to_bf16s(low.a, low.b), to_bf16s(low.c, low.d), to_bf16s(high.a, high.b), to_bf16s(high.c, high.d)};
}
INLINE int32x4_t upper_halves(float32x4_t low, float32x4_t high) {
  return s32(vtrn2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)));
}
OF_TWO(Int, upper_halves, Float, upper_halves)
INLINE Int low_words(Int v) { return widen(u16(v.a), u16(v.b)); }
INLINE Int high_words(Int v) { return widen(u16(v.c), u16(v.d)); }
INLINE Int in_pairs(Int words) {
  const uint16x8_t a = u16(words.a), b = u16(words.b), c = u16(words.c), d = u16(words.d);
  return {s32(vzip1q_u16(a, c)), s32(vzip2q_u16(a, c)), s32(vzip1q_u16(b, d)), s32(vzip2q_u16(b, d))};
}

struct WordTable {
  uint8x16_t lower, upper;  // bytes

  INLINE WordTable() {}
  INLINE explicit WordTable(Float values) {
    const uint8x16_t low = u8(to_bf16s(values.a, values.b)), high = u8(to_bf16s(values.c, values.d));
    lower = vuzp1q_u8(low, high), upper = vuzp2q_u8(low, high);
  }
  INLINE int32x4_t of(int32x4_t words) const {
    const uint8x16_t at = u8(vandq_s32(words, vdupq_n_s32(0x0f0f0f0f)));
    return s32(vtrn1q_u8(vqtbl1q_u8(lower, at), vqtbl1q_u8(upper, at)));
  }
  INLINE Int of(Int words) const { return {of(words.a), of(words.b), of(words.c), of(words.d)}; }
};

struct QuadPairs {
  INLINE int32x4_t taken(int32x4_t at) const {
    const int32x4_t second = vshlq_n_s32(vandq_s32(at, vdupq_n_s32(0xc)), 14);
    const int32x4_t pair = vorrq_s32(vandq_s32(at, vdupq_n_s32(3)), second);
    return vmlaq_s32(vdupq_n_s32(0x01000100), pair, vdupq_n_s32(0x0202));
  }
  INLINE Int taken(Int at) const { return {taken(at.a), taken(at.b), taken(at.c), taken(at.d)}; }
  static INLINE Int of(const void* quad, Int taken) {
    int64_t given;
    memcpy(&given, quad, sizeof given);
    const Int of_quad = every(vreinterpretq_s32_s64(vdupq_n_s64(given)));
    const auto at = [&](int32x4_t four) __attribute__((always_inline)) { return s32(vqtbl1q_u8(u8(of_quad.a), u8(four))); };
    return {at(taken.a), at(taken.b), at(taken.c), at(taken.d)};
  }
};
#endif
