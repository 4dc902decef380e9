#include "cpu_products.h"
#include "cpu_strips.h"

#if BF16_DOT
void UNIT(const void* given) { strip_pair_product<UNIT_BITS, UNIT_ZEROS>(*static_cast<const Arguments*>(given)); }
#endif
