#include "cpu_strips.h"

#include "cpu_products.h"
#include "cpu_strip_ints.h"

void strip_floats(const Arguments& a) { strip_float_products(a); }

void strip_ints(const Arguments& a) { strip_int_product(a); }
