"""Binary weights: -s and s, by GPTQ, and once more where it matters (XNOR-Net, arXiv 1603.05279; BiLLM, 2402.04291).

Shapes: N outputs, K inputs, C of them salient. Of each group, with h the diagonal of H, H = X^T X,

    minimise over s and codes of -1, 1      sum over j of h_j (w_j - s q_j)^2       q = sign(w), s = mean of h |w|

when the sweep comes to it; then as GPTQ goes on (`compress methods gptq`). `salient` columns of every group, those of
the largest sum over rows of (w_j / [H^-1]_jj)^2, get a second binary term for what the first left. What is best there
makes up for the errors of all columns, R = W - Q_1,

    |(R - Q_2) X|^2  =  tr((T - Q_2) H_CC (T - Q_2)^T) + const,      T = R H_:C H_CC^-1

which is the problem of the first term on fewer columns, solved the same way.

Paper -> code: B, alpha -> codes, scale; s_i of BiLLM, equation 3 -> `saliency`; residual approximation -> `left_to`,
`solve_second` (all in `solvers.binary`).

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
from typing import ClassVar

from torch import Tensor

from compress.base.errors import InputError
from compress.passes.gptq import GPTQ
from compress.passes.options.few_levels import FewLevels
from compress.passes.options.second_order import Aimed, Relied, Solution
from compress.passes.protocol.sites import Site
from compress.passes.protocol.solve import solve_rows
from compress.solvers.binary import inverse_diagonal, left_to, salient_columns, signs, solve_second, with_second
from compress.solvers.gptq import Method
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
        found = super().stored(layer, shape, table)
        if not self.salient or found is None:
            return found
        grid = found.weights
        groups = 1 if grid.group_size is None else shape[1] // grid.group_size
        second = signs(None if self.group_size == -1 else self.salient, self.scales)
        return replace(found, terms=(*found.terms, BinaryColumns(grid=second, chosen=groups * self.salient)))

    def by_solution(self, site: Site, relied: Relied, solution: Solution) -> dict[str, Aimed]:
        first = super().by_solution(site, relied, solution)
        if not self.salient:
            return first
        inverse_K = inverse_diagonal(relied.hessian, relied.ordered.factor.damp)
        columns = {n: salient_columns(a.target, inverse_K, self.weight_grid(), self.salient) for n, a in first.items()}
        return {n: self._with_second(site, n, one, columns[n], relied, solution) for n, one in first.items()}

    def _with_second(
        self, site: Site, name: str, first: Aimed, column_C: Tensor, relied: Relied, solution: Solution
    ) -> Aimed:
        """A layer's first term, and the second in these columns."""
        assert isinstance(first.weight, Quantized)
        hessian_KK, damp, dtype = relied.hessian, relied.ordered.factor.damp, site.scale_dtypes[name]
        grid = signs(None if self.group_size == -1 else self.salient, self.scales)
        how = Method(grid, self.refit, self.sweeps)
        rest_NK = first.target - first.weight.dequantize(first.target.dtype)
        if solution == "rounding":
            second: Matrix = quantize(rest_NK[:, column_C], how.grid, dtype)
        else:
            target_NC = left_to(rest_NK, hessian_KK, column_C, damp)
            how = replace(how, polish_damp=relied.polish_damp)
            second = solve_rows(
                site.comm,
                {"target_NC": target_NC},
                lambda **rows: (
                    solve_second(
                        **rows, hessian_KK=hessian_KK, column_C=column_C, damp=damp, how=how, scale_dtype=dtype
                    ).weight
                ),
            )
        return replace(first, weight=with_second(first.weight, second, column_C))
