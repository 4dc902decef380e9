"""Converts schemes to and from the `quantization_config` of compressed-tensors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch

from compress.base.errors import CheckpointError, InputError
from compress.base.sandbox import check_expressions
from compress.kernels.layouts.scale_blocks import BLOCK, WEIGHT_BLOCK
from compress.weights.caches import CacheGranularity, CacheScheme
from compress.weights.formats.codes import CodesFormat, Float8Blocks, Float8Rows, Int8Rows, Int8Table, Layout, Packed
from compress.weights.formats.levels import LEVEL_FORMATS, MXFP8, LevelCodes
from compress.weights.grid import MAX_BITS, Granularity, Grid, NumberType
from compress.weights.scheme import Scheme, block_scheme

# Older writers call integers that are not packed "naive".
LAYOUTS: dict[str, Layout] = {
    "pack-quantized": "pack-quantized",
    "int-quantized": "int-quantized",
    "naive-quantized": "int-quantized",
    "float-quantized": "float-quantized",
}
OF_LEVELS = {kind.layout: kind for kind in LEVEL_FORMATS.values() if kind.layout is not None}
LAYOUTS |= {layout: layout for layout in OF_LEVELS}
# The dtype in which scales are stored, where it is not the model's.
REGULAR = "re:"  # before a regular expression among the targets
SCALE_DTYPES = {"e8m0": "torch.uint8", "e4m3": "torch.float8_e4m3fn"}
# Names of tensors that mark a layer of a checkpoint as compressed.
OWN_PARTS = frozenset(
    {
        "weight_packed",
        "weight_scale",
        "weight_scale_inv",
        "weight_global_scale",
        "weight_zero_point",
        "weight_shape",
        "input_scale",
        "input_global_scale",
        "input_zero_point",
        "output_scale",
        "output_zero_point",
    }
)
# Bits of a dynamic input of a layer with packed weights.
BESIDE_PACKED = (4, 8)
# Keys about the search for the numbers; they do not change their meaning.
OF_THE_SEARCH = {"observer", "observer_kwargs"}
READABLE_FLOATS = f"per channel or tensor or block of [{BLOCK}, {BLOCK}]"
# Orders of solving after which the columns were put back; `group`, another one, permutes the groups themselves.
HARMLESS_ORDERS = (None, False, "weight", "static")


def cache_entry(scheme: CacheScheme, head_size: int | None) -> dict[str, Any]:
    """The `kv_cache_scheme` entry of a scheme. head_size: D, needed for scales per token."""
    strategy = {"tensor": "tensor", "head": "attn_head", "token": "group"}[scheme.granularity]
    entry = {"num_bits": 8, "type": scheme.type, "symmetric": True, "dynamic": scheme.dynamic, "strategy": strategy}
    return {**entry, "group_size": head_size} if scheme.dynamic else entry


def read_cache_scheme(entry: Mapping[str, Any]) -> CacheScheme:
    """The scheme of a `kv_cache_scheme`. Raises CheckpointError for one that cannot be read."""
    granularity: dict[tuple[str, bool], CacheGranularity] = {
        ("tensor", False): "tensor",
        ("attn_head", False): "head",
        ("group", True): "token",
    }
    strategy, dynamic = entry.get("strategy") or "tensor", entry.get("dynamic", False)
    number, kind = entry.get("num_bits", 8), entry.get("type", "int")
    per = granularity.get((strategy, dynamic)) if isinstance(dynamic, bool) else None
    if number != 8 or kind not in ("int", "float") or not entry.get("symmetric", True) or per is None:
        raise CheckpointError(
            f"the key-value cache is stored as {dict(entry)}, which cannot be read; readable: 8 bits, int or float, "
            "symmetric, static per tensor or attn_head, or dynamic in groups of a head"
        )
    return CacheScheme(type=kind, granularity=per)


def why_not(scheme: Scheme) -> str | None:
    """The reason why compressed-tensors cannot express a scheme; None where it can. Its `transform_config` names
    rotations of inputs, but transformers takes no notice of that and would multiply by inputs that are not rotated."""
    if scheme.rotation is not None:
        return "its input is rotated as the model runs"
    if scheme.codes is not None and scheme.codes.layout is not None:
        return _why_not_inputs(scheme)
    kinds = [term.kind for term in scheme.terms]
    return f"it has no {kinds[0]}" if len(kinds) == 1 else f"it has no sum of {' and '.join(kinds)}"


def _why_not_inputs(scheme: Scheme) -> str | None:
    """The reason why compressed-tensors cannot express the inputs of a layer of codes; None where it can."""
    if scheme.inputs is None or not isinstance(scheme.codes, Packed):
        return None
    if not scheme.dynamic:
        return "it has no fixed range of an input beside packed weights"
    if scheme.inputs.searches:
        return "it has no searched range of an input"
    return None if scheme.inputs.bits in BESIDE_PACKED else f"it has no inputs of {scheme.inputs.bits} bits"


def layout_of(scheme: Scheme) -> Layout:
    """The name that compressed-tensors gives to the format of a layer of codes."""
    assert scheme.codes is not None
    assert scheme.codes.layout is not None
    return scheme.codes.layout


def needs_dequantizing(scheme: Scheme, table: bool = False) -> bool:
    """True where transformers reads a scheme only with `dequantize=True`: by default it reads no packed zero points and
    no packed embeddings (table)."""
    return isinstance(scheme.codes, Packed) and (table or not scheme.codes.grid.symmetric)


def decompressed_in(schemes: Iterable[Scheme]) -> torch.dtype | None:
    """The dtype in which compressed-tensors decompresses a checkpoint with these schemes, whatever dtype the model is
    loaded in; None where it follows the model. Transformers fails in another dtype."""
    return torch.bfloat16 if any(isinstance(scheme.codes, LevelCodes) for scheme in schemes) else None


def group_entry(scheme: Scheme) -> dict[str, Any]:
    """The `config_groups` entry of a scheme of codes, without its targets."""
    return {
        "format": layout_of(scheme),
        "weights": _weights_entry(scheme.weights),
        "input_activations": _activations_entry(scheme.inputs, scheme.dynamic),
        "output_activations": _activations_entry(scheme.outputs, dynamic=False),
    }


def _activations_entry(grid: Grid | None, dynamic: bool) -> dict[str, Any] | None:
    if grid is None:
        return None
    entry = {
        "num_bits": grid.bits,
        "type": grid.type,
        "symmetric": grid.symmetric,
        "dynamic": dynamic,
        "strategy": "token" if dynamic else "tensor",
    }
    if grid.scales in SCALE_DTYPES:
        # The global scale is calibrated, those of groups come as the model runs.
        how = {"dynamic": "local", "observer": "static_minmax"} if grid.scales == "e4m3" else {}
        return {**entry, **_groups_of_levels(grid), **how}
    return entry if grid.block is None else {**entry, "strategy": "group", "group_size": grid.block[1]}


def _groups_of_levels(grid: Grid) -> dict[str, Any]:
    """The keys that tell groups with scales of their own kind."""
    dtype = SCALE_DTYPES[grid.scales]
    strategy = "tensor_group" if grid.scales == "e4m3" else "group"
    return {"strategy": strategy, "group_size": grid.group_size, "scale_dtype": dtype, "zp_dtype": dtype}


def _weights_entry(grid: Grid) -> dict[str, Any]:
    group = grid.granularity == "group"
    one = grid.floating and grid.granularity == "tensor"
    entry = {
        "num_bits": grid.bits,
        "type": grid.type,
        "symmetric": grid.symmetric,
        "dynamic": False,
        "strategy": "group" if group else "tensor" if one else "channel",
    }
    if grid.scales in SCALE_DTYPES:
        return {**entry, **_groups_of_levels(grid)}
    if grid.block is not None:
        return {**entry, "strategy": "block", "block_structure": list(grid.block)}
    return {**entry, "group_size": grid.group_size} if group else entry


def read_scheme(group: Mapping[str, Any], layout: str | None, layer: str) -> Scheme:
    """The scheme of a `config_groups` entry. Raises CheckpointError, which names the layer, for one we cannot read."""
    layout = group.get("format") or layout
    if layout not in LAYOUTS:
        raise CheckpointError(f"{layer} is stored as {layout!r}; readable: {', '.join(LAYOUTS)}")
    if LAYOUTS[layout] in OF_LEVELS:
        return _scheme_of_levels(OF_LEVELS[LAYOUTS[layout]], group, layer)
    floating = (group.get("weights") or {}).get("type") == "float"
    if layout == "float-quantized" or (layout == "naive-quantized" and floating):
        return _float_scheme(group, layer)
    weights = _weight_grid(group.get("weights") or {}, layer)
    given, returned = group.get("input_activations"), group.get("output_activations")
    if returned and (not given or LAYOUTS[layout] != "int-quantized"):
        raise CheckpointError(
            f"{layer} quantizes its output and is stored as {layout} with input {given}; readable: int8 or float8 "
            "weights and inputs"
        )
    if given is None:
        if LAYOUTS[layout] == "int-quantized" and weights.bits != 8:
            raise CheckpointError(f"{layer} is stored as {layout} with {weights.bits} bits; readable: pack-quantized")
        whole = LAYOUTS[layout] == "int-quantized"
        return Scheme(terms=(Int8Table(grid=weights) if whole else Packed(grid=weights),))
    if LAYOUTS[layout] == "pack-quantized" and given.get("type") == "float":
        return Scheme(terms=(Packed(grid=weights),), inputs=_float_input(given, layer))
    inputs, dynamic = _activation_grid(given, layer, "input")
    outputs = _activation_grid(returned, layer, "output")[0] if returned else None
    if LAYOUTS[layout] == "int-quantized" and (weights.bits != 8 or not weights.symmetric or weights.group_size):
        raise CheckpointError(f"{layer}: int-quantized weights must be symmetric, 8 bits, one scale per channel")
    if LAYOUTS[layout] == "pack-quantized" and not (dynamic and (inputs.symmetric or inputs.bits < MAX_BITS)):
        raise CheckpointError(f"{layer}: packed weights with an int8 input that is not dynamic and symmetric")
    term: CodesFormat = Int8Rows(grid=weights) if LAYOUTS[layout] == "int-quantized" else Packed(grid=weights)
    return Scheme(terms=(term,), inputs=inputs, outputs=outputs, dynamic=dynamic)


def _scheme_of_levels(kind: type[LevelCodes], group: Mapping[str, Any], layer: str) -> Scheme:
    """The scheme of codes of levels, with an input that is not rounded, or rounded alike or to float8. Raises
    CheckpointError."""
    inputs = _levels_input(kind, group.get("input_activations"))
    of_inputs = "local" if kind.on.scales == "e4m3" else True
    asked: list[tuple[str, bool | str, Grid]] = [("weights", False, kind.on)]
    if inputs is not None and inputs.block is None:
        asked.append(("input_activations", of_inputs, inputs))
    for key, dynamic, grid in asked:
        entry = group.get(key) or {}
        wanted = {"num_bits": grid.bits, **_groups_of_levels(grid)}
        # Older writers leave out the dtypes of scales, which follow from the format.
        found = {name: entry.get(name) for name in wanted if "dtype" not in name or entry.get(name) is not None}
        if (
            _odd(entry, ("num_bits", "symmetric", "dynamic", "strategy", "group_size"), "float")
            or not entry.get("symmetric", True)
            or entry.get("dynamic", False) != dynamic
            or any(str(value) != str(wanted[name]) for name, value in found.items())
        ):
            raise CheckpointError(
                f"{layer}: {key} {dict(entry)} cannot be read; readable beside {kind.layout}: {wanted}, "
                f"dynamic: {dynamic}"
            )
    if group.get("output_activations"):
        raise CheckpointError(f"{layer} quantizes its output beside {kind.layout}, which cannot be read")
    return Scheme(terms=(kind(grid=kind.on),), inputs=inputs)


def _levels_input(kind: type[LevelCodes], entry: Mapping[str, Any] | None) -> Grid | None:
    """The grid of an input beside codes of levels, whose entry is still to be checked: float8 in groups of 32 with
    powers of two, or of 128 (`INPUT_BLOCK`), where 8 bits are asked for beside fewer bits of weights."""
    if not entry:
        return None
    if kind.on.scales == "e4m3" or entry.get("num_bits") != MXFP8.on.bits:
        return kind.on
    by_blocks = {"strategy": "group", "group_size": BLOCK, "dynamic": True, "symmetric": True}
    plain = all(entry.get(key) == value for key, value in by_blocks.items())
    if plain and not _odd(entry, by_blocks.keys() | {"num_bits"}, "float"):
        return block_scheme(Float8Blocks).inputs
    return MXFP8.on


def _float_input(entry: Mapping[str, Any], layer: str) -> Grid:
    """The grid of a float8 input beside packed integers. Raises CheckpointError."""
    known = ("num_bits", "symmetric", "dynamic", "strategy")
    fits = entry.get("num_bits") == 8 and entry.get("dynamic") is True and entry.get("symmetric", True)
    if _odd(entry, known, "float") or not fits or (entry.get("strategy") or "token") != "token":
        raise CheckpointError(
            f"{layer}: input {dict(entry)} cannot be read; readable beside packed weights: int8 or float8, dynamic per "
            "token"
        )
    return Grid(bits=8, type="float", granularity="token")


def _float_scheme(group: Mapping[str, Any], layer: str) -> Scheme:
    """The scheme of float8 weights with a float8 input and an optional float8 output. Raises CheckpointError."""
    known = ("num_bits", "symmetric", "dynamic", "strategy")
    weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
    if weights.get("strategy") == "block":
        return _block_scheme(group, layer)
    outputs = group.get("output_activations") or None
    dynamic = inputs.get("dynamic", False)
    expected: Granularity = "token" if dynamic else "tensor"
    per: Granularity = weights.get("strategy") or "tensor"
    kinds = [
        ("weights", weights, per in ("channel", "tensor") and not weights.get("dynamic"), READABLE_FLOATS),
        (
            "input",
            inputs,
            (inputs.get("strategy") or expected) == expected and dynamic in (True, False),
            "dynamic per token or static per tensor",
        ),
    ]
    if outputs is not None:
        fits = (outputs.get("strategy") or "tensor") == "tensor" and not outputs.get("dynamic")
        kinds.append(("output", outputs, fits, "static per tensor"))
    for what, entry, fits, readable in kinds:
        if _odd(entry, known, "float") or entry.get("num_bits") != 8 or not entry.get("symmetric", True) or not fits:
            raise CheckpointError(
                f"{layer}: {what} {dict(entry)} cannot be read; readable: float8, symmetric, {readable}"
            )
    return Scheme(
        terms=(Float8Rows(grid=Grid(bits=8, type="float", granularity=per)),),
        inputs=Grid(bits=8, type="float", granularity=expected),
        outputs=None if outputs is None else Grid(bits=8, type="float", granularity="tensor"),
        dynamic=dynamic,
    )


def _block_scheme(group: Mapping[str, Any], layer: str) -> Scheme:
    """The scheme of float8 weights in blocks of 128 x 128 with a float8 input in groups of 128. Raises
    CheckpointError."""
    weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
    if group.get("output_activations"):
        raise CheckpointError(f"{layer} quantizes its output beside weights in blocks, which cannot be read")
    block, size = weights.get("block_structure"), inputs.get("group_size")
    kinds = [
        ("weights", weights, block == list(WEIGHT_BLOCK) and not weights.get("dynamic"), READABLE_FLOATS),
        (
            "input",
            inputs,
            (inputs.get("strategy") or "group") == "group" and size == BLOCK and inputs.get("dynamic") is True,
            f"beside weights in blocks: dynamic in groups of {BLOCK}",
        ),
    ]
    for what, entry, fits, readable in kinds:
        known = ("num_bits", "symmetric", "dynamic", "strategy", "block_structure", "group_size")
        if _odd(entry, known, "float") or entry.get("num_bits") != 8 or not entry.get("symmetric", True) or not fits:
            raise CheckpointError(
                f"{layer}: {what} {dict(entry)} cannot be read; readable: float8, symmetric, {readable}"
            )
    return block_scheme(Float8Blocks)


def _odd(entry: Mapping[str, Any], known: Iterable[str], kind: NumberType = "int") -> bool:
    """True for an entry with a key that is neither known nor empty, of another type, or of a harmful column order."""
    ignored = {*known, *OF_THE_SEARCH, "type", "actorder", "scale_dtype", "zp_dtype"}
    return (
        any(value not in (None, False, {}) for key, value in entry.items() if key not in ignored)
        or entry.get("type", "int") != kind
        or entry.get("actorder") not in HARMLESS_ORDERS
    )


def _weight_grid(entry: Mapping[str, Any], layer: str) -> Grid:
    known = ("num_bits", "symmetric", "dynamic", "strategy", "group_size")
    if _odd(entry, known) or entry.get("dynamic") or not entry.get("num_bits"):
        raise CheckpointError(
            f"{layer}: weights {dict(entry)} cannot be read; readable: integer, static, 2 to 8 bits, "
            "per channel or group, columns in their own order"
        )
    strategy = entry.get("strategy") or ("group" if entry.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise CheckpointError(f"{layer}: weight strategy {strategy!r} cannot be read; readable: group, channel")
    bits, symmetric = entry["num_bits"], entry.get("symmetric", True)
    try:
        if strategy == "channel":
            return Grid(bits=bits, symmetric=symmetric)
        return Grid(bits=bits, symmetric=symmetric, granularity="group", group_size=entry.get("group_size"))
    except InputError as error:
        raise CheckpointError(f"{layer}: weights {dict(entry)} cannot be read: {error}") from None


def _activation_grid(entry: Mapping[str, Any], layer: str, what: Literal["input", "output"]) -> tuple[Grid, bool]:
    """(grid, dynamic): int8, per token when dynamic (an input only, also of 4 bits), per tensor when static."""
    dynamic = entry.get("dynamic", False)
    expected: Granularity = "token" if dynamic else "tensor"
    strategy = entry.get("strategy") or expected
    known = ("num_bits", "symmetric", "dynamic", "strategy")
    fits = dynamic in (True, False) and (what == "input" or not dynamic)
    bits = entry.get("num_bits") or 0
    allowed = BESIDE_PACKED if what == "input" and dynamic else (8,)
    if _odd(entry, known) or bits not in allowed or strategy != expected or not fits:
        readable = "dynamic per token or static per tensor" if what == "input" else "static per tensor"
        raise CheckpointError(f"{layer}: {what} {dict(entry)} cannot be read; readable: int8, {readable}")
    return Grid(bits=bits, symmetric=entry.get("symmetric", True), granularity=expected), dynamic


def scheme_for(layer: str, quantization: Mapping[str, Any]) -> Scheme:
    """The scheme that a `quantization_config` gives a linear layer (`group_for`). Raises CheckpointError."""
    return read_scheme(group_for(layer, quantization), quantization.get("format"), layer)


def group_for(layer: str, quantization: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config group of a linear layer, by the rule of compressed-tensors: the one that names it, else one whose
    pattern matches, else one for all linears. Raises CheckpointError where there is none."""
    groups: list[Mapping[str, Any]] = list((quantization.get("config_groups") or {}).values())
    for wanted in (lambda target: target == layer, lambda target: _matches(target, layer), "Linear".__eq__):
        for group in groups:
            if any(wanted(target) for target in group.get("targets") or ()):
                return group
    raise CheckpointError(f"no config group of the quantization_config targets {layer}")


def check_targets(quantization: Mapping[str, Any], layers: Sequence[str]) -> None:
    """Raises InputError for patterns of config groups that stand still at the name of a layer."""
    groups: Iterable[Mapping[str, Any]] = (quantization.get("config_groups") or {}).values()
    targets = [target for group in groups for target in group.get("targets") or () if target.startswith(REGULAR)]
    expressions = [target.removeprefix(REGULAR) for target in targets]
    check_expressions(f"targets of the quantization_config, {targets[:1]},", expressions, layers)


def _matches(target: str, layer: str) -> bool:
    if not target.startswith(REGULAR):
        return False
    try:
        return re.match(target.removeprefix(REGULAR), layer) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"the quantization_config targets {target!r}, which is no pattern ({error})") from None
