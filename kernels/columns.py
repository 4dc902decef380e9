"""Columns of a weight that are decided one after another, as the loops of a CPU and of a GPU read them.

Shapes: K columns, B of them in a block, N outputs, G groups, g members of a group. Outputs lie side by side: every
array is [columns, N].
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Range = Literal["asymmetric", "signed scale", "unsigned", "magnitude"]
RANGES: tuple[Range, ...] = ("asymmetric", "signed scale", "unsigned", "magnitude")


@dataclass(frozen=True)
class Rounding:
    """Codes from lowest to highest, and the dtype of scales, to which values are rounded. free_zero: zero points are no
    whole numbers. table [2, L] float32: codes are the levels of its first row, rising; the second has the largest
    number that is rounded to each (`weights.levels`); None: they are numbers themselves."""

    lowest: int
    highest: int
    scale_dtype: torch.dtype
    free_zero: bool = False
    table: Tensor | None = None


@dataclass(frozen=True)
class RangeSearch:
    """A search for scales: among these shares of a group's whole range, the one of least squared error; without shares,
    the whole range. divisor: turns a range into a scale. least, largest: magnitudes of scales, normal numbers of
    float32; half: those of float16 alone. importance: of the error of each member [g], or of each column [K] where a
    sweep searches the scale of each `group` of these; None: all the same."""

    factors: tuple[float, ...]
    kind: Range
    divisor: float
    rounding: Rounding
    least: float
    largest: float
    half: bool = False
    importance: Tensor | None = None
    group: int = 0


@dataclass(frozen=True)
class DecidedColumns:
    """The decisions about K columns: codes [K, N], scale and zero [G, N], group_K int32 [K], and their constraints.

    kept [K, N]: weights that are not pruned; the others have the code of 0; None: all. exact [K, N]: weights that have
    a value of their own; None: none. price [N]: more weights may become exact, those whose error costs more than this,
    by cost_K; None: no more. extra [K, N] of the scales' dtype: the value of exact weights beyond the code nearest to
    0; None: their codes are 0. outputs [N, S] and share [N]: of outputs that depend on each other in runs of S, in a
    sweep the factors of H_O, in descent H_O and its diagonal (`solvers.output_feedback`); None: they do not.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor
    group_K: Tensor
    rounding: Rounding
    kept: Tensor | None
    exact: Tensor | None
    price: Tensor | None
    cost_K: Tensor
    extra: Tensor | None = None
    outputs: Tensor | None = None
    share: Tensor | None = None


@dataclass(frozen=True)
class ColumnBlock:
    """Columns first ... first + B: target, value and change, [B, N] each; matrix [B, B], diagonal [B].

    target: in a sweep, the value that a column aims at before the feedback of earlier columns in its run; in descent,
    the gradient. change: in a sweep, weight - value; in descent, the distance that values have moved.
    """

    first: int
    target: Tensor
    value: Tensor
    change: Tensor
    matrix: Tensor
    diagonal: Tensor


@dataclass(frozen=True)
class SweptBlock(ColumnBlock):
    """A block of a sweep, with weight [B, N], and loss [N], which grows by diagonal (target - value)^2."""

    weight: Tensor
    loss: Tensor
