// Products of 2:4 weights in strips (strips24.py): of every four columns (a quad) two are kept, and only those are read
// and multiplied.
//
// A line holds quads of 16 rows, all their first kept weights and all their second ones; a dword of positions has four
// bits for each of a row's next eight quads, which two of its columns these are. A quad of a token is read into every
// quarter of a vector, where a shuffle takes for each row what its kept weights meet: a pruned weight costs nothing.
//
//   fp32    kept weights, then others: sums += v[r] * x[4 q + position[r]]
//   bf16    both as a pair: the four bits name the bytes of the shuffle in a table of 16
//
// Strips are read front to back, once for each tile of tokens, however many there are: x [quads][T][4 columns].

#pragma once

#include "cpu_strips.h"

namespace {

constexpr int QUAD = 4, BLOCK_QUADS = 8, BLOCK_COLUMNS = QUAD * BLOCK_QUADS;
constexpr int HALVED_TOKENS = WIDE ? 12 : NEON ? 4 : 6;
// A line of numbers holds a quad of each row, one of codes as many as fit 64 bytes.
constexpr int quads_of_line(int bits) { return bits == NUMBER_BITS ? 1 : 16 / bits; }

INLINE int64_t line_bytes(const Arguments& a, int bits) {
  return bits == NUMBER_BITS ? 2 * LANES * size_of(a.value_type) : VECTOR_BYTES;
}
INLINE const char* positions_of(const Work& work, int64_t columns, int v) {
  return static_cast<const char*>(work.a.kept) + (work.n0 / LANES + v) * (columns / BLOCK_COLUMNS) * VECTOR_BYTES;
}

// body(line, quad within it, positions from this quad on) for every quad of columns first ... last of a strip.
template <int BITS, class Body>
INLINE void over_quads(const Work& work, int64_t columns, int64_t first, int64_t last, int v, Body body) {
  constexpr int QUADS = quads_of_line(BITS);
  const int64_t bytes = line_bytes(work.a, BITS);
  const char* line = strip_of(work, v) + first / (QUAD * QUADS) * bytes;
  const char* position = positions_of(work, columns, v) + first / BLOCK_COLUMNS * VECTOR_BYTES;
  for (int64_t k = first; k < last; k += BLOCK_COLUMNS, position += VECTOR_BYTES) {
    Int at = load(position);
    fetch(position + AHEAD);
    for (int i = 0; i < BLOCK_QUADS / QUADS; ++i, line += bytes) {
      fetch(line + AHEAD);
      each<QUADS>([&](auto quad) {
        body(line, quad, at);
        at = shift_right<QUAD>(at);
      });
    }
  }
}

// T tokens times a strip: product(where its scales are, first, last, x, sums) adds those of columns that share their
// scales, of which numbers have none.
template <int BITS, int T, class Product>
INLINE void over_groups(const Work& work, const int32_t* x, int64_t step, int64_t columns, int64_t group, int64_t m0,
                        int v, Product product) {
  Float totals[T];
  each<T>([&](auto t) { totals[t] = bits_to_float(load(work.bias + v * LANES)); });
  for (int64_t g = 0, k = 0; k < columns; ++g) {
    const int64_t end = std::min(k + group, columns);
    Float sums[T];
    each<T>([&](auto t) { sums[t] = every(0.0f); });
    product(g * ROWS + v * LANES, k, end, x + k / step * T, sums);
    k = end;
    const Float scale = BITS == NUMBER_BITS ? every(1.0f) : bits_to_float(load(&work.scale[g * ROWS + v * LANES]));
    each<T>([&](auto t) { totals[t] = fma(sums[t], scale, totals[t]); });
  }
  each<T>([&](auto t) { work.finish(m0 + t, v * LANES, totals[t], LANES); });
}

template <int BITS, int T>
void halved_floats(const Work& work, const int32_t* packed, int64_t columns, int64_t group, int64_t m0, int v) {
  const auto product = [&](int64_t of_group, int64_t k, int64_t end, const int32_t* x, Float(&sums)[T]) {
    const Float zero = BITS == NUMBER_BITS ? every(0.0f) : bits_to_float(load(&work.float_zero[of_group]));
    LineCodes<BITS == NUMBER_BITS ? 4 : BITS> codes;
    over_quads<BITS>(work, columns, k, end, v, [&](const char* line, auto quad, Int at) __attribute__((always_inline)) {
      each<2>([&](auto second) {
        Float value;
        if constexpr (BITS == NUMBER_BITS)
          value = load_floats(line + second * LANES * size_of(work.a.value_type), work.a.value_type);
        else
          codes.take(load(line)), value = minus(codes.template value<quad + second * quads_of_line(BITS)>(), zero);
        const Int place = shift_right<2 * second>(at);
        each<T>([&](auto t) { sums[t] = fma(value, of_quad(x + t * QUAD, place), sums[t]); });
      });
      x += T * QUAD;
    });
  };
  over_groups<BITS, T>(work, packed + m0 * columns, 1, columns, group, m0, v, product);
}

#if BF16_DOT
template <int BITS, int T, Zeros ZEROS>
void halved_pairs(const Work& work, const int32_t* packed, int64_t columns, int64_t group, int64_t m0, int v) {
  const QuadPairs pairs;
  PairDecoder<BITS == NUMBER_BITS ? 4 : BITS, ZEROS> decoder(work.a);
  const auto product = [&](int64_t of_group, int64_t k, int64_t end, const int32_t* x, Float(&sums)[T]) {
    if (BITS != NUMBER_BITS) decoder.begin(&work.zero[of_group]);
    over_quads<BITS>(work, columns, k, end, v, [&](const char* line, auto quad, Int at) __attribute__((always_inline)) {
      Int pair;
      if constexpr (BITS == NUMBER_BITS)
        pair = in_pairs(load(line));
      else
        decoder.take(load(line)), pair = decoder.template pair<quad>();
      const Int taken = pairs.taken(at);
      each<T>([&](auto t) { sums[t] = dot_pairs(sums[t], pair, pairs.of(x + t * 2, taken)); });
      x += T * 2;
    });
  };
  over_groups<BITS, T>(work, packed + m0 * (columns / 2), 2, columns, group, m0, v, product);
}
#endif

// Products of all rows, by product(work, packed, columns, group, m, tokens, v), of x in the dwords of D.
template <class D, class Product>
void over_halves(const Arguments& a, Product product) {
  const int64_t columns = (a.K + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS * BLOCK_COLUMNS, dwords = columns / D::STEP;
  const int64_t group = a.group > 0 ? a.group : columns, of_quad = QUAD / D::STEP;
  const TokenTiles tiles(a.M, HALVED_TOKENS);
  const Memory<int32_t> packed = allocate<int32_t>(a.M * dwords), natural = allocate<int32_t>(a.threads * dwords);
  const auto prepare = [&](int64_t m, int thread) {
    int32_t* own = &natural[thread * dwords];
    natural_dwords<D>(a, m, dwords, own);
    const int64_t tile = tiles.of(m), start = tiles.start(tile);
    int32_t* to = &packed[start * dwords + (m - start) * of_quad];
    for (int64_t k = 0; k < dwords; k += of_quad, to += tiles.size(tile) * of_quad)
      memcpy(to, own + k, of_quad * sizeof *to);
  };
  run(a, 0, prepare, [&](Work& work) {
    over_strips<HALVED_TOKENS>(work, tiles, [&](int64_t m, auto t, int v) {
      product(work, packed.get(), columns, group, m, t, v);
    });
  });
}

#if BF16_DOT
template <int BITS>
void halved_pair_product(const Arguments& a) {
  over_halves<Bf16Words<4>>(a, [&](const Work& work, const int32_t* x, int64_t columns, int64_t group, int64_t m,
                                   auto t, int v) {
    a.zero == nullptr ? halved_pairs<BITS, t, MIDDLE>(work, x, columns, group, m, v)
                      : halved_pairs<BITS, t, BITS == NUMBER_BITS ? MIDDLE : CODES>(work, x, columns, group, m, v);
  });
}
#endif

template <int BITS>
void halved_float_product(const Arguments& a) {
  over_halves<F32Words<4>>(a, [](const Work& work, const int32_t* x, int64_t columns, int64_t group, int64_t m, auto t,
                                 int v) {
    halved_floats<BITS, t>(work, x, columns, group, m, v);
  });
}

}  // namespace
