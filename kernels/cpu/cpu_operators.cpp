// compress::cpu_linear, cpu_w8a8 and cpu_attention, operators of torch's stable C ABI: what stands between a model and the
// loops of cpu_gemm.cpp, where Python's way (gemm.py) would take longer than a small product does.
//
//   [..., N] = x weight^T + bias, in the dtype of x; of the weight there are planar words [N, words], strips [S, L, 64] or
//   rows of int8 [N, K].
//
// compress::cpu_experts and cpu_experts_w8a8 are the same of E weights, one after the other, each times the rows of x that
// go to it: [P, N] of pairs of a row and an expert, sorted by expert.
//
// table: the values of codes of 4 bits in strips, and a factor of all scales, where codes are no numbers.
//
// x is multiplied as it is (no input_group), or rounded to int8, per token (-1) or per token and so many columns. The
// loops are of another library, which this one is given at its start (`use`), compiled for its processor.

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>

#include "cpu_attention.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Product = int32_t (*)(const Arguments*);
using Attend = int32_t (*)(const Attention*);
// By dense blocks (cpu_dense.cpp): less than 0 where a product is left to the loop.
using Dense = int32_t (*)(const Arguments*, int32_t operation);

constexpr int64_t STRIP_ROWS = 16, MOST_DIMENSIONS = 64, TABLE = 17;
// Products of so many tokens, or by weights of so few numbers, are left to the loops; as in gemm.py.
constexpr int64_t FEW_TOKENS = 3, FEW_WEIGHTS = 1 << 16;

struct Loops {
  Product exact, rounded;
  // Tokens up to which rows are read front to back: [strips][rounded].
  int64_t by_rows[2][2];
  int64_t pairs_by_rows;  // of strips and exact bfloat16
  int64_t by_rows_w8a8;
  Attend attend;
  Dense dense;  // null: there is none
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

void check_done(int32_t outcome, const char* what, int64_t count, const char* of) {
  STD_TORCH_CHECK(outcome != NO_PART, "kernels that this takes cannot be compiled (`compress doctor --build` says why); "
                                      "COMPRESS_CPU_KERNELS=0 computes without compiled kernels");
  STD_TORCH_CHECK(outcome == DONE, "no memory ", what, count, of);
}

// The result of a loop, or of dense blocks: 0, or 1 where memory ran out.
int32_t multiply(bool rounded, const Arguments& a) {
  if (loops.dense != nullptr && a.M > FEW_TOKENS && a.N * a.K >= FEW_WEIGHTS) {
    const int32_t done = loops.dense(&a, rounded);
    if (done >= 0) return done;
  }
  return (rounded ? loops.rounded : loops.exact)(&a);
}

// [..., N], which a loop makes of x and arguments that lack no more than the result.
Tensor product(bool rounded, Arguments& a, const Tensor& x) {
  const int64_t dims = x.dim();
  int64_t sizes[MOST_DIMENSIONS];
  std::copy_n(x.sizes().data(), dims, sizes);
  sizes[dims - 1] = a.N;
  const Tensor out = empty(x, sizes, dims);
  a.out = out.data_ptr();
  check_done(multiply(rounded, a), "to pack ", a.M, " tokens");
  return out;
}

// The parts of a weight, or of as many as there are experts (E), as the loops read them; `whole` tensors live as long.
// table: of all experts.
struct Weight {
  Tensor words, scale;
  std::optional<Tensor> zero, bias, row_sum, table;
};

// Bytes from one expert's part to that of the next.
int64_t step(const std::optional<Tensor>& part, int64_t E) {
  return part.has_value() ? part->numel() / E * part->element_size() : 0;
}

std::optional<Tensor> whole(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? std::optional<Tensor>(whole(*tensor)) : std::nullopt;
}

// What a product by words or strips needs beside x and its result. lead: dimensions in front of those of one weight.
Arguments of_words(const Weight& w, int64_t lead, int64_t K, int64_t bits, int64_t group_size, Type x_type,
                   std::optional<int64_t> input_group) {
  const Tensor& words = w.words;
  const bool strips = words.dim() == lead + 3;
  const int64_t E = lead == 0 ? 1 : words.size(0);
  Arguments a = {};
  STD_TORCH_CHECK(words.dim() >= lead + 2 && w.scale.dim() >= lead + 2, "the weight has too few dimensions");
  a.K = K;
  a.N = words.size(lead) * (strips ? STRIP_ROWS : 1);
  a.G = w.scale.size(lead + (strips ? 1 : 0));
  const int64_t row_words = strips ? words.size(lead + 1) * words.size(lead + 2) / STRIP_ROWS : words.size(lead + 1);
  a.row_bytes = strips ? row_words : row_words * 2;
  STD_TORCH_CHECK(a.row_bytes * 8 >= a.K * bits && w.scale.numel() == E * a.G * a.N,
                  "the weight does not hold as many columns as x, or not a scale for every group");
  a.bits = static_cast<int32_t>(bits);
  a.group = group_size;
  a.x_type = x_type;
  a.scale_type = type_of(w.scale);
  a.strips = strips;
  a.planar = !strips;
  a.symmetric = true;
  a.input_group = input_group.value_or(-1);
  a.threads = static_cast<int32_t>(torch::stable::get_num_threads());
  a.weight = words.data_ptr();
  a.scale = w.scale.data_ptr();
  if (w.zero.has_value()) a.zero = static_cast<const uint8_t*>(w.zero->data_ptr());
  if (w.table.has_value()) {
    STD_TORCH_CHECK(strips && bits == 4 && !input_group.has_value() && w.table->numel() == TABLE &&
                        w.table->scalar_type() == ScalarType::Float,
                    "a table is for strips of 4 bits and inputs that are not rounded: 16 values and a factor, in float32");
    a.table = static_cast<const float*>(w.table->data_ptr());
  }
  if (w.bias.has_value()) {
    a.bias = w.bias->data_ptr();
    a.bias_type = type_of(*w.bias);
  }
  return a;
}

// Tokens of a product by words or strips up to which rows are read front to back.
int64_t rows_up_to(const Arguments& a, bool rounded) {
  const bool pairs = a.strips && a.x_type == BF16 && !rounded;
  return pairs ? loops.pairs_by_rows : loops.by_rows[a.strips][rounded];
}

Tensor cpu_linear(const Tensor& given, const Tensor& words, const Tensor& scale, const std::optional<Tensor>& zero,
                  const std::optional<Tensor>& bias, int64_t bits, int64_t group_size,
                  std::optional<int64_t> input_group, const std::optional<Tensor>& table) {
  const Tensor x = whole(given);
  const Weight weight = {whole(words), whole(scale), whole(zero), whole(bias), std::nullopt, whole(table)};
  const int64_t dims = x.dim();
  STD_TORCH_CHECK(dims > 0 && dims <= MOST_DIMENSIONS && x.size(dims - 1) > 0, "cpu_linear: x has no columns");
  const bool rounded = input_group.has_value();
  Arguments a = of_words(weight, 0, x.size(dims - 1), bits, group_size, type_of(x), input_group);
  a.M = x.numel() / a.K;
  a.by_rows = a.M <= rows_up_to(a, rounded);
  a.x = x.data_ptr();
  return product(rounded, a, x);
}

// What a product by rows of int8 needs beside x and its result, with checks; lead as in `of_words`.
Arguments of_rows(const Weight& w, const std::optional<Tensor>& input_scale, const std::optional<Tensor>& input_zero,
                  int64_t lead, int64_t K, Type x_type, bool symmetric) {
  const auto check = [](bool holds, const char* what) { STD_TORCH_CHECK(holds, "cpu_w8a8: ", what); };
  const Tensor& weight = w.words;
  check(weight.scalar_type() == ScalarType::Char && weight.dim() == lead + 2 && weight.size(lead + 1) == K,
        "the weight is not int8, with as many columns as x");
  const int64_t N = weight.size(lead), rows = lead == 0 ? N : weight.size(0) * N;
  check(w.scale.scalar_type() == ScalarType::Float && w.scale.numel() == rows, "not a scale in float32 for every row");
  Arguments a = {};
  a.K = a.row_bytes = K;
  a.N = N;
  a.G = 1;
  a.bits = 8;
  a.group = a.input_group = -1;
  a.x_type = x_type;
  a.symmetric = symmetric;
  a.threads = static_cast<int32_t>(torch::stable::get_num_threads());
  a.weight = weight.data_ptr();
  a.scale = static_cast<const float*>(w.scale.data_ptr());
  if (w.row_sum.has_value()) {
    check(w.row_sum->scalar_type() == ScalarType::Int && w.row_sum->numel() == rows, "not a sum in int32 for every row");
    a.row_sum = static_cast<const int32_t*>(w.row_sum->data_ptr());
  }
  if (w.bias.has_value()) {
    a.bias = w.bias->data_ptr();
    a.bias_type = type_of(*w.bias);
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
  return a;
}

// Of rows of int8 [N, K], one fp32 scale each, and x rounded to int8: per token, or by a scale [1] and a zero point [1].
// row_sum: int32 [N], needed where tokens have zero points.
Tensor cpu_w8a8(const Tensor& given, const Tensor& words, const Tensor& scale, const std::optional<Tensor>& sum,
                const std::optional<Tensor>& bias, const std::optional<Tensor>& input_scale,
                const std::optional<Tensor>& input_zero, bool symmetric) {
  const Tensor x = whole(given);
  const Weight weight = {whole(words), whole(scale), std::nullopt, whole(bias), whole(sum)};
  const int64_t dims = x.dim();
  STD_TORCH_CHECK(dims > 0 && dims <= MOST_DIMENSIONS && x.size(dims - 1) > 0, "cpu_w8a8: x has no columns");
  Arguments a = of_rows(weight, input_scale, input_zero, 0, x.size(dims - 1), type_of(x), symmetric);
  a.M = x.numel() / a.K;
  a.by_rows = a.M <= loops.by_rows_w8a8;
  a.x = x.data_ptr();
  return product(true, a, x);
}

template <class T>
void advance(const T*& pointer, int64_t bytes) {
  pointer = reinterpret_cast<const T*>(reinterpret_cast<const char*>(pointer) + bytes);
}

// [P, N] of x [M, K] and weights one after the other, which `a` is of the first of: rows start[e] to start[e + 1] are
// those of expert e, of x itself or of what `token` gathers; the rest, of no expert, is zero. limit: as `rows_up_to`.
Tensor by_expert(bool rounded, Arguments a, const Weight& w, const Tensor& x, const std::optional<Tensor>& token,
                 const Tensor& start, int64_t limit) {
  const auto check = [](bool holds, const char* what) { STD_TORCH_CHECK(holds, "cpu_experts: ", what); };
  const int64_t E = w.words.size(0), M = x.size(0), pairs = token.has_value() ? token->numel() : M;
  check(start.scalar_type() == ScalarType::Int && start.numel() == E + 1, "not a start in int32 for every expert");
  check(!token.has_value() || token->scalar_type() == ScalarType::Int, "tokens are not int32");
  const int32_t* first = static_cast<const int32_t*>(start.data_ptr());
  const int32_t* row_of = token.has_value() ? static_cast<const int32_t*>(token->data_ptr()) : nullptr;
  int64_t most = 0;
  check(first[0] == 0 && first[E] <= pairs, "starts are not those of the pairs");
  for (int64_t e = 0; e < E; ++e) {
    check(first[e] <= first[e + 1], "starts are not sorted");
    most = std::max<int64_t>(most, first[e + 1] - first[e]);
  }
  const int64_t sizes[] = {pairs, a.N};
  const Tensor out = empty(x, sizes, 2);
  const int64_t row = a.K * size_of(a.x_type), out_row = a.N * size_of(a.x_type);
  const char* rows = static_cast<const char*>(x.data_ptr());
  char* to = static_cast<char*>(out.data_ptr());
  const std::unique_ptr<char[]> gathered(row_of == nullptr ? nullptr : new char[most * row]);
  const int64_t words = step(w.words, E), scale = step(w.scale, E), zero = step(w.zero, E), bias = step(w.bias, E),
                sum = step(w.row_sum, E);
  for (int64_t e = 0; e < E; ++e) {
    a.M = first[e + 1] - first[e];
    if (a.M > 0) {
      a.x = rows + first[e] * row;
      for (int64_t i = 0; row_of != nullptr && i < a.M; ++i) {
        const int64_t from = row_of[first[e] + i];
        check(0 <= from && from < M, "there is no such token");
        std::memcpy(gathered.get() + i * row, rows + from * row, row);
      }
      if (row_of != nullptr) a.x = gathered.get();
      a.out = to + first[e] * out_row;
      a.by_rows = a.M <= limit;
      check_done(multiply(rounded, a), "to pack ", a.M, " tokens");
    }
    advance(a.weight, words), advance(a.scale, scale), advance(a.zero, zero), advance(a.bias, bias);
    advance(a.row_sum, sum);
  }
  std::memset(to + first[E] * out_row, 0, (pairs - first[E]) * out_row);
  return out;
}

Tensor cpu_experts(const Tensor& given, const Tensor& words, const Tensor& scale, const std::optional<Tensor>& zero,
                   const std::optional<Tensor>& bias, const std::optional<Tensor>& token, const Tensor& start,
                   int64_t bits, int64_t group_size, std::optional<int64_t> input_group,
                   const std::optional<Tensor>& table) {
  const Tensor x = whole(given);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "cpu_experts: x is not of rows with columns");
  const Weight weight = {whole(words), whole(scale), whole(zero), whole(bias), std::nullopt, whole(table)};
  const bool rounded = input_group.has_value();
  const Arguments a = of_words(weight, 1, x.size(1), bits, group_size, type_of(x), input_group);
  return by_expert(rounded, a, weight, x, whole(token), whole(start), rows_up_to(a, rounded));
}

Tensor cpu_experts_w8a8(const Tensor& given, const Tensor& words, const Tensor& scale, const std::optional<Tensor>& sum,
                        const std::optional<Tensor>& bias, const std::optional<Tensor>& input_scale,
                        const std::optional<Tensor>& input_zero, const std::optional<Tensor>& token, const Tensor& start,
                        bool symmetric) {
  const Tensor x = whole(given);
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) > 0, "cpu_experts_w8a8: x is not of rows with columns");
  const Weight weight = {whole(words), whole(scale), std::nullopt, whole(bias), whole(sum)};
  const Arguments a = of_rows(weight, input_scale, input_zero, 1, x.size(1), type_of(x), symmetric);
  return by_expert(true, a, weight, x, whole(token), whole(start), loops.by_rows_w8a8);
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
  check_done(loops.attend(&a), "for the scores of ", a.keys, " keys");
  return out;
}

STABLE_TORCH_LIBRARY_FRAGMENT(compress, m) {
  m.def("cpu_attention(Tensor query, Tensor key, Tensor value, Tensor? mask, float scale) -> Tensor");
  m.def(
      "cpu_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? bias, int bits, int group_size, int? "
      "input_group, Tensor? table=None) -> Tensor");
  m.def(
      "cpu_experts(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? bias, Tensor? token, Tensor start, int "
      "bits, int group_size, int? input_group, Tensor? table=None) -> Tensor");
  m.def(
      "cpu_experts_w8a8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? row_sum, Tensor? bias, Tensor? "
      "input_scale, Tensor? input_zero, Tensor? token, Tensor start, bool symmetric) -> Tensor");
  m.def(
      "cpu_w8a8(Tensor x, Tensor weight, Tensor weight_scale, Tensor? row_sum, Tensor? bias, Tensor? input_scale, "
      "Tensor? input_zero, bool symmetric) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(compress, CPU, m) {
  m.impl("cpu_linear", TORCH_BOX(&cpu_linear));
  m.impl("cpu_w8a8", TORCH_BOX(&cpu_w8a8));
  m.impl("cpu_experts", TORCH_BOX(&cpu_experts));
  m.impl("cpu_experts_w8a8", TORCH_BOX(&cpu_experts_w8a8));
  m.impl("cpu_attention", TORCH_BOX(&cpu_attention));
}

}  // namespace

extern "C" void use(const Loops* given) { loops = *given; }
