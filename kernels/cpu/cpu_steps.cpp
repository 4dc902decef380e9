// A step of generating through a block of a decoder: what stands between its products, and the products themselves, as
// the short list of instructions that steps.py makes of the block. M sequences, one token each.
//
//   normalize   rows, or heads of them: x / sqrt(mean x^2 + e) weight, or (x - mean) / sqrt(var + e) weight + bias
//   multiply    x weight^T + bias, by the loops of cpu_gemm.cpp
//   rotate      rotary embedding of the first numbers of every head, in place:
//                   [a, b] -> [a cos - b sin, b cos + a sin]     a, b: halves of them
//   keep        keys and values into the cache
//   attend      cpu_attention.h
//   activate    act(x) or act(x) y
//   add         x + y
//
// Numbers are rounded to the type of the model wherever torch's operations, one after the other, would round them, so
// that the result differs by the order of sums alone.
//
// Operands lie in a workspace: of M tokens, `at` numbers per token from its start, `row` from token to token, the first
// one `start` numbers into the row. X and OUT are the input and the output of the block.

#include <cmath>

#include "cpu_attention.h"

namespace {

enum Kind : int32_t { NORMALIZE, MULTIPLY, ROTATE, KEEP, ATTEND, ACTIVATE, ADD };
// The rounded part of a norm: x / rms before the weight, or the result alone; the weight as it is or plus one.
enum Norm : int32_t { RMS, RMS_AT_ONCE, RMS_PLUS_ONE, LAYER };
enum Activation : int32_t { SILU, GELU_TANH, GELU, RELU };
constexpr int64_t X = -1, OUT = -2;

struct Operand {
  int64_t at, row, start;
};

using Product = int32_t (*)(const Arguments*);
using Attend = int32_t (*)(const Attention*);

}  // namespace

// Mirrored field by field in steps.py.
struct Instruction {
  Operand from, beside, to;
  int64_t count, size, key_heads, value_size;  // heads, and numbers of each
  int64_t rotated;                             // numbers of a head that turn
  int64_t by_rows;                             // tokens up to which a product reads rows front to back
  const void *weight, *bias;
  const Arguments* arguments;
  Product loop;
  Attend attend;
  float epsilon, scale;
  int32_t kind, variant, weight_type, gated;
};

struct Call {
  const void *x, *cos, *sin, *keys, *values, *mask;
  void *out, *work, *key_slot, *value_slot;
  int64_t M, key_count, rotary_stride;
  int64_t key_slot_strides[2], value_slot_strides[2], key_strides[3], value_strides[3], mask_strides[2];
  int32_t type, mask_type, has_mask, bool_mask, threads;
};

namespace {

struct Step {
  const Call& call;
  Type type;
  int64_t bytes;

  explicit Step(const Call& call) : call(call), type(static_cast<Type>(call.type)), bytes(size_of(type)) {}

  char* row(const Operand& of, int64_t m) const {
    char* base = of.at == X     ? static_cast<char*>(const_cast<void*>(call.x))
                 : of.at == OUT ? static_cast<char*>(call.out)
                                : static_cast<char*>(call.work) + of.at * call.M * bytes;
    return base + (m * of.row + of.start) * bytes;
  }
  Float read(const char* p, int64_t i, int64_t size) const { return load_floats(p + i * bytes, type, size - i); }
  void write(char* p, int64_t i, int64_t size, Float v) const { store_floats(p + i * bytes, type, v, size - i); }
  Float round(Float v) const { return rounded_to(type, v); }
};

void normalize(const Step& s, const Instruction& of) {
  const int64_t size = of.size;
  const Type weight_type = static_cast<Type>(of.weight_type);
  const auto part = [&](const void* p, int64_t i) {
    return load_floats(static_cast<const char*>(p) + i * size_of(weight_type), weight_type, size - i);
  };
  for (int64_t i = 0; i < s.call.M * of.count; ++i) {
    const int64_t m = i / of.count, skip = i % of.count * size * s.bytes;
    const char* from = s.row(of.from, m) + skip;
    char* to = s.row(of.to, m) + skip;
    Float total = every(0.0f);
    float mean = 0;
    if (of.variant == LAYER) {
      for (int64_t k = 0; k < size; k += LANES) total = plus(total, s.read(from, k, size));
      mean = sum(total) / size;
      total = every(0.0f);
    }
    for (int64_t k = 0; k < size; k += LANES) {
      const Float x = leading(minus(s.read(from, k, size), every(mean)), size - k);
      total = plus(total, times(x, x));
    }
    const Float scale = every(1 / std::sqrt(sum(total) / size + of.epsilon));
    for (int64_t k = 0; k < size; k += LANES) {
      Float x = times(minus(s.read(from, k, size), every(mean)), scale);
      if (of.variant == RMS) x = s.round(x);
      if (of.weight != nullptr) {
        const Float weight = part(of.weight, k);
        x = times(x, of.variant == RMS_PLUS_ONE ? plus(every(1.0f), weight) : weight);
      }
      if (of.bias != nullptr) x = plus(x, part(of.bias, k));
      s.write(to, k, size, x);
    }
  }
}

int32_t multiply(const Step& s, const Instruction& of) {
  Arguments a = *of.arguments;
  a.x = s.row(of.from, 0);
  a.out = s.row(of.to, 0);
  a.M = s.call.M;
  a.by_rows = a.M <= of.by_rows;
  a.threads = s.call.threads;
  return of.loop(&a);
}

void rotate(const Step& s, const Instruction& of) {
  const int64_t half = of.rotated / 2;
  for (int64_t m = 0; m < s.call.M; ++m) {
    const char* cos = static_cast<const char*>(s.call.cos) + m * s.call.rotary_stride * s.bytes;
    const char* sin = static_cast<const char*>(s.call.sin) + m * s.call.rotary_stride * s.bytes;
    for (int64_t h = 0; h < of.count; ++h) {
      char* a = s.row(of.to, m) + h * of.size * s.bytes;
      char* b = a + half * s.bytes;
      for (int64_t k = 0; k < half; k += LANES) {
        const Float x = s.read(a, k, half), y = s.read(b, k, half);
        const Float first = minus(s.round(times(x, s.read(cos, k, half))), s.round(times(y, s.read(sin, k, half))));
        const char *cos_b = cos + half * s.bytes, *sin_b = sin + half * s.bytes;
        const Float second = plus(s.round(times(y, s.read(cos_b, k, half))), s.round(times(x, s.read(sin_b, k, half))));
        s.write(a, k, half, first);
        s.write(b, k, half, second);
      }
    }
  }
}

// Of keys (from) and values (beside).
void keep(const Step& s, const Instruction& of) {
  const auto copy = [&](const Operand& from, void* slot, const int64_t* strides, int64_t size) {
    for (int64_t m = 0; m < s.call.M; ++m)
      for (int64_t h = 0; h < of.key_heads; ++h)
        std::memcpy(static_cast<char*>(slot) + (m * strides[0] + h * strides[1]) * s.bytes,
                    s.row(from, m) + h * size * s.bytes, size * s.bytes);
  };
  copy(of.from, s.call.key_slot, s.call.key_slot_strides, of.size);
  copy(of.beside, s.call.value_slot, s.call.value_slot_strides, of.value_size);
}

int32_t attend(const Step& s, const Instruction& of) {
  const Call& call = s.call;
  Attention a = {};
  a.query = s.row(of.from, 0), a.key = call.keys, a.value = call.values, a.mask = call.mask;
  a.out = s.row(of.to, 0);
  a.batch = call.M, a.heads = of.count, a.key_heads = of.key_heads, a.keys = call.key_count;
  a.size = of.size, a.value_size = of.value_size;
  a.query_strides[0] = of.from.row, a.query_strides[1] = of.size;
  for (int i = 0; i < 3; ++i) a.key_strides[i] = call.key_strides[i], a.value_strides[i] = call.value_strides[i];
  for (int i = 0; i < 2; ++i) a.mask_strides[i] = call.mask_strides[i];
  a.scale = of.scale;
  a.type = s.type, a.mask_type = static_cast<Type>(call.mask_type);
  a.has_mask = call.has_mask, a.bool_mask = call.bool_mask, a.threads = call.threads;
  return of.attend(&a);
}

// 1 / (1 + e^-x), without an overflow.
INLINE Float sigmoid(Float x) {
  const Float e = exp_of(least(x, minus(every(0.0f), x)));
  return over(where(float_to_bits(x), e, every(1.0f)), plus(every(1.0f), e));
}

Float activation(int32_t variant, Float x) {
  if (variant == SILU) return times(x, sigmoid(x));
  if (variant == RELU) return largest(x, every(0.0f));
  if (variant == GELU_TANH) {
    constexpr float TWO_ROOT_2_OVER_PI = 1.5957691216f, CUBIC = 0.044715f;
    const Float cube = times(times(x, x), x);
    return times(x, sigmoid(times(every(TWO_ROOT_2_OVER_PI), fma(every(CUBIC), cube, x))));
  }
  constexpr float ROOT_HALF = 0.70710678119f;
  float lanes[LANES];
  store(lanes, float_to_bits(x));
  for (float& v : lanes) v = 0.5f * v * (1 + std::erf(v * ROOT_HALF));
  return bits_to_float(load(lanes));
}

// body(to, place, left) for every vector of every token.
template <class Body>
void for_all(const Step& s, const Instruction& of, Body body) {
  for (int64_t m = 0; m < s.call.M; ++m)
    for (int64_t k = 0; k < of.size; k += LANES)
      s.write(s.row(of.to, m), k, of.size, body(m, k));
}

void activate(const Step& s, const Instruction& of) {
  for_all(s, of, [&](int64_t m, int64_t k) {
    const Float x = activation(of.variant, s.read(s.row(of.from, m), k, of.size));
    return of.gated ? times(s.round(x), s.read(s.row(of.beside, m), k, of.size)) : x;
  });
}

void add(const Step& s, const Instruction& of) {
  for_all(s, of, [&](int64_t m, int64_t k) {
    return plus(s.read(s.row(of.from, m), k, of.size), s.read(s.row(of.beside, m), k, of.size));
  });
}

}  // namespace

// The result of the first loop that did not succeed; 0 where all did.
extern "C" int32_t run_step(const Instruction* first, int64_t count, const Call* call) {
  const Step step(*call);
  for (const Instruction* each = first; each < first + count; ++each) {
    int32_t outcome = 0;
    switch (each->kind) {
      case NORMALIZE: normalize(step, *each); break;
      case MULTIPLY: outcome = multiply(step, *each); break;
      case ROTATE: rotate(step, *each); break;
      case KEEP: keep(step, *each); break;
      case ATTEND: outcome = attend(step, *each); break;
      case ACTIVATE: activate(step, *each); break;
      default: add(step, *each);
    }
    if (outcome != 0) return outcome;
  }
  return 0;
}
