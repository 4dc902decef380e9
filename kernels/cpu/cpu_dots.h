// Dot products of bytes of 16 rows with bytes of T tokens: four columns of every row, and the four that follow.

#pragma once

#include "cpu_vectors.h"

#if SQUARES

// ARM multiplies eight columns of two rows by those of two tokens at once. An odd token at the end is multiplied alone.
template <int T>
struct ByteDots {
  static constexpr int PAIRS = T / 2;
  int32x4_t squares[PAIRS + 1][8];  // of rows 2 i and 2 i + 1: [row][token]
  Int last;

  INLINE ByteDots() : last(every(0)) {
    each<PAIRS>([&](auto p) { each<8>([&](auto i) { squares[p][i] = vdupq_n_s32(0); }); });
  }

  // x: [2][T] dwords.
  INLINE void add(Int low, Int high, const int32_t* x) {
    int32x4_t given[PAIRS + 1];
    each<PAIRS>([&](auto p) {
      given[p] = vcombine_s32(vld1_s32(x + 2 * p), vld1_s32(x + T + 2 * p));
      given[p] = vzip1q_s32(given[p], vextq_s32(given[p], given[p], 2));
    });
    each<4>([&](auto q) {
      const int32x4_t rows[] = {vzip1q_s32(quarter<q>(low), quarter<q>(high)), vzip2q_s32(quarter<q>(low), quarter<q>(high))};
      each<PAIRS>([&](auto p) {
        each<2>([&](auto i) { squares[p][2 * q + i] = vmmlaq_s32(squares[p][2 * q + i], s8(rows[i]), s8(given[p])); });
      });
    });
    if constexpr (T % 2)
      last = dot_nibbles(dot_nibbles(last, low, every_at(x + T - 1)), high, every_at(x + 2 * T - 1));
  }

  INLINE void add_to(Int (&sums)[T]) {
    each<PAIRS>([&](auto p) {
      each<4>([&](auto q) {
        const int32x4_t x = squares[p][2 * q], y = squares[p][2 * q + 1];
        quarter<q>(sums[2 * p]) = vaddq_s32(quarter<q>(sums[2 * p]), vuzp1q_s32(x, y));
        quarter<q>(sums[2 * p + 1]) = vaddq_s32(quarter<q>(sums[2 * p + 1]), vuzp2q_s32(x, y));
      });
    });
    if constexpr (T % 2) sums[T - 1] = plus(sums[T - 1], last);
  }
};

#else

template <int T>
struct ByteDots {
  static constexpr int SETS = T == 1 ? 2 : 1;
  Part parts[SETS][T];

  INLINE ByteDots() {
    each<SETS>([&](auto i) { each<T>([&](auto t) { parts[i][t] = no_part(); }); });
  }
  INLINE void add(Int low, Int high, const int32_t* x) {
    each<T>([&](auto t) { parts[0][t] = dot_nibbles(parts[0][t], low, every_at(x + t)); });
    each<T>([&](auto t) { parts[SETS - 1][t] = dot_nibbles(parts[SETS - 1][t], high, every_at(x + T + t)); });
  }
  INLINE void add_to(Int (&sums)[T]) {
    each<SETS>([&](auto i) { each<T>([&](auto t) { sums[t] = plus(sums[t], sum_part(parts[i][t])); }); });
  }
};

#endif
