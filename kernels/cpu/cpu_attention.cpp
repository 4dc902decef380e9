#include "cpu_attention.h"

#include "cpu_products.h"

void UNIT(const void* given) { attend_all<UNIT_TYPE>(*static_cast<const Attention*>(given)); }
