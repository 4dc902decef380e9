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

#include "cpu_work.h"

// Code i of a line as a number of every row, counted from the lowest bits.
template <int BITS>
struct LineCodes {
  Int held;

  INLINE void take(Int words) { held = words; }
  template <int CODE>
  INLINE Float value() const {
    return to_float(both(shift_right<BITS * CODE>(held), every((1 << BITS) - 1)));
  }
};

#if NEON
#include "cpu_lines_neon.h"
#endif

namespace {

// Columns of a line of 4 bits.
constexpr int LINE = 8;
// Columns of strips are padded to whole segments, which are as many as a part of a sum takes.
constexpr int STRIP_BLOCK = 4 * PART_STEPS;
// Tokens that are multiplied straight from the strip: sums, decoded words and one broadcast fill the registers.
constexpr int STRIP_TOKENS = 4, STRIP_PAIR_TOKENS = WIDE ? 8 : 4;
// Sums of one output that do not wait for each other; of NEON, 16 lanes are four that do not.
constexpr int CHAINS = NEON ? 2 : 4;
// Bytes between a line that is decoded and the one that is fetched.
constexpr int AHEAD = 2048, FAR_AHEAD = 8192;

INLINE const char* strip_of(const Work& work, int v) {
  return static_cast<const char*>(work.a.weight) + (work.n0 / LANES + v) * LANES * work.a.row_bytes;
}

// Where memory is all that is waited for, lines go to the second-level cache, which has more of them on their way at a
// time than the first, in time for the prefetcher in between.
template <bool MEMORY_BOUND>
INLINE void fetch_line(const char* line) {
  MEMORY_BOUND ? fetch_far(line + FAR_AHEAD) : fetch(line + AHEAD);
}

// The column of a line's code i, counted from the lowest bits.
template <int BITS>
constexpr int column_of(int i) {
  return BITS == 4 ? i / 2 + i % 2 * (LINE / 2) : i;
}

// The code of a line that its column c has.
template <int BITS>
constexpr int code_of(int c) {
  return BITS == 4 ? c % (LINE / 2) * 2 + c / (LINE / 2) : c;
}

// The n-th code and pair of a line that is decoded: on ARM those of the same bytes one after the other, so that what was
// looked up for them need not stay in registers.
template <int BITS>
constexpr int code_in_turn(int n) {
  return NEON && BITS == 4 ? n / 2 + n % 2 * 4 : n;
}
template <int BITS>
constexpr int pair_in_turn(int n) {
  return NEON && BITS == 4 ? n / 2 + n % 2 * 2 : n;
}

#if !NEON
// The number that it names in a table of 16.
struct LineTable {
  Float table;
  Int held;

  INLINE explicit LineTable(Float table) : table(table) {}
  INLINE void take(Int words) { held = words; }
  template <int CODE>
  INLINE Float value() const {
    return lookup(table, shift_right<4 * CODE>(held));
  }
};
#endif

// body(m, tokens, vector) for every tile of at most MOST tokens and every strip of the rows that a thread works on.
template <int MOST, class Body>
void over_strips(const Work& work, const TokenTiles& tiles, Body body) {
  for (int64_t tile = 0; tile < tiles.count; ++tile)
    with_constant<MOST>(tiles.size(tile), [&](auto t) {
      for (int v = 0; v * LANES < work.count(); ++v) body(tiles.start(tile), t, v);
    });
}

}  // namespace
