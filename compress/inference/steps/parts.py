"""The parts of a block's form: how results of a trial are compared, and which norm a module computes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from compress.inference.layers.base import OnCodes
from compress.inference.steps.trace import Called
from compress.kernels.step_functions import Activation, Norm

# Relative errors up to which two results are the same.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
EPSILONS = ("variance_epsilon", "eps", "epsilon", "norm_eps")
# Inputs of a norm so small that its epsilon tells.
SMALL = 1e-3


@dataclass(frozen=True)
class NormForm:
    """A norm over rows of `size` numbers."""

    module: nn.Module
    variant: Norm
    epsilon: float
    size: int

    @property
    def weight(self) -> Tensor | None:
        return self.module._parameters.get("weight")

    @property
    def bias(self) -> Tensor | None:
        return self.module._parameters.get("bias")


class ProductColumns(NamedTuple):
    """Columns [start, stop) of what a product returns."""

    product: nn.Module
    start: int
    stop: int


class States(NamedTuple):
    """Queries, keys and values: their columns of products, their norms, and how many numbers of a head turn."""

    query: ProductColumns
    key: ProductColumns
    value: ProductColumns
    query_norm: NormForm | None
    key_norm: NormForm | None
    rotated: int


@dataclass(frozen=True)
class AttentionForm:
    """Attention and all before it. products: layers that read one input."""

    norm: NormForm | None
    products: tuple[nn.Module, ...]
    states: States
    heads: int
    key_heads: int
    size: int
    value_size: int
    scale: float
    output: nn.Module
    after: NormForm | None


@dataclass(frozen=True)
class MlpForm:
    """An MLP. whole: a module that is called as it is; otherwise `products` read one input, and `down` reads
    act(gate) up, or act(gate)."""

    norm: NormForm | None
    shares_norm: bool  # it reads what attention reads
    whole: nn.Module | None
    products: tuple[nn.Module, ...]
    gate: ProductColumns | None
    up: ProductColumns | None
    activation: Activation
    down: nn.Module | None
    after: NormForm | None


@dataclass(frozen=True)
class BlockForm:
    """A block. sums: the two additions, as pairs of x (the input), a (attention's), m (the MLP's) and s (the first
    sum)."""

    attention: AttentionForm
    mlp: MlpForm
    parallel: bool
    sums: tuple[str, str]


def error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of what is expected; infinite for other shapes and dtypes."""
    if found.numel() != expected.numel() or found.dtype != expected.dtype:
        return float("inf")
    wide = expected.double().flatten()
    return float((found.double().flatten() - wide).norm() / wide.norm().clamp_min(torch.finfo(torch.double).tiny))


def near(found: Tensor, expected: Tensor) -> bool:
    """True for results that are equal within the roundings of their dtype."""
    return error(found, expected) <= TOLERANCE[expected.dtype]


def same(a: Tensor, b: Tensor) -> bool:
    """True for the same numbers in the same order, whatever the shapes."""
    return a.dtype == b.dtype and a.numel() == b.numel() and torch.equal(a.flatten(), b.flatten())


def multiplies(called: Called) -> bool:
    """True for the call of a layer that multiplies by a matrix."""
    return isinstance(called.module, OnCodes | nn.Linear)


def normalize(variant: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None, epsilon: float) -> Tensor:
    """A norm over the last dimension, by torch."""
    if variant == Norm.LAYER:
        return layer_norm(x, x.shape[-1:], weight, bias, epsilon)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if weight is None:
        return wide.to(x.dtype)
    if variant == Norm.RMS:
        return weight * wide.to(x.dtype)
    return (wide * (weight.float() + (variant == Norm.RMS_PLUS_ONE))).to(x.dtype)


def fit_norm(called: Called) -> NormForm | None:
    """The norm that a module computes; None for a module that computes none."""
    module, x = called.module, called.x
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    size = x.shape[-1]
    epsilons = {value for name in EPSILONS if isinstance(value := getattr(module, name, None), float)}
    if not epsilons or any(part is not None and part.shape != (size,) for part in (weight, bias)):
        return None
    small = x * SMALL
    try:
        expected = module.forward(small)
    except Exception:  # noqa: BLE001 - any module may be tried here
        return None
    fits = []
    for epsilon in epsilons:
        for variant in Norm:
            if variant != Norm.LAYER and bias is not None:
                continue
            errors = [
                error(normalize(variant, given, weight, bias, epsilon), wanted)
                for given, wanted in ((x, called.out), (small, expected))
            ]
            fits.append((max(errors), NormForm(module, variant, epsilon, size)))
    least, best = min(fits, key=lambda pair: pair[0], default=(float("inf"), None))
    return best if least <= TOLERANCE[x.dtype] else None


def norms_of(calls: Sequence[Called], x: Tensor) -> Iterator[tuple[NormForm, Tensor]]:
    """Norms among these calls that were given x, with what they returned."""
    for called in calls:
        if not multiplies(called) and same(called.x, x):
            fitted = fit_norm(called)
            if fitted is not None:
                yield fitted, called.out


def itself_and_norms(calls: Sequence[Called], x: Tensor) -> list[tuple[NormForm | None, Tensor]]:
    """x itself, and what norms made of it."""
    return [(None, x), *norms_of(calls, x)]


def addend(calls: Sequence[Called], out: Tensor) -> tuple[NormForm | None, Tensor]:
    """(The norm of a half's result, if there is one, what is added to the residual stream)."""
    return next(norms_of(calls, out), (None, out))
