"""Layers that engines make one layer of as they load a checkpoint, by their names in it.

    q, k, v     gate, up     all experts of a block        rows below each other, one scheme, one product
    NVFP4       one global scale: of the parts' ones vLLM takes the largest (for experts the gate's)

The names are those of `packed_modules_mapping` in vLLM's models.
"""

from collections.abc import Iterable, Mapping

from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import Source
from compress.model.split_experts import NUMBERED
from compress.weights.scheme import Scheme

FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("c_fc_0", "c_fc_1"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
    ("in_proj_qkv", "in_proj_z"),
    ("in_proj_b", "in_proj_a"),
)
# Tensors of one number, of which a product has one.
SHARED = ("weight_global_scale", "weight_scale_2", "input_global_scale", "input_scale")


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The layers among these that become one, in the order of their rows; groups of two or more."""
    known = dict.fromkeys(names)
    places = {leaf: (i, group) for i, group in enumerate(FUSED) for leaf in group}
    groups: dict[tuple[str, int], tuple[str, ...]] = {}
    for name in known:
        parent, _, leaf = name.rpartition(".")
        if leaf in places:
            i, group = places[leaf]
            members = (f"{parent}.{each}" if parent else each for each in group)
            groups[parent, i] = tuple(member for member in members if member in known)
    return [members for members in groups.values() if len(members) > 1]


def naming(group: tuple[str, ...]) -> str:
    """A group in words: the first name in full, then the last parts of the others."""
    *front, last = (name.rpartition(".")[2] for name in group[1:])
    return f"{', '.join([group[0], *front])} and {last}"


def mixed_groups(schemes: Mapping[str, Scheme | None]) -> list[tuple[str, ...]]:
    """The groups whose layers have several schemes. None: a dense layer."""
    return [group for group in fused_groups(schemes) if len({schemes[name] for name in group}) > 1]


def mixed_experts(schemes: Mapping[str, Scheme | None]) -> list[str]:
    """Names of the modules whose experts have several schemes. None: a dense layer."""
    found: dict[str, set[Scheme | None]] = {}
    for name, scheme in schemes.items():
        if (held := NUMBERED.match(f"{name}.weight")) is not None:
            found.setdefault(held[1], set()).add(scheme)
    return [name for name, each in found.items() if len(each) > 1 and name.endswith("experts")]


def unlike_numbers(source: Source) -> list[str]:
    """Remarks on layers that vLLM makes one of, and whose numbers of a kind differ where it takes one for all."""
    layers = stored_in(source).layers
    differing: dict[str, tuple[tuple[str, ...], float, int]] = {}
    for group in fused_groups(layers):
        for part in SHARED:
            held = [layers[name].parts[part] for name in group if part in layers[name].parts]
            numbers = [float(source.weights.tensor(name).reshape(-1)[0]) for name in held]
            if len(set(numbers)) > 1 and min(numbers) > 0:
                first, most, count = differing.get(part, (group, 1.0, 0))
                differing[part] = first, max(most, max(numbers) / min(numbers)), count + 1
    return [
        f"vLLM computes something else: it takes one {part} for {naming(group)}, which differ ({count} such groups, by "
        f"up to {most:.3g} times); quantize the model again for it"
        for part, (group, most, count) in differing.items()
    ]
