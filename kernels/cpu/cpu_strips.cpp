#include "cpu_strips.h"

#include "cpu_products.h"

#if UNIT_TABLE
void UNIT(const void* given) { table_float_product(*static_cast<const Arguments*>(given)); }
#else
void UNIT(const void* given) { code_float_product<UNIT_BITS>(*static_cast<const Arguments*>(given)); }
#endif
