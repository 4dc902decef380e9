"""The parts of a block's form, and how results of a trial are compared."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from compress.inference.layers.base import OnCodes
from compress.inference.steps.trace import Called
from compress.kernels.cpu.steps import Activation, Norm

# Relative errors up to which two results are the same.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


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
    """ProductColumns [start, stop) of what a product returns."""

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
