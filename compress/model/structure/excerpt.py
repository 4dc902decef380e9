"""Makes a micro-batch cheap and exact enough for probing a block: a few of its tokens, in float32."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from compress.base.errors import first_line
from compress.model.calls import Call, evaluating

TOKENS = 16  # enough for every channel to occur with both signs, at little cost
T = TypeVar("T")


def tried(block: nn.Module, calls: Sequence[Call], work: Callable[[Call], T]) -> T | str:
    """The result of `work` for the first of these calls with which it does not fail, in float32; where it always does,
    the last error in words. What is found by probing is an offer: a block that cannot be probed goes without."""
    problem = ""
    for call in calls:
        try:
            with evaluating(block), in_float32(block, call) as exact_call:
                return work(exact_call)
        except Exception as error:  # noqa: BLE001 - a block may fail in any way
            problem = f"{type(error).__name__}: {first_line(error)}"
    return problem


def short_first(call: Call) -> list[Call]:
    """The call with few tokens, then all of it, as the short one may not run."""
    short = short_call(call)
    return [call] if short is call else [short, call]


def short_call(call: Call) -> Call:
    """A call on few samples and at most TOKENS tokens of `call`; the call itself where there is nothing to cut.

    Cut by shape: in every tensor, the dimensions as long as the batch and as its token sequences. This guess may be
    wrong, and the call may then fail. Any call that runs will do for probing.
    """
    tensors = [t for t in (*call.args, *call.kwargs.values()) if isinstance(t, Tensor) and t.ndim > 0]
    if not tensors:
        return call
    lead = tensors[0] if call.key is None else call.hidden
    samples = lead.shape[0]
    # A whole model takes token ids [B, T], a block hidden states [B, T, C]; in other inputs only samples are cut.
    has_tokens = lead.ndim == 3 if call.key is not None else lead.ndim == 2 and not lead.is_floating_point()
    length = lead.shape[1] if has_tokens else 1
    if samples * length <= TOKENS:
        return call
    rows, start = slice(0, max(1, TOKENS // max(1, length))), 0
    if has_tokens and call.tokens is not None:
        row = int(call.tokens.sum(1).argmax())  # the sample with the least padding, from its first real token on
        rows, start = slice(row, row + 1), min(int(call.tokens[row].int().argmax()), max(0, length - TOKENS))

    def cut(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        result = value[rows] if value.ndim > 1 and samples > 1 and value.shape[0] == samples else value
        if length > TOKENS:
            dims = [1] if value is lead else range(1 if value.ndim > 1 else 0, value.ndim)
            for dim in dims:
                if value.shape[dim] == length:
                    result = result.narrow(dim, start, TOKENS)
        return result

    args, kwargs = tree_map(cut, (call.args, dict(call.kwargs)))
    return replace(call, args=args, kwargs=kwargs, tokens=None)


@contextmanager
def in_float32(block: nn.Module, call: Call) -> Iterator[Call]:
    """Converts the block's half-precision parameters and buffers, and the call, to float32 for the body.

    Powers of two are exact in every dtype, but float16 has no room for large ones.
    """

    def widened(value: Any) -> Any:
        narrow = isinstance(value, Tensor) and value.is_floating_point() and value.itemsize < torch.float32.itemsize
        return value.float() if narrow else value

    before = [(t, t.data) for t in (*block.parameters(), *block.buffers())]
    try:
        for tensor, value in before:
            tensor.data = widened(value)
        args, kwargs = tree_map(widened, (call.args, dict(call.kwargs)))
        yield replace(call, args=args, kwargs=kwargs)
    finally:
        for tensor, value in before:
            tensor.data = value
