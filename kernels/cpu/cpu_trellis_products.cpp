// Products with trellis codes in strips (`kernels.layouts.trellis_strips`), what they decode to, and their layout.
//
// A strip is 16 columns side by side. 32 rows of them, a block, take as many vectors as a weight has bits: word j of every
// column. The state of a row is the lowest bits of its word and the one before, shifted together. A level is the sum of
// the bytes of the state's product with the multiplier, less 510, in units of 1 / 128.
//
// Some rows of a block, and some tokens, have their sums in registers, strip after strip. The terms of a sum come in the
// same order for any number of tokens.

#include <algorithm>

#include "cpu_work.h"

namespace {

constexpr int WORD_BITS = 32;
constexpr int BLOCK = 32;                       // rows
constexpr int SUMS = WIDE ? 16 : NEON ? 8 : 4;  // in registers
constexpr int32_t MIDDLE = 510;
constexpr int32_t BEGUN = 4 * LOWERED - MIDDLE;

INLINE Float load_floats(const float* p) { return bits_to_float(load(p)); }

struct Scattering {
  Int mask, multiplier;
};

// 128 times the levels of states, whole numbers. window: their lowest bits are the states.
INLINE Float levels_of(Int window, const Scattering& by) {
  const Int product = times(both(window, by.mask), by.multiplier);
  return to_float(dot_bytes<true>(every(BEGUN), code_bytes(product), every(0x01010101)));
}

// In the lowest 16 bits of each lane: the 16 bits that end at bit END of the stream words[1], words[2], ..., which comes
// behind words[0]. A state has no more.
template <int END>
INLINE Int window(const Int* words) {
  constexpr int word = (END + WORD_BITS - 1) / WORD_BITS, used = END - (word - 1) * WORD_BITS;
  if constexpr (used == WORD_BITS) return words[word];
  if constexpr (used >= 16) return shift_right<WORD_BITS - used>(words[word]);
  if constexpr (used < 16) return joined<used>(words[word - 1], words[word]);
}

}  // namespace

// Mirrored field by field in trellis.py.
struct Strips {
  const int32_t* words;   // [blocks, strips, bits, 16]
  const int32_t* before;  // [runs, strips, 16]
  const float* x;         // of a product: [tokens, columns]
  const float* scale;     // of a product: [rows]
  float* out;             // of a product: [tokens, rows]; else levels [rows, columns]
  int64_t rows, columns, run, tokens;
  int32_t bits, state_bits, threads;
  uint32_t multiplier;
};

namespace {

// A block of 32 rows. ahead: of each strip, the word before its first; from strip to strip, `stride` apart.
struct Block {
  const int32_t *words, *ahead;
  int64_t stride, first, rows;

  Block(const Strips* of, int64_t number) {
    const int64_t strips = of->columns / LANES, own = of->bits * LANES;
    words = of->words + number * strips * own;
    const bool begins = number * BLOCK % of->run == 0;
    ahead = begins ? of->before + number * BLOCK / of->run * strips * LANES : words - strips * own + own - LANES;
    stride = begins ? LANES : own;
    first = number * BLOCK;
    rows = std::min<int64_t>(BLOCK, of->rows - first);
  }
};

Scattering scattering(const Strips* of) {
  return {every((1 << of->state_bits) - 1), every(static_cast<int32_t>(of->multiplier))};
}

// take(i, levels of row FIRST + i) for COUNT rows of a strip.
template <int K, int FIRST, int COUNT, class Take>
INLINE void decode(const Block& block, int64_t strip, const Scattering& by, Take take) {
  Int words[K + 1];
  words[0] = load(block.ahead + strip * block.stride);
  each<K>([&](auto j) { words[j + 1] = load(block.words + (strip * K + j) * LANES); });
  each<COUNT>([&](auto i) { take(i, levels_of(window<K * (FIRST + i + 1)>(words), by)); });
}

// body(first row) for every COUNT rows of a block.
template <int COUNT, class Body>
INLINE void each_part(Body body) {
  each<BLOCK / COUNT>([&](auto part) { body(std::integral_constant<int, part * COUNT>()); });
}

// The sums of TOKENS tokens from `token` on with a block.
template <int K, int TOKENS>
void multiply(const Strips* of, int64_t number, int64_t token) {
  constexpr int ROWS = std::max(SUMS / TOKENS, 1);
  const Block block(of, number);
  const Scattering by = scattering(of);
  const float* x = of->x + token * of->columns;
  each_part<ROWS>([&](auto first) {
    Float sums[ROWS][TOKENS];
    each<ROWS>([&](auto i) { each<TOKENS>([&](auto t) { sums[i][t] = every(0.0f); }); });
    for (int64_t strip = 0; strip < of->columns / LANES; strip++) {
      Float tokens[TOKENS];
      each<TOKENS>([&](auto t) { tokens[t] = load_floats(x + t * of->columns + strip * LANES); });
      decode<K, first, ROWS>(block, strip, by, [&](auto i, Float levels) {
        each<TOKENS>([&](auto t) { sums[i][t] = fma(levels, tokens[t], sums[i][t]); });
      });
    }
    each<ROWS>([&](auto i) {
      const int64_t row = block.first + first + i;
      if (first + i >= block.rows) return;
      each<TOKENS>([&](auto t) { of->out[(token + t) * of->rows + row] = sum(sums[i][t]) * of->scale[row]; });
    });
  });
}

template <int K>
void write_levels(const Strips* of, int64_t number) {
  const Block block(of, number);
  const Scattering by = scattering(of);
  for (int64_t strip = 0; strip < of->columns / LANES; strip++) {
    float* out = of->out + block.first * of->columns + strip * LANES;
    decode<K, 0, BLOCK>(block, strip, by, [&](auto i, Float v) {
      if (i < block.rows) store(out + i * of->columns, float_to_bits(v));
    });
  }
}

// body<K>(block) for every block.
template <class Body>
void each_block(int64_t rows, int bits, int threads, Body body) {
  in_runs((rows + BLOCK - 1) / BLOCK, threads, 1,
          [&](int64_t number, int) { with_constant<4>(bits, [&](auto k) { body(k, number); }); });
}

}  // namespace

extern "C" void multiply_strips(const Strips* of) {
  const int threads = useful_threads(of->tokens * of->rows * of->columns, of->threads);
  each_block(of->rows, of->bits, threads, [&](auto k, int64_t number) {
    in_powers_of_two<WIDE ? 8 : 4>(of->tokens,
                                   [&](int64_t token, auto tokens) { multiply<k, tokens>(of, number, token); });
  });
}

extern "C" void levels_of_strips(const Strips* of) {
  each_block(of->rows, of->bits, of->threads, [&](auto k, int64_t number) { write_levels<k>(of, number); });
}

// Mirrored field by field in trellis.py.
struct Laid {
  const uint8_t* symbols;  // [stored rows, stride]
  int32_t *words, *before;  // of `Strips`
  int64_t rows, columns, stride, run, head;
  int32_t bits, threads;
};

namespace {

// The symbols of a strip in one row, of K bits each.
template <int K>
INLINE uint64_t symbols_of(const Laid* of, int64_t stored_row, int64_t strip) {
  uint64_t found = 0;
  memcpy(&found, of->symbols + stored_row * of->stride + strip * 2 * K, 2 * K);
  return found;
}

template <int K>
INLINE uint32_t symbol(uint64_t row, int lane) {
  return static_cast<uint32_t>(row >> (K * lane)) & ((1u << K) - 1);
}

template <int K>
void lay_block(const Laid* of, int64_t number) {
  const int64_t first = number * BLOCK, rows = std::min<int64_t>(BLOCK, of->rows - first);
  const int64_t strips = of->columns / LANES, run = first / of->run;
  const int64_t stored = first + (run + 1) * of->head;  // of the first row
  for (int64_t strip = 0; strip < strips; strip++) {
    if (first % of->run == 0) {
      uint32_t before[LANES] = {};
      for (int64_t n = 0; n < of->head; n++) {
        const uint64_t row = symbols_of<K>(of, stored - of->head + n, strip);
        for (int i = 0; i < LANES; i++) before[i] = before[i] << K | symbol<K>(row, i);
      }
      memcpy(of->before + (run * strips + strip) * LANES, before, sizeof before);
    }
    uint32_t words[K * LANES] = {};
    for (int64_t n = 0; n < rows; n++) {
      const uint64_t row = symbols_of<K>(of, stored + n, strip);
      const int word = static_cast<int>(n * K / WORD_BITS), room = static_cast<int>((word + 1) * WORD_BITS - (n + 1) * K);
      for (int i = 0; i < LANES; i++) {
        const uint32_t bits = symbol<K>(row, i);
        words[word * LANES + i] |= room >= 0 ? bits << room : bits >> -room;
        if (room < 0) words[(word + 1) * LANES + i] |= bits << (WORD_BITS + room);
      }
    }
    memcpy(of->words + (number * strips + strip) * K * LANES, words, sizeof words);
  }
}

}  // namespace

extern "C" void lay_in_strips(const Laid* of) {
  each_block(of->rows, of->bits, of->threads, [&](auto k, int64_t number) { lay_block<k>(of, number); });
}
