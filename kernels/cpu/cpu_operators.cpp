// compress::cpu_linear, an operator of torch's stable C ABI: what stands between a model and the loops of cpu_gemm.cpp,
// where Python's way (gemm.py) would take longer than a small product does.
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

#include "cpu_work.h"

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Product = int32_t (*)(const Arguments*);

constexpr int64_t STRIP_ROWS = 16;

struct Loops {
  Product exact, rounded;
  // Tokens up to which rows are read front to back: [strips][rounded].
  int64_t by_rows[2][2];
};

Loops loops;

Type type_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float: return F32;
    case ScalarType::Half: return F16;
    case ScalarType::BFloat16: return BF16;
    default: STD_TORCH_CHECK(false, "cpu_linear computes in float32, float16 and bfloat16");
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
  a.by_rows = a.M <= loops.by_rows[strips][input_group.has_value()];
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

STABLE_TORCH_LIBRARY_FRAGMENT(compress, m) {
  m.def(
      "cpu_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, Tensor? bias, int bits, int group_size, int? "
      "input_group) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(compress, CPU, m) { m.impl("cpu_linear", TORCH_BOX(&cpu_linear)); }

}  // namespace

extern "C" void use(const Loops* given) { loops = *given; }
