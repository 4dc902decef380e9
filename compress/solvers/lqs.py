"""LQS as functions of tensors: W = Q + L R + S, codes, a low rank and exact weights, found in turns (LQER, arXiv
2402.02446; CALDERA, arXiv 2405.18886, algorithm 1).

Shapes: N outputs, K inputs, r ranks.

    minimise over Q on the grid, L [N, r], R [r, K], S sparse     tr(E H E^T),    E = W - Q - L R - S

`passes.lqs` says where this departs from the papers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.solvers.gptq import outlier_prices, solve_on_grid
from compress.solvers.hessian_with_drift import DAMP, POLISH_DAMP, ActOrder, Problem, quadratic
from compress.solvers.low_rank import approximate
from compress.weights.grid import Grid
from compress.weights.matrix import Matrix, added
from compress.weights.terms import Tensors


@dataclass(frozen=True)
class Parts:
    """Terms of a layer in a turn: codes, with exact weights beside them, and a low rank; None where it has none."""

    codes: Matrix | None = None
    low: Tensors | None = None

    @property
    def weight(self) -> Matrix:
        """The sum of all terms; one at least."""
        terms = () if self.codes is None else self.codes.terms
        low = () if self.low is None else (self.low,)
        return added(*terms[:1], *low, *terms[1:])

    def left(self, target_NK: Tensor) -> Tensor:
        """The rest of a target that the terms leave."""
        if self.codes is None and self.low is None:
            return target_NK
        return target_NK - self.weight.dequantize(target_NK.dtype)


def lqs(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    grid: Grid,
    rank: int = 8,
    iterations: int = 4,
    factor_bits: int = 16,
    damp: float = DAMP,
    act_order: ActOrder = "none",
    refit: int = 0,
    sweeps: int = 0,
    outliers: float = 0.0,
    polish_damp: float = POLISH_DAMP,
    scale_dtype: torch.dtype | None = None,
) -> Parts:
    """Codes, a low rank and exact weights of a weight: the turn of least tr(E H E^T), gptq alone being one of them.

    rank: 1 to min(N, K). iterations: rounds of both once each has been made; 0 is LQER. factor_bits: 16 or 8, of the
    stored factors. The others are as in `gptq.gptq`. Raises CompressError where H is not finite.
    """
    target, alone = weight_NK.to(hessian_KK.dtype), Comm()
    dtype = weight_NK.dtype if scale_dtype is None else scale_dtype
    problem = Problem.of(hessian_KK, damp, act_order, grid.group_size, polish_damp)

    def codes_of(rests: Mapping[str, Tensor]) -> dict[str, Matrix]:
        rest = rests[""]
        price_N = outlier_prices(rest, problem, grid, dtype, outliers)
        return {"": solve_on_grid(rest, problem, grid, dtype, refit=refit, sweeps=sweeps, price_N=price_N).weight}

    def low_of(rests: Mapping[str, Tensor]) -> dict[str, Tensors | None]:
        return {"": approximate(alone, alone.rank, rests[""], hessian_KK, rank, dtype, factor_bits)}

    targets = {"": target}
    turns = in_turns(targets, codes_of(targets), codes_of, low_of, iterations)[""]
    return best_turn(target, turns, lambda error: quadratic(alone, error, hessian_KK))[0]


def in_turns(
    targets: Mapping[str, Tensor],
    first: Mapping[str, Matrix],
    codes_of: Callable[[Mapping[str, Tensor]], Mapping[str, Matrix]],
    low_of: Callable[[Mapping[str, Tensor]], Mapping[str, Tensors | None]],
    iterations: int,
) -> dict[str, list[Parts]]:
    """{layer: its parts after each turn}. first: codes of the targets themselves. codes_of: the best codes, with exact
    weights beside them, for what the low rank leaves, [N, K] of each layer; low_of: the best low rank for what those
    leave."""
    turns = [{name: Parts(codes) for name, codes in first.items()}]
    for turn in range(1 + iterations):
        now = turns[-1]
        if turn:
            codes = codes_of({name: replace(parts, codes=None).left(targets[name]) for name, parts in now.items()})
            now = {name: replace(parts, codes=codes[name]) for name, parts in now.items()}
        low = low_of({name: replace(parts, low=None).left(targets[name]) for name, parts in now.items()})
        turns.append({name: replace(parts, low=low[name]) for name, parts in now.items()})
    return {name: [turn[name] for turn in turns] for name in first}


def best_turn(target_NK: Tensor, turns: Sequence[Parts], loss: Callable[[Tensor], float]) -> tuple[Parts, float]:
    """(The turn of least loss, the loss of the first.) loss: of an error [N, K]."""
    losses = [loss(parts.left(target_NK)) for parts in turns]
    return turns[losses.index(min(losses))], losses[0]
