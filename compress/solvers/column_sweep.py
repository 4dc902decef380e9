"""Decides a weight column by column: a sweep, in which each column makes up for the errors before it, then descent.

Shapes: N outputs, K inputs, G groups, g columns of a group, B columns of a block. W [N, K] is the weight, E = W - Q the
error of the columns that are decided.

With the input Hessian H = U D U^T (U unit upper triangular, D diagonal), the loss of Q is a sum over columns,

    tr(E H E^T) = sum_j D_j |t_j - q_j|^2        t_j = w_j + sum_{i<j} e_i U_ij

so rounding each target t_j to its nearest code is greedily optimal and the loss comes for free. This is the LDLQ form
(QuIP, arXiv 2307.13304, section 3) of GPTQ (arXiv 2210.17323, algorithm 1) and decides the same codes: one Cholesky
factorisation of the flipped H replaces the factorisation, inversion and second factorisation of the paper.

After a sweep, rounds of two steps lower tr(E H E^T) row by row, and never raise it. A refit moves one scale at a time
to the minimum of the parabola that the loss is in it, where the codes stay; descent moves one code at a time.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compress.base.threads import one_thread
from compress.kernels.columns import ColumnBlock, DecidedColumns, SweptBlock
from compress.kernels.operators.columns import descend_columns, on_gpu, sweep_columns
from compress.solvers.hessian_with_drift import Problem
from compress.solvers.output_feedback import OutputCurvature, descend_coupled, sweep_coupled
from compress.weights.matrix import Matrix

BLOCK = 128
# Numbers in columns that are decided one after another, from which several threads are worth it.
WORTH_THREADS = 2**18


class ColumnRule(ABC):
    """Decides columns. `group` columns share what `begin` prepares (0: `begin` is never called), and `span` columns,
    which are several groups, what `open` does before (0: `open` is never called)."""

    group: int
    span: int = 0

    def open(self, column: int, updated_SN: Tensor) -> None:
        """Columns [column, column + span), as `begin` has those of a group."""
        raise NotImplementedError

    def begin(self, column: int, updated_gN: Tensor) -> None:
        """Columns [column, column + group) as GPTQ would hold them now: the weights plus all feedback so far."""
        raise NotImplementedError

    @abstractmethod
    def decide(self, column: int, target_N: Tensor) -> Tensor:
        """The value [N] that stands for this column from now on."""

    def loss_of(self, error_N: Tensor) -> Tensor:
        """[N] the cost of errors of a column, of which sums count."""
        return error_N**2

    def run_groups(self, block: SweptBlock) -> bool:
        """Begin all groups of a block and decide their columns; False where that is not possible at once."""
        return False

    def run(self, block: SweptBlock, begin: int, end: int) -> None:
        """Decide columns [begin, end) of a block, whose targets have the feedback of all columns before `begin`."""
        with one_thread(is_small(block.target[begin:end])):
            for j in range(begin, end):
                target = block.target[j]
                value = self.decide(block.first + j, target)
                block.loss.add_(block.diagonal[j] * self.loss_of(target - value))
                block.value[j] = value
                block.change[j] = block.weight[j] - value
                if j + 1 < end:
                    block.target[j + 1 : end].addr_(block.matrix[j, j + 1 : end], block.change[j])


def is_small(columns: Tensor) -> bool:
    """True for columns whose steps take a CPU less time than several threads take to meet."""
    return columns.device.type == "cpu" and columns.numel() < WORTH_THREADS


def sweep(weight_NK: Tensor, problem: Problem, rule: ColumnRule) -> tuple[Tensor, Tensor]:
    """Run `rule` over the columns, which are in the order of the problem. Returns (values [N, K], loss [N]), loss being
    tr(E H E^T) split by output row."""
    rows, columns = weight_NK.shape
    upper, group = problem.upper, rule.group
    inside = 0 < group < columns
    block = rule.span or (group * max(1, BLOCK // group) if inside else BLOCK)
    # Outputs side by side: every column is contiguous.
    weight_KN = weight_NK.t().contiguous()
    value_KN, error_KN = torch.empty_like(weight_KN), torch.empty_like(weight_KN)
    loss = weight_NK.new_zeros(rows)
    if group >= columns:
        rule.begin(0, weight_KN)
    for first in range(0, columns, block):
        last = min(first + block, columns)
        corner = upper[first:last, first:last]
        feedback = corner if on_gpu(corner) else corner.contiguous()
        weight_BN, value_BN, error_BN = (x[first:last] for x in (weight_KN, value_KN, error_KN))
        target_BN = weight_BN.clone()
        if first:
            target_BN.addmm_(upper[:first, first:last].t(), error_KN[:first])
        here = SweptBlock(first, target_BN, value_BN, error_BN, feedback, problem.diagonal[first:last], weight_BN, loss)
        if inside and rule.run_groups(here):
            continue
        if rule.span:
            rule.open(first, updated_columns(here, 0, last - first))
        step = group if inside else last - first
        for j in range(0, last - first, step):
            end = min(j + step, last - first)
            if inside:
                rule.begin(first + j, updated_columns(here, j, end))
            rule.run(here, j, end)
            if end < last - first:
                target_BN[end:].addmm_(feedback[j:end, end:].t(), error_BN[j:end])
    return value_KN.t(), loss


def updated_columns(block: SweptBlock, begin: int, end: int) -> Tensor:
    """Columns [begin, end) of a block as GPTQ holds them: w + x with x U = t - w, of which only their own corner of U
    matters."""
    change, corner = (block.target - block.weight)[begin:end], block.matrix[begin:end, begin:end]
    return block.weight[begin:end] + torch.linalg.solve_triangular(corner.t(), change, upper=False, unitriangular=True)


@dataclass(frozen=True)
class Solved:
    """weight: codes, scales and zero points, and the outliers beside them where there are any. loss_N: tr(E H E^T) of
    each row, H damped as the last step has it. damp: as the sweep's factors needed it."""

    weight: Matrix
    loss_N: Tensor
    damp: float


class CodeRule(ColumnRule):
    """A rule of codes. Its columns, once each is decided, may be decided again; `swept` is true from then on."""

    swept: bool
    group_of: list[int]
    # The curvature of the loss by outputs that are decided together; None: outputs do not depend on each other.
    outputs: OutputCurvature | None = None

    @cached_property
    def groups(self) -> Tensor:
        """int32 [K] on the device of the codes, the group of each column."""
        return torch.tensor(self.group_of, dtype=torch.int32, device=self.codes_at(0)[0].device)

    @property
    def curvature(self) -> Tensor | float:
        """[N] of the loss by each output alone; 1 of a layer's own."""
        return 1.0 if self.outputs is None else self.outputs.diagonal

    def chosen_at(self, column: int) -> tuple[Tensor, ...]:
        """The tensors of a column to which `decide` adds."""
        return ()

    @abstractmethod
    def codes_at(self, column: int) -> tuple[Tensor, ...]:
        """The tensors that `decide` writes for a column."""

    @abstractmethod
    def refit(self, polish: "Polish") -> None:
        """Move scales where that lowers the loss, the codes staying."""

    @abstractmethod
    def to_weight(self, problem: Problem, values_NK: Tensor) -> Matrix:
        """The weight as it is stored, in the layer's own column order. values: of the codes, in sweep order."""

    def decisions(self) -> DecidedColumns | None:
        """Arguments for the compiled loops to decide as `decide` does, each output by itself; None where they
        cannot."""
        return None

    def compiled(self) -> DecidedColumns | None:
        """`decisions`, with the outputs that are coupled; None where loops cannot decide so. Those of a GPU know no
        coupled outputs."""
        made = self.decisions()
        if made is None or self.outputs is None:
            return made
        return None if on_gpu(made.codes) else self.outputs.coupling(made, self.swept)

    def run(self, block: SweptBlock, begin: int, end: int) -> None:
        compiled = self.compiled()
        if compiled is not None:
            sweep_columns(block, compiled, begin, end)
        elif self.outputs is not None:
            sweep_coupled(self, block, begin, end, self.outputs)
        else:
            super().run(block, begin, end)

    def descend(self, block: ColumnBlock) -> None:
        """Each column of a block moves to the grid point nearest its own optimum, one after another.

        Values are rounded to the scale's dtype, so the nearest code may have a farther value: it does not move then.
        """
        compiled = self.compiled()
        if compiled is not None:
            descend_columns(block, compiled)
            return
        if self.outputs is not None:
            descend_coupled(self, block, self.outputs)
            return
        with one_thread(is_small(block.target)):
            for j, before in enumerate(block.value):
                wanted = before + block.target[j] / block.diagonal[j]
                old = [codes.clone() for codes in self.codes_at(block.first + j)]
                value = self.decide(block.first + j, wanted)
                closer = (value - wanted).abs() < (before - wanted).abs()
                for codes, others in zip(self.codes_at(block.first + j), old, strict=True):
                    codes.copy_(torch.where(closer, codes, others))
                value = torch.where(closer, value, before)
                move_column(block, j, value - before)
                block.value[j] = value

    def solve_columns(
        self, weight_NK: Tensor, problem: Problem, refit: int, sweeps: int, target_NK: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Decide the columns of a weight, which are in sweep order, by a sweep that aims at a target (None: the
        weight), then rounds of refit and descent. Returns (values [N, K], loss [N])."""
        values, loss = sweep(weight_NK if target_NK is None else target_NK, problem, self)
        if not refit and not sweeps and target_NK is None:
            return values, loss
        polish = Polish(weight_NK, values, self, problem.polish_hessian())
        loss = polish.run(refit, sweeps)
        return polish.values.t(), loss

    def solve(
        self, weight_NK: Tensor, problem: Problem, refit: int, sweeps: int, outputs_NS: Tensor | None = None
    ) -> Solved:
        """The weight [N, K], of which columns are in the layer's own order, as `solve_columns` decides it. outputs: H_O
        of outputs that are coupled."""
        self.outputs = OutputCurvature.of(outputs_NS)
        values, loss = self.solve_columns(weight_NK[:, problem.order], problem, refit, sweeps)
        return Solved(self.to_weight(problem, values), loss, problem.damp)


def move_column(block: ColumnBlock, j: int, change_N: Tensor) -> None:
    """Take the change of a column in descent off the gradients of the block's later ones."""
    block.change[j] = change_N
    block.target[j + 1 :].addr_(block.matrix[j, j + 1 :], change_N, alpha=-1)


class Polish:
    """Refit and coordinate descent on the decisions of a finished sweep, in sweep order. Updates the rule's tensors.

    weight, values [N, K] as a sweep has them; kept as [K, N], outputs side by side, as the rule's tensors are.
    gradient [K, N]: (E H)^T, or H E^T H_O of outputs that are coupled, kept up to date by whatever changes values.
    """

    def __init__(self, weight_NK: Tensor, values_NK: Tensor, rule: CodeRule, hessian: Tensor) -> None:
        self.weight, self.values = (x.t().contiguous() for x in (weight_NK, values_NK))
        self.rule, self.hessian = rule, hessian
        self.gradient = self.coupled(hessian.t() @ (self.weight - self.values))
        rule.swept = True

    def coupled(self, x_BN: Tensor) -> Tensor:
        """x H_O: x itself, where outputs do not depend on each other."""
        return x_BN if self.rule.outputs is None else self.rule.outputs.times(x_BN)

    def loss(self) -> Tensor:
        return (self.gradient * (self.weight - self.values)).sum(0)

    def scale_steps(self, columns: Tensor | slice, own_gg: Tensor, steps_gN: Tensor) -> Tensor:
        """[N] by how much the scales of some columns, whose H and codes are given, move to the least loss; infinite or
        no number where codes say nothing of it."""
        slope_N = (self.gradient[columns] * steps_gN).sum(0)
        if self.rule.outputs is not None:
            return self.rule.outputs.scale_steps(own_gg, steps_gN, slope_N)
        return slope_N / ((own_gg @ steps_gN) * steps_gN).sum(0)

    def move_if_lower(self, columns: Tensor | slice, own_gg: Tensor, change: Tensor) -> Tensor:
        """Change the values of some columns, whose H is given, by [g, N] where the loss falls: that of each output, or,
        where outputs are coupled, that of its run. Returns where, bool [N]."""
        joint = self.coupled(change)
        gain = (change * (2 * self.gradient[columns] - own_gg @ joint)).sum(0)
        lower = (gain if self.rule.outputs is None else self.rule.outputs.of_runs(gain)) > 0
        self._move(columns, *(torch.where(lower, x, 0.0) for x in (change, joint)))
        return lower

    def _move(self, columns: Tensor | slice, change: Tensor, joint: Tensor) -> None:
        """joint: the change, coupled."""
        self.values[columns] += change
        self.gradient.addmm_(self.hessian[columns].t(), joint, alpha=-1)

    def run(self, refits: int, sweeps: int) -> Tensor:
        """So many rounds of a refit and of descent, in turns; returns the loss [N]."""
        last = max(refits, sweeps) - 1
        for step in range(last + 1):
            if step < refits:
                self.rule.refit(self)
            if step == last < sweeps:
                return self.descend_last()
            if step < sweeps:
                for part in self.blocks():
                    change = self.descend(part)
                    self._move(part, change, self.coupled(change))
        return self.loss()

    def descend_last(self) -> Tensor:
        """Descent after which nothing else moves, so that columns need their gradient no longer than until they have
        been moved. Returns the loss."""
        loss = self.loss()
        for part in self.blocks():
            change = self.descend(part)
            joint = self.coupled(change)
            loss -= (change * (2 * self.gradient[part] - self.hessian[part, part] @ joint)).sum(0)
            self.values[part] += change
            self.gradient[part.stop :].addmm_(self.hessian[part, part.stop :].t(), joint, alpha=-1)
        return loss

    def blocks(self) -> Iterator[slice]:
        """Columns that descend together."""
        for first in range(0, len(self.weight), BLOCK):
            yield slice(first, min(first + BLOCK, len(self.weight)))

    def descend(self, part: slice) -> Tensor:
        """[B, N] the change of a block's values in descent: each code moves to the grid point nearest its own optimum,
        a weight that is no code to the optimum itself."""
        own = self.hessian[part, part].contiguous()
        gradient, values = self.gradient[part].clone(), self.values[part].clone()
        change = torch.empty_like(values)
        self.rule.descend(ColumnBlock(part.start, gradient, values, change, own, own.diagonal().contiguous()))
        return change


def group_members(group_of: Sequence[int], scale_GN: Tensor) -> Sequence[Tensor | slice]:
    """The columns of each group, in sweep order: [g] of them, or from where to where."""
    groups = torch.tensor(group_of, device=scale_GN.device)
    columns = torch.argsort(groups, stable=True)
    if not bool((columns.diff() == 1).all()):
        return columns.view(len(scale_GN), -1).unbind()
    size = len(columns) // len(scale_GN)
    return [slice(group * size, (group + 1) * size) for group in range(len(scale_GN))]
