"""The largest weight among layers that an engine may multiply as one: those of one module that take as many inputs.

Engines stack q, k and v, or gate and up, into one matrix with one global scale. A model does not say which layers they
stack; all that they do stack lie in one module and have one width. Others there, like the output of a square attention,
share the scale as well, which costs nothing: e4m3 scales span 14 powers of two at full precision.
"""

from collections.abc import Iterable, Sequence

from compress.model.layers import Layer

Key = tuple[str, int]


class Reach:
    """The largest absolute weights of the groups among a block's layers, each found once, when it is first asked for:
    before any layer of the group is rounded."""

    def __init__(self, layers: Iterable[Layer] = ()) -> None:
        self._layers = tuple(layers)
        self._found: dict[Key, float] = {}

    def of(self, site: Sequence[Layer]) -> float:
        """The largest absolute weight of the groups of a site."""
        for key in set(map(_key, site)) - self._found.keys():
            group = [layer for layer in (*self._layers, *site) if _key(layer) == key]
            self._found[key] = max(float(layer.weight.abs().max()) for layer in group)
        return max(self._found[_key(layer)] for layer in site)


def _key(layer: Layer) -> Key:
    """The module and the width of a layer; its own name, where it is one expert's slice of a parameter."""
    return (layer.name.rpartition(".")[0] if layer.index is None else layer.name), layer.shape[1]
