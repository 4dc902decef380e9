// Products of int8 tokens with weights of 4 bits in strips (cpu_strip_lines.h draws them).

#pragma once

#include "cpu_dots.h"
#include "cpu_ints.h"
#include "cpu_strip_lines.h"

namespace {

constexpr int STRIP_INT_TOKENS = std::min(STRIP_TOKENS, PART_TOKENS);

// T tokens times a strip: codes of x as dwords [columns / 4][T].
template <int T>
void strip_ints(const Work& work, const Activations& x, int64_t m0, int v) {
  const char* line = strip_of(work, v);
  const int32_t* from = &x.packed[m0 * (x.columns / 4)];
  Float totals[T];
  each<T>([&](auto t) { totals[t] = bits_to_float(load(work.bias + v * LANES)); });
  for (int64_t s = 0, k = 0; s < x.segments; ++s) {
    const int64_t at = static_cast<int64_t>(x.weight_group[s]) * ROWS + v * LANES;
    Int sums[T];
    each<T>([&](auto t) { sums[t] = times(load(&work.zero[at]), every(-x.sums[(m0 + t) * x.segments + s])); });
    for (const int64_t end = std::min(k + x.segment, x.columns); k < end; k += STRIP_BLOCK) {
      ByteDots<T> dots;
      each<STRIP_BLOCK / LINE>([&](auto) {
        const Int words = load(line);
        fetch_line<true>(line);
        dots.add(low_nibbles(words), high_nibbles(words), from);
        line += VECTOR_BYTES;
        from += 2 * T;
      });
      dots.add_to(sums);
    }
    const Float scale = bits_to_float(load(&work.scale[at]));
    each<T>([&](auto t) {
      const Float given = every(x.scale[(m0 + t) * x.scales + x.input_group[s]]);
      totals[t] = fma(times(to_float(sums[t]), given), scale, totals[t]);
    });
  }
  each<T>([&](auto t) { work.finish(m0 + t, v * LANES, totals[t], LANES); });
}

// Slabs of bytes, for `int_tile`.
void int_strip_slab(const Work& work, int64_t first, int64_t last) {
  for (int v = 0; v * LANES < work.count(); ++v) {
    const char* line = strip_of(work, v) + first / LINE * VECTOR_BYTES;
    char* to = work.slab.get() + v * VECTOR_BYTES;
    for (int64_t k = first; k < last; k += LINE, line += VECTOR_BYTES, to += 2 * VECTORS * VECTOR_BYTES) {
      const Int words = load(line);
      fetch_line<true>(line);
      store(to, low_nibbles(words));
      store(to + VECTORS * VECTOR_BYTES, high_nibbles(words));
    }
  }
}

void strip_int_product(const Arguments& a) {
  Activations x(a, STRIP_BLOCK, false);
  const int64_t chunk = x.chunk(STRIP_BLOCK);
  const Memory<int8_t> natural = allocate<int8_t>(a.threads * x.columns);
  const TokenTiles tiles(a.M, a.by_rows ? STRIP_INT_TOKENS : PART_TOKENS);
  const auto prepare = prepare_codes(a, x, natural.get(), [&](const int32_t* codes, int64_t m) {
    tiles.arrange(codes, x.packed.get(), m, x.columns / 4, (a.by_rows ? x.columns : chunk) / 4);
  });
  run(a, a.by_rows ? 0 : chunk * ROWS, prepare, [&](Work& work) {
    if (a.by_rows)
      return over_strips<STRIP_INT_TOKENS>(work, tiles, [&](int64_t m, auto t, int v) { strip_ints<t>(work, x, m, v); });
    int_chunks<true>(work, x, chunk, int_strip_slab);
  });
}

}  // namespace
