"""Converts schemes to and from the `quantization_config` of compressed-tensors."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch

from compress.base.errors import CheckpointError, InputError
from compress.base.sandbox import check_expressions
from compress.kernels.layouts.scale_blocks import BLOCK
from compress.weights.formats.codes import Float8Blocks, Float8Rows, Int8Rows, Int8Table, Layout, Packed
from compress.weights.formats.levels import LEVEL_FORMATS, MXFP8, LevelCodes
from compress.weights.grid import Grid
from compress.weights.kv_cache_codes import CacheGranularity, CacheScheme
from compress.weights.number_formats import WIDE, ScaleNumbers
from compress.weights.scheme import Scheme, block_scheme

# Older writers call integers that are not packed "naive".
LAYOUTS: dict[str, Layout] = {layout: layout for layout in get_args(Layout)} | {"naive-quantized": "int-quantized"}
OF_LEVELS = {kind.layout: kind for kind in LEVEL_FORMATS.values() if kind.layout is not None}
REGULAR = "re:"  # before a regular expression among the targets
# The dtype in which scales are stored, where it is not the model's.
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
# Keys of numbers that are read; those of the last line are about the search for them, or about their storage alone.
KNOWN = {"num_bits", "type", "symmetric", "dynamic", "strategy", "group_size", "block_structure", "actorder"} | {
    *("observer", "observer_kwargs", "scale_dtype", "zp_dtype")
}
ROWS8, TENSOR8 = Grid(bits=WIDE, type="float"), Grid(bits=WIDE, type="float", granularity="tensor")
TOKENS8 = Grid(bits=WIDE, type="float", granularity="token")
BLOCKS = block_scheme(Float8Blocks)
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


Fitted = tuple[Grid, bool | str]  # a grid, and whether its scales are fitted to every input as the model runs


def read_scheme(group: Mapping[str, Any], layout: str | None, layer: str) -> Scheme:
    """The scheme of a `config_groups` entry. Raises CheckpointError, which names the layer, for one we cannot read."""
    layout = group.get("format") or layout
    if layout not in LAYOUTS:
        raise CheckpointError(f"{layer} is stored as {layout!r}; readable: {', '.join(LAYOUTS)}")
    kind, weights = LAYOUTS[layout], group.get("weights") or {}
    given, returned = group.get("input_activations"), group.get("output_activations")
    if kind in OF_LEVELS:
        return _scheme_of_levels(OF_LEVELS[kind], weights, given, returned, layer)
    if kind == "float-quantized" or (layout == "naive-quantized" and weights.get("type") == "float"):
        return _float_scheme(weights, given or {}, returned, layer)
    return _integer_scheme(kind, weights, given, returned, layer)


def _integer_scheme(
    layout: Layout,
    weights: Mapping[str, Any],
    given: Mapping[str, Any] | None,
    returned: Mapping[str, Any] | None,
    layer: str,
) -> Scheme:
    """The scheme of integer weights, packed or in a byte each. Raises CheckpointError."""
    packed = layout == "pack-quantized"
    if returned and (not given or packed):
        raise CheckpointError(
            f"{layer} quantizes its output and is stored as {layout} with input {given}; readable: int8 or float8 "
            "weights and inputs"
        )
    sized = weights if weights.get("strategy") != "channel" else {**weights, "group_size": None}
    numbers = _numbers(sized, "group" if weights.get("group_size") else "channel")
    grid = None if numbers is None or numbers[1] or numbers[0].type != "int" else numbers[0]
    if grid is None or grid.granularity not in ("channel", "group"):
        raise CheckpointError(
            f"{layer}: weights {dict(weights)} cannot be read (strategy {weights.get('strategy')!r}); readable: "
            "integer, static, 2 to 8 bits, per channel or group, columns in their own order"
        )
    if not packed and (grid.bits != WIDE or (given and (not grid.symmetric or grid.group_size))):
        alone = "" if not given else "; with rounded inputs symmetric, one scale per channel"
        raise CheckpointError(f"{layer} is stored as {layout} with {grid}; readable: 8 bits{alone}, or pack-quantized")
    if not given:
        return Scheme(terms=(Packed(grid=grid) if packed else Int8Table(grid=grid),))
    if packed and given.get("type") == "float":
        words = "beside packed weights int8 or float8, dynamic per token"
        return Scheme(terms=(Packed(grid=grid),), inputs=_fitted(given, layer, "input", [(TOKENS8, True)], words)[0])
    narrow = [Grid(bits=bits, symmetric=each, granularity="token") for bits in BESIDE_PACKED for each in (True, False)]
    fixed = [(Grid(symmetric=each, bits=WIDE, granularity="tensor"), False) for each in (True, False)]
    dynamic = [(each, True) for each in narrow if not packed or each.symmetric or each.bits < WIDE]
    words = "int8, dynamic per token" + ("" if packed else " or static per tensor")
    inputs, how = _fitted(given, layer, "input", dynamic if packed else [*dynamic, *fixed], words)
    outputs = _fitted(returned, layer, "output", fixed, "int8, static per tensor")[0] if returned else None
    term = Packed(grid=grid) if packed else Int8Rows(grid=grid)
    return Scheme(terms=(term,), inputs=inputs, outputs=outputs, dynamic=bool(how))


def _float_scheme(
    weights: Mapping[str, Any], given: Mapping[str, Any], returned: Mapping[str, Any] | None, layer: str
) -> Scheme:
    """The scheme of float8 weights with a float8 input and an optional float8 output. Raises CheckpointError."""
    blocks = weights.get("strategy") == "block"
    if blocks and returned:
        raise CheckpointError(f"{layer} quantizes its output beside weights in blocks, which cannot be read")
    known: list[Fitted] = [(each, False) for each in (ROWS8, TENSOR8, BLOCKS.weights)]
    inputs: list[Fitted] = [(TOKENS8, True), (TENSOR8, False)]
    of_inputs = "dynamic per token or static per tensor"
    if blocks:
        assert BLOCKS.inputs is not None
        inputs, of_inputs = [(BLOCKS.inputs, True)], f"beside weights in blocks: dynamic in groups of {BLOCK}"
    floats = "float8, symmetric, "
    grid, _ = _fitted(weights, layer, "weights", known, f"{floats}per channel or tensor or block of [{BLOCK}, {BLOCK}]")
    by_input, dynamic = _fitted(given, layer, "input", inputs, f"{floats}{of_inputs}", "group" if blocks else None)
    if blocks:
        return BLOCKS
    fixed: list[Fitted] = [(TENSOR8, False)]
    outputs = _fitted(returned, layer, "output", fixed, f"{floats}static per tensor")[0] if returned else None
    return Scheme(terms=(Float8Rows(grid=grid),), inputs=by_input, outputs=outputs, dynamic=bool(dynamic))


def _scheme_of_levels(
    kind: type[LevelCodes],
    weights: Mapping[str, Any],
    given: Mapping[str, Any] | None,
    returned: Mapping[str, Any] | None,
    layer: str,
) -> Scheme:
    """The scheme of codes of levels, with an input that is not rounded, or rounded alike or, beside powers of two, to
    float8 in groups of 32 or of 128. Raises CheckpointError."""
    if returned:
        raise CheckpointError(f"{layer} quantizes its output beside {kind.layout}, which cannot be read")
    how = "local" if kind.on.scales == "e4m3" else True
    readable = f"beside {kind.layout}: {_groups_of_levels(kind.on)}"
    scales = kind.on.scales
    _fitted(weights, layer, "weights", [(kind.on, False)], f"{readable}, num_bits: {kind.on.bits}", scales=scales)
    if not given:
        return Scheme(terms=(kind(grid=kind.on),))
    allowed: list[Fitted] = [(kind.on, how)]
    if scales == "e8m0":
        allowed.append((MXFP8.on, True))
        if _numbers(given, "") == (BLOCKS.inputs, True):
            return Scheme(terms=(kind(grid=kind.on),), inputs=BLOCKS.inputs)
    inputs, _ = _fitted(given, layer, "input_activations", allowed, f"{readable}, dynamic: {how}", scales=scales)
    return Scheme(terms=(kind(grid=kind.on),), inputs=inputs)


def _fitted(
    entry: Mapping[str, Any],
    layer: str,
    side: str,
    allowed: Sequence[Fitted],
    readable: str,
    usual: str | None = None,
    scales: ScaleNumbers = "stored",
) -> Fitted:
    """The one of the allowed grids that an entry describes. usual: its strategy, where it names none. readable: says
    which are allowed. Raises CheckpointError for another entry."""
    default = "tensor" if side == "weights" or not entry.get("dynamic") else "token"
    numbers = _numbers(entry, usual or default, scales)
    if numbers is None or numbers not in allowed:
        raise CheckpointError(f"{layer}: {side} {dict(entry)} cannot be read; readable: {readable}")
    return numbers


def _numbers(entry: Mapping[str, Any], usual: str, scales: ScaleNumbers = "stored") -> Fitted | None:
    """The grid of an entry; None for one with a key that is neither known nor empty, with a harmful order of columns,
    or without such a grid. usual: its strategy, where it names none. scales: those of the format."""
    strategy, kind = entry.get("strategy") or usual, entry.get("type", "int")
    size, block = entry.get("group_size"), entry.get("block_structure")
    if kind == "float" and strategy == "group" and scales == "stored":
        strategy, block = "block", (1, size)  # so many inputs of a token
    own = SCALE_DTYPES.get(scales)  # older writers leave it out, as it follows from the format
    if (
        any(value not in (None, False, {}) for key, value in entry.items() if key not in KNOWN)
        or entry.get("actorder") not in HARMLESS_ORDERS
        or (strategy == "tensor_group") != (scales == "e4m3")
        or (own is not None and any(str(entry.get(key) or own) != own for key in ("scale_dtype", "zp_dtype")))
        or (block and strategy != "block")
    ):
        return None
    try:
        grid = Grid(
            bits=entry.get("num_bits") or 0,
            symmetric=entry.get("symmetric", True),
            granularity="group" if strategy == "tensor_group" else strategy,  # type: ignore[arg-type]
            group_size=None if size in (0, -1) or strategy == "block" else size,
            type=kind,
            block=block,
            scales=scales,
        )
    except (InputError, TypeError):
        return None
    return grid, entry.get("dynamic", False)


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
