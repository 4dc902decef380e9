// Shared by AVX2 and AVX-512, below cpu_vectors.h.

#pragma once

#include <immintrin.h>

#include "cpu_vectors.h"

// Brings 64 bytes near: to the first cache, or to the second.
INLINE void fetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
INLINE void fetch_far(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

constexpr int32_t LOWERED = 0;

INLINE float half_to_float(uint16_t half) { return _cvtsh_ss(half); }

// An order of the bytes of 16.
using Order = __m128i;
template <int... AT>
INLINE Order order() {
  return _mm_setr_epi8(AT...);
}
