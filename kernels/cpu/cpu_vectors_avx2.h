// The lanes of cpu_vectors.h in a pair of AVX2 registers.

#pragma once

#include "cpu_vectors_x86.h"

struct Float {
  __m256 a, b;
};
struct Int {
  __m256i a, b;
};

INLINE Int load(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
INLINE void store(void* p, Int v) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), v.a);
  _mm256_storeu_si256(static_cast<__m256i*>(p) + 1, v.b);
}
INLINE Int every(int32_t v) { return {_mm256_set1_epi32(v), _mm256_set1_epi32(v)}; }
INLINE Int every_at(const int32_t* p) { return every(*p); }
INLINE Float every(float v) { return {_mm256_set1_ps(v), _mm256_set1_ps(v)}; }
INLINE Int both(Int x, Int y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
INLINE Int differ(Int x, Int y) { return {_mm256_xor_si256(x.a, y.a), _mm256_xor_si256(x.b, y.b)}; }
template <int BITS>
INLINE Int shift_right(Int v) {
  return {_mm256_srli_epi32(v.a, BITS), _mm256_srli_epi32(v.b, BITS)};
}
template <int BITS>
INLINE Int shift_left(Int v) {
  return {_mm256_slli_epi32(v.a, BITS), _mm256_slli_epi32(v.b, BITS)};
}
INLINE Int shift_right(Int v, int bits) {
  return {_mm256_srl_epi32(v.a, _mm_cvtsi32_si128(bits)), _mm256_srl_epi32(v.b, _mm_cvtsi32_si128(bits))};
}
INLINE Int shift_right(Int v, Int bits) { return {_mm256_srlv_epi32(v.a, bits.a), _mm256_srlv_epi32(v.b, bits.b)}; }
INLINE Int shift_left(Int v, int bits) {
  return {_mm256_sll_epi32(v.a, _mm_cvtsi32_si128(bits)), _mm256_sll_epi32(v.b, _mm_cvtsi32_si128(bits))};
}
INLINE Int either(Int x, Int y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
INLINE Int minus(Int x, Int y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
INLINE Int plus(Int x, Int y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
INLINE Int times(Int x, Int y) { return {_mm256_mullo_epi32(x.a, y.a), _mm256_mullo_epi32(x.b, y.b)}; }
INLINE Int within_lanes(Int v, Order order) {
  const __m256i wide = _mm256_broadcastsi128_si256(order);
  return {_mm256_shuffle_epi8(v.a, wide), _mm256_shuffle_epi8(v.b, wide)};
}
// Byte BYTE of every lane at its top, over zeros.
template <int BYTE>
INLINE Int byte_on_top(Int v) {
  return within_lanes(v, order<-1, -1, -1, BYTE, -1, -1, -1, BYTE + 4, -1, -1, -1, BYTE + 8, -1, -1, -1, BYTE + 12>());
}
#define BYTE_TABLES 1
using ByteTable = __m128i;
INLINE ByteTable byte_table(const int8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
// Of a table of 16 bytes, those that the lowest four bits of each byte name, where its highest bit is not set.
INLINE Int lookup_bytes(ByteTable table, Int indices) {
  const __m256i wide = _mm256_broadcastsi128_si256(table);
  return {_mm256_shuffle_epi8(wide, indices.a), _mm256_shuffle_epi8(wide, indices.b)};
}
INLINE Int only(int32_t first, int32_t second) {
  return {_mm256_setr_epi32(first, 0, second, 0, 0, 0, 0, 0), _mm256_setzero_si256()};
}
INLINE Float halves(float x, float y) {
  const __m256 v = _mm256_setr_ps(x, x, y, y, x, x, y, y);
  return {v, v};
}
INLINE int32_t sum(Int v) {
  const __m256i eight = _mm256_add_epi32(v.a, v.b);
  const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
  return _mm_cvtsi128_si32(_mm_add_epi32(two, _mm_shuffle_epi32(two, 1)));
}

INLINE Float plus(Float x, Float y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
INLINE Float minus(Float x, Float y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
INLINE Float times(Float x, Float y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
INLINE Float over(Float x, Float y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
INLINE Float fma(Float x, Float y, Float z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
INLINE Float least(Float x, Float y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
INLINE Float largest(Float x, Float y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
INLINE Float rounded(Float v) {
  constexpr int NEAREST = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(v.a, NEAREST), _mm256_round_ps(v.b, NEAREST)};
}
// Halves of the lanes combined, then halves of those: combine(a, b) of eight lanes, and of four.
template <class Eight, class Four>
INLINE float reduce(Float v, Eight eight, Four four) {
  const __m256 of_both = eight(v.a, v.b);
  const __m128 half = four(_mm256_castps256_ps128(of_both), _mm256_extractf128_ps(of_both, 1));
  const __m128 quarter = four(half, _mm_movehl_ps(half, half));
  return _mm_cvtss_f32(four(quarter, _mm_movehdup_ps(quarter)));
}
#define REDUCE(name, operation)                                                                  \
  INLINE float name(Float v) {                                                                   \
    return reduce(v, [](__m256 x, __m256 y) { return _mm256_##operation##_ps(x, y); },           \
                  [](__m128 x, __m128 y) { return _mm_##operation##_ps(x, y); });                \
  }
REDUCE(sum, add)
REDUCE(least, min)
REDUCE(largest, max)
#undef REDUCE

INLINE Float to_float(Int v) { return {_mm256_cvtepi32_ps(v.a), _mm256_cvtepi32_ps(v.b)}; }
INLINE Int to_int(Float v) { return {_mm256_cvtps_epi32(v.a), _mm256_cvtps_epi32(v.b)}; }
INLINE Float bits_to_float(Int v) { return {_mm256_castsi256_ps(v.a), _mm256_castsi256_ps(v.b)}; }
INLINE Int float_to_bits(Float v) { return {_mm256_castps_si256(v.a), _mm256_castps_si256(v.b)}; }
INLINE void narrow_words(void* p, Int v) {
  const __m256i packed = _mm256_packus_epi32(v.a, v.b);
  _mm256_storeu_si256(static_cast<__m256i*>(p), _mm256_permute4x64_epi64(packed, 0xd8));
}
INLINE void store_bytes(void* p, Int v) {  // of lanes from -128 to 127
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v.a, v.b), 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128(static_cast<__m128i*>(p), bytes);
}

INLINE Int greater(Float x, Float y) {
  return {_mm256_castps_si256(_mm256_cmp_ps(x.a, y.a, _CMP_GT_OQ)),
          _mm256_castps_si256(_mm256_cmp_ps(x.b, y.b, _CMP_GT_OQ))};
}
INLINE Int lanes() {
  const __m256i first = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return {first, _mm256_add_epi32(first, _mm256_set1_epi32(8))};
}
INLINE __m256 lookup(Float table, __m256i indices) {
  const __m256 low = _mm256_permutevar8x32_ps(table.a, indices), high = _mm256_permutevar8x32_ps(table.b, indices);
  return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(indices, 28)));
}
INLINE Float lookup(Float table, Int indices) { return {lookup(table, indices.a), lookup(table, indices.b)}; }

INLINE Float gather(const float* p, Int indices) {
  return {_mm256_i32gather_ps(p, indices.a, sizeof *p), _mm256_i32gather_ps(p, indices.b, sizeof *p)};
}
INLINE Float leading(Float v, int64_t count) {
  const __m256i end = _mm256_set1_epi32(static_cast<int32_t>(std::min<int64_t>(count, LANES)));
  const Int at = lanes();
  return {_mm256_and_ps(v.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, at.a))),
          _mm256_and_ps(v.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(end, at.b)))};
}
INLINE Float where(Int chosen, Float x, Float y) {
  return {_mm256_blendv_ps(y.a, x.a, _mm256_castsi256_ps(chosen.a)),
          _mm256_blendv_ps(y.b, x.b, _mm256_castsi256_ps(chosen.b))};
}
INLINE Float where(Int chosen, Float x) { return where(chosen, x, every(0.0f)); }
INLINE Float of_quad(const void* p, Int at) {
  const __m256 quad = _mm256_broadcast_ps(static_cast<const __m128*>(p));
  return {_mm256_permutevar_ps(quad, at.a), _mm256_permutevar_ps(quad, at.b)};
}

INLINE Float from_half(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
}
INLINE void to_half(void* p, Float v) {
  __m128i* q = static_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(v.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(v.b, _MM_FROUND_TO_NEAREST_INT));
}
INLINE Int widen_words(const void* p) {
  const __m128i* q = static_cast<const __m128i*>(p);
  return {_mm256_cvtepu16_epi32(_mm_loadu_si128(q)), _mm256_cvtepu16_epi32(_mm_loadu_si128(q + 1))};
}

INLINE Int widen_bytes(const void* p) {
  const __m128i bytes = _mm_loadu_si128(static_cast<const __m128i*>(p));
  return {_mm256_cvtepu8_epi32(bytes), _mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8))};
}

// Pairs of products of nibbles fit 16 bits (2 * 15 * 128); those of bytes do not, so they are widened first.
template <bool NIBBLES>
INLINE __m256i dot_bytes(__m256i sums, __m256i u, __m256i s) {
#if VNNI
  return _mm256_dpbusd_avx_epi32(sums, u, s);
#else
  if constexpr (NIBBLES) {
    const __m256i pairs = _mm256_maddubs_epi16(u, s);
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  const __m256i even = _mm256_madd_epi16(_mm256_and_si256(u, _mm256_set1_epi16(0xff)),
                                         _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(sums, _mm256_add_epi32(even, odd));
#endif
}
template <bool NIBBLES>
INLINE Int dot_bytes(Int sums, Int u, Int s) {
  return {dot_bytes<NIBBLES>(sums.a, u.a, s.a), dot_bytes<NIBBLES>(sums.b, u.b, s.b)};
}

INLINE Int code_bytes(Int codes) { return codes; }
INLINE Int int8_bytes(Int numbers) { return differ(numbers, every(static_cast<int32_t>(0x80808080))); }
INLINE Int low_nibbles(Int v) { return both(v, every(0x0f0f0f0f)); }
INLINE Int high_nibbles(Int v) { return both(shift_right<4>(v), every(0x0f0f0f0f)); }

using Part = Int;
INLINE Part no_part() { return every(0); }
// Parts are sums of 16 bits, which are added up half as fast as they are made: 2 * 15 * 128 * PART_STEPS stays below
// 2^15. With VNNI they are sums of 32 bits.
INLINE __m256i dot_nibbles(__m256i part, __m256i u, __m256i s) {
#if VNNI
  return _mm256_dpbusd_avx_epi32(part, u, s);
#else
  return _mm256_add_epi16(part, _mm256_maddubs_epi16(u, s));
#endif
}
INLINE Int dot_nibbles(Int part, Int u, Int s) { return {dot_nibbles(part.a, u.a, s.a), dot_nibbles(part.b, u.b, s.b)}; }
INLINE Int sum_part(Int part) {
#if VNNI
  return part;
#else
  const __m256i ones = _mm256_set1_epi16(1);
  return {_mm256_madd_epi16(part.a, ones), _mm256_madd_epi16(part.b, ones)};
#endif
}

INLINE void transpose(__m256i (&r)[8]) {
  __m256i t[8];
  each<4>([&](auto i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  });
  each<2>([&](auto i) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  });
  each<4>([&](auto i) {
    t[i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x20);
    t[4 + i] = _mm256_permute2x128_si256(r[i], r[4 + i], 0x31);
  });
  each<8>([&](auto i) { r[i] = t[i]; });
}

INLINE void transpose(Int (&r)[LANES]) {
  __m256i tile[4][8];  // rows 0-7 and 8-15 of columns 0-7, then of columns 8-15
  each<8>([&](auto i) {
    tile[0][i] = r[i].a;
    tile[1][i] = r[8 + i].a;
    tile[2][i] = r[i].b;
    tile[3][i] = r[8 + i].b;
  });
  each<4>([&](auto i) { transpose(tile[i]); });
  each<8>([&](auto i) {
    r[i] = {tile[0][i], tile[1][i]};
    r[8 + i] = {tile[2][i], tile[3][i]};
  });
}
