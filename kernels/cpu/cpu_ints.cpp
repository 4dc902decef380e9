#include "cpu_ints.h"

#include "cpu_products.h"

void planar_ints(const Arguments& a) { a.bits == 4 ? int_product<Nibbles>(a) : int_product<Bytes>(a); }

void int8_rows(const Arguments& a) { int_product<Plain>(a); }

// Codes int8 [M, K], scale [M, ceil(K / input_group)] and zero [M] of x.
extern "C" void quantize_tokens(const Arguments* a, int8_t* codes, float* scale, int32_t* zero) {
  const int64_t scales = a->input_group > 0 ? (a->K + a->input_group - 1) / a->input_group : 1;
  in_parallel(a->M, a->threads, [&](int64_t m, int) { quantize(*a, m, codes + m * a->K, scale + m * scales, zero + m); });
}
