"""A matrix of a low rank: W = left right, or (left diag(scale)) (diag(scale) right) of int8 codes.

N outputs, K inputs, r ranks.

                16 bits                 8 bits
    left        model dtype [N, r]      int8 [N, r]
    right       model dtype [r, K]      int8 [r, K]
    scale                               model dtype [r]

A layer multiplies by right, then by left: r (N + K) products a token instead of N K. One scale serves both factors of
a rank, because only its square counts; the square itself may be too small a number for float16.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from compress.errors import InputError
from compress.kernels import reference
from compress.weights.grid import Grid, quantize, round_scale
from compress.weights.roles import Role
from compress.weights.terms import FLOATS, Format, Part, Tensors

WHOLE_BITS, CODE_BITS = 16, 8
CODES = Grid(bits=CODE_BITS, narrow=True)


@dataclass(frozen=True, kw_only=True)
class LowRank(Format):
    """rank: columns of left. bits: 16, numbers in the model's dtype, or 8, codes with one scale per rank."""

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
        # In float64, where neither the order of the sum nor how many rows there are decides the last place.
        left, right = factors(parts, torch.float64)
        return (left @ right).to(stored_dtype(parts))

    def product(self, x: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        left, right = factors(parts, x.dtype)
        return x @ right.t() @ left.t()

    def slack(self, x_MK: Tensor, weight_NK: Tensor, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Each of the two products is rounded, with factors that are; the values themselves are rounded once more."""
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
    """What the values are rounded to."""
    return parts["scale" if "scale" in parts else "left"].dtype


def factors(parts: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(left [N, r], right [r, K]) as numbers, each with its share of the scale."""
    left, right = parts["left"].to(dtype), parts["right"].to(dtype)
    if "scale" not in parts:
        return left, right
    scale = parts["scale"].to(dtype)
    return left * scale, scale.unsqueeze(1) * right


def _off(x_MK: Tensor, weight_NK: Tensor, out_MN: Tensor, dtype: torch.dtype) -> Tensor:
    """How far one product may be from the exact one."""
    return reference.tolerance(x_MK, weight_NK, out_MN, dtype) + reference.weight_rounding(x_MK, weight_NK, dtype)


def low_rank(basis_Nr: Tensor, weight_NK: Tensor, dtype: torch.dtype, bits: int = WHOLE_BITS) -> Tensors:
    """The term whose left spans what `basis` does, whose right is the best there is beside it, as they are stored.

    For one left, one right is the best under every Hessian: the least-squares solution. It is found for the left that
    is stored, and so makes up for how that is rounded. Arguments in float64.
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
    return Tensors(LowRank(rank=basis_Nr.shape[1], bits=bits), parts, rows, columns)


def _beside(left_Nr: Tensor, weight_NK: Tensor) -> Tensor:
    """right [r, K] of least |W - left right|. The columns of left are nearly orthonormal, or zero."""
    return torch.linalg.pinv(left_Nr.t() @ left_Nr, hermitian=True) @ (left_Nr.t() @ weight_NK)


def check_bits(name: str, bits: int) -> None:
    """Refuse a width that factors do not have. Raises InputError."""
    if bits not in (WHOLE_BITS, CODE_BITS):
        raise InputError(f"{name} {bits}; allowed: {WHOLE_BITS} (the model's dtype), {CODE_BITS} (codes)")
