// Sparse rows beside the codes of a product: values at some columns of each row, added to what the codes stand for.
//
//   rows    16 entries of a row at a time meet the numbers of x that their columns name, and join the row's sums before
//           these are added up: the sums of codes and entries are rounded once
//   slabs   an entry is added to its place in the decoded slab, in the type that the slab holds
//
// Where a run of 16 begins in one row and ends in the next, what is not this row's counts as zero.

#pragma once

#include "cpu_work.h"

// Parts without entries are compiled without the loops over them.
#ifndef UNIT_ENTRIES
#define UNIT_ENTRIES 0
#endif

namespace {

constexpr bool ENTRIES = UNIT_ENTRIES;

// Entries between those that are multiplied and those that are fetched: a few rows of one in a hundred.
constexpr int64_t ENTRIES_AHEAD = 512;

struct Entries {
  const Arguments& a;

  int64_t column_bytes() const { return a.short_columns ? 2 : 4; }
  const char* columns(int64_t e) const { return static_cast<const char*>(a.column) + e * column_bytes(); }
  const char* values(int64_t e) const { return static_cast<const char*>(a.value) + e * size_of(a.value_type); }
  int64_t column(int64_t e) const {
    return a.short_columns ? static_cast<const int16_t*>(a.column)[e] : static_cast<const int32_t*>(a.column)[e];
  }
  float value(int64_t e) const { return load_float(values(e), a.value_type); }

  // Entries that the next slab meets, which its chunks read a few of each row at a time.
  void fetch(int64_t e, int64_t end) const {
    for (const char* p = columns(e); p < columns(end); p += VECTOR_BYTES) fetch_far(p);
    for (const char* p = values(e); p < values(end); p += VECTOR_BYTES) fetch_far(p);
  }

  // Columns and values of the entries from e on, 16 of them; zeros from `end` on.
  INLINE void read(int64_t e, int64_t end, Int& at, Float& weights) const {
    if (e + LANES > a.entries) {  // no reads past the last of all
      char padded[VECTOR_BYTES] = {};
      memcpy(padded, columns(e), (a.entries - e) * column_bytes());
      at = a.short_columns ? widen_words(padded) : load(padded);
      weights = leading(load_floats(values(e), a.value_type, a.entries - e), end - e);
      return;
    }
    ::fetch(columns(e + ENTRIES_AHEAD));
    ::fetch(values(e + ENTRIES_AHEAD));
    at = a.short_columns ? widen_words(columns(e)) : load(columns(e));
    weights = leading(load_floats(values(e), a.value_type), end - e);
  }
};

// x as fp32 [M][K], for the entries to gather from; nothing where there are none.
struct GatheredX {
  const Arguments& a;
  Memory<float> values;

  explicit GatheredX(const Arguments& a)
      : a(a), values(allocate<float>(ENTRIES && a.by_rows ? a.M * a.K : 0)) {}

  void prepare(int64_t m) const {
    if (!ENTRIES || !a.by_rows) return;
    const char* from = static_cast<const char*>(a.x) + m * a.K * size_of(a.x_type);
    for (int64_t k = 0; k < a.K; k += LANES)
      store_floats(&values[m * a.K + k], F32, load_floats(from + k * size_of(a.x_type), a.x_type, a.K - k), a.K - k);
  }
};

// The entries of rows r0 ... r0 + TILE times tokens m0 ... m0 + T, added to the sums of these.
template <int TILE, int T>
INLINE void add_entries(const Work& work, const GatheredX& x, int64_t m0, int r0, Float (&sums)[TILE][T]) {
  if constexpr (ENTRIES) {
    const Arguments& a = work.a;
    const Entries entries{a};
    each<TILE>([&](auto r) {
      const int64_t n = std::min(work.n0 + r0 + r, a.N - 1), end = a.row_start[n + 1];
      for (int64_t e = a.row_start[n]; e < end; e += LANES) {
        Int at;
        Float weights;
        entries.read(e, end, at, weights);
        each<T>([&](auto t) { sums[r][t] = fma(weights, gather(&x.values[(m0 + t) * a.K], at), sums[r][t]); });
      }
    });
  }
}

// The entries of columns first ... last, added to a slab of dwords that hold D::STEP columns; place(column): where it
// has a column, counted from the first.
template <class D, class Place>
void add_entries(Work& work, int64_t first, int64_t last, Place place) {
  if (!ENTRIES) return;
  const Entries entries{work.a};
  if (first == 0) entries.fetch(work.a.row_start[std::min(work.n0 + ROWS, work.a.N)],
                                work.a.row_start[std::min(work.n0 + 2 * ROWS, work.a.N)]);
  for (int64_t r = 0; r < work.count(); ++r) {
    const int64_t end = work.a.row_start[work.n0 + r + 1];
    int64_t& e = work.next_entry[r];
    for (int64_t k; e < end && (k = entries.column(e)) < last; ++e) {
      const uint64_t at = place(k - first);
      char* dword = work.slab.get() + (at / D::STEP * ROWS + r) * 4;
      D::add(dword + at % D::STEP * (4 / D::STEP), entries.value(e));
    }
  }
}
template <class D>
void add_entries(Work& work, int64_t first, int64_t last) {
  add_entries<D>(work, first, last, [](uint64_t column) { return column; });
}

// Of a weight that is entries and nothing else, with any number of tokens.
void sparse_product(const Arguments& a) {
  const GatheredX x(a);
  run(a, 0, [&](int64_t m, int) { x.prepare(m); }, [&](Work& work) {
    in_powers_of_two(a.M, [&](int64_t m0, auto tokens) {
      constexpr int T = tokens;
      for (int r0 = 0; r0 < work.count(); r0 += ROW_TILE) {
        Float sums[ROW_TILE][T];
        each<ROW_TILE>([&](auto r) { each<T>([&](auto t) { sums[r][t] = every(0.0f); }); });
        add_entries<ROW_TILE, T>(work, x, m0, r0, sums);
        work.finish_rows<ROW_TILE, T>(m0, r0, sums);
      }
    });
  });
}

}  // namespace
