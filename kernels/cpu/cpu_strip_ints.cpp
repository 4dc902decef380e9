#include "cpu_strip_ints.h"

#include "cpu_products.h"

void UNIT(const void* given) { strip_int_product(*static_cast<const Arguments*>(given)); }
