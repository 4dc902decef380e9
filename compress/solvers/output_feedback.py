"""Outputs of a layer that the loss couples: their curvature, and the steps of `column_sweep` that know it.

Shapes: N outputs in R runs of S (the last may be shorter), K inputs, B columns of a block. H [K, K] is the second
moment of a layer's inputs, H_O [N, N] that of the gradient of the loss by its outputs, of which only the squares of
each run are kept, [N, S].

    KL of the predictions  ~  1/2 tr(H_O E H E^T),     E = W - Q        (K-FAC, arXiv 1503.05671; YAQA, 2505.22988)

    sweep      H = U D U^T, H_O = V C V^T, both unit upper: the loss is sum_nk C_n D_k (t_nk - q_nk)^2, where
               c_nk = w_nk + sum_{l<k} e_nl U_lk  is GPTQ's target, and  t_nk = c_nk + sum_{m<n} V_mn (c_mk - q_mk)
    descent    G = H E^T H_O [K, N]; the optimum of a weight is q + G_kn / (H_kk h_nn), and a move d of it takes
               d H[k] h_n off G
    refit      of the scales of a group, one for each output of a run: the minimum of a quadratic whose matrix is
               H_O * (P^T H_gg P), elementwise, with the codes P [g, S] less their zero points

So columns are walked as before, and inside a column outputs are decided one after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from compress.kernels.columns import ColumnBlock, DecidedColumns, SweptBlock

# The share of H_O off its diagonal that is relied on: tokens of one text, and one draw of each, overstate it.
RELIED = 0.8
DAMP = 0.01
# The share of a token's weight that goes by its gradients, and the most that one counts by these.
BY_GRADIENT, MOST = 0.75, 20.0
# Steps towards the scales of a group end where so much of the squared error is left, or at a number of them.
LEFT, STEPS = 1e-3, 64


def relied_curvature(moments_NS: Tensor) -> Tensor:
    """H_O [N, S] as far as moments of mean diagonal 1 (`OutputMoments`) are relied on; positive definite."""
    curvature_NS, places = RELIED * moments_NS, OutputCurvature(moments_NS).places[:, None]
    return curvature_NS.scatter_(1, places, moments_NS.gather(1, places) + DAMP)


class Rule(Protocol):
    """The part of `column_sweep.CodeRule` that decides one column."""

    def decide(self, column: int, target_N: Tensor) -> Tensor: ...
    def codes_at(self, column: int) -> tuple[Tensor, ...]: ...
    def chosen_at(self, column: int) -> tuple[Tensor, ...]: ...


def token_weights(sizes: Sequence[Tensor]) -> Tensor:
    """[M] how much each token counts, by |g|^2 of the layers that read it, of mean 1 each: a quarter of it alike,
    the rest by the mean of these, which is clipped."""
    return (1 - BY_GRADIENT) + BY_GRADIENT * torch.stack(list(sizes)).mean(0).clamp(max=MOST)


@dataclass(frozen=True)
class OutputCurvature:
    """H_O [N, S], the rows of each run below each other; positive definite."""

    hessian_NS: Tensor

    @classmethod
    def of(cls, hessian_NS: Tensor | None) -> "OutputCurvature | None":
        """None where outputs are not coupled."""
        return None if hessian_NS is None else cls(hessian_NS.contiguous())

    def coupling(self, made: DecidedColumns, swept: bool) -> DecidedColumns:
        """Decisions whose outputs the compiled loops couple: in a sweep, or, once it is over, in descent."""
        outputs, share = (self.hessian_NS, self.diagonal) if swept else self.factors
        return replace(made, outputs=outputs, share=share)

    @property
    def run(self) -> int:
        return self.hessian_NS.shape[1]

    @cached_property
    def places(self) -> Tensor:
        """[N] the place of each output in its run."""
        return torch.arange(len(self.hessian_NS), device=self.hessian_NS.device) % self.run

    @cached_property
    def diagonal(self) -> Tensor:
        return self.hessian_NS.gather(1, self.places[:, None])[:, 0]

    @cached_property
    def squares(self) -> Tensor:
        """[R, S, S], with ones on the diagonal beyond the last output."""
        beyond = -len(self.hessian_NS) % self.run
        squares = torch.nn.functional.pad(self.hessian_NS, (0, 0, 0, beyond)).view(-1, self.run, self.run).clone()
        if beyond:
            squares[-1].diagonal()[-beyond:] = 1.0
        return squares

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """(V [N, S], C [N])."""
        upper = torch.linalg.cholesky(self.squares.flip(1, 2)).flip(1, 2)
        root = upper.diagonal(dim1=1, dim2=2).clone()
        unit = (upper / root[:, None, :]).reshape(-1, self.run)[: len(self.hessian_NS)]
        return unit.contiguous(), root.square().reshape(-1)[: len(self.hessian_NS)].contiguous()

    def block_factors(self, length: int) -> tuple[Tensor, Tensor]:
        """(V [N, S], the diagonal of S [N]) of H_O = V S V^T, where S has squares of so many outputs of a run, and V
        ones there: those are decided together."""
        unit_NS, share_N = (x.clone() for x in self.factors)
        for rows, share in zip(unit_NS.split(self.run), share_N.split(self.run), strict=True):
            for first in range(0, len(rows), length):
                part = slice(first, min(first + length, len(rows)))
                own = rows[part, part].clone()
                share[part] = own.square() @ share[part]
                rows[:, part] = torch.linalg.solve_triangular(own, rows[:, part], upper=True, left=False)
        return unit_NS, share_N

    @cached_property
    def lower(self) -> Tensor:
        """[R, S, S] the Cholesky factors of the runs."""
        return torch.linalg.cholesky(self.squares)

    def divided(self, x_BN: Tensor) -> Tensor:
        """x H_O^-1, [B, N]."""
        return self.joined(torch.cholesky_solve(self.in_runs(x_BN).mT, self.lower).mT, x_BN.shape[1])

    def in_runs(self, x_BN: Tensor) -> Tensor:
        """[R, B, S], zeros beyond the last output."""
        padded = torch.nn.functional.pad(x_BN, (0, -x_BN.shape[1] % self.run))
        return padded.view(len(x_BN), -1, self.run).transpose(0, 1)

    def times(self, x_BN: Tensor) -> Tensor:
        """x H_O, [B, N]."""
        return self.joined(self.in_runs(x_BN) @ self.squares, x_BN.shape[1])

    def joined(self, x_RBS: Tensor, outputs: int) -> Tensor:
        return x_RBS.transpose(0, 1).reshape(x_RBS.shape[1], -1)[:, :outputs].contiguous()

    def of_runs(self, x_N: Tensor) -> Tensor:
        """[N] the sum over each output's run."""
        sums = self.in_runs(x_N[None]).sum(2, keepdim=True)
        return self.joined(sums.expand(-1, 1, self.run), len(x_N))[0]

    def scale_steps(self, own_gg: Tensor, steps_gN: Tensor, slope_N: Tensor) -> Tensor:
        """[N] how far scales move to the joint minimum of the loss, the codes staying; 0 where all codes are 0."""
        steps = self.in_runs(steps_gN)
        matrix = self.squares * (steps.transpose(1, 2) @ own_gg @ steps)
        solved = conjugate_gradients(matrix, self.in_runs(slope_N[None]).transpose(1, 2))
        return self.joined(solved.transpose(1, 2), len(slope_N))[0]


def conjugate_gradients(matrix_RSS: Tensor, right_RS1: Tensor) -> Tensor:
    """[R, S, 1] nearly the solution for each matrix, positive semidefinite: steps from 0 with the diagonal as
    preconditioner (Hestenes and Stiefel 1952); few, for codes of different outputs are hardly alike. 0 where the
    diagonal is."""
    least = torch.finfo(right_RS1.dtype).tiny
    diagonal = matrix_RSS.diagonal(dim1=1, dim2=2).unsqueeze(2)
    inverse = torch.where(diagonal > least, 1 / diagonal, 0.0)
    solved, left, way = torch.zeros_like(right_RS1), right_RS1, inverse * right_RS1
    first = size = (left * way).sum(1, keepdim=True)
    for _ in range(STEPS):
        if bool((size <= LEFT * first).all()):
            break
        product = matrix_RSS @ way
        step = size / (way * product).sum(1, keepdim=True).clamp(min=least)
        solved, left = solved + step * way, left - step * product
        before, size = size, (left * inverse * left).sum(1, keepdim=True)
        way = inverse * left + size / before.clamp(min=least) * way
    return solved


def sweep_coupled(rule: Rule, block: SweptBlock, begin: int, end: int, outputs: OutputCurvature) -> None:
    """`ColumnRule.run` of outputs that are coupled; what the compiled loops do, in torch."""
    unit, share_N = outputs.factors
    rows = torch.arange(len(share_N), device=share_N.device)
    for j in range(begin, end):
        column, target = block.first + j, block.target[j].clone()
        aim, chosen = target.clone(), [x.clone() for x in rule.chosen_at(column)]
        for place in range(outputs.run):
            for mine, before in zip(rule.chosen_at(column), chosen, strict=True):
                mine.copy_(before)
            value = rule.decide(column, aim)
            here = outputs.places == place
            if bool(here.any()) and place + 1 < outputs.run:
                left_R = (target - value)[here]
                later = outputs.places > place
                run_of = rows // outputs.run
                aim[later] += left_R[run_of[later]] * unit[here][run_of[later], outputs.places[later]]
        block.loss.add_(share_N * block.diagonal[j] * (aim - value) ** 2)
        block.value[j] = value
        block.change[j] = block.weight[j] - value
        if j + 1 < end:
            block.target[j + 1 : end].addr_(block.matrix[j, j + 1 : end], block.change[j])


def descend_coupled(rule: Rule, block: ColumnBlock, outputs: OutputCurvature) -> None:
    """`CodeRule.descend` of outputs that are coupled; what the compiled loops do, in torch."""
    for j in range(len(block.target)):
        old = block.value[j].clone()
        change = torch.zeros_like(old)
        for place in range(outputs.run):
            slope = block.target[j] - block.diagonal[j] * outputs.times(change[None])[0]
            wanted = old + slope / (block.diagonal[j] * outputs.diagonal)
            held = [codes.clone() for codes in rule.codes_at(block.first + j)]
            value = rule.decide(block.first + j, wanted)
            moves = (outputs.places == place) & ((value - wanted).abs() < (old - wanted).abs())
            for codes, before in zip(rule.codes_at(block.first + j), held, strict=True):
                codes.copy_(torch.where(moves, codes, before))
            change = torch.where(moves, value - old, change)
            block.value[j] = torch.where(moves, value, block.value[j])
        block.change[j] = change
        joint = outputs.times(change[None])[0]
        block.target[j + 1 :].addr_(block.matrix[j, j + 1 :], joint, alpha=-1)
