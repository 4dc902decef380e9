"""The problem that GPTQ and its relatives solve: a Hessian in the order of its columns, and a target for each layer.

minimise over Q    tr((W* - Q) H (W* - Q)^T)        N outputs, K inputs: W*, Q [N, K], H [K, K]

Problem            H as a sweep visits it, and the factors of H + damp mean(diag H) I = U D U^T.

drift_correction   X_q [T, K] is the input behind the compressed prefix, X the same in the original model.
                   H = X_q^T X_q and M = (X - X_q)^T X_q, means over tokens. |X W^T - X_q Q^T|^2 is least around
                   W* = W + W D, where D = M (H + damp)^-1 is a ridge regression. Z is D of the contrast, which has
                   the noise of M and nothing else. Close relatives: GPTAQ (arXiv 2504.02692), Qronos (arXiv
                   2505.11695).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import CompressError, InputError
from compress.base.host_memory import OnHost, aside, here
from compress.solvers.statistics.hessian import HessianResult, precision, symmetric_blocks

DAMP = 0.01
DAMP_GROWTH, DAMP_LIMIT = 10.0, 1e3
# However many tokens: just enough damping to divide by the diagonal of H.
POLISH_DAMP = 1e-6
ActOrder = Literal["none", "static", "group"]


@dataclass(frozen=True)
class Problem:
    """A Hessian [K, K], its columns in the order of the sweep [K], and itself in that order, with unit upper [K, K]
    (which may wait on the host, `aside`) and diagonal [K] of its damped factors. damp: as the factors needed it;
    polish_damp: of H once the sweep is over. fixed: scales are fitted before the sweep, not as it comes to a group.
    correction: of the drift of the input; None: there is none."""

    hessian: Tensor
    order: Tensor
    in_order: Tensor
    factor: Tensor | OnHost
    diagonal: Tensor
    damp: float
    polish_damp: float = POLISH_DAMP
    fixed: bool = False
    correction: "Correction | None" = None

    @classmethod
    def of(
        cls,
        hessian_KK: Tensor,
        damp: float = DAMP,
        act_order: ActOrder = "none",
        group_size: int | None = None,
        polish_damp: float = POLISH_DAMP,
    ) -> "Problem":
        """The problem of a Hessian. group_size: inputs that share a scale, for act_order "group". Raises CompressError
        where no damping makes H positive definite."""
        order = column_order(hessian_KK.diagonal(), act_order, group_size)
        in_order = hessian_KK if act_order == "none" else hessian_KK[order][:, order]

        def flipped(level: float) -> Tensor:
            matrix = in_order.flip(0, 1)
            matrix.diagonal().add_(_damping(in_order.diagonal(), level).flip(0))
            return matrix

        lower, level = factorize(flipped, damp)
        upper = lower.flip(0, 1)
        del lower
        root = upper.diagonal().clone()
        fixed = act_order == "static"
        return cls(hessian_KK, order, in_order, upper.div_(root), root * root, level, polish_damp, fixed)

    @property
    def upper(self) -> Tensor:
        """The unit upper factor [K, K], in a new copy while it waits on the host."""
        return here(self.factor)

    @property
    def waits(self) -> bool:
        """True while the factor waits on the host, because the device has no room for all matrices."""
        return isinstance(self.factor, OnHost)

    def aside(self) -> "Problem":
        """The problem with its factor on the host."""
        return replace(self, factor=aside(self.factor))

    def converted(self, device: torch.device, dtype: torch.dtype) -> "Problem":
        """The problem on a device and in a dtype, for targets that are already corrected."""
        names = {"hessian": "hessian", "in_order": "in_order", "factor": "upper", "diagonal": "diagonal"}
        tensors = {field: getattr(self, name).to(device, dtype) for field, name in names.items()}
        return replace(self, **tensors, order=self.order.to(device), correction=None)

    def restore(self, columns_in_order: Tensor) -> Tensor:
        """[..., K] in the order of the sweep -> in the layer's own."""
        restored = torch.empty_like(columns_in_order)
        restored[..., self.order] = columns_in_order
        return restored

    @property
    def costs(self) -> Tensor:
        """[K] the cost of an error of each column in a sweep, in the layer's own order."""
        return self.restore(self.diagonal)

    def polish_hessian(self) -> Tensor:
        """[K, K] H of the steps after a sweep, in its order; as large as H, so computed where it is needed."""
        return add_damping(self.in_order, self.polish_damp)


def factorize(matrix: Callable[[float], Tensor], damp: float) -> tuple[Tensor, float]:
    """(The Cholesky factor of a matrix [K, K] with so much damping, which is raised tenfold until there is one; the
    damping.) Raises CompressError where there is none even with 1000: the statistics are not finite."""
    while damp <= DAMP_LIMIT:
        # Few matrices of [K, K] at a time: one may take a gigabyte.
        lower, failed = torch.linalg.cholesky_ex(matrix(damp))
        if not int(failed) and bool(torch.isfinite(lower.diagonal()).all()):
            return lower, damp
        damp = max(damp * DAMP_GROWTH, 1e-4)
    raise CompressError(
        f"the Hessian has no Cholesky factor even with damping {DAMP_LIMIT}; "
        "check the calibration data for non-finite activations"
    )


def add_damping(hessian_KK: Tensor, damp: float) -> Tensor:
    """H with `damp` times the mean of its live diagonal added; dead columns (zero diagonal) get that mean itself."""
    result = hessian_KK.clone()
    result.diagonal().add_(_damping(hessian_KK.diagonal(), damp))
    return result


def _damping(diagonal: Tensor, damp: float) -> Tensor:
    live = diagonal > 0
    mean = diagonal[live].mean() if bool(live.any()) else diagonal.new_ones(())
    return torch.where(live, damp * mean, mean * (1 + damp))


def column_order(diagonal_K: Tensor, act_order: ActOrder, group_size: int | None) -> Tensor:
    """The permutation [K] in which columns are visited; dead columns come last (of their group, for `group`)."""
    columns = len(diagonal_K)
    if act_order == "none":
        return torch.arange(columns, device=diagonal_K.device)
    if act_order == "static" or group_size is None:
        return torch.argsort(diagonal_K, descending=True, stable=True)
    groups = diagonal_K.view(-1, group_size)
    inside = torch.argsort(groups, dim=1, descending=True, stable=True)
    outside = torch.argsort(groups.amax(1), descending=True, stable=True)
    starts = torch.arange(0, columns, group_size, device=diagonal_K.device).unsqueeze(1)
    return (inside + starts)[outside].reshape(-1)


def quadratic(comm: Comm, error_NK: Tensor, hessian_KK: Tensor) -> float:
    """tr(E H E^T) of a symmetric H, each rank computing its share of the rows."""
    mine = error_NK[comm.rows_of(len(error_NK))]
    total = mine.new_zeros(())
    for part in symmetric_blocks(len(hessian_KK)):
        own, rest = mine[:, part], mine[:, part.stop :]
        # What lies beyond the block counts for both sides of the diagonal.
        product = torch.addmm(own @ hessian_KK[part, part], rest, hessian_KK[part.stop :, part], alpha=2)
        total += (product * own).sum()
    return float(comm.all_reduce(total))


@dataclass(frozen=True)
class Correction:
    """M and the contrast (None: the noise is not known), which are in the statistics, and their divisor: the Cholesky
    factor of H + damp, or, where rounding left it none, that matrix itself."""

    statistics: HessianResult
    divisor: Tensor
    factored: bool

    @property
    def drift(self) -> Tensor:
        drift = self.statistics.drift
        assert drift is not None
        return drift

    @property
    def contrast(self) -> Tensor:
        contrast = self.statistics.contrast
        assert contrast is not None
        return contrast

    @property
    def measures(self) -> bool:
        """True where the noise is known."""
        return self.statistics.contrast_of_all is not None

    @cached_property
    def matrices(self) -> tuple[Tensor, Tensor | None]:
        """D and Z, each [K, K]; `forget` gives them up."""
        return self._divide(self.drift), self._divide(self.contrast) if self.measures else None

    def forget(self) -> None:
        """Give up D and Z, which are computed again where they are asked for."""
        self.__dict__.pop("matrices", None)

    def of(self, weight_NK: Tensor) -> tuple[Tensor, Tensor | None]:
        """W D and W Z, each [N, K]. Few rows are cheaper divided themselves; how many are few is the layer's alone, so
        that it is corrected alike whichever layers a pass treats with it."""
        if 2 * len(weight_NK) > len(self.divisor):
            drift, contrast = self.matrices
            return weight_NK @ drift, None if contrast is None else weight_NK @ contrast
        step_NK = self._divide(weight_NK @ self.drift)
        return step_NK, self._divide(weight_NK @ self.contrast) if self.measures else None

    def _divide(self, x_NK: Tensor) -> Tensor:
        """x (H + damp)^-1."""
        # The inverse is symmetric: transposed, products on the right are solutions of one system.
        if self.factored:
            return torch.cholesky_solve(x_NK.t(), self.divisor).t()
        return torch.linalg.solve(self.divisor, x_NK.t()).t()

    def target(
        self, comm: Comm, weight_NK: Tensor, hessian_KK: Tensor, most: float, measured: bool
    ) -> tuple[Tensor, float]:
        """(W + a W D, a): the target of the codes. a is `most`, of what the noise leaves where it is `measured`."""
        step_NK, noise_NK = self.of(weight_NK)
        share = most * (reliability(comm, step_NK, noise_NK, hessian_KK) if measured else 1.0)
        return weight_NK + share * step_NK, share


def check_reliance(damp: float, drift: float, statistics: str) -> None:
    """Refuse options of a Hessian that cannot be. Raises InputError."""
    if not 0 < damp <= 1:
        raise InputError(f"damp {damp}; allowed: above 0, at most 1 (0.01 is usual)")
    if not 0 <= drift <= 1:
        raise InputError(f"drift {drift}; allowed: 0 (off) to 1")
    precision(statistics)


def drift_correction(statistics: HessianResult, damp: float) -> Correction | None:
    """The factors of W + W D, the ridge-regression weight; None where nothing is compressed before this layer."""
    drift = statistics.drift
    assert drift is not None
    if not bool(drift.any()):
        return None
    del drift
    lower, failed = torch.linalg.cholesky_ex(stiff := add_damping(statistics.hessian, damp))
    return Correction(statistics, stiff if int(failed) else lower, not int(failed))


def reliability(comm: Comm, step_NK: Tensor, noise_NK: Tensor | None, hessian_KK: Tensor) -> float:
    """The share of a correction to apply, 0 to 1: 1 - tr(Z H Z^T) / tr(D H D^T); 0 where the noise is not known."""
    if noise_NK is None:
        return 0.0
    size = quadratic(comm, step_NK, hessian_KK)
    return max(0.0, 1 - quadratic(comm, noise_NK, hessian_KK) / size) if size > 0 else 0.0
