// Exact products with weights in strips (cpu_strip_lines.h draws them): values times x, in fp32 or in pairs of bf16, with
// sparse rows added to them.

#pragma once

#include "cpu_floats.h"
#include "cpu_products.h"
#include "cpu_strip_lines.h"
#include "cpu_tiles.h"

namespace {

// Of the entries beside a strip, what they add to its outputs of T tokens.
template <int T>
void add_entries(const Work& work, const GatheredX& gathered, int64_t m0, int v, Float (&totals)[T]) {
  if constexpr (ENTRIES) {
    float found[T][LANES];
    for (int r = 0; r < LANES; ++r) {
      Float sums[1][T];
      each<T>([&](auto t) { sums[0][t] = every(0.0f); });
      add_entries<1, T>(work, gathered, m0, v * LANES + r, sums);
      each<T>([&](auto t) { found[t][r] = sum(sums[0][t]); });
    }
    each<T>([&](auto t) { totals[t] = plus(totals[t], bits_to_float(load(found[t]))); });
  }
}

// Values of the codes of a line, before they are scaled, in units of UNIT: codes less their zero point.
template <int WIDTH>
struct CodeValues : LineCodes<WIDTH> {
  static constexpr int BITS = WIDTH;
  static constexpr float UNIT = 1;
  Float zero;

  INLINE explicit CodeValues(const Work&) {}
  INLINE void begin(const Work& work, int64_t at) { zero = bits_to_float(load(&work.float_zero[at])); }
  template <int CODE>
  INLINE Float value() const {
    return minus(LineCodes<BITS>::template value<CODE>(), zero);
  }
};

// The same from a table of 16.
struct TableValues : LineTable {
  static constexpr int BITS = 4;
  static constexpr float UNIT = 1;

  INLINE explicit TableValues(const Work& work) : LineTable(bits_to_float(load(work.a.table))) {}
  INLINE void begin(const Work&, int64_t) {}
};

#if NEON
// The same of codes less 8: where all zero points are that, nothing is subtracted.
struct CentredValues : LineCodes<4> {
  static constexpr int BITS = 4;
  static constexpr float UNIT = 1;

  INLINE explicit CentredValues(const Work&) : LineCodes<4>(8.0f) {}
  INLINE void begin(const Work&, int64_t) {}
};
#endif

#if BYTE_TABLES
// The same of whole numbers: a table of bytes, of which two shuffles find those of all codes of a line, and another each
// puts them on top of their lanes. Where registers have eight lanes, numbers take two permutations and a choice.
struct ByteValues {
  static constexpr int BITS = 4;
  static constexpr float UNIT = 0x1p-24f;
  ByteTable table;
  Int low, high;

  INLINE explicit ByteValues(const Work& work) {
    int8_t bytes[LANES];
    for (int i = 0; i < LANES; ++i) bytes[i] = static_cast<int8_t>(work.a.table[i]);
    table = byte_table(bytes);
  }
  INLINE void begin(const Work&, int64_t) {}
  INLINE void take(Int words) {
    low = lookup_bytes(table, both(words, every(0x0f0f0f0f)));
    high = lookup_bytes(table, both(shift_right<4>(words), every(0x0f0f0f0f)));
  }
  template <int CODE>
  INLINE Float value() const {
    return to_float(byte_on_top<CODE / 2>(CODE % 2 ? high : low));
  }
  static bool holds(const float* table) {
    return std::all_of(table, table + LANES, [](float v) { return v == static_cast<int8_t>(v); });
  }
};
#endif

// Scales of the rows of a strip, times the unit of their values.
template <class Values>
INLINE Float scale_of(const Work& work, int64_t at) {
  const Float scale = bits_to_float(load(&work.scale[at]));
  return Values::UNIT == 1 ? scale : times(scale, every(Values::UNIT));
}

// T tokens times a strip, in the order of float_product's slabs: x [columns][T].
template <class Values, int T>
void strip_floats(const Work& work, const GatheredX& gathered, const int32_t* x, int64_t columns, int64_t group,
                  int64_t m0, int v) {
  constexpr int BITS = Values::BITS, COLUMNS = 32 / BITS;
  constexpr int SETS = std::max(CHAINS / T, 1);
  const char* line = strip_of(work, v);
  Values values(work);
  Float totals[T];
  each<T>([&](auto t) { totals[t] = bits_to_float(load(work.bias + v * LANES)); });
  for (int64_t g = 0, k = 0; k < columns; ++g) {
    values.begin(work, g * ROWS + v * LANES);
    Float sums[SETS][T];
    each<SETS>([&](auto i) { each<T>([&](auto t) { sums[i][t] = every(0.0f); }); });
    const int64_t end = std::min(k + group, columns);
    for (; k < end; k += COLUMNS, line += VECTOR_BYTES, x += COLUMNS * T) {
      values.take(load(line));
      fetch(line + AHEAD);
      each<COLUMNS>([&](auto n) {
        constexpr int i = code_in_turn<BITS>(n);
        const Float value = values.template value<i>();
        each<T>([&](auto t) {
          sums[n % SETS][t] = fma(value, bits_to_float(every_at(&x[column_of<BITS>(i) * T + t])), sums[n % SETS][t]);
        });
      });
    }
    const Float scale = scale_of<Values>(work, g * ROWS + v * LANES);
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
  static constexpr uint64_t place(uint64_t column) {
    const uint64_t within = column % (2 * PAIRS);
    return column - within + within / 2 + within % 2 * PAIRS;
  }
};

// Columns of 16 bytes of x in the order of their codes.
INLINE void natural_pairs(const Arguments& a, int64_t m, int64_t dwords, int32_t* to, Order order) {
  memset(to, 0, dwords * sizeof *to);
  memcpy(to, static_cast<const char*>(a.x) + m * a.K * 2, a.K * 2);
  for (int64_t k = 0; k < dwords; k += LANES) store(to + k, within_lanes(load(to + k), order));
}
template <>
void natural_dwords<Bf16Strips<4>>(const Arguments& a, int64_t m, int64_t dwords, int32_t* to) {
  // (0, 2), (4, 6), (1, 3), (5, 7)
  natural_pairs(a, m, dwords, to, order<0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15>());
}
template <>
void natural_dwords<Bf16Strips<8>>(const Arguments& a, int64_t m, int64_t dwords, int32_t* to) {
  // (0, 2), (1, 3)
  natural_pairs(a, m, dwords, to, order<0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15>());
}

// Pairs of bf16: codes less their zero point, or where that is a number, codes; or values of a table.
template <int BITS, Zeros ZEROS>
struct PairDecoder : PairTable<ZEROS == CODES> {
  INLINE explicit PairDecoder(const Arguments& a) : PairTable<ZEROS == CODES>(values(a)) {}
  static INLINE Float values(const Arguments& a) {
    if constexpr (ZEROS == TABLE) return bits_to_float(load(a.table));
    return minus(to_float(lanes()), every(ZEROS == MIDDLE ? 8.0f : 0.0f));
  }
};

template <Zeros ZEROS>
struct PairDecoder<8, ZEROS> : LineCodes<8> {
  Float zero;

  INLINE explicit PairDecoder(const Arguments&) : zero(every(ZEROS == MIDDLE ? 128.0f : 0.0f)) {}
  INLINE void begin(const int32_t* zeros) {
    if constexpr (ZEROS == CODES) zero = to_float(load(zeros));
  }
  template <int PAIR>
  INLINE Int pair() const {
    return upper_halves(minus(value<PAIR>(), zero), minus(value<PAIR + 2>(), zero));
  }
};

// As strip_floats, by pairs: x [lines][PAIRS][T]. Where zero points are numbers, a group's sum of x times them is taken
// from the codes' sum: x_sums [M][G].
template <int BITS, int T, Zeros ZEROS>
void strip_pairs(const Work& work, const GatheredX& gathered, const int32_t* x, const float* x_sums, int64_t columns,
                 int64_t group, int64_t m0, int v) {
  constexpr int COLUMNS = 32 / BITS, PAIRS = Bf16Strips<BITS>::PAIRS, SETS = std::max(std::min(PAIRS, CHAINS) / T, 1);
  const char* line = strip_of(work, v);
  PairDecoder<BITS, ZEROS> decoder(work.a);
  Float totals[T];
  each<T>([&](auto t) { totals[t] = bits_to_float(load(work.bias + v * LANES)); });
  for (int64_t g = 0, k = 0; k < columns; ++g) {
    const int64_t of_group = g * ROWS + v * LANES;
    decoder.begin(&work.zero[of_group]);
    Float sums[SETS][T];
    each<SETS>([&](auto i) { each<T>([&](auto t) { sums[i][t] = every(0.0f); }); });
    if constexpr (ZEROS == NUMBERS) {
      const Float taken = minus(every(0.0f), bits_to_float(load(&work.float_zero[of_group])));
      each<T>([&](auto t) { sums[0][t] = times(taken, every(x_sums[(m0 + t) * work.a.G + g])); });
    }
    const int64_t end = std::min(k + group, columns);
    for (; k < end; k += COLUMNS, line += VECTOR_BYTES, x += PAIRS * T) {
      decoder.take(load(line));
      fetch_line<BITS == 4 && T == 1>(line);
      each<PAIRS>([&](auto n) {
        constexpr int i = pair_in_turn<BITS>(n);
        const Int pair = decoder.template pair<i>();
        each<T>([&](auto t) { sums[n % SETS][t] = dot_pairs(sums[n % SETS][t], pair, every_at(&x[i * T + t])); });
      });
    }
    const Float scale = bits_to_float(load(&work.scale[of_group]));
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
      const Int given = every_at(&x[t]);
      each<VECTORS>([&](auto v) { sums[t][v] = dot_pairs(sums[t][v], pairs[v], given); });
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

// Slabs of pairs, of columns that share their scales: stored(pair) of every one that the decoder makes.
template <int BITS, class Decoder, class Stored>
INLINE void pair_strip_slab(const Work& work, Decoder& decoder, int v, int64_t first, int64_t last, char* to,
                            Stored stored) {
  constexpr int COLUMNS = 32 / BITS, PAIRS = Bf16Strips<BITS>::PAIRS;
  const char* line = strip_of(work, v) + first / COLUMNS * VECTOR_BYTES;
  for (int64_t k = first; k < last; k += COLUMNS, line += VECTOR_BYTES) {
    decoder.take(load(line));
    fetch(line + AHEAD);
    each<PAIRS>([&](auto i) {
      store(to, stored(decoder.template pair<i>()));
      to += VECTORS * VECTOR_BYTES;
    });
  }
}

// All columns of the rows that a thread works on, at most a chunk of those that share their scales at a time; every
// tile of tokens runs over the chunk's slab, so that a token is summed alike in any company.
template <int BITS, Zeros ZEROS>
void strip_pair_slabs(Work& work, const int32_t* packed, int64_t columns, int64_t group) {
  const TokenTiles tiles(work.a.M);
  PairDecoder<BITS, ZEROS> decoder(work.a);
  for (int64_t k = 0, end; k < columns; k = end) {
    const int64_t g = k / group, first = k / 2 / CHUNK * CHUNK, dwords = std::min(CHUNK, columns / 2 - first);
    end = std::min((g + 1) * group, (first + dwords) * 2);
    for (int v = 0; v * LANES < work.count(); ++v) {
      decoder.begin(&work.zero[g * ROWS + v * LANES]);
      char* to = work.slab.get() + v * VECTOR_BYTES;
      pair_strip_slab<BITS>(work, decoder, v, k, end, to, [](Int pair) { return pair; });
    }
    for (int64_t tile = 0; tile < tiles.count; ++tile)
      with_constant<TOKENS>(tiles.size(tile), [&](auto t) {
        const int64_t m = tiles.start(tile);
        const int32_t* x = &packed[first * work.a.M + m * dwords + (k / 2 - first) * t];
        pair_tile<t>(work, x, (end - k) / 2, m, k == 0, &work.scale[g * ROWS]);
      });
  }
  work.finish(0, static_cast<int>(work.a.M), nullptr);
}

// Slabs of values rounded to bf16, for `float_tile`: where entries are added, and where zero points are numbers.
template <int BITS, Zeros ZEROS>
void value_strip_slab(const Work& work, int64_t group, int64_t first, int64_t last) {
  PairDecoder<BITS, ZEROS> decoder(work.a);
  for (int v = 0; v * LANES < work.count(); ++v)
    for (int64_t k = first, end; k < last; k = end) {
      end = std::min((k / group + 1) * group, last);
      const int64_t at = k / group * ROWS + v * LANES;
      const Float scale = bits_to_float(load(&work.scale[at]));
      const Float taken = times(minus(every(0.0f), bits_to_float(load(&work.float_zero[at]))), scale);
      decoder.begin(&work.zero[at]);
      const auto value = [&](Int code) __attribute__((always_inline)) {
        return ZEROS == NUMBERS ? fma(bits_to_float(code), scale, taken) : times(bits_to_float(code), scale);
      };
      const auto valued = [&](Int pairs) __attribute__((always_inline)) {
        const Float high = value(both(pairs, every(static_cast<int32_t>(0xffff0000))));
        return in_pairs(to_bf16s(value(shift_left(pairs, 16)), high));
      };
      char* to = work.slab.get() + ((k - first) / 2 * VECTORS + v) * VECTOR_BYTES;
      pair_strip_slab<BITS>(work, decoder, v, k, end, to, valued);
    }
}
#endif

// Slabs of floats, for `float_tile`.
template <class Values>
void float_strip_slab(const Work& work, int64_t group, int64_t first, int64_t last) {
  constexpr int BITS = Values::BITS, COLUMNS = 32 / BITS;
  Values values(work);
  for (int v = 0; v * LANES < work.count(); ++v) {
    const char* line = strip_of(work, v) + first / COLUMNS * VECTOR_BYTES;
    char* to = work.slab.get() + v * VECTOR_BYTES;
    for (int64_t k = first; k < last;) {
      const int64_t at = k / group * ROWS + v * LANES;
      const Float scale = scale_of<Values>(work, at);
      values.begin(work, at);
      for (const int64_t end = std::min((k / group + 1) * group, last); k < end; k += COLUMNS) {
        values.take(load(line));
        fetch(line + AHEAD);
        each<COLUMNS>([&](auto i) {
          const Float value = times(values.template value<i>(), scale);
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
  static constexpr uint64_t place(uint64_t column) { return column; }
};

// x of D in tiles, and for entries: body(work, packed, gathered) for the rows that a thread works on, whose strips are
// read front to back; prepare_more(m) before, for every token.
template <class D, class Prepare, class Body>
void with_tokens(const Arguments& a, int64_t columns, const TokenTiles& tiles, Prepare prepare_more, Body body) {
  const int64_t dwords = columns / D::STEP;
  const Memory<int32_t> packed = allocate<int32_t>(a.M * dwords);
  const Memory<int32_t> natural = allocate<int32_t>(a.threads * dwords);
  const GatheredX gathered(a);
  const auto prepare = [&](int64_t m, int thread) {
    int32_t* own = &natural[thread * dwords];
    natural_dwords<D>(a, m, dwords, own);
    tiles.arrange(own, packed.get(), m, dwords, dwords);
    gathered.prepare(m);
    prepare_more(m);
  };
  run(a, 0, prepare, [&](Work& work) {
    if (a.levels != nullptr) decode_levels(work);
    body(work, packed.get(), gathered);
  });
}

// Slabs of values, which make_slab(work, first, last) makes, and entries added to them.
template <class D, class Words, class MakeSlab>
void strip_value_slabs(const Arguments& a, int64_t columns, MakeSlab make_slab) {
  run_slabs<D>(a, columns / D::STEP, [&](Work* works, int64_t count, const int32_t* packed) {
    for (int64_t i = 0; i < count && a.levels != nullptr; ++i) decode_levels(works[i]);
    over_chunks<D>(works, count, packed, columns, [&](Work& work, int64_t first, int64_t last) {
      make_slab(work, first, last);
      add_entries<Words>(work, first, last, D::place);
    });
  });
}

#if BF16_DOT
template <int BITS, Zeros ZEROS>
void strip_pair_product(const Arguments& a) {
  const int64_t columns = a.row_bytes * 8 / BITS, group = a.group > 0 ? a.group : columns;
  using Held = Bf16Strips<BITS>;
  if (!a.by_rows) {
    if constexpr (ZEROS == NUMBERS || ENTRIES)
      return strip_value_slabs<Held, Bf16Words<BITS>>(a, columns, [&](Work& work, int64_t first, int64_t last) {
        value_strip_slab<BITS, ZEROS>(work, group, first, last);
      });
    else
      return run_slabs<Held>(a, columns / 2, [&](Work* works, int64_t count, const int32_t* packed) {
        for (int64_t i = 0; i < count; ++i) strip_pair_slabs<BITS, ZEROS>(works[i], packed, columns, group);
      });
  }
  const TokenTiles tiles(a.M, STRIP_PAIR_TOKENS);
  const Memory<float> x_sums = allocate<float>(ZEROS == NUMBERS ? a.M * a.G : 0);
  const auto sum_groups = [&](int64_t m) {
    if (ZEROS != NUMBERS) return;
    float* sums = &x_sums[m * a.G];
    std::fill_n(sums, a.G, 0.0f);
    const char* from = static_cast<const char*>(a.x) + m * a.K * 2;
    for (int64_t k = 0; k < a.K; k += LANES) sums[k / group] += sum(load_floats(from + k * 2, BF16));
  };
  with_tokens<Bf16Strips<BITS>>(
      a, columns, tiles, sum_groups, [&](Work& work, const int32_t* packed, const GatheredX& gathered) {
        over_strips<STRIP_PAIR_TOKENS>(work, tiles, [&](int64_t m, auto t, int v) {
          strip_pairs<BITS, t, ZEROS>(work, gathered, packed + m * (columns / 2), x_sums.get(), columns, group, m, v);
        });
      });
}
#endif

template <class Values>
void strip_float_product(const Arguments& a) {
  constexpr int BITS = Values::BITS;
  const int64_t columns = a.row_bytes * 8 / BITS, group = a.group > 0 ? a.group : columns;
  if (!a.by_rows)
    return strip_value_slabs<FloatStrips, F32Words<BITS>>(a, columns, [&](Work& work, int64_t first, int64_t last) {
      float_strip_slab<Values>(work, group, first, last);
    });
  const TokenTiles tiles(a.M, STRIP_TOKENS);
  with_tokens<FloatStrips>(
      a, columns, tiles, [](int64_t) {}, [&](Work& work, const int32_t* x, const GatheredX& gathered) {
        over_strips<STRIP_TOKENS>(work, tiles, [&](int64_t m, auto t, int v) {
          strip_floats<Values, t>(work, gathered, x + m * columns, columns, group, m, v);
        });
      });
}

// Of codes that are numbers.
template <int BITS>
void code_float_product(const Arguments& a) {
#if NEON
  if constexpr (BITS == 4)
    if (a.zero == nullptr && a.levels == nullptr) return strip_float_product<CentredValues>(a);
#endif
  strip_float_product<CodeValues<BITS>>(a);
}

// Of codes of a table of 16.
void table_float_product(const Arguments& a) {
#if BYTE_TABLES
  if (ByteValues::holds(a.table)) return strip_float_product<ByteValues>(a);
#endif
  strip_float_product<TableValues>(a);
}

}  // namespace
