"""The linears of experts as torch operators: every token times the weights of the experts that it goes to.

    routing = sort_by_expert(expert_MT, E)                       once per layer of experts
    h_PN = grouped_words(x_MK, ..., *routing[:2], ...)           codes in words
    h_PN = grouped_w8a8(x_MK, ..., *routing[:2], ...)            w8a8, x rounded once per token
    out_MN = combine(h_PN, routing, weight_MT)                   sum over the experts of a token

Shapes: M tokens of T experts each (top-k), P = M T pairs, sorted by expert; E experts, N outputs, K inputs, G groups.
A token may go to an expert twice, an expert may have no token. Expert E is none: its pairs come last, as zeros.

Paths, the same numbers up to the order of the sums: C++ on a CPU where no gradient is asked for (`cpu.direct`); one
launch of Triton for all experts (`triton.grouped_gemm`), where it has nothing against the weights
(`words.why_not_weight_only`, `int8_rows.why_not_w8a8`); else a loop over the experts that have tokens, each by the
operator of `words` or `int8_rows`. Only x gets a gradient.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compress.kernels.cpu import direct
from compress.kernels.errors import InputError
from compress.kernels.layouts.strips import lines_of
from compress.kernels.layouts.words import STRIPS_DIMENSIONS, CodeWords, planar_words
from compress.kernels.operators.int8_rows import w8a8_linear, why_not_w8a8
from compress.kernels.operators.register import gradient_operator, operator
from compress.kernels.operators.words import rows_of_words, why_not_weight_only, words_gradient, words_linear


class Routing(NamedTuple):
    """Pairs sorted by expert. token int32 [P]: their tokens; start int32 [E + 1]: the first pair of each expert, and of
    those without; place int64 [P]: which of the pairs [M, T] each is."""

    token: Tensor
    start: Tensor
    place: Tensor


def sort_by_expert(expert_MT: Tensor, experts: int) -> Routing:
    """The pairs of tokens and experts, any integers from 0 to `experts` (none). Waits for nothing on a GPU."""
    chosen, place = expert_MT.flatten().sort(stable=True)
    start = torch.searchsorted(chosen, torch.arange(experts + 1, dtype=chosen.dtype, device=chosen.device))
    token = torch.div(place, expert_MT.shape[1], rounding_mode="floor")
    return Routing(token.to(torch.int32), start.to(torch.int32), place)


def combine(out_PN: Tensor, routing: Routing, weight_MT: Tensor) -> Tensor:
    """[M, N] the outputs of each token's experts, weighted and summed in fp32, in the dtype of out."""
    by_token = torch.empty_like(out_PN)
    by_token[routing.place] = out_PN
    parts_MTN = by_token.view(*weight_MT.shape, -1).to(torch.float32)
    return (parts_MTN * weight_MT.to(torch.float32).unsqueeze(-1)).sum(1).to(out_PN.dtype)


def reference(x_MK: Tensor, weight_ENK: Tensor, token_P: Tensor, start_E: Tensor, bias_EN: Tensor | None) -> Tensor:
    """[P, N] by dense weights in the dtype of x, an expert after the other: the truth of every path."""

    def product(x_MK: Tensor, e: int) -> Tensor:
        return torch.nn.functional.linear(x_MK, weight_ENK[e], _of(bias_EN, e))

    return _by_expert(x_MK, token_P, start_E, weight_ENK.shape[1], product)


def _experts(start_E: Tensor, pairs: int) -> Iterator[tuple[int, slice]]:
    """(expert, its pairs) of experts that have any."""
    ends = start_E.tolist()
    assert 0 <= ends[0] <= ends[-1] <= pairs
    return ((e, slice(first, last)) for e, (first, last) in enumerate(pairwise(ends)) if first < last)


def _tokens(x: Tensor, token: Tensor | None) -> Tensor:
    """The tokens of pairs, which are the rows of x where they are None."""
    return torch.arange(len(x), dtype=torch.int32, device=x.device) if token is None else token


def _by_expert(
    x_MK: Tensor, token_P: Tensor, start_E: Tensor, N: int, product: Callable[[Tensor, int], Tensor]
) -> Tensor:
    """[P, N] by a product per expert."""
    out_PN = x_MK.new_zeros(len(token_P), N)
    for e, pairs in _experts(start_E, len(token_P)):
        out_PN[pairs] = product(x_MK[token_P[pairs].long()], e)
    return out_PN


def _of(parts: Tensor | None, e: int) -> Tensor | None:
    return None if parts is None else parts[e]


def _check(x: Tensor, columns: int, wanted: int, experts: int, start: Tensor) -> None:
    if x.dim() != 2 or columns != wanted:
        raise InputError(f"x is {list(x.shape)}; allowed: tokens by the {columns} columns that the weights hold")
    if experts == 0 or len(start) != experts + 1:
        raise InputError(f"{len(start)} starts for {experts} experts; allowed: one for each and one for none")


def _to_tokens(
    grad_PN: Tensor,
    token_P: Tensor | None,
    start_E: Tensor,
    shape: tuple[int, ...],
    back: Callable[[Tensor, int], Tensor],
) -> Tensor:
    """[M, K] = shape, the gradients of x by each expert, summed in fp32 (fp64 for fp64)."""
    work = torch.promote_types(grad_PN.dtype, torch.float32)
    sums_MK = grad_PN.new_zeros(shape, dtype=work)
    token_P = _tokens(grad_PN, token_P)
    for e, pairs in _experts(start_E, len(token_P)):
        sums_MK.index_add_(0, token_P[pairs].long(), back(grad_PN[pairs], e).to(work))
    return sums_MK.to(grad_PN.dtype)


def _words_by_cpp(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    token: Tensor | None,
    start: Tensor,
    bits: int,
    group_size: int,
    input_group: int | None = None,
    table: Tensor | None = None,
) -> Tensor | None:
    """The products by `cpu.direct`; None where that has none of them."""
    shape, sizes = words.shape[1:], (bits, group_size, input_group)
    product = direct.product("experts", x, shape, *sizes, table is not None) if len(start) == len(words) + 1 else None
    return product and product(x, words, scale, zero, bias, token, start, *sizes, table)


@operator("compress::grouped_words", direct.like_experts, at_once=_words_by_cpp)
def grouped_words(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    token: Tensor | None,
    start: Tensor,
    bits: int,
    group_size: int,
    input_group: int | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """[P, N] = x_token(p) weight_e(p)^T + bias_e(p), in the dtype of x [M, K], of pairs sorted by expert.

    words, scale and zero: the parts of one `layouts.words.CodeWords` per expert, stacked; bias [E, N]. token and start
    as in `Routing`; without token the pairs are the rows of x. input_group and table as in `words.words_linear`.
    """
    K, lines = x.shape[-1], words.dim() == STRIPS_DIMENSIONS + 1
    _check(x, words.shape[2], lines_of(K, bits) if lines else planar_words(K, bits), len(words), start)
    weight = CodeWords(words, scale, zero, group_size, bits)
    x_MK, token = x if x.stride(1) == 1 else x.contiguous(), _tokens(x, token)
    if input_group is None and table is None and not why_not_weight_only(x_MK, weight):
        from compress.kernels.triton.grouped_gemm import grouped_gemm

        return grouped_gemm(x_MK, token, start, weight, bias)

    def product(x_MK: Tensor, e: int) -> Tensor:
        held = (words[e], scale[e], _of(zero, e), _of(bias, e))
        return words_linear(x_MK, *held, bits, group_size, input_group, False, table)

    return _by_expert(x_MK, token, start, rows_of_words(words[0]), product)


@gradient_operator(grouped_words, bias=None, input_group=None)
def grouped_words_gradient(
    grad: Tensor,
    shape: tuple[int, ...],
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    token: Tensor | None,
    start: Tensor,
    bits: int,
    group_size: int,
    input_group: int | None = None,
    table: Tensor | None = None,
) -> Tensor:
    """[M, K] the gradient of x in `grouped_words`, given that of its result [P, N]."""

    def back(grad_MN: Tensor, e: int) -> Tensor:
        held = (words[e], scale[e], _of(zero, e), None, bits, group_size, None, False, table)
        return words_gradient(grad_MN, (len(grad_MN), shape[1]), *held)

    return _to_tokens(grad, token, start, shape, back)


def _rows_by_cpp(x: Tensor, weight: Tensor, *others: Any) -> Tensor | None:
    """The products by `cpu.direct`; None where that has none of them."""
    _, row_sum, _, _, zero, _, start, symmetric = others
    if len(start) != len(weight) + 1 or (row_sum is None and not (symmetric and zero is None)):
        return None
    product = direct.product("experts_w8a8", x, weight.shape)
    return product and product(x, weight, *others)


@operator("compress::grouped_w8a8", direct.like_rows_of_experts, at_once=_rows_by_cpp)
def grouped_w8a8(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    row_sum: Tensor | None,
    bias: Tensor | None,
    input_scale: Tensor | None,
    input_zero: Tensor | None,
    token: Tensor | None,
    start: Tensor,
    symmetric: bool,
) -> Tensor:
    """[P, N] = quantize(x)_token(p) weight_e(p)^T scaled + bias_e(p), in the dtype of x [M, K], of pairs sorted by
    expert.

    weight int8 [E, N, K]; weight_scale fp32, row_sum int32 and bias [E, N]; input_scale, input_zero and symmetric as in
    `int8_rows.w8a8_linear`; token and start as in `grouped_words`. A token is rounded once, whatever its experts.
    """
    _check(x, weight.shape[2], x.shape[-1], len(weight), start)
    if row_sum is None and (input_zero is not None or (input_scale is None and not symmetric)):
        raise InputError("asymmetric activations need the row sums of the weights")
    x_MK, token = x if x.stride(1) == 1 else x.contiguous(), _tokens(x, token)
    if not why_not_w8a8(x_MK, weight[0]):
        from compress.kernels.triton.grouped_int8 import grouped_int8_gemm
        from compress.kernels.triton.int8_quantize import quantize_static, quantize_tokens

        if input_scale is None:
            codes_MK, scale, zero = quantize_tokens(x_MK, symmetric)
        else:
            codes_MK, scale, zero = quantize_static(x_MK, input_scale, input_zero), input_scale, input_zero
        return grouped_int8_gemm(codes_MK, token, start, scale, zero, weight, weight_scale, row_sum, bias, x.dtype)

    def product(x_MK: Tensor, e: int) -> Tensor:
        return w8a8_linear(
            x_MK, weight[e], weight_scale[e], _of(row_sum, e), _of(bias, e), input_scale, input_zero, symmetric
        )

    return _by_expert(x_MK, token, start, weight.shape[1], product)


@gradient_operator(grouped_w8a8, twice=False)
def grouped_w8a8_gradient(
    grad: Tensor, shape: tuple[int, ...], weight: Tensor, weight_scale: Tensor, *others: Any
) -> Tensor:
    """[M, K] the gradient of x in `grouped_w8a8`, straight through its rounding."""
    token, start = others[4:6]

    def back(grad_MN: Tensor, e: int) -> Tensor:
        return grad_MN @ (weight[e].to(torch.float32) * weight_scale[e].unsqueeze(-1)).to(grad_MN.dtype)

    return _to_tokens(grad, token, start, shape, back)
