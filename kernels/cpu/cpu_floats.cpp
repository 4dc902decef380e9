#include "cpu_floats.h"

#include "cpu_products.h"

void planar_floats(const Arguments& a) {
#if BF16_DOT
  if (a.x_type == BF16 && a.scale_type == BF16)
    return a.bits == 4 ? float_product<Bf16Words<4>>(a) : float_product<Bf16Words<8>>(a);
#endif
  a.bits == 4 ? float_product<F32Words<4>>(a) : float_product<F32Words<8>>(a);
}
