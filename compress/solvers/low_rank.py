"""The matrix of a rank that a layer's outputs miss the least.

Shapes: N outputs, K inputs, R = min(N, K), r ranks. E = W - L R is the error, H the Hessian of the input.

    minimise over L [N, r], R [r, K]     tr(E H E^T)

With H = C C^T that is the truncated singular value decomposition of W C, times C^-1 (SVD-LLM, arXiv 2403.07378). Its
left singular vectors are the eigenvectors of W H W^T, and with U the r first of them

    L R = U (U^T W C) C^-1 = U U^T W,       tr(E H E^T) = sum of the eigenvalues beyond r:

W is projected. There is neither a root of H nor an inverse, so H may be singular and is not damped for this. Of several
optima, which a singular H has, a trace of the identity beside H (TIE) chooses the one that is closest to W itself.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.solvers.hessian_with_drift import quadratic
from compress.solvers.outliers import dearest
from compress.weights.formats.lowrank import low_rank
from compress.weights.formats.sparse import sparse
from compress.weights.matrix import Term, Weight
from compress.weights.terms import Tensors

# Of the mean of H's diagonal: far below what decides a rank, far above the last place of float64.
TIE = 1e-10


@dataclass(frozen=True)
class Spectrum:
    """vectors [N, R], orthonormal, and values [R], falling, the loss that each of them takes away; in float64."""

    vectors: Tensor
    values: Tensor


def svd_llm(
    weight_NK: Tensor,
    hessian_KK: Tensor,
    *,
    rank: int,
    factor_bits: int = 16,
    outliers: float = 0.0,
    iterations: int = 4,
    scale_dtype: torch.dtype | None = None,
) -> tuple[Weight, float]:
    """(A low rank and, where asked for, outliers beside it; their loss tr(E H E^T)). Pure: no device, no state.

    rank: 1 to min(N, K). factor_bits: 16 or 8, of the stored factors. outliers: the share of weights that are exact.
    iterations: rounds in which outliers are chosen anew, and the low rank fitted to the rest. scale_dtype: in which
    factors and outliers are stored (the weight's own, if not given).
    """
    target, hessian, alone = weight_NK.double(), hessian_KK.double(), Comm()
    dtype = weight_NK.dtype if scale_dtype is None else scale_dtype

    def low(rest_NK: Tensor) -> Tensors:
        return approximate(alone, alone.rank, rest_NK, hessian, rank, dtype, factor_bits)

    def loss(error_NK: Tensor) -> float:
        return quadratic(alone, error_NK, hessian)

    return with_outliers(target, hessian.diagonal(), low, loss, dtype, outliers, iterations)


def with_outliers(
    target_NK: Tensor,
    diagonal_K: Tensor,
    low: Callable[[Tensor], Tensors],
    loss: Callable[[Tensor], float],
    dtype: torch.dtype,
    share: float,
    iterations: int,
) -> tuple[Weight, float]:
    """(The best of what turns of a low rank and of outliers find, its loss). target: float64. diagonal: that of H. low:
    the best low rank for a matrix [N, K]. loss: of an error [N, K]. share: of outliers; 0 is a low rank alone."""
    turns: list[tuple[Weight, float]] = []
    outliers: tuple[Term, ...] = ()
    for turn in range(1 + 2 * (iterations if share else 0)):
        if turn % 2 == 0:
            factors = low(target_NK - sum(term.dequantize(torch.float64) for term in outliers))
        else:
            rest = target_NK - factors.dequantize(torch.float64)
            outliers = (sparse(rest.to(dtype), dearest(rest, diagonal_K, share)),)
        weight = Weight((factors, *outliers))
        turns.append((weight, loss(target_NK - weight.dequantize(torch.float64))))
    return min(turns, key=lambda each: each[1])


def spectrum(weight_NK: Tensor, hessian_KK: Tensor) -> Spectrum:
    """The eigenvectors of W H W^T, those beyond R left out, whose values are 0."""
    weight, hessian = weight_NK.double(), hessian_KK.double().clone()
    mean = hessian.diagonal().mean()
    # Statistics that are all zero tell no direction from another: then the weight itself does.
    hessian.diagonal().add_(TIE * mean if mean > 0 else 1.0)
    outer, small = torch.linalg.qr(weight) if len(weight) > weight.shape[1] else (None, weight)
    gram = small @ hessian @ small.t()
    values, vectors = torch.linalg.eigh((gram + gram.t()) / 2)
    values, vectors = values.flip(0).clamp(min=0), vectors.flip(1)
    if outer is not None:
        vectors = outer @ vectors
    # A vector and its negative are as good: the largest element is positive, whatever the last places are.
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    vectors = torch.where(largest < 0, -vectors, vectors)
    # An output of zeros stays one, to the last place.
    return Spectrum(vectors * weight.any(1, keepdim=True), values if mean > 0 else torch.zeros_like(values))


def basis(comm: Comm, owner: int, weight_NK: Tensor, hessian_KK: Tensor, rank: int) -> Tensor:
    """[N, rank] the first vectors of the spectrum, found by one rank: the same bits on all of them."""
    if comm.rank == owner:
        found = spectrum(weight_NK, hessian_KK).vectors[:, :rank].contiguous()
    else:
        found = weight_NK.new_zeros(len(weight_NK), rank, dtype=torch.float64)
    return comm.all_reduce(found)


def approximate(
    comm: Comm, owner: int, weight_NK: Tensor, hessian_KK: Tensor, rank: int, dtype: torch.dtype, bits: int
) -> Tensors:
    """The best term of a rank for a weight, as it is stored; found by one rank of the run for all."""
    found = basis(comm, owner, weight_NK, hessian_KK, rank)
    return low_rank(found, weight_NK.double(), dtype, bits)
