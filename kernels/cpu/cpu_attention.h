// Attention of one query per sequence over the keys and values of a cache, which is what every step of generating does.
//
//   out[b, h] = softmax(scale q[b, h] k[b, h / share]^T + mask) v[b, h / share]
//
// Everything is computed in fp32, whatever the type in memory. Heads that share keys are computed side by side, so that
// a key and a value are read once for all of them. Where a mask of bools says no, neither is read.

#pragma once

#include <limits>

#include "cpu_work.h"

// Strides in elements: of batch, head, token. Types of what lies in a row one after another.
struct Attention {
  const void *query, *key, *value, *mask;
  void* out;  // [batch, heads, value_size]
  int64_t batch, heads, key_heads, keys, size, value_size;
  int64_t query_strides[2], key_strides[3], value_strides[3], mask_strides[2];
  float scale;
  Type type, mask_type;
  int32_t has_mask, bool_mask, threads;
};

namespace {

// e^x of x <= 0: 2^n e^f, |f| <= ln 2 / 2, e^f by its series; within 1e-7 of it, and 0 where fp32 has no normal number.
INLINE Float exp_of(Float x) {
  const Float n = rounded(times(x, every(1.44269504f)));
  Float f = fma(n, every(-0.693359375f), x);  // ln 2 in two parts, the first short enough to be exact times n
  f = fma(n, every(2.12194440e-4f), f);
  Float e = every(1.0f / 5040);
  for (const float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) e = fma(e, f, every(c));
  const Int power = shift_left(plus(to_int(n), every(127)), 23);
  // From -87 down to infinity, as integers; what is no number lies beyond it and stays none.
  const Int bits = float_to_bits(x);
  const Int low = minus(every(static_cast<int32_t>(0xc2ae0000)), bits);
  const Int vanishes = both(low, minus(bits, every(static_cast<int32_t>(0xff800001))));  // in the sign
  return where(vanishes, every(0.0f), times(e, bits_to_float(power)));
}

struct Scratch {
  Memory<float> query, scores;  // [heads side by side][size in whole vectors], [..][keys in whole vectors]
};

// Of HEADS heads from h on, which share one head of keys. WHOLE: sizes are multiples of LANES, and no call of what
// reads a part of a vector makes sums leave their registers.
template <int HEADS, Type TYPE, bool WHOLE>
void attend_heads(const Attention& a, const Scratch& own, int64_t b, int64_t h) {
  const auto read = [](const char* p, int64_t count) __attribute__((always_inline)) {
    if constexpr (WHOLE) return load_floats(p, TYPE);
    return load_floats(p, TYPE, count);
  };
  const int64_t share = a.heads / a.key_heads, each_bytes = size_of(TYPE), row = (a.keys + LANES - 1) / LANES * LANES;
  const int64_t padded = (a.size + LANES - 1) / LANES * LANES;
  const char* query = static_cast<const char*>(a.query) + (b * a.query_strides[0] + h * a.query_strides[1]) * each_bytes;
  const char* key =
      static_cast<const char*>(a.key) + (b * a.key_strides[0] + h / share * a.key_strides[1]) * each_bytes;
  const char* value =
      static_cast<const char*>(a.value) + (b * a.value_strides[0] + h / share * a.value_strides[1]) * each_bytes;
  const int64_t mask_bytes = a.bool_mask ? 1 : size_of(a.mask_type);
  const char* mask[HEADS];
  each<HEADS>([&](auto i) {
    mask[i] = static_cast<const char*>(a.mask) + (b * a.mask_strides[0] + (h + i) * a.mask_strides[1]) * mask_bytes;
    for (int64_t d = 0; d < a.size; d += LANES) {
      const Float q = read(query + (i * a.query_strides[1] + d) * each_bytes, a.size - d);
      store(&own.query[i * padded + d], float_to_bits(times(q, every(a.scale))));
    }
  });
  const auto hidden = [&](int64_t t) {
    if (!a.has_mask || !a.bool_mask) return false;
    bool any = false;
    for (int i = 0; i < HEADS; ++i) any = any || mask[i][t];
    return !any;
  };
  constexpr float NONE = -std::numeric_limits<float>::infinity();
  float most[HEADS];
  std::fill_n(most, HEADS, NONE);
  for (int64_t t = 0; t < a.keys; ++t) {
    if (hidden(t)) {
      each<HEADS>([&](auto i) { own.scores[i * row + t] = NONE; });
      continue;
    }
    const char* k = key + t * a.key_strides[2] * each_bytes;
    Float sums[HEADS];
    each<HEADS>([&](auto i) { sums[i] = every(0.0f); });
    for (int64_t d = 0; d < a.size; d += LANES) {
      const Float part = read(k + d * each_bytes, a.size - d);
      each<HEADS>([&](auto i) { sums[i] = fma(part, bits_to_float(load(&own.query[i * padded + d])), sums[i]); });
    }
    each<HEADS>([&](auto i) {
      float score = sum(sums[i]);
      if (a.has_mask) {
        if (a.bool_mask)
          score = mask[i][t] ? score : NONE;
        else
          score += load_float(mask[i] + t * mask_bytes, a.mask_type);
      }
      own.scores[i * row + t] = score;
      most[i] = std::max(most[i], score);
    });
  }
  float over_sum[HEADS];
  each<HEADS>([&](auto i) {
    float* scores = &own.scores[i * row];
    std::fill(scores + a.keys, scores + row, NONE);
    // Where nothing is seen, nothing is returned.
    const Float top = every(most[i] == NONE ? 0.0f : most[i]);
    Float total = every(0.0f);
    for (int64_t t = 0; t < row; t += LANES) {
      const Float e = exp_of(minus(bits_to_float(load(scores + t)), top));
      store(scores + t, float_to_bits(e));
      total = plus(total, e);
    }
    const float all = sum(total);
    over_sum[i] = all == 0 ? 0 : 1 / all;
  });
  for (int64_t d = 0; d < a.value_size; d += LANES) {
    Float sums[HEADS];
    each<HEADS>([&](auto i) { sums[i] = every(0.0f); });
    for (int64_t t = 0; t < a.keys; ++t) {
      if (hidden(t)) continue;
      const Float v = read(value + (t * a.value_strides[2] + d) * each_bytes, a.value_size - d);
      each<HEADS>([&](auto i) { sums[i] = fma(v, every(own.scores[i * row + t]), sums[i]); });
    }
    each<HEADS>([&](auto i) {
      char* to = static_cast<char*>(a.out) + ((b * a.heads + h + i) * a.value_size + d) * each_bytes;
      store_floats(to, TYPE, times(sums[i], every(over_sum[i])), a.value_size - d);
    });
  }
}

// Heads that are computed side by side, their sums in registers.
constexpr int HEADS_SIDE_BY_SIDE = 4;

template <int HEADS, Type TYPE>
void attend_heads(const Attention& a, const Scratch& own, int64_t b, int64_t h) {
  const bool whole = a.size % LANES == 0 && a.value_size % LANES == 0;
  whole ? attend_heads<HEADS, TYPE, true>(a, own, b, h) : attend_heads<HEADS, TYPE, false>(a, own, b, h);
}

template <Type TYPE>
void attend_all(const Attention& a) {
  const int64_t share = a.heads / a.key_heads, most = std::min<int64_t>(share, HEADS_SIDE_BY_SIDE);
  const int64_t tiles = (share + most - 1) / most, work = a.batch * a.key_heads * tiles;
  if (work == 0) return;
  const int64_t multiplications = a.batch * a.heads * a.keys * (a.size + a.value_size);
  const int threads = static_cast<int>(std::min<int64_t>(useful_threads(multiplications, a.threads), work));
  std::vector<Scratch> scratch;
  scratch.reserve(threads);
  for (int i = 0; i < threads; ++i)
    scratch.push_back({allocate<float>(most * (a.size + LANES)), allocate<float>(most * (a.keys + LANES))});
  in_parallel(work, threads, [&](int64_t i, int thread) {
    const int64_t first = i % tiles * most;
    with_constant<HEADS_SIDE_BY_SIDE>(std::min(most, share - first), [&](auto heads) {
      const int64_t h = i / tiles % a.key_heads * share + first;
      attend_heads<heads, TYPE>(a, scratch[thread], i / tiles / a.key_heads, h);
    });
  });
}

}  // namespace
