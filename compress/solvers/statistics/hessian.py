"""The second moments of a layer's input, summed over tokens and ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from compress.base.collectives import Comm
from compress.base.errors import one_of
from compress.base.host_memory import OnHost, aside, here

# Tokens for each input of a layer below which `Hessian` keeps halves. With as many, even GPTQ that relies fully on its
# statistics does better than rounding on other text; with a quarter of that it may not.
FEW = 2
# Columns of a block of a symmetric matrix, at least, and blocks, at most: of those on both sides of the diagonal one is
# computed.
BLOCK, BLOCKS = 256, 8
# Rows of an input whose copies in the dtype of the sums exist at a time.
CONVERTED = 2048
Precision = Literal["float32", "float64"]


def precision(statistics: str) -> torch.dtype:
    """The dtype named by an option `statistics`; raises InputError for another name."""
    one_of("statistics", statistics, get_args(Precision))
    return torch.float64 if statistics == "float64" else torch.float32


@dataclass(frozen=True)
class HessianResult:
    """Second moments, as means over tokens, of the layer's input X [tokens, K] and its input in the uncompressed model,
    X_ref.

    hessian = X^T X [K, K]; drift = (X_ref - X)^T X [K, K], None without a reference; either in a copy made when
    asked for, while the matrices wait on the host (`aside`). shrinkage: 0 to 1, how much of the elements off the
    diagonal of the Hessian is noise of having seen so few tokens. few: True where there are fewer than FEW tokens for
    each input. halves: then, the results of two disjoint halves of the tokens (empty where a half has no token).
    contrast_of_all [K, K]: the contrast, but for a factor.
    """

    held: Tensor | OnHost
    tokens: int
    held_drift: Tensor | OnHost | None = None
    contrast_of_all: Tensor | OnHost | None = None
    shrinkage: float = 0.0
    few: bool = False
    halves: tuple["HessianResult", ...] = ()
    contrast_factor: float = 1.0

    @property
    def hessian(self) -> Tensor:
        return here(self.held)

    @property
    def drift(self) -> Tensor | None:
        return here(self.held_drift)

    @property
    def waits(self) -> bool:
        """True while the matrices wait on the host, because the device has no room for all of them."""
        return isinstance(self.held, OnHost)

    def aside(self, known: dict[int, OnHost] | None = None) -> "HessianResult":
        """This result with its matrices on the host. known: as `host_memory.aside` has it."""
        made = {} if known is None else known
        matrices = aside((self.held, self.held_drift, self.contrast_of_all), made)
        named = dict(zip(("held", "held_drift", "contrast_of_all"), matrices, strict=True))
        return replace(self, **named, halves=tuple(half.aside(made) for half in self.halves))

    @property
    def contrast(self) -> Tensor | None:
        """[K, K] a matrix with the noise of the drift and expectation zero; None without a reference, or where a half
        has no token. The noise of a mean grows as its tokens get fewer: a half's is a multiple of that of all."""
        contrast = here(self.contrast_of_all)
        return contrast if contrast is None or self.contrast_factor == 1.0 else contrast * self.contrast_factor

    @property
    def noise(self) -> float:
        """The share of noise in the off-diagonal elements of the Hessian, as ridge regression counts it: inputs per
        token."""
        return self.held.shape[0] / max(self.tokens, 1)

    def double(self) -> "HessianResult":
        """This result in float64, without halves."""
        drift, contrast = (None if t is None else t.double() for t in (self.drift, self.contrast))
        return HessianResult(self.hessian.double(), self.tokens, drift, contrast, self.shrinkage, self.few)

    def shrunk(self) -> "HessianResult":
        """This result without the expected noise of the Hessian: off-diagonal elements are reduced by the share
        `shrinkage`."""
        whole = self.hessian
        hessian = whole * (1 - self.shrinkage)
        hessian.diagonal().copy_(whole.diagonal())
        return replace(self, held=hessian)


class Hessian:
    """X^T X of the layer's input, and its drift from the uncompressed model's input when `reference` is set.

    Accumulated in `dtype`: float32 keeps products of 16-bit inputs exact, also those of matrix instructions on a GPU
    (TF32, whose 11 bits hold such inputs, and differences of them with an error that is small beside their noise);
    float64 makes the sum independent of the order of micro-batches to 1e-16. Being symmetric, X^T X is summed on one
    side of its diagonal (in blocks) alone.

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
        with matrix_instructions(x_MK):
            self._update(x_MK, reference_MK)

    def _update(self, x_MK: Tensor, reference_MK: Tensor | None) -> None:
        half = len(x_MK) // 2
        parts = (slice(half), slice(half, None))
        for x in self._converted(x_MK):
            _add_products(self.total, x)
        self.counts = [self.counts[0] + half, self.counts[1] + len(x_MK) - half]
        self._forget_early()
        if self.early is not None:
            for x in self._converted(x_MK[:half]):
                _add_products(self.early, x)
        products_M = torch.cat([_products(x.to(self.total.dtype)) for x in x_MK.split(CONVERTED)])
        self.products += torch.stack([products_M[part].sum() for part in parts])
        if self.drift is not None:
            assert reference_MK is not None
            for sum_KK, part in zip(self.drift, parts, strict=True):
                for x, other in zip(*map(self._converted, (x_MK[part], reference_MK[part])), strict=True):
                    sum_KK.addmm_((other - x).t(), x)

    def _converted(self, x_MK: Tensor) -> Iterator[Tensor]:
        """Rows in the dtype of the sums: those of another dtype in short runs, so that few copies exist at a time."""
        dtype = self.total.dtype
        runs = (x_MK,) if x_MK.dtype == dtype else x_MK.split(CONVERTED)
        return (run.to(dtype) for run in runs)

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
            sums, counts = self.drift, [max(count, 1) for count in self.counts]
            of_halves = None if late is None else [sum_KK / n for sum_KK, n in zip(sums, counts, strict=True)]
            early_KK, drift = sums
            for rows in symmetric_blocks(len(drift)):  # the sums become the drift and its contrast where they are
                late_mean = drift[rows] / counts[1]
                drift[rows] = (drift[rows] + early_KK[rows]).div_(max(tokens, 1))
                early_KK[rows] = (early_KK[rows] / counts[0]).sub_(late_mean)
            if first and second:
                contrast = early_KK.mul_((first * second) ** 0.5 / tokens)
            self.drift = of_halves
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


@contextmanager
def matrix_instructions(x: Tensor) -> Iterator[None]:
    """Multiply float32 matrices by TF32 on a GPU meanwhile, where x has 16 bits."""
    settings: Any = torch.backends.cuda.matmul
    before = settings.fp32_precision
    if x.is_cuda and x.dtype in (torch.float16, torch.bfloat16):
        settings.fp32_precision = "tf32"
    try:
        yield
    finally:
        settings.fp32_precision = before


def _products(x_MK: Tensor) -> Tensor:
    """[M] of each token, in float64, the sum over pairs i != j of (x_i x_j)^2."""
    squares = x_MK.square()
    size_M = squares.sum(1, keepdim=True)
    shares = squares.div_(size_M.clamp(min=torch.finfo(x_MK.dtype).tiny))
    return size_M[:, 0].double().square() * (1 - shares.square_().sum(1))


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

    def squared(part: Tensor) -> Tensor:
        return (part / trace.to(part.dtype)).square_().sum(dtype=torch.float64)

    blocks = (moments[..., rows, :] for rows in symmetric_blocks(moments.shape[-2]))
    square = sum(map(squared, blocks)) - squared(moments.diagonal(dim1=-2, dim2=-1))
    if tokens < 2 or not square > 0:
        return float(tokens == 1)
    return float(((products / trace.square() / tokens - square) / (square * (tokens - 1))).clamp(0, 1))
