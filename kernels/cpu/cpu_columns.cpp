// What a sweep does to a run of columns whose scales are known, what coordinate descent does to them later, and the
// search for a scale: the loops of compress/passes and of `grid.fit`, with the outputs of a weight as lanes.
//
// Shapes: B columns of a block, N outputs, G groups, g members of a group. Every array is [columns, N]: sixteen outputs
// are one vector, and nothing passes between lanes, so that a row has the same codes whatever rows are solved with it.
// Only in runs of outputs that depend on each other (`sweep_run`), these are decided one by one.
// Arithmetic is that of `weights.grid`, operation by operation, in fp32.

#include <cmath>
#include <limits>
#include <vector>

#include "cpu_numbers.h"
#include "cpu_threads.h"

namespace {

// Vectors of outputs that a thread works on at once: sums that do not wait for each other.
constexpr int VECTORS = WIDE ? 4 : 2;
constexpr int64_t TILE = LANES * VECTORS;
// Ranges that are tried at once.
constexpr int AT_ONCE = 4;

INLINE Float magnitude(Float v) { return bits_to_float(both(float_to_bits(v), every(0x7fffffff))); }
INLINE Float clamped(Float v, float low, float high) { return least(largest(v, every(low)), every(high)); }
// Bytes 0 or 1 as lanes whose top bit says so, and back.
INLINE Int flags(const uint8_t* p, int64_t count) { return shift_left(widen_bytes(p, count), 31); }
INLINE void store_flags(uint8_t* p, Int chosen, int64_t count) {
  uint8_t all[LANES];
  store_bytes(all, shift_right<31>(chosen));
  memcpy(p, all, std::min<int64_t>(count, LANES));
}
INLINE Float read(const float* p, int64_t count) { return load_floats(p, F32, count); }
INLINE void write(float* p, Float v, int64_t count) { store_floats(p, F32, v, count); }

}  // namespace

// Mirrored field by field in columns.py.
struct Rounding {
  float lowest_code, highest_code;
  Type scale_type;
  int32_t free_zero;  // zero points are no whole numbers, and codes those of `grid.encode_unsigned`
  const float* table; // [2, levels] codes, rising, and the largest number that is rounded to each; null: whole numbers
  int64_t levels;
};

struct Columns {
  const float *weight, *target;   // [B, N]: of descent, target is the gradient
  float *value, *change;          // [B, N]: of a sweep, change is weight - value
  const float *matrix, *diagonal; // [B, B], [B]
  float *loss, *codes;            // [N], [B, N]
  const float *scale, *zero;      // [G, N]
  const int32_t* group;           // [B]
  const uint8_t* kept;            // [B, N], or null: all
  uint8_t* exact;                 // [B, N], or null: none
  void* extra;                    // [B, N] what exact weights have beyond their codes, or null: codes of 0
  const float *price, *cost;      // [N], or null: no more become exact; [B]
  const float *outputs, *share;   // [N, run], [N], or null: outputs do not depend on each other (`sweep_run`)
  float* joint;                   // [B, N]: of descent, change times `outputs`
  int64_t N, B, begin, end, run;
  Rounding rounding;
  int32_t threads;
};

struct Search {
  const float *x, *importance;  // [g, N], [g] or null
  const float* factors;         // [count]
  float *scale, *zero;          // [N]
  int64_t N, g, count;
  Rounding rounding;
  float divisor, least_scale, largest_scale;
  Type number_type;  // of the numbers that scales can be, beside their own
  int32_t kind, threads;
};

enum Kind : int32_t { ASYMMETRIC, SIGNED_SCALE, UNSIGNED, MAGNITUDE };

namespace {

INLINE Float encoded(const Rounding& r, Float x, Float scale, Float zero) {
  if (r.table != nullptr) {
    const Float steps = over(x, scale);
    Float level = every(r.table[0]);
    for (int64_t i = 1; i < r.levels; ++i) {
      level = where(greater(steps, every(r.table[r.levels + i - 1])), every(r.table[i]), level);
    }
    return level;
  }
  if (r.free_zero) {
    const Float codes = clamped(rounded(plus(over(x, scale), zero)), r.lowest_code, r.highest_code);
    return where(greater(magnitude(scale), every(0.0f)), codes);
  }
  return clamped(plus(rounded(over(x, scale)), zero), r.lowest_code, r.highest_code);
}
INLINE Float decoded(const Rounding& r, Float codes, Float scale, Float zero) {
  return rounded_to(r.scale_type, times(minus(codes, zero), scale));
}

// Lanes n ... n + count of one column, rounded.
struct Decided {
  Float codes, value, extra;
};

INLINE Decided decide(const Columns& a, int64_t j, int64_t n, int64_t count, Float target) {
  const int64_t at = j * a.N + n;
  const Float scale = read(a.scale + a.group[j] * a.N + n, count);
  const Float zero = read(a.zero + a.group[j] * a.N + n, count);
  Float codes = encoded(a.rounding, target, scale, zero);
  if (a.kept != nullptr) codes = where(flags(a.kept + at, count), codes, zero);
  Float value = decoded(a.rounding, codes, scale, zero), extra = every(0.0f);
  if (a.exact != nullptr) {
    Int exact = flags(a.exact + at, count);
    if (a.price != nullptr) {
      const Float error = minus(target, value);
      Int dear = greater(times(every(a.cost[j]), times(error, error)), read(a.price + n, count));
      if (a.kept != nullptr) dear = both(dear, flags(a.kept + at, count));
      exact = either(exact, dear);
      store_flags(a.exact + at, exact, count);
    }
    // What codes say of an exact weight: 0, or as near to it as they come; the rest is added.
    const Float none = a.extra == nullptr ? zero : encoded(a.rounding, every(0.0f), scale, zero);
    const Float base = decoded(a.rounding, none, scale, zero);
    const Float more = rounded_to(a.rounding.scale_type, minus(target, base));
    codes = where(exact, none, codes);
    value = where(exact, rounded_to(a.rounding.scale_type, plus(base, more)), value);
    extra = where(exact, more);
  }
  return {codes, value, extra};
}

INLINE char* extra_at(const Columns& a, int64_t here) {
  return static_cast<char*>(a.extra) + here * size_of(a.rounding.scale_type);
}

// Vectors of outputs from n on: body(v, first output, outputs that there are) for those that are not empty.
template <class Body>
INLINE void each_vector(const Columns& a, int64_t n, Body body) {
  each<VECTORS>([&](auto v) {
    const int64_t at = n + v * LANES;
    if (at < a.N) body(v, at, a.N - at);
  });
}

// Column j of the targets, with sign * matrix[i][j] change[i] of the columns before it in the run, one after another.
INLINE void with_earlier(const Columns& a, int64_t j, int64_t n, float sign, Float (&sums)[VECTORS]) {
  each_vector(a, n, [&](auto v, int64_t at, int64_t count) { sums[v] = read(a.target + j * a.N + at, count); });
  if (n + TILE <= a.N) {
    for (int64_t i = a.begin; i < j; ++i) {
      const Float factor = every(sign * a.matrix[i * a.B + j]);
      const float* row = a.change + i * a.N + n;
      each<VECTORS>([&](auto v) {
        sums[v] = fma(factor, bits_to_float(load(row + v * LANES)), sums[v]);
      });
    }
    return;
  }
  for (int64_t i = a.begin; i < j; ++i) {
    const Float factor = every(sign * a.matrix[i * a.B + j]);
    each_vector(a, n, [&](auto v, int64_t at, int64_t count) {
      sums[v] = fma(factor, read(a.change + i * a.N + at, count), sums[v]);
    });
  }
}

// TILE outputs from n on in a run of a sweep.
void sweep_tile(const Columns& a, int64_t n) {
  Float loss[VECTORS], target[VECTORS];
  each<VECTORS>([&](auto v) { loss[v] = every(0.0f); });
  for (int64_t j = a.begin; j < a.end; ++j) {
    with_earlier(a, j, n, 1.0f, target);
    each_vector(a, n, [&](auto v, int64_t at, int64_t count) {
      const int64_t here = j * a.N + at;
      const Decided now = decide(a, j, at, count, target[v]);
      const Float error = minus(target[v], now.value);
      loss[v] = plus(loss[v], times(every(a.diagonal[j]), times(error, error)));
      write(a.codes + here, now.codes, count);
      if (a.extra != nullptr) store_floats(extra_at(a, here), a.rounding.scale_type, now.extra, count);
      write(a.value + here, now.value, count);
      write(a.change + here, minus(read(a.weight + here, count), now.value), count);
    });
  }
  each_vector(a, n, [&](auto v, int64_t at, int64_t count) {
    write(a.loss + at, plus(read(a.loss + at, count), loss[v]), count);
  });
}

// The same in descent: every column moves to the code nearest its optimum, where that is closer.
void descend_tile(const Columns& a, int64_t n) {
  Float gradient[VECTORS];
  for (int64_t j = a.begin; j < a.end; ++j) {
    with_earlier(a, j, n, -1.0f, gradient);
    each_vector(a, n, [&](auto v, int64_t at, int64_t count) {
      const int64_t here = j * a.N + at;
      const Float old = read(a.value + here, count);
      const Float target = plus(old, over(gradient[v], every(a.diagonal[j])));
      const Decided now = decide(a, j, at, count, target);
      const Int closer = greater(magnitude(minus(old, target)), magnitude(minus(now.value, target)));
      const Float value = where(closer, now.value, old);
      write(a.codes + here, where(closer, now.codes, read(a.codes + here, count)), count);
      if (a.extra != nullptr) {
        const Float before = load_floats(extra_at(a, here), a.rounding.scale_type, count);
        store_floats(extra_at(a, here), a.rounding.scale_type, where(closer, now.extra, before), count);
      }
      write(a.value + here, value, count);
      write(a.change + here, minus(value, old), count);
    });
  }
}

// Outputs n ... n + count of one run, which depend on each other: column j of their targets with what the columns
// before it add, sign * matrix[i][j] moved[i].
void targets_of_run(const Columns& a, int64_t j, int64_t n, int64_t count, float sign, const float* moved, float* to) {
  for (int64_t m = 0; m < count; m += LANES) {
    const int64_t lanes = count - m;
    Float sum = read(a.target + j * a.N + n + m, lanes);
    for (int64_t i = a.begin; i < j; ++i) {
      sum = fma(every(sign * a.matrix[i * a.B + j]), read(moved + i * a.N + n + m, lanes), sum);
    }
    write(to + m, sum, lanes);
  }
}

// sums[m] += factor * row[m] for first <= m < count.
INLINE void add_row(float* sums, float factor, const float* row, int64_t first, int64_t count) {
  for (int64_t m = first; m < count; m += LANES) {
    write(sums + m, fma(every(factor), read(row + m, count - m), read(sums + m, count - m)), count - m);
  }
}

INLINE float first_lane(Float v) {
  float lane;
  write(&lane, v, 1);
  return lane;
}

// A sweep of outputs from n on that depend on each other: one after another, each makes up for the errors of those
// before it in its column. outputs: U_O of H_O = U_O D_O U_O^T, share: D_O (`solvers/output_feedback.py`).
void sweep_run(const Columns& a, int64_t n) {
  const int64_t count = std::min(a.run, a.N - n);
  std::vector<float> target(count), feedback(count);
  for (int64_t j = a.begin; j < a.end; ++j) {
    targets_of_run(a, j, n, count, 1.0f, a.change, target.data());
    std::fill(feedback.begin(), feedback.end(), 0.0f);
    for (int64_t m = 0; m < count; ++m) {
      const int64_t at = n + m, here = j * a.N + at;
      const float aim = target[m] + feedback[m];
      const Decided now = decide(a, j, at, 1, every(aim));
      const float value = first_lane(now.value), error = aim - value;
      a.loss[at] += a.share[at] * a.diagonal[j] * error * error;
      write(a.codes + here, now.codes, 1);
      if (a.extra != nullptr) store_floats(extra_at(a, here), a.rounding.scale_type, now.extra, 1);
      a.value[here] = value;
      a.change[here] = a.weight[here] - value;
      add_row(feedback.data(), target[m] - value, a.outputs + at * a.run, m + 1, count);
    }
  }
}

// The same in descent. outputs: H_O, share: its diagonal.
void descend_run(const Columns& a, int64_t n) {
  const int64_t count = std::min(a.run, a.N - n);
  std::vector<float> gradient(count);
  for (int64_t j = a.begin; j < a.end; ++j) {
    targets_of_run(a, j, n, count, -1.0f, a.joint, gradient.data());
    float* joint = a.joint + j * a.N + n;
    std::fill(joint, joint + count, 0.0f);
    for (int64_t m = 0; m < count; ++m) {
      const int64_t at = n + m, here = j * a.N + at;
      const float old = a.value[here], slope = gradient[m] - a.diagonal[j] * joint[m];
      const float wanted = old + slope / (a.diagonal[j] * a.share[at]);
      const Decided now = decide(a, j, at, 1, every(wanted));
      const float value = first_lane(now.value);
      const bool closer = std::fabs(old - wanted) > std::fabs(value - wanted);
      a.change[here] = closer ? value - old : 0.0f;
      if (!closer) continue;
      write(a.codes + here, now.codes, 1);
      if (a.extra != nullptr) store_floats(extra_at(a, here), a.rounding.scale_type, now.extra, 1);
      a.value[here] = value;
      add_row(joint, value - old, a.outputs + at * a.run, 0, count);
    }
  }
}

// Scale and zero point of ranges, as `grid.scale_of_range`.
struct Ranged {
  Float scale, zero;
};

INLINE Ranged of_range(const Search& a, Float low, Float high) {
  const Float none = every(0.0f), down = minus(none, low);
  Float span = high;
  if (a.kind == ASYMMETRIC) span = minus(high, low);
  if (a.kind == SIGNED_SCALE) span = where(greater(high, down), minus(none, high), down);
  if (a.kind == MAGNITUDE) span = largest(down, high);
  const Float wanted = over(span, every(a.divisor));
  const Int sign = both(float_to_bits(wanted), every(static_cast<int32_t>(0x80000000)));
  const Float stored = rounded_to(a.rounding.scale_type, clamped(magnitude(wanted), a.least_scale, a.largest_scale));
  const Float size = rounded_to(a.number_type, stored);
  const Float scale = bits_to_float(either(float_to_bits(size), sign));
  if (a.kind != ASYMMETRIC) return {scale, none};
  const float low_code = a.rounding.lowest_code;
  return {scale, clamped(rounded(minus(every(low_code), over(low, scale))), low_code, a.rounding.highest_code)};
}

// The range of least weighted squared error among the shares `factors` of the whole one, for sixteen groups from n on.
void search_tile(const Search& a, int64_t n) {
  const int64_t count = a.N - n;
  Float low = every(0.0f), high = low;
  for (int64_t k = 0; k < a.g; ++k) {
    const Float x = read(a.x + k * a.N + n, count);
    low = least(low, x);
    high = largest(high, x);
  }
  Ranged best = of_range(a, low, high);
  Float fewest = every(std::numeric_limits<float>::infinity());
  for (int64_t first = 0; first < a.count; first += AT_ONCE) {
    Ranged tried[AT_ONCE];
    Float error[AT_ONCE];
    each<AT_ONCE>([&](auto f) {
      const Float factor = every(a.factors[std::min<int64_t>(first + f, a.count - 1)]);
      tried[f] = of_range(a, times(low, factor), times(high, factor));
      error[f] = every(0.0f);
    });
    for (int64_t k = 0; k < a.g; ++k) {
      const Float x = read(a.x + k * a.N + n, count);
      const Float weight = every(a.importance == nullptr ? 1.0f : a.importance[k]);
      each<AT_ONCE>([&](auto f) {
        const Float codes = encoded(a.rounding, x, tried[f].scale, tried[f].zero);
        const Float off = minus(decoded(a.rounding, codes, tried[f].scale, tried[f].zero), x);
        error[f] = plus(error[f], times(times(off, off), weight));
      });
    }
    each<AT_ONCE>([&](auto f) {
      const Int better = greater(fewest, error[f]);
      fewest = where(better, error[f], fewest);
      best = {where(better, tried[f].scale, best.scale), where(better, tried[f].zero, best.zero)};
    });
  }
  write(a.scale + n, best.scale, count);
  write(a.zero + n, best.zero, count);
}

}  // namespace

extern "C" void sweep_columns(const Columns* a) {
  if (a->outputs != nullptr) {
    in_parallel((a->N + a->run - 1) / a->run, a->threads, [a](int64_t i, int) { sweep_run(*a, i * a->run); });
    return;
  }
  in_parallel((a->N + TILE - 1) / TILE, a->threads, [a](int64_t i, int) { sweep_tile(*a, i * TILE); });
}

extern "C" void descend_columns(const Columns* a) {
  if (a->outputs != nullptr) {
    in_parallel((a->N + a->run - 1) / a->run, a->threads, [a](int64_t i, int) { descend_run(*a, i * a->run); });
    return;
  }
  in_parallel((a->N + TILE - 1) / TILE, a->threads, [a](int64_t i, int) { descend_tile(*a, i * TILE); });
}

extern "C" void search_ranges(const Search* a) {
  in_parallel((a->N + LANES - 1) / LANES, a->threads, [a](int64_t i, int) { search_tile(*a, i * LANES); });
}
