// Rows of numbers times Sylvester's matrices, and the codes of key-value caches (`weights.kv_cache_codes`), whose keys are
// rotated before and turned back behind them.

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <vector>

#include "cpu_eights.h"
#include "cpu_numbers.h"
#include "cpu_threads.h"

namespace {

constexpr int64_t ALONE = 1 << 14;  // numbers that no second thread is woken for

int shared_by(int64_t numbers, int threads) { return numbers < ALONE ? 1 : threads; }

alignas(32) constexpr int32_t PARTNERS[3][EIGHT] = {
    {1, 0, 3, 2, 5, 4, 7, 6}, {2, 3, 0, 1, 6, 7, 4, 5}, {4, 5, 6, 7, 0, 1, 2, 3}};
alignas(32) constexpr float SIGNS[3][EIGHT] = {
    {1, -1, 1, -1, 1, -1, 1, -1}, {1, 1, -1, -1, 1, 1, -1, -1}, {1, 1, 1, 1, -1, -1, -1, -1}};

// x times Sylvester's matrix of order `size`, a power of two from 8 on, scaled to be orthogonal. It is symmetric.
void rotate_row(const float* x, float* out, int64_t size, float scale) {
  for (int64_t i = 0; i < size; i += EIGHT) {
    Eight v = times(load_eight(x + i), eight(scale));
    for (int level = 0; level < 3; level++)
      v = plus(permuted(v, load_eight(PARTNERS[level])), times(v, load_eight(SIGNS[level])));
    store(out + i, v);
  }
  for (int64_t half = EIGHT; half < size; half *= 2)
    for (int64_t first = 0; first < size; first += 2 * half)
      for (int64_t i = first; i < first + half; i += EIGHT) {
        const Eight one = load_eight(out + i), other = load_eight(out + i + half);
        store(out + i, plus(one, other));
        store(out + i + half, minus(one, other));
      }
}

INLINE float orthogonal(int64_t size) { return 1.0f / std::sqrt(static_cast<float>(size)); }

}  // namespace

// Mirrored field by field in states.py.
struct Rotated {
  const float* x;  // [rows, size]
  float* out;      // [rows, size]
  int64_t rows, size;
  int32_t threads;
};

extern "C" void rotate_rows(const Rotated* of) {
  const float scale = orthogonal(of->size);
  in_parallel(of->rows, shared_by(of->rows * of->size, of->threads), [&](int64_t row, int) {
    rotate_row(of->x + row * of->size, of->out + row * of->size, of->size, scale);
  });
}

// Mirrored field by field in states.py. A row of `size` numbers is `stride` bytes: at 8 bits its codes and a scale, at
// fewer the minima and steps of its groups, as bfloat16, and its codes.
struct Coded {
  float* numbers;   // [rows, size]
  uint8_t* stored;  // [rows, stride]
  int64_t rows, size, group, stride;
  int32_t bits, rotated, threads;
};

namespace {

constexpr float OF_BYTES = 127.5f;  // of the largest magnitude

uint16_t bfloat16_of(float v) {
  uint32_t word;
  memcpy(&word, &v, 4);
  return static_cast<uint16_t>(nearest_bf16(word));
}

float float_of(uint16_t half) {
  const uint32_t word = static_cast<uint32_t>(half) << 16;
  float v;
  memcpy(&v, &word, 4);
  return v;
}

float read_float(const uint8_t* p) {
  float v;
  memcpy(&v, p, 4);
  return v;
}

uint16_t read_half(const uint8_t* p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return v;
}

INLINE Eight within(Eight v, float low, float high) { return greatest(least(v, eight(high)), eight(low)); }

struct Range {
  float least, most;
};

// The least and the greatest number; not a number where one of them is none.
Range range_of(const float* x, int64_t count) {
  Eight low = load_eight(x), high = low, nothing = eight(0.0f);
  for (int64_t i = 0; i < count; i += EIGHT) {
    const Eight v = load_eight(x + i);
    low = least(low, v), high = greatest(high, v);
    nothing = plus(nothing, times(v, eight(0.0f)));
  }
  float lows[EIGHT], highs[EIGHT];
  store(lows, low), store(highs, high);
  const float none = sum(nothing);
  return {*std::min_element(lows, lows + EIGHT) + none, *std::max_element(highs, highs + EIGHT) + none};
}

void encode_bytes(const float* x, uint8_t* stored, int64_t size) {
  const Range range = range_of(x, size);
  const float scale = std::max(std::max(-range.least, range.most) / OF_BYTES, FLT_MIN);
  for (int64_t i = 0; i < size; i += EIGHT)
    store_bytes(stored + i, both(nearest(within(over(load_eight(x + i), eight(scale)), -128, 127)), eight(255)));
  memcpy(stored + size, &scale, 4);
}

void decode_bytes(const uint8_t* stored, float* out, int64_t size) {
  const Eight scale = eight(std::max(read_float(stored + size), FLT_MIN));
  for (int64_t i = 0; i < size; i += EIGHT) {
    const Eight code = numbers(bytes(stored + i));
    store(out + i, times(where(below(eight(127.5f), code), minus(code, eight(256.0f)), code), scale));
  }
}

// A field of some bits of every code, of eight numbers after eight: byte j holds those of the numbers j, j + part,
// j + 2 part ...
template <int BITS>
struct Field {
  static constexpr int IN_BYTE = 8 / BITS;
  int64_t part, at = 0;
  int shift = 0;

  explicit Field(int64_t size) : part(size / IN_BYTE) {}

  INLINE EightInts take(const uint8_t* from) {
    const EightInts held = shift_right(bytes(from + at), eight(shift));
    at += EIGHT;
    if (at == part) at = 0, shift += BITS;
    return both(held, eight((1 << BITS) - 1));
  }

  // Of all codes; lowest: the first of the field's bits.
  void put(const uint8_t* codes, uint8_t* to, int lowest) const {
    for (int64_t j = 0; j < part; j++) {
      int byte = 0;
      for (int n = 0; n < IN_BYTE; n++) byte |= (codes[j + n * part] >> lowest & ((1 << BITS) - 1)) << n * BITS;
      to[j] = static_cast<uint8_t>(byte);
    }
  }
};

// The codes of a row, of 4 bits or of 2 and 1 bits.
struct Nibbles {
  static constexpr int LEVELS = 15;
  Field<4> whole;

  explicit Nibbles(int64_t size) : whole(size) {}
  void put(const uint8_t* codes, uint8_t* to) const { whole.put(codes, to, 0); }
  INLINE EightInts take(const uint8_t* from) { return whole.take(from); }
};

struct Threes {
  static constexpr int LEVELS = 7;
  Field<2> low;
  Field<1> high;

  explicit Threes(int64_t size) : low(size), high(size) {}
  void put(const uint8_t* codes, uint8_t* to) const { low.put(codes, to, 0), high.put(codes, to + low.part, 2); }
  INLINE EightInts take(const uint8_t* from) {
    return either(low.take(from), shift_left(high.take(from + low.part), 2));
  }
};

template <class Codes>
void encode_groups(const float* x, uint8_t* stored, const Coded* of) {
  const int64_t groups = of->size / of->group;
  std::vector<uint8_t> codes(of->size);
  for (int64_t g = 0; g < groups; g++) {
    const float* own = x + g * of->group;
    const Range range = range_of(own, of->group);
    const uint16_t low = bfloat16_of(range.least);
    const uint16_t step = bfloat16_of((range.most - float_of(low)) / Codes::LEVELS);
    memcpy(stored + 2 * g, &low, 2);
    memcpy(stored + 2 * (groups + g), &step, 2);
    const Eight base = eight(float_of(low)), width = eight(std::max(float_of(step), FLT_MIN));
    for (int64_t i = 0; i < of->group; i += EIGHT) {
      const Eight steps = over(minus(load_eight(own + i), base), width);
      store_bytes(codes.data() + g * of->group + i, nearest(within(steps, 0, Codes::LEVELS)));
    }
  }
  Codes(of->size).put(codes.data(), stored + 4 * groups);
}

template <class Codes>
void decode_groups(const uint8_t* stored, float* out, const Coded* of) {
  const int64_t groups = of->size / of->group;
  const uint8_t* from = stored + 4 * groups;
  Codes codes(of->size);
  for (int64_t g = 0; g < groups; g++, out += of->group) {
    const Eight low = eight(float_of(read_half(stored + 2 * g)));
    const Eight step = eight(float_of(read_half(stored + 2 * (groups + g))));
    for (int64_t i = 0; i < of->group; i += EIGHT) store(out + i, plus(times(numbers(codes.take(from)), step), low));
  }
}

template <class Body>
void each_row(const Coded* of, Body body) {
  in_parallel(of->rows, shared_by(of->rows * of->size, of->threads), [&](int64_t row, int) {
    body(of->numbers + row * of->size, of->stored + row * of->stride);
  });
}

}  // namespace

extern "C" void encode_rows(const Coded* of) {
  const float scale = orthogonal(of->size);
  each_row(of, [&](float* x, uint8_t* stored) {
    std::vector<float> turned(of->rotated ? of->size : 0);
    const float* from = of->rotated ? turned.data() : x;
    if (of->rotated) rotate_row(x, turned.data(), of->size, scale);
    if (of->bits == 8) encode_bytes(from, stored, of->size);
    if (of->bits == 4) encode_groups<Nibbles>(from, stored, of);
    if (of->bits == 3) encode_groups<Threes>(from, stored, of);
  });
}

extern "C" void decode_rows(const Coded* of) {
  const float scale = orthogonal(of->size);
  each_row(of, [&](float* out, const uint8_t* stored) {
    if (of->bits == 8) decode_bytes(stored, out, of->size);
    if (of->bits == 4) decode_groups<Nibbles>(stored, out, of);
    if (of->bits == 3) decode_groups<Threes>(stored, out, of);
    if (of->rotated) rotate_row(out, out, of->size, scale);
  });
}
