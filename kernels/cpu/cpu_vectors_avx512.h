// The lanes of cpu_vectors.h in one register of AVX-512, with VNNI.

#pragma once

#include "cpu_vectors_x86.h"

using Float = __m512;
using Int = __m512i;

INLINE Int load(const void* p) { return _mm512_loadu_si512(p); }
INLINE void store(void* p, Int v) { _mm512_storeu_si512(p, v); }
INLINE Int every(int32_t v) { return _mm512_set1_epi32(v); }
INLINE Int every_at(const int32_t* p) { return every(*p); }
INLINE Float every(float v) { return _mm512_set1_ps(v); }
INLINE Int lanes() { return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
INLINE Int both(Int a, Int b) { return _mm512_and_si512(a, b); }
INLINE Int differ(Int a, Int b) { return _mm512_xor_si512(a, b); }
template <int BITS>
INLINE Int shift_right(Int v) {  // of 32-bit lanes
  return _mm512_srli_epi32(v, BITS);
}
template <int BITS>
INLINE Int shift_left(Int v) {
  return _mm512_slli_epi32(v, BITS);
}
INLINE Int shift_right(Int v, int bits) { return _mm512_srl_epi32(v, _mm_cvtsi32_si128(bits)); }
INLINE Int shift_right(Int v, Int bits) { return _mm512_srlv_epi32(v, bits); }  // every lane by its own
INLINE Int shift_left(Int v, int bits) { return _mm512_sll_epi32(v, _mm_cvtsi32_si128(bits)); }
INLINE Int either(Int a, Int b) { return _mm512_or_si512(a, b); }
INLINE Int plus(Int a, Int b) { return _mm512_add_epi32(a, b); }
INLINE Int minus(Int a, Int b) { return _mm512_sub_epi32(a, b); }
INLINE Int times(Int a, Int b) { return _mm512_mullo_epi32(a, b); }
INLINE Int within_lanes(Int v, Order order) { return _mm512_shuffle_epi8(v, _mm512_broadcast_i32x4(order)); }
// Element 0 in lane 0, element 1 in lane 2, zeros elsewhere: initial sums of which only the total matters.
INLINE Int only(int32_t first, int32_t second) { return _mm512_zextsi128_si512(_mm_set_epi32(0, second, 0, first)); }
// a in lanes 0 and 1 of every four, b in lanes 2 and 3.
INLINE Float halves(float a, float b) { return _mm512_mask_blend_ps(0xcccc, every(a), every(b)); }
INLINE int32_t sum(Int v) { return _mm512_reduce_add_epi32(v); }

INLINE Float plus(Float a, Float b) { return _mm512_add_ps(a, b); }
INLINE Float minus(Float a, Float b) { return _mm512_sub_ps(a, b); }
INLINE Float times(Float a, Float b) { return _mm512_mul_ps(a, b); }
INLINE Float over(Float a, Float b) { return _mm512_div_ps(a, b); }
INLINE Float fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }
INLINE Float least(Float a, Float b) { return _mm512_min_ps(a, b); }
INLINE Float largest(Float a, Float b) { return _mm512_max_ps(a, b); }
INLINE Float rounded(Float v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE float sum(Float v) { return _mm512_reduce_add_ps(v); }
INLINE float least(Float v) { return _mm512_reduce_min_ps(v); }
INLINE float largest(Float v) { return _mm512_reduce_max_ps(v); }

INLINE Float to_float(Int v) { return _mm512_cvtepi32_ps(v); }
INLINE Int to_int(Float v) { return _mm512_cvtps_epi32(v); }
INLINE Float bits_to_float(Int v) { return _mm512_castsi512_ps(v); }
INLINE Int float_to_bits(Float v) { return _mm512_castps_si512(v); }
INLINE void store_bytes(void* p, Int v) { _mm_storeu_si128(static_cast<__m128i*>(p), _mm512_cvtepi32_epi8(v)); }

// Lanes whose top bit says that a is greater.
INLINE Int greater(Float a, Float b) { return _mm512_movm_epi32(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)); }

// The entries of a table of 16 that the lowest four bits of each lane name.
INLINE Float lookup(Float table, Int indices) { return _mm512_permutexvar_ps(indices, table); }
// The numbers of an array that the lanes name.
INLINE Float gather(const float* p, Int indices) { return _mm512_i32gather_ps(indices, p, sizeof *p); }
// The first `count` lanes, zeros elsewhere.
INLINE Float leading(Float v, int64_t count) {
  return _mm512_maskz_mov_ps(static_cast<__mmask16>((1u << std::min<int64_t>(count, LANES)) - 1), v);
}
// Lanes of a where the top bit of `chosen` is set, of b elsewhere; those of a, zeros elsewhere.
INLINE Float where(Int chosen, Float a, Float b) { return _mm512_mask_blend_ps(_mm512_movepi32_mask(chosen), b, a); }
INLINE Float where(Int chosen, Float a) { return _mm512_maskz_mov_ps(_mm512_movepi32_mask(chosen), a); }
// Of four numbers, lane i has the one that the lowest two bits of at[i] name.
INLINE Float of_quad(const void* p, Int at) {
  return _mm512_permutevar_ps(_mm512_broadcast_f32x4(_mm_loadu_ps(static_cast<const float*>(p))), at);
}

INLINE Float from_half(const void* p) { return _mm512_cvtph_ps(_mm256_loadu_si256(static_cast<const __m256i*>(p))); }
INLINE void to_half(void* p, Float v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
}
INLINE Int widen_words(const void* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
}
INLINE void narrow_words(void* p, Int v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
}
INLINE Int widen_bytes(const void* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
}

// sums + the four products of unsigned bytes u and signed bytes s in each lane.
template <bool NIBBLES>
INLINE Int dot_bytes(Int sums, Int u, Int s) {
  return _mm512_dpbusd_epi32(sums, u, s);
}

// The same of nibbles u, in parts: `dot_nibbles` adds to a part, at most PART_STEPS times from zero, `sum_part` makes
// 32-bit sums of it.
INLINE Int code_bytes(Int codes) { return codes; }
INLINE Int int8_bytes(Int numbers) { return differ(numbers, every(static_cast<int32_t>(0x80808080))); }
INLINE Int low_nibbles(Int v) { return both(v, every(0x0f0f0f0f)); }
INLINE Int high_nibbles(Int v) { return both(shift_right<4>(v), every(0x0f0f0f0f)); }

using Part = Int;
INLINE Part no_part() { return every(0); }
INLINE Int dot_nibbles(Int part, Int u, Int s) { return _mm512_dpbusd_epi32(part, u, s); }
INLINE Int sum_part(Int part) { return part; }

INLINE void transpose(Int (&r)[LANES]) {
  Int t[LANES];
  each<8>([&](auto i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  });
  each<4>([&](auto i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  });
  each<4>([&](auto i) {  // quarter q of r[4 g + i] is column 4 q + i of rows 4 g ... 4 g + 3
    t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x44);
    t[4 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x44);
    t[8 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xee);
    t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xee);
  });
  each<4>([&](auto i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);
    r[4 + i] = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
    r[8 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
    r[12 + i] = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
  });
}

#if BF16_DOT
// sums + the two products of bf16 in each lane.
INLINE Float dot_pairs(Float sums, Int a, Int b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }
// Rounded to bf16: 16 words, or 32 of `low` and `high` one after the other.
INLINE void to_bf16s(void* p, Float v) {
  const __m256bh narrow = _mm512_cvtneps_pbh(v);
  memcpy(p, &narrow, sizeof narrow);
}
INLINE Int to_bf16s(Float low, Float high) { return (Int)_mm512_cvtne2ps_pbh(high, low); }
// The upper halves of two numbers: of bf16, those that are no longer.
INLINE Int upper_halves(Float low, Float high) {
  return either(both(float_to_bits(high), every(static_cast<int32_t>(0xffff0000))), shift_right<16>(float_to_bits(low)));
}
// The first or the second 16 of 32 words.
INLINE Int low_words(Int v) { return _mm512_cvtepu16_epi32(_mm512_castsi512_si256(v)); }
INLINE Int high_words(Int v) { return _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(v, 1)); }
// Words of 16 rows and 16 more, next to each other.
INLINE Int in_pairs(Int words) {
  return _mm512_permutexvar_epi16(either(lanes(), shift_left(plus(lanes(), every(LANES)), 16)), words);
}

// 16 bf16, and those that the lowest four bits of every word name.
struct WordTable {
  Int table;  // twice: a permutation of words reads five bits of an index

  INLINE WordTable() {}
  INLINE explicit WordTable(Float values) {
    const __m256i narrow = (__m256i)_mm512_cvtneps_pbh(values);
    table = _mm512_inserti64x4(_mm512_castsi256_si512(narrow), narrow, 1);
  }
  INLINE Int of(Int words) const { return _mm512_permutexvar_epi16(words, table); }
};

// Codes of 4 bits of a line (cpu_strip_lines.h) as pairs of bf16: of a table of 16; or LESS: codes less zero points.
template <bool LESS>
struct PairTable {
  Int table, zeros, held;

  INLINE explicit PairTable(Float values) {
    // Indices are five bits: of a code and one bit more of its word, or of a number from -15 on.
    table = to_bf16s(values, LESS ? minus(to_float(lanes()), every(16.0f)) : values);
  }
  INLINE void begin(const int32_t* zero) {
    if constexpr (LESS) zeros = either(load(zero), shift_left(load(zero), 16));
  }
  INLINE void take(Int words) { held = words; }
  template <int PAIR>
  INLINE Int pair() const {
    Int codes = shift_right<4 * PAIR>(held);
    if constexpr (LESS) codes = _mm512_sub_epi16(both(codes, every(0x000f000f)), zeros);
    return _mm512_permutexvar_epi16(codes, table);
  }
};

// Of four bf16 of a token, the two that a lane names in four bits, p | q << 2, as a pair.
struct QuadPairs {
  Int bytes;  // of positions: 2 p, 2 p + 1, 2 q, 2 q + 1

  INLINE QuadPairs() {
    const Int low = times(both(lanes(), every(3)), every(0x0202)), high = times(shift_right<2>(lanes()), every(0x0202));
    bytes = either(plus(low, every(0x0100)), shift_left(plus(high, every(0x0100)), 16));
  }
  INLINE Int taken(Int at) const { return _mm512_permutexvar_epi32(at, bytes); }
  static INLINE Int of(const void* quad, Int taken) {
    int64_t given;
    memcpy(&given, quad, sizeof given);
    return _mm512_shuffle_epi8(_mm512_set1_epi64(given), taken);
  }
};
#endif
