// The weight-only product: values of planar words times x, in fp32 or in pairs of bf16, with sparse rows added to them.

#pragma once

#include "cpu_sparse.h"

namespace {

// sums + the products of the dwords of w and x.
struct F32Dot {
  static INLINE Float dot(Float sums, Int w, Int x) { return fma(bits_to_float(w), bits_to_float(x), sums); }
};

// Values of planar words: `decode` reads the lowest plane, a loop over planes shifts the words down by BITS.
// fp32: the 16 pairs of words of a block give 16 even and 16 odd columns of a plane.
template <int WIDTH>
struct F32Words {
  using Dot = F32Dot;
  static constexpr int BITS = WIDTH, BLOCK = PLANE * 16 / BITS, STEP = 1, PARTS = BLOCK / LANES, PARTS_OF_PLANE = 2;
  static constexpr int column(int part, int lane) { return PLANE * (part / 2) + 2 * lane + part % 2; }
  static void add(char* to, float value) { *reinterpret_cast<float*>(to) += value; }

  struct Decoder {
    Float zero, scale, table;  // the table of the values of 4-bit codes
    Type type = F32;

    INLINE Decoder() {}
    INLINE Decoder(float z, float s, Type t) : zero(every(z)), scale(every(s)), type(t) {
      if constexpr (BITS == 4) table = value(lanes());
    }
    template <int PART>
    INLINE Int decode(Int words) const {
      const Int codes = shift_right<16 * PART>(words);
      if constexpr (BITS == 4) return float_to_bits(lookup(table, codes));
      return float_to_bits(value(both(codes, every(0xff))));
    }
    INLINE Float value(Int codes) const { return rounded_to(type, times(minus(to_float(codes), zero), scale)); }
  };
};

#if BF16_DOT
struct Bf16Dot {
  static INLINE Float dot(Float sums, Int w, Int x) { return dot_pairs(sums, w, x); }
};

// bf16: the 32 words of a block give the 32 columns of a plane in order.
template <int WIDTH>
struct Bf16Words {
  using Dot = Bf16Dot;
  static constexpr int BITS = WIDTH, BLOCK = PLANE * 16 / BITS, STEP = 2, PARTS = BLOCK / PLANE, PARTS_OF_PLANE = 1;
  static constexpr int column(int part, int lane) { return PLANE * part + 2 * lane; }
  static void add(char* to, float value) {
    const uint16_t sum = to_bf16(load_float(to, BF16) + value);
    memcpy(to, &sum, sizeof sum);
  }

  struct Decoder {
    Float zero, scale;
    WordTable table;  // of 4-bit values

    INLINE Decoder() {}
    INLINE Decoder(float z, float s, Type) : zero(every(z)), scale(every(s)) {
      if constexpr (BITS == 4) table = WordTable(value(lanes()));
    }
    template <int PART>
    INLINE Int decode(Int words) const {
      static_assert(PART == 0);
      if constexpr (BITS == 4) {
        return table.of(words);
      } else {
        const Int bytes = both(words, every(0x00ff00ff));
        return to_bf16s(value(low_words(bytes)), value(high_words(bytes)));
      }
    }
    INLINE Float value(Int codes) const { return times(minus(to_float(codes), zero), scale); }
  };
};
#endif

// `whole`: no group ends within a block.
template <class D, int TILE, int T>
void float_rows(const Work& work, const int32_t* x, const GatheredX& gathered, const int32_t* group_of_plane,
                int64_t columns, bool whole, int64_t m0) {
  using Decoder = typename D::Decoder;
  constexpr int PLANES = D::BLOCK / PLANE;
  for (int r0 = 0; r0 < work.count(); r0 += TILE) {
    const char* rows[TILE];
    for (int r = 0; r < TILE; ++r) rows[r] = work.row(r0 + r);
    Float sums[TILE][T];
    each<TILE>([&](auto r) { each<T>([&](auto t) { sums[r][t] = every(0.0f); }); });
    for (int64_t block = 0; block < columns / D::BLOCK; ++block) {
      const int32_t* from = x + m0 * (columns / D::STEP) + block * D::PARTS * T * LANES;
      Int words[TILE];
      Decoder decoders[TILE];
      const auto prepare = [&](int plane) __attribute__((always_inline)) {
        const int64_t at = static_cast<int64_t>(group_of_plane[block * PLANES + plane]) * ROWS + r0;
        each<TILE>([&](auto r) { decoders[r] = work.decoder<Decoder>(at + r); });
      };
      each<TILE>([&](auto r) {
        words[r] = load(rows[r] + block * VECTOR_BYTES);
        work.fetch_near(r0 + ROWS_AHEAD, block * TILE + r);
      });
      for (int plane = 0; plane < PLANES; ++plane, from += D::PARTS_OF_PLANE * T * LANES) {
        if (plane == 0 || !whole) prepare(plane);
        each<D::PARTS_OF_PLANE>([&](auto part) {
          Int values[TILE];
          each<TILE>([&](auto r) { values[r] = decoders[r].template decode<part>(words[r]); });
          each<T>([&](auto t) {
            const Int given = load(from + (part * T + t) * LANES);
            each<TILE>([&](auto r) { sums[r][t] = D::Dot::dot(sums[r][t], values[r], given); });
          });
        });
        each<TILE>([&](auto r) { words[r] = shift_right<D::BITS>(words[r]); });
      }
    }
    add_entries<TILE, T>(work, gathered, m0, r0, sums);
    work.finish_rows<TILE, T>(m0, r0, sums);
  }
}

// decoder_of(row, plane); `whole`: one for all planes of a block.
template <class D, class DecoderOf>
void float_slab(const Work& work, int64_t first, int64_t last, bool whole, DecoderOf decoder_of) {
  using Decoder = typename D::Decoder;
  constexpr int PLANES = D::BLOCK / PLANE;
  for (int64_t block = first / D::BLOCK; block < last / D::BLOCK; ++block)
    for (int v = 0; v < VECTORS; ++v) {
      const char* rows[LANES];
      Decoder decoders[LANES];
      for (int r = 0; r < LANES; ++r) {
        rows[r] = work.row(v * LANES + r) + block * VECTOR_BYTES;
        work.fetch_far(ROWS, (block * VECTORS + v) * LANES + r);
      }
      const auto prepare = [&](int plane) __attribute__((always_inline)) {
        for (int r = 0; r < LANES; ++r) decoders[r] = decoder_of(v * LANES + r, block * PLANES + plane);
      };
      char* to = work.slab.get() + ((block * D::BLOCK - first) / D::STEP * VECTORS + v) * VECTOR_BYTES;
      for (int plane = 0; plane < PLANES; ++plane, to += PLANE / D::STEP * VECTORS * VECTOR_BYTES) {
        if (plane == 0 || !whole) prepare(plane);
        each<D::PARTS_OF_PLANE>([&](auto part) {
          Int tile[LANES];
          each<LANES>([&](auto r) {
            tile[r] = decoders[r].template decode<part>(shift_right(load(rows[r]), plane * D::BITS));
          });
          transpose(tile);
          each<LANES>([&](auto i) { store(to + D::column(part, i) / D::STEP * (VECTORS * VECTOR_BYTES), tile[i]); });
        });
      }
    }
}

// Steps of the loop below that are one: chunks are made of whole planes, which are as many steps or a multiple.
constexpr int UNROLLED = WIDE ? 1 : 4;

template <class Dot, int T>
void float_tile(const Work& work, const int32_t* x, int64_t steps, int64_t m0, bool first, bool last) {
  Float sums[T][VECTORS];
  int32_t* kept = &work.sums[m0 * ROWS];
  each<T>([&](auto t) {
    each<VECTORS>([&](auto v) {
      sums[t][v] = first ? every(0.0f) : bits_to_float(load(kept + t * ROWS + v * LANES));
    });
  });
  const char* slab = work.slab.get();
  for (int64_t k = 0; k < steps; k += UNROLLED, x += UNROLLED * T, slab += UNROLLED * VECTORS * VECTOR_BYTES)
    each<UNROLLED>([&](auto i) {
      Int weights[VECTORS];
      each<VECTORS>([&](auto v) { weights[v] = load(slab + (i * VECTORS + v) * VECTOR_BYTES); });
      each<T>([&](auto t) {
        const Int given = every_at(&x[i * T + t]);
        each<VECTORS>([&](auto v) { sums[t][v] = Dot::dot(sums[t][v], weights[v], given); });
      });
    });
  each<T>([&](auto t) {
    each<VECTORS>([&](auto v) { store(kept + t * ROWS + v * LANES, float_to_bits(sums[t][v])); });
  });
  if (last) work.finish(m0, T, nullptr);
}

// All columns of the slabs that a thread works on, a chunk at a time, which make_slab(work, first, last) makes; x of all
// tokens packed for it.
template <class D, class MakeSlab>
void over_chunks(Work* works, int64_t count, const int32_t* packed, int64_t columns, MakeSlab make_slab) {
  const int64_t M = works->a.M;
  const TokenTiles tiles(M);
  for (int64_t first = 0; first < columns; first += CHUNK * D::STEP) {
    const int64_t last = std::min(first + CHUNK * D::STEP, columns), steps = (last - first) / D::STEP;
    for (int64_t i = 0; i < count; ++i) {
      Work& work = works[i];
      make_slab(work, first, last);
      for (int64_t tile = 0; tile < tiles.count; ++tile)
        with_constant<TOKENS>(tiles.size(tile), [&](auto t) {
          const int64_t m = tiles.start(tile);
          const int32_t* from = &packed[first / D::STEP * M + m * steps];
          float_tile<typename D::Dot, t>(work, from, steps, m, first == 0, last == columns);
        });
    }
  }
}

// decoder_of(work, row, plane).
template <class D, class DecoderOf>
void float_slabs(Work* works, int64_t count, const int32_t* packed, int64_t columns, bool whole, DecoderOf decoder_of) {
  over_chunks<D>(works, count, packed, columns, [&](Work& work, int64_t first, int64_t last) {
    float_slab<D>(work, first, last, whole,
                  [&](int64_t row, int64_t plane)
                      __attribute__((always_inline)) { return decoder_of(work, row, plane); });
    add_entries<D>(work, first, last);
  });
}

// One token as the dwords of D in their natural order, zeros past K.
template <class D>
void natural_dwords(const Arguments& a, int64_t m, int64_t dwords, int32_t* to) {
  memset(to, 0, dwords * sizeof *to);
  const char* from = static_cast<const char*>(a.x) + m * a.K * size_of(a.x_type);
  if (D::STEP == 2) {
    memcpy(to, from, a.K * 2);
  } else {
    for (int64_t k = 0; k < a.K; k += LANES)
      store_floats(to + k, F32, load_floats(from + k * size_of(a.x_type), a.x_type, a.K - k), a.K - k);
  }
}

// Slabs of all rows, by float_slabs or over_chunks: body(works, count, packed). x of D, packed a tile at a time.
template <class D, class Body>
void run_slabs(const Arguments& a, int64_t dwords, Body body) {
  const TokenTiles tiles(a.M);
  const Memory<int32_t> packed = allocate<int32_t>(a.M * dwords);
  const Memory<int32_t> natural = allocate<int32_t>(a.threads * TOKENS * dwords);
  const auto prepare = [&](int64_t tile, int thread) {
    int32_t* own = &natural[thread * TOKENS * dwords];
    for (int64_t t = 0; t < tiles.size(tile); ++t) natural_dwords<D>(a, tiles.start(tile) + t, dwords, own + t * dwords);
    tiles.arrange_tile(own, packed.get(), tile, dwords, CHUNK);
  };
  run_together(a, CHUNK * ROWS * 4, TOGETHER, tiles.count, prepare,
               [&](Work* works, int64_t count) { body(works, count, packed.get()); });
}

template <class D>
void float_product(const Arguments& a) {
  using Decoder = typename D::Decoder;
  const bool whole = a.group <= 0 || a.group % D::BLOCK == 0;
  const int64_t columns = a.row_bytes * 8 / (PLANE * 16 / D::BLOCK), dwords = columns / D::STEP;
  const Memory<int32_t> group_of_plane = groups_of(columns, PLANE, a.group, a.G);
  if (!a.by_rows)
    return run_slabs<D>(a, dwords, [&](Work* works, int64_t count, const int32_t* packed) {
      float_slabs<D>(works, count, packed, columns, whole,
                     [&](const Work& work, int64_t row, int64_t plane) __attribute__((always_inline)) {
                       const int64_t group = group_of_plane[plane];
                       return work.decoder<Decoder>(group * ROWS + row);
                     });
    });
  const Memory<int32_t> packed = allocate<int32_t>(a.M * dwords);
  const Memory<int32_t> natural = allocate<int32_t>(a.threads * dwords);
  const GatheredX gathered(a);
  const auto prepare = [&](int64_t m, int thread) {
    int32_t* own = &natural[thread * dwords];
    natural_dwords<D>(a, m, dwords, own);
    arrange<D>(own, packed.get(), m, columns, D::STEP, a);
    gathered.prepare(m);
  };
  run(a, 0, prepare, [&](Work& work) {
    in_powers_of_two(a.M, [&](int64_t m, auto t) {
      float_rows<D, ROW_TILE, t>(work, packed.get(), gathered, group_of_plane.get(), columns, whole, m);
    });
  });
}

}  // namespace
