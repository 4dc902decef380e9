// Panels: the values of some rows of a compressed weight, whatever its layout, as a matrix.
//
//   LINES, BF16_LINES [columns][width]       a column of the weight after the other, in the type of x; for torch
//   PAIRS [rows / 16][columns / 2][16][2]    pairs of columns of 16 rows, in bf16; for the tiles of AMX (cpu_amx.h)
//
// ROWS rows are decoded at a time: strips straight to their places, planar words and 2:4 weights by way of the slabs of
// floats that their products have. Sparse rows are added to the panel.

#pragma once

#include <cstdlib>
#include <new>

#include "cpu_sparse24.h"
#include "cpu_strips.h"
#include "cpu_tiles.h"

namespace {

inline int64_t rounded_up(int64_t v, int64_t unit) { return (v + unit - 1) / unit * unit; }

// Memory that a thread keeps for one use of it. A product may take megabytes, which the system clears page by page
// whenever they are new.
template <int USE>
char* kept_memory(int64_t bytes) {
  struct Held {
    char* start = nullptr;
    int64_t bytes = 0;
    ~Held() { std::free(start); }
  };
  static thread_local Held held;
  if (held.bytes < bytes) {
    std::free(held.start);
    held.bytes = 0;
    held.start = static_cast<char*>(std::aligned_alloc(VECTOR_BYTES, rounded_up(bytes, VECTOR_BYTES)));
    if (held.start == nullptr) throw std::bad_alloc();
    held.bytes = bytes;
  }
  return held.start;
}

enum Layout { LINES, BF16_LINES, PAIRS };

// Columns first ... last of the weight: whole chunks of CHUNK, or up to the end.
struct Panel {
  char* values;
  int64_t width;  // a multiple of ROWS
  Type type;
  int64_t first, last;

  // Of row r, counted from the first of the panel.
  char* place(Layout layout, int64_t column, int64_t r) const {
    const int64_t k = column - first;
    if (layout != PAIRS) return values + (k * width + r) * size_of(type);
    return values + ((r / LANES * (last - first) / 2 + k / 2) * LANES + r % LANES) * 4 + k % 2 * 2;
  }
};

// Columns of a row as it is stored, with padding.
inline int64_t stored_columns(const Arguments& a) {
  if (a.kept != nullptr) return (a.K + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS * BLOCK_COLUMNS;
  return a.row_bytes * 8 / a.bits;
}
inline int64_t group_columns(const Arguments& a) { return a.group > 0 ? a.group : stored_columns(a); }

template <int BITS>
void planar_slab(Work& work, int64_t first, int64_t last) {
  using D = F32Words<BITS>;
  const Arguments& a = work.a;
  const bool whole = a.group <= 0 || a.group % D::BLOCK == 0;
  float_slab<D>(work, first, last, whole, [&](int64_t row, int64_t plane) __attribute__((always_inline)) {
    const int64_t group = a.group > 0 ? std::min(plane * PLANE / a.group, a.G - 1) : 0;
    return work.template decoder<typename D::Decoder>(group * ROWS + row);
  });
}

// Of every quad, what is kept first and what is kept second, each in one of four columns.
template <int BITS>
void halved_slab(Work& work, int64_t first, int64_t last) {
  const int64_t columns = stored_columns(work.a), group = group_columns(work.a);
  const Type type = work.a.value_type;
  for (int v = 0; v * LANES < work.count(); ++v)
    for (int64_t k = first, end; k < last; k = end) {
      end = std::min((k / group + 1) * group, last);
      const int64_t at_group = k / group * ROWS + v * LANES;
      const Float one = every(1.0f), none = every(0.0f);
      const Float scale = BITS == NUMBER_BITS ? one : bits_to_float(load(&work.scale[at_group]));
      const Float zero = BITS == NUMBER_BITS ? none : bits_to_float(load(&work.float_zero[at_group]));
      char* to = work.slab.get() + ((k - first) * VECTORS + v) * VECTOR_BYTES;
      over_quads<BITS>(work, columns, k, end, v, [&](const char* line, auto quad, Int at) __attribute__((always_inline)) {
        Float values[2];
        LineCodes<BITS == NUMBER_BITS ? 4 : BITS> codes;
        if constexpr (BITS != NUMBER_BITS) codes.take(load(line));
        each<2>([&](auto second) {
          if constexpr (BITS == NUMBER_BITS)
            values[second] = load_floats(line + second * LANES * size_of(type), type);
          else
            values[second] = times(minus(codes.template value<quad + second * quads_of_line(BITS)>(), zero), scale);
        });
        const Int places[2] = {both(at, every(QUAD - 1)), both(shift_right<2>(at), every(QUAD - 1))};
        each<QUAD>([&](auto column) {
          // Less than 0, as `where` reads it, where a place is this column.
          const auto is_here = [&](Int place) { return minus(differ(place, every(static_cast<int32_t>(column))), every(1)); };
          const Float found = where(is_here(places[0]), values[0], where(is_here(places[1]), values[1]));
          store(to + column * (VECTORS * VECTOR_BYTES), float_to_bits(found));
        });
        to += QUAD * VECTORS * VECTOR_BYTES;
      });
    }
}

using MakeSlab = void (*)(Work&, int64_t, int64_t);
using Unpack = void (*)(Work&, const Panel&, int64_t);

// Where ROWS numbers of two columns at a time go, from one column on.
template <Layout LAYOUT>
struct Columns {
  const Type type;
  const int64_t line;
  char* to[VECTORS];

  INLINE Columns(const Panel& panel, int64_t column, int64_t r) : type(panel.type), line(panel.width * size_of(type)) {
    each<VECTORS>([&](auto v) { to[v] = panel.place(LAYOUT, column, r + v * LANES); });
  }

  // So many columns on, which must be even.
  INLINE void store_two(int64_t columns, const Float (&values)[2][VECTORS]) const {
    if constexpr (LAYOUT == PAIRS) {
      each<VECTORS>([&](auto v) {
#if WIDE && BF16_DOT
        const Int pairs = in_pairs(to_bf16s(values[0][v], values[1][v]));
#else
        const Int low = float_to_bits(rounded_to(BF16, values[0][v])), high = float_to_bits(rounded_to(BF16, values[1][v]));
        const Int pairs = differ(shift_right<16>(low), high);
#endif
        store(to[v] + columns / 2 * VECTOR_BYTES, pairs);
      });
    } else {
      each<2>([&](auto i) {
        const int64_t at = (columns + i) * line;
#if BF16_DOT
        if constexpr (LAYOUT == BF16_LINES) return store(to[0] + at, to_bf16s(values[i][0], values[i][VECTORS - 1]));
#endif
        each<VECTORS>([&](auto v) { store_floats(to[v] + at, type, values[i][v]); });
      });
    }
  }
  INLINE void advance(int64_t columns) {
    each<VECTORS>([&](auto v) { to[v] += LAYOUT == PAIRS ? columns / 2 * VECTOR_BYTES : columns * line; });
  }
};

// By slabs, a chunk of columns at a time.
template <Layout LAYOUT, MakeSlab MAKE>
void unpack_slabs(Work& work, const Panel& panel, int64_t r) {
  for (int64_t first = panel.first; first < panel.last; first += CHUNK) {
    const int64_t last = std::min(first + CHUNK, panel.last);
    MAKE(work, first, last);
    const char* from = work.slab.get();
    Columns<LAYOUT> columns(panel, first, r);
    for (int64_t k = first; k < last; k += 2) {
      Float values[2][VECTORS];
      each<2>([&](auto i) {
        each<VECTORS>([&](auto v) { values[i][v] = bits_to_float(load(from + v * VECTOR_BYTES)); });
        from += VECTORS * VECTOR_BYTES;
      });
      columns.store_two(0, values);
      columns.advance(2);
    }
  }
}

// Codes of 4 bits less their zero point: a table has them as floats.
struct NibbleValues : LineTable {
  static constexpr int BITS = 4;
  static constexpr float UNIT = 1;
  Float zero;

  INLINE explicit NibbleValues(const Work&) : LineTable(to_float(lanes())) {}
  INLINE void begin(const Work& work, int64_t at) { zero = bits_to_float(load(&work.float_zero[at])); }
  template <int CODE>
  INLINE Float value() const {
    return minus(LineTable::value<CODE>(), zero);
  }
};

#if WIDE
// Codes of 4 bits less their zero point, times a scale of bf16. A code in the fraction of a power of two, which no shift
// has to move, is the code plus that power. The power times the scale is taken away in the same step that multiplies.
// Nothing is rounded before the end: powers have at most 16 bits, and scales 8.
struct ScaledNibbles {
  static constexpr int BITS = 4;
  static constexpr float UNIT = 1;
  static constexpr int PLACES = 3;  // of a code in the fraction of a float: 8, 12 and 16
  Int words[PLACES];
  Float taken[PLACES];

  static constexpr int place_of(int code) { return code < 3 ? code : code < 5 ? code - 2 : code - 5; }
  static constexpr int32_t power(int place) { return (127 + 15 - 4 * place) << 23; }

  INLINE explicit ScaledNibbles(const Work&) {}
  INLINE void begin(const Work& work, int64_t at) {
    const Float zero = bits_to_float(load(&work.float_zero[at])), scale = bits_to_float(load(&work.scale[at]));
    each<PLACES>([&](auto i) {
      taken[i] = times(minus(every(0.0f), plus(zero, bits_to_float(every(power(i))))), scale);
    });
  }
  INLINE void take(Int line) {
    words[0] = shift_left(line, 8);
    words[1] = line;
    words[2] = shift_right<12>(line);
  }
  template <int CODE>
  INLINE Float scaled(Float scale) const {
    constexpr int PLACE = place_of(CODE), HELD = CODE < 3 ? 0 : CODE < 5 ? 1 : 2;
    const Int code = both(words[HELD], every(0xf << (8 + 4 * PLACE)));
    return fma(bits_to_float(either(code, every(power(PLACE)))), scale, taken[PLACE]);
  }
};
#endif

template <int CODE, class Values>
INLINE Float scaled_value(const Values& values, Float scale) {
#if WIDE
  if constexpr (std::is_same_v<Values, ScaledNibbles>)
    return values.template scaled<CODE>(scale);
  else
#endif
    return times(values.template value<CODE>(), scale);
}

template <Layout LAYOUT, class Values>
void unpack_strips(Work& work, const Panel& panel, int64_t r) {
  constexpr int BITS = Values::BITS, COLUMNS = 32 / BITS;
  const int64_t group = group_columns(work.a);
  const bool half = work.count() <= LANES;  // whose second strip is not there: its numbers are not read
  const char* lines[VECTORS];
  Float scale[VECTORS];
  Values values[2] = {Values(work), Values(work)};
  each<VECTORS>([&](auto v) { lines[v] = strip_of(work, half ? 0 : v) + panel.first / COLUMNS * VECTOR_BYTES; });
  Columns<LAYOUT> columns(panel, panel.first, r);
  for (int64_t k = panel.first; k < panel.last;) {
    const int64_t g = k / group;
    each<VECTORS>([&](auto v) {
      values[v].begin(work, g * ROWS + v * LANES);
      scale[v] = scale_of<Values>(work, g * ROWS + v * LANES);
    });
    for (const int64_t end = std::min((g + 1) * group, panel.last); k < end; k += COLUMNS) {
      each<VECTORS>([&](auto v) {
        values[v].take(load(lines[v]));
        fetch(lines[v] + AHEAD);
        lines[v] += VECTOR_BYTES;
      });
      each<COLUMNS / 2>([&](auto pair) {
        Float found[2][VECTORS];
        each<2>([&](auto i) {
          each<VECTORS>([&](auto v) {
            found[i][v] = scaled_value<code_of<BITS>(2 * pair + i)>(values[v], scale[v]);
          });
        });
        columns.store_two(2 * pair, found);
      });
      columns.advance(COLUMNS);
    }
  }
}

// The entries of a row, from one on and of columns before `last`, in the type of the panel. Column: their type.
template <Layout LAYOUT, class Column, Type VALUES>
void add_row(const Arguments& a, const Panel& panel, int64_t e, int64_t end, char* row) {
  const Column* columns = static_cast<const Column*>(a.column);
  const char* values = static_cast<const char*>(a.value);
  const Type type = LAYOUT == LINES ? panel.type : BF16;
  const uint64_t line = LAYOUT == PAIRS ? VECTOR_BYTES : panel.width * size_of(type);
  for (; e < end && columns[e] < panel.last; ++e) {
    const uint64_t k = columns[e] - panel.first;
    char* to = LAYOUT == PAIRS ? row + k / 2 * line + k % 2 * 2 : row + k * line;
    const float sum = load_float(to, type) + load_float(values + e * size_of(VALUES), VALUES);
    if (type == BF16) {
      const uint16_t narrow = to_bf16(sum);
      memcpy(to, &narrow, sizeof narrow);
    } else {
      store_floats(to, type, every(sum), 1);
    }
  }
}

template <Layout LAYOUT, class Column>
auto add_row_of(Type values) {
  if (values == F32) return add_row<LAYOUT, Column, F32>;
  return values == F16 ? add_row<LAYOUT, Column, F16> : add_row<LAYOUT, Column, BF16>;
}

// The entries of the rows; those of columns before the panel were added to an earlier one.
template <Layout LAYOUT>
void add_to_panel(const Work& work, const Panel& panel, int64_t r) {
  const Arguments& a = work.a;
  const Entries entries{a};
  const auto add = a.short_columns ? add_row_of<LAYOUT, int16_t>(a.value_type) : add_row_of<LAYOUT, int32_t>(a.value_type);
  for (int64_t i = 0; i < work.count(); ++i) {
    const int64_t end = a.row_start[work.n0 + i + 1];
    int64_t e = a.row_start[work.n0 + i];
    if (panel.first > 0)
      while (e < end && entries.column(e) < panel.first) ++e;
    add(a, panel, e, end, panel.place(LAYOUT, panel.first, r + i));
  }
}

template <Layout LAYOUT>
Unpack unpack_of(const Arguments& a) {
  if (a.kept != nullptr)
    return a.bits == 4   ? unpack_slabs<LAYOUT, halved_slab<4>>
           : a.bits == 8 ? unpack_slabs<LAYOUT, halved_slab<8>>
                         : unpack_slabs<LAYOUT, halved_slab<NUMBER_BITS>>;
  if (!a.strips) return a.bits == 4 ? unpack_slabs<LAYOUT, planar_slab<4>> : unpack_slabs<LAYOUT, planar_slab<8>>;
  if (a.bits == 8) return unpack_strips<LAYOUT, CodeValues<8>>;
  if (a.table != nullptr) return unpack_strips<LAYOUT, TableValues>;
#if WIDE
  if (a.levels == nullptr && a.scale_type == BF16) return unpack_strips<LAYOUT, ScaledNibbles>;
#endif
  return unpack_strips<LAYOUT, NibbleValues>;
}
// Two vectors of floats fill one of bf16.
inline Layout lines_of(Type type) { return BF16_DOT && VECTORS == 2 && type == BF16 ? BF16_LINES : LINES; }

// ROWS rows from n0 on, from row r of the panel on.
template <Layout LAYOUT>
void unpack_rows(Work& work, int64_t n0, Unpack unpack, const Panel& panel, int64_t r) {
  work.begin(n0);
  if (work.a.levels != nullptr) decode_levels(work);
  unpack(work, panel, r);
  if (work.a.row_start != nullptr) add_to_panel<LAYOUT>(work, panel, r);
}

}  // namespace
