// Products by AMX: 32 rows of the weight are unpacked into a panel in the second-level cache, and every tile of tokens meets
// it there.
//
//   tokens [chunk][M / 16][columns / 32][16][32]      bf16, a chunk of columns after the other; of int8, 64 columns a line
//   sums   [rows / 32][M / 32][2][2][16][16]          of a share of the rows, between two chunks
//
// A chunk has as many columns as leave all tokens in the cache. A thread takes a share of the rows, and all chunks of it
// one after the other. Here are the frame, and the product of bf16 (cpu_amx_ints.h has that of int8): values of the weight
// are rounded to bf16, sums are fp32.

#pragma once

#include "cpu_amx.h"
#include "cpu_panels.h"

#if AMX

namespace {

constexpr int64_t SUMS_BYTES = 4 * TILE_BYTES;
// Tokens that meet a panel, one tile after the other; of them and of a panel, what stays in the second-level cache.
constexpr int64_t TOKENS_TOGETHER = 512, TOKEN_BYTES = 1 << 20, PANEL_COLUMNS = 4096;
// Rows of a share: few enough that their sums stay near.
constexpr int64_t SHARE_ROWS = 1024, SHARES_OF_THREAD = 4;

// How a product is cut: chunks are whole units of columns.
struct Cut {
  int64_t columns, column_bytes, tiles, chunk, share, shares;

  Cut(const Arguments& a, int64_t columns, int64_t column_bytes, int64_t unit)
      : columns(columns), column_bytes(column_bytes), tiles((a.M + TILE_ROWS - 1) / TILE_ROWS) {
    const int64_t fit = std::min(TOKEN_BYTES / (tiles * TILE_ROWS * column_bytes), PANEL_COLUMNS) / unit * unit;
    chunk = std::min(std::max(fit, unit), columns);
    const int64_t of_thread = a.threads == 1 ? a.N : a.N / (a.threads * SHARES_OF_THREAD);
    share = std::clamp<int64_t>(rounded_up(of_thread, ROWS), ROWS, SHARE_ROWS);
    shares = (a.N + share - 1) / share;
  }
  int64_t last(int64_t first) const { return std::min(first + chunk, columns); }
  int64_t pairs() const { return (tiles + 1) / 2; }
  int64_t sums() const { return (chunk == columns ? 1 : share / ROWS) * SUMS_BYTES * pairs(); }
  // Bytes of a tile of tokens, and of a strip, in a chunk; where a tile begins.
  int64_t of_tile(int64_t first) const { return (last(first) - first) * TILE_ROWS * column_bytes; }
  int64_t tokens_at(int64_t tile, int64_t first) const {
    return first * tiles * TILE_ROWS * column_bytes + tile * of_tile(first);
  }
};

// A tile of tokens, from their rows of numbers: row(m).
template <class Row>
void pack_tile(const Arguments& a, const Cut& cut, int64_t tile, char* packed, Row row) {
  const int64_t width = TILE_LINE / cut.column_bytes;
  for (int64_t first = 0; first < cut.columns; first += cut.chunk) {
    char* to = packed + cut.tokens_at(tile, first);
    for (int64_t i = 0; i < TILE_ROWS; ++i) {
      const int64_t m = tile * TILE_ROWS + i;
      for (int64_t k = first; k < cut.last(first); k += width) {
        char* at = to + (k - first) / width * TILE_BYTES + i * TILE_LINE;
        if (m < a.M && k + width <= a.K) {
          store(at, load(row(m) + k * cut.column_bytes));
        } else {
          store(at, every(0));
          if (m < a.M && k < a.K) memcpy(at, row(m) + k * cut.column_bytes, (a.K - k) * cut.column_bytes);
        }
      }
    }
  }
}

// One or two tiles of tokens and the strips of a panel, which are two, or one with AVX2's registers.
struct Operands {
  const char *tokens, *panel;
  int64_t apart;  // one tile from the next, and one strip

  template <int TILES, bool BYTES>
  INLINE void multiply(int64_t at) const {
    constexpr bool TOKENS_TOO = TILES == 2, STRIPS_TOO = VECTORS == 2;
    constexpr int SECOND = TOKEN_TILE + 1, OTHER = OUTPUT_TILE + 1;
    load_tile<TOKEN_TILE>(tokens + at);
    load_tile<OUTPUT_TILE>(panel + at);
    add_product<BYTES, 0, TOKEN_TILE, OUTPUT_TILE>();
    if constexpr (STRIPS_TOO) load_tile<OTHER>(panel + apart + at);
    if constexpr (STRIPS_TOO) add_product<BYTES, 1, TOKEN_TILE, OTHER>();
    if constexpr (TOKENS_TOO) load_tile<SECOND>(tokens + apart + at);
    if constexpr (TOKENS_TOO) add_product<BYTES, 2, SECOND, OUTPUT_TILE>();
    if constexpr (TOKENS_TOO && STRIPS_TOO) add_product<BYTES, 3, SECOND, OTHER>();
  }
};

template <int TILES>
INLINE void store_sums(char* sums) {
  store_tile<0>(sums), store_tile<1>(sums + TILE_BYTES);
  if constexpr (TILES == 2) store_tile<2>(sums + 2 * TILE_BYTES), store_tile<3>(sums + 3 * TILE_BYTES);
}
INLINE void clear_sums() { clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>(); }

// Sums of so many steps, added to what was summed before.
template <int TILES, bool BYTES>
void sum_panel(const Operands& of, int64_t steps, char* sums, bool first) {
  clear_sums();
  if (!first) {
    load_tile<0>(sums), load_tile<1>(sums + TILE_BYTES);
    if constexpr (TILES == 2) load_tile<2>(sums + 2 * TILE_BYTES), load_tile<3>(sums + 3 * TILE_BYTES);
  }
  int64_t next = SUMS_BYTES;
  for (int64_t at = 0; at < steps * TILE_BYTES; at += TILE_BYTES) {
    of.multiply<TILES, BYTES>(at);
    if (next < 2 * SUMS_BYTES) {  // of the tiles that follow
      fetch(sums + next), fetch(sums + next + VECTOR_BYTES);
      next += 2 * VECTOR_BYTES;
    }
  }
  store_sums<TILES>(sums);
}

// body(m, v, 16 sums) of the tiles from one on.
template <class Body>
INLINE void over_sums(const Work& work, int64_t tile, int64_t tiles, const char* sums, Body body) {
  for (int64_t i = 0; i < tiles * TILE_ROWS && tile * TILE_ROWS + i < work.a.M; ++i)
    for (int v = 0; v * LANES < work.count(); ++v)
      body(tile * TILE_ROWS + i, v, load(sums + (i / TILE_ROWS * 2 + v) * TILE_BYTES + i % TILE_ROWS * TILE_LINE));
}

// All rows, by the threads that are asked for: fill(work, n0, first, last, panel) makes a panel, which
// sum(work, operands, tile, tiles, first, sums) multiplies, and finish(work, tile, tiles, sums) ends. pack(tile, packed,
// thread) before.
template <class Pack, class Fill, class Sum, class Finish>
void over_panels(const Arguments& a, const Cut& cut, Pack pack, Fill fill, Sum sum, Finish finish) {
  const int threads = static_cast<int>(std::max<int64_t>(std::min<int64_t>(a.threads, std::max(cut.shares, cut.tiles)), 1));
  std::vector<Work> works;
  works.reserve(threads);
  for (int i = 0; i < threads; ++i) works.emplace_back(a, CHUNK * ROWS * 4, i);
  const int64_t panel_bytes = ROWS * cut.chunk * cut.column_bytes;
  char *packed = kept_memory<0>(cut.tiles * TILE_ROWS * cut.columns * cut.column_bytes);
  char *panels = kept_memory<1>(threads * panel_bytes), *all_sums = kept_memory<2>(threads * cut.sums());
  const auto pack_one = [&](int64_t tile, int thread) { pack(tile, packed, thread); };
  in_turn(cut.tiles, pack_one, cut.shares, threads, 1, [&](int64_t share, int thread) {
    Work& work = works[thread];
    char *panel = panels + thread * panel_bytes, *sums = all_sums + thread * cut.sums();
    begin_tiles(std::min(a.M, TILE_ROWS));
    for (int64_t first = 0; first < cut.columns; first += cut.chunk) {
      const int64_t start = share * cut.share;
      for (int64_t n0 = start; n0 < std::min(start + cut.share, a.N); n0 += ROWS) {
        fill(work, n0, first, cut.last(first), panel);
        for (int64_t tile = 0; tile < cut.tiles; tile += 2) {
          const int64_t place = cut.chunk == cut.columns ? 0 : (n0 - start) / ROWS * cut.pairs() + tile / 2;
          const int64_t together = std::min<int64_t>(cut.tiles - tile, 2);
          char* to = sums + place * SUMS_BYTES;
          sum(work, Operands{packed + cut.tokens_at(tile, first), panel, cut.of_tile(first)}, tile, together, first, to);
          if (cut.last(first) == cut.columns) finish(work, tile, together, to);
        }
      }
    }
    end_tiles();
  });
}

// Blocks of tokens: product(a) of each.
template <class Product>
void in_token_blocks(const Arguments& given, Product product) {
  const int64_t blocks = (given.M + TOKENS_TOGETHER - 1) / TOKENS_TOGETHER, size = size_of(given.x_type);
  const int64_t of_block = rounded_up((given.M + blocks - 1) / blocks, TILE_ROWS);
  for (int64_t m = 0; m < given.M; m += of_block) {
    Arguments a = given;
    a.M = std::min(of_block, given.M - m);
    a.by_rows = true;  // no sums are kept
    a.threads = useful_threads(a.M * a.N * a.K, given.threads);
    a.x = static_cast<const char*>(given.x) + m * given.K * size;
    a.out = static_cast<char*>(given.out) + m * given.N * size;
    product(a);
  }
}

// Of bf16, in the values of the weight.
void multiply_pairs_with_amx(const Arguments& a) {
  const Cut cut(a, stored_columns(a), 2, CHUNK);
  const Unpack unpack = unpack_of<PAIRS>(a);
  over_panels(
      a, cut,
      [&](int64_t tile, char* packed, int) {
        pack_tile(a, cut, tile, packed, [&](int64_t m) { return static_cast<const char*>(a.x) + m * a.K * 2; });
      },
      [&](Work& work, int64_t n0, int64_t first, int64_t last, char* panel) {
        unpack_rows<PAIRS>(work, n0, unpack, {panel, ROWS, BF16, first, last}, 0);
      },
      [&](const Work&, const Operands& of, int64_t, int64_t tiles, int64_t first, char* sums) {
        const auto add = tiles == 2 ? sum_panel<2, false> : sum_panel<1, false>;
        add(of, of.apart / TILE_BYTES, sums, first == 0);
      },
      [&](const Work& work, int64_t tile, int64_t tiles, const char* sums) {
        over_sums(work, tile, tiles, sums, [&](int64_t m, int v, Int found) {
          const Float bias = bits_to_float(load(work.bias + v * LANES));
          work.finish(m, v * LANES, plus(bits_to_float(found), bias), LANES);
        });
      });
}

}  // namespace

#endif
