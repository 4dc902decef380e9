#include "cpu_sparse.h"

#include "cpu_products.h"

void UNIT(const void* given) { sparse_product(*static_cast<const Arguments*>(given)); }
