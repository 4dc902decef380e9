"""Weights [N, K] as sums of terms: codes on a grid, sparse rows, products of thin matrices, plain numbers.

    W = sum of terms        Term      one summand, as tensors
                            Weight    the sum of several

Either has `terms`, `dequantize`, `rows` and `stacked`. N outputs, K inputs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

D = TypeVar("D")


class Term:
    """One summand of a weight [N, K], as tensors."""

    @property
    def terms(self) -> tuple["Term", ...]:
        """The term itself, as the only one of a weight."""
        return (self,)

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        raise NotImplementedError

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values [N, K], by default in the stored dtype."""
        raise NotImplementedError

    def rows(self, part: slice) -> Self:
        """The term restricted to some rows."""
        raise NotImplementedError

    @classmethod
    def stacked(cls, terms: Sequence[Self]) -> Self:
        """One term from terms of one format with their rows below each other: inverse of `rows`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Weight:
    """A weight as the sum of terms, at least one."""

    terms: tuple[Term, ...]

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[N, K] values, rounded once to the dtype in which the first term is stored, then cast to `dtype`."""
        total = summed(term.dequantize() for term in self.terms)
        return total if dtype is None else total.to(dtype)

    def rows(self, part: slice) -> "Weight":
        """The same weight, restricted to some rows."""
        return Weight(tuple(term.rows(part) for term in self.terms))

    @classmethod
    def stacked(cls, weights: Sequence["Matrix"]) -> "Weight":
        """Weights of the same formats below each other."""
        across = zip(*(weight.terms for weight in weights), strict=True)
        return cls(tuple(type(terms[0]).stacked(terms) for terms in across))


Matrix = Term | Weight


def added(*terms: Term) -> Matrix:
    """The weight of these terms: one as itself, several as a sum."""
    return terms[0] if len(terms) == 1 else Weight(terms)


def moved(weight: Matrix, device: torch.device) -> Matrix:
    """The weight with the tensors of all terms on a device."""
    return added(*(tensors_changed(term, lambda tensor: tensor.to(device)) for term in weight.terms))


def tensors_changed(held: D, change: Callable[[Tensor], Tensor]) -> D:
    """A dataclass, such as a term, with what becomes of each of its tensors."""
    assert is_dataclass(held), f"{type(held).__name__} is no dataclass of tensors"
    values = {f.name: getattr(held, f.name) for f in fields(held)}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor | Mapping)}
    changed: dict[str, Any] = tree_map_only(Tensor, change, tensors)
    return cast(D, replace(cast(Any, held), **changed))


def summed(values: Iterable[Tensor]) -> Tensor:
    """The sum of tensors, in order, in float32 (float64 where the first is), rounded once to the dtype of the first."""
    first, *others = values
    if not others:
        return first
    work = torch.float64 if first.dtype == torch.float64 else torch.float32
    total = first.to(work)
    for value in others:
        total = total + value.to(work)
    return total.to(first.dtype)
