"""Parameters whose values stay in files until they are needed."""

from collections.abc import Callable, Container, Iterable

import torch
from torch import Tensor, nn


class Deferred(nn.Parameter):
    """A parameter that takes no memory. read: makes its values, as often as it is called; None once it holds them."""

    read: Callable[[], Tensor] | None = None


def deferred(like: nn.Parameter, read: Callable[[], Tensor]) -> Deferred:
    """A parameter of the shape, dtype and device of another, whose values `read` makes."""
    made = Deferred(torch.zeros((), dtype=like.dtype, device=like.device).expand(like.shape), like.requires_grad)
    made.read = read
    return made


def values_of(parameter: Tensor) -> Tensor:
    """The values of a parameter; read now, where they are deferred."""
    read = parameter.read if isinstance(parameter, Deferred) else None
    return parameter.data if read is None else read()


def at_home(parameter: nn.Parameter) -> Tensor:
    """The values of a parameter, for `values_of`, also while its data are others; deferred ones take no memory."""
    if not isinstance(parameter, Deferred) or parameter.read is None:
        return parameter.data
    kept = Deferred(parameter.data, False)
    kept.read = parameter.read
    return kept


def fill(parameters: Iterable[nn.Parameter], without: Container[nn.Parameter] = ()) -> None:
    """Let deferred parameters hold their values, but for those in `without`."""
    for p in parameters:
        if isinstance(p, Deferred) and p.read is not None and p not in without:
            p.data, p.read = p.read(), None
