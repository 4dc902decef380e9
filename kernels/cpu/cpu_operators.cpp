// compress::cpu_linear, cpu_w8a8 and cpu_attention, operators of torch's stable C ABI: what stands between a model and the
// loops of cpu_gemm.cpp, where Python's way (gemm.py) would take longer than a small product does.
//
//   [..., N] = x weight^T + bias, in the dtype of x; of the weight there are planar words [N, words], strips [S, L, 64] or
//   rows of int8 [N, K].
//
// x is multiplied as it is (no input_group), or rounded to int8, per token (-1) or per token and so many columns. The
// loops are of another library, which this one is given at its start (`use`), compiled for its processor.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "cpu_attention.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Product = int32_t (*)(const Arguments*);
using Attend = int32_t (*)(const Attention*);

constexpr int64_t STRIP_ROWS = 16, MOST_DIMENSIONS = 64;

struct Loops {
  Product exact, rounded;
  // Tokens up to which rows are read front to back: [strips][rounded].
  int64_t by_rows[2][2];
  int64_t pairs_by_rows;  // of strips and exact bfloat16
  int64_t by_rows_w8a8;
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

// [...], of the type of x.
Tensor empty(const Tensor& x, const int64_t* sizes, int64_t dims) {
  int64_t strides[MOST_DIMENSIONS];
  int64_t stride = 1;
  for (int64_t i = dims - 1; i >= 0; --i) {
    strides[i] = stride;
    stride *= std::max<int64_t>(sizes[i], 1);
  }
  int32_t type;
  STD_TORCH_CHECK(aoti_torch_get_dtype(x.get(), &type) == AOTI_TORCH_SUCCESS, "no dtype");
  AtenTensorHandle made;
  STD_TORCH_CHECK(
      aoti_torch_empty_strided(dims, sizes, strides, type, aoti_torch_device_type_cpu(), 0, &made) == AOTI_TORCH_SUCCESS,
      "no memory for the result");
  return Tensor(made);
}

Tensor whole(const Tensor& tensor) { return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor); }

// [..., N], which a loop makes of x and arguments that lack no more than the result.
Tensor product(Product loop, Arguments& a, const Tensor& x) {
  const int64_t dims = x.dim();
  int64_t sizes[MOST_DIMENSIONS];
  std::copy_n(x.sizes().data(), dims, sizes);
  sizes[dims - 1] = a.N;
  const Tensor out = empty(x, sizes, dims);
  a.out = out.data_ptr();
  STD_TORCH_CHECK(loop(&a) == 0, "no memory to pack ", a.M, " tokens of ", a.K, " columns");
  return out;
}

Tensor cpu_linear(const Tensor& given, const Tensor& given_words, const Tensor& given_scale,
                  const std::optional<Tensor>& given_zero, const std::optional<Tensor>& given_bias, int64_t bits,
                  int64_t group_size, std::optional<int64_t> input_group) {
  const Tensor x = whole(given), words = whole(given_words), scale = whole(given_scale);
  const bool strips = words.dim() == 3;
  const int64_t dims = x.dim();
  Arguments a = {};
  STD_TORCH_CHECK(dims > 0 && dims <= MOST_DIMENSIONS && x.size(dims - 1) > 0, "cpu_linear: x has no columns");
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
  return product(input_group.has_value() ? loops.rounded : loops.exact, a, x);
}

// Of rows of int8 [N, K], one fp32 scale each, and x rounded to int8: per token, or by a scale [1] and a zero point [1].
// row_sum: int32 [N], needed where tokens have zero points.
Tensor cpu_w8a8(const Tensor& given, const Tensor& given_weight, const Tensor& given_scale,
                const std::optional<Tensor>& given_sum, const std::optional<Tensor>& given_bias,
                const std::optional<Tensor>& input_scale, const std::optional<Tensor>& input_zero, bool symmetric) {
  const Tensor x = whole(given), weight = whole(given_weight), scale = whole(given_scale);
  const auto check = [](bool holds, const char* what) { STD_TORCH_CHECK(holds, "cpu_w8a8: ", what); };
  const int64_t dims = x.dim();
  Arguments a = {};
  check(dims > 0 && dims <= MOST_DIMENSIONS && x.size(dims - 1) > 0, "x has no columns");
  a.K = a.row_bytes = x.size(dims - 1);
  a.M = x.numel() / a.K;
  a.N = weight.size(0);
  a.G = 1;
  check(weight.scalar_type() == ScalarType::Char && weight.dim() == 2 && weight.size(1) == a.K,
        "the weight is not int8, with as many columns as x");
  check(scale.scalar_type() == ScalarType::Float && scale.numel() == a.N, "not a scale in float32 for every row");
  a.bits = 8;
  a.group = a.input_group = -1;
  a.x_type = type_of(x);
  a.symmetric = symmetric;
  a.by_rows = a.M <= loops.by_rows_w8a8;
  a.threads = static_cast<int32_t>(torch::stable::get_num_threads());
  a.x = x.data_ptr();
  a.weight = weight.data_ptr();
  a.scale = static_cast<const float*>(scale.data_ptr());
  std::optional<Tensor> sum, bias;
  if (given_sum.has_value()) {
    sum = whole(*given_sum);
    check(sum->scalar_type() == ScalarType::Int && sum->numel() == a.N, "not a sum in int32 for every row");
    a.row_sum = static_cast<const int32_t*>(sum->data_ptr());
  }
  if (given_bias.has_value()) {
    bias = whole(*given_bias);
    a.bias = bias->data_ptr();
    a.bias_type = type_of(*bias);
  }
  if (input_scale.has_value()) {
    check(input_scale->scalar_type() == ScalarType::Float && input_scale->numel() == 1, "not one float32 input scale");
    a.input_scale = static_cast<const float*>(input_scale->data_ptr());
  }
  if (input_zero.has_value()) {
    check(input_zero->scalar_type() == ScalarType::Int && input_zero->numel() == 1, "not one int32 input zero point");
    a.input_zero = static_cast<const int32_t*>(input_zero->data_ptr());
  }
  check(a.row_sum != nullptr || (a.input_zero == nullptr && (a.input_scale != nullptr || symmetric)),
        "tokens with zero points need the sums of rows");
  return product(loops.rounded, a, x);
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
  const int64_t sizes[] = {a.batch, 1, a.heads, a.value_size};
  const Tensor out = empty(query, sizes, 4);
  a.query = query.data_ptr(), a.key = key.data_ptr(), a.value = value.data_ptr(), a.out = out.data_ptr();
  STD_TORCH_CHECK(loops.attend(&a) == 0, "no memory for the scores of ", a.keys, " keys");
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(compress, m) {
  m.def("cpu_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor");
  m.def(
      "cpu_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? bias, int bits, int group_size, int? "
      "input_group) -> Tensor");
  m.def(
      "cpu_w8a8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? row_sum, Tensor? bias, Tensor? input_scale, "
      "Tensor? input_zero, bool symmetric) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(compress, CPU, m) {
  m.impl("cpu_linear", TORCH_BOX(&cpu_linear));
  m.impl("cpu_w8a8", TORCH_BOX(&cpu_w8a8));
  m.impl("cpu_attention", TORCH_BOX(&cpu_attention));
}

}  // namespace

extern "C" void use(const Loops* given) { loops = *given; }
