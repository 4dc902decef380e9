#include "cpu_strips.h"

#include "cpu_products.h"

#if UNIT_TABLE
void UNIT(const void* given) { table_float_product(*static_cast<const Arguments*>(given)); }
#else
void UNIT(const void* given) { strip_float_product<CodeValues<UNIT_BITS>>(*static_cast<const Arguments*>(given)); }
#endif
