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
// weight_only     the values of `layouts.words.planar_weight`, rounded to the type of the scales, times x: fp32 products and
//                 sums, or pairs of bf16 with fp32 sums. 4-bit values come from a table of 16 per row and group; in strips
//                 it may be a given one for all of them (E2M1, NF4), which is rounded to bf16 for pairs.
// int8_activation x to int8 codes as `reference` rounds them. Unsigned bytes of the weight times signed bytes of x,
//                 int32 sums; a zero point costs the sum of the x codes: sum (u - z) x = sum u x - z sum x. Every
//                 segment of columns that shares its scales becomes fp32: ((sum x_scale) weight_scale).
//
// strips          weight_only, and int8_activation of 4 bits, of weights in another layout (pack_strips.py); tiles are
//                 strips whose scales and zero points are codes themselves
// sparse_rows     entries of a sparse weight times x, alone; weight_only adds them in its own pass
// sparse24        2:4 weights in strips: what is kept, times the columns of x that it belongs to
// attend          no product with a weight, but what stands between two of them when one token follows others
//
// cpu_vectors.h has the 16 lanes, cpu_numbers.h what they are read from, cpu_work.h what all products share;
// cpu_floats.h, cpu_ints.h, cpu_tiles.h, cpu_strips.h, cpu_strip_ints.h, cpu_sparse.h, cpu_sparse24.h and cpu_attention.h
// have the loops. They are compiled in units of their own (cpu_products.h): this one chooses among them.
// Columns past K are zeros of x, rows past N repeat the last row and are not stored.

#include "cpu_attention.h"
#include "cpu_products.h"
#include "cpu_sparse.h"

namespace {

// Tokens that meet a strip, one tile after the other: of 4096 columns in bf16, 2 MiB; of 2:4 weights in fp32, 1 MiB.
constexpr int64_t STRIP_TOKEN_BLOCK = 256, HALVED_FLOAT_BLOCK = 64;
// Tokens up to which pairs are not worth a slab: of 8 bits, which take longer to decode, and beside entries.
constexpr int64_t BYTE_PAIRS_BY_ROWS = 48, ENTRIES_BY_ROWS = 16;

using Product = void (*)(const Arguments&);

#if BF16_DOT
template <int BITS>
Product pairs_of(const Arguments& a) {
  if (a.levels != nullptr) return strip_pairs<BITS, NUMBERS>;
  if constexpr (BITS == 4)
    if (a.table != nullptr) return strip_pairs<BITS, TABLE>;
  return a.zero == nullptr ? strip_pairs<BITS, MIDDLE> : strip_pairs<BITS, CODES>;
}
#endif

// Token blocks one after another; 1 where memory ran out.
int32_t in_blocks(const Arguments& given, Product product, int64_t block = TOKEN_BLOCK) {
  try {
    for (int64_t m = 0; m < given.M; m += block) {
      Arguments a = given;
      a.M = std::min(block, given.M - m);
      a.threads = useful_threads(a.M * a.N * a.K, given.threads);
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
  if (!given->strips) return in_blocks(*given, planar_floats);
  Arguments a = *given;
#if BF16_DOT
  if (a.x_type == BF16) {
    if (a.bits == 8) a.by_rows = a.by_rows && a.M <= BYTE_PAIRS_BY_ROWS;
    if (a.row_start != nullptr) a.by_rows = a.by_rows && a.M <= ENTRIES_BY_ROWS;
    return in_blocks(a, a.bits == 4 ? pairs_of<4>(a) : pairs_of<8>(a), a.by_rows ? STRIP_TOKEN_BLOCK : TOKEN_BLOCK);
  }
#endif
  if (a.row_start != nullptr) a.by_rows = a.by_rows && a.M <= ENTRIES_BY_ROWS;
  return in_blocks(a, strip_floats);
}

extern "C" int32_t int8_activation(const Arguments* given) {
  return in_blocks(*given, given->strips ? strip_ints : given->planar ? planar_ints : int8_rows);
}

extern "C" int32_t sparse_rows(const Arguments* given) { return in_blocks(*given, sparse_product); }

extern "C" int32_t sparse24(const Arguments* given) {
  const int bits = given->bits;
  const bool pairs = BF16_DOT && given->x_type == BF16;
  return in_blocks(*given, bits == 4 ? halved<4> : bits == 8 ? halved<8> : halved<NUMBER_BITS>,
                   pairs ? STRIP_TOKEN_BLOCK : HALVED_FLOAT_BLOCK);
}

extern "C" int32_t attend(const Attention* a) {
  try {
    attend_all(*a);
  } catch (const std::bad_alloc&) {
    return 1;
  }
  return 0;
}

extern "C" const char* instructions() { return INSTRUCTIONS; }
