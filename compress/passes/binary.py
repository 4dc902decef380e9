"""Binary weights: -s and s, by GPTQ, and once more where it matters (XNOR-Net, arXiv 1603.05279; BiLLM, 2402.04291).

Shapes: N outputs, K inputs, C of them salient. Of each group, with h the diagonal of H, H = X^T X,

    minimise over s and codes of -1, 1      sum over j of h_j (w_j - s q_j)^2       q = sign(w), s = mean of h |w|

when the sweep comes to it; then as GPTQ goes on (`compress methods gptq`). `salient` columns of every group, those of
the largest sum over rows of (w_j / [H^-1]_jj)^2, get a second binary term for what the first left. What is best there
makes up for the errors of all columns, R = W - Q_1,

    |(R - Q_2) X|^2  =  tr((T - Q_2) H_CC (T - Q_2)^T) + const,      T = R H_:C H_CC^-1

which is the problem of the first term on fewer columns, solved the same way.

Paper -> code: B, alpha -> codes, scale; s_i of BiLLM, equation 3 -> `saliency`; residual approximation ->
`second_problem` (all in `solvers.binary`).

Departs from BiLLM:
- its salient columns are counted by a search; here `salient` says how many, the same in every group, so that scales
  and columns have a regular layout. They are the columns of the layer, one list for all of its rows.
- the second term follows the whole sweep, and makes up for the errors of all columns, not of its own alone.
- the others are not split by magnitude: which side a weight is on would cost another bit, which the paper's 1.08 bits
  leave out.
What it costs: two levels are for models that are trained with them. Rounded afterwards, small models diverge four to
five times as far as by GPTQ's w2a16 (docs/figures/methods.md), and second terms in some of the columns take little of
that back for their bytes, of which w2a16 makes the better use.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from compress.base.errors import InputError
from compress.passes.gptq import GPTQ
from compress.passes.options.few_levels import FewLevels
from compress.passes.options.second_order import Result, Solution, Target
from compress.passes.protocol.sites import Site
from compress.passes.protocol.solve import solve_rows
from compress.solvers.binary import inverse_diagonal, salient_columns, second_problem, signs, with_second
from compress.solvers.gptq import solve_on_grid
from compress.solvers.hessian_with_drift import Problem
from compress.weights.formats.columns import BinaryColumns
from compress.weights.grid import Grid, Quantized, quantize
from compress.weights.matrix import Matrix
from compress.weights.scheme import Scheme


@dataclass(frozen=True, kw_only=True)
class Binary(FewLevels, GPTQ):
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
        return signs(None if self.group_size == -1 else self.group_size or self.group_up_to, self.scales)

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        super().check(shapes)
        for name, (_, columns) in shapes.items():
            if self.salient > columns:
                raise InputError(f"salient {self.salient}; {name} has {columns} columns")

    def stored(self, layer: str, shape: tuple[int, int], table: bool = False) -> Scheme | None:
        scheme = super().stored(layer, shape, table)
        if not self.salient or scheme is None:
            return scheme
        grid = scheme.weights
        groups = 1 if grid.group_size is None else shape[1] // grid.group_size
        second = signs(None if self.group_size == -1 else self.salient, self.scales)
        return replace(scheme, terms=(*scheme.terms, BinaryColumns(grid=second, chosen=groups * self.salient)))

    def solve(
        self, site: Site, problem: Problem, targets: Mapping[str, Target], solution: Solution
    ) -> dict[str, Result]:
        first = super().solve(site, problem, targets, solution)
        if not self.salient:
            return first
        inverse_K = inverse_diagonal(problem)
        both: dict[str, Result] = {}
        for name, (weight, figures) in first.items():
            assert isinstance(weight, Quantized)
            column_C = salient_columns(targets[name][0], inverse_K, self.weight_grid(), self.salient)
            rest_NK = targets[name][0] - weight.dequantize(problem.hessian.dtype)
            second = self._second(site, problem, rest_NK, column_C, site.scale_dtypes[name], solution == "rounding")
            both[name] = with_second(weight, second, column_C), figures
        return both

    def _second(
        self, site: Site, problem: Problem, rest_NK: Tensor, column_C: Tensor, dtype: torch.dtype, rounded: bool
    ) -> Matrix:
        """The second term of a layer, in these columns, for the error of its first."""
        grid = signs(None if self.group_size == -1 else self.salient, self.scales)
        if rounded:
            return quantize(rest_NK[:, column_C], grid, dtype)
        inside, target_NC = second_problem(problem, rest_NK, column_C, grid)
        solve = partial(solve_on_grid, refit=self.refit, sweeps=self.sweeps)

        def solve_second(weight_NK: Tensor) -> Matrix:
            return solve(weight_NK, inside, grid, dtype).weight

        return solve_rows(site.comm, {"weight_NK": target_NC}, solve_second)
