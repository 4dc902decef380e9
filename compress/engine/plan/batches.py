"""Calibration batches that a model can run, and what is said about those that it cannot."""

import inspect
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from compress.base.errors import CompressError, InputError
from compress.model.calls import Batch, Call


class ChainBrokenError(Exception):
    """The blocks of a stack do not simply hand the hidden state on."""


class StopError(Exception):
    """Leave the model: everything worth recording has been recorded."""


def named_batches(model: nn.Module, batches: Any) -> Any:
    """Batches with tuples, the first arguments of a model's forward, as dictionaries by their names; what is none is
    returned as it is. Raises InputError for a tuple of more values than the forward has arguments."""
    if not isinstance(batches, Iterable):
        return batches
    names = _arguments(model)
    keyword_batches = []
    for i, batch in enumerate(batches):
        if isinstance(batch, tuple | list) and len(batch) > len(names):
            raise InputError(
                f"calibration batch {i + 1} has {len(batch)} values for the forward of {type(model).__name__}, which "
                f"takes {', '.join(names) or 'none'}"
            )
        keyword_batches.append(dict(zip(names, batch, strict=False)) if isinstance(batch, tuple | list) else batch)
    return keyword_batches


def _arguments(model: nn.Module) -> list[str]:
    parameters = inspect.signature(model.forward).parameters
    return [n for n, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


def check_batches(model: nn.Module, batches: Sequence[Batch]) -> None:
    """Raises InputError for a batch that a model's forward has no arguments for, or not all that it needs."""
    signature = inspect.signature(model.forward)
    named = _arguments(model)
    for i, batch in enumerate(batches):
        try:
            signature.bind(**batch)
        except TypeError as error:
            raise InputError(
                f"calibration batch {i + 1} has {', '.join(map(str, batch))} for the forward of "
                f"{type(model).__name__}, which takes {', '.join(named)}: {error}"
            ) from None


def tokens_of(batches: Sequence[Batch]) -> int:
    """The number of tokens in these batches; 0 where they hold no token ids, as those of images."""
    ids = (batch.get("input_ids") for batch in batches)
    return sum(each.numel() for each in ids if isinstance(each, Tensor))


@contextmanager
def named_failure(batch: Batch, index: int) -> Iterator[None]:
    """Turns an error of the model's own code about a calibration batch into an InputError of one line."""
    try:
        yield
    except (CompressError, ChainBrokenError, StopError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = ": ".join((type(error).__name__, *str(error).strip().splitlines()[:1]))
        held = (f"{k} {list(v.shape) if isinstance(v, Tensor) else type(v).__name__}" for k, v in batch.items())
        raise InputError(f"the model cannot run calibration batch {index + 1} ({', '.join(held)}): {said}") from error


def running(call: Call, index: int) -> AbstractContextManager[None]:
    """`named_failure` for a model that is one block: it gets what a person gave, not what the block before it made."""
    return named_failure(call.kwargs, index) if call.key is None else nullcontext()
