"""A matrix of a low rank: W = left right, or (left diag(scale)) (diag(scale) right) of int8 codes.

N outputs, K inputs, r ranks.

                16 bits                 8 bits
    left        model dtype [N, r]      int8 [N, r]
    right       model dtype [r, K]      int8 [r, K]
    scale                               model dtype [r]

A layer multiplies by right, then by left: r (N + K) products a token instead of N K. One scale serves both factors of
a rank, because only its square matters; the square itself may be too small for float16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.kernels import reference
from compress.weights.grid import Grid, quantize
from compress.weights.roles import Role
from compress.weights.scale_numbers import round_scale
from compress.weights.terms import FLOATS, Format, Part, Tensors

WHOLE_BITS, CODE_BITS = 16, 8
CODES = Grid(bits=CODE_BITS, narrow=True)


@dataclass(frozen=True, kw_only=True)
class LowRankFactors(Format):
    """Two factors. rank: columns of left. bits: 16 for numbers in the model's dtype, 8 for codes with one scale per
    rank."""

    kind: ClassVar[str] = "low-rank"

    rank: int
    bits: int = WHOLE_BITS

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        dtypes = FLOATS if self.bits == WHOLE_BITS else (torch.int8,)
        factors = {
            "left": Part((rows, self.rank), dtypes, by_row=True, role=Role.FACTORS),
            "right": Part((self.rank, columns), dtypes, role=Role.FACTORS),
        }
        scale = Part((self.rank,), FLOATS, role=Role.FACTORS)
        return factors if self.bits == WHOLE_BITS else {**factors, "scale": scale}

    def values(self, parts: Mapping[str, Tensor]) -> Tensor:
        # In float64, so that neither the order of the sum nor the number of rows decides the last place.
        left, right = factors(parts, torch.float64)
        return (left @ right).to(stored_dtype(parts))

    def product(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        left, right = factors(parts, x.dtype)
        return x @ right.t() @ left.t()

    def slack(self, x_MK: Tensor, weight_NK: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """The bound adds up the rounding of both products, of both factors and of the values themselves."""
        left, right = factors(parts, torch.float64)
        between_Mr = x_MK @ right.t()
        off_Mr = _off(x_MK, right, between_Mr, dtype)
        own_MN = _off(between_Mr, left, between_Mr @ left.t(), dtype)
        return off_Mr @ left.abs().t() + own_MN + reference.weight_rounding(x_MK, weight_NK, dtype)

    def problem(self, rows: int, columns: int) -> str | None:
        if self.bits not in (WHOLE_BITS, CODE_BITS):
            return f"has factors of {self.bits} bits; there are {WHOLE_BITS} and {CODE_BITS}"
        return f"has rank {self.rank}; there is none below 0" if self.rank < 0 else None

    def words(self, inputs: Grid | None) -> str:
        return f"rank {self.rank}" + (f" of {self.bits} bits" if self.bits != WHOLE_BITS else "")


def stored_dtype(parts: Mapping[str, Tensor]) -> torch.dtype:
    """The dtype to which the values are rounded."""
    return parts["scale" if "scale" in parts else "left"].dtype


def factors(parts: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(left [N, r], right [r, K]) as numbers; each is multiplied by the scale."""
    left, right = parts["left"].to(dtype), parts["right"].to(dtype)
    if "scale" not in parts:
        return left, right
    scale = parts["scale"].to(dtype)
    return left * scale, scale.unsqueeze(1) * right


def _off(x_MK: Tensor, weight_NK: Tensor, out_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """The largest error of one product [M, N], from its own rounding and that of its weight."""
    return reference.tolerance(x_MK, weight_NK, out_MN, dtype) + reference.weight_rounding(x_MK, weight_NK, dtype)


def low_rank(basis_Nr: Tensor, weight_NK: Tensor, dtype: torch.dtype, bits: int = WHOLE_BITS) -> Tensors:
    """The term whose left spans the columns of `basis` and whose right is the best for it, both as they are stored.

    For a given left, the least-squares solution is the best right under every Hessian. It is solved for the rounded
    left, and so compensates for its rounding. Arguments in float64; dtype: the model's.
    """
    if bits == WHOLE_BITS:
        left = basis_Nr.to(dtype)
        parts = {"left": left, "right": _beside(left.to(basis_Nr.dtype), weight_NK).to(dtype)}
    else:
        of_left = quantize(basis_Nr.t(), CODES, torch.float64)
        right = _beside(of_left.dequantize().t(), weight_NK)
        both = quantize(right, CODES, torch.float64).scale * of_left.scale
        scale = round_scale(both.sqrt(), dtype)
        of_right = quantize(right, CODES, torch.float64, scale.square() / of_left.scale)
        left = of_left.codes.t().contiguous()
        parts = {"left": left, "right": of_right.codes, "scale": scale[:, 0].to(dtype)}
    rows, columns = weight_NK.shape
    return Tensors(LowRankFactors(rank=basis_Nr.shape[1], bits=bits), parts, rows, columns)


def _beside(left_Nr: Tensor, weight_NK: Tensor) -> Tensor:
    """The right [r, K] that minimizes |W - left right|. The columns of left must be nearly orthonormal, or zero."""
    return torch.linalg.pinv(left_Nr.t() @ left_Nr, hermitian=True) @ (left_Nr.t() @ weight_NK)


def check_bits(name: str, bits: int) -> None:
    """Raises InputError for a number of bits that factors cannot have. name: of the option."""
    if bits not in (WHOLE_BITS, CODE_BITS):
        raise InputError(f"{name} {bits}; allowed: {WHOLE_BITS} (the model's dtype), {CODE_BITS} (codes)")
