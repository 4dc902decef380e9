"""Layers that engines make one layer of as they load a checkpoint, by their names in it, and what they take then.

    q, k, v     gate, up     all experts of a block        rows below each other, one scheme, one product
    NVFP4       one global scale: of the parts' ones vLLM takes the largest (for experts the gate's)
    float8 of one scale per tensor     rounded again to the largest
    a fixed range of inputs            the widest; of the experts of a block one for all gates, one for all downs

Read in the sources of vLLM 0.32.0 (`packed_modules_mapping` of its models; layers/quantization/compressed_tensors:
schemes, compressed_tensors_moe; models/gpt_oss.py), SGLang 0.5.23 (layers/quantization/compressed_tensors, the same),
TensorRT-LLM@00bbf71 (_torch/modules/linear.py, of ModelOpt's layout) and transformers 5.23
(integrations/compressed_tensors.py).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


@dataclass(frozen=True)
class Loading:
    """The merging of layers by an engine as it loads them.

    fuses: one layer of those in `FUSED`, with one scheme, one range of inputs and one global scale. experts: one of all
    experts of a block, with one scheme. int8_experts: experts may have fixed ranges of int8 inputs. joined: types of
    models whose experts it reads in one tensor alone. caches: the numbers and granularities of key-value caches that it
    reads; None: every one that compressed-tensors has words for.
    """

    fuses: bool = False
    experts: bool = False
    int8_experts: bool = True
    joined: tuple[str, ...] = ()
    caches: tuple[tuple[str, str], ...] | None = None


NOTHING = Loading()
FP8_CACHES = (("fp8", "tensor"), ("fp8", "head"))
LOADING: Mapping[str, Loading] = {
    "vLLM": Loading(fuses=True, experts=True, int8_experts=False, joined=("gpt_oss",), caches=FP8_CACHES),
    "SGLang": Loading(fuses=True, experts=True, int8_experts=False, joined=("gpt_oss",), caches=FP8_CACHES[:1]),
    "TensorRT-LLM": Loading(fuses=True, experts=True, caches=FP8_CACHES[:1]),
    "transformers": Loading(experts=True),
}


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


def inputs_of_one_range(names: Iterable[str]) -> list[tuple[str, ...]]:
    """The layers among these whose inputs get one range, where it is fixed: those of the experts of a block that come
    first, and those that come last."""
    places = {leaf: group[0] for group in FUSED for leaf in group}
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        found = NUMBERED.match(f"{name}.weight")
        if found is not None and found[1].endswith("experts"):
            groups.setdefault((found[1], places.get(found[2], found[2])), []).append(name)
    return [tuple(members) for members in groups.values() if len(members) > 1]


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
    """Remarks on layers that engines make one of, and whose numbers of a kind differ where these take one for all."""
    layers = stored_in(source).layers
    differing: dict[str, tuple[tuple[str, ...], float, int]] = {}
    ranges = [(group, part) for group in inputs_of_one_range(layers) for part in SHARED if part.startswith("input")]
    for group, part in [*((group, part) for group in fused_groups(layers) for part in SHARED), *ranges]:
        held = [layers[name].parts[part] for name in group if part in layers[name].parts]
        numbers = [float(source.weights.tensor(name).reshape(-1)[0]) for name in held]
        if len(set(numbers)) > 1 and min(numbers) > 0:
            first, most, count = differing.get(part, (group, 1.0, 0))
            differing[part] = first, max(most, max(numbers) / min(numbers)), count + 1
    return [
        f"{fusing()} compute something else: they take one {part} for {naming(group)}, which differ ({count} such "
        f"groups, by up to {most:.3g} times); quantize the model again for them"
        for part, (group, most, count) in differing.items()
    ]


def fusing() -> str:
    """The engines that make one layer of several, in words."""
    *front, last = (name for name, loading in LOADING.items() if loading.fuses)
    return f"{', '.join(front)} and {last}"
