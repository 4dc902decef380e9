// Parts: products, and attention, each with some of its parameters settled. A part is compiled by itself, when a call
// first needs it, so that nobody waits for loops that his model does not run; cpu_gemm.cpp chooses among them.
//
// A file of parts is compiled once for each, with UNIT, its name, and further macros (libraries.py).

#pragma once

#include "cpu_work.h"

// What zero points are: all in the middle of the codes, codes themselves, or numbers; none, where a table has the values.
enum Zeros { MIDDLE, CODES, NUMBERS, TABLE };
// Bits of a 2:4 weight that holds numbers.
constexpr int NUMBER_BITS = 16;

// Of Arguments, or of Attention.
using Loop = void (*)(const void*);

// Alone, and with entries of a sparse weight added.
#define BOTH(DO, name) DO(name) DO(name##_entries)
#define EACH_PART(DO)                                                                                       \
  BOTH(DO, planar_floats_4) BOTH(DO, planar_floats_8) BOTH(DO, planar_pairs_4) BOTH(DO, planar_pairs_8)     \
  DO(planar_ints_4) DO(planar_ints_8) DO(int8_rows)                                                         \
  BOTH(DO, strip_floats_4) BOTH(DO, strip_floats_8) DO(strip_floats_table) DO(strip_ints)                   \
  BOTH(DO, strip_pairs_4_middle) BOTH(DO, strip_pairs_4_codes) BOTH(DO, strip_pairs_4_numbers)              \
  BOTH(DO, strip_pairs_8_middle) BOTH(DO, strip_pairs_8_codes) BOTH(DO, strip_pairs_8_numbers)              \
  DO(strip_pairs_4_table)                                                                                   \
  DO(halved_floats_4) DO(halved_floats_8) DO(halved_floats_16)                                              \
  DO(halved_pairs_4) DO(halved_pairs_8) DO(halved_pairs_16)                                                 \
  DO(entries_alone) DO(attention_f32) DO(attention_f16) DO(attention_bf16)

#ifdef UNIT
extern "C" void UNIT(const void* given);
#endif
