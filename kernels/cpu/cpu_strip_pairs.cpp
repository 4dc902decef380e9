// Nothing where the processor multiplies no pairs of bf16.
#include "cpu_vectors.h"

#if BF16_DOT

#include "cpu_products.h"
#include "cpu_strips.h"

template <int BITS, Zeros ZEROS>
void strip_pairs(const Arguments& a) {
  strip_pair_product<BITS, ZEROS>(a);
}

template void strip_pairs<UNIT_BITS, MIDDLE>(const Arguments& a);
template void strip_pairs<UNIT_BITS, CODES>(const Arguments& a);
template void strip_pairs<UNIT_BITS, NUMBERS>(const Arguments& a);
#if UNIT_BITS == 4
template void strip_pairs<UNIT_BITS, TABLE>(const Arguments& a);
#endif

#endif
