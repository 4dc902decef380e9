// Products of bf16 tokens by AMX: 32 rows of the weight are unpacked into a panel (cpu_panels.h) in the second-level cache,
// and every tile of tokens meets it there.
//
//   tokens [chunk][M / 16][columns / 32][16][32]      a chunk of columns after the other
//   sums   [rows / 32][M / 32][2][2][16][16]          of a share of the rows, between two chunks
//
// A chunk has as many columns as leave all tokens in the cache. A thread takes a share of the rows, and all chunks of it
// one after the other. Values of the weight are rounded to bf16, sums are fp32.

#pragma once

#include "cpu_amx.h"
#include "cpu_panels.h"

#if AMX

namespace {

constexpr int64_t TILE_COLUMNS = TILE_LINE / 2;
// Tokens that meet a panel, one tile after the other; of them and of a panel, what stays in the second-level cache.
constexpr int64_t TOKENS_TOGETHER = 512, TOKEN_BYTES = 1 << 20, PANEL_COLUMNS = 4096;
// Rows of a share: few enough that their sums stay near.
constexpr int64_t SHARE_ROWS = 1024, SHARES_OF_THREAD = 4;

inline int64_t rounded_up(int64_t v, int64_t unit) { return (v + unit - 1) / unit * unit; }

// Memory that a thread keeps for one use of it. A product may take megabytes, which the system clears page by page
// whenever they are new.
template <int USE>
char* kept_memory(int64_t bytes) {
  struct Held {
    char* start = nullptr;
    int64_t bytes = 0;
    ~Held() { std::free(start); }
  };
  static thread_local Held held;
  if (held.bytes < bytes) {
    std::free(held.start);
    held.bytes = 0;
    held.start = static_cast<char*>(std::aligned_alloc(VECTOR_BYTES, rounded_up(bytes, VECTOR_BYTES)));
    if (held.start == nullptr) throw std::bad_alloc();
    held.bytes = bytes;
  }
  return held.start;
}

// How a product is cut.
struct Cut {
  int64_t columns, tiles, chunk, share, shares;

  Cut(const Arguments& a, int64_t columns, int64_t column_bytes) : columns(columns), tiles((a.M + TILE_ROWS - 1) / TILE_ROWS) {
    const int64_t fit = TOKEN_BYTES / (tiles * TILE_ROWS * column_bytes) / CHUNK * CHUNK;
    chunk = std::min(std::clamp<int64_t>(fit, CHUNK, PANEL_COLUMNS), columns);
    const int64_t of_thread = a.threads == 1 ? a.N : a.N / (a.threads * SHARES_OF_THREAD);
    share = std::clamp<int64_t>(rounded_up(of_thread, ROWS), ROWS, SHARE_ROWS);
    shares = (a.N + share - 1) / share;
  }
  bool whole() const { return chunk == columns; }
  int64_t pairs() const { return (tiles + 1) / 2; }
  int64_t sums() const { return (whole() ? 1 : share / ROWS) * pairs() * 4 * TILE_BYTES; }
  // Where the tokens of a tile begin in a chunk, of so many bytes for a column.
  int64_t tokens_at(int64_t tile, int64_t first, int64_t column_bytes) const {
    return (first * tiles + tile * (std::min(first + chunk, columns) - first)) * TILE_ROWS * column_bytes;
  }
};

// Lines of a tile of tokens, from rows of numbers: line(m, byte) copies one to where it is told.
template <class Line>
void pack_tile(const Arguments& a, const Cut& cut, int64_t tile, int64_t column_bytes, char* packed, Line line) {
  const int64_t width = TILE_LINE / column_bytes;
  for (int64_t first = 0; first < cut.columns; first += cut.chunk) {
    char* to = packed + cut.tokens_at(tile, first, column_bytes);
    const int64_t last = std::min(first + cut.chunk, cut.columns);
    for (int64_t i = 0; i < TILE_ROWS; ++i) {
      const int64_t m = tile * TILE_ROWS + i;
      for (int64_t k = first; k < last; k += width) {
        char* at = to + (k - first) / width * TILE_BYTES + i * TILE_LINE;
        if (m < a.M && k + width <= a.K) {
          store(at, load(line(m) + k * column_bytes));
        } else {
          store(at, every(0));
          if (m < a.M && k < a.K) memcpy(at, line(m) + k * column_bytes, (a.K - k) * column_bytes);
        }
      }
    }
  }
}

// Sums of one or two tiles of tokens and the strips of a panel, which are two, or one with AVX2's registers.
template <int TILES>
void panel_product(const char* tokens, int64_t of_tile, const char* panel, int64_t of_strip, int64_t steps, char* sums,
                   bool first) {
  constexpr bool TOKENS_TOO = TILES == 2, STRIPS_TOO = VECTORS == 2;
  const char *second_tokens = tokens + of_tile, *second_strip = panel + of_strip;
  if (first) {
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
  } else {
    load_tile<0>(sums), load_tile<1>(sums + TILE_BYTES);
    if constexpr (TOKENS_TOO) load_tile<2>(sums + 2 * TILE_BYTES), load_tile<3>(sums + 3 * TILE_BYTES);
  }
  int64_t next_sums = 4 * TILE_BYTES;
  for (int64_t at = 0; at < steps * TILE_BYTES; at += TILE_BYTES) {
    load_tile<TOKEN_TILE>(tokens + at);
    load_tile<OUTPUT_TILE>(panel + at);
    multiply_pairs<0, TOKEN_TILE, OUTPUT_TILE>();
    if constexpr (STRIPS_TOO) load_tile<OUTPUT_TILE + 1>(second_strip + at);
    if constexpr (STRIPS_TOO) multiply_pairs<1, TOKEN_TILE, OUTPUT_TILE + 1>();
    if constexpr (TOKENS_TOO) load_tile<TOKEN_TILE + 1>(second_tokens + at);
    if constexpr (TOKENS_TOO) multiply_pairs<2, TOKEN_TILE + 1, OUTPUT_TILE>();
    if constexpr (TOKENS_TOO && STRIPS_TOO) multiply_pairs<3, TOKEN_TILE + 1, OUTPUT_TILE + 1>();
    if (next_sums < 8 * TILE_BYTES) {  // of the tiles that follow
      fetch(sums + next_sums), fetch(sums + next_sums + VECTOR_BYTES);
      next_sums += 2 * VECTOR_BYTES;
    }
  }
  store_tile<0>(sums), store_tile<1>(sums + TILE_BYTES);
  if constexpr (TOKENS_TOO) store_tile<2>(sums + 2 * TILE_BYTES), store_tile<3>(sums + 3 * TILE_BYTES);
}

// Outputs of the tiles from one on.
inline void finish_tiles(const Work& work, int64_t tile, int64_t tiles, const char* sums) {
  for (int64_t i = 0; i < tiles * TILE_ROWS && tile * TILE_ROWS + i < work.a.M; ++i)
    for (int v = 0; v * LANES < work.count(); ++v) {
      const char* from = sums + (i / TILE_ROWS * 2 + v) * TILE_BYTES + i % TILE_ROWS * TILE_LINE;
      const Float bias = bits_to_float(load(work.bias + v * LANES));
      work.finish(tile * TILE_ROWS + i, v * LANES, plus(bits_to_float(load(from)), bias), LANES);
    }
}

void multiply_by_tiles(const Arguments& a) {
  const Cut cut(a, stored_columns(a), 2);
  const Unpack unpack = unpack_of<PAIRS>(a);
  const int threads = static_cast<int>(std::clamp<int64_t>(std::min<int64_t>(a.threads, cut.shares), 1, a.threads));
  std::vector<Work> works;
  works.reserve(threads);
  for (int i = 0; i < threads; ++i) works.emplace_back(a, CHUNK * ROWS * 4, i);
  const int64_t panel_bytes = ROWS * cut.chunk * 2;
  char *packed = kept_memory<0>(cut.tiles * TILE_ROWS * cut.columns * 2), *panels = kept_memory<1>(threads * panel_bytes);
  char* all_sums = kept_memory<2>(threads * cut.sums());
  const auto pack = [&](int64_t tile, int) {
    pack_tile(a, cut, tile, 2, packed, [&](int64_t m) { return static_cast<const char*>(a.x) + m * a.K * 2; });
  };
  in_turn(cut.tiles, pack, cut.shares, threads, 1, [&](int64_t share, int thread) {
    Work& work = works[thread];
    char *panel = panels + thread * panel_bytes, *sums = all_sums + thread * cut.sums();
    begin_tiles(std::min(a.M, TILE_ROWS));
    for (int64_t first = 0; first < cut.columns; first += cut.chunk) {
      const Panel here = {panel, ROWS, BF16, first, std::min(first + cut.chunk, cut.columns)};
      const int64_t steps = (here.last - first) / TILE_COLUMNS, start = share * cut.share;
      for (int64_t n0 = start; n0 < std::min(start + cut.share, a.N); n0 += ROWS) {
        unpack_rows(work, n0, unpack, PAIRS, here, 0);
        for (int64_t tile = 0; tile < cut.tiles; tile += 2) {
          char* to = sums + (cut.whole() ? 0 : (n0 - start) / ROWS * cut.pairs() + tile / 2) * 4 * TILE_BYTES;
          const int64_t together = std::min<int64_t>(cut.tiles - tile, 2);
          (together == 2 ? panel_product<2> : panel_product<1>)(packed + cut.tokens_at(tile, first, 2), steps * TILE_BYTES,
                                                                panel, steps * TILE_BYTES, steps, to, first == 0);
          if (here.last == cut.columns) finish_tiles(work, tile, together, to);
        }
      }
    }
    end_tiles();
  });
}

// In blocks of tokens.
void multiply_with_amx(const Arguments& given) {
  const int64_t blocks = (given.M + TOKENS_TOGETHER - 1) / TOKENS_TOGETHER;
  const int64_t of_block = rounded_up((given.M + blocks - 1) / blocks, TILE_ROWS);
  for (int64_t m = 0; m < given.M; m += of_block) {
    Arguments a = given;
    a.M = std::min(of_block, given.M - m);
    a.by_rows = true;  // no sums are kept
    a.threads = useful_threads(a.M * a.N * a.K, given.threads);
    a.x = static_cast<const char*>(given.x) + m * given.K * 2;
    a.out = static_cast<char*>(given.out) + m * given.N * 2;
    multiply_by_tiles(a);
  }
}

}  // namespace

#endif
