// What both products share: the arguments, tiles of tokens, the rows that a thread works on, and the loop over them.

#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>
#include <vector>

#include "cpu_numbers.h"
#include "cpu_threads.h"

// Mirrored field by field in arguments.py.
struct Arguments {
  const void *x, *weight, *scale, *bias;
  const uint8_t* zero;
  const float* input_scale;
  const int32_t *input_zero, *row_sum;
  const int32_t* row_start;  // of sparse rows that are added to the weight; null: there are none
  const void *column, *value;
  const void* kept;  // of a 2:4 weight, which columns its codes or numbers belong to
  const void* ranges;  // of scales and zero points that are codes, levels; null: these are numbers
  const uint8_t* levels;
  // The 16 values of codes of 4 bits before they are scaled, and a factor of all scales; null: codes are numbers.
  const float* table;
  void* out;
  int64_t M, N, K, G, row_bytes, group, input_group, entries, tile_rows;
  Type x_type, scale_type, bias_type, value_type;
  int32_t bits, planar, symmetric, by_rows, threads, short_columns, level_bits, strips;
};

// Results of a product: no memory to pack x, or no part that could be compiled.
enum Outcome : int32_t { DONE, NO_MEMORY, NO_PART };

namespace {

constexpr int PLANE = 32;
// Vectors of a slab and tokens of a tile: sums, weights and one broadcast fill the registers, 32 of AVX-512, 16 of AVX2 or
// 32 of NEON, which hold as much as AVX2's.
constexpr int VECTORS = WIDE ? 2 : 1;
constexpr int ROWS = LANES * VECTORS;
constexpr int TOKENS = WIDE ? 12 : 6;
// The same of parts of sums, which need registers of their own.
constexpr int PART_TOKENS = VNNI ? TOKENS : NEON ? 2 : 4;
// Rows and, at most, tokens that the row loop takes at once.
constexpr int ROW_TILE = WIDE ? 4 : 2;
constexpr int ROW_TOKENS = WIDE ? 4 : 2;
// Rows between those that the row loop works on and those that it fetches.
constexpr int ROWS_AHEAD = 2 * ROW_TILE;
// Dwords of each row in a chunk, whose slab takes 16 KiB.
constexpr int64_t CHUNK = 16 * 1024 / (4 * ROWS);
// Tokens whose packed copy exists at a time; and slabs that meet a chunk of it, one after the other, while it lies in
// the second-level cache: 128 KiB of AVX2's tokens.
constexpr int64_t TOKEN_BLOCK = WIDE ? 1024 : 256;
constexpr int64_t TOGETHER = WIDE ? 1 : 4;
// Runs of neighbouring slabs per thread: few enough that the next slab is mostly the same thread's, which fetches it
// ahead, and enough that a thread that is held up does not hold up the others.
constexpr int RUNS = 8;

// Memory that a thread keeps between calls: what a small product needs lies in it, one piece after the other, and is
// free again when the last piece is. A product of one token asks for a dozen, which malloc takes as long for as the
// product does.
struct Kept {
  static constexpr int64_t BYTES = 64 * 1024;
  char* start = nullptr;
  int64_t used = 0, pieces = 0;

  ~Kept() { std::free(start); }
  char* piece(int64_t bytes) {
    if (start == nullptr) start = static_cast<char*>(std::aligned_alloc(VECTOR_BYTES, BYTES));
    if (start == nullptr || used + bytes > BYTES) return nullptr;
    ++pieces;
    return start + std::exchange(used, used + bytes);
  }
  bool took_back(void* p) {
    if (p < start || p >= start + BYTES) return false;
    if (--pieces == 0) used = 0;
    return true;
  }
};

thread_local Kept kept;

struct Free {
  void operator()(void* p) const {
    if (!kept.took_back(p)) std::free(p);
  }
};

// Freed by the thread that asked for it.
template <class T>
using Memory = std::unique_ptr<T[], Free>;

template <class T>
Memory<T> allocate(int64_t count) {
  const int64_t whole = (count * sizeof(T) + VECTOR_BYTES - 1) / VECTOR_BYTES * VECTOR_BYTES;
  const int64_t bytes = std::max<int64_t>(whole, VECTOR_BYTES);
  void* p = kept.piece(bytes);
  if (p == nullptr) p = std::aligned_alloc(VECTOR_BYTES, bytes);
  if (p == nullptr) throw std::bad_alloc();
  return Memory<T>(static_cast<T*>(p));
}

// Threads worth starting for so many multiplications: each must have more to do than its start and the wait for it take.
// Measured: two lose below 2^17 on each, whatever the weight, and win from there on.
constexpr int64_t WORTH_A_THREAD = 1 << 17;
INLINE int useful_threads(int64_t multiplications, int threads) {
  return static_cast<int>(std::clamp<int64_t>(multiplications / WORTH_A_THREAD, 1, std::max(threads, 1)));
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

// Tokens in tiles of at most so many, as even as they can be.
struct TokenTiles {
  int64_t count, least, extra;

  explicit TokenTiles(int64_t M, int64_t most = TOKENS)
      : count((M + most - 1) / most), least(M / count), extra(M % count) {}
  int64_t size(int64_t tile) const { return least + (tile < extra); }
  int64_t start(int64_t tile) const { return tile * least + std::min(tile, extra); }
  int64_t of(int64_t token) const {
    const int64_t longer = extra * (least + 1);
    return token < longer ? token / (least + 1) : extra + (token - longer) / least;
  }

  // Dwords of a token, to where its tile is packed: [chunk][tile][dwords of a chunk][tokens of the tile], so that what
  // is read beside one slab lies together.
  void arrange(const int32_t* natural, int32_t* packed, int64_t m, int64_t dwords, int64_t chunk) const {
    const int64_t tile = of(m), tokens = size(tile), first_token = start(tile);
    const int64_t all = start(count - 1) + size(count - 1);
    for (int64_t first = 0; first < dwords; first += chunk) {
      const int64_t here = std::min(chunk, dwords - first);
      int32_t* to = packed + first * all + first_token * here + (m - first_token);
      for (int64_t k = 0; k < here; ++k) to[k * tokens] = natural[first + k];
    }
  }

  // The same of all tokens of a tile at once, whose dwords are [tokens][dwords]: written front to back.
  void arrange_tile(const int32_t* natural, int32_t* packed, int64_t tile, int64_t dwords, int64_t chunk) const {
    const int64_t all = start(count - 1) + size(count - 1);
    with_constant<TOKENS>(size(tile), [&](auto tokens) {
      for (int64_t first = 0; first < dwords; first += chunk) {
        const int64_t here = std::min(chunk, dwords - first);
        int32_t* to = packed + first * all + start(tile) * here;
        for (int64_t k = first; k < first + here; ++k, to += tokens)
          each<tokens>([&](auto t) { to[t] = natural[t * dwords + k]; });
      }
    });
  }
};

// For every `unit` columns, the group that they belong to; padding belongs to the last.
Memory<int32_t> groups_of(int64_t columns, int64_t unit, int64_t group, int64_t count) {
  const int64_t units = (columns + unit - 1) / unit;
  Memory<int32_t> found = allocate<int32_t>(units);
  for (int64_t i = 0; i < units; ++i)
    found[i] = group > 0 ? static_cast<int32_t>(std::min<int64_t>(i * unit / group, count - 1)) : 0;
  return found;
}

// The rows that one thread works on, what belongs to them, and its slab.
struct Work {
  const Arguments& a;
  int thread;
  int64_t n0 = 0;
  Memory<float> scale, float_zero;  // [G][ROWS]
  Memory<int32_t> zero;             // [G][ROWS]
  Memory<char> slab;                // [chunk][ROWS] dwords
  Memory<int32_t> sums;             // [M][ROWS], fp32 or int32
  float bias[ROWS];
  int32_t row_sum[ROWS];
  int64_t next_entry[ROWS];  // of each row, the first that the slab has not met

  Work(const Arguments& a, int64_t slab_bytes, int thread)
      : a(a),
        thread(thread),
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

  // Fetches what is decoded later, in the order of memory, which the rows being decoded side by side are not in:
  // 64-byte pieces from row r on, near for the next rows, far for the next slab.
  INLINE void fetch_near(int64_t r, int64_t piece) const { fetch(piece_of(r, piece)); }
  INLINE void fetch_far(int64_t r, int64_t piece) const { ::fetch_far(piece_of(r, piece)); }
  INLINE const char* piece_of(int64_t r, int64_t piece) const {
    return static_cast<const char*>(a.weight) + (n0 + r) * a.row_bytes + piece * VECTOR_BYTES;
  }

  void begin(int64_t first) {
    n0 = first;
    const int64_t size = size_of(a.scale_type);
    for (int64_t g = 0; g < a.G && a.scale != nullptr; ++g)
      for (int v = 0; v < VECTORS; ++v) {
        const int64_t here = std::min<int64_t>(std::max<int64_t>(count() - v * LANES, 0), LANES);
        const int64_t at = a.strips ? ((n0 / LANES + v) * a.G + g) * LANES : g * a.N + n0 + v * LANES;
        const int64_t to = g * ROWS + v * LANES;
        if (here == 0) {
          std::fill_n(&scale[to], LANES, 0.0f);
          continue;
        }
        const char* p = static_cast<const char*>(a.scale) + at * size;
        const Float scales = load_floats(p, a.scale_type, here);
        store(&scale[to], float_to_bits(a.table == nullptr ? scales : times(scales, every(a.table[LANES]))));
        if (a.zero == nullptr) continue;
        const Int zeros = widen_bytes(a.zero + at, here);
        store(&zero[to], zeros);
        store(&float_zero[to], float_to_bits(to_float(zeros)));
      }
    for (int r = 0; r < ROWS; ++r) {
      bias[r] = 0;
      row_sum[r] = a.row_sum == nullptr ? 0 : a.row_sum[std::min(n0 + r, a.N - 1)];
      next_entry[r] = a.row_start == nullptr ? 0 : a.row_start[std::min(n0 + r, a.N - 1)];
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

  // Outputs of tokens m0 ... m0 + T for rows r0 ... r0 + TILE, whose sums are spread over lanes.
  template <int TILE, int T>
  INLINE void finish_rows(int64_t m0, int r0, const Float (&lanes_of)[TILE][T]) const {
    each<T>([&](auto t) {
      float out[LANES];
      for (int r = 0; r < TILE; ++r) out[r] = sum(lanes_of[r][t]) + bias[r0 + r];
      finish(m0 + t, r0, bits_to_float(load(out)), TILE);
    });
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

// Runs body(works, count) for every so many slabs at most, of ROWS rows each, that a thread works on side by side;
// prepare(i, thread) before, for so many tiles of tokens.
template <class Prepare, class Body>
void run_together(const Arguments& a, int64_t slab_bytes, int64_t most, int64_t tiles, Prepare prepare, Body body) {
  const int64_t slabs = (a.N + ROWS - 1) / ROWS;
  const int threads = static_cast<int>(std::min<int64_t>(a.threads, std::max(slabs, tiles)));
  const int64_t together = std::clamp<int64_t>(slabs / (threads * RUNS), 1, most);
  const int64_t teams = (slabs + together - 1) / together;
  const int64_t run_length = std::max<int64_t>(teams / (threads * RUNS), 1);
  std::vector<Work> works;
  works.reserve(threads * together);
  for (int64_t i = 0; i < threads * together; ++i) works.emplace_back(a, slab_bytes, static_cast<int>(i / together));
  const auto take = [&](int64_t team, int thread) {
    Work* own = &works[thread * together];
    const int64_t first = team * together, count = std::min(together, slabs - first);
    for (int64_t i = 0; i < count; ++i) own[i].begin((first + i) * ROWS);
    body(own, count);
  };
  in_turn(tiles, prepare, teams, threads, run_length, take);
}

// Runs body(work) for every ROWS rows, by the threads that are asked for; prepare(m, thread) before, for every token.
template <class Prepare, class Body>
void run(const Arguments& a, int64_t slab_bytes, Prepare prepare, Body body) {
  run_together(a, slab_bytes, 1, a.M, prepare, [&](Work* works, int64_t) { body(*works); });
}

// Dwords of a token, in the order in which the loop that is to run reads them; so many dwords in
// a chunk, at most so many tokens in a tile.
template <class D>
void arrange(const int32_t* natural, int32_t* packed, int64_t m, int64_t columns, int step, const Arguments& a,
             int64_t chunk = CHUNK, int most = TOKENS) {
  const int64_t dwords = columns / step;
  if (!a.by_rows) return TokenTiles(a.M, most).arrange(natural, packed, m, dwords, chunk);
  int64_t first = 0, size = ROW_TOKENS;
  while (first + size <= m || first + size > a.M) first + size <= a.M ? first += size : size /= 2;
  int32_t* to = packed + first * dwords + (m - first) * LANES;
  for (int64_t start = 0; start < dwords; start += D::BLOCK / step)
    for (int part = 0; part < D::PARTS; ++part, to += size * LANES)
      for (int lane = 0; lane < LANES; ++lane) to[lane] = natural[start + D::column(part, lane) / step];
}

}  // namespace
