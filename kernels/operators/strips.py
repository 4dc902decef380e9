"""The linear of codes in strips (`layouts.strips.Strips`) as a torch operator: CPUs use it in place of planar words,
where the weight can be laid out so (`lay_in_strips`).

The numbers are those of `operators.words.weight_only_linear` and `int8_activation_linear` on the same codes, up to the
order of the sums, and with values of the weight in fp32 that those round to the type of the scales. Where no loop of
`cpu_gemm` takes a call, the codes are laid out in planar words again for it, and those operators have it.

Shapes: x [..., K] in any leading shape, M tokens once flattened, N outputs.
"""

from typing import Any

from torch import Tensor

from compress.kernels.cpu import build as cpu
from compress.kernels.cpu import gemm as cpu_gemm
from compress.kernels.cpu.arguments import Operation, strips_operation
from compress.kernels.cpu.layouts import pack_strips
from compress.kernels.errors import InputError
from compress.kernels.layouts.strips import (
    BYTE,
    NIBBLE,
    ROWS,
    Strips,
    lines_of,
    unpack_strips,
    why_not_strips,
)
from compress.kernels.layouts.words import Planar
from compress.kernels.operators import words as ops
from compress.kernels.operators.int8_activation import planar_linear, why_not_input_group
from compress.kernels.operators.register import operator


def why_not_lay_in_strips(rows: int, columns: int, bits: int, group_size: int, int8_input: bool) -> list[str]:
    """Reasons why codes of so many bits are not better off in strips on this CPU; empty when they are."""
    operation: Operation = "int8_strips" if int8_input else "strips"
    reasons = why_not_strips(rows, bits) + cpu_gemm.why_not_sizes(operation, columns, group_size)
    if int8_input and bits == BYTE:
        reasons.append("int8 inputs times codes of 8 bits are multiplied from planar words")
    return reasons or [*cpu.why_not()]


def lay_in_strips(weight: Planar, columns: int, int8_input: bool) -> Strips | None:
    """A weight of `columns` columns on a CPU in strips; None where it is better off in planar words."""
    if weight.words.device.type != "cpu":
        return None
    sizes = (len(weight.words), columns, weight.bits, weight.group_size)
    return None if why_not_lay_in_strips(*sizes, int8_input) else pack_strips(weight, columns)


@operator("compress::strips_linear")
def strips_linear(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    input_group: int | None,
    batch_invariant: bool = False,
) -> Tensor:
    """[..., N] = x weight^T + bias, in the dtype of x. The weight is the parts of a `Strips`.

    x is multiplied as it is (input_group None), or becomes int8, symmetric, fitted to every token (-1), or to every
    token and block of `input_group` columns. batch_invariant: as in `ops`.
    """
    check_lines(words, x.shape[-1], bits)
    reasons = [] if input_group is None else why_not_input_group(input_group)
    if reasons:
        raise InputError(reasons[0])
    weight = Strips(words, scale, zero, group_size, bits)
    operation = strips_operation(input_group is not None, x.dtype)
    if (input_group is None or bits == NIBBLE) and not cpu_gemm.why_not(operation, x, scale, group_size):
        out_MN = cpu_gemm.strips(x.reshape(-1, x.shape[-1]), weight, bias, input_group, batch_invariant)
        return out_MN.view(*x.shape[:-1], len(words) * ROWS)
    planar = unpack_strips(weight, x.shape[-1])
    return planar_linear(x, *planar[:3], bias, planar.bits, group_size, input_group, batch_invariant)


def check_lines(words: Tensor, columns: int, bits: int) -> None:
    """Raises InputError for words that do not hold so many columns."""
    if words.shape[1] != lines_of(columns, bits):
        raise InputError(
            f"x has {columns} columns; strips of {words.shape[1]} lines, codes of {bits} bits, do not hold as many"
        )


@strips_linear.register_fake
def _(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    bias: Tensor | None,
    bits: int,
    group_size: int,
    input_group: int | None,
    batch_invariant: bool = False,
) -> Tensor:
    return x.new_empty(*x.shape[:-1], words.shape[0] * ROWS)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, words, scale, zero, _, bits, group_size, *_ = inputs
    ctx.save_for_backward(words, scale, zero)
    ctx.layout = (bits, group_size, x.shape[-1])


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return strips_gradient(grad, *ctx.saved_tensors, *ctx.layout), *(None,) * 8


strips_linear.register_autograd(_gradient, setup_context=_save)


@operator("compress::strips_gradient")
def strips_gradient(
    grad: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group_size: int, columns: int
) -> Tensor:
    """[..., K] = grad weight, in the dtype of grad [..., N]: the input gradient of `strips_linear`."""
    planar = unpack_strips(Strips(words, scale, zero, group_size, bits), columns)
    return ops.weight_only_gradient(grad, *planar[:3], planar.bits, group_size, columns)


@strips_gradient.register_fake
def _(
    grad: Tensor, words: Tensor, scale: Tensor, zero: Tensor | None, bits: int, group_size: int, columns: int
) -> Tensor:
    return grad.new_empty(*grad.shape[:-1], columns)


def _save_gradient(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *weight, bits, group_size, _ = inputs
    ctx.save_for_backward(*weight)
    ctx.layout = (bits, group_size)


def _gradient_of_gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return strips_linear(grad, *ctx.saved_tensors, None, *ctx.layout, None), *(None,) * 6


strips_gradient.register_autograd(_gradient_of_gradient, setup_context=_save_gradient)
