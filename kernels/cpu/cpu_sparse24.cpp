#include "cpu_sparse24.h"

#include "cpu_products.h"

#if !UNIT_PAIRS
void UNIT(const void* given) { halved_float_product<UNIT_BITS>(*static_cast<const Arguments*>(given)); }
#elif BF16_DOT
void UNIT(const void* given) { halved_pair_product<UNIT_BITS>(*static_cast<const Arguments*>(given)); }
#endif
