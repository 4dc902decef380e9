// Bitshift trellises (`kernels.layouts.trellis`): the search for the best path (Viterbi 1967) for many sequences side by side,
// and products with what paths decode to.
//
// Each step appends k bits to a state of L bits: s' = ((s << k) | b) mod 2^L. Of the 2^k states that lead to one, only
// the top bits differ: states that share their lower L - k bits, a window, have the same successors. So a step first
// finds the best state of each window, then adds what each of the 2^L new states costs.
//
// Costs are float32, computed as the reference does (`solvers.trellis.viterbi`): m + d (x - level)^2, no contraction.

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu_vectors.h"

namespace {

constexpr int EIGHT = 8;
constexpr int64_t REST = 256;  // steps after which the least cost is taken off all of them

struct Freed {
  void operator()(void* p) const { free(p); }
};
using Floats = std::unique_ptr<float[], Freed>;

Floats floats(int64_t count) {
  return Floats(static_cast<float*>(aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64)));
}

INLINE __m256 cost_of(__m256 m, float x, float d, const float* level) {
  const __m256 off = _mm256_sub_ps(_mm256_set1_ps(x), _mm256_loadu_ps(level));
  return _mm256_add_ps(m, _mm256_mul_ps(_mm256_set1_ps(d), _mm256_mul_ps(off, off)));
}

// best[p] = the least of cost[p + j P] over j < 2^k, from[p] = its j, the first of several.
void best_of_windows(const float* cost, float* best, uint8_t* from, int64_t windows, int choices) {
  for (int64_t p = 0; p < windows; p += EIGHT) {
    __m256 least = _mm256_loadu_ps(cost + p);
    __m256i which = _mm256_setzero_si256();
    for (int j = 1; j < choices; j++) {
      const __m256 other = _mm256_loadu_ps(cost + p + j * windows);
      const __m256 less = _mm256_cmp_ps(other, least, _CMP_LT_OQ);
      least = _mm256_blendv_ps(least, other, less);
      which = _mm256_blendv_epi8(which, _mm256_set1_epi32(j), _mm256_castps_si256(less));
    }
    _mm256_storeu_ps(best + p, least);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(which, which), 0x08);
    const __m128i narrow = _mm256_castsi256_si128(words);
    _mm_storel_epi64(reinterpret_cast<__m128i*>(from + p), _mm_packus_epi16(narrow, narrow));
  }
}

// cost[s] = best[s >> k] + d (x - level[s])^2 for the 2^k states of each of eight windows at a time.
void costs_of_states(const float* best, float* cost, int64_t windows, int k, float x, float d, const float* level) {
  const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const int choices = 1 << k;
  for (int64_t p = 0; p < windows; p += EIGHT) {
    const __m256 eight = _mm256_loadu_ps(best + p);
    for (int j = 0; j < choices; j++) {
      const __m256i at = _mm256_srli_epi32(_mm256_add_epi32(lanes, _mm256_set1_epi32(EIGHT * j)), k);
      const int64_t s = (p << k) + EIGHT * j;
      _mm256_storeu_ps(cost + s, cost_of(_mm256_permutevar8x32_ps(eight, at), x, d, level + s));
    }
  }
}

float least_of(const float* values, int64_t count) {
  __m256 least = _mm256_loadu_ps(values);
  for (int64_t i = EIGHT; i < count; i += EIGHT) least = _mm256_min_ps(least, _mm256_loadu_ps(values + i));
  float lanes[EIGHT];
  _mm256_storeu_ps(lanes, least);
  return *std::min_element(lanes, lanes + EIGHT);
}

void take_off(float* values, int64_t count, float least) {
  for (int64_t i = 0; i < count; i += EIGHT)
    _mm256_storeu_ps(values + i, _mm256_sub_ps(_mm256_loadu_ps(values + i), _mm256_set1_ps(least)));
}

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
#pragma omp parallel num_threads(static_cast<int>(std::min<int64_t>(of->threads, sequences)))
  {
    const Floats cost = floats(states), best = floats(windows);
    std::vector<uint8_t> from(of->length * windows);
#pragma omp for schedule(dynamic)
    for (int64_t sequence = 0; sequence < sequences; sequence++) {
      const int64_t first = sequence * of->length, steps = std::min(of->length, of->count - first);
      const float *x = of->x + first, *d = of->d + first;
      for (int64_t s = 0; s < states; s += EIGHT)
        _mm256_storeu_ps(cost.get() + s, cost_of(_mm256_setzero_ps(), x[0], d[0], of->level + s));
      for (int64_t t = 1; t < steps; t++) {
        best_of_windows(cost.get(), best.get(), from.data() + t * windows, windows, choices);
        if (t % REST == 0) take_off(best.get(), windows, least_of(best.get(), windows));
        costs_of_states(best.get(), cost.get(), windows, of->bits, x[t], d[t], of->level);
      }
      int64_t state = std::min_element(cost.get(), cost.get() + states) - cost.get();
      for (int64_t t = steps - 1; t >= 0; t--) {
        of->states[first + t] = static_cast<int16_t>(state);
        const int64_t window = state >> of->bits;
        if (t > 0) state = window + from[t * windows + window] * windows;
      }
    }
  }
}

// Decoding. A row has the symbols of 8 columns in k bytes. Each row appends its symbols to the states of all columns; the
// level of a state is the sum of the bytes of its product with the multiplier. Columns are taken some at a time, whose
// states stay in the nearest cache while rows go by.

namespace {

constexpr int64_t TOGETHER = 256;
constexpr int MOST_TOKENS = 4;
constexpr int MIDDLE = 510;

template <int K>
INLINE __m256i symbols_of(const uint8_t* p) {
  uint32_t word = 0;
  memcpy(&word, p, K);
  const __m256i shifts = _mm256_setr_epi32(0, K, 2 * K, 3 * K, 4 * K, 5 * K, 6 * K, 7 * K);
  const __m256i all = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int32_t>(word)), shifts);
  return _mm256_and_si256(all, _mm256_set1_epi32((1 << K) - 1));
}

struct Scattering {
  __m256i mask, multiplier;
};

// The states of eight columns with a row's symbols appended.
template <int K>
INLINE __m256i appended(int32_t* states, const uint8_t* p, const Scattering& by) {
  const __m256i before = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(states));
  const __m256i now = _mm256_and_si256(_mm256_or_si256(_mm256_slli_epi32(before, K), symbols_of<K>(p)), by.mask);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(states), now);
  return now;
}

// 128 times the levels of states: whole numbers.
INLINE __m256 levels_of(__m256i states, const Scattering& by) {
  const __m256i product = _mm256_mullo_epi32(states, by.multiplier);
  const __m256i pairs = _mm256_maddubs_epi16(product, _mm256_set1_epi8(1));
  const __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  return _mm256_cvtepi32_ps(_mm256_sub_epi32(sums, _mm256_set1_epi32(MIDDLE)));
}

INLINE float total(__m256 v) {
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  four = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(four, _mm_shuffle_ps(four, four, 1)));
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
  const Scattering by{_mm256_set1_epi32((1 << of->state_bits) - 1), _mm256_set1_epi32(static_cast<int32_t>(of->multiplier))};
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
  __m256 sums[TOKENS];
  for (auto& sum : sums) sum = _mm256_setzero_ps();
  decode_run<K>(
      of, run, first, last,
      [&](int64_t, int64_t column, __m256 levels) {
        for (int t = 0; t < TOKENS; t++)
          sums[t] = _mm256_fmadd_ps(levels, _mm256_loadu_ps(x + t * of->columns + column), sums[t]);
      },
      [&](int64_t row) {
        for (int t = 0; t < TOKENS; t++) {
          out[t * of->rows + row] = total(sums[t]);
          sums[t] = _mm256_setzero_ps();
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
      [&](int64_t row, int64_t column, __m256 levels) { _mm256_storeu_ps(of->out + row * of->columns + column, levels); },
      [](int64_t) {});
}

template <class Body>
void each_part(const Decoded* of, Body body) {
  const int64_t runs = (of->rows + of->run - 1) / of->run, blocks = (of->columns + TOGETHER - 1) / TOGETHER;
#pragma omp parallel for schedule(dynamic) num_threads(of->threads)
  for (int64_t part = 0; part < runs * blocks; part++) body(part / blocks, part % blocks);
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
