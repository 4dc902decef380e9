"""LQS: codes, a low rank and a few exact weights beside each other, W = Q + L R + S, found in turns.

LQER (arXiv 2402.02446) adds to codes the low rank that the layer's outputs miss most; CALDERA (arXiv 2405.18886) makes
codes and low rank in turns, each of what the other leaves.

Shapes: N outputs, K inputs, r ranks. W* and H are those of gptq: what the codes aim at, the Hessian they go by.

    minimise over Q on the grid, L [N, r], R [r, K], S sparse     tr(E H E^T),    E = W* - Q - L R - S

    Q, S     of W* alone: gptq
    L R      of W* - Q - S: the exact optimum (`whitened.spectrum`)
    S        W* - L R, at the weights that cost most, e^2 H_jj, of the error that Q + L R leave at first
    Q        of W* - L R - S: gptq, its codes 0 where S is, which have no say in the range of a group

and so on, `iterations` times the last three. What is kept, of each layer, is the turn of least loss, and Q alone is one
of them: it is never worse than gptq in that loss. Figure `codes_loss` is that of Q alone.

Paper -> code: whitening by the diagonal (LQER), by H (CALDERA) -> by H; LDLQ -> the sweep of gptq; LPLR, factors of few
bits -> `factor_bits`, the right factor fitted to the left one as stored.

Departs from the papers:
- codes are those of gptq with all that it has: drift correction, range search, refit, descent, shrinkage;
- `allocate` shares ranks out between layers by what each takes off the loss of plain rounding in the original model.
- S is chosen once. Without it (outliers=0) and with iterations=0 this is LQER under the full Hessian.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from compress.errors import InputError
from compress.passes.gptq import GPTQ, Aimed, Relied, Solution
from compress.passes.rank_budget import RankBudget
from compress.passes.sensitivity import check_outliers, dearest
from compress.passes.sites import Site
from compress.passes.solve import quadratic
from compress.passes.stages import Stage
from compress.passes.whitened import approximated
from compress.weights.grid import Quantized
from compress.weights.sparse import Sparse, sparse
from compress.weights.terms import Tensors, Weight


@dataclass(frozen=True, kw_only=True)
class LQS(RankBudget, GPTQ):
    """Codes, a low rank and exact weights."""

    name: ClassVar[str] = "lqs"
    keeps_zeros: ClassVar[bool] = False

    rank: int = 8
    """0 or more: rank of every layer, or with `allocate` what all of them have to share; 0 is no low rank."""

    outliers: float = 0.0
    """0 to 0.25: share of weights that stay exact beside codes and low rank."""

    iterations: int = 4
    """0 or more: rounds of codes and low rank once each has been made; 0 is LQER."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_outliers(self.outliers)
        if self.iterations < 0:
            raise InputError(f"iterations {self.iterations}; allowed: 0 or more rounds")
        if not self.rank and not self.ranks and not self.outliers:
            raise InputError("rank 0 and outliers 0 leave nothing beside the codes; give one of them, or use gptq")
        if self.outliers and not self.iterations:
            raise InputError(
                "outliers are chosen once codes and low rank are there; give iterations=1 or more with them"
            )

    @property
    def stages(self) -> tuple[Stage, ...]:
        return *self.survey, *super().stages

    def approximated(self, site: Site, name: str) -> Tensor:
        weight = site.weights[name].double()
        return weight - self._nearest(site, name, torch.float64).dequantize()

    def _solve(self, site: Site, relied: Relied, solution: Solution) -> dict[str, Aimed]:
        alone = super()._solve(site, relied, solution)
        if solution == "rounding":
            return alone
        targets = {name: found.target for name, found in alone.items()}
        now = {name: Parts(found.weight) for name, found in alone.items() if isinstance(found.weight, Quantized)}
        turns = [now]
        places: dict[str, Tensor] = {}
        low = any(self.rank_of(name, two(target)) for name, target in targets.items())
        for turn in range(1 + (self.iterations if low else 1)):
            if turn == 1 and self.outliers:
                places = {
                    n: dearest(now[n].left(t), relied.hessian.diagonal(), self.outliers) for n, t in targets.items()
                }
            if turn:
                now = self._with_codes(site, relied, targets, now, places)
            if low:
                now = self._with_low_rank(site, relied, targets, now)
            turns.append(now)
        return {name: self._best(site, relied, found, [turn[name] for turn in turns]) for name, found in alone.items()}

    def _with_codes(
        self,
        site: Site,
        relied: Relied,
        targets: Mapping[str, Tensor],
        now: Mapping[str, "Parts"],
        places: Mapping[str, Tensor],
    ) -> dict[str, "Parts"]:
        """Exact weights at these places, and codes, of what the low rank leaves."""
        without = {name: replace(parts, codes=None, exact=None) for name, parts in now.items()}
        rows: dict[str, dict[str, Tensor]] = {}
        for name, target in targets.items():
            rest, beside = without[name].left(target), {}
            if name in places:
                exact = sparse(rest.to(site.scale_dtypes[name]), places[name])
                without[name] = replace(without[name], exact=exact)
                rest, beside = without[name].left(target), {"kept_NK": ~places[name]}
            rows[name] = {**self._rows(site, name, rest, pruned=False), **beside}
        codes = self._codes(site, relied, rows)
        return {name: replace(parts, codes=codes[name]) for name, parts in without.items()}

    def _with_low_rank(
        self, site: Site, relied: Relied, targets: Mapping[str, Tensor], now: Mapping[str, "Parts"]
    ) -> dict[str, "Parts"]:
        """The best low rank of what codes and exact weights leave."""
        owners = site.comm.assign({name: float(min(target.shape)) for name, target in targets.items()})
        found = {}
        for name, parts in now.items():
            rest = replace(parts, low=None).left(targets[name])
            rank, dtype = self.rank_of(name, two(rest)), site.scale_dtypes[name]
            how = (relied.hessian, rank, dtype, self.factor_bits)
            low = approximated(site.comm, owners[name], rest, *how) if rank else None
            found[name] = replace(parts, low=low)
        return found

    def _best(self, site: Site, relied: Relied, alone: Aimed, turns: Sequence["Parts"]) -> "Found":
        """The turn of least loss of a layer."""
        losses = [quadratic(site.comm, parts.left(alone.target), relied.hessian) for parts in turns]
        best = turns[losses.index(min(losses))]
        rank = 0 if best.low is None else best.low.held["left"].shape[1]
        return Found(best.weight, alone.target, alone.drift, losses[0], rank)

    def _figures(self, site: Site, name: str, solved: Aimed, relied: Relied) -> dict[str, float | int | str]:
        figures = super()._figures(site, name, solved, relied)
        if not isinstance(solved, Found):
            return {**figures, "codes_loss": figures["loss"], "rank": 0}
        energy = quadratic(site.comm, solved.target, relied.hessian) or 1.0
        return {**figures, "codes_loss": solved.codes_loss / energy, "rank": solved.rank}


@dataclass(frozen=True)
class Parts:
    """What a layer is made of in a turn: codes, a low rank, exact weights; None where it has none."""

    codes: Quantized | None = None
    low: Tensors | None = None
    exact: Sparse | None = None

    @property
    def weight(self) -> Weight:
        """The terms that there are; one at least."""
        return Weight(tuple(term for term in (self.codes, self.low, self.exact) if term is not None))

    def left(self, target_NK: Tensor) -> Tensor:
        """What of a target they leave."""
        terms = (self.codes, self.low, self.exact)
        return target_NK - self.weight.dequantize(target_NK.dtype) if any(t is not None for t in terms) else target_NK


@dataclass(frozen=True)
class Found(Aimed):
    """codes_loss: of the codes alone. rank: of the low rank beside them, 0 where there is none."""

    codes_loss: float
    rank: int


def two(weight_NK: Tensor) -> tuple[int, int]:
    """(N, K)."""
    rows, columns = weight_NK.shape
    return rows, columns
