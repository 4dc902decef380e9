"""Exports a compressed checkpoint as a plain one, with exactly the dense weights of its codes, for any other reader.

Compressed layers become `<layer>.weight` in the model's dtype; everything else is copied, and config.json does not
mention compression. The rounding of inputs, outputs and key-value caches is left out; a note says so. Memory holds at
most one part of a file of dense weights, or one layer where that is larger.
"""

from collections import Counter
from collections.abc import Iterator

from torch import Tensor

from compress.checkpoint.export.exporter import Exporter, Written
from compress.checkpoint.export.place import Place
from compress.checkpoint.read.compressed_layers import Stored, stored_in, weight_of
from compress.checkpoint.read.pretrained import empty_model, meta_model, names_in, read_config
from compress.checkpoint.read.source import Source
from compress.model.disk_names import disk_names
from compress.model.layers import as_stored, transposed_weights
from compress.model.split_experts import join_experts, joined_lists
from compress.weights.rotations.hadamard import for_plain_inputs


class DenseLayout(Exporter):
    """Dense weights as transformers writes them, bit for bit those of `load(model, dequantize=True)`; where an input is
    rotated as the model runs, they are rotated back and rounded once more."""

    about = "a plain checkpoint of transformers, with the dense weights that the codes stand for"
    kind = "dense"
    turns_back = True

    def why_not(self, checkpoint: Source) -> list[str]:
        """A reason for a checkpoint that holds nothing compressed."""
        stored = stored_in(checkpoint)
        compressed = stored.layers or stored.caches is not None
        return [] if compressed else ["it is not compressed: its weights are dense as they are"]

    def write(self, checkpoint: Source, place: Place) -> Written:
        """Write the dense weights, made one layer after the other, and the configuration without its quantization."""
        stored = stored_in(checkpoint)
        for line in left_out(stored):
            place.note(line)
        place.tensors(dense_tensors(checkpoint), sum(1 for _ in dense_names(checkpoint)))
        config = {key: value for key, value in checkpoint.config.items() if key != "quantization_config"}
        place.json("config.json", config)
        return Written(len(stored.layers))


def left_out(stored: Stored) -> Iterator[str]:
    """A line for each property of a compressed model that dense weights lack: rotated inputs, rounded inputs and
    outputs, and caches."""
    turned = [name for name, layer in stored.layers.items() if layer.scheme.rotation is not None]
    if turned:
        yield (
            f"{len(turned)} layers, like {turned[0]}, rotate what they are given as the model runs; their dense "
            "weights are rotated back, for a model that does not, and rounded to their dtype once more"
        )
    rounded = [name for name, layer in stored.layers.items() if layer.scheme.inputs is not None]
    if rounded:
        returned = any(stored.layers[name].scheme.outputs is not None for name in rounded)
        yield (
            f"{len(rounded)} layers, like {rounded[0]}, round what they are given{' and return' if returned else ''} "
            f"({stored.layers[rounded[0]].scheme}); dense weights leave that out: the exported model computes without"
        )
    if stored.caches is not None:
        yield (
            f"keys and values are rounded ({stored.caches.scheme}); a dense checkpoint leaves that out: the "
            "exported model keeps them as they are"
        )


def dense_names(source: Source) -> Iterator[tuple[str, str | None]]:
    """(Name of a tensor of the dense checkpoint, the compressed layer whose weight it is, or None), in the order of the
    compressed checkpoint."""
    stored = stored_in(source)
    layer_of = {part: name for name, layer in stored.layers.items() for part in layer.parts.values()}
    held = {} if stored.caches is None else stored.caches.scales
    scales = {name for parts in held.values() for name, _ in parts.values()}
    done: set[str] = set()
    for name in source.weights:
        layer = layer_of.get(name)
        if layer is None and name not in scales:
            yield name, None
        elif layer is not None and layer not in done and stored.layers[layer].shares is None:
            done.add(layer)
            yield f"{layer}.weight", layer


def dense_tensors(source: Source) -> Iterator[tuple[str, Tensor]]:
    """(Name, tensor) of the dense checkpoint, made one after the other; experts that transformers reads joined, a list
    after the other."""
    empty, own, dtype = empty_model(source), names_in(source).in_model, read_config(source).dtype
    transposed, lists = transposed_weights(empty), joined_lists(empty)
    joined = disk_names(meta_model(source)).on_disk if lists else str
    holder = {n: next((of for of in lists if own(n).startswith(f"{of}.")), None) for n, _ in dense_names(source)}
    wanted, experts = Counter(holder.values()), dict[str, dict[str, Tensor]]()
    for name, layer in dense_names(source):
        if layer is None:
            tensor = source.weights.tensor(name)
        else:
            rotation = stored_in(source).layers[layer].scheme.rotation
            tensor = for_plain_inputs(weight_of(source, layer, dtype).dequantize(dtype), rotation)
        if (of := holder[name]) is None:
            yield name, as_stored(tensor, layer is not None and name in transposed)
            continue
        experts.setdefault(of, {})[own(name)] = tensor
        if len(experts[of]) == wanted[of]:
            yield from ((joined(n), whole) for n, whole in join_experts(empty, experts.pop(of)).items())
