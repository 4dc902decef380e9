// Products of 2:4 weights: of every four columns (a quad) two are kept, and only those are read.
//
// Pairs (pairs24.py): 16 kept weights, of eight quads, meet 32 columns of x; one word of positions says which of them.
// A permutation of these columns by the positions gives the 16 that belong to the weights, so a kept weight costs one
// multiplication and a pruned one costs none.
//
//     weights  v0 v1 v2 v3 ...      x of quad 0 | x of quad 1 | ...      sums += v * x[4 (i / 2) + position(i)]
//
// Words (pack24.py): a quarter of a block, 128 columns, is 32 quads; a vector of 16 dwords holds those with even numbers
// in its low words, those with odd numbers in its high ones. Codes become values by a table, kept bits make of the two
// values of 16 quads four vectors, one for each place in the quad, zeros where a weight is pruned: what is read is the
// kept half, what is multiplied is all of it, which costs less here than choosing the columns of every token.
//
//     x packed as [tile of tokens][quarter][even, odd quads][place][tokens of the tile][16 quads]
//
// Where pairs of bf16 are multiplied, both take twice as many columns at a time: 32 kept numbers meet 64 columns, and 32
// quads are one vector of words for each place.

#pragma once

#include "cpu_floats.h"

namespace {

constexpr int QUAD = 4;
constexpr int64_t POSITION_COLUMNS = 32, WORD_COLUMNS = 512, WORD_CODE_BYTES = 128, WORD_KEPT_BYTES = 64;

// Of the values of a weight.
INLINE Type type_of(const Arguments& a) { return a.bits == 16 ? a.value_type : a.scale_type; }

// What rows of a 2:4 weight are read from.
struct Rows24 {
  const Work& work;
  const int32_t* groups;  // of every 32 columns, their group times ROWS
  const char* held(int64_t r) const { return work.row(r); }
  const char* kept(int64_t r, int64_t row_bytes) const {
    return static_cast<const char*>(work.a.kept) + std::min(work.n0 + r, work.a.N - 1) * row_bytes;
  }
};

// One token as dwords of consecutive columns.
template <class D>
struct InOrder {
  static void natural(const Arguments& a, int64_t m, int64_t columns, int32_t* to) {
    natural_dwords<D>(a, m, columns / D::STEP, to);
  }
};

// What pairs of numbers and pairs of codes share: Held::values gives 16 kept weights of a row.
template <class Held>
struct Pairs24 : InOrder<Pairs24<Held>> {
  static constexpr int BLOCK = POSITION_COLUMNS, STEP = 1, PARTS = BLOCK / LANES;
  static constexpr int column(int part, int lane) { return LANES * part + lane; }

  static INLINE int32_t positions(const Rows24& rows, int64_t r, int64_t block) {
    const int64_t words = (rows.work.a.K + POSITION_COLUMNS - 1) / POSITION_COLUMNS;
    int32_t word;
    memcpy(&word, rows.kept(r, words * 4) + block * 4, sizeof word);
    return word;
  }

  template <int TILE, int T>
  static INLINE void dot(const Rows24& rows, int64_t r0, int64_t block, const int32_t* x, Float (&sums)[TILE][T]) {
    const Int shifts = plus(lanes(), lanes()), quads = both(shifts, every(~(QUAD - 1)));
    Float weights[TILE];
    Int at[TILE];
    each<TILE>([&](auto r) {
      weights[r] = Held::values(rows, r0 + r, block);
      at[r] = either(both(shift_right(every(positions(rows, r0 + r, block)), shifts), every(QUAD - 1)), quads);
    });
    each<T>([&](auto t) {
      const Float first = bits_to_float(load(x + t * LANES)), second = bits_to_float(load(x + (T + t) * LANES));
      each<TILE>([&](auto r) { sums[r][t] = fma(weights[r], of_quads(first, second, at[r]), sums[r][t]); });
    });
  }

  // The values of a block of a row, in order.
  static INLINE void values(const Rows24& rows, int64_t r, int64_t block, float* to) {
    const Float held = rounded_to(type_of(rows.work.a), Held::values(rows, r, block));
    const Int place = both(lanes(), every(QUAD - 1)), quad = both(lanes(), every(~(QUAD - 1)));
    const uint32_t words = positions(rows, r, block);
    each<PARTS>([&](auto part) {
      const Int of_quad = shift_right(every(static_cast<int32_t>(words >> LANES * part)), quad);
      const Int first = both(of_quad, every(QUAD - 1)), second = both(shift_right<2>(of_quad), every(QUAD - 1));
      const Float values = plus(where_equal(first, place, of_pairs<part, 0>(held)),
                                where_equal(second, place, of_pairs<part, 1>(held)));
      store(to + LANES * part, float_to_bits(values));
    });
  }
};

struct Numbers24 {
  static INLINE Float values(const Rows24& rows, int64_t r, int64_t block) {
    const Type type = rows.work.a.value_type;
    const int64_t count = rows.work.a.K / 2 - block * LANES;
    const char* from = rows.held(r) + block * LANES * size_of(type);
    return count >= LANES ? load_floats(from, type) : load_floats(from, type, count);
  }
};

struct Codes24 {
  static INLINE Float values(const Rows24& rows, int64_t r, int64_t block) {
    const int64_t count = rows.work.a.K / 2 - block * LANES, at = rows.groups[block] + r;
    const char* from = rows.held(r) + block * LANES;
    const Float codes = to_float(count >= LANES ? widen_bytes(from) : widen_bytes(from, count));
    return times(minus(codes, every(rows.work.float_zero[at])), every(rows.work.scale[at]));
  }
};

using NumberPairs = Pairs24<Numbers24>;
using CodePairs = Pairs24<Codes24>;

// WHOLE: no group ends within a quarter, so that 16 codes have one table of values.
template <bool WHOLE>
struct Words24 : InOrder<Words24<WHOLE>> {
  static constexpr int BLOCK = WORD_COLUMNS / 4, STEP = 1, PARTS = BLOCK / LANES;
  static constexpr int column(int part, int lane) { return QUAD * (2 * lane + part / QUAD) + part % QUAD; }

  // The words of a quarter of a row, its codes in the low bytes of words and its kept bits in the top ones of both.
  struct Quarter {
    Int codes, kept;
    Float table, zero, scale;
    Type type;

    INLINE Quarter(const Rows24& rows, int64_t r, int64_t block) : type(rows.work.a.scale_type) {
      const int64_t blocks = (rows.work.a.K + WORD_COLUMNS - 1) / WORD_COLUMNS, quarter = block % 4;
      const char* from = rows.held(r) + block / 4 * WORD_CODE_BYTES + quarter / 2 * VECTOR_BYTES;
      codes = shift_right(load(from), 8 * static_cast<int>(quarter % 2));
      kept = load(rows.kept(r, blocks * WORD_KEPT_BYTES) + block / 4 * WORD_KEPT_BYTES);
      kept = shift_left(kept, 2 * static_cast<int>(quarter));
      const int32_t* groups = rows.groups + block * (BLOCK / PLANE);
      if constexpr (WHOLE) {
        const int64_t at = groups[0] + r;
        const Float from_zero = minus(to_float(lanes()), every(rows.work.float_zero[at]));
        table = rounded_to(type, times(from_zero, every(rows.work.scale[at])));
      } else {
        int32_t of_lane[LANES];
        each<LANES>([&](auto i) { of_lane[i] = groups[i / 4]; });  // lane i: columns 8 i ... 8 i + 7
        zero = gather(&rows.work.float_zero[r], load(of_lane));
        scale = gather(&rows.work.scale[r], load(of_lane));
      }
    }
    INLINE Float value(Int code) const {
      if constexpr (WHOLE) return lookup(table, code);
      return rounded_to(type, times(minus(to_float(both(code, every(0xf))), zero), scale));
    }
    // The values at the four places of the quads with odd or even numbers.
    template <int ODD>
    INLINE void places(Float (&found)[QUAD]) const {
      const Float first = value(shift_right<16 * ODD>(codes)), second = value(shift_right<16 * ODD + 4>(codes));
      // The order of the bits: columns 0, 2 at the top of the high byte, 1, 3 at that of the low one.
      const Int of0 = shift_left(kept, 16 * (1 - ODD)), of2 = shift_left(of0, 1), of1 = shift_left(of0, 8),
                of3 = shift_left(of0, 9);
      found[0] = where(of0, first);
      found[1] = where(of1, where(of0, second, first));
      found[2] = where(of2, where(of3, first, second));
      found[3] = where(of3, second);
    }
  };

  template <int TILE, int T>
  static INLINE void dot(const Rows24& rows, int64_t r0, int64_t block, const int32_t* x, Float (&sums)[TILE][T]) {
    each<TILE>([&](auto r) {
      const Quarter quarter(rows, r0 + r, block);
      each<2>([&](auto odd) {
        Float places[QUAD];
        quarter.template places<odd>(places);
        each<QUAD>([&](auto p) {
          each<T>([&](auto t) {
            const Float given = bits_to_float(load(x + ((odd * QUAD + p) * T + t) * LANES));
            sums[r][t] = fma(places[p], given, sums[r][t]);
          });
        });
      });
    });
  }

  static INLINE void values(const Rows24& rows, int64_t r, int64_t block, float* to) {
    const Quarter quarter(rows, r, block);
    each<2>([&](auto odd) {
      Float places[QUAD];
      quarter.template places<odd>(places);
      interleave(places);
      each<QUAD>([&](auto i) {
        float runs[LANES];
        store(runs, float_to_bits(places[i]));
        each<QUAD>([&](auto q) { memcpy(to + QUAD * (2 * (4 * q + i) + odd), runs + 4 * q, QUAD * sizeof *to); });
      });
    });
  }
};

#if BF16_DOT
// Numbers that are bf16, with x that is: 32 kept weights of sixteen quads.
struct Bf16Pairs : InOrder<Bf16Pairs> {
  static constexpr int BLOCK = 2 * POSITION_COLUMNS, STEP = 2, PARTS = BLOCK / PLANE;
  static constexpr int column(int part, int lane) { return PLANE * part + 2 * lane; }

  static INLINE Int held(const Rows24& rows, int64_t r, int64_t block) {
    const int64_t left = rows.work.a.K - block * PLANE * 2;  // bytes: two of a number, of two in four columns one
    const char* from = rows.held(r) + block * VECTOR_BYTES;
    if (left >= BLOCK) return load(from);
    char padded[VECTOR_BYTES] = {};
    memcpy(padded, from, left);
    return load(padded);
  }
  // Where each stands among the 64 columns.
  static INLINE Int places(const Rows24& rows, int64_t r, int64_t block) {
    const int64_t bytes = (rows.work.a.K + POSITION_COLUMNS - 1) / POSITION_COLUMNS * 4, at = block * 8;
    const char* from = rows.kept(r, bytes) + at;
    int64_t words = 0;
    memcpy(&words, from, at + 8 <= bytes ? 8 : 4);
    // Eight kept weights have a word of positions; so many lie in a quarter of a vector.
    const Int of_quarter = _mm512_set_epi64(0x0706070607060706, 0x0706070607060706, 0x0504050405040504,
                                            0x0504050405040504, 0x0302030203020302, 0x0302030203020302,
                                            0x0100010001000100, 0x0100010001000100);
    const Int spread = _mm512_shuffle_epi8(_mm512_set1_epi64(words), of_quarter);
    const Int down = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 2, 4, 6, 8, 10, 12, 14));
    const Int quads = _mm512_set_epi16(60, 60, 56, 56, 52, 52, 48, 48, 44, 44, 40, 40, 36, 36, 32, 32, 28, 28, 24, 24,
                                       20, 20, 16, 16, 12, 12, 8, 8, 4, 4, 0, 0);
    const Int three = _mm512_set1_epi16(QUAD - 1);
    return either(both(_mm512_srlv_epi16(spread, down), three), quads);
  }

  template <int TILE, int T>
  static INLINE void dot(const Rows24& rows, int64_t r0, int64_t block, const int32_t* x, Float (&sums)[TILE][T]) {
    Int weights[TILE], at[TILE];
    each<TILE>([&](auto r) {
      weights[r] = held(rows, r0 + r, block);
      at[r] = places(rows, r0 + r, block);
    });
    each<T>([&](auto t) {
      const Int first = load(x + t * LANES), second = load(x + (T + t) * LANES);
      each<TILE>([&](auto r) {
        sums[r][t] = Bf16Dot::dot(sums[r][t], weights[r], _mm512_permutex2var_epi16(first, at[r], second));
      });
    });
  }
};

// Words whose values are bf16, with x that is, where no group ends within a quarter.
struct Bf16Quads {
  static constexpr int BLOCK = WORD_COLUMNS / 4, STEP = 2, PARTS = QUAD;
  static constexpr int column(int part, int lane) { return PLANE * part + 2 * lane; }

  // The columns of a quarter by their places: 32 first ones, 32 second ones ...
  static void natural(const Arguments& a, int64_t m, int64_t columns, int32_t* to) {
    uint16_t* words = reinterpret_cast<uint16_t*>(to);
    const uint16_t* from = static_cast<const uint16_t*>(a.x) + m * a.K;
    for (int64_t k = 0; k < columns; ++k) {
      const int64_t of_quarter = k % BLOCK;
      words[k - of_quarter + of_quarter % QUAD * PLANE + of_quarter / QUAD] = k < a.K ? from[k] : 0;
    }
  }

  template <int TILE, int T>
  static INLINE void dot(const Rows24& rows, int64_t r0, int64_t block, const int32_t* x, Float (&sums)[TILE][T]) {
    const int64_t blocks = (rows.work.a.K + WORD_COLUMNS - 1) / WORD_COLUMNS, quarter = block % 4;
    const int64_t code_bytes = block / 4 * WORD_CODE_BYTES + quarter / 2 * VECTOR_BYTES;
    const __m128i low = _mm_cvtsi32_si128(8 * static_cast<int>(quarter % 2));
    const __m128i up = _mm_cvtsi32_si128(2 * static_cast<int>(quarter));
    const int64_t group = rows.groups[block * (BLOCK / PLANE)];
    each<TILE>([&](auto r) {
      const Int table = Bf16Words<4>::Decoder(rows.work.float_zero[group + r0 + r], rows.work.scale[group + r0 + r], BF16).table;
      const Int first = _mm512_srl_epi16(load(rows.held(r0 + r) + code_bytes), low), second = _mm512_srli_epi16(first, 4);
      const Int bits = load(rows.kept(r0 + r, blocks * WORD_KEPT_BYTES) + block / 4 * WORD_KEPT_BYTES);
      const Int kept = _mm512_sll_epi16(bits, up);
      const auto is_kept = [&](uint16_t bit) __attribute__((always_inline)) {
        return _mm512_test_epi16_mask(kept, _mm512_set1_epi16(static_cast<int16_t>(bit)));
      };
      const __mmask32 kept0 = is_kept(1 << 15), kept1 = is_kept(1 << 7), kept2 = is_kept(1 << 14), kept3 = is_kept(1 << 6);
      const Int places[QUAD] = {
          _mm512_maskz_permutexvar_epi16(kept0, first, table),
          _mm512_maskz_permutexvar_epi16(kept1, _mm512_mask_blend_epi16(kept0, first, second), table),
          _mm512_maskz_permutexvar_epi16(kept2, _mm512_mask_blend_epi16(kept3, second, first), table),
          _mm512_maskz_permutexvar_epi16(kept3, second, table),
      };
      each<QUAD>([&](auto p) {
        each<T>([&](auto t) { sums[r][t] = Bf16Dot::dot(sums[r][t], places[p], load(x + (p * T + t) * LANES)); });
      });
    });
  }
};
#endif

template <class D>
int64_t padded24(const Arguments& a) {
  return (a.K + D::BLOCK - 1) / D::BLOCK * D::BLOCK;
}

Memory<int32_t> groups24(const Arguments& a, int64_t columns) {
  Memory<int32_t> groups = groups_of(columns, PLANE, a.group, std::max<int64_t>(a.G, 1));
  for (int64_t i = 0; i < (columns + PLANE - 1) / PLANE; ++i) groups[i] *= ROWS;
  return groups;
}

template <class D, int TILE, int T>
void rows24(const Rows24& rows, const int32_t* x, int64_t columns, int64_t m0) {
  const Work& work = rows.work;
  const int64_t blocks = columns / D::BLOCK, pieces = work.a.row_bytes / VECTOR_BYTES;
  const int64_t kept_bytes = columns / 8, kept_pieces = kept_bytes / VECTOR_BYTES;  // one bit of a column
  for (int64_t r0 = 0; r0 < work.count(); r0 += TILE) {
    Float sums[TILE][T];
    each<TILE>([&](auto r) { each<T>([&](auto t) { sums[r][t] = every(0.0f); }); });
    const char* kept = static_cast<const char*>(work.a.kept) + (work.n0 + r0 + ROWS_AHEAD) * kept_bytes;
    int64_t fetched = 0, kept_fetched = 0;
    for (int64_t block = 0; block < blocks; ++block) {
      for (; fetched * blocks < TILE * pieces * (block + 1); ++fetched) work.fetch_near(r0 + ROWS_AHEAD, fetched);
      for (; kept_fetched * blocks < TILE * kept_pieces * (block + 1); ++kept_fetched)
        _mm_prefetch(kept + kept_fetched * VECTOR_BYTES, _MM_HINT_T0);
      D::template dot<TILE, T>(rows, r0, block, x + (m0 * columns + block * D::BLOCK * T) / D::STEP, sums);
    }
    work.finish_rows<TILE, T>(m0, static_cast<int>(r0), sums);
  }
}

template <class D>
void product24(const Arguments& a) {
  const int64_t columns = padded24<D>(a);
  const Memory<int32_t> groups = groups24(a, columns);
  const int64_t dwords = columns / D::STEP;
  const Memory<int32_t> packed = allocate<int32_t>(a.M * dwords), natural = allocate<int32_t>(a.threads * dwords);
  const auto prepare = [&](int64_t m, int thread) {
    int32_t* own = &natural[thread * dwords];
    D::natural(a, m, columns, own);
    arrange<D>(own, packed.get(), m, columns, D::STEP, a);
  };
  run(a, 0, prepare, [&](Work& work) {
    const Rows24 rows{work, groups.get()};
    in_powers_of_two(a.M, [&](int64_t m, auto t) { rows24<D, ROW_TILE, t>(rows, packed.get(), columns, m); });
  });
}

// The values of all rows, K of each.
template <class D>
void expand(const Arguments& a) {
  const int64_t columns = padded24<D>(a);
  const Memory<int32_t> groups = groups24(a, columns);
  const Type type = type_of(a);
  run(a, 0, [](int64_t, int) {}, [&](Work& work) {
    const Rows24 rows{work, groups.get()};
    float values[D::BLOCK];
    for (int64_t r = 0; r < work.count(); ++r)
      for (int64_t k = 0; k < columns; k += D::BLOCK) {
        D::values(rows, r, k / D::BLOCK, values);
        char* to = static_cast<char*>(a.out) + ((work.n0 + r) * a.K + k) * size_of(type);
        for (int64_t i = 0; i < std::min<int64_t>(D::BLOCK, a.K - k); i += LANES)
          store_floats(to + i * size_of(type), type, bits_to_float(load(values + i)), a.K - k - i);
      }
  });
}

}  // namespace
