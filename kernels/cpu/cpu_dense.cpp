// Products of many tokens by dense blocks: some rows of the weight are unpacked into a panel that stays in the cache
// (cpu_panels.h), and AMX multiplies by it (cpu_amx_products.h, cpu_amx_ints.h), or torch, with whatever it has for this
// processor. Rows of int8 are multiplied as they are, by torch's product of integers.
//
//   out[:, block] = x panel + bias          in the type of x; values of the weight are rounded to it
//   sums[:, block] = codes rows^T           in int32, exact, then scaled as `int8_activation` does, bit for bit
//
// Inputs that are rounded to int8 beside words or strips become their values, rounded to bfloat16, and are multiplied like
// others.
//
// The number of tokens from which this is faster than the loops is measured once for each kind of product (dense.py):
// `dense` looks it up, and asks for what it does not know.

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h>

#include <atomic>
#include <map>
#include <mutex>

#include "cpu_amx_ints.h"

namespace {

// As in dense.py; outcomes are those of the loops, or NOT_TAKEN.
enum Operation : int32_t { EXACT, ROUNDED, HALVED };
constexpr int32_t NOT_TAKEN = -1;
constexpr int64_t FEW_TOKENS = 3, FEW_WEIGHTS = 1 << 16;
// Of a panel: small enough to stay in the cache, wide enough for a call of torch and for every thread of it.
constexpr int64_t PANEL_BYTES = 2 << 20, ROWS_OF_THREAD = 64;

// Whether AMX multiplies where the processor has it; torch does otherwise.
std::atomic<bool> amx_allowed{true};
bool uses_amx() {
#if AMX
  return amx_allowed && has_tiles();
#else
  return false;
#endif
}

using Ask = int64_t (*)(const Arguments*, int32_t);

std::mutex guard;
std::map<uint64_t, int64_t> known;  // tokens from which dense blocks are faster
Ask ask = nullptr;

// A matrix of torch's on memory that is not its own.
struct Matrix {
  AtenTensorHandle handle = nullptr;

  Matrix(const void* data, int64_t rows, int64_t columns, int64_t row_stride, int64_t column_stride, int32_t dtype) {
    const int64_t sizes[] = {rows, columns}, strides[] = {row_stride, column_stride};
    aoti_torch_create_tensor_from_blob(const_cast<void*>(data), 2, sizes, strides, 0, dtype, aoti_torch_device_type_cpu(),
                                       0, &handle);
  }
  Matrix(const Matrix&) = delete;
  ~Matrix() {
    if (handle != nullptr) aoti_torch_delete_tensor_object(handle);
  }
};

int32_t dtype_of(Type type) {
  return type == F32 ? aoti_torch_dtype_float32() : type == F16 ? aoti_torch_dtype_float16() : aoti_torch_dtype_bfloat16();
}

// Rows of a block: all blocks but the last have as many.
int64_t block_rows(const Arguments& a, int64_t row_bytes) {
  const int64_t most = std::max(PANEL_BYTES / row_bytes, ROWS_OF_THREAD * a.threads);
  const int64_t blocks = std::max<int64_t>((a.N + most - 1) / most, 1), each_of = (a.N + blocks - 1) / blocks;
  return (each_of + ROWS - 1) / ROWS * ROWS;
}

bool multiply_exact(const Arguments& given) {
#if AMX
  if (given.x_type == BF16 && uses_amx()) {
    in_token_blocks(given, multiply_pairs_with_amx);
    return true;
  }
#endif
  Arguments a = given;
  a.by_rows = true;  // no sums are kept
  a.bias = nullptr;  // which torch adds
  const int64_t size = size_of(a.x_type), width = block_rows(a, a.K * size), slabs = width / ROWS;
  const int32_t dtype = dtype_of(a.x_type);
  const Panel panel = {kept_memory<3>(stored_columns(a) * width * size), width, a.x_type, 0, stored_columns(a)};
  const Memory<char> bias = allocate<char>(given.bias == nullptr ? 0 : a.N * size);
  for (int64_t n = 0; n < a.N && given.bias != nullptr; n += LANES) {
    const char* from = static_cast<const char*>(given.bias) + n * size_of(given.bias_type);
    store_floats(&bias[n * size], a.x_type, load_floats(from, given.bias_type, a.N - n), a.N - n);
  }
  const int threads = std::max(static_cast<int>(std::min<int64_t>(a.threads, slabs)), 1);
  std::vector<Work> works;
  works.reserve(threads);
  for (int i = 0; i < threads; ++i) works.emplace_back(a, CHUNK * ROWS * 4, i);
  const Layout layout = lines_of(a.x_type);
  const Unpack unpack = layout == LINES ? unpack_of<LINES>(a) : unpack_of<BF16_LINES>(a);
  const Matrix x(a.x, a.M, a.K, a.K, 1, dtype);
  for (int64_t n0 = 0; n0 < a.N; n0 += width) {
    const int64_t here = std::min(width, a.N - n0);
    in_parallel((here + ROWS - 1) / ROWS, threads, [&](int64_t i, int thread) {
      const auto rows = layout == LINES ? unpack_rows<LINES> : unpack_rows<BF16_LINES>;
      rows(works[thread], n0 + i * ROWS, unpack, panel, i * ROWS);
    });
    const Matrix values(panel.values, a.K, here, width, 1, dtype);
    const Matrix out(static_cast<char*>(a.out) + n0 * size, a.M, here, a.N, 1, dtype);
    if (given.bias == nullptr) {
      if (aoti_torch_cpu_mm_out(out.handle, x.handle, values.handle) != AOTI_TORCH_SUCCESS) return false;
    } else {
      const Matrix added(&bias[n0 * size], a.M, here, 0, 1, dtype);
      if (aoti_torch_cpu_addmm_out(out.handle, added.handle, x.handle, values.handle, 1, 1) != AOTI_TORCH_SUCCESS)
        return false;
    }
  }
  return true;
}

// One token's outputs of a block, in the order of `int_finish`.
void finish_rows(const Arguments& a, const int32_t* sums, int64_t m, int64_t n0, int64_t count, float scale, int32_t zero) {
  const int64_t size = size_of(a.x_type);
  const float* weight_scale = static_cast<const float*>(a.scale) + n0;
  char* to = static_cast<char*>(a.out) + (m * a.N + n0) * size;
  for (int64_t n = 0; n < count; n += LANES) {
    const int64_t left = count - n;
    const auto ints = [&](const int32_t* p) { return float_to_bits(load_floats(p, F32, left)); };
    Int exact = ints(sums + n);
    if (zero != 0) exact = minus(exact, times(every(zero), ints(a.row_sum + n0 + n)));
    Float values = times(times(to_float(exact), every(scale)), load_floats(weight_scale + n, F32, left));
    if (a.bias != nullptr) {
      const char* bias = static_cast<const char*>(a.bias) + (n0 + n) * size_of(a.bias_type);
      values = plus(values, load_floats(bias, a.bias_type, left));
    }
    store_floats(to + n * size, a.x_type, values, left);
  }
}

bool multiply_rounded(const Arguments& given) {
  Arguments a = given;
  a.x_type = BF16;
  const int64_t width = a.input_group > 0 ? a.input_group : a.K, scales = (a.K + width - 1) / width;
  const Memory<uint16_t> x = allocate<uint16_t>(a.M * a.K);
  const Memory<int8_t> codes = allocate<int8_t>(a.threads * a.K);
  const Memory<float> scale = allocate<float>(a.threads * scales);
  in_parallel(a.M, a.threads, [&](int64_t m, int thread) {
    int8_t* own = &codes[thread * a.K];
    float* of_token = &scale[thread * scales];
    int32_t zero;
    quantize(given, m, own, of_token, &zero);
    for (int64_t start = 0; start < a.K; start += width) {
      const Float of_columns = every(of_token[start / width]);
      for (int64_t k = start, end = std::min(start + width, a.K); k < end; k += LANES) {
        const Int sign = every(0x80), code = minus(differ(widen_bytes(own + k, end - k), sign), sign);
        store_floats(&x[m * a.K + k], BF16, times(to_float(code), of_columns), end - k);
      }
    }
  });
  a.x = x.get();
  return multiply_exact(a);
}

bool multiply_rows_of_int8(const Arguments& a) {
  const int64_t width = block_rows(a, a.K);
  const Memory<int8_t> codes = allocate<int8_t>(a.M * a.K);
  const Memory<float> scale = allocate<float>(a.M);
  const Memory<int32_t> zero = allocate<int32_t>(a.M);
  in_parallel(a.M, a.threads, [&](int64_t m, int) { quantize(a, m, &codes[m * a.K], &scale[m], &zero[m]); });
  const Matrix x(codes.get(), a.M, a.K, a.K, 1, aoti_torch_dtype_int8());
  int32_t* sums = reinterpret_cast<int32_t*>(kept_memory<3>(a.M * width * 4));
  for (int64_t n0 = 0; n0 < a.N; n0 += width) {
    const int64_t here = std::min(width, a.N - n0);
    const Matrix rows(static_cast<const char*>(a.weight) + n0 * a.K, a.K, here, 1, a.K, aoti_torch_dtype_int8());
    const Matrix out(sums, a.M, here, here, 1, aoti_torch_dtype_int32());
    if (aoti_torch_cpu__int_mm_out(out.handle, x.handle, rows.handle) != AOTI_TORCH_SUCCESS) return false;
    in_parallel(a.M, a.threads, [&](int64_t m, int) { finish_rows(a, sums + m * here, m, n0, here, scale[m], zero[m]); });
  }
  return true;
}

// The sizes that decide which way is faster, as one number.
uint64_t kind_of(const Arguments& a, int32_t operation) {
  const auto order = [](int64_t v) { return v <= 0 ? 0 : 64 - __builtin_clzll(v); };  // of magnitude
  uint64_t found = 0;
  const auto add = [&](uint64_t v, int bits) { found = found << bits | (v & ((1u << bits) - 1)); };
  add(operation, 2), add(a.input_group > 0, 1), add(a.strips, 1), add(a.planar, 1), add(a.bits, 5), add(a.x_type, 2), add(a.scale_type, 2);
  add(a.value_type, 2), add(a.zero != nullptr, 1), add(a.row_start != nullptr, 1), add(a.levels != nullptr, 1);
  add(a.table != nullptr, 1), add(a.group % 64 == 0, 1), add(order(a.group), 5), add(order(a.N), 5), add(order(a.K), 5), add(a.threads, 10);
  return found;
}

bool takes(const Arguments& a, int32_t operation) {
  if (a.M <= FEW_TOKENS || a.N * a.K < FEW_WEIGHTS) return false;
  if (operation != ROUNDED) return true;
  // Without dot products of bytes, torch's integers saturate.
  return a.planar || a.strips ? a.x_type == BF16 : VNNI;
}

}  // namespace

// For any number of tokens; the caller has seen that `takes` accepts them.
extern "C" int32_t dense_product(const Arguments* a, int32_t operation) {
  try {
#if AMX
    if (operation == ROUNDED && uses_amx() && takes_ints(*a)) {
      in_token_blocks(*a, multiply_ints_with_amx);
      return DONE;
    }
#endif
    const bool words = a->planar || a->strips;
    const auto multiply = operation != ROUNDED ? multiply_exact : words ? multiply_rounded : multiply_rows_of_int8;
    return multiply(*a) ? DONE : NO_MEMORY;
  } catch (const std::bad_alloc&) {
    return NO_MEMORY;
  }
}

extern "C" int32_t dense(const Arguments* a, int32_t operation) {
  if (!takes(*a, operation)) return NOT_TAKEN;
  const uint64_t kind = kind_of(*a, operation);
  int64_t from = -1;
  {
    std::lock_guard<std::mutex> lock(guard);
    const auto found = known.find(kind);
    if (found != known.end()) from = found->second;
  }
  if (from < 0) {
    if (ask == nullptr) return NOT_TAKEN;
    from = ask(a, operation);
    std::lock_guard<std::mutex> lock(guard);
    known[kind] = from;
  }
  return a->M < from ? NOT_TAKEN : dense_product(a, operation);
}

// Let AMX multiply, or not. Nonzero where it does from now on.
extern "C" int32_t dense_amx(int32_t allowed) {
  amx_allowed = allowed != 0;
  return uses_amx();
}

// Measure by `given` from now on; what was known is forgotten.
extern "C" void dense_ask(Ask given) {
  std::lock_guard<std::mutex> lock(guard);
  ask = given;
  known.clear();
}
