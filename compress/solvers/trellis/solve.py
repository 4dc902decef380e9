"""Trellis codes as functions of tensors: a weight and the Hessian of its input in, states of a trellis out (QTIP, arXiv
2406.11235, around the sweep of `solvers.column_sweep`).

Shapes: N outputs, K inputs. `passes.trellis` has the equations, and says where this departs from the paper.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from compress.kernels.columns import ColumnBlock, SweptBlock
from compress.kernels.layouts.trellis import levels_of, spread_of
from compress.solvers.column_sweep import CodeRule, ColumnRule, Polish, Solved, move_column
from compress.solvers.hessian_with_drift import DAMP, POLISH_DAMP, ActOrder, Problem
from compress.solvers.trellis.viterbi import CHUNK, best_states
from compress.weights.formats.trellis import TrellisCodes, Trellised
from compress.weights.matrix import Matrix
from compress.weights.scale_numbers import round_scale


def trellis(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    format_: TrellisCodes,
    damp: float = DAMP,
    act_order: ActOrder = "none",
    refit: int = 0,
    sweeps: int = 0,
    polish_damp: float = POLISH_DAMP,
    scale_dtype: torch.dtype | None = None,
    outputs_NS: Tensor | None = None,
) -> Solved:
    """Quantize a weight to trellis codes for the least tr(E H E^T), or tr(H_O E H E^T). Pure: no rank, no device, no
    state. Options are as in `gptq.gptq`. Raises CompressError where H is not finite."""
    work = weight_NK.to(hessian_KK.dtype)
    problem = Problem.of(hessian_KK, damp, act_order, None, polish_damp)
    rule = TrellisRule.of(work, problem, format_, weight_NK.dtype if scale_dtype is None else scale_dtype)
    return rule.solve(work, problem, refit, sweeps, outputs_NS)


def nearest_states(weight_NK: Tensor, format_: TrellisCodes, scale_dtype: torch.dtype) -> Matrix:
    """The path nearest to each column of a weight [N, K], every weight counting the same."""
    alone = Problem.of(torch.eye(weight_NK.shape[1]).to(weight_NK), damp=0.0)
    return TrellisRule.of(weight_NK, alone, format_, scale_dtype).solve(weight_NK, alone, 0, 0).weight


@dataclass
class TrellisRule(CodeRule):
    """Find the best path for each column: its sum of squared errors over all outputs is the least. Rows of one run of
    outputs have to come together.

    scale [N]: numbers of the stored dtype; states int16 [K, N], in sweep order. divisor, importance [N]: of targets, as
    the search takes them; of outputs that are coupled, `coupling`.
    """

    format: TrellisCodes
    scale_dtype: torch.dtype
    scale: Tensor
    states: Tensor
    divisor: Tensor = field(init=False)
    importance: Tensor = field(init=False)
    group: int = 0
    swept: bool = False

    @classmethod
    def of(cls, weight_NK: Tensor, problem: Problem, format_: TrellisCodes, scale_dtype: torch.dtype) -> "TrellisRule":
        """The rule before the first column. A code of k bits has at best (1 - 4^-k) of the energy of what it stands
        for, and scales are smaller by its root. Those of outputs that are all 0 are 0."""
        rows, columns = weight_NK.shape
        rms_N = weight_NK[:, problem.order].square().mean(1).sqrt()
        scale_N = rms_N * (math.sqrt(1 - 4.0**-format_.bits) / spread_of(format_.code))
        stored = torch.where(rms_N > 0, round_scale(scale_N, scale_dtype), 0.0)
        states = torch.zeros(columns, rows, dtype=torch.int16, device=weight_NK.device)
        return cls(format_, scale_dtype, stored, states)

    def __post_init__(self) -> None:
        self.take_scale(self.scale)

    def take_scale(self, scale_N: Tensor) -> None:
        """Go on with other scales."""
        self.__dict__.pop("coupling", None)
        self.scale, self.divisor = scale_N, torch.where(scale_N > 0, scale_N, 1.0)
        # In units of their mean: the squares of small scales are too small for float32.
        unit = scale_N.mean().clamp(min=torch.finfo(scale_N.dtype).tiny)
        self.importance = (scale_N / unit).square().float()

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """`OutputCurvature.block_factors` of outputs that are coupled, by the chunks of the search."""
        assert self.outputs is not None
        return self.outputs.block_factors(CHUNK)

    @cached_property
    def coupling(self) -> tuple[Tensor, Tensor]:
        """(Importance [N], feedback [N, S]) of targets, as the search takes them."""
        assert self.outputs is not None
        unit_NS, share_N = self.factors
        divisor_RS = self.outputs.in_runs(self.divisor[None])[:, 0].clamp(min=torch.finfo(self.divisor.dtype).tiny)
        rows = torch.arange(len(unit_NS), device=unit_NS.device) // self.outputs.run
        return self.importance * share_N.float(), unit_NS * self.scale[:, None] / divisor_RS[rows]

    def loss_of(self, error_N: Tensor) -> Tensor:
        return error_N * (error_N if self.outputs is None else self.outputs.times(error_N[None])[0])

    def run(self, block: SweptBlock, begin: int, end: int) -> None:
        ColumnRule.run(self, block, begin, end)  # paths know outputs that are coupled

    def decide(self, column: int, target_N: Tensor) -> Tensor:
        self.states[column] = self.path(target_N)
        return self.values(self.states[column])

    def path(self, target_N: Tensor) -> Tensor:
        """int16 [N], the states of the path nearest to a target."""
        of_outputs = (self.importance, None) if self.outputs is None else self.coupling
        return best_states(target_N / self.divisor, of_outputs[0], self.format.code, of_outputs[1])

    def values(self, states: Tensor) -> Tensor:
        """Values [..., N] of states, rounded as they are stored."""
        product = self.levels(states) * self.scale
        return product.to(self.scale_dtype).to(self.scale.dtype)

    def levels(self, states: Tensor) -> Tensor:
        """Levels [..., N] of states."""
        return levels_of(self.format.code, states).to(self.scale.dtype)

    def codes_at(self, column: int) -> tuple[Tensor, ...]:
        return (self.states[column],)

    def descend(self, block: ColumnBlock) -> None:
        """Each column of a block takes the path nearest its own optimum, one column after another. A run of outputs
        whose new path is not nearer, once rounded as it is stored, keeps its old one; so do all that are coupled."""
        if self.outputs is not None:  # the optimum of a column is that of outputs that are not
            block = replace(block, target=self.outputs.divided(block.target))
        for j in range(len(block.target)):
            column, before = block.first + j, block.value[j]
            wanted = before + block.target[j] / block.diagonal[j]
            states = self.path(wanted)
            values = self.values(states)
            nearer = self.by_run(self.loss_of(values - wanted) - self.loss_of(before - wanted)) < 0
            self.states[column] = torch.where(nearer, states, self.states[column])
            move_column(block, j, torch.where(nearer, values - before, 0.0))
            block.value[j] += block.change[j]

    def by_run(self, of_outputs_N: Tensor) -> Tensor:
        """[N], the sums over each run of outputs, at every output of the run."""
        count = len(of_outputs_N)
        run = self.format.run if self.outputs is None else count
        padded = torch.nn.functional.pad(of_outputs_N, (0, -count % run)).view(-1, run)
        return padded.sum(1).repeat_interleave(run)[:count]

    def refit(self, polish: Polish) -> None:
        """For fixed paths the loss is quadratic in the scale of each output: set it to its minimum."""
        moved_N = self.scale + polish.scale_steps(slice(None), polish.hessian, self.levels(self.states))
        valid = (self.scale > 0) & torch.isfinite(moved_N) & (moved_N > 0)
        old = self.scale
        self.take_scale(torch.where(valid, round_scale(moved_N, self.scale_dtype), old))
        change = self.values(self.states) - polish.values
        # Rounding the scale may lose what the step gained: keep the old one there.
        better = polish.move_if_lower(slice(None), polish.hessian, change)
        self.take_scale(torch.where(better, self.scale, old))

    def to_weight(self, problem: Problem, values_NK: Tensor) -> Trellised:
        states = problem.restore(self.states.t().contiguous())
        return Trellised(states, self.scale.to(self.scale_dtype), self.format)
