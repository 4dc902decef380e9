// The product with codes whose scales and zero points are codes themselves (SpQR; pack_tiles.py draws the layout).
//
// A row's scales and zero points are decoded, as fp32, when the row's turn comes: scale = lowest + step * code, and the
// zero point likewise, in the order of `pack_tiles.tile_scales`. Groups are whole halves of a plane, 16 columns.
//
//   rows    sum_k (u - z) s x = sum_g s (sum u x) - sum_g (s z) (sum x): codes are numbers that need no arithmetic, a
//           vector of products is scaled at once, and the zero points cost one multiplication per group, by the sum of
//           the x of that group. The two sums meet before they are rounded.
//   slabs   values (u - z) s rounded to the type of the ranges, then as in cpu_floats.h

#pragma once

#include "cpu_floats.h"

namespace {

constexpr int HALF_PLANE = PLANE / 2;

// Scales and zero points of rows, 16 groups at a time.
struct Levels {
  const Arguments& a;
  const int64_t groups = a.K / a.group;
  const int64_t padded = (groups + LANES - 1) / LANES * LANES;

  // body(g, scale, zero) for every 16 groups of row n; zeros past the last.
  template <class Body>
  INLINE void of_row(int64_t n, Body body) const {
    const int64_t size = size_of(a.scale_type);
    const char* range = static_cast<const char*>(a.scale) + n / a.tile_rows * 4 * groups * size;
    for (int64_t g = 0; g < groups; g += LANES) {
      const int64_t count = groups - g;
      const uint8_t* at = a.zero + n * groups + g;
      Int scale = widen_bytes(at, count), zero = shift_right<4>(scale);
      if (a.level_bits == 4)
        scale = both(scale, every(0xf));
      else
        zero = widen_bytes(at + a.N * groups, count);
      const auto line = [&](int64_t i) { return load_floats(range + (i * groups + g) * size, a.scale_type, count); };
      body(g, plus(line(1), times(line(0), to_float(scale))), plus(line(3), times(line(2), to_float(zero))));
    }
  }
};

// The words of `F32Words`: lanes 0 to 7 are of the first half of a plane.
template <int WIDTH>
struct F32Tiles : F32Words<WIDTH> {
  struct Codes {
    template <int PART>
    INLINE Float decode(Int words) const {
      return to_float(both(shift_right<16 * PART>(words), every((1 << WIDTH) - 1)));
    }
  };
  static INLINE Float dot(Float sums, Float codes, Int x, Float scale) {
    return fma(times(codes, scale), bits_to_float(x), sums);
  }

  struct Decoder {
    float zero[2], scale[2];
    Type type;
    template <int PART>
    INLINE Int decode(Int words) const {
      const Float codes = Codes().template decode<PART>(words);
      const Float from_zero = minus(codes, side_by_side(zero[0], zero[1]));
      return float_to_bits(rounded_to(type, times(from_zero, side_by_side(scale[0], scale[1]))));
    }
  };
};

#if BF16_DOT
// The words of `Bf16Words`; every code below 2^8 is a bf16.
template <int WIDTH>
struct Bf16Tiles : Bf16Words<WIDTH> {
  static INLINE Int words_of(Float low, Float high) { return (Int)_mm512_cvtne2ps_pbh(high, low); }
  static INLINE Float low(Int words) { return to_float(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(words))); }
  static INLINE Float high(Int words) { return to_float(_mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(words, 1))); }
  static INLINE Int masked(Int words) { return both(words, _mm512_set1_epi16((1 << WIDTH) - 1)); }

  struct Codes {
    Int table = words_of(to_float(lanes()), to_float(lanes()));  // of 4-bit codes, twice, as in `Bf16Words`
    template <int PART>
    INLINE Int decode(Int words) const {
      if constexpr (WIDTH == 4) return _mm512_permutexvar_epi16(words, table);
      return words_of(low(masked(words)), high(masked(words)));
    }
  };
  static INLINE Float dot(Float sums, Int codes, Int x, Float scale) {
    return fma(Bf16Dot::dot(every(0.0f), codes, x), scale, sums);
  }

  struct Decoder {
    float zero[2], scale[2];
    Type type;
    template <int PART>
    INLINE Int decode(Int words) const {
      const Int codes = masked(words);
      return words_of(times(minus(low(codes), every(zero[0])), every(scale[0])),
                      times(minus(high(codes), every(zero[1])), every(scale[1])));
    }
  };
};
#endif

// What the loop over rows reads of x; scales: room for those of TILE rows.
struct TileInput {
  const Levels levels;
  const int32_t* packed;
  const float* group_sums;  // [M][groups]
  const GatheredX& gathered;
  const int32_t* group_of_half;
  int64_t columns;
};

template <class D, int TILE, int T>
void tile_rows(const Work& work, const TileInput& x, float* scales, int64_t m0) {
  constexpr int PLANES = D::BLOCK / PLANE;
  const int64_t padded = x.levels.padded;
  const typename D::Codes codes_of;
  for (int r0 = 0; r0 < work.count(); r0 += TILE) {
    const char* rows[TILE];
    Float sums[TILE][T];
    each<TILE>([&](auto r) {
      rows[r] = work.row(r0 + r);
      each<T>([&](auto t) { sums[r][t] = every(0.0f); });
      x.levels.of_row(std::min(work.n0 + r0 + r, work.a.N - 1), [&](int64_t g, Float scale, Float zero) {
        store(&scales[r * padded + g], float_to_bits(scale));
        const Float taken = minus(every(0.0f), times(scale, zero));
        each<T>([&](auto t) {
          sums[r][t] = fma(taken, bits_to_float(load(&x.group_sums[(m0 + t) * padded + g])), sums[r][t]);
        });
      });
    });
    for (int64_t block = 0; block < x.columns / D::BLOCK; ++block) {
      const int32_t* from = x.packed + m0 * (x.columns / D::STEP) + block * D::PARTS * T * LANES;
      const int32_t* groups = &x.group_of_half[block * PLANES * 2];
      Int words[TILE];
      each<TILE>([&](auto r) {
        words[r] = load(rows[r] + block * VECTOR_BYTES);
        work.fetch_near(r0 + ROWS_AHEAD, block * TILE + r);
      });
      for (int plane = 0; plane < PLANES; ++plane, groups += 2, from += D::PARTS_OF_PLANE * T * LANES) {
        Float scale[TILE];
        each<TILE>([&](auto r) {
          scale[r] = side_by_side(scales[r * padded + groups[0]], scales[r * padded + groups[1]]);
        });
        each<D::PARTS_OF_PLANE>([&](auto part) {
          each<TILE>([&](auto r) {
            const auto codes = codes_of.template decode<part>(words[r]);
            each<T>([&](auto t) {
              sums[r][t] = D::dot(sums[r][t], codes, load(from + (part * T + t) * LANES), scale[r]);
            });
          });
        });
        each<TILE>([&](auto r) { words[r] = shift_right<D::BITS>(words[r]); });
      }
    }
    add_entries<TILE, T>(work, x.gathered, m0, r0, sums);
    work.finish_rows<TILE, T>(m0, r0, sums);
  }
}

template <class D>
void tile_product(const Arguments& given) {
  Arguments a = given;
  a.G = 0;  // no scales but those of `Levels`
  const Levels levels{given};
  const int64_t padded = levels.padded, columns = a.row_bytes * 8 / (PLANE * 16 / D::BLOCK);
  const int64_t dwords = columns / D::STEP;
  const Memory<int32_t> group_of_half = groups_of(columns, HALF_PLANE, a.group, levels.groups);
  const Memory<int32_t> packed = allocate<int32_t>(a.M * dwords), natural = allocate<int32_t>(a.threads * dwords);
  const Memory<float> group_sums = allocate<float>(a.by_rows ? a.M * padded : 0);
  // Of every thread, scales and zero points of the rows that it works on.
  const int64_t of_rows = (a.by_rows ? ROW_TILE : ROWS) * padded;
  const Memory<float> scales = allocate<float>(a.threads * of_rows);
  const Memory<float> zeros = allocate<float>(a.by_rows ? 0 : a.threads * of_rows);
  const GatheredX gathered(a);
  const auto prepare = [&](int64_t m, int thread) {
    int32_t* own = &natural[thread * dwords];
    natural_dwords<D>(a, m, dwords, own);
    arrange<D>(own, packed.get(), m, columns, D::STEP, a);
    gathered.prepare(m);
    if (!a.by_rows) return;
    float* sums = &group_sums[m * padded];
    std::fill_n(sums, padded, 0.0f);
    const char* from = static_cast<const char*>(a.x) + m * a.K * size_of(a.x_type);
    for (int64_t k = 0; k < a.K; k += LANES)
      sums[k / a.group] += sum(load_floats(from + k * size_of(a.x_type), a.x_type));
  };
  run(a, a.by_rows ? 0 : CHUNK * ROWS * 4, prepare, [&](Work& work) {
    float* own_scales = &scales[work.thread * of_rows];
    if (a.by_rows) {
      const TileInput x{levels, packed.get(), group_sums.get(), gathered, group_of_half.get(), columns};
      return in_powers_of_two(a.M, [&](int64_t m, auto t) { tile_rows<D, ROW_TILE, t>(work, x, own_scales, m); });
    }
    float* own_zeros = &zeros[work.thread * of_rows];
    for (int64_t r = 0; r < ROWS; ++r)
      levels.of_row(std::min(work.n0 + r, a.N - 1), [&](int64_t g, Float scale, Float zero) {
        store(own_scales + r * padded + g, float_to_bits(scale));
        store(own_zeros + r * padded + g, float_to_bits(zero));
      });
    const auto decoder_of = [&](const Work&, int64_t row, int64_t plane) __attribute__((always_inline)) {
      const int64_t start = row * padded;
      const int64_t first = start + group_of_half[2 * plane], second = start + group_of_half[2 * plane + 1];
      return typename D::Decoder{
          {own_zeros[first], own_zeros[second]}, {own_scales[first], own_scales[second]}, a.scale_type};
    };
    float_slabs<D>(&work, 1, packed.get(), columns, false, decoder_of);
  });
}

}  // namespace
