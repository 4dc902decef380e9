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
// have the loops. They are compiled as parts (cpu_products.h): this file chooses among them.
// Columns past K are zeros of x, rows past N repeat the last row and are not stored.

#include <atomic>

#include "cpu_attention.h"
#include "cpu_ints.h"
#include "cpu_products.h"

// Linked to this library, or, in one that is compiled without them, given when a call first needs them.
#define DECLARED(name) extern "C" __attribute__((weak)) void name(const void*);
EACH_PART(DECLARED)
#undef DECLARED

namespace {

// Tokens that meet a strip, one tile after the other: of 4096 columns in bf16, 2 MiB; of 2:4 weights in fp32, 1 MiB.
constexpr int64_t STRIP_TOKEN_BLOCK = 256, HALVED_FLOAT_BLOCK = 64;
// Tokens up to which pairs are not worth a slab: of 8 bits, which take longer to decode, and beside entries.
constexpr int64_t BYTE_PAIRS_BY_ROWS = 48, ENTRIES_BY_ROWS = 16;

#define NAMED(name) PART_##name,
enum PartOf { EACH_PART(NAMED) };
#undef NAMED

struct NamedPart {
  const char* name;
  std::atomic<Loop> part;
};

#define LISTED(name) {#name, name},
NamedPart parts[] = {EACH_PART(LISTED)};
#undef LISTED

// The part of a name, compiled and loaded; null where that fails.
using Ask = Loop (*)(const char*);
std::atomic<Ask> ask{nullptr};

Loop found(PartOf which) {
  NamedPart& held = parts[which];
  Loop part = held.part.load(std::memory_order_acquire);
  if (part == nullptr) {
    const Ask asked = ask.load(std::memory_order_acquire);
    if (asked != nullptr) part = asked(held.name);
    held.part.store(part, std::memory_order_release);
  }
  return part;
}

// The part of a product alone, or with entries, which comes next (BOTH).
PartOf with_entries(const Arguments& a, PartOf alone) {
  return a.row_start == nullptr ? alone : static_cast<PartOf>(alone + 1);
}

PartOf planar_floats_of(const Arguments& a) {
  if (BF16_DOT && a.x_type == BF16 && a.scale_type == BF16)
    return with_entries(a, a.bits == 4 ? PART_planar_pairs_4 : PART_planar_pairs_8);
  return with_entries(a, a.bits == 4 ? PART_planar_floats_4 : PART_planar_floats_8);
}

PartOf strip_pairs_of(const Arguments& a) {
  if (a.bits == 4 && a.table != nullptr) return PART_strip_pairs_4_table;
  PartOf alone = a.bits == 4 ? PART_strip_pairs_4_codes : PART_strip_pairs_8_codes;
  if (a.zero == nullptr) alone = a.bits == 4 ? PART_strip_pairs_4_middle : PART_strip_pairs_8_middle;
  if (a.levels != nullptr) alone = a.bits == 4 ? PART_strip_pairs_4_numbers : PART_strip_pairs_8_numbers;
  return with_entries(a, alone);
}

PartOf strip_floats_of(const Arguments& a) {
  if (a.bits == 4 && a.table != nullptr) return PART_strip_floats_table;
  return with_entries(a, a.bits == 4 ? PART_strip_floats_4 : PART_strip_floats_8);
}

PartOf halved_of(const Arguments& a, bool pairs) {
  if (a.bits == 4) return pairs ? PART_halved_pairs_4 : PART_halved_floats_4;
  if (a.bits == 8) return pairs ? PART_halved_pairs_8 : PART_halved_floats_8;
  return pairs ? PART_halved_pairs_16 : PART_halved_floats_16;
}

// Token blocks one after another.
Outcome in_blocks(const Arguments& given, PartOf which, int64_t block = TOKEN_BLOCK) {
  const Loop product = found(which);
  if (product == nullptr) return NO_PART;
  try {
    for (int64_t m = 0; m < given.M; m += block) {
      Arguments a = given;
      a.M = std::min(block, given.M - m);
      a.threads = useful_threads(a.M * a.N * a.K, given.threads);
      a.x = static_cast<const char*>(given.x) + m * given.K * size_of(given.x_type);
      a.out = static_cast<char*>(given.out) + m * given.N * size_of(given.x_type);
      product(&a);
    }
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
  return DONE;
}

}  // namespace

extern "C" void ask_for_parts(Ask given) { ask.store(given, std::memory_order_release); }

extern "C" int32_t weight_only(const Arguments* given) {
  if (!given->strips) return in_blocks(*given, planar_floats_of(*given));
  Arguments a = *given;
  if (BF16_DOT && a.x_type == BF16) {
    if (a.bits == 8) a.by_rows = a.by_rows && a.M <= BYTE_PAIRS_BY_ROWS;
    if (a.row_start != nullptr) a.by_rows = a.by_rows && a.M <= ENTRIES_BY_ROWS;
    return in_blocks(a, strip_pairs_of(a), a.by_rows ? STRIP_TOKEN_BLOCK : TOKEN_BLOCK);
  }
  if (a.row_start != nullptr) a.by_rows = a.by_rows && a.M <= ENTRIES_BY_ROWS;
  return in_blocks(a, strip_floats_of(a));
}

extern "C" int32_t int8_activation(const Arguments* a) {
  if (a->strips) return in_blocks(*a, PART_strip_ints);
  if (!a->planar) return in_blocks(*a, PART_int8_rows);
  return in_blocks(*a, a->bits == 4 ? PART_planar_ints_4 : PART_planar_ints_8);
}

extern "C" int32_t sparse_rows(const Arguments* given) { return in_blocks(*given, PART_entries_alone); }

extern "C" int32_t sparse24(const Arguments* a) {
  const bool numbers = a->bits != 4 && a->bits != 8, bf16 = BF16_DOT && a->x_type == BF16;
  return in_blocks(*a, halved_of(*a, bf16 && (!numbers || a->value_type == BF16)),
                   bf16 ? STRIP_TOKEN_BLOCK : HALVED_FLOAT_BLOCK);
}

extern "C" int32_t attend(const Attention* a) {
  const Loop part = found(a->type == F32 ? PART_attention_f32 : a->type == F16 ? PART_attention_f16 : PART_attention_bf16);
  if (part == nullptr) return NO_PART;
  try {
    part(a);
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
  return DONE;
}

// Codes int8 [M, K], scale [M, ceil(K / input_group)] and zero [M] of x.
extern "C" void quantize_tokens(const Arguments* a, int8_t* codes, float* scale, int32_t* zero) {
  const int64_t scales = a->input_group > 0 ? (a->K + a->input_group - 1) / a->input_group : 1;
  in_parallel(a->M, a->threads, [&](int64_t m, int) { quantize(*a, m, codes + m * a->K, scale + m * scales, zero + m); });
}

extern "C" const char* instructions() { return INSTRUCTIONS; }
