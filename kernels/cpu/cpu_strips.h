// Weights of 4 and 8 bits in strips (pack_strips.py): 16 rows side by side, 32 bits of each in every 64 bytes.
//
// A line of a strip is a vector of 16 dwords, one of each row. Of 4 bits, byte b of a dword holds column b in its low
// four bits and column b + 4 in its high ones; of 8 bits, column b. So a line is read once, from front to back of the
// strip, and
//
//   int8 inputs     its low nibbles meet columns 0 ... 3 of x in one dot product of bytes, its high ones columns 4 to 7
//   exact inputs    code i of a dword, shifted down and masked, becomes a number of every row
//   exact bf16      a dword, shifted down, has two codes, of columns c and c + 2, which become a pair of bf16: codes
//                   less their zero point are whole numbers, which bf16 has all of; those of 4 bits come from a table
//
// with x broadcast, a sum in every lane and the scales of a group in one vector: nothing is added up across lanes.
//
// Few tokens: a strip is decoded in registers, once for each tile of tokens. More: a chunk of it is decoded into a
// slab, over which every tile runs, as it does for planar words. Values of the weight are not rounded to the type of
// the scales: slabs hold them in fp32, or in bf16 before they are scaled (beside sparse rows after it).

#pragma once

#include "cpu_floats.h"
#include "cpu_ints.h"

namespace {

// Columns of a line of 4 bits.
constexpr int LINE = 8;
// Columns of strips are padded to whole segments, which are as many as a part of a sum takes.
constexpr int STRIP_BLOCK = 4 * PART_STEPS;
// Tokens that are multiplied straight from the strip: sums, decoded words and one broadcast fill the registers.
constexpr int STRIP_TOKENS = 4, STRIP_PAIR_TOKENS = 8;
// Tokens that meet a strip, one tile after the other: of 4096 columns in bf16, 2 MiB.
constexpr int64_t STRIP_TOKEN_BLOCK = 256;
// Tokens up to which pairs are not worth a slab: of 8 bits, which take longer to decode, and beside entries.
constexpr int64_t BYTE_PAIRS_BY_ROWS = 48, ENTRIES_BY_ROWS = 16;
// Bytes between a line that is decoded and the one that is fetched.
constexpr int AHEAD = 2048;

INLINE const char* strip_of(const Work& work, int v) {
  return static_cast<const char*>(work.a.weight) + (work.n0 / LANES + v) * LANES * work.a.row_bytes;
}

// The column of a line's code i, counted from the lowest bits; and its number, of every row.
template <int BITS>
constexpr int column_of(int i) {
  return BITS == 4 ? i / 2 + i % 2 * (LINE / 2) : i;
}
template <int BITS, int CODE>
INLINE Float code_of(Int words) {
  return to_float(both(shift_right<BITS * CODE>(words), every((1 << BITS) - 1)));
}

// Of the entries beside a strip, what they add to its outputs of T tokens.
template <int T>
void add_entries(const Work& work, const GatheredX& gathered, int64_t m0, int v, Float (&totals)[T]) {
  if (work.a.row_start == nullptr) return;
  float found[T][LANES];
  for (int r = 0; r < LANES; ++r) {
    Float sums[1][T];
    each<T>([&](auto t) { sums[0][t] = every(0.0f); });
    add_entries<1, T>(work, gathered, m0, v * LANES + r, sums);
    each<T>([&](auto t) { found[t][r] = sum(sums[0][t]); });
  }
  each<T>([&](auto t) { totals[t] = plus(totals[t], bits_to_float(load(found[t]))); });
}

// T tokens times a strip, in the order of float_product's slabs: x [columns][T].
template <int BITS, int T>
void strip_floats(const Work& work, const GatheredX& gathered, const int32_t* x, int64_t columns, int64_t group,
                  int64_t m0, int v) {
  constexpr int COLUMNS = 32 / BITS, SETS = T >= 4 ? 1 : 4 / T;  // sums of one output that do not wait for each other
  const char* line = strip_of(work, v);
  Float totals[T];
  each<T>([&](auto t) { totals[t] = bits_to_float(load(work.bias + v * LANES)); });
  for (int64_t g = 0, k = 0; k < columns; ++g) {
    const Float zero = bits_to_float(load(&work.float_zero[g * ROWS + v * LANES]));
    Float sums[SETS][T];
    each<SETS>([&](auto i) { each<T>([&](auto t) { sums[i][t] = every(0.0f); }); });
    const int64_t end = std::min(k + group, columns);
    for (; k < end; k += COLUMNS, line += VECTOR_BYTES, x += COLUMNS * T) {
      const Int words = load(line);
      _mm_prefetch(line + AHEAD, _MM_HINT_T0);
      each<COLUMNS>([&](auto i) {
        const Float value = minus(code_of<BITS, i>(words), zero);
        each<T>([&](auto t) {
          sums[i % SETS][t] = fma(value, bits_to_float(every(x[column_of<BITS>(i) * T + t])), sums[i % SETS][t]);
        });
      });
    }
    const Float scale = bits_to_float(load(&work.scale[g * ROWS + v * LANES]));
    each<T>([&](auto t) {
      each<SETS - 1>([&](auto i) { sums[0][t] = plus(sums[0][t], sums[i + 1][t]); });
      totals[t] = fma(sums[0][t], scale, totals[t]);
    });
  }
  add_entries<T>(work, gathered, m0, v, totals);
  each<T>([&](auto t) { work.finish(m0 + t, v * LANES, totals[t], LANES); });
}

#if BF16_DOT
// x in pairs of columns c and c + 2, as a line has them: first the even columns.
template <int WIDTH>
struct Bf16Strips {
  using Dot = Bf16Dot;
  static constexpr int STEP = 2, BITS = WIDTH, PAIRS = 16 / BITS;
  static constexpr int64_t place(int64_t column) {
    const int64_t within = column % (2 * PAIRS);
    return column - within + within / 2 + within % 2 * PAIRS;
  }
};

// Columns of 16 bytes of x in the order of their codes.
INLINE void natural_pairs(const Arguments& a, int64_t m, int64_t dwords, int32_t* to, __m128i order) {
  memset(to, 0, dwords * sizeof *to);
  memcpy(to, static_cast<const char*>(a.x) + m * a.K * 2, a.K * 2);
  for (int64_t k = 0; k < dwords; k += LANES) store(to + k, within_lanes(load(to + k), order));
}
template <>
void natural_dwords<Bf16Strips<4>>(const Arguments& a, int64_t m, int64_t dwords, int32_t* to) {
  // (0, 2), (4, 6), (1, 3), (5, 7)
  natural_pairs(a, m, dwords, to, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
}
template <>
void natural_dwords<Bf16Strips<8>>(const Arguments& a, int64_t m, int64_t dwords, int32_t* to) {
  // (0, 2), (1, 3)
  natural_pairs(a, m, dwords, to, _mm_setr_epi8(0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15));
}

// Codes less their zero point, pairs of them in bf16. CENTRED: all zero points are in the middle of the codes.
template <int BITS, bool CENTRED>
struct PairDecoder {
  Int table, zeros;  // of 4 bits

  INLINE PairDecoder() {
    const Float low = minus(to_float(lanes()), every(CENTRED ? 8.0f : 0.0f));
    // Indices are five bits: of a code and one bit more of its word, or of a number from -15 on.
    const Float high = CENTRED ? low : minus(low, every(16.0f));
    table = (Int)_mm512_cvtne2ps_pbh(high, low);
  }
  INLINE void begin(const int32_t* zero) {
    if constexpr (!CENTRED) zeros = either(load(zero), shift_left(load(zero), 16));
  }
  template <int PAIR>
  INLINE Int decode(Int words) const {
    Int codes = shift_right<4 * PAIR>(words);
    if constexpr (!CENTRED) codes = _mm512_sub_epi16(both(codes, every(0x000f000f)), zeros);
    return _mm512_permutexvar_epi16(codes, table);
  }
};

template <bool CENTRED>
struct PairDecoder<8, CENTRED> {
  Float zero;

  INLINE PairDecoder() : zero(every(128.0f)) {}
  INLINE void begin(const int32_t* zeros) {
    if constexpr (!CENTRED) zero = to_float(load(zeros));
  }
  template <int PAIR>
  INLINE Int decode(Int words) const {
    const Int low = float_to_bits(minus(code_of<8, PAIR>(words), zero));
    const Int high = float_to_bits(minus(code_of<8, PAIR + 2>(words), zero));
    return either(both(high, every(static_cast<int32_t>(0xffff0000))), shift_right<16>(low));
  }
};

// As strip_floats, by pairs: x [lines][PAIRS][T].
template <int BITS, int T, bool CENTRED>
void strip_pairs(const Work& work, const GatheredX& gathered, const int32_t* x, int64_t columns, int64_t group,
                 int64_t m0, int v) {
  constexpr int COLUMNS = 32 / BITS, PAIRS = Bf16Strips<BITS>::PAIRS, SETS = T >= PAIRS ? 1 : PAIRS / T;
  const char* line = strip_of(work, v);
  PairDecoder<BITS, CENTRED> decoder;
  Float totals[T];
  each<T>([&](auto t) { totals[t] = bits_to_float(load(work.bias + v * LANES)); });
  for (int64_t g = 0, k = 0; k < columns; ++g) {
    decoder.begin(&work.zero[g * ROWS + v * LANES]);
    Float sums[SETS][T];
    each<SETS>([&](auto i) { each<T>([&](auto t) { sums[i][t] = every(0.0f); }); });
    const int64_t end = std::min(k + group, columns);
    for (; k < end; k += COLUMNS, line += VECTOR_BYTES, x += PAIRS * T) {
      const Int words = load(line);
      _mm_prefetch(line + AHEAD, _MM_HINT_T0);
      each<PAIRS>([&](auto i) {
        const Int pair = decoder.template decode<i>(words);
        each<T>([&](auto t) { sums[i % SETS][t] = Bf16Dot::dot(sums[i % SETS][t], pair, every(x[i * T + t])); });
      });
    }
    const Float scale = bits_to_float(load(&work.scale[g * ROWS + v * LANES]));
    each<T>([&](auto t) {
      each<SETS - 1>([&](auto i) { sums[0][t] = plus(sums[0][t], sums[i + 1][t]); });
      totals[t] = fma(sums[0][t], scale, totals[t]);
    });
  }
  add_entries<T>(work, gathered, m0, v, totals);
  each<T>([&](auto t) { work.finish(m0 + t, v * LANES, totals[t], LANES); });
}

// Pairs of a slab times T tokens, for columns that share their scales: x [steps][T].
template <int T>
void pair_tile(const Work& work, const int32_t* x, int64_t steps, int64_t m0, bool first, const float* scale) {
  Float sums[T][VECTORS];
  each<T>([&](auto t) { each<VECTORS>([&](auto v) { sums[t][v] = every(0.0f); }); });
  const char* slab = work.slab.get();
  for (int64_t k = 0; k < steps; ++k, x += T, slab += VECTORS * VECTOR_BYTES) {
    Int pairs[VECTORS];
    each<VECTORS>([&](auto v) { pairs[v] = load(slab + v * VECTOR_BYTES); });
    each<T>([&](auto t) {
      const Int given = every(x[t]);
      each<VECTORS>([&](auto v) { sums[t][v] = Bf16Dot::dot(sums[t][v], pairs[v], given); });
    });
  }
  each<VECTORS>([&](auto v) {
    const Float of_rows = bits_to_float(load(scale + v * LANES));
    each<T>([&](auto t) {
      int32_t* kept = &work.sums[(m0 + t) * ROWS + v * LANES];
      const Float before = first ? every(0.0f) : bits_to_float(load(kept));
      store(kept, float_to_bits(fma(sums[t][v], of_rows, before)));
    });
  });
}

// Pairs times the scales of their rows, rounded to bf16.
INLINE Int scaled_pairs(Int pairs, Float scale) {
  const Int in_pairs = either(lanes(), shift_left(plus(lanes(), every(LANES)), 16));  // of 16 numbers and 16 more
  const Float low = times(bits_to_float(shift_left(pairs, 16)), scale);
  const Float high = times(bits_to_float(both(pairs, every(static_cast<int32_t>(0xffff0000)))), scale);
  return _mm512_permutexvar_epi16(in_pairs, (Int)_mm512_cvtne2ps_pbh(high, low));
}

// All columns of the rows that a thread works on, at most a chunk of those that share their scales at a time; every
// tile of tokens runs over the chunk's slab, so that a token is summed alike in any company. Where entries are added to
// it, a slab has values rounded to bf16.
template <int BITS, bool CENTRED>
void strip_pair_slabs(Work& work, const TokenTiles& tiles, const int32_t* packed, int64_t columns, int64_t group) {
  constexpr int COLUMNS = 32 / BITS, PAIRS = Bf16Strips<BITS>::PAIRS;
  const bool entries = work.a.row_start != nullptr;
  PairDecoder<BITS, CENTRED> decoder;
  float ones[ROWS];
  std::fill_n(ones, ROWS, 1.0f);
  for (int64_t k = 0, end; k < columns; k = end) {
    const int64_t g = k / group, first = k / 2 / CHUNK * CHUNK, dwords = std::min(CHUNK, columns / 2 - first);
    end = std::min((g + 1) * group, (first + dwords) * 2);
    for (int v = 0; v * LANES < work.count(); ++v) {
      const char* line = strip_of(work, v) + k / COLUMNS * VECTOR_BYTES;
      char* to = work.slab.get() + v * VECTOR_BYTES;
      const Float scale = bits_to_float(load(&work.scale[g * ROWS + v * LANES]));
      decoder.begin(&work.zero[g * ROWS + v * LANES]);
      for (int64_t i = k; i < end; i += COLUMNS, line += VECTOR_BYTES) {
        const Int words = load(line);
        _mm_prefetch(line + AHEAD, _MM_HINT_T0);
        each<PAIRS>([&](auto pair) {
          const Int pairs = decoder.template decode<pair>(words);
          store(to, entries ? scaled_pairs(pairs, scale) : pairs);
          to += VECTORS * VECTOR_BYTES;
        });
      }
    }
    add_entries<Bf16Words<BITS>>(work, k, end, Bf16Strips<BITS>::place);
    for (int64_t tile = 0; tile < tiles.count; ++tile)
      with_constant<TOKENS>(tiles.size(tile), [&](auto t) {
        const int64_t m = tiles.start(tile);
        const int32_t* x = &packed[first * work.a.M + m * dwords + (k / 2 - first) * t];
        pair_tile<t>(work, x, (end - k) / 2, m, k == 0, entries ? ones : &work.scale[g * ROWS]);
      });
  }
  work.finish(0, static_cast<int>(work.a.M), nullptr);
}
#endif

// The same of x in codes: dwords [columns / 4][T].
template <int T>
void strip_ints(const Work& work, const Activations& x, int64_t m0, int v) {
  constexpr int SETS = T == 1 ? 2 : 1;
  const char* line = strip_of(work, v);
  const int32_t* from = &x.packed[m0 * (x.columns / 4)];
  Float totals[T];
  each<T>([&](auto t) { totals[t] = bits_to_float(load(work.bias + v * LANES)); });
  for (int64_t s = 0, k = 0; s < x.segments; ++s) {
    const int64_t at = static_cast<int64_t>(x.weight_group[s]) * ROWS + v * LANES;
    Int sums[T];
    each<T>([&](auto t) { sums[t] = times(load(&work.zero[at]), every(-x.sums[(m0 + t) * x.segments + s])); });
    for (const int64_t end = std::min(k + x.segment, x.columns); k < end; k += STRIP_BLOCK) {
      Int parts[SETS][T];
      each<SETS>([&](auto i) { each<T>([&](auto t) { parts[i][t] = every(0); }); });
      each<STRIP_BLOCK / LINE>([&](auto) {
        const Int words = load(line);
        _mm_prefetch(line + AHEAD, _MM_HINT_T0);
        const Int low = both(words, every(0x0f0f0f0f)), high = both(shift_right<4>(words), every(0x0f0f0f0f));
        each<T>([&](auto t) { parts[0][t] = dot_nibbles(parts[0][t], low, every(from[t])); });
        each<T>([&](auto t) { parts[SETS - 1][t] = dot_nibbles(parts[SETS - 1][t], high, every(from[T + t])); });
        line += VECTOR_BYTES;
        from += 2 * T;
      });
      each<SETS>([&](auto i) { each<T>([&](auto t) { sums[t] = plus(sums[t], sum_part(parts[i][t])); }); });
    }
    const Float scale = bits_to_float(load(&work.scale[at]));
    each<T>([&](auto t) {
      const Float given = every(x.scale[(m0 + t) * x.scales + x.input_group[s]]);
      totals[t] = fma(times(to_float(sums[t]), given), scale, totals[t]);
    });
  }
  each<T>([&](auto t) { work.finish(m0 + t, v * LANES, totals[t], LANES); });
}

// Slabs of bytes and of floats, for `int_tile` and `float_tile`.
void int_strip_slab(const Work& work, int64_t first, int64_t last) {
  for (int v = 0; v * LANES < work.count(); ++v) {
    const char* line = strip_of(work, v) + first / LINE * VECTOR_BYTES;
    char* to = work.slab.get() + v * VECTOR_BYTES;
    for (int64_t k = first; k < last; k += LINE, line += VECTOR_BYTES, to += 2 * VECTORS * VECTOR_BYTES) {
      const Int words = load(line);
      _mm_prefetch(line + AHEAD, _MM_HINT_T0);
      store(to, both(words, every(0x0f0f0f0f)));
      store(to + VECTORS * VECTOR_BYTES, both(shift_right<4>(words), every(0x0f0f0f0f)));
    }
  }
}

template <int BITS>
void float_strip_slab(const Work& work, int64_t group, int64_t first, int64_t last) {
  constexpr int COLUMNS = 32 / BITS;
  for (int v = 0; v * LANES < work.count(); ++v) {
    const char* line = strip_of(work, v) + first / COLUMNS * VECTOR_BYTES;
    char* to = work.slab.get() + v * VECTOR_BYTES;
    for (int64_t k = first; k < last;) {
      const int64_t at = k / group * ROWS + v * LANES;
      const Float zero = bits_to_float(load(&work.float_zero[at])), scale = bits_to_float(load(&work.scale[at]));
      for (const int64_t end = std::min((k / group + 1) * group, last); k < end; k += COLUMNS) {
        const Int words = load(line);
        _mm_prefetch(line + AHEAD, _MM_HINT_T0);
        each<COLUMNS>([&](auto i) {
          const Float value = times(minus(code_of<BITS, i>(words), zero), scale);
          store(to + column_of<BITS>(i) * (VECTORS * VECTOR_BYTES), float_to_bits(value));
        });
        line += VECTOR_BYTES;
        to += COLUMNS * VECTORS * VECTOR_BYTES;
      }
    }
  }
}

struct FloatStrips {
  using Dot = F32Dot;
  static constexpr int STEP = 1;
};

// body(m, tokens, vector) for every tile of at most MOST tokens and every strip of the rows that a thread works on.
template <int MOST, class Body>
void over_strips(const Work& work, const TokenTiles& tiles, Body body) {
  for (int64_t tile = 0; tile < tiles.count; ++tile)
    with_constant<MOST>(tiles.size(tile), [&](auto t) {
      for (int v = 0; v * LANES < work.count(); ++v) body(tiles.start(tile), t, v);
    });
}

// x of D in tiles, and for entries: body(work, packed, gathered) for the rows that a thread works on.
template <class D, class Body>
void with_tokens(const Arguments& a, int64_t columns, const TokenTiles& tiles, Body body) {
  const int64_t dwords = columns / D::STEP;
  const Memory<int32_t> packed = allocate<int32_t>(a.M * dwords);
  const Memory<int32_t> natural = allocate<int32_t>(a.threads * dwords);
  const GatheredX gathered(a);
  const auto prepare = [&](int64_t m, int thread) {
    int32_t* own = &natural[thread * dwords];
    natural_dwords<D>(a, m, dwords, own);
    tiles.arrange(own, packed.get(), m, dwords, a.by_rows ? dwords : CHUNK);
    gathered.prepare(m);
  };
  run(a, a.by_rows ? 0 : CHUNK * ROWS * 4, prepare, [&](Work& work) { body(work, packed.get(), gathered); });
}

#if BF16_DOT
template <int BITS, bool CENTRED>
void strip_pair_product(const Arguments& a, int64_t columns, int64_t group) {
  const TokenTiles tiles(a.M, a.by_rows ? STRIP_PAIR_TOKENS : TOKENS);
  with_tokens<Bf16Strips<BITS>>(a, columns, tiles, [&](Work& work, const int32_t* packed, const GatheredX& gathered) {
    if (!a.by_rows) return strip_pair_slabs<BITS, CENTRED>(work, tiles, packed, columns, group);
    over_strips<STRIP_PAIR_TOKENS>(work, tiles, [&](int64_t m, auto t, int v) {
      strip_pairs<BITS, t, CENTRED>(work, gathered, packed + m * (columns / 2), columns, group, m, v);
    });
  });
}
#endif

template <int BITS>
void strip_float_product(const Arguments& a) {
  const int64_t columns = a.row_bytes * 8 / BITS, group = a.group > 0 ? a.group : columns;
#if BF16_DOT
  if (a.x_type == BF16)
    return a.zero == nullptr ? strip_pair_product<BITS, true>(a, columns, group)
                             : strip_pair_product<BITS, false>(a, columns, group);
#endif
  if (a.by_rows) {
    const TokenTiles tiles(a.M, STRIP_TOKENS);
    return with_tokens<FloatStrips>(a, columns, tiles, [&](Work& work, const int32_t* x, const GatheredX& gathered) {
      over_strips<STRIP_TOKENS>(work, tiles, [&](int64_t m, auto t, int v) {
        strip_floats<BITS, t>(work, gathered, x + m * columns, columns, group, m, v);
      });
    });
  }
  run_slabs<FloatStrips>(a, columns, [&](Work* works, int64_t count, const int32_t* packed) {
    over_chunks<FloatStrips>(works, count, packed, columns, [&](Work& work, int64_t first, int64_t last) {
      float_strip_slab<BITS>(work, group, first, last);
      add_entries<F32Words<BITS>>(work, first, last);
    });
  });
}

void strip_int_product(const Arguments& a) {
  Activations x(a, STRIP_BLOCK, false);
  const int64_t chunk = x.chunk(STRIP_BLOCK);
  const Memory<int8_t> natural = allocate<int8_t>(a.threads * x.columns);
  const TokenTiles tiles(a.M, a.by_rows ? STRIP_TOKENS : PART_TOKENS);
  const auto prepare = prepare_codes(a, x, natural.get(), [&](const int32_t* codes, int64_t m) {
    tiles.arrange(codes, x.packed.get(), m, x.columns / 4, (a.by_rows ? x.columns : chunk) / 4);
  });
  run(a, a.by_rows ? 0 : chunk * ROWS, prepare, [&](Work& work) {
    if (a.by_rows)
      return over_strips<STRIP_TOKENS>(work, tiles, [&](int64_t m, auto t, int v) { strip_ints<t>(work, x, m, v); });
    int_chunks<true>(work, x, chunk, int_strip_slab);
  });
}

}  // namespace
