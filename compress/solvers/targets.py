"""Targets: the values that rounding or pruning a weight should aim at, in place of the weight itself.

Shapes: N outputs, K inputs.

    drift_correction, aimed   X_q [T, K] is the input behind the compressed prefix, X the same in the original model.
                              H = X_q^T X_q and M = (X - X_q)^T X_q, means over tokens. |X W^T - X_q Q^T|^2 is least
                              around W* = W + W D, where D = M (H + damp)^-1 is a ridge regression. Z is D of the
                              contrast, which has the noise of M and nothing else. Close relatives: GPTAQ (arXiv
                              2504.02692), Qronos (arXiv 2505.11695).

    settled                   of every row w with the mask m, v is zero where m is, and minimises (w - v) H (w - v)^T,
                              H [K, K] positive definite.

Rows have different masks, so a factorization serves one row alone. Conjugate gradients (Hestenes and Stiefel 1952),
preconditioned by the diagonal of H, take one product with H per step for all rows. No step raises the loss: it falls
by a |r|^2, a being the step and r the preconditioned residual. A row is done once a step gains less than a part of
what all its steps have gained. With v at its optimum, anything else in the mask, q, has the loss of v plus
(v - q) H (v - q)^T: rounding the survivors can aim at v, and has its own errors to make up for, not those of the zeros.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import InputError
from compress.solvers.column_sweep import damped
from compress.solvers.loss import quadratic
from compress.solvers.statistics.hessian import HessianResult

STEPS = 64
# A step that gains less than this part of what a row has gained so far is its last.
LEAST_GAIN = 0.01


@dataclass(frozen=True)
class Correction:
    """M [K, K] and the contrast (None: the noise is not known), and what divides them: the Cholesky factor of
    H + damp, or, where rounding left it none, that matrix itself."""

    drift: Tensor
    contrast: Tensor | None
    divisor: Tensor
    factored: bool

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor | None]:
        """D and Z, each [K, K]; `forget` gives them up."""
        return self._divided(self.drift), None if self.contrast is None else self._divided(self.contrast)

    def forget(self) -> None:
        """Give up D and Z, which are computed again where they are asked for."""
        self.__dict__.pop("matrices", None)

    def of(self, weight_NK: Tensor) -> tuple[Tensor, Tensor | None]:
        """W D and W Z, each [N, K]. Few rows are cheaper divided themselves; how many are few is the layer's alone, so
        that it is corrected alike whichever layers a pass treats with it."""
        if 2 * len(weight_NK) > len(self.divisor):
            drift, contrast = self.matrices
            return weight_NK @ drift, None if contrast is None else weight_NK @ contrast
        step_NK = self._divided(weight_NK @ self.drift)
        return step_NK, None if self.contrast is None else self._divided(weight_NK @ self.contrast)

    def _divided(self, x_NK: Tensor) -> Tensor:
        """x (H + damp)^-1."""
        # The inverse is symmetric: transposed, products on the right are solutions of one system.
        if self.factored:
            return torch.cholesky_solve(x_NK.t(), self.divisor).t()
        return torch.linalg.solve(self.divisor, x_NK.t()).t()


def check_drift(drift: float) -> None:
    if not 0 <= drift <= 1:
        raise InputError(f"drift {drift}; allowed: 0 (off) to 1")


def drift_correction(statistics: HessianResult, damp: float) -> Correction | None:
    """The factors of W + W D, the ridge-regression weight; None where nothing is compressed before this layer."""
    assert statistics.drift is not None
    if not bool(statistics.drift.any()):
        return None
    lower, failed = torch.linalg.cholesky_ex(stiff := damped(statistics.hessian, damp))
    return Correction(statistics.drift, statistics.contrast, stiff if int(failed) else lower, not int(failed))


def reliability(comm: Comm, step_NK: Tensor, noise_NK: Tensor | None, hessian_KK: Tensor) -> float:
    """The share of a correction to apply, 0 to 1: 1 - tr(Z H Z^T) / tr(D H D^T); 0 where the noise is not known."""
    if noise_NK is None:
        return 0.0
    size = quadratic(comm, step_NK, hessian_KK)
    return max(0.0, 1 - quadratic(comm, noise_NK, hessian_KK) / size) if size > 0 else 0.0


def aimed(
    comm: Comm, weight_NK: Tensor, correction: Correction, hessian_KK: Tensor, most: float, measured: bool
) -> tuple[Tensor, float]:
    """(W + a W D, a): what codes should aim at. a is `most`, of what the noise leaves where it is `measured`."""
    step_NK, noise_NK = correction.of(weight_NK)
    share = most * (reliability(comm, step_NK, noise_NK, hessian_KK) if measured else 1.0)
    return weight_NK + share * step_NK, share


def settled(weight_NK: Tensor, values_NK: Tensor, hessian_KK: Tensor, kept_NK: Tensor, steps: int = STEPS) -> Tensor:
    """[N, K] values in the mask after at most so many steps from `values`, which are zero where nothing is kept."""
    kept = kept_NK.to(weight_NK.dtype)
    scale_K = hessian_KK.diagonal().reciprocal()
    found = values_NK.clone()
    residual = (weight_NK - values_NK) @ hessian_KK * kept
    downhill = residual * scale_K
    direction, slope_N = downhill, (residual * downhill).sum(1, keepdim=True)
    gained_N, rows_N = torch.zeros_like(slope_N), torch.arange(len(found), device=found.device)
    for _ in range(steps):
        product = direction @ hessian_KK * kept
        step_N = _over(slope_N, (direction * product).sum(1, keepdim=True))
        found[rows_N] += step_N * direction
        gain_N = step_N * slope_N
        gained_N = gained_N + gain_N
        # Each row by itself, whichever rows a rank has beside it.
        going = (gain_N > LEAST_GAIN * gained_N).squeeze(1)
        if not bool(going.all()):
            rows_N, kept, gained_N, slope_N, step_N = (t[going] for t in (rows_N, kept, gained_N, slope_N, step_N))
            residual, product, direction = (t[going] for t in (residual, product, direction))
        if not len(rows_N):
            break
        residual = residual - step_N * product
        downhill = residual * scale_K
        before_N, slope_N = slope_N, (residual * downhill).sum(1, keepdim=True)
        direction = downhill + _over(slope_N, before_N) * direction
    return found


def _over(above: Tensor, below: Tensor) -> Tensor:
    """The quotient; 0 of a row that has arrived."""
    return torch.where(below > 0, above / below.clamp(min=torch.finfo(below.dtype).tiny), 0.0)
