"""Binary weights: -s and s, by GPTQ, and once more where it matters (XNOR-Net, arXiv 1603.05279; BiLLM, 2402.04291).

Shapes: N outputs, K inputs, C of them salient. Of each group, with h the diagonal of H, H = X^T X,

    minimise over s and codes of -1, 1      sum over j of h_j (w_j - s q_j)^2       q = sign(w), s = mean of h |w|

when the sweep comes to it; then as GPTQ goes on (`compress methods gptq`). `salient` columns of every group, those of
the largest sum over rows of (w_j / [H^-1]_jj)^2, get a second binary term for what the first left. What is best there
makes up for the errors of all columns, R = W - Q_1,

    |(R - Q_2) X|^2  =  tr((T - Q_2) H_CC (T - Q_2)^T) + const,      T = R H_:C H_CC^-1

which is the problem of the first term on fewer columns, solved the same way.

Paper -> code: B, alpha -> codes, scale; s_i of BiLLM, equation 3 -> `saliency`; residual approximation -> `second`.

Departs from BiLLM:
- its salient columns are counted by a search; here `salient` says how many, the same in every group, so that scales
  and columns have a regular layout. They are the columns of the layer, one list for all of its rows.
- the second term follows the whole sweep, and makes up for the errors of all columns, not of its own alone.
- the others are not split by magnitude: which side a weight is on would cost another bit, which the paper's 1.08 bits
  leave out.
What it costs: two levels are for models that are trained with them. Rounded afterwards, small models diverge four to
five times as far as by GPTQ's w2a16 (recipes/README.md), and second terms in some of the columns take little of that
back for their bytes, of which w2a16 makes the better use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from compress.errors import InputError
from compress.passes.few_levels import FewLevelsGPTQ
from compress.passes.options.second_order import Aimed, Relied, Solution
from compress.passes.protocol.sites import Site
from compress.passes.protocol.solve import solve_rows
from compress.solvers.gptq import ordered, solve_ordered
from compress.solvers.sweep import damped
from compress.weights.formats.columns import Columns
from compress.weights.formats.sparse import column_dtype
from compress.weights.formats.ternary import Binary as BinaryFormat
from compress.weights.grid import Grid, Quantized, quantize
from compress.weights.terms import Weight


@dataclass(frozen=True, kw_only=True)
class Binary(FewLevelsGPTQ):
    """GPTQ to two levels."""

    name: ClassVar[str] = "binary"
    keeps_zeros: ClassVar[bool] = False  # there is no code for them
    outliers: ClassVar[float] = 0.0  # type: ignore[misc]  # nor one that leaves an exact weight alone

    salient: int = 0
    """0 or more: columns of every group that have a second binary term."""

    def __post_init__(self) -> None:
        super().__post_init__()
        longest = self.group_size if self.group_size > 0 else None
        if self.salient < 0 or (longest is not None and self.salient > longest):
            allowed = "0 or more" if longest is None else f"0 to {longest}, the columns of a group"
            raise InputError(f"salient {self.salient}; allowed: {allowed}")

    def weight_grid(self) -> Grid:
        return signs(None if self.group_size == -1 else self.group_size or self.group_up_to)

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        super().check(shapes)
        for name, (_, columns) in shapes.items():
            if self.salient > columns:
                raise InputError(f"salient {self.salient}; {name} has {columns} columns")

    def _solve(self, site: Site, relied: Relied, solution: Solution) -> dict[str, Aimed]:
        first = super()._solve(site, relied, solution)
        if not self.salient:
            return first
        inverse_K = torch.linalg.inv(damped(relied.hessian, relied.ordered.factor.damp)).diagonal()
        columns = {name: self._salient(one.target, inverse_K) for name, one in first.items()}
        return {
            name: self._with_second(site, name, one, columns[name], relied, solution) for name, one in first.items()
        }

    def _salient(self, weight_NK: Tensor, inverse_K: Tensor) -> Tensor:
        """[C] the columns of a layer that have a second term."""
        length = self.weight_grid().group_length(len(inverse_K))
        return chosen(saliency(weight_NK, inverse_K), length, self.salient)

    def _with_second(
        self, site: Site, name: str, first: Aimed, column_C: Tensor, relied: Relied, solution: Solution
    ) -> Aimed:
        """A layer's first term, and the second in these columns."""
        assert isinstance(first.weight, Quantized)
        hessian_KK, damp, dtype = relied.hessian, relied.ordered.factor.damp, site.scale_dtypes[name]
        grid = signs(None if self.group_size == -1 else self.salient)
        rest_NK = first.target - first.weight.dequantize(first.target.dtype)
        if solution == "rounding":
            second = quantize(rest_NK[:, column_C], grid, dtype)
        else:
            inside_CC = hessian_KK[column_C][:, column_C]
            solve = partial(
                solve_ordered,
                seen=ordered(inside_CC, damp, "none", grid.group_size),
                grid=grid,
                scale_dtype=dtype,
                refit=self.refit,
                sweeps=self.sweeps,
                polish_damp=relied.polish_damp,
            )
            rows = {"weight_NK": left_to(rest_NK, hessian_KK, column_C, damp)}
            solved = solve_rows(site.comm, rows, lambda **rows: solve(**rows).weight)
            assert isinstance(solved, Quantized)
            second = solved
        columns = len(hessian_KK)
        term = Columns(column_C.to(column_dtype(columns)), BinaryFormat(grid=grid).term(second), columns)
        return replace(first, weight=Weight((first.weight, term)))


def signs(group_size: int | None) -> Grid:
    """The grid of signs, with a scale for so many columns, or for all of a row."""
    return Grid(bits=1, type="sign", granularity="group" if group_size else "channel", group_size=group_size)


def saliency(weight_NK: Tensor, inverse_K: Tensor) -> Tensor:
    """[K] what a column counts: the sum over rows of (w_j / [H^-1]_jj)^2. inverse: the diagonal of H^-1."""
    return (weight_NK / inverse_K).square().sum(0)


def chosen(scores_K: Tensor, length: int, count: int) -> Tensor:
    """[G * count] the columns of the largest scores, so many of every group, rising."""
    best = scores_K.view(-1, length).topk(count, dim=1).indices.sort(1).values
    return (best + torch.arange(0, len(scores_K), length, device=best.device).unsqueeze(1)).reshape(-1)


def left_to(rest_NK: Tensor, hessian_KK: Tensor, column_C: Tensor, damp: float) -> Tensor:
    """[N, C] what these columns should hold to make up for all of the rest: R H_:C H_CC^-1, H damped."""
    stiff_KK = damped(hessian_KK, damp)
    return torch.linalg.solve(stiff_KK[column_C][:, column_C], (rest_NK @ stiff_KK[:, column_C]).t()).t()
