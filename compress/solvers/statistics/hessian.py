"""The second moments of a layer's input, summed over tokens and ranks."""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import one_of

# Tokens for each input of a layer below which `Hessian` keeps halves. With as many, even GPTQ that relies fully on its
# statistics does better than rounding on other text; with a quarter of that it may not.
FEW = 2
# Columns of a block of a symmetric matrix, at least, and blocks, at most: of those on both sides of the diagonal one is
# computed.
BLOCK, BLOCKS = 256, 8
Precision = Literal["float32", "float64"]


def precision(statistics: str) -> torch.dtype:
    """The dtype named by an option `statistics`; raises InputError for another name."""
    one_of("statistics", statistics, get_args(Precision))
    return torch.float64 if statistics == "float64" else torch.float32


@dataclass(frozen=True)
class HessianResult:
    """Second moments, as means over tokens, of the layer's input X [tokens, K] and its input in the uncompressed model,
    X_ref.

    hessian = X^T X [K, K]; drift = (X_ref - X)^T X [K, K], None without a reference. shrinkage: 0 to 1, how much of the
    elements off the diagonal of the Hessian is noise of having seen so few tokens. few: True where there are fewer than
    FEW tokens for each input. halves: then, the results of two disjoint halves of the tokens (empty where a half has no
    token). contrast_of_all [K, K]: the contrast, but for a factor.
    """

    hessian: Tensor
    tokens: int
    drift: Tensor | None = None
    contrast_of_all: Tensor | None = None
    shrinkage: float = 0.0
    few: bool = False
    halves: tuple["HessianResult", ...] = ()
    contrast_factor: float = 1.0

    @property
    def contrast(self) -> Tensor | None:
        """[K, K] a matrix with the noise of the drift and expectation zero; None without a reference, or where a half
        has no token. The noise of a mean grows as its tokens get fewer: a half's is a multiple of that of all."""
        if self.contrast_of_all is None or self.contrast_factor == 1.0:
            return self.contrast_of_all
        return self.contrast_of_all * self.contrast_factor

    @property
    def noise(self) -> float:
        """The share of noise in the off-diagonal elements of the Hessian, as ridge regression counts it: inputs per
        token."""
        return len(self.hessian) / max(self.tokens, 1)

    def double(self) -> "HessianResult":
        """This result in float64, without halves."""
        drift, contrast = (None if t is None else t.double() for t in (self.drift, self.contrast))
        return HessianResult(self.hessian.double(), self.tokens, drift, contrast, self.shrinkage, self.few)

    def shrunk(self) -> "HessianResult":
        """This result without the expected noise of the Hessian: off-diagonal elements are reduced by the share
        `shrinkage`."""
        hessian = self.hessian * (1 - self.shrinkage)
        hessian.diagonal().copy_(self.hessian.diagonal())
        return replace(self, hessian=hessian)


class Hessian:
    """X^T X of the layer's input, and its drift from the uncompressed model's input when `reference` is set.

    Accumulated in `dtype`: float32 keeps products of 16-bit inputs exact; float64 makes the sum independent of the
    order of micro-batches to 1e-16. Being symmetric, X^T X is summed on one side of its diagonal (in blocks) alone.

    The shrinkage is the one of least expected squared error towards a diagonal of unequal variances, for moments about
    zero (Ledoit and Wolf 2004; Schaefer and Strimmer 2005, table 2, target D),

        sum_ij Var(h_ij) / sum_ij h_ij^2,   i != j,    Var(h_ij) = (mean over tokens of (x_i x_j)^2 - h_ij^2) / (T - 1)

    of which sum_ij (x_i x_j)^2 is one number per token: the square of sum_i x_i^2, less sum_i x_i^4.

    The contrast is the difference of the drift's means over the first and the second half of every micro-batch, scaled
    to the variance of the mean over all. Halves are not tokens at random because those of one sequence resemble each
    other; in micro-batches of one sequence they are its beginning and its end, and what differs between those counts
    as noise, too.

    The first halves have sums of their own (`early`) for as long as tokens are few: a solution from one half of them is
    judged on the other. That is one matrix more, given back before there are enough tokens to solve at length.
    """

    def __init__(
        self, channels: int, device: torch.device, *, dtype: torch.dtype = torch.float32, reference: bool = False
    ) -> None:
        self.total = torch.zeros(channels, channels, dtype=dtype, device=device)
        self.early: Tensor | None = torch.zeros_like(self.total)
        self.drift = [torch.zeros_like(self.total) for _ in range(2)] if reference else None
        self.counts = [0, 0]
        self.products = torch.zeros(2, dtype=torch.float64, device=device)
        self.found: HessianResult | None = None

    def update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        x, half = x_MK.to(self.total.dtype), len(x_MK) // 2
        parts = (slice(half), slice(half, None))
        _add_products(self.total, x)
        self.counts = [self.counts[0] + half, self.counts[1] + len(x) - half]
        self._forget_early()
        if self.early is not None:
            _add_products(self.early, x[:half])
        squares = x.square()
        size_M = squares.sum(1, keepdim=True)
        shares = squares / size_M.clamp(min=torch.finfo(x.dtype).tiny)
        products_M = size_M[:, 0].double().square() * (1 - shares.square().sum(1))
        self.products += torch.stack([products_M[part].sum() for part in parts])
        if self.drift is not None:
            assert reference_MK is not None
            change = reference_MK.to(x.dtype) - x
            for sum_KK, part in zip(self.drift, parts, strict=True):
                sum_KK.addmm_(change[part].t(), x[part])

    def _forget_early(self) -> None:
        if sum(self.counts) >= FEW * len(self.total):
            self.early = None

    def sync(self, comm: Comm) -> None:
        self.counts = comm.all_reduce(torch.tensor(self.counts, device=self.total.device)).tolist()
        # A rank that has seen many tokens has no early sums any more; then there are many in all.
        self._forget_early()
        for tensor in (self.total, self.products, self.early, *(self.drift or ())):
            if tensor is not None:
                comm.all_reduce(tensor)

    def result(self) -> HessianResult:
        """The moments. Sums become means where they are: a matrix may take a gigabyte."""
        if self.found is None:
            self.found = self._result()
        return self.found

    def _result(self) -> HessianResult:
        first, second = self.counts
        tokens = first + second
        for sum_KK in (self.total, self.early):
            if sum_KK is not None:
                for part in symmetric_blocks(len(sum_KK)):  # the blocks below the diagonal
                    sum_KK[part.stop :, part] = sum_KK[part, part.stop :].t()
        late = None if self.early is None or not first or not second else self.total - self.early
        drift = contrast = None
        if self.drift is not None:
            drift = (self.drift[0] + self.drift[1]).div_(max(tokens, 1))
            for sum_KK, count in zip(self.drift, self.counts, strict=True):
                sum_KK.div_(max(count, 1))
            if first and second:
                contrast = self.drift[0] if late is None else self.drift[0].clone()
                contrast.sub_(self.drift[1]).mul_((first * second) ** 0.5 / tokens)
        noise = shrinkage_of(self.total.div_(max(tokens, 1)), tokens, self.products.sum())
        whole = HessianResult(self.total, tokens, drift, contrast, noise, few=self.early is not None)
        if self.early is None or late is None:
            self.early = self.drift = None
            return whole
        drifts, halves = (None, None) if self.drift is None else self.drift, []
        for sum_KK, count, products, of_half in zip(
            (self.early, late), self.counts, self.products, drifts, strict=True
        ):
            noise, factor = shrinkage_of(sum_KK.div_(count), count, products), (tokens / count) ** 0.5
            halves.append(HessianResult(sum_KK, count, of_half, contrast, noise, contrast_factor=factor))
        return replace(whole, halves=tuple(halves))


def symmetric_blocks(columns: int) -> list[slice]:
    """Runs of columns in which a symmetric matrix is walked on one side of its diagonal."""
    size = max(BLOCK, -(-columns // BLOCKS))
    return [slice(first, min(first + size, columns)) for first in range(0, columns, size)]


def _add_products(sum_KK: Tensor, x_MK: Tensor) -> None:
    """Add x^T x to a sum, but for the blocks below its diagonal."""
    for part in symmetric_blocks(len(sum_KK)):
        sum_KK[part, part.start :].addmm_(x_MK[:, part].t(), x_MK[:, part.start :])


def shrinkage_of(moments: Tensor, tokens: int, products: Tensor) -> float:
    """The share of noise in the off-diagonal elements of second moments, of [K, K] or of several such squares.
    products: the sum over tokens and pairs i != j of (x_i x_j)^2."""
    # In units of the trace: squares of the elements themselves may be beyond float32.
    trace = moments.diagonal(dim1=-2, dim2=-1).sum().double()
    if not trace > 0:
        return 0.0
    own = (moments / trace.to(moments.dtype)).square()
    square = own.sum(dtype=torch.float64) - own.diagonal(dim1=-2, dim2=-1).sum(dtype=torch.float64)
    if tokens < 2 or not square > 0:
        return float(tokens == 1)
    return float(((products / trace.square() / tokens - square) / (square * (tokens - 1))).clamp(0, 1))
