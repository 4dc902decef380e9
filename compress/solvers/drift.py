"""The weight that makes up for what compressing the layers before this one did to its input.

Shapes: N outputs, K inputs. X_q is the input behind the compressed prefix, X what it is in the original model;
H = X_q^T X_q, M = (X - X_q)^T X_q, means over tokens. |X W^T - X_q Q^T|^2 is least around W* = W + W D, where
D = M (H + damp)^-1 is a ridge regression; Z is the same of the contrast, which has the noise of M and nothing else.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from compress.calibration.hessian import HessianResult
from compress.errors import InputError
from compress.solvers.loss import quadratic
from compress.solvers.sweep import damped
from compress.system.comm import Comm


@dataclass(frozen=True)
class Correction:
    """M [K, K] and the contrast (None: the noise is not known); stiff: H + damp, lower: its Cholesky factor, or None
    where rounding left it none."""

    drift: Tensor
    contrast: Tensor | None
    stiff: Tensor
    lower: Tensor | None

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor | None]:
        """D and Z, each [K, K]."""
        return self._divided(self.drift), None if self.contrast is None else self._divided(self.contrast)

    def of(self, weight_NK: Tensor) -> tuple[Tensor, Tensor | None]:
        """W D and W Z, each [N, K]. Few rows are cheaper divided themselves; how many are few is the layer's alone, so
        that it is corrected alike whichever layers a pass treats with it."""
        if 2 * len(weight_NK) > len(self.stiff):
            drift, contrast = self.matrices
            return weight_NK @ drift, None if contrast is None else weight_NK @ contrast
        step_NK = self._divided(weight_NK @ self.drift)
        return step_NK, None if self.contrast is None else self._divided(weight_NK @ self.contrast)

    def _divided(self, x_NK: Tensor) -> Tensor:
        """x (H + damp)^-1."""
        # The inverse is symmetric: transposed, products on the right are solutions of one system.
        if self.lower is None:
            return torch.linalg.solve(self.stiff, x_NK.t()).t()
        return torch.cholesky_solve(x_NK.t(), self.lower).t()


def check_drift(drift: float) -> None:
    if not 0 <= drift <= 1:
        raise InputError(f"drift {drift}; allowed: 0 (off) to 1")


def drift_correction(statistics: HessianResult, damp: float) -> Correction | None:
    """What W + W D needs, the ridge-regression weight; None where nothing is compressed before this layer."""
    assert statistics.drift is not None
    if not bool(statistics.drift.any()):
        return None
    lower, failed = torch.linalg.cholesky_ex(stiff := damped(statistics.hessian, damp))
    return Correction(statistics.drift, statistics.contrast, stiff, None if int(failed) else lower)


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
