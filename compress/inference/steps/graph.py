"""Replays steps of `generate` on a GPU: all blocks, norms and the head as one CUDA graph, over a cache of fixed size.

`generate` of a model takes such a cache unless its arguments say otherwise. transformers then asks the model for a
function that runs steps (`get_compiled_call`), which torch would compile, and gets `GraphedSteps`: the first step runs
as it is, the second is captured, and replayed from then on. What cannot be captured runs as it is, and `remarks` says
so. With a `compile_config` of the caller, steps are compiled by torch.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, StaticLayer

from compress.base.errors import first_line
from compress.inference.steps.block import NOT_REPLAYED
from compress.kernels import workspace

Run = Callable[..., Any]
PLAIN = (bool, int, str, type(None))
# Arguments of `generate` that choose a cache, or what only a growing one does.
OWN_CACHE = ("past_key_values", "cache_implementation", "assistant_model", "prompt_lookup_num_tokens")


def replay_steps(model: nn.Module) -> None:
    """Let `generate` of a model replay steps, if it generates."""
    own: Any = model
    if hasattr(type(own), "get_compiled_call"):
        own.get_compiled_call = MethodType(get_compiled_call, own)
        own.generate = MethodType(generate, own)


def generate(model: Any, *given: Any, **asked: Any) -> Any:
    """`generate` of a model, over a cache of fixed size where that serves: one sequence per prompt, a known number of
    new tokens, and no cache in the arguments."""
    config = asked.get("generation_config") or model.generation_config

    def value(name: str) -> Any:
        found = asked.get(name)
        return getattr(config, name, None) if found is None else found

    fits = getattr(model, "_can_compile_fullgraph", False) and value("use_cache") is not False
    fits = fits and (value("num_beams") or 1) == 1 and value("max_new_tokens") is not None
    if fits and len(given) < 2 and not any(value(name) is not None for name in OWN_CACHE):
        asked["cache_implementation"] = "static"
    return type(model).generate(model, *given, **asked)


def get_compiled_call(model: Any, compile_config: Any) -> Run:
    """The function for steps of one call of `generate`."""
    if compile_config is not None:
        return type(model).get_compiled_call(model, compile_config)
    model.__dict__.pop(NOT_REPLAYED, None)
    return GraphedSteps(model)


def record(run: Callable[[], Any]) -> tuple[Callable[[], None], Any, set[workspace.Owner]]:
    """(What replays a function, the tensors that it then writes, its counters), the function captured and not run."""
    before, graph = workspace.owners(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    return graph.replay, out, {owner for owner in workspace.owners() - before if owner.capture}


class GraphedSteps:
    """Steps of one call of `generate`. held: the tensors that the graph reads; rest: all other arguments."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.refused = self.begun = False
        self.replay: Callable[[], None] | None = None
        self.held: dict[str, Tensor] = {}
        self.rest: dict[str, Any] = {}
        self.out: Any = None

    def __call__(self, **given: Any) -> Any:
        """The output of one step. Its tensors are those of the step before, where it is replayed."""
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        rest = {name: value for name, value in given.items() if name not in tensors}
        if self.begun and self.replay is None and not self.refused:
            self.capture(tensors, rest)
        self.begun = True
        if self.replay is None or not self.fits(tensors, rest):
            return self.model(**given)
        for name, value in tensors.items():
            self.held[name].copy_(value)
        self.replay()
        return self.out

    def refuse(self, reason: str) -> None:
        """Run all further steps as they are."""
        self.refused = True
        self.model.__dict__[NOT_REPLAYED] = reason

    def why_not(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> str | None:
        """The reason why such a step is not captured; None where it can be."""
        ids, cache = tensors.get("input_ids"), rest.get("past_key_values")
        if ids is None or ids.shape[1:] != (1,):
            return "a step reads more than one token"
        if not isinstance(cache, Cache) or any(type(layer) is not StaticLayer for layer in cache.layers):
            return "its cache counts tokens in Python"
        others = {name: value for name, value in rest.items() if value is not cache}
        if others.get("output_attentions") or others.get("output_hidden_states"):
            return "hidden states or attentions are asked for"
        if strange := [name for name, value in others.items() if not isinstance(value, PLAIN)]:
            return f"{strange[0]} is no tensor"
        return None

    def capture(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> None:
        """Capture a step of such arguments, or refuse all."""
        if reason := self.why_not(tensors, rest):
            self.refuse(reason)
            return
        self.held, self.rest = {name: value.clone() for name, value in tensors.items()}, rest
        try:
            self.replay, self.out, owners = record(lambda: self.model(**self.held, **rest))
        except Exception as error:  # noqa: BLE001 - any operation of a model may refuse to be captured
            self.refuse(f"a step cannot be captured ({first_line(error)})")
            return
        finalize(self, workspace.give_back, owners)

    def fits(self, tensors: dict[str, Tensor], rest: dict[str, Any]) -> bool:
        """True for arguments that the graph was captured with, but for the values of tensors."""
        held = self.held
        return (
            tensors.keys() == held.keys()
            and all(t.shape == held[name].shape and t.dtype == held[name].dtype for name, t in tensors.items())
            and rest.keys() == self.rest.keys()
            and all(value is self.rest[name] or value == self.rest[name] for name, value in rest.items())
        )
