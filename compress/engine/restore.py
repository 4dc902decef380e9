"""Undo for a run that fails: a model in memory is again, bit for bit, what it was before.

A run replaces the tensors of parameters and leaves the old ones as they are (of shards it overwrites the values), adds
hooks that round inputs, outputs and caches, and registers scales of caches as buffers. What is remembered here is
therefore mostly references, and putting them back makes no tensor: it works when memory has run out, too.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from compress.base.errors import CompressError

Undo = Callable[[], None]
HOOKS = (
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)


@contextmanager
def undone(*undo: Undo) -> Iterator[None]:
    """Calls every `undo` where the body raises, interrupts included."""
    try:
        yield
    except BaseException:
        for each in undo:
            each()
        raise


def hooks_and_buffers(module: nn.Module) -> Undo:
    """Puts back which hooks and buffers there are. Costs no memory: values of buffers are not looked at."""
    places = [getattr(m, name) for m in module.modules() for name in (*HOOKS, "_buffers")]
    before = [(place, dict(place)) for place in places]
    passing = [(m, set(m._non_persistent_buffers_set)) for m in module.modules()]

    def undo() -> None:
        for place, entries in before:
            place.clear()
            place.update(entries)
        for m, names in passing:
            m._non_persistent_buffers_set = names

    return undo


def values(model: nn.Module) -> Undo:
    """Puts back the values of parameters and buffers. Keeps the present tensors of parameters alive; copies what may be
    overwritten: buffers, by some forwards, and this rank's shards."""
    whole = [(p, p.data) for p in model.parameters() if not isinstance(p, DTensor)]
    overwritten = copies_of(p.to_local().detach() for p in model.parameters() if isinstance(p, DTensor))
    of_buffers = buffers(model)

    def undo() -> None:
        for parameter, data in whole:
            parameter.data = data
        overwritten()
        of_buffers()

    return undo


def buffers(model: nn.Module) -> Undo:
    """Puts back the values of buffers, of which it keeps copies."""
    return copies_of(b.detach() for b in model.buffers() if b.layout is torch.strided)


def copies_of(tensors: Iterable[Tensor]) -> Undo:
    """Puts back values of tensors that are overwritten, by copies of them."""
    copies = [(tensor, tensor.clone()) for tensor in tensors]

    @torch.no_grad()
    def undo() -> None:
        for tensor, copy in copies:
            if not torch.equal(tensor, copy):  # what is as it was may be an expanded view, which takes no copy
                tensor.copy_(copy)

    return undo


def gradients(model: nn.Module) -> Undo:
    """Puts back the gradients that parameters have; after everything else, once parameters have their shapes again."""
    before = [(p, p.grad) for p in model.parameters()]

    def undo() -> None:
        for parameter, gradient in before:
            parameter.grad = gradient

    return undo


@contextmanager
def naming(changed: Sequence[str]) -> Iterator[None]:
    """Adds to an exception of the body the parts of the model that are changed by then, and stay so."""
    try:
        yield
    except BaseException as error:
        if not changed:
            raise
        said = f"the model is compressed in part and stays so, in {', '.join(changed)}: load it again"
        if isinstance(error, CompressError):
            error.args = (f"{error}; {said}",)
        else:
            error.add_note(said)
        raise
