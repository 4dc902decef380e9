// Sixteen 32-bit lanes: one register of AVX-512 (with VNNI), a pair of AVX2 registers, or four of NEON. The kernels are
// written once: every instruction has a name here.
//
// Float holds 16 numbers. Int holds 64 bytes: 16 int32, 32 words or bf16, 64 bytes. Products are never contracted into
// fused multiply-adds by the compiler (-ffp-contract=off): where `fma` is not written, rounding is as in the reference.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define WIDE 1
#define NEON 0
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define WIDE 0
#define NEON 0
#elif defined(__aarch64__)
#define WIDE 0
#define NEON 1
#else
#error "neither AVX-512 with VNNI, nor AVX2 with FMA and F16C, nor 64-bit ARM"
#endif

// Pairs of bf16 have dot products. ARM has them together with products of tiles of bytes.
#if (WIDE && defined(__AVX512BF16__)) || (NEON && defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC) && defined(__ARM_FEATURE_MATMUL_INT8))
#define BF16_DOT 1
#else
#define BF16_DOT 0
#endif

// Bytes have dot products that are summed in 32 bits.
#if WIDE || defined(__AVXVNNI__) || defined(__ARM_FEATURE_DOTPROD)
#define VNNI 1
#else
#define VNNI 0
#endif

// Bytes of two rows are multiplied by those of two tokens at once.
#if NEON && defined(__ARM_FEATURE_MATMUL_INT8)
#define SQUARES 1
#else
#define SQUARES 0
#endif

// The instructions that a library is built for.
#if NEON
#define INSTRUCTIONS (BF16_DOT ? "neon-i8mm" : VNNI ? "neon-dotprod" : "neon")
#else
#define INSTRUCTIONS (BF16_DOT ? "avx512-bf16" : WIDE ? "avx512" : VNNI ? "avx2-vnni" : "avx2")
#endif

#define INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;
constexpr int VECTOR_BYTES = 64;
constexpr int PART_STEPS = 8;

template <class Body, int... I>
INLINE void unroll(Body body, std::integer_sequence<int, I...>) {
  (body(std::integral_constant<int, I>()), ...);
}

// body(0) ... body(COUNT - 1) with compile-time indices, so that arrays indexed by them live in registers.
template <int COUNT, class Body>
INLINE void each(Body body) {
  unroll(body, std::make_integer_sequence<int, COUNT>());
}

#if WIDE
#include "cpu_vectors_avx512.h"
#elif NEON
#include "cpu_vectors_neon.h"
#else
#include "cpu_vectors_avx2.h"
#endif

// In 32-bit lanes, high shifted left by LEFT bits with the top bits of low behind it.
template <int LEFT>
INLINE Int joined(Int high, Int low) {
#if WIDE && defined(__AVX512VBMI2__)
  return _mm512_shldi_epi32(high, low, LEFT);
#else
  return either(shift_left<LEFT>(high), shift_right<32 - LEFT>(low));
#endif
}
