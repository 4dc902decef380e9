// The product with int8 activations: codes of planar words, or plain int8, times codes of x that are made here.

#pragma once

#include <cmath>
#include <limits>
#include <numeric>

#include "cpu_dots.h"
#include "cpu_work.h"

namespace {

constexpr float INT8_HALF_RANGE = 127.5f, INT8_STEPS = 255;

// Bytes of planar words: a word holds columns 64 apart (4 bits) or 32 apart (8 bits), so that the bytes of two planes
// alternate. Sorted within 16 bytes, every dword is four consecutive columns of one plane.
INLINE Int sorted(Int bytes) {
  return within_lanes(bytes, order<0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15>());
}

struct Nibbles {
  static constexpr int BLOCK = 128, PARTS = 2, BITS = 4;
  static constexpr bool PADDED = true;
  static constexpr int plane(int part, int half) { return part + 2 * half; }
  static constexpr int column(int part, int lane) {
    return PLANE * plane(part, lane % 4 / 2) + 8 * (lane / 4) + 4 * (lane % 2);
  }
  static INLINE Int block(const char* row, int64_t offset, int64_t) { return load(row + offset); }
  template <int PART>
  static INLINE Int decode(Int words) {
    return sorted(both(shift_right<4 * PART>(words), every(0x0f0f0f0f)));
  }
};

struct Bytes {
  static constexpr int BLOCK = 64, PARTS = 1, BITS = 8;
  static constexpr bool PADDED = true;
  static constexpr int plane(int, int half) { return half; }
  static constexpr int column(int, int lane) { return PLANE * (lane % 4 / 2) + 8 * (lane / 4) + 4 * (lane % 2); }
  static INLINE Int block(const char* row, int64_t offset, int64_t) { return load(row + offset); }
  template <int>
  static INLINE Int decode(Int words) {
    return code_bytes(sorted(words));
  }
};

// int8 [N, K] without padding, whose zero point as codes is 128.
struct Plain {
  static constexpr int BLOCK = 64, PARTS = 1, BITS = 8;
  static constexpr bool PADDED = false;
  static constexpr int column(int, int lane) { return 4 * lane; }
  static INLINE Int block(const char* row, int64_t offset, int64_t row_bytes) {
    if (offset + VECTOR_BYTES <= row_bytes) return load(row + offset);
    char padded[VECTOR_BYTES] = {};
    memcpy(padded, row + offset, row_bytes - offset);
    return load(padded);
  }
  template <int>
  static INLINE Int decode(Int codes) {
    return int8_bytes(codes);
  }
};

// What the int8 loops read of x; a segment is a run of columns with one weight scale and one activation scale.
struct Activations {
  int64_t columns, segment, segments, scales;
  Memory<int32_t> weight_group, input_group;  // of every segment
  Memory<int32_t> packed, sums, zero;         // sums [M][segments], zero [M]
  Memory<float> scale;                        // [M][scales]
  int32_t lowered;                            // what bytes of the weight are less in dot products than their codes

  // Columns that share their scales; 0: all.
  static int64_t segment_of(const Arguments& a) {
    return std::gcd(std::max<int64_t>(a.group, 0), std::max<int64_t>(a.input_group, 0));
  }

  // Columns in blocks; `by_plane`: every plane is a segment.
  Activations(const Arguments& a, int64_t block, bool by_plane) {
    columns = (a.K + block - 1) / block * block;
    lowered = LOWERED != 0 && a.bits == 8 ? LOWERED : 0;
    segment = by_plane ? PLANE : segment_of(a) == 0 ? columns : segment_of(a);
    // A chunk is made of whole blocks and, unless there is only one, of whole segments.
    if (segment < columns && segment > CHUNK * 4) segment = std::gcd(segment, CHUNK * 4);
    segments = (columns + segment - 1) / segment;
    scales = a.input_group > 0 ? (a.K + a.input_group - 1) / a.input_group : 1;
    weight_group = groups_of(columns, segment, a.group, a.G);
    input_group = groups_of(columns, segment, a.input_group, scales);
    packed = allocate<int32_t>(a.M * columns / 4);
    sums = allocate<int32_t>(a.M * segments);
    zero = allocate<int32_t>(a.M);
    scale = allocate<float>(a.M * scales);
  }

  int64_t chunk(int64_t block) const {
    const int64_t unit = segment < columns ? std::lcm<int64_t>(segment, block) : block;
    return std::max<int64_t>(CHUNK * 4 / unit, 1) * unit;
  }
};

// Codes of one token, zeros past K; its scales and its zero point, as `reference.quantize_tokens` and
// `quantize_static` give them.
void quantize(const Arguments& a, int64_t m, int8_t* codes, float* scales, int32_t* zero_point) {
  const char* x = static_cast<const char*>(a.x) + m * a.K * size_of(a.x_type);
  const int64_t width = a.input_group > 0 ? a.input_group : a.K;
  for (int64_t start = 0; start < a.K; start += width) {
    const int64_t end = std::min(start + width, a.K);
    const auto given = [&](int64_t k) { return load_floats(x + k * size_of(a.x_type), a.x_type, end - k); };
    float scale, zero = 0;
    if (a.input_scale != nullptr) {
      scale = *a.input_scale;
      zero = a.input_zero == nullptr ? 0 : *a.input_zero;
    } else {
      Float low = every(0.0f), high = every(0.0f);
      for (int64_t k = start; k < end; k += LANES) {
        const Float values = given(k);
        low = least(low, values);
        high = largest(high, values);
      }
      const float lo = least(low), hi = largest(high), tiny = std::numeric_limits<float>::min();
      scale = std::max(a.symmetric ? std::max(-lo, hi) / INT8_HALF_RANGE : (hi - lo) / INT8_STEPS, tiny);
      if (!a.symmetric) zero = std::min(std::max(std::nearbyintf(-128 - lo / scale), -128.0f), 127.0f);
    }
    for (int64_t k = start; k < end; k += LANES) {
      const Float moved = plus(rounded(over(given(k), every(scale))), every(zero));
      const Int bounded = to_int(least(largest(moved, every(-128.0f)), every(127.0f)));
      if (k + LANES <= end) {
        store_bytes(codes + k, bounded);
      } else {
        int8_t bytes[LANES];
        store_bytes(bytes, bounded);
        memcpy(codes + k, bytes, end - k);
      }
    }
    *scales++ = scale;
    *zero_point = static_cast<int32_t>(zero);
  }
}

// Groups made of whole blocks. A single segment stays int32 until all of it is summed.
template <class F, int TILE, int T>
void int_rows(const Work& work, const Activations& x, int64_t m0) {
  const Arguments& a = work.a;
  for (int r0 = 0; r0 < work.count(); r0 += TILE) {
    const char* rows[TILE];
    for (int r = 0; r < TILE; ++r) rows[r] = work.row(r0 + r);
    Float totals[TILE][T];
    Int sums[TILE][T];
    each<TILE>([&](auto r) { each<T>([&](auto t) { totals[r][t] = every(0.0f); }); });
    for (int64_t s = 0; s < x.segments; ++s) {
      const int64_t g = static_cast<int64_t>(x.weight_group[s]) * ROWS + r0;
      each<TILE>([&](auto r) {
        each<T>([&](auto t) { sums[r][t] = only(-(work.zero[g + r] - x.lowered) * x.sums[(m0 + t) * x.segments + s], 0); });
      });
      const int64_t end = std::min((s + 1) * x.segment, x.columns);
      for (int64_t k = s * x.segment; k < end; k += F::BLOCK) {
        const int64_t offset = k / F::BLOCK * VECTOR_BYTES;
        Int words[TILE];
        each<TILE>([&](auto r) {
          words[r] = F::block(rows[r], offset, a.row_bytes);
          work.fetch_near(r0 + ROWS_AHEAD, k / F::BLOCK * TILE + r);
        });
        each<F::PARTS>([&](auto part) {
          Int bytes[TILE];
          each<TILE>([&](auto r) { bytes[r] = F::template decode<part>(words[r]); });
          each<T>([&](auto t) {
            const Int given = load(&x.packed[(m0 * x.columns + k * T) / 4 + (part * T + t) * LANES]);
            each<TILE>([&](auto r) { sums[r][t] = dot_bytes<F::BITS == 4>(sums[r][t], bytes[r], given); });
          });
        });
      }
      if (x.segments == 1) break;
      each<T>([&](auto t) {
        const Float scale = every(x.scale[(m0 + t) * x.scales + x.input_group[s]]);
        each<TILE>([&](auto r) {
          totals[r][t] = fma(times(to_float(sums[r][t]), scale), every(work.scale[g + r]), totals[r][t]);
        });
      });
    }
    each<T>([&](auto t) {
      const int64_t m = m0 + t;
      float out[LANES];
      for (int r = 0; r < TILE; ++r) {
        if (x.segments == 1) {
          const int32_t exact = sum(sums[r][t]) - x.zero[m] * work.row_sum[r0 + r];
          out[r] = static_cast<float>(exact) * x.scale[m] * work.scale[r0 + r];
        } else {
          out[r] = sum(totals[r][t]);
        }
        out[r] += work.bias[r0 + r];
      }
      work.finish(m, r0, bits_to_float(load(out)), TILE);
    });
  }
}

// Groups that end within a block: every plane of 32 columns is a segment, two planes share a vector.
template <class F, int TILE, int T>
void int_rows_by_plane(const Work& work, const Activations& x, int64_t m0) {
  for (int r0 = 0; r0 < work.count(); r0 += TILE) {
    const char* rows[TILE];
    for (int r = 0; r < TILE; ++r) rows[r] = work.row(r0 + r);
    Float totals[TILE][T];
    each<TILE>([&](auto r) { each<T>([&](auto t) { totals[r][t] = every(0.0f); }); });
    for (int64_t k = 0; k < x.columns; k += F::BLOCK) {
      const int64_t offset = k / F::BLOCK * VECTOR_BYTES;
      Int words[TILE];
      each<TILE>([&](auto r) {
        words[r] = load(rows[r] + offset);
        work.fetch_near(r0 + ROWS_AHEAD, k / F::BLOCK * TILE + r);
      });
      each<F::PARTS>([&](auto part) {
        const int64_t one = k / PLANE + F::plane(part, 0), other = k / PLANE + F::plane(part, 1);
        const int64_t g = static_cast<int64_t>(x.weight_group[one]) * ROWS + r0;
        const int64_t h = static_cast<int64_t>(x.weight_group[other]) * ROWS + r0;
        each<T>([&](auto t) {
          const Int given = load(&x.packed[(m0 * x.columns + k * T) / 4 + (part * T + t) * LANES]);
          const int32_t* of_plane = &x.sums[(m0 + t) * x.segments];
          const Float scale = every(x.scale[(m0 + t) * x.scales + x.input_group[one]]);
          each<TILE>([&](auto r) {
            const int32_t zero = work.zero[g + r] - x.lowered, other_zero = work.zero[h + r] - x.lowered;
            const Int start = only(-zero * of_plane[one], -other_zero * of_plane[other]);
            const Int sums = dot_bytes<F::BITS == 4>(start, F::template decode<part>(words[r]), given);
            const Float weight_scale = halves(work.scale[g + r], work.scale[h + r]);
            totals[r][t] = fma(times(to_float(sums), scale), weight_scale, totals[r][t]);
          });
        });
      });
    }
    each<T>([&](auto t) {
      float out[LANES];
      for (int r = 0; r < TILE; ++r) out[r] = sum(totals[r][t]) + work.bias[r0 + r];
      work.finish(m0 + t, r0, bits_to_float(load(out)), TILE);
    });
  }
}

template <class F>
void int_slab(const Work& work, int64_t first, int64_t last) {
  for (int64_t block = first / F::BLOCK; block < last / F::BLOCK; ++block)
    for (int v = 0; v < VECTORS; ++v) {
      Int words[LANES];
      for (int r = 0; r < LANES; ++r) {
        const char* row = work.row(v * LANES + r);
        words[r] = F::block(row, block * VECTOR_BYTES, work.a.row_bytes);
        work.fetch_far(ROWS, (block * VECTORS + v) * LANES + r);
      }
      char* to = work.slab.get() + ((block * F::BLOCK - first) / 4 * VECTORS + v) * VECTOR_BYTES;
      each<F::PARTS>([&](auto part) {
        Int tile[LANES];
        each<LANES>([&](auto r) { tile[r] = F::template decode<part>(words[r]); });
        transpose(tile);
        each<LANES>([&](auto i) { store(to + F::column(part, i) / 4 * (VECTORS * VECTOR_BYTES), tile[i]); });
      });
    }
}

// Kept int32 sums of a single segment to fp32, in the order of `reference.rescale`.
void int_finish(const Work& work, const Activations& x, int64_t m0, int tokens) {
  for (int64_t m = m0; m < m0 + tokens; ++m)
    for (int v = 0; v < VECTORS; ++v) {
      int32_t* kept = &work.sums[m * ROWS + v * LANES];
      const Int zeros = times(every(x.zero[m]), load(work.row_sum + v * LANES));
      const Float values = times(to_float(minus(load(kept), zeros)), every(x.scale[m]));
      store(kept, float_to_bits(times(values, bits_to_float(load(&work.scale[v * LANES])))));
    }
}

template <bool NIBBLES, int T>
void int_tile(const Work& work, const Activations& x, int64_t m0, int64_t first, int64_t last) {
  const bool single = x.segments == 1, scaled = x.scales > 1;
  const int32_t* from = &x.packed[first / 4 * work.a.M + m0 * ((last - first) / 4)];
  const char* slab = work.slab.get();
  int32_t* kept = &work.sums[m0 * ROWS];
  int64_t s = first / x.segment;
  const auto dot_bytes_of = [](Int a, Int u, Int b) __attribute__((always_inline)) { return dot_bytes<false>(a, u, b); };
  const auto dot_nibbles_of = [](Part a, Int u, Int b) __attribute__((always_inline)) { return dot_nibbles(a, u, b); };
  // The dots of one dword of every row and token, so many steps on.
  const auto add = [&](int step, auto(&to)[T][VECTORS], auto dot) __attribute__((always_inline)) {
    Int weights[VECTORS];
    each<VECTORS>([&](auto v) { weights[v] = load(slab + (step * VECTORS + v) * VECTOR_BYTES); });
    each<T>([&](auto t) {
      const Int given = every_at(&from[step * T + t]);
      each<VECTORS>([&](auto v) { to[t][v] = dot(to[t][v], weights[v], given); });
    });
  };
  for (int64_t start = first; start < last; start += x.segment, ++s) {
    const int64_t g = static_cast<int64_t>(x.weight_group[s]) * ROWS;
    Int sums[T][VECTORS];
    if (single && first > 0) {
      each<T>([&](auto t) { each<VECTORS>([&](auto v) { sums[t][v] = load(kept + t * ROWS + v * LANES); }); });
    } else {
      each<T>([&](auto t) {
        const Int given = every(-x.sums[(m0 + t) * x.segments + s]);
        each<VECTORS>([&](auto v) { sums[t][v] = times(minus(load(&work.zero[g + v * LANES]), every(x.lowered)), given); });
      });
    }
    const int64_t steps = (std::min(start + x.segment, last) - start) / 4;
    if constexpr (NIBBLES) {
      for (int64_t k = 0; k < steps; k += PART_STEPS) {
        Part parts[T][VECTORS];
        each<T>([&](auto t) { each<VECTORS>([&](auto v) { parts[t][v] = no_part(); }); });
        each<PART_STEPS>([&](auto i) { add(i, parts, dot_nibbles_of); });
        from += PART_STEPS * T;
        slab += PART_STEPS * VECTORS * VECTOR_BYTES;
        each<T>([&](auto t) {
          each<VECTORS>([&](auto v) { sums[t][v] = plus(sums[t][v], sum_part(parts[t][v])); });
        });
      }
    } else if constexpr (SQUARES) {
      ByteDots<T> dots;  // columns come in whole blocks: an even number of steps
      for (int64_t k = 0; k < steps; k += 2, from += 2 * T, slab += 2 * VECTOR_BYTES)
        dots.add(load(slab), load(slab + VECTOR_BYTES), from);
      Int found[T];
      each<T>([&](auto t) { found[t] = sums[t][0]; });
      dots.add_to(found);
      each<T>([&](auto t) { sums[t][0] = found[t]; });
    } else {
      for (int64_t k = 0; k < steps; ++k, from += T, slab += VECTORS * VECTOR_BYTES) add(0, sums, dot_bytes_of);
    }
    if (single) {
      each<T>([&](auto t) { each<VECTORS>([&](auto v) { store(kept + t * ROWS + v * LANES, sums[t][v]); }); });
      break;
    }
    Float weight_scales[VECTORS];
    each<VECTORS>([&](auto v) { weight_scales[v] = bits_to_float(load(&work.scale[g + v * LANES])); });
    each<T>([&](auto t) {
      each<VECTORS>([&](auto v) {
        int32_t* to = kept + t * ROWS + v * LANES;
        Float values = to_float(sums[t][v]);
        if (scaled) values = times(values, every(x.scale[(m0 + t) * x.scales + x.input_group[s]]));
        const Float before = s == 0 ? every(0.0f) : bits_to_float(load(to));
        store(to, float_to_bits(fma(values, weight_scales[v], before)));
      });
    });
  }
  if (last < x.columns) return;
  if (single) int_finish(work, x, m0, T);
  work.finish(m0, T, single || scaled ? nullptr : x.scale.get());
}

int32_t sum_of(const int8_t* from, const int8_t* end) {
  Int sums = every(0);
  for (; from + VECTOR_BYTES <= end; from += VECTOR_BYTES)
    sums = dot_bytes<true>(sums, every(0x01010101), load(from));
  int32_t total = sum(sums);
  for (; from < end; ++from) total += *from;
  return total;
}

// Every token of x: codes, scales, sums of segments, and `arrange(codes as dwords, m)`.
template <class Arrange>
auto prepare_codes(const Arguments& a, Activations& x, int8_t* natural, Arrange arrange) {
  return [&a, &x, natural, arrange](int64_t m, int thread) {
    int8_t* codes = natural + thread * x.columns;
    memset(codes + a.K, 0, x.columns - a.K);
    quantize(a, m, codes, &x.scale[m * x.scales], &x.zero[m]);
    for (int64_t s = 0; s < x.segments; ++s) {
      x.sums[m * x.segments + s] = sum_of(codes + s * x.segment, codes + std::min((s + 1) * x.segment, x.columns));
    }
    arrange(reinterpret_cast<const int32_t*>(codes), m);
  };
}

// Chunks of slabs, which make_slab(work, first, last) makes, and all tiles of tokens over each.
template <bool NIBBLES, class MakeSlab>
void int_chunks(Work& work, const Activations& x, int64_t chunk, MakeSlab make_slab) {
  constexpr int MOST = NIBBLES ? PART_TOKENS : TOKENS;
  const TokenTiles tiles(work.a.M, MOST);
  for (int64_t first = 0; first < x.columns; first += chunk) {
    const int64_t last = std::min(first + chunk, x.columns);
    make_slab(work, first, last);
    for (int64_t tile = 0; tile < tiles.count; ++tile)
      with_constant<MOST>(tiles.size(tile), [&](auto t) {
        int_tile<NIBBLES && !VNNI, t>(work, x, tiles.start(tile), first, last);
      });
  }
}

template <class F>
void int_product(const Arguments& a) {
  const bool by_plane = a.by_rows && Activations::segment_of(a) % F::BLOCK != 0;
  Activations x(a, F::BLOCK, by_plane);
  const int64_t chunk = x.chunk(F::BLOCK);
  const Memory<int8_t> natural = allocate<int8_t>(a.threads * x.columns);
  const auto prepare = prepare_codes(a, x, natural.get(), [&](const int32_t* codes, int64_t m) {
    arrange<F>(codes, x.packed.get(), m, x.columns, 4, a, chunk / 4, F::BITS == 4 ? PART_TOKENS : TOKENS);
  });
  run(a, a.by_rows ? 0 : chunk * ROWS, prepare, [&](Work& work) {
    if (!a.by_rows) return int_chunks<F::BITS == 4>(work, x, chunk, int_slab<F>);
    in_powers_of_two(a.M, [&](int64_t m, auto t) {
      if constexpr (F::PADDED) {
        if (by_plane) return int_rows_by_plane<F, ROW_TILE, t>(work, x, m);
      }
      int_rows<F, ROW_TILE, t>(work, x, m);
    });
  });
}

}  // namespace
