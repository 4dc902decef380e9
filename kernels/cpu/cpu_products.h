// Products that have translation units of their own, so that several compile side by side and none takes much memory:
// what cpu_gemm.cpp chooses from. A file that is several units is compiled for each UNIT_BITS.

#pragma once

#include "cpu_work.h"

#define HIDDEN __attribute__((visibility("hidden")))

// What zero points are: all in the middle of the codes, codes themselves, or numbers; none, where a table has the values.
enum Zeros { MIDDLE, CODES, NUMBERS, TABLE };
// Bits of a 2:4 weight that holds numbers.
constexpr int NUMBER_BITS = 16;

HIDDEN void planar_floats(const Arguments& a);
HIDDEN void planar_ints(const Arguments& a);
HIDDEN void int8_rows(const Arguments& a);
HIDDEN void strip_floats(const Arguments& a);
HIDDEN void strip_ints(const Arguments& a);
template <int BITS, Zeros ZEROS>
HIDDEN void strip_pairs(const Arguments& a);
template <int BITS>
HIDDEN void halved(const Arguments& a);
