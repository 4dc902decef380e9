"""The matrix of a rank that a layer's outputs miss the least.

Shapes: N outputs, K inputs, R = min(N, K), r ranks. E = W - L R is the error, H the Hessian of the input.

    minimise over L [N, r], R [r, K]     tr(E H E^T)

With H = C C^T that is the truncated singular value decomposition of W C, times C^-1 (SVD-LLM, arXiv 2403.07378). Its
left singular vectors are the eigenvectors of W H W^T, and with U the r first of them

    L R = U (U^T W C) C^-1 = U U^T W,       tr(E H E^T) = sum of the eigenvalues beyond r:

W is projected. There is neither a root of H nor an inverse, so H may be singular and is not damped for this. Of several
optima, which a singular H has, a trace of the identity beside H (TIE) chooses the one that is closest to W itself.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from compress.system.comm import Comm
from compress.weights.formats.lowrank import low_rank
from compress.weights.terms import Tensors

# Of the mean of H's diagonal: far below what decides a rank, far above the last place of float64.
TIE = 1e-10


@dataclass(frozen=True)
class Spectrum:
    """vectors [N, R], orthonormal, and values [R], falling, the loss that each of them takes away; in float64."""

    vectors: Tensor
    values: Tensor


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


def approximated(
    comm: Comm, owner: int, weight_NK: Tensor, hessian_KK: Tensor, rank: int, dtype: torch.dtype, bits: int
) -> Tensors:
    """The best term of a rank for a weight, as it is stored; found by one rank of the run for all."""
    found = basis(comm, owner, weight_NK, hessian_KK, rank)
    return low_rank(found, weight_NK.double(), dtype, bits)
