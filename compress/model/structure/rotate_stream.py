"""Rotates a hidden state of a model: what adds to it writes rotated numbers, and what reads it turns them back.

    x' = x Q       embeddings E Q      layers that add to it  Q^T W, b Q       layers that read it  W Q
    behind a norm  W diag(g) Q         and the norm has gain 1, as only then it commutes with Q

A norm's bias b goes into the biases of the layers behind it, as W b; where one of them has none it stays in the norm,
as (b / g) Q. A gain that is the same for all channels commutes, and stays. An output head that is tied to the embedding
gets a weight of its own where its norm's gain has to go into it: E diag(g) Q is not E Q.

Sources: SliceGPT (Ashkboos et al. 2024, arXiv 2401.15024), QuaRot (arXiv 2404.00456).

Shapes: C channels, N outputs and K inputs of a layer.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from compress.base.errors import InputError
from compress.model.edits.changes import DATA, Applied, Change, change, changing
from compress.model.edits.configuration_search import configs_of
from compress.model.layers import Layer, output_head
from compress.model.sharing import TIED_KEYS
from compress.model.structure.streams import Stream, StreamNorm
from compress.weights.rotations.orthogonal import Orthogonal

TIE_FIELD = "tie_word_embeddings"  # of configurations of transformers
PLAIN = ""  # no norm


@dataclass(frozen=True)
class Turn:
    """The dimensions of a stored weight that are rotated, each with the norm whose gain comes with it (PLAIN: none);
    None for a dimension that is not."""

    first: str | None = None
    last: str | None = None


@dataclass(frozen=True, eq=False)
class RotateStream:
    """An edit of a model: a hidden state in other coordinates (`stream_rotation` makes it). turns: of the weights of
    embeddings and layers; uniform: norms with one gain for all channels; untied: heads that get their own weight."""

    kind: ClassVar[str] = "rotate-stream"

    stream: Stream
    rotation: Orthogonal
    turns: Mapping[str, Turn]
    uniform: frozenset[str]
    untied: tuple[str, ...]

    def apply(self, module: nn.Module, stored_dtypes: Mapping[str, torch.dtype] | None = None) -> Applied:
        """Rotate the weights of a model, in float32 or better."""
        with changing() as done:
            for head in self.untied:
                done += _untie(module, head)
            for norm in self.stream.norms:
                done += self._bias_of_norm(module, norm)
            seen: set[int] = set()
            for name, turn in self.turns.items():
                weight = _weight(module, name)
                if id(weight) not in seen:
                    seen.add(id(weight))
                    done.append(change(weight, DATA, self._turned(module, weight.data, turn)))
            for name in self.stream.writers:
                if (bias := _bias(module, name)) is not None:
                    done.append(change(bias, DATA, self.rotation.apply(_working(bias.data)).to(bias.dtype)))
            for norm in self.stream.norms:
                if norm.name not in self.uniform:
                    weight = _weight(module, norm.name)
                    done.append(change(weight, DATA, torch.full_like(weight.data, 1 - norm.offset)))
        return Applied(tuple(done))

    def _turned(self, model: nn.Module, weight: Tensor, turn: Turn) -> Tensor:
        value = _working(weight).flatten(1)
        if turn.last is not None:
            value = self.rotation.apply(value * self._gain(model, turn.last).to(value))
        if turn.first is not None:
            value = self.rotation.apply(value.t() * self._gain(model, turn.first).to(value)).t()
        return value.reshape(weight.shape).contiguous().to(weight.dtype)

    def _gain(self, model: nn.Module, name: str) -> Tensor:
        """The gain of a norm, as far as layers behind it take that over."""
        norm = next((norm for norm in self.stream.norms if norm.name == name), None)
        return torch.ones(()) if norm is None or name in self.uniform else gain_of(model, norm)

    def _bias_of_norm(self, model: nn.Module, norm: StreamNorm) -> Iterator[Change]:
        """Move a norm's bias into the layers behind it, or turn it where it is."""
        bias = _bias(model, norm.name)
        if bias is None:
            return
        before = _working(bias.data)
        if not moves(model, norm):
            divided = before / self._gain(model, norm.name).to(before)
            yield change(bias, DATA, self.rotation.apply(divided).to(bias.dtype))
            return
        for name in norm.readers:
            layer, own = Layer(name, model.get_submodule(name)), _bias(model, name)
            assert own is not None
            added_N = layer.weight.to(before.dtype) @ before
            yield change(own, DATA, (own.data.to(before.dtype) + added_N).to(own.dtype))
        yield change(bias, DATA, torch.zeros_like(bias.data))

    def entry(self) -> dict[str, Any]:
        return {
            "edit": self.kind,
            "channels": self.stream.width,
            "block": self.rotation.block,
            "keeps_ones": self.stream.keeps_ones,
            "writers": list(self.stream.writers),
            "norms": [norm.name for norm in self.stream.norms],
            "readers": [name for name, turn in self.turns.items() if name not in self.stream.writers],
            "untied": list(self.untied),
        }

    def parts(self) -> dict[str, Tensor]:
        return {name: part.cpu().clone().contiguous() for name, part in self.rotation.parts().items()}


def stream_rotation(model: nn.Module, stream: Stream, rotation: Orthogonal) -> RotateStream:
    """The edit that rotates a hidden state. Raises InputError, which names the module, for shared weights that would
    have to turn in several ways, and for a norm's bias that has no place."""
    gains = {norm.name: gain_of(model, norm) for norm in stream.norms}
    uniform = frozenset(name for name, gain_C in gains.items() if bool((gain_C == gain_C[0]).all()))
    for norm in stream.norms:
        silent = norm.name not in uniform and bool((gains[norm.name] == 0).any())
        if silent and _bias(model, norm.name) is not None and not moves(model, norm):
            raise InputError(
                f"{norm.name} has channels of gain 0, whose bias can go nowhere, as not all of the layers behind it "
                f"({', '.join(norm.readers)}) have one"
            )
    turns = _turns(model, stream, uniform)
    return RotateStream(stream, rotation, turns, uniform, tuple(_to_untie(model, turns)))


def gain_of(model: nn.Module, norm: StreamNorm) -> Tensor:
    """[C] what a norm multiplies by."""
    return _working(_weight(model, norm.name).data) + norm.offset


def moves(model: nn.Module, norm: StreamNorm) -> bool:
    """True where a norm's bias goes into the layers behind it: all of them have one, and read its very output."""
    return norm.exact and all(_bias(model, name) is not None for name in norm.readers)


def _turns(model: nn.Module, stream: Stream, uniform: frozenset[str]) -> dict[str, Turn]:
    """{embedding or layer: what becomes of its weight}."""
    turns: dict[str, Turn] = {}

    def add(name: str, side: str, gain: str) -> None:
        before = turns.get(name, Turn())
        if getattr(before, side) not in (None, gain):
            raise InputError(f"{name} reads the hidden state behind several norms, each with a gain of its own")
        turns[name] = replace(before, **{side: gain})

    def stored(name: str, writes: bool) -> str:
        module = model.get_submodule(name)
        last = isinstance(module, nn.Embedding) or Layer(name, module).transposed == writes
        return "last" if last else "first"

    for name in stream.writers:
        add(name, stored(name, writes=True), PLAIN)
    for name in stream.readers:
        add(name, stored(name, writes=False), PLAIN)
    for norm in stream.norms:
        for name in norm.readers:
            add(name, stored(name, writes=False), PLAIN if norm.name in uniform else norm.name)
    return turns


def _to_untie(model: nn.Module, turns: Mapping[str, Turn]) -> Iterator[str]:
    """The output head, if it cannot keep the weight that it shares. Raises InputError for another layer of that
    kind."""
    users: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if (weight := module._parameters.get("weight")) is not None:
            users.setdefault(id(weight), []).append(name)
    module = output_head(model)
    head = next((name for name in turns if model.get_submodule(name) is module), None)
    for names in users.values():
        if not turns.keys().isdisjoint(names) and len({turns.get(name) for name in names}) > 1:
            others = [name for name in names if name != head]
            if head not in names or len({turns.get(name) for name in others}) > 1:
                raise InputError(f"{' and '.join(names)} share a weight that would have to turn in several ways")
            assert head is not None
            yield head


def _untie(model: nn.Module, head: str) -> Iterator[Change]:
    """Give a head a weight of its own, and say so in the configuration."""
    module, weight = model.get_submodule(head), _weight(model, head)
    yield change(module, "weight", nn.Parameter(weight.data.clone(), requires_grad=weight.requires_grad))
    config = getattr(model, "config", None)
    for _, each in configs_of(config) if isinstance(config, PretrainedConfig) else ():
        if getattr(each, TIE_FIELD, False):
            yield change(each, TIE_FIELD, False)
    tied = getattr(model, TIED_KEYS, None)
    if isinstance(tied, dict) and f"{head}.weight" in tied:
        yield change(model, TIED_KEYS, {key: of for key, of in tied.items() if key != f"{head}.weight"})


def _weight(model: nn.Module, name: str) -> nn.Parameter:
    weight = model.get_submodule(name)._parameters["weight"]
    assert weight is not None
    return weight


def _bias(model: nn.Module, name: str) -> nn.Parameter | None:
    return model.get_submodule(name)._parameters.get("bias")


def _working(value: Tensor) -> Tensor:
    return value.to(torch.promote_types(value.dtype, torch.float32))
