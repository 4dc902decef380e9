// Codes of 4 bits of a line (cpu_strip_lines.h draws it) as numbers, by tables of bytes: one instruction looks up a byte for
// each of 16 codes, and two of those lie next to each other where a number of 16 bits is wanted of every row.

#pragma once

#include "cpu_vectors.h"

// Byte AT of 16 numbers.
template <int AT>
INLINE uint8x16_t bytes_at(Float v) {
  const auto of = [](float32x4_t x, float32x4_t y) __attribute__((always_inline)) {
    return vreinterpretq_u8_u16(narrow_words(shift_right<8 * AT>(vreinterpretq_s32_f32(x)),
                                             shift_right<8 * AT>(vreinterpretq_s32_f32(y))));
  };
  return vuzp1q_u8(of(v.a, v.b), of(v.c, v.d));
}

// The codes of a line: low nibbles and high ones.
struct Nibbled {
  Int low, high;

  INLINE Nibbled() {}
  INLINE explicit Nibbled(Int words) : low(low_nibbles(words)), high(high_nibbles(words)) {}
};

// Halves of 16 numbers of fp32. Of the codes of a line: those of two of its columns, (0, 2), (4, 6), (1, 3) or (5, 7), next to
// each other.
struct Halves16 {
  uint8x16_t lower, upper;

  template <int PAIR>
  INLINE int32x4_t pair(int32x4_t codes) const {
    const uint8x16_t x = vqtbl1q_u8(lower, u8(codes)), y = vqtbl1q_u8(upper, u8(codes));
    return s32(PAIR < 2 ? vtrn1q_u8(x, y) : vtrn2q_u8(x, y));
  }
  template <int PAIR>
  INLINE Int pair(const Nibbled& codes) const {
    const Int at = PAIR % 2 ? codes.high : codes.low;
    return {pair<PAIR>(at.a), pair<PAIR>(at.b), pair<PAIR>(at.c), pair<PAIR>(at.d)};
  }
};
INLINE Halves16 upper_halves(Float v) { return {bytes_at<2>(v), bytes_at<3>(v)}; }
INLINE Halves16 lower_halves(Float v) { return {bytes_at<0>(v), bytes_at<1>(v)}; }

// Codes of 4 bits: short enough for half a number, to which zeros are added.
template <>
struct LineCodes<4> {
  Halves16 halves;
  Nibbled held;

  INLINE LineCodes() : LineCodes(0.0f) {}
  // Numbers that are so much less.
  INLINE explicit LineCodes(float zero) : halves(upper_halves(minus(to_float(lanes()), every(zero)))) {}
  INLINE void take(Int words) { held = Nibbled(words); }
  template <int CODE>
  INLINE Float value() const {
    const Int two = halves.pair<CODE % 4>(held);
    return bits_to_float(CODE < 4 ? shift_left<16>(two) : both(two, every(static_cast<int32_t>(0xffff0000))));
  }
};

// The number that it names in a table of 16.
struct LineTable {
  Halves16 lower, upper;
  Nibbled held;

  INLINE explicit LineTable(Float table) : lower(lower_halves(table)), upper(upper_halves(table)) {}
  INLINE void take(Int words) { held = Nibbled(words); }
  template <int CODE>
  static INLINE int32x4_t joined(int32x4_t x, int32x4_t y) {
    return s32(CODE < 4 ? vtrn1q_u16(u16(x), u16(y)) : vtrn2q_u16(u16(x), u16(y)));
  }
  template <int CODE>
  INLINE Float value() const {
    const Int x = lower.pair<CODE % 4>(held), y = upper.pair<CODE % 4>(held);
    return bits_to_float(
        {joined<CODE>(x.a, y.a), joined<CODE>(x.b, y.b), joined<CODE>(x.c, y.c), joined<CODE>(x.d, y.d)});
  }
};

#if BF16_DOT
template <bool LESS>
struct PairTable {
  Halves16 halves;
  Nibbled held;

  INLINE explicit PairTable(Float values) : halves(upper_halves(bits_to_float(in_pairs(to_bf16s(values, values))))) {}
  INLINE void begin(const int32_t*) {}
  INLINE void take(Int words) { held = Nibbled(words); }
  template <int PAIR>
  INLINE Int pair() const {
    return halves.pair<PAIR>(held);
  }
};

// Codes less zero points: numbers from -15 to 15 by their magnitude, with the sign put on top.
template <>
struct PairTable<true> {
  Halves16 magnitudes;
  Int zeros;
  Nibbled held;

  INLINE explicit PairTable(Float values) : magnitudes(upper_halves(values)) {}
  INLINE void begin(const int32_t* zero) { zeros = times(load(zero), every(0x01010101)); }
  INLINE void take(Int words) { held = Nibbled(words), held.low = less(held.low), held.high = less(held.high); }
  INLINE Int less(Int codes) const {
    return {s32(vsubq_u8(u8(codes.a), u8(zeros.a))), s32(vsubq_u8(u8(codes.b), u8(zeros.b))),
            s32(vsubq_u8(u8(codes.c), u8(zeros.c))), s32(vsubq_u8(u8(codes.d), u8(zeros.d)))};
  }
  template <int PAIR>
  INLINE int32x4_t pair(int32x4_t number) const {
    const uint8x16_t at = vreinterpretq_u8_s8(vabsq_s8(s8(number)));
    const uint8x16_t x = vqtbl1q_u8(magnitudes.lower, at), y = vqtbl1q_u8(magnitudes.upper, at);
    const uint8x16_t with_sign = vbslq_u8(vdupq_n_u8(0x80), u8(number), y);
    return s32(PAIR < 2 ? vtrn1q_u8(x, with_sign) : vtrn2q_u8(x, with_sign));
  }
  template <int PAIR>
  INLINE Int pair() const {
    const Int at = PAIR % 2 ? held.high : held.low;
    return {pair<PAIR>(at.a), pair<PAIR>(at.b), pair<PAIR>(at.c), pair<PAIR>(at.d)};
  }
};
#endif
