// Products of few or many tokens with a low-bit weight on the CPU: x weight^T + bias, straight from the stored words.
//
// Shapes: M tokens, N outputs, K inputs, G groups. A row of the weight is a sequence of 64-byte blocks (see pack.py for
// what a block of planar words holds; w8a8 weights are plain int8, 64 columns per block). A block is decoded into
// vectors of 16 dwords; a dword holds STEP consecutive columns of one row: one float, two bf16 or four bytes. `column`
// says which. Both loops below multiply such vectors by dwords of x that hold the same columns:
//
//   rows    few tokens, bound by memory: a vector holds 16 dwords of one row and meets the same 16 dwords of x, so a
//           row is read once, front to back, and its 16 sums are added up at the end.
//               x packed as [tile of tokens][block][part][tokens of the tile][16 dwords]
//   slabs   more tokens, bound by arithmetic: a chunk of ROWS rows is decoded once and transposed, so that a vector
//           holds one dword of each of 16 rows; every tile of tokens then runs over the chunk, which stays in the
//           first-level cache, with one broadcast per dword of x. Sums wait in memory from chunk to chunk.
//               slab [CHUNK][ROWS dwords];  x packed as [tile of tokens][K / STEP][tokens of the tile]
//
// weight_only     the values of `pack.planar_weight`, rounded to the type of the scales, times x: fp32 products and
//                 sums, or pairs of bf16 with fp32 sums. 4-bit values come from a table of 16 per row and group.
// int8_activation x to int8 codes as `reference` rounds them. Unsigned bytes of the weight times signed bytes of x,
//                 int32 sums; a zero point costs the sum of the x codes: sum (u - z) x = sum u x - z sum x. Every
//                 segment of columns that shares its scales becomes fp32: ((sum x_scale) weight_scale).
//
// Columns past K are zeros of x, rows past N repeat the last row and are not stored.

#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "cpu_vectors.h"

namespace {

constexpr int PLANE = 32;
// Vectors of a slab and tokens of a tile: sums, weights and one broadcast fill the registers (32 of AVX-512, 16 of AVX2).
constexpr int VECTORS = WIDE ? 2 : 1;
constexpr int ROWS = LANES * VECTORS;
constexpr int TOKENS = WIDE ? 12 : 6;
// Rows and, at most, tokens that the row loop takes at once.
constexpr int ROW_TILE = WIDE ? 4 : 2;
constexpr int ROW_TOKENS = WIDE ? 4 : 2;
// Dwords of each row in a chunk: 16 KiB of AVX-512 slab.
constexpr int64_t CHUNK = 128;
// Tokens whose packed copy exists at a time.
constexpr int64_t TOKEN_BLOCK = 1024;
// Runs of neighbouring slabs per thread: few enough that the next slab is mostly the same thread's, which fetches it
// ahead, and enough that a thread that is held up does not hold up the others.
constexpr int RUNS = 8;
constexpr float INT8_HALF_RANGE = 127.5f, INT8_STEPS = 255;

// Mirrored field by field in cpu_gemm.py.
struct Arguments {
  const void *x, *weight, *scale, *bias;
  const uint8_t* zero;
  const float* input_scale;
  const int32_t *input_zero, *row_sum;
  void* out;
  int64_t M, N, K, G, row_bytes, group, input_group;
  Type x_type, scale_type, bias_type;
  int32_t bits, planar, symmetric, by_rows, threads;
};

struct Free {
  void operator()(void* p) const { std::free(p); }
};

template <class T>
using Memory = std::unique_ptr<T[], Free>;

template <class T>
Memory<T> allocate(int64_t count) {
  const int64_t bytes = (count * sizeof(T) + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES;
  void* p = std::aligned_alloc(VECTOR_BYTES, std::max<int64_t>(bytes, VECTOR_BYTES));
  if (p == nullptr) throw std::bad_alloc();
  return Memory<T>(static_cast<T*>(p));
}

// body with the compile-time constant that equals value, of 1 ... MOST.
template <int MOST, class Body>
INLINE void with_constant(int64_t value, Body body) {
  each<MOST>([&](auto i) {
    if (value == i + 1) body(std::integral_constant<int, i + 1>());
  });
}

// The row loop takes tiles of ROW_TOKENS tokens, then one of half as many if there are as many left, and so on:
// body(m, tokens) for every tile that starts at m.
template <int T = ROW_TOKENS, class Body>
INLINE void in_powers_of_two(int64_t M, Body body, int64_t m = 0) {
  for (; m + T <= M; m += T) body(m, std::integral_constant<int, T>());
  if constexpr (T > 1) in_powers_of_two<T / 2>(M, body, m);
}

// Tokens in tiles of at most TOKENS, as even as they can be.
struct Tiles {
  int64_t count, least, extra;

  explicit Tiles(int64_t M) : count((M + TOKENS - 1) / TOKENS), least(M / count), extra(M % count) {}
  int64_t size(int64_t tile) const { return least + (tile < extra); }
  int64_t start(int64_t tile) const { return tile * least + std::min(tile, extra); }
  int64_t of(int64_t token) const {
    const int64_t longer = extra * (least + 1);
    return token < longer ? token / (least + 1) : extra + (token - longer) / least;
  }
};

// For every `unit` columns, the group that they belong to; padding belongs to the last.
std::vector<int32_t> groups_of(int64_t columns, int64_t unit, int64_t group, int64_t count) {
  std::vector<int32_t> found((columns + unit - 1) / unit);
  for (size_t i = 0; i < found.size(); ++i)
    found[i] = group > 0 ? static_cast<int32_t>(std::min<int64_t>(i * unit / group, count - 1)) : 0;
  return found;
}

// --- from words to vectors -------------------------------------------------------------------------------------------

// Values of planar words: `decode` reads the lowest plane, a loop over planes shifts the words down by BITS.
// fp32: the 16 pairs of words of a block give 16 even and 16 odd columns of a plane.
struct F32Dot {
  static INLINE Float dot(Float sums, Int w, Int x) { return fma(bits_to_float(w), bits_to_float(x), sums); }
};

template <int WIDTH>
struct F32Words {
  using Dot = F32Dot;
  static constexpr int BITS = WIDTH, BLOCK = PLANE * 16 / BITS, STEP = 1, PARTS = BLOCK / LANES, PARTS_OF_PLANE = 2;
  static constexpr int column(int part, int lane) { return PLANE * (part / 2) + 2 * lane + part % 2; }
  struct Decoder {
    Float zero, scale, table;  // the table of the values of 4-bit codes
    Type type;

    INLINE Decoder() {}
    INLINE Decoder(float z, float s, Type t) : zero(every(z)), scale(every(s)), type(t) {
      if constexpr (BITS == 4) table = value(lanes());
    }
    template <int PART>
    INLINE Int decode(Int words) const {
      const Int codes = shift_right<16 * PART>(words);
      if constexpr (BITS == 4) return float_to_bits(lookup(table, codes));
      return float_to_bits(value(both(codes, every(0xff))));
    }
    INLINE Float value(Int codes) const { return rounded_to(type, times(minus(to_float(codes), zero), scale)); }
  };

};

#if BF16_DOT
// bf16: the 32 words of a block give the 32 columns of a plane in order.
struct Bf16Dot {
  static INLINE Float dot(Float sums, Int w, Int x) { return _mm512_dpbf16_ps(sums, (__m512bh)w, (__m512bh)x); }
};

template <int WIDTH>
struct Bf16Words {
  using Dot = Bf16Dot;
  static constexpr int BITS = WIDTH, BLOCK = PLANE * 16 / BITS, STEP = 2, PARTS = BLOCK / PLANE, PARTS_OF_PLANE = 1;
  static constexpr int column(int part, int lane) { return PLANE * part + 2 * lane; }

  struct Decoder {
    Float zero, scale;
    Int table;  // of 4-bit values, twice: a permutation of words reads five bits of an index

    INLINE Decoder() {}
    INLINE Decoder(float z, float s, Type) : zero(every(z)), scale(every(s)) {
      if constexpr (BITS == 4) {
        const __m256i values = (__m256i)_mm512_cvtneps_pbh(times(minus(to_float(lanes()), zero), scale));
        table = _mm512_inserti64x4(_mm512_castsi256_si512(values), values, 1);
      }
    }
    template <int PART>
    INLINE Int decode(Int words) const {
      static_assert(PART == 0);
      if constexpr (BITS == 4) {
        return _mm512_permutexvar_epi16(words, table);
      } else {
        const Int bytes = both(words, _mm512_set1_epi16(0xff));
        const Float low = value(_mm512_castsi512_si256(bytes)), high = value(_mm512_extracti64x4_epi64(bytes, 1));
        return (Int)_mm512_cvtne2ps_pbh(high, low);
      }
    }
    INLINE Float value(__m256i codes) const {
      return times(minus(to_float(_mm512_cvtepu16_epi32(codes)), zero), scale);
    }
  };
};
#endif

// Bytes of planar words: a word holds columns 64 apart (4 bits) or 32 apart (8 bits), so that the bytes of two planes
// alternate. Sorted within 16 bytes, every dword is four consecutive columns of one plane.
INLINE Int sorted(Int bytes) {
  return within_lanes(bytes, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
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
    return sorted(words);
  }
};

// int8 [N, K] without padding: raised by 128 to be unsigned, which a zero point of 128 takes back.
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
    return differ(codes, every(static_cast<int32_t>(0x80808080)));
  }
};

// --- what both products share ----------------------------------------------------------------------------------------

// The rows that one thread works on, what belongs to them, and its slab.
struct Work {
  const Arguments& a;
  int64_t n0 = 0;
  Memory<float> scale, float_zero;  // [G][ROWS]
  Memory<int32_t> zero;             // [G][ROWS]
  Memory<char> slab;                // [chunk][ROWS] dwords
  Memory<int32_t> sums;             // [M][ROWS], fp32 or int32
  float bias[ROWS];
  int32_t row_sum[ROWS];

  Work(const Arguments& a, int64_t slab_bytes)
      : a(a),
        scale(allocate<float>(a.G * ROWS)),
        float_zero(allocate<float>(a.G * ROWS)),
        zero(allocate<int32_t>(a.G * ROWS)),
        slab(allocate<char>(slab_bytes)),
        sums(allocate<int32_t>(a.by_rows ? 0 : a.M * ROWS)) {
    std::fill_n(zero.get(), a.G * ROWS, 1 << (a.bits - 1));
    std::fill_n(float_zero.get(), a.G * ROWS, static_cast<float>(1 << (a.bits - 1)));
  }

  int64_t count() const { return std::min<int64_t>(ROWS, a.N - n0); }

  const char* row(int64_t r) const {
    return static_cast<const char*>(a.weight) + std::min(n0 + r, a.N - 1) * a.row_bytes;
  }

  // A piece of the next slab, which lies behind this one: in order, unlike the rows that are being decoded.
  INLINE void fetch_ahead(int64_t piece) const {
    const char* next = static_cast<const char*>(a.weight) + (n0 + ROWS) * a.row_bytes;
    _mm_prefetch(next + piece * VECTOR_BYTES, _MM_HINT_T1);
  }

  void begin(int64_t first) {
    n0 = first;
    const int64_t size = size_of(a.scale_type);
    for (int64_t g = 0; g < a.G; ++g) {
      const int64_t at = g * a.N + n0;
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t here = std::max<int64_t>(count() - v * LANES, 0);
        const char* p = static_cast<const char*>(a.scale) + (at + std::min<int64_t>(v * LANES, count())) * size;
        store(&scale[g * ROWS + v * LANES], float_to_bits(load_floats(p, a.scale_type, here)));
      }
      if (a.zero == nullptr) continue;
      uint8_t zeros[ROWS] = {};
      memcpy(zeros, a.zero + at, count());
      for (int r = 0; r < ROWS; ++r) zero[g * ROWS + r] = zeros[r];
      for (int r = 0; r < ROWS; ++r) float_zero[g * ROWS + r] = zeros[r];
    }
    for (int r = 0; r < ROWS; ++r) {
      bias[r] = 0;
      row_sum[r] = a.row_sum == nullptr ? 0 : a.row_sum[std::min(n0 + r, a.N - 1)];
    }
    if (a.bias != nullptr)
      for (int v = 0; v * LANES < count(); ++v) {
        const char* p = static_cast<const char*>(a.bias) + (n0 + v * LANES) * size_of(a.bias_type);
        store(bias + v * LANES, float_to_bits(load_floats(p, a.bias_type, count() - v * LANES)));
      }
  }

  template <class Decoder>
  INLINE Decoder decoder(int64_t at) const {
    return Decoder(float_zero[at], scale[at], a.scale_type);
  }

  // Outputs of token m for rows r and on: as many as there are, at most `most`.
  void finish(int64_t m, int64_t r, Float values, int64_t most) const {
    char* p = static_cast<char*>(a.out) + (m * a.N + n0 + r) * size_of(a.x_type);
    store_floats(p, a.x_type, values, std::min(most, count() - r));
  }

  // Outputs of tokens m0 ... m0 + tokens from the fp32 sums, times the scales of the tokens where there are any.
  void finish(int64_t m0, int tokens, const float* scales) const {
    for (int64_t m = m0; m < m0 + tokens; ++m)
      for (int v = 0; v * LANES < count(); ++v) {
        Float values = bits_to_float(load(&sums[m * ROWS + v * LANES]));
        if (scales != nullptr) values = times(values, every(scales[m]));
        finish(m, v * LANES, plus(values, bits_to_float(load(bias + v * LANES))), LANES);
      }
  }
};

// Runs body(work) for every ROWS rows, by the threads that are asked for; prepare(m, thread) before, for every token.
template <class Prepare, class Body>
void run(const Arguments& a, int64_t slab_bytes, Prepare prepare, Body body) {
  const int64_t slabs = (a.N + ROWS - 1) / ROWS;
  const int threads = static_cast<int>(std::min<int64_t>(a.threads, std::max(slabs, a.M)));
  const int64_t run_length = std::max<int64_t>(slabs / (threads * RUNS), 1);
  std::vector<std::unique_ptr<Work>> works;
  for (int i = 0; i < threads; ++i) works.push_back(std::make_unique<Work>(a, slab_bytes));
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
#pragma omp for schedule(static)
    for (int64_t m = 0; m < a.M; ++m) prepare(m, thread);
#pragma omp for schedule(dynamic, run_length)
    for (int64_t slab = 0; slab < slabs; ++slab) {
      works[thread]->begin(slab * ROWS);
      body(*works[thread]);
    }
  }
}

// Dwords of a token, in the order in which the loop that is to run reads them.
template <class D>
void arrange(const int32_t* natural, int32_t* packed, int64_t m, int64_t columns, int step, const Arguments& a) {
  const int64_t dwords = columns / step;
  if (!a.by_rows) {
    const Tiles tiles(a.M);
    const int64_t tile = tiles.of(m), size = tiles.size(tile);
    int32_t* to = packed + tiles.start(tile) * dwords + (m - tiles.start(tile));
    for (int64_t k = 0; k < dwords; ++k) to[k * size] = natural[k];
    return;
  }
  int64_t first = 0, size = ROW_TOKENS;
  while (first + size <= m || first + size > a.M) first + size <= a.M ? first += size : size /= 2;
  int32_t* to = packed + first * dwords + (m - first) * LANES;
  for (int64_t start = 0; start < dwords; start += D::BLOCK / step)
    for (int part = 0; part < D::PARTS; ++part, to += size * LANES)
      for (int lane = 0; lane < LANES; ++lane) to[lane] = natural[start + D::column(part, lane) / step];
}

// --- weight only -----------------------------------------------------------------------------------------------------

// `whole`: no group ends within a block.
template <class D, int TILE, int T>
void float_rows(const Work& work, const int32_t* x, const int32_t* group_of_plane, int64_t columns, bool whole,
                int64_t m0) {
  using Decoder = typename D::Decoder;
  constexpr int PLANES = D::BLOCK / PLANE;
  for (int r0 = 0; r0 < work.count(); r0 += TILE) {
    const char *rows[TILE], *ahead[TILE];
    for (int r = 0; r < TILE; ++r) rows[r] = work.row(r0 + r), ahead[r] = rows[r] + TILE * work.a.row_bytes;
    Float sums[TILE][T];
    each<TILE>([&](auto r) { each<T>([&](auto t) { sums[r][t] = every(0.0f); }); });
    for (int64_t block = 0; block < columns / D::BLOCK; ++block) {
      const int32_t* from = x + m0 * (columns / D::STEP) + block * D::PARTS * T * LANES;
      Int words[TILE];
      Decoder decoders[TILE];
      const auto prepare = [&](int plane) __attribute__((always_inline)) {
        const int64_t at = static_cast<int64_t>(group_of_plane[block * PLANES + plane]) * ROWS + r0;
        each<TILE>([&](auto r) { decoders[r] = work.decoder<Decoder>(at + r); });
      };
      each<TILE>([&](auto r) {
        words[r] = load(rows[r] + block * VECTOR_BYTES);
        _mm_prefetch(ahead[r] + block * VECTOR_BYTES, _MM_HINT_T0);
      });
      for (int plane = 0; plane < PLANES; ++plane, from += D::PARTS_OF_PLANE * T * LANES) {
        if (plane == 0 || !whole) prepare(plane);
        each<D::PARTS_OF_PLANE>([&](auto part) {
          Int values[TILE];
          each<TILE>([&](auto r) { values[r] = decoders[r].template decode<part>(words[r]); });
          each<T>([&](auto t) {
            const Int given = load(from + (part * T + t) * LANES);
            each<TILE>([&](auto r) { sums[r][t] = D::Dot::dot(sums[r][t], values[r], given); });
          });
        });
        each<TILE>([&](auto r) { words[r] = shift_right<D::BITS>(words[r]); });
      }
    }
    each<T>([&](auto t) {
      float out[LANES];
      for (int r = 0; r < TILE; ++r) out[r] = sum(sums[r][t]) + work.bias[r0 + r];
      work.finish(m0 + t, r0, bits_to_float(load(out)), TILE);
    });
  }
}

template <class D>
void float_slab(const Work& work, const int32_t* group_of_plane, int64_t first, int64_t last, bool whole) {
  using Decoder = typename D::Decoder;
  constexpr int PLANES = D::BLOCK / PLANE;
  for (int64_t block = first / D::BLOCK; block < last / D::BLOCK; ++block)
    for (int v = 0; v < VECTORS; ++v) {
      const char* rows[LANES];
      Decoder decoders[LANES];
      for (int r = 0; r < LANES; ++r) {
        rows[r] = work.row(v * LANES + r) + block * VECTOR_BYTES;
        work.fetch_ahead((block * VECTORS + v) * LANES + r);
      }
      const auto prepare = [&](int plane) __attribute__((always_inline)) {
        const int64_t at = static_cast<int64_t>(group_of_plane[block * PLANES + plane]) * ROWS + v * LANES;
        for (int r = 0; r < LANES; ++r) decoders[r] = work.decoder<Decoder>(at + r);
      };
      char* to = work.slab.get() + ((block * D::BLOCK - first) / D::STEP * VECTORS + v) * VECTOR_BYTES;
      for (int plane = 0; plane < PLANES; ++plane, to += PLANE / D::STEP * VECTORS * VECTOR_BYTES) {
        if (plane == 0 || !whole) prepare(plane);
        each<D::PARTS_OF_PLANE>([&](auto part) {
          Int tile[LANES];
          each<LANES>([&](auto r) {
            tile[r] = decoders[r].template decode<part>(shift_right(load(rows[r]), plane * D::BITS));
          });
          transpose(tile);
          each<LANES>([&](auto i) { store(to + D::column(part, i) / D::STEP * (VECTORS * VECTOR_BYTES), tile[i]); });
        });
      }
    }
}

template <class Dot, int T>
void float_tile(const Work& work, const int32_t* x, int64_t steps, int64_t m0, bool first, bool last) {
  Float sums[T][VECTORS];
  int32_t* kept = &work.sums[m0 * ROWS];
  each<T>([&](auto t) {
    each<VECTORS>([&](auto v) {
      sums[t][v] = first ? every(0.0f) : bits_to_float(load(kept + t * ROWS + v * LANES));
    });
  });
  const char* slab = work.slab.get();
  for (int64_t k = 0; k < steps; ++k, x += T, slab += VECTORS * VECTOR_BYTES) {
    Int weights[VECTORS];
    each<VECTORS>([&](auto v) { weights[v] = load(slab + v * VECTOR_BYTES); });
    each<T>([&](auto t) {
      const Int given = every(x[t]);
      each<VECTORS>([&](auto v) { sums[t][v] = Dot::dot(sums[t][v], weights[v], given); });
    });
  }
  each<T>([&](auto t) {
    each<VECTORS>([&](auto v) { store(kept + t * ROWS + v * LANES, float_to_bits(sums[t][v])); });
  });
  if (last) work.finish(m0, T, nullptr);
}

template <class D>
void float_product(const Arguments& a) {
  const bool whole = a.group <= 0 || a.group % D::BLOCK == 0;
  const int64_t columns = a.row_bytes * 8 / (PLANE * 16 / D::BLOCK), dwords = columns / D::STEP;
  const std::vector<int32_t> group_of_plane = groups_of(columns, PLANE, a.group, a.G);
  const Memory<int32_t> packed = allocate<int32_t>(a.M * dwords);
  const Memory<int32_t> natural = allocate<int32_t>(a.threads * dwords);
  const auto prepare = [&](int64_t m, int thread) {
    int32_t* own = &natural[thread * dwords];
    memset(own, 0, dwords * sizeof *own);
    const char* from = static_cast<const char*>(a.x) + m * a.K * size_of(a.x_type);
    if (D::STEP == 2) {
      memcpy(own, from, a.K * 2);
    } else {
      for (int64_t k = 0; k < a.K; k += LANES)
        store_floats(own + k, F32, load_floats(from + k * size_of(a.x_type), a.x_type, a.K - k), a.K - k);
    }
    arrange<D>(own, packed.get(), m, columns, D::STEP, a);
  };
  run(a, a.by_rows ? 0 : CHUNK * ROWS * 4, prepare, [&](Work& work) {
    if (a.by_rows) {
      in_powers_of_two(a.M, [&](int64_t m, auto t) {
        float_rows<D, ROW_TILE, t>(work, packed.get(), group_of_plane.data(), columns, whole, m);
      });
      return;
    }
    const Tiles tiles(a.M);
    for (int64_t first = 0; first < columns; first += CHUNK * D::STEP) {
      const int64_t last = std::min(first + CHUNK * D::STEP, columns), steps = (last - first) / D::STEP;
      float_slab<D>(work, group_of_plane.data(), first, last, whole);
      for (int64_t tile = 0; tile < tiles.count; ++tile)
        with_constant<TOKENS>(tiles.size(tile), [&](auto t) {
          const int64_t m = tiles.start(tile);
          const int32_t* from = &packed[m * dwords + first / D::STEP * t];
          float_tile<typename D::Dot, t>(work, from, steps, m, first == 0, last == columns);
        });
    }
  });
}

// --- int8 activations ------------------------------------------------------------------------------------------------

// What the int8 loops read of x; a segment is a run of columns with one weight scale and one activation scale.
struct Activations {
  int64_t columns, segment, segments, scales;
  std::vector<int32_t> weight_group, input_group;  // of every segment
  Memory<int32_t> packed, sums, zero;              // sums [M][segments], zero [M]
  Memory<float> scale;                             // [M][scales]
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
      int8_t bytes[LANES];
      store_bytes(bytes, bounded);
      memcpy(codes + k, bytes, std::min<int64_t>(LANES, end - k));
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
    const char *rows[TILE], *ahead[TILE];
    for (int r = 0; r < TILE; ++r) rows[r] = work.row(r0 + r), ahead[r] = rows[r] + TILE * a.row_bytes;
    Float totals[TILE][T];
    Int sums[TILE][T];
    each<TILE>([&](auto r) { each<T>([&](auto t) { totals[r][t] = every(0.0f); }); });
    for (int64_t s = 0; s < x.segments; ++s) {
      const int64_t g = static_cast<int64_t>(x.weight_group[s]) * ROWS + r0;
      each<TILE>([&](auto r) {
        each<T>([&](auto t) { sums[r][t] = only(-work.zero[g + r] * x.sums[(m0 + t) * x.segments + s], 0); });
      });
      const int64_t end = std::min((s + 1) * x.segment, x.columns);
      for (int64_t k = s * x.segment; k < end; k += F::BLOCK) {
        const int64_t offset = k / F::BLOCK * VECTOR_BYTES;
        Int words[TILE];
        each<TILE>([&](auto r) {
          words[r] = F::block(rows[r], offset, a.row_bytes);
          _mm_prefetch(ahead[r] + offset, _MM_HINT_T0);
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
  const Arguments& a = work.a;
  for (int r0 = 0; r0 < work.count(); r0 += TILE) {
    const char *rows[TILE], *ahead[TILE];
    for (int r = 0; r < TILE; ++r) rows[r] = work.row(r0 + r), ahead[r] = rows[r] + TILE * a.row_bytes;
    Float totals[TILE][T];
    each<TILE>([&](auto r) { each<T>([&](auto t) { totals[r][t] = every(0.0f); }); });
    for (int64_t k = 0; k < x.columns; k += F::BLOCK) {
      const int64_t offset = k / F::BLOCK * VECTOR_BYTES;
      Int words[TILE];
      each<TILE>([&](auto r) {
        words[r] = load(rows[r] + offset);
        _mm_prefetch(ahead[r] + offset, _MM_HINT_T0);
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
            const Int start = only(-work.zero[g + r] * of_plane[one], -work.zero[h + r] * of_plane[other]);
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
        work.fetch_ahead((block * VECTORS + v) * LANES + r);
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
  const int32_t* from = &x.packed[m0 * (x.columns / 4) + first / 4 * T];
  const char* slab = work.slab.get();
  int32_t* kept = &work.sums[m0 * ROWS];
  int64_t s = first / x.segment;
  for (int64_t start = first; start < last; start += x.segment, ++s) {
    const int64_t g = static_cast<int64_t>(x.weight_group[s]) * ROWS;
    Int sums[T][VECTORS];
    if (single && first > 0) {
      each<T>([&](auto t) { each<VECTORS>([&](auto v) { sums[t][v] = load(kept + t * ROWS + v * LANES); }); });
    } else {
      each<T>([&](auto t) {
        const Int given = every(-x.sums[(m0 + t) * x.segments + s]);
        each<VECTORS>([&](auto v) { sums[t][v] = times(load(&work.zero[g + v * LANES]), given); });
      });
    }
    const int64_t steps = (std::min(start + x.segment, last) - start) / 4;
    for (int64_t k = 0; k < steps; ++k, from += T, slab += VECTORS * VECTOR_BYTES) {
      Int weights[VECTORS];
      each<VECTORS>([&](auto v) { weights[v] = load(slab + v * VECTOR_BYTES); });
      each<T>([&](auto t) {
        const Int given = every(from[t]);
        each<VECTORS>([&](auto v) { sums[t][v] = dot_bytes<NIBBLES>(sums[t][v], weights[v], given); });
      });
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

template <class F>
void int_product(const Arguments& a) {
  Activations x;
  x.columns = (a.K + F::BLOCK - 1) / F::BLOCK * F::BLOCK;
  const int64_t shared = std::gcd(std::max<int64_t>(a.group, 0), std::max<int64_t>(a.input_group, 0));
  x.segment = shared == 0 ? x.columns : shared;
  const bool by_plane = a.by_rows && x.segment % F::BLOCK != 0;
  if (by_plane) x.segment = PLANE;
  // A chunk is made of whole blocks and, unless there is only one, of whole segments.
  if (x.segment < x.columns) x.segment = x.segment > CHUNK * 4 ? std::gcd(x.segment, CHUNK * 4) : x.segment;
  const int64_t unit = x.segment < x.columns ? std::lcm<int64_t>(x.segment, F::BLOCK) : F::BLOCK;
  const int64_t chunk = std::max<int64_t>(CHUNK * 4 / unit, 1) * unit;
  x.segments = (x.columns + x.segment - 1) / x.segment;
  x.scales = a.input_group > 0 ? (a.K + a.input_group - 1) / a.input_group : 1;
  x.weight_group = groups_of(x.columns, x.segment, a.group, a.G);
  x.input_group = groups_of(x.columns, x.segment, a.input_group, x.scales);
  x.packed = allocate<int32_t>(a.M * x.columns / 4);
  x.sums = allocate<int32_t>(a.M * x.segments);
  x.zero = allocate<int32_t>(a.M);
  x.scale = allocate<float>(a.M * x.scales);
  const Memory<int8_t> natural = allocate<int8_t>(a.threads * x.columns);
  const auto prepare = [&](int64_t m, int thread) {
    int8_t* codes = &natural[thread * x.columns];
    memset(codes + a.K, 0, x.columns - a.K);
    quantize(a, m, codes, &x.scale[m * x.scales], &x.zero[m]);
    for (int64_t s = 0; s < x.segments; ++s) {
      int32_t total = 0;
      for (int64_t k = s * x.segment; k < std::min((s + 1) * x.segment, x.columns); ++k) total += codes[k];
      x.sums[m * x.segments + s] = total;
    }
    arrange<F>(reinterpret_cast<const int32_t*>(codes), x.packed.get(), m, x.columns, 4, a);
  };
  run(a, a.by_rows ? 0 : chunk * ROWS, prepare, [&](Work& work) {
    if (a.by_rows) {
      in_powers_of_two(a.M, [&](int64_t m, auto t) {
        if constexpr (F::PADDED) {
          if (by_plane) return int_rows_by_plane<F, ROW_TILE, t>(work, x, m);
        }
        int_rows<F, ROW_TILE, t>(work, x, m);
      });
      return;
    }
    const Tiles tiles(a.M);
    for (int64_t first = 0; first < x.columns; first += chunk) {
      const int64_t last = std::min(first + chunk, x.columns);
      int_slab<F>(work, first, last);
      for (int64_t tile = 0; tile < tiles.count; ++tile)
        with_constant<TOKENS>(tiles.size(tile), [&](auto t) {
          int_tile<!WIDE && F::BITS == 4, t>(work, x, tiles.start(tile), first, last);
        });
    }
  });
}

// Token blocks one after another; 1 where memory ran out.
template <class Product>
int32_t in_blocks(const Arguments& given, Product product) {
  try {
    for (int64_t m = 0; m < given.M; m += TOKEN_BLOCK) {
      Arguments a = given;
      a.M = std::min(TOKEN_BLOCK, given.M - m);
      a.x = static_cast<const char*>(given.x) + m * given.K * size_of(given.x_type);
      a.out = static_cast<char*>(given.out) + m * given.N * size_of(given.x_type);
      product(a);
    }
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

}  // namespace

extern "C" int32_t weight_only(const Arguments* given) {
  return in_blocks(*given, [](const Arguments& a) {
#if BF16_DOT
    if (a.x_type == BF16 && a.scale_type == BF16)
      return a.bits == 4 ? float_product<Bf16Words<4>>(a) : float_product<Bf16Words<8>>(a);
#endif
    return a.bits == 4 ? float_product<F32Words<4>>(a) : float_product<F32Words<8>>(a);
  });
}

extern "C" int32_t int8_activation(const Arguments* given) {
  return in_blocks(*given, [](const Arguments& a) {
    if (!a.planar) return int_product<Plain>(a);
    return a.bits == 4 ? int_product<Nibbles>(a) : int_product<Bytes>(a);
  });
}

// Codes int8 [M, K], scale [M, ceil(K / input_group)] and zero [M] of x.
extern "C" void quantize_tokens(const Arguments* a, int8_t* codes, float* scale, int32_t* zero) {
  const int64_t scales = a->input_group > 0 ? (a->K + a->input_group - 1) / a->input_group : 1;
#pragma omp parallel for num_threads(a->threads)
  for (int64_t m = 0; m < a->M; ++m) quantize(*a, m, codes + m * a->K, scale + m * scales, zero + m);
}

extern "C" const char* instructions() { return BF16_DOT ? "avx512-bf16" : WIDE ? "avx512" : "avx2"; }
