// Bitshift trellises (`kernels.layouts.trellis`): the search for the best path (Viterbi 1967) for many sequences side by side,
// and products with what paths decode to.
//
// Each step appends k bits to a state of L bits: s' = ((s << k) | b) mod 2^L. Of the 2^k states that lead to one, only
// the top bits differ: states that share their lower L - k bits, a window, have the same successors. So a step first
// finds the best state of each window, then adds what each of the 2^L new states costs.
//
// Costs are float32, computed as the reference does (`solvers.trellis.viterbi`): m + d (x - level)^2, no contraction.

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu_eights.h"
#include "cpu_threads.h"

namespace {

constexpr int64_t REST = 256;  // steps after which the least cost is taken off all of them

struct Freed {
  void operator()(void* p) const { free(p); }
};
using Floats = std::unique_ptr<float[], Freed>;

Floats floats(int64_t count) {
  return Floats(static_cast<float*>(aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
}

INLINE Eight cost_of(Eight m, float x, float d, const float* level) {
  const Eight off = minus(eight(x), load_eight(level));
  return plus(m, times(eight(d), times(off, off)));
}

// best[p] = the least of cost[p + j P] over j < 2^k, from[p] = its j, the first of several.
void best_of_windows(const float* cost, float* best, uint8_t* from, int64_t windows, int choices) {
  for (int64_t p = 0; p < windows; p += EIGHT) {
    Eight fewest = load_eight(cost + p);
    EightInts which = eight(0);
    for (int j = 1; j < choices; j++) {
      const Eight other = load_eight(cost + p + j * windows);
      const EightInts fewer = below(other, fewest);
      fewest = where(fewer, other, fewest);
      which = where(fewer, eight(j), which);
    }
    store(best + p, fewest);
    store_bytes(from + p, which);
  }
}

// cost[s] = best[s >> k] + d (x - level[s])^2 for the 2^k states of each of eight windows at a time.
void costs_of_states(const float* best, float* cost, int64_t windows, int k, float x, float d, const float* level) {
  const int choices = 1 << k;
  for (int64_t p = 0; p < windows; p += EIGHT) {
    const Eight of_windows = load_eight(best + p);
    for (int j = 0; j < choices; j++) {
      const EightInts at = shift_right(plus(multiples(1), eight(EIGHT * j)), eight(k));
      const int64_t s = (p << k) + EIGHT * j;
      store(cost + s, cost_of(permuted(of_windows, at), x, d, level + s));
    }
  }
}

float least_of(const float* values, int64_t count) {
  Eight fewest = load_eight(values);
  for (int64_t i = EIGHT; i < count; i += EIGHT) fewest = least(fewest, load_eight(values + i));
  float lanes[EIGHT];
  store(lanes, fewest);
  return *std::min_element(lanes, lanes + EIGHT);
}

void take_off(float* values, int64_t count, float least) {
  for (int64_t i = 0; i < count; i += EIGHT) store(values + i, minus(load_eight(values + i), eight(least)));
}

// Memory of a thread that searches.
struct Searched {
  Floats cost, best;
  std::vector<uint8_t> from;
};

}  // namespace

// Mirrored field by field in trellis.py.
struct Paths {
  const float *x, *d;     // [sequences, steps], of which a sequence has `length` or, the last one, fewer
  const float* level;     // [2^state_bits]
  int16_t* states;        // [sequences, steps]
  int64_t count, length;  // numbers in all, and of a sequence
  int32_t state_bits, bits, threads;
};

extern "C" void best_paths(const Paths* of) {
  const int64_t states = int64_t{1} << of->state_bits, windows = states >> of->bits;
  const int choices = 1 << of->bits;
  const int64_t sequences = (of->count + of->length - 1) / of->length;
  const int threads = static_cast<int>(std::min<int64_t>(of->threads, sequences));
  std::vector<Searched> searched(threads);
  in_runs(sequences, threads, 1, [&](int64_t sequence, int thread) {
    Searched& own = searched[thread];
    if (own.cost == nullptr) own = {floats(states), floats(windows), std::vector<uint8_t>(of->length * windows)};
    const int64_t first = sequence * of->length, steps = std::min(of->length, of->count - first);
    const float *x = of->x + first, *d = of->d + first;
    float *cost = own.cost.get(), *best = own.best.get();
    for (int64_t s = 0; s < states; s += EIGHT) store(cost + s, cost_of(eight(0.0f), x[0], d[0], of->level + s));
    for (int64_t t = 1; t < steps; t++) {
      best_of_windows(cost, best, own.from.data() + t * windows, windows, choices);
      if (t % REST == 0) take_off(best, windows, least_of(best, windows));
      costs_of_states(best, cost, windows, of->bits, x[t], d[t], of->level);
    }
    int64_t state = std::min_element(cost, cost + states) - cost;
    for (int64_t t = steps - 1; t >= 0; t--) {
      of->states[first + t] = static_cast<int16_t>(state);
      const int64_t window = state >> of->bits;
      if (t > 0) state = window + own.from[t * windows + window] * windows;
    }
  });
}

// Decoding. A row has the symbols of 8 columns in k bytes. Each row appends its symbols to the states of all columns; the
// level of a state is the sum of the bytes of its product with the multiplier. Columns are taken some at a time, whose
// states stay in the nearest cache while rows go by.

namespace {

constexpr int64_t TOGETHER = 256;
constexpr int MOST_TOKENS = 4;
constexpr float MIDDLE = 510;

template <int K>
INLINE EightInts symbols_of(const uint8_t* p) {
  uint32_t word = 0;
  memcpy(&word, p, K);
  return both(shift_right(eight(static_cast<int32_t>(word)), multiples(K)), eight((1 << K) - 1));
}

struct Scattering {
  EightInts mask, multiplier;
};

// The states of eight columns with a row's symbols appended.
template <int K>
INLINE EightInts appended(int32_t* states, const uint8_t* p, const Scattering& by) {
  const EightInts now = both(either(shift_left(load_eight(states), K), symbols_of<K>(p)), by.mask);
  store(states, now);
  return now;
}

// 128 times the levels of states: whole numbers.
INLINE Eight levels_of(EightInts states, const Scattering& by) {
  return minus(sums_of_bytes(times(states, by.multiplier)), eight(MIDDLE));
}

}  // namespace

// Mirrored field by field in trellis.py.
struct Decoded {
  const uint8_t* symbols;  // [stored rows, stride]
  const float* x;          // of a product: [tokens, columns]
  float* out;              // of a product: [blocks of columns, tokens, rows]; else levels [rows, columns]
  int64_t rows, columns, stride, run, head, tokens;
  int32_t bits, state_bits, threads;
  uint32_t multiplier;
};

namespace {

// take(row, column, levels of eight columns from there), for the rows of a run and some columns.
template <int K, class Take, class End>
void decode_run(const Decoded* of, int64_t run, int64_t first, int64_t last, Take take, End end) {
  const Scattering by{eight((1 << of->state_bits) - 1), eight(static_cast<int32_t>(of->multiplier))};
  int32_t states[TOGETHER] = {};
  const uint8_t* row = of->symbols + run * (of->run + of->head) * of->stride + first / EIGHT * K;
  for (int64_t n = 0; n < of->head; n++, row += of->stride)
    for (int64_t c = 0; c < last - first; c += EIGHT) appended<K>(states + c, row + c / EIGHT * K, by);
  const int64_t from = run * of->run, rows = std::min(of->run, of->rows - from);
  for (int64_t n = 0; n < rows; n++, row += of->stride) {
    for (int64_t c = 0; c < last - first; c += EIGHT)
      take(from + n, first + c, levels_of(appended<K>(states + c, row + c / EIGHT * K, by), by));
    end(from + n);
  }
}

template <int K, int TOKENS>
void multiply_run(const Decoded* of, int64_t run, int64_t block, int64_t token) {
  const int64_t first = block * TOGETHER, last = std::min(first + TOGETHER, of->columns);
  const float* x = of->x + token * of->columns;
  float* out = of->out + (block * of->tokens + token) * of->rows;
  Eight sums[TOKENS];
  for (auto& of_token : sums) of_token = eight(0.0f);
  decode_run<K>(
      of, run, first, last,
      [&](int64_t, int64_t column, Eight levels) {
        for (int t = 0; t < TOKENS; t++) sums[t] = fma(levels, load_eight(x + t * of->columns + column), sums[t]);
      },
      [&](int64_t row) {
        for (int t = 0; t < TOKENS; t++) {
          out[t * of->rows + row] = sum(sums[t]);
          sums[t] = eight(0.0f);
        }
      });
}

template <int K>
void multiply(const Decoded* of, int64_t run, int64_t block) {
  int64_t token = 0;
  for (; token + MOST_TOKENS <= of->tokens; token += MOST_TOKENS) multiply_run<K, MOST_TOKENS>(of, run, block, token);
  for (; token < of->tokens; token++) multiply_run<K, 1>(of, run, block, token);
}

template <int K>
void write_levels(const Decoded* of, int64_t run, int64_t block) {
  const int64_t first = block * TOGETHER, last = std::min(first + TOGETHER, of->columns);
  decode_run<K>(
      of, run, first, last,
      [&](int64_t row, int64_t column, Eight levels) { store(of->out + row * of->columns + column, levels); },
      [](int64_t) {});
}

template <class Body>
void each_part(const Decoded* of, Body body) {
  const int64_t runs = (of->rows + of->run - 1) / of->run, blocks = (of->columns + TOGETHER - 1) / TOGETHER;
  in_runs(runs * blocks, of->threads, 1, [&](int64_t part, int) { body(part / blocks, part % blocks); });
}

}  // namespace

// out[block] = x times the levels of a block of columns, transposed: the caller adds blocks up, in their order.
extern "C" void multiply_levels(const Decoded* of) {
  each_part(of, [of](int64_t run, int64_t block) {
    if (of->bits == 1) multiply<1>(of, run, block);
    if (of->bits == 2) multiply<2>(of, run, block);
    if (of->bits == 3) multiply<3>(of, run, block);
    if (of->bits == 4) multiply<4>(of, run, block);
  });
}

extern "C" void decode_levels(const Decoded* of) {
  each_part(of, [of](int64_t run, int64_t block) {
    if (of->bits == 1) write_levels<1>(of, run, block);
    if (of->bits == 2) write_levels<2>(of, run, block);
    if (of->bits == 3) write_levels<3>(of, run, block);
    if (of->bits == 4) write_levels<4>(of, run, block);
  });
}
