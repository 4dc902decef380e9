"""The weight that makes up for what compressing the layers before this one did to its input.

Shapes: N outputs, K inputs. X_q is the input behind the compressed prefix, X what it is in the original model;
H = X_q^T X_q, M = (X - X_q)^T X_q, means over tokens. |X W^T - X_q Q^T|^2 is least around W* = W + W D, where
D = M (H + damp)^-1 is a ridge regression; Z is the same of the contrast, which has the noise of M and nothing else.
"""

import torch
from torch import Tensor

from compress.calibration.hessian import HessianResult
from compress.comm import Comm
from compress.errors import InputError
from compress.passes.solve import quadratic
from compress.passes.sweep import damped

Correction = tuple[Tensor, Tensor | None]


def check_drift(drift: float) -> None:
    if not 0 <= drift <= 1:
        raise InputError(f"drift {drift}; allowed: 0 (off) to 1")


def drift_correction(statistics: HessianResult, damp: float) -> Correction | None:
    """(D, Z), each [K, K]: W + W D is the ridge-regression weight; Z is D of noise alone (None: not known).

    None where nothing is compressed before this layer.
    """
    assert statistics.drift is not None
    if not bool(statistics.drift.any()):
        return None
    known = [m for m in (statistics.drift, statistics.contrast) if m is not None]
    # The inverse is symmetric: transposed, the products on the right are solutions of one system.
    lower, failed = torch.linalg.cholesky_ex(stiff := damped(statistics.hessian, damp))
    wanted = torch.cat(known).t()
    solved = (torch.linalg.solve(stiff, wanted) if int(failed) else torch.cholesky_solve(wanted, lower)).t()
    found = solved.split(len(statistics.hessian))
    return found[0], found[1] if len(found) > 1 else None


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
    matrix, contrast = correction
    step_NK = weight_NK @ matrix
    noise_NK = None if contrast is None else weight_NK @ contrast
    share = most * (reliability(comm, step_NK, noise_NK, hessian_KK) if measured else 1.0)
    return weight_NK + share * step_NK, share
