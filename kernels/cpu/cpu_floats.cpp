#include "cpu_floats.h"

#include "cpu_products.h"

#if !UNIT_PAIRS
void UNIT(const void* given) { float_product<F32Words<UNIT_BITS>>(*static_cast<const Arguments*>(given)); }
#elif BF16_DOT
void UNIT(const void* given) { float_product<Bf16Words<UNIT_BITS>>(*static_cast<const Arguments*>(given)); }
#endif
