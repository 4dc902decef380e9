// Bitshift trellises (`kernels.layouts.trellis`): the search for the best path (Viterbi 1967) for many sequences side by
// side.
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

// best[p] = the least of cost[p + j P] over j < 2^K, from[p] = its j, the first of several.
template <int K>
void best_of_windows(const float* cost, float* best, uint8_t* from, int64_t windows) {
  for (int64_t p = 0; p < windows; p += EIGHT) {
    Eight fewest = load_eight(cost + p);
    EightInts which = eight(0);
    each<(1 << K) - 1>([&](auto i) {
      const Eight other = load_eight(cost + p + (i + 1) * windows);
      const EightInts fewer = below(other, fewest);
      fewest = least(other, fewest);
      which = where(fewer, eight(i + 1), which);
    });
    store(best + p, fewest);
    store_bytes(from + p, which);
  }
}

// cost[s] = best[s >> K] + d (x - level[s])^2 for the 2^K states of each window.
template <int K>
void costs_of_states(const float* best, float* cost, int64_t windows, float x, float d, const float* level) {
  if constexpr (1 << K >= EIGHT) {
    for (int64_t p = 0; p < windows; p++)
      each<(1 << K) / EIGHT>([&](auto i) {
        const int64_t s = (p << K) + EIGHT * i;
        store(cost + s, cost_of(eight(best[p]), x, d, level + s));
      });
  } else {
    for (int64_t p = 0; p < windows; p += EIGHT) {
      const Eight of_windows = load_eight(best + p);
      each<1 << K>([&](auto i) {
        const EightInts at = shift_right(plus(multiples(1), eight(EIGHT * i)), eight(K));
        const int64_t s = (p << K) + EIGHT * i;
        store(cost + s, cost_of(permuted(of_windows, at), x, d, level + s));
      });
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

namespace {

template <int K>
void find_path(const Paths* of, int64_t sequence, Searched& own) {
  const int64_t states = int64_t{1} << of->state_bits, windows = states >> K;
  if (own.cost == nullptr) own = {floats(states), floats(windows), std::vector<uint8_t>(of->length * windows)};
  const int64_t first = sequence * of->length, steps = std::min(of->length, of->count - first);
  const float *x = of->x + first, *d = of->d + first;
  float *cost = own.cost.get(), *best = own.best.get();
  for (int64_t s = 0; s < states; s += EIGHT) store(cost + s, cost_of(eight(0.0f), x[0], d[0], of->level + s));
  for (int64_t t = 1; t < steps; t++) {
    best_of_windows<K>(cost, best, own.from.data() + t * windows, windows);
    if (t % REST == 0) take_off(best, windows, least_of(best, windows));
    costs_of_states<K>(best, cost, windows, x[t], d[t], of->level);
  }
  int64_t state = std::min_element(cost, cost + states) - cost;
  for (int64_t t = steps - 1; t >= 0; t--) {
    of->states[first + t] = static_cast<int16_t>(state);
    const int64_t window = state >> K;
    if (t > 0) state = window + own.from[t * windows + window] * windows;
  }
}

}  // namespace

extern "C" void best_paths(const Paths* of) {
  const int64_t sequences = (of->count + of->length - 1) / of->length;
  const int threads = static_cast<int>(std::min<int64_t>(of->threads, sequences));
  std::vector<Searched> searched(threads);
  in_runs(sequences, threads, 1, [&](int64_t sequence, int thread) {
    if (of->bits == 1) find_path<1>(of, sequence, searched[thread]);
    if (of->bits == 2) find_path<2>(of, sequence, searched[thread]);
    if (of->bits == 3) find_path<3>(of, sequence, searched[thread]);
    if (of->bits == 4) find_path<4>(of, sequence, searched[thread]);
  });
}
