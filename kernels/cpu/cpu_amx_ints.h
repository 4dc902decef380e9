// Products of int8 tokens by AMX, in panels of signed bytes: codes less their zero points.
//
//   panel [2][columns / 4][16][4]      four columns of 16 rows after the other
//
// Sums of columns that share their scales are exact, in int32, and become fp32 as in the loops (cpu_ints.h): of a row with
// one scale, bit for bit.

#pragma once

#include "cpu_amx_products.h"
#include "cpu_strip_ints.h"

#if AMX

namespace {

// Columns of a segment come in whole lines of tiles, unless there is only one segment.
inline bool takes_ints(const Arguments& a) {
  const bool words = a.planar || a.strips;
  if (words && a.bits == 8 && a.zero != nullptr) return false;  // codes less such zero points have more than 8 bits
  return Activations::segment_of(a) % TILE_LINE == 0;
}

// Bytes less bytes, which wrap around.
INLINE Int minus_bytes(Int a, Int b) {
#if WIDE
  return _mm512_sub_epi8(a, b);
#else
  const Int top = every(static_cast<int32_t>(0x80808080)), rest = every(0x7f7f7f7f);
  return differ(minus(either(a, top), both(b, rest)), both(differ(differ(a, b), every(-1)), top));
#endif
}

// Zero points of a row in all four bytes.
INLINE Int zero_bytes(const Work& work, int64_t g, int v) {
  return times(load(&work.zero[g * ROWS + v * LANES]), every(0x01010101));
}

inline int64_t group_at(const Arguments& a, int64_t k) { return a.group > 0 ? std::min(k / a.group, a.G - 1) : 0; }

// Columns first ... last of both strips; `apart`: bytes from one of the panel to the other.
inline void fill_from_strips(const Work& work, int64_t first, int64_t last, char* panel, int64_t apart) {
  const int64_t stored = std::min(last, stored_columns(work.a)), group = group_columns(work.a);
  for (int v = 0; v * LANES < work.count(); ++v) {
    const char* line = strip_of(work, v) + first / LINE * VECTOR_BYTES;
    char* to = panel + v * apart;
    for (int64_t k = first; k < stored;) {
      const int64_t g = group_at(work.a, k), end = g + 1 < work.a.G ? std::min((g + 1) * group, stored) : stored;
      const Int zero = zero_bytes(work, g, v);
      for (; k < end; k += LINE, line += VECTOR_BYTES, to += 2 * VECTOR_BYTES) {
        const Int words = load(line);
        fetch(line + AHEAD);
        store(to, minus_bytes(low_nibbles(words), zero));
        store(to + VECTOR_BYTES, minus_bytes(high_nibbles(words), zero));
      }
    }
    memset(to, 0, (last - stored) * LANES);
  }
}

// The same of planar words, by slabs of F (cpu_ints.h).
template <class F>
void fill_from_slabs(const Work& work, int64_t first, int64_t last, char* panel, int64_t apart) {
  constexpr int64_t STEP = 4 * CHUNK;
  for (int64_t from = first; from < last; from += STEP) {
    const int64_t end = std::min(from + STEP, last), made = rounded_up(end, F::BLOCK);
    int_slab<F>(work, from, made);
    for (int v = 0; v * LANES < work.count(); ++v)
      for (int64_t k = from; k < end; k += 4) {
        const Int bytes = load(work.slab.get() + ((k - from) / 4 * VECTORS + v) * VECTOR_BYTES);
        const Int found = minus_bytes(bytes, zero_bytes(work, group_at(work.a, k), v));
        store(panel + v * apart + (k - first) / 4 * VECTOR_BYTES, found);
      }
  }
}

// Of rows of int8, which are bytes of a panel as soon as four columns of 16 rows lie together.
inline void fill_from_rows(const Work& work, int64_t first, int64_t last, char* panel, int64_t apart) {
  for (int64_t k = first; k < last; k += TILE_LINE)
    for (int v = 0; v * LANES < work.count(); ++v) {
      Int rows[LANES];
      for (int r = 0; r < LANES; ++r) {
        rows[r] = Plain::block(work.row(v * LANES + r), k, work.a.row_bytes);
        work.fetch_far(ROWS, (k / TILE_LINE * VECTORS + v) * LANES + r);
      }
      transpose(rows);
      char* to = panel + v * apart + (k - first) / 4 * VECTOR_BYTES;
      each<LANES>([&](auto i) { store(to + i * VECTOR_BYTES, rows[i]); });
    }
}

using FillInts = void (*)(const Work&, int64_t, int64_t, char*, int64_t);
inline FillInts fill_of(const Arguments& a) {
  if (a.strips) return fill_from_strips;
  if (!a.planar) return fill_from_rows;
  return a.bits == 4 ? fill_from_slabs<Nibbles> : fill_from_slabs<Bytes>;
}

// Tokens as codes: their scales [M][scales], or for several segments [scales][tokens in whole tiles], and zero points.
struct CodedTokens {
  int64_t segment, columns, segments, scales, whole;
  Memory<float> scale, turned;
  Memory<int32_t> zero;
  Memory<int8_t> codes;  // of a tile, of each thread

  explicit CodedTokens(const Arguments& a) {
    const int64_t stored = a.planar || a.strips ? stored_columns(a) : a.K;
    columns = rounded_up(stored, TILE_LINE);
    segment = Activations::segment_of(a) == 0 ? columns : std::min(Activations::segment_of(a), columns);
    segments = (columns + segment - 1) / segment;
    scales = a.input_group > 0 ? (a.K + a.input_group - 1) / a.input_group : 1;
    whole = rounded_up(a.M, TILE_ROWS);
    scale = allocate<float>(a.M * scales);
    turned = allocate<float>(whole * scales);
    zero = allocate<int32_t>(a.M);
    codes = allocate<int8_t>(a.threads * TILE_ROWS * a.K);
  }

  void pack(const Arguments& a, const Cut& cut, int64_t tile, char* packed, int thread) const {
    int8_t* own = &codes[thread * TILE_ROWS * a.K];
    const int64_t start = tile * TILE_ROWS;
    for (int64_t m = start; m < std::min(start + TILE_ROWS, a.M); ++m) {
      quantize(a, m, own + (m - start) * a.K, &scale[m * scales], &zero[m]);
      for (int64_t b = 0; b < scales; ++b) turned[b * whole + m] = scale[m * scales + b];
    }
    pack_tile(a, cut, tile, packed, [&](int64_t m) { return reinterpret_cast<const char*>(own + (m - start) * a.K); });
  }
};

// Segments whose sums are scaled together, so that what was added up before them is read and written once.
constexpr int64_t SEGMENTS_TOGETHER = 2;

// Exact sums of `count` segments from column k on, scaled and added to those before. Where tokens have one scale, it comes
// at the end.
template <int TILES, bool SCALED>
void add_segments(const Work& work, const CodedTokens& x, int64_t k, int64_t count, int64_t tile, const char* found,
                  char* sums) {
  const float *weight_scales[SEGMENTS_TOGETHER], *scales[SEGMENTS_TOGETHER];
  for (int64_t s = 0; s < SEGMENTS_TOGETHER; ++s) {
    const int64_t at = k + std::min(s, count - 1) * x.segment;
    weight_scales[s] = &work.scale[group_at(work.a, at) * ROWS];
    scales[s] = &x.turned[(SCALED ? at / work.a.input_group : 0) * x.whole + tile * TILE_ROWS];
  }
  for (int64_t t = 0; t < TILES; ++t)
    for (int64_t v = 0; v < VECTORS; ++v) {
      const int64_t at = (t * 2 + v) * TILE_BYTES;
      const auto add = [&](auto segments) __attribute__((always_inline)) {
        Float of_rows[segments];
        each<segments>([&](auto s) { of_rows[s] = bits_to_float(load(weight_scales[s] + v * LANES)); });
        each<TILE_ROWS>([&](auto r) {
          char* to = sums + at + r * TILE_LINE;
          Float total = bits_to_float(load(to));
          each<segments>([&](auto s) {
            Float values = to_float(load(found + s * SUMS_BYTES + at + r * TILE_LINE));
            if constexpr (SCALED) values = times(values, every(scales[s][t * TILE_ROWS + r]));
            total = fma(values, of_rows[s], total);
          });
          store(to, float_to_bits(total));
        });
      };
      with_constant<SEGMENTS_TOGETHER>(count, add);
    }
}

template <int TILES, bool SCALED>
void sum_segments(const Work& work, const CodedTokens& x, const Operands& of, int64_t tile, int64_t first, int64_t last,
                  char* sums) {
  alignas(TILE_LINE) char found[SEGMENTS_TOGETHER * SUMS_BYTES];
  if (first == 0) memset(sums, 0, SUMS_BYTES);
  for (int64_t k = first; k < last;) {
    const int64_t start = k;
    int64_t count = 0;
    for (; count < SEGMENTS_TOGETHER && k < last; ++count, k += x.segment) {
      clear_sums();
      const int64_t begin = (k - first) / TILE_LINE, end = (std::min(k + x.segment, last) - first) / TILE_LINE;
      for (int64_t step = begin; step < end; ++step) of.multiply<TILES, true>(step * TILE_BYTES);
      store_sums<TILES>(found + count * SUMS_BYTES);
    }
    add_segments<TILES, SCALED>(work, x, start, count, tile, found, sums);
  }
}

// Exact sums of whole rows, in the order of `int_finish`.
inline Float rescaled(const Work& work, const CodedTokens& x, int64_t m, int v, Int exact) {
  if (x.zero[m] != 0) exact = minus(exact, times(every(x.zero[m]), load(work.row_sum + v * LANES)));
  const Float values = times(to_float(exact), every(x.scale[m]));
  return times(values, bits_to_float(load(&work.scale[v * LANES])));
}

void multiply_ints_with_amx(const Arguments& a) {
  const CodedTokens x(a);
  const bool single = x.segments == 1;
  const int64_t unit = single ? 4 * CHUNK : std::lcm(x.segment, 4 * CHUNK);
  const Cut cut(a, x.columns, 1, unit);
  const FillInts fill = fill_of(a);
  over_panels(
      a, cut, [&](int64_t tile, char* packed, int thread) { x.pack(a, cut, tile, packed, thread); },
      [&](Work& work, int64_t n0, int64_t first, int64_t last, char* panel) {
        work.begin(n0);
        fill(work, first, last, panel, (last - first) * LANES);
      },
      [&](const Work& work, const Operands& of, int64_t tile, int64_t tiles, int64_t first, char* sums) {
        if (single) {
          const auto add = tiles == 2 ? sum_panel<2, true> : sum_panel<1, true>;
          add(of, of.apart / TILE_BYTES, sums, first == 0);
        } else {
          const auto add = x.scales > 1 ? tiles == 2 ? sum_segments<2, true> : sum_segments<1, true>
                           : tiles == 2 ? sum_segments<2, false> : sum_segments<1, false>;
          add(work, x, of, tile, first, cut.last(first), sums);
        }
      },
      [&](const Work& work, int64_t tile, int64_t tiles, const char* sums) {
        over_sums(work, tile, tiles, sums, [&](int64_t m, int v, Int found) {
          Float values = bits_to_float(found);
          if (single) values = rescaled(work, x, m, v, found);
          if (!single && x.scales == 1) values = times(values, every(x.scale[m]));
          work.finish(m, v * LANES, plus(values, bits_to_float(load(work.bias + v * LANES))), LANES);
        });
      });
}

}  // namespace

#endif
