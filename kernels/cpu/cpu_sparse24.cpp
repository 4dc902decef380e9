#include "cpu_sparse24.h"

#include "cpu_products.h"

template <int BITS>
void halved(const Arguments& a) {
  halved_product<BITS>(a);
}

template void halved<UNIT_BITS>(const Arguments& a);
