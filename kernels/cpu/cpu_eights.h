// Eight 32-bit lanes: a register of AVX2, or two of NEON.

#pragma once

#include "cpu_vectors.h"

constexpr int EIGHT = 8;

#if NEON

struct Eight {
  float32x4_t a, b;
};
struct EightInts {
  int32x4_t a, b;
};

INLINE Eight load_eight(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
INLINE void store(float* p, Eight v) { vst1q_f32(p, v.a), vst1q_f32(p + 4, v.b); }
INLINE Eight eight(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
INLINE Eight plus(Eight x, Eight y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
INLINE Eight minus(Eight x, Eight y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
INLINE Eight times(Eight x, Eight y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
INLINE Eight fma(Eight x, Eight y, Eight z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
INLINE EightInts below(Eight x, Eight y) {
  return {vreinterpretq_s32_u32(vcltq_f32(x.a, y.a)), vreinterpretq_s32_u32(vcltq_f32(x.b, y.b))};
}
INLINE Eight where(EightInts chosen, Eight x, Eight y) {
  return {vbslq_f32(vreinterpretq_u32_s32(chosen.a), x.a, y.a), vbslq_f32(vreinterpretq_u32_s32(chosen.b), x.b, y.b)};
}
INLINE EightInts where(EightInts chosen, EightInts x, EightInts y) {
  return {vbslq_s32(vreinterpretq_u32_s32(chosen.a), x.a, y.a), vbslq_s32(vreinterpretq_u32_s32(chosen.b), x.b, y.b)};
}
INLINE Eight least(Eight x, Eight y) { return where(below(x, y), x, y); }
INLINE Eight greatest(Eight x, Eight y) { return where(below(y, x), x, y); }
INLINE float sum(Eight v) {
  const float32x4_t four = vaddq_f32(v.a, v.b);
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

INLINE EightInts load_eight(const int32_t* p) { return {vld1q_s32(p), vld1q_s32(p + 4)}; }
INLINE EightInts eight(int32_t v) { return {vdupq_n_s32(v), vdupq_n_s32(v)}; }
INLINE EightInts plus(EightInts x, EightInts y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)}; }
INLINE EightInts times(EightInts x, EightInts y) { return {vmulq_s32(x.a, y.a), vmulq_s32(x.b, y.b)}; }
INLINE EightInts both(EightInts x, EightInts y) { return {vandq_s32(x.a, y.a), vandq_s32(x.b, y.b)}; }
INLINE EightInts either(EightInts x, EightInts y) { return {vorrq_s32(x.a, y.a), vorrq_s32(x.b, y.b)}; }
INLINE EightInts shift_left(EightInts v, int bits) {
  return {vshlq_s32(v.a, vdupq_n_s32(bits)), vshlq_s32(v.b, vdupq_n_s32(bits))};
}
// Every lane by its own.
INLINE EightInts shift_right(EightInts v, EightInts bits) {
  const auto of = [](int32x4_t four, int32x4_t by) __attribute__((always_inline)) {
    return vreinterpretq_s32_u32(vshlq_u32(vreinterpretq_u32_s32(four), vnegq_s32(by)));
  };
  return {of(v.a, bits.a), of(v.b, bits.b)};
}
INLINE EightInts multiples(int32_t of) {  // 0 ... 7 times a number
  const int32x4_t first = {0, 1, 2, 3};
  return times(EightInts{first, vaddq_s32(first, vdupq_n_s32(4))}, eight(of));
}
INLINE Eight over(Eight x, Eight y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
INLINE Eight numbers(EightInts v) { return {vcvtq_f32_s32(v.a), vcvtq_f32_s32(v.b)}; }
// The nearest whole numbers, of two as near the even one.
INLINE EightInts nearest(Eight v) { return {vcvtnq_s32_f32(v.a), vcvtnq_s32_f32(v.b)}; }
INLINE EightInts bytes(const uint8_t* p) {  // eight of them, from 0 to 255
  const uint16x8_t words = vmovl_u8(vld1_u8(p));
  const auto of = [](uint16x4_t four) __attribute__((always_inline)) { return vreinterpretq_s32_u32(vmovl_u16(four)); };
  return {of(vget_low_u16(words)), of(vget_high_u16(words))};
}
// The lanes that indices from 0 to 7 name.
INLINE Eight permuted(Eight v, EightInts at) {
  const uint8x16x2_t table = {{vreinterpretq_u8_f32(v.a), vreinterpretq_u8_f32(v.b)}};
  const auto of = [&](int32x4_t four) __attribute__((always_inline)) {
    const int32x4_t bytes = vmlaq_s32(vdupq_n_s32(0x03020100), four, vdupq_n_s32(0x04040404));
    return vreinterpretq_f32_u8(vqtbl2q_u8(table, vreinterpretq_u8_s32(bytes)));
  };
  return {of(at.a), of(at.b)};
}
INLINE void store_bytes(uint8_t* p, EightInts v) {  // of lanes from 0 to 255
  vst1_u8(p, vmovn_u16(vcombine_u16(vmovn_u32(vreinterpretq_u32_s32(v.a)), vmovn_u32(vreinterpretq_u32_s32(v.b)))));
}

#else

using Eight = __m256;
using EightInts = __m256i;

INLINE Eight load_eight(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, Eight v) { _mm256_storeu_ps(p, v); }
INLINE Eight eight(float v) { return _mm256_set1_ps(v); }
INLINE Eight plus(Eight x, Eight y) { return _mm256_add_ps(x, y); }
INLINE Eight minus(Eight x, Eight y) { return _mm256_sub_ps(x, y); }
INLINE Eight times(Eight x, Eight y) { return _mm256_mul_ps(x, y); }
INLINE Eight fma(Eight x, Eight y, Eight z) { return _mm256_fmadd_ps(x, y, z); }
INLINE EightInts below(Eight x, Eight y) { return _mm256_castps_si256(_mm256_cmp_ps(x, y, _CMP_LT_OQ)); }
INLINE Eight where(EightInts chosen, Eight x, Eight y) {
  return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(chosen));
}
INLINE EightInts where(EightInts chosen, EightInts x, EightInts y) { return _mm256_blendv_epi8(y, x, chosen); }
INLINE Eight least(Eight x, Eight y) { return _mm256_min_ps(x, y); }
INLINE Eight greatest(Eight x, Eight y) { return _mm256_max_ps(x, y); }
INLINE float sum(Eight v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
}

INLINE EightInts load_eight(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE EightInts eight(int32_t v) { return _mm256_set1_epi32(v); }
INLINE EightInts plus(EightInts x, EightInts y) { return _mm256_add_epi32(x, y); }
INLINE EightInts times(EightInts x, EightInts y) { return _mm256_mullo_epi32(x, y); }
INLINE EightInts both(EightInts x, EightInts y) { return _mm256_and_si256(x, y); }
INLINE EightInts either(EightInts x, EightInts y) { return _mm256_or_si256(x, y); }
INLINE EightInts shift_left(EightInts v, int bits) { return _mm256_slli_epi32(v, bits); }
INLINE EightInts shift_right(EightInts v, EightInts bits) { return _mm256_srlv_epi32(v, bits); }
INLINE EightInts multiples(int32_t of) { return _mm256_setr_epi32(0, of, 2 * of, 3 * of, 4 * of, 5 * of, 6 * of, 7 * of); }
INLINE Eight over(Eight x, Eight y) { return _mm256_div_ps(x, y); }
INLINE Eight numbers(EightInts v) { return _mm256_cvtepi32_ps(v); }
INLINE EightInts nearest(Eight v) { return _mm256_cvtps_epi32(v); }
INLINE EightInts bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
INLINE Eight permuted(Eight v, EightInts at) { return _mm256_permutevar8x32_ps(v, at); }
INLINE void store_bytes(uint8_t* p, EightInts v) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(v, v), 0x08);
  const __m128i narrow = _mm256_castsi256_si128(words);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(narrow, narrow));
}

#endif
