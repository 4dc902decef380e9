"""Records one forward of a decoder block on random tokens: what each module inside was given and returned, what went
into the cache, and how attention was called. `form.py` reads the form of the block from it."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from compress.base.errors import CompressError
from compress.inference.layers.base import OnCodes
from compress.model.calls import removing


class Attended(NamedTuple):
    """One call of an attention function. at: the calls of modules that had ended before it."""

    at: int
    query: Tensor
    scale: float
    beside: dict[str, Any]


class Watch:
    """Notes of one forward: how many modules have ended, and the calls of attention functions."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.ended = 0
        self.attended: list[Attended] = []


_lock = threading.Lock()
_now: Watch | None = None


@contextmanager
def watching() -> Iterator[Watch]:
    """Note calls of attention functions in this thread."""
    global _now
    with _lock:
        _now = Watch()
        try:
            yield _now
        finally:
            _now = None


def is_watched() -> bool:
    """True while a block is tried."""
    return _now is not None


def note_attention(query: Tensor, scale: float, beside: dict[str, Any]) -> None:
    """Note a call of an attention function, if this thread watches."""
    if _now is not None and _now.thread == threading.get_ident():
        _now.attended.append(Attended(_now.ended, query, scale, beside))


TOKENS = 2  # sequences of a trial
HISTORY = 5  # tokens that each of them has in its cache
# A position so far on that a block which reads positions by itself shows it.
FAR = 100_003
# Factors of what products return in a second trial, by which limits show that no usual number reaches.
LOUD = {torch.float32: 64.0, torch.bfloat16: 64.0, torch.float16: 16.0}


class UnknownFormError(CompressError):
    """A block whose steps are left to its own forward. The message says why."""


class NotTakenError(CompressError):
    """A step that is left to the block's own forward. The message says why."""


class NotYetError(CompressError):
    """A step on which a block cannot be tried."""


@dataclass
class Called:
    """A module that was called, with the first tensor that it was given and the first that it returned. alone: it was
    given nothing else."""

    module: nn.Module
    x: Tensor
    out: Tensor
    alone: bool


@dataclass
class Trace:
    """One forward of a block. before, after: modules called before attention and after it. loud: products returned
    larger numbers than theirs."""

    x: Tensor
    out: Tensor
    cos: Tensor | None
    sin: Tensor | None
    mask: Tensor
    kept: tuple[Tensor, Tensor]
    keys: Tensor
    values: Tensor
    cache_index: int
    attended: Attended
    loud: bool
    before: list[Called] = field(default_factory=list)
    after: list[Called] = field(default_factory=list)


class TrialCache(Cache):  # type: ignore[misc]
    """A cache with random keys and values of HISTORY tokens, which notes what is added."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.added: list[tuple[Tensor, Tensor, int]] = []
        self.held: tuple[Tensor, Tensor] | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *more: Any, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Keys and values, behind random ones."""
        self.added.append((key_states.clone(), value_states.clone(), layer_idx))
        keys, values = (self.behind_random(x) for x in (key_states, value_states))
        self.held = keys, values
        return keys, values

    @staticmethod
    def behind_random(x: Tensor) -> Tensor:
        random = torch.randn(x.shape[0], x.shape[1], HISTORY, x.shape[3])
        return torch.cat([random.to(x), x], 2).contiguous()

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Tokens before this one, for a block that asks for them itself."""
        return FAR


def turn(part: Tensor, other: Tensor, doubled: Tensor) -> Tensor:
    """Cosines or sines for TOKENS sequences: as given, and of the doubled angle."""
    return torch.cat([part[:1], doubled[:1].to(part.dtype), *([part[:1]] * (TOKENS - 2))])


def _far_away(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positions of a real step, as FAR ones of TOKENS sequences."""
    found = {}
    if (positions := kwargs.get("position_ids")) is not None:
        found["position_ids"] = positions.new_full((*positions.shape[:-2], TOKENS, positions.shape[-1]), FAR)
    if (places := kwargs.get("cache_position")) is not None:
        found["cache_position"] = torch.full_like(places, FAR)
    return found


def trace(block: nn.Module, like: Tensor, kwargs: dict[str, Any], loud: bool = False) -> Trace:
    """One forward of a block on random tokens. like, kwargs: the input and the arguments of a real step, whose mask,
    cache and positions are replaced. loud: multiply what products return by LOUD. Raises UnknownFormError."""
    # Random numbers of the CPU, so that those of a GPU stay as they are.
    x = torch.randn(TOKENS, 1, like.shape[2]).to(like)
    cache = TrialCache()
    mask = torch.rand(TOKENS, 1, 1, HISTORY + 1).to(like.device) < 0.7
    mask[..., -1] = True
    arguments = {**kwargs, "past_key_values": cache, "attention_mask": mask}
    cos = sin = None
    if (rotary := kwargs.get("position_embeddings")) is not None:
        cos, sin = rotary
        if not bool(sin.any()):
            raise NotYetError("positions from 1 on tell how queries are rotated")
        cos, sin = turn(cos, sin, 2 * cos.float() ** 2 - 1), turn(sin, cos, 2 * sin.float() * cos.float())
        arguments["position_embeddings"] = (cos, sin)
    arguments |= _far_away(kwargs)
    seen: list[Called] = []
    handles = []
    with watching() as watch:

        def note(module: nn.Module, args: tuple[Any, ...], named: dict[str, Any], out: Any) -> Any:
            if loud and isinstance(module, OnCodes | nn.Linear):
                out = out * LOUD[like.dtype]
            entry, left = (args[0] if args else named.get("hidden_states")), out[0] if isinstance(out, tuple) else out
            if isinstance(entry, Tensor) and isinstance(left, Tensor):
                seen.append(Called(module, entry.clone(), left.clone(), len(args) == 1 and not named))
                watch.ended = len(seen)
            return out

        on_codes = [module for module in block.modules() if isinstance(module, OnCodes)]
        inside = {part for module in on_codes for part in module.modules() if part is not module}
        for module in block.modules():
            if module is not block and module not in inside:
                handles.append(module.register_forward_hook(note, with_kwargs=True))
        try:
            with removing(handles):
                out = type(block).forward(block, x, **arguments)
        except Exception as error:  # noqa: BLE001 - a foreign block may refuse a trial in any way
            raise UnknownFormError(f"it does not run on a trial ({error})") from None
    if not isinstance(out, Tensor) or len(watch.attended) != 1 or len(cache.added) != 1 or cache.held is None:
        raise UnknownFormError("it does not return a tensor, or does not attend once over a cache of its own by `sdpa`")
    keys, values, index = cache.added[0]
    attended = watch.attended[0]
    return Trace(
        x,
        out,
        cos,
        sin,
        mask,
        (keys, values),
        *cache.held,
        index,
        attended,
        loud,
        *(seen[: attended.at], seen[attended.at :]),
    )
