"""Token embeddings on packed codes, and output heads that share them.

A `QuantEmbedding` holds a table of codes and dequantizes only the rows that it looks up: they equal, bit for bit, the
rows of the dequantized table. A `TiedLinear` multiplies by the same table. The state_dict of both has the tensors of
the checkpoint.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from compress.base.errors import CheckpointError
from compress.inference.layers.linear import PackedLinear, QuantLinear
from compress.inference.layers.packed import WordLinear
from compress.kernels.layouts.words import CodeWords, planar_weight
from compress.kernels.routes import Route
from compress.weights.formats.codes import Int8Table
from compress.weights.grid import Quantized
from compress.weights.scheme import Scheme

PROBED = 4  # rows


def shown(table: PackedLinear) -> dict[str, Tensor]:
    """The tensors that a module which shares a table stores in a checkpoint: copies of the scales and zero points of
    int8 rows, and nothing of packed codes (`Scheme`)."""
    if not isinstance(table.scheme.codes, Int8Table):
        return {}
    return {name: part.clone() for name, part in table.parts(table.whole()).items() if name != "weight"}


class QuantEmbedding(nn.Embedding):
    """Looks up rows of a table of codes: token ids [...] -> [..., width], in the dtype of the scales.

    Make one with `from_quantized` or `take_over`, which keeps the computation of a subclass of nn.Embedding on the
    rows. twin: another module saves and loads the table.
    """

    table: PackedLinear
    twin: bool

    @staticmethod
    def from_quantized(weight: Quantized) -> "QuantEmbedding":
        """An embedding of codes [vocabulary, width]."""
        rows, columns = weight.codes.shape
        return take_over(
            nn.Embedding(rows, columns, device="meta"), cast(PackedLinear, QuantLinear.from_quantized(weight))
        )

    def forward(self, input: Tensor) -> Tensor:
        """The rows of these ids. Raises IndexError (on a GPU: a device assertion) for ids outside the table."""
        ids, table = input.reshape(-1), self.table
        if not len(ids):
            return table.scale.new_empty(*input.shape, self.embedding_dim)
        words, scale = table.words.index_select(0, ids), table.scale.index_select(1, ids)
        zero = None if table.zero is None else table.zero.index_select(1, ids)
        found = CodeWords(words, scale, zero, table.planar.group_size, table.container)
        return planar_weight(found, self.embedding_dim).reshape(*input.shape, self.embedding_dim)

    def dequantize(self) -> Tensor:
        """The values of all codes, [vocabulary, width]."""
        return self.table.dequantize()

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """`dequantize()`, for code that reads the weight; computed at each access."""
        return self.dequantize()

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}, {self.table.scheme}"

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.twin:
            self.table.save_rows(self.table.whole(), destination, prefix)
            return
        destination |= {prefix + name: part for name, part in shown(self.table).items()}

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        names = {prefix + name for name in self.table.scheme.parts(self.num_embeddings, self.embedding_dim)}
        own = {key: value for key, value in state_dict.items() if key in names}
        others = {key: value for key, value in state_dict.items() if key not in names}
        super()._load_from_state_dict(others, prefix, *rest)
        if not self.twin:
            self.table.load_rows(self.table.whole(), own, prefix, *rest[2:])


class TiedLinear(PackedLinear):
    """An output head on the codes of an embedding, which are held once."""

    BUFFERS: ClassVar[Mapping[str, int | None]] = {}  # the table's

    def __init__(self, table: PackedLinear, bias: Tensor | None) -> None:
        WordLinear.__init__(self, table.scheme, table.in_features, table.out_features, bias)
        self.input_group, self.rounding_first = table.input_group, table.rounding_first
        self.table = table

    @property
    def dtype(self) -> torch.dtype:
        return self.table.dtype

    @property
    def held(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.table.held

    @property
    def words(self) -> Tensor:  # type: ignore[override]
        return self.table.words

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        return self.table.scale

    @property
    def zero(self) -> Tensor | None:  # type: ignore[override]
        return self.table.zero

    def lay_in_strips(self) -> None:
        """Does nothing: the embedding looks rows up in planar words."""

    @classmethod
    def route(cls, scheme: Scheme, M: int, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Route:
        return cls.route_in_rows(scheme, M, shape, dtype, device)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination |= {prefix + name: part for name, part in shown(self.table).items()}
        if self.bias is not None:
            destination[prefix + "bias"] = self.bias.detach()

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *rest: Any) -> None:
        if self.bias is None:
            return
        if prefix + "bias" in state_dict:
            self.bias.data.copy_(state_dict[prefix + "bias"])
        else:
            rest[2].append(prefix + "bias")  # the missing keys


def take_over(module: nn.Embedding, table: PackedLinear, twin: bool = False) -> QuantEmbedding:
    """Turn an embedding without a weight into one that looks up rows of a table, in place. A subclass keeps its own
    computation on the rows (Gemma scales them). twin: another module saves and loads the table.

    Raises CheckpointError for a subclass that uses its weight for more than looking rows up.
    """
    kind = type(module)
    module._parameters.pop("weight", None)
    table.spoken_for = True
    module.__class__ = _on_codes(kind)  # type: ignore[arg-type]
    taken = cast(QuantEmbedding, module)
    taken.table, taken.twin = table, twin
    if not table.words.is_meta and not _same_rows(taken, kind):
        raise CheckpointError(
            f"a {kind.__name__} does something else with its weight than to look rows up, which it cannot do on codes; "
            "load the checkpoint with dequantize=True"
        )
    return taken


def give_back(module: QuantEmbedding, weight: nn.Parameter) -> None:
    """Inverse of `take_over`: the embedding looks up rows of a dense weight, in place."""
    kind = type(module)
    for name in ("table", "twin"):
        delattr(module, name)
    dense = cast(nn.Embedding, module)
    dense.__class__ = nn.Embedding if kind is QuantEmbedding else kind.__bases__[0]
    dense.weight = weight


@cache
def _on_codes(kind: type[nn.Embedding]) -> type[nn.Embedding]:
    """The subclass of `kind` on codes, whose `super().forward` is that of QuantEmbedding."""
    if kind.forward is nn.Embedding.forward:
        return QuantEmbedding

    def weight(self: QuantEmbedding) -> Tensor:
        """A stand-in of NaN values: subclasses read only the dtype of their weight, and dequantizing the whole table
        for it at every call would be slow."""
        nothing = self.table.scale.new_full((), torch.nan)
        return nothing.expand(self.num_embeddings, self.embedding_dim)

    def reduce(self: QuantEmbedding) -> tuple[Any, ...]:
        """Pickling by `_empty`, which makes the class again: it is in no module under its name."""
        return _empty, (kind,), self.__dict__

    return type(f"Quant{kind.__name__}", (kind, QuantEmbedding), {"weight": property(weight), "__reduce__": reduce})


def _empty(kind: type[nn.Embedding]) -> nn.Embedding:
    """An embedding of the class `kind` on codes that holds nothing yet."""
    made = _on_codes(kind)  # type: ignore[arg-type]
    return made.__new__(made)


@torch.no_grad()
def _same_rows(module: QuantEmbedding, kind: type[nn.Embedding]) -> bool:
    """True where the embedding returns the same as its class `kind` on dense rows."""
    if type(module) is QuantEmbedding:
        return True
    ids = torch.arange(min(PROBED, module.num_embeddings), device=module.table.words.device)
    dense = kind.__new__(kind)
    dense.__dict__.update(vars(module))
    rows = QuantEmbedding.forward(module, ids)
    dense.__dict__["_parameters"] = {**module._parameters, "weight": nn.Parameter(rows, requires_grad=False)}
    dense.padding_idx = None
    return bool(torch.equal(module(ids), kind.forward(dense, ids)))
