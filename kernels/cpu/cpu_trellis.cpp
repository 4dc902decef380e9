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
#include <limits>
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
  const float* feedback;  // [sequences * steps, together] or null: how the error of a number moves later ones of its run
  int16_t* states;        // [sequences, steps]
  int64_t count, length, together;  // numbers in all, of a sequence, and of a run that feedback goes through
  int64_t chunk, ahead;             // numbers decided together where there is feedback, and looked at beyond these
  int32_t state_bits, bits, threads;
};

namespace {

constexpr int64_t FREE = -1;  // the state before a sequence

// The best path for numbers [first, end) behind a state; states of the first `kept` are written.
template <int K>
void find_path(const Paths* of, const float* whole, int64_t first, int64_t end, int64_t kept, int64_t before, Searched& own) {
  const int64_t states = int64_t{1} << of->state_bits, windows = states >> K, steps = end - first;
  if (own.cost == nullptr) own = {floats(states), floats(windows), std::vector<uint8_t>(of->length * windows)};
  const float *x = whole + first, *d = of->d + first;
  float *cost = own.cost.get(), *best = own.best.get();
  for (int64_t s = 0; s < states; s += EIGHT) store(cost + s, cost_of(eight(0.0f), x[0], d[0], of->level + s));
  if (before != FREE)
    for (int64_t s = 0; s < states; s++)
      if (s >> K != (before & (windows - 1))) cost[s] = std::numeric_limits<float>::infinity();
  for (int64_t t = 1; t < steps; t++) {
    best_of_windows<K>(cost, best, own.from.data() + t * windows, windows);
    if (t % REST == 0) take_off(best, windows, least_of(best, windows));
    costs_of_states<K>(best, cost, windows, x[t], d[t], of->level);
  }
  int64_t state = std::min_element(cost, cost + states) - cost;
  for (int64_t t = steps - 1; t >= 0; t--) {
    if (t < kept) of->states[first + t] = static_cast<int16_t>(state);
    const int64_t window = state >> K;
    if (t > 0) state = window + own.from[t * windows + window] * windows;
  }
}

// Chunk after chunk of a run, each of which takes its errors to the later numbers of the run.
template <int K>
void find_fed_back(const Paths* of, Searched& own) {
  const int64_t mask = (int64_t{1} << of->state_bits) - 1;
  std::vector<float> x(of->x, of->x + of->count);
  for (int64_t first = 0, end; first < of->count; first = end) {
    const int64_t run = first / of->together * of->together, chunks = (first - run) / of->chunk + 1;
    const int64_t last = std::min(of->count, (first / of->length + 1) * of->length);
    const int64_t behind = std::min(of->count, run + of->together);
    end = std::min({last, behind, run + chunks * of->chunk});
    const int64_t before = first % of->length ? of->states[first - 1] & mask : FREE;
    find_path<K>(of, x.data(), first, std::min(last, end + of->ahead), end - first, before, own);
    for (int64_t n = first; n < end; n++) {
      const float error = of->x[n] - of->level[of->states[n] & mask];
      const float* row = of->feedback + n * of->together;
      for (int64_t m = end; m < behind; m++) x[m] += error * row[m - run];
    }
  }
}

template <int K>
void find_paths(const Paths* of) {
  const int64_t sequences = of->feedback ? 1 : (of->count + of->length - 1) / of->length;
  const int threads = static_cast<int>(std::min<int64_t>(of->threads, sequences));
  std::vector<Searched> searched(threads);
  if (of->feedback) return find_fed_back<K>(of, searched[0]);
  in_runs(sequences, threads, 1, [&](int64_t sequence, int thread) {
    const int64_t first = sequence * of->length, end = std::min(of->count, first + of->length);
    find_path<K>(of, of->x, first, end, end - first, FREE, searched[thread]);
  });
}

}  // namespace

extern "C" void best_paths(const Paths* of) {
  if (of->bits == 1) find_paths<1>(of);
  if (of->bits == 2) find_paths<2>(of);
  if (of->bits == 3) find_paths<3>(of);
  if (of->bits == 4) find_paths<4>(of);
}
