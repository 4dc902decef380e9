// compress::cpu_linear and compress::cpu_attention, operators of torch's stable C ABI: what stands between a model and the
// loops of cpu_gemm.cpp, where Python's way (gemm.py) would take longer than a small product does.
//
//   [..., N] = x weight^T + bias, in the dtype of x; of the weight there are planar words [N, words] or strips [S, L, 64].
//
// x is multiplied as it is (no input_group), or rounded to int8, per token (-1) or per token and so many columns. The
// loops are of another library, which this one is given at its start (`use`), compiled for its processor.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "cpu_attention.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Product = int32_t (*)(const Arguments*);
using Attend = int32_t (*)(const Attention*);

constexpr int64_t STRIP_ROWS = 16;

struct Loops {
  Product exact, rounded;
  // Tokens up to which rows are read front to back: [strips][rounded].
  int64_t by_rows[2][2];
  int64_t pairs_by_rows;  // of strips and exact bfloat16
  Attend attend;
};

Loops loops;

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return F32;
    case ScalarType::Half: return F16;
    case ScalarType::BFloat16: return BF16;
    default: STD_TORCH_CHECK(false, "compress computes in float32, float16 and bfloat16");
  }
}

Tensor whole(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

Tensor cpu_linear(const Tensor& given, const Tensor& given_words, const Tensor& given_scale,
                  const std::optional<Tensor>& given_zero, const std::optional<Tensor>& given_bias, int64_t bits,
                  int64_t group_size, std::optional<int64_t> input_group) {
  const Tensor x = whole(given), words = whole(given_words), scale = whole(given_scale);
  const bool strips = words.dim() == 3;
  const int64_t dims = x.dim();
  Arguments a = {};
  STD_TORCH_CHECK(dims > 0 && x.size(dims - 1) > 0, "cpu_linear: x has no columns");
  a.K = x.size(dims - 1);
  a.M = x.numel() / a.K;
  a.N = words.size(0) * (strips ? STRIP_ROWS : 1);
  a.G = scale.size(strips ? 1 : 0);
  const int64_t row_words = strips ? words.size(1) * words.size(2) / STRIP_ROWS : words.size(1);
  a.row_bytes = strips ? row_words : row_words * 2;
  STD_TORCH_CHECK(a.row_bytes * 8 >= a.K * bits && scale.numel() == a.G * a.N,
                  "cpu_linear: the weight does not hold as many columns as x, or not a scale for every group");
  a.bits = static_cast<int32_t>(bits);
  a.group = group_size;
  a.x_type = type_of(x);
  a.scale_type = type_of(scale);
  a.strips = strips;
  a.planar = !strips;
  a.symmetric = true;
  a.input_group = input_group.value_or(-1);
  const bool pairs = strips && a.x_type == BF16 && !input_group.has_value();
  a.by_rows = a.M <= (pairs ? loops.pairs_by_rows : loops.by_rows[strips][input_group.has_value()]);
  a.threads = static_cast<int32_t>(torch::stable::get_num_threads());
  a.x = x.data_ptr();
  a.weight = words.data_ptr();
  a.scale = scale.data_ptr();
  std::optional<Tensor> zero, bias;
  if (given_zero.has_value()) {
    zero = whole(*given_zero);
    a.zero = static_cast<const uint8_t*>(zero->data_ptr());
  }
  if (given_bias.has_value()) {
    bias = whole(*given_bias);
    a.bias = bias->data_ptr();
    a.bias_type = type_of(*bias);
  }
  std::vector<int64_t> shape(x.sizes().begin(), x.sizes().end());
  shape.back() = a.N;
  const Tensor out = torch::stable::new_empty(x, shape);
  a.out = out.data_ptr();
  STD_TORCH_CHECK((input_group.has_value() ? loops.rounded : loops.exact)(&a) == 0, "no memory to pack ", a.M,
                  " tokens of ", a.K, " columns");
  return out;
}

// Of query [batch, heads, 1, size], key [batch, key heads, keys, size] and value [.., value size]; mask, of bools or
// numbers, [batch or 1, heads or 1, 1, keys]. The result is [batch, 1, heads, value size].
Tensor cpu_attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& given_mask,
                     double scale) {
  Attention a = {};
  const auto check = [](bool holds, const char* what) { STD_TORCH_CHECK(holds, "cpu_attention: ", what); };
  check(query.dim() == 4 && key.dim() == 4 && value.dim() == 4 && query.size(2) == 1, "one query, in four dimensions");
  a.batch = query.size(0), a.heads = query.size(1), a.size = query.size(3);
  a.key_heads = key.size(1), a.keys = key.size(2), a.value_size = value.size(3);
  check(key.size(0) == a.batch && value.size(0) == a.batch && key.size(3) == a.size && value.size(1) == a.key_heads &&
            value.size(2) == a.keys && a.key_heads > 0 && a.heads > 0 && a.heads % a.key_heads == 0,
        "keys and values do not fit the query");
  check(query.stride(3) == 1 && key.stride(3) == 1 && value.stride(3) == 1, "numbers of a head do not lie together");
  a.type = type_of(query);
  check(type_of(key) == a.type && type_of(value) == a.type, "query, keys and values have several dtypes");
  for (int i = 0; i < 2; ++i) a.query_strides[i] = query.stride(i);
  for (int i = 0; i < 3; ++i) a.key_strides[i] = key.stride(i), a.value_strides[i] = value.stride(i);
  std::optional<Tensor> mask;
  if (given_mask.has_value()) {
    mask = given_mask->stride(3) == 1 ? *given_mask : whole(*given_mask);
    check(mask->dim() == 4 && mask->size(2) == 1 && mask->size(3) == a.keys, "the mask is not one of these keys");
    const int64_t of[2] = {a.batch, a.heads};
    for (int i = 0; i < 2; ++i) {
      check(mask->size(i) == of[i] || mask->size(i) == 1, "the mask has other sequences or heads");
      a.mask_strides[i] = mask->size(i) == 1 ? 0 : mask->stride(i);
    }
    a.has_mask = true;
    a.bool_mask = mask->scalar_type() == ScalarType::Bool;
    if (!a.bool_mask) a.mask_type = type_of(*mask);
    a.mask = mask->data_ptr();
  }
  a.scale = static_cast<float>(scale);
  a.threads = static_cast<int32_t>(torch::stable::get_num_threads());
  const Tensor out = torch::stable::new_empty(query, {a.batch, 1, a.heads, a.value_size});
  a.query = query.data_ptr(), a.key = key.data_ptr(), a.value = value.data_ptr(), a.out = out.data_ptr();
  STD_TORCH_CHECK(loops.attend(&a) == 0, "no memory for the scores of ", a.keys, " keys");
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(compress, m) {
  m.def("cpu_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor");
  m.def(
      "cpu_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? bias, int bits, int group_size, int? "
      "input_group) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(compress, CPU, m) {
  m.impl("cpu_linear", TORCH_BOX(&cpu_linear));
  m.impl("cpu_attention", TORCH_BOX(&cpu_attention));
}

}  // namespace

extern "C" void use(const Loops* given) { loops = *given; }
