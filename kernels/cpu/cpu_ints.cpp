#include "cpu_ints.h"

#include "cpu_products.h"

void UNIT(const void* given) { int_product<UNIT_WORDS>(*static_cast<const Arguments*>(given)); }
