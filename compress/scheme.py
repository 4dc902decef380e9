"""How a layer is stored and computed: the grids of its weights and its input, and the tensors that hold them.

In the words of compressed-tensors' `quantization_config`. N outputs, K inputs, G groups, n bits. The keys of a layer
are its path plus

    pack-quantized   weight_packed      int32 [N, ceil(K n / 32)]    codes as a bit stream (`compress.kernels.pack`)
                     weight_scale       model dtype [N, G]
                     weight_zero_point  int32 [ceil(N n / 32), G]    asymmetric only, packed along N
                     weight_shape       int64 [2]                    (N, K)
    int-quantized    weight             int8 [N, K]                  symmetric, for layers with an int8 input
                     weight_scale       model dtype [N, 1]           and, with groups [N, G] and zero points, for token
                     weight_zero_point  int8 [N, G]                  embeddings of 8 bits: asymmetric only
                     input_scale        model dtype [1]              static input only
                     input_zero_point   int8 [1]                     asymmetric static input; may be absent otherwise
                     output_scale       model dtype [1]              where the output is rounded, too
                     output_zero_point  int8 [1]                     asymmetric output; may be absent otherwise
    float-quantized  weight             float8 e4m3 [N, K]           symmetric, for layers with a float8 input
                     weight_scale       model dtype [N, 1] or [1]    per channel or per tensor
                     input_scale        model dtype [1]              static input only
                     output_scale       model dtype [1]              where the output is rounded, too
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from compress.errors import CheckpointError, InputError
from compress.grid import Granularity, Grid, NumberType, decode, encode, quantize, working_dtype
from compress.kernels.pack import words_of

Layout = Literal["pack-quantized", "int-quantized", "float-quantized"]
# Older writers say naive for integers that are not packed.
LAYOUTS: dict[str, Layout] = {
    "pack-quantized": "pack-quantized",
    "int-quantized": "int-quantized",
    "naive-quantized": "int-quantized",
    "float-quantized": "float-quantized",
}
PARTS = (
    "weight_packed",
    "weight",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "input_scale",
    "input_zero_point",
    "output_scale",
    "output_zero_point",
)
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
# How the numbers were found, not what they are.
OF_THE_SEARCH = {"observer", "observer_kwargs"}
# Orders in which columns were solved and then put back; `group` permutes the groups themselves.
HARMLESS_ORDERS = (None, False, "weight", "static")


@dataclass(frozen=True)
class ActivationCodes:
    """How a layer's input or output is rounded to 8 bits: by fixed scales and zero points, [1, 1] or per channel
    [1, K], or (None) for every token anew.

    scale is in its stored dtype, zero_point int8 or None where symmetric.
    """

    grid: Grid
    scale: Tensor | None = None
    zero_point: Tensor | None = None

    @property
    def dynamic(self) -> bool:
        return self.scale is None

    def fake_quantize(self, x: Tensor) -> Tensor:
        """x [..., K] rounded, in its own dtype: what the kernels multiply, up to that dtype's rounding."""
        if self.scale is None:
            rows = x.reshape(-1, x.shape[-1])
            return quantize(rows, self.grid, torch.float32).dequantize(x.dtype).reshape(x.shape)
        work = x.to(working_dtype(x))
        scale = self.scale.flatten().to(work)
        zero_point = torch.zeros_like(scale) if self.zero_point is None else self.zero_point.flatten().to(work)
        codes = encode(work, scale, zero_point, self.grid)
        return decode(codes, scale, zero_point, torch.float32).to(x.dtype)


class Part(NamedTuple):
    """A tensor that a layer is stored as: its shape, the dtypes it may have, and whether it may be absent."""

    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    optional: bool = False


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """weights: their grid. inputs: the 8-bit grid of what the layer multiplies, or None. dynamic: inputs are fitted to
    every token as it comes, rather than by calibration. outputs: the 8-bit grid of what the layer returns, bias
    included, by a fixed range, or None."""

    weights: Grid
    inputs: Grid | None = None
    outputs: Grid | None = None
    dynamic: bool = True
    layout: Layout = "pack-quantized"

    def __str__(self) -> str:
        if self.weights.floating:
            returned = "" if self.outputs is None else ", output static"
            return f"fp8 {self.weights.granularity}, input {'dynamic' if self.dynamic else 'static'}{returned}"
        group = "channel" if self.weights.group_size is None else f"g{self.weights.group_size}"
        kind = "symmetric" if self.weights.symmetric else "asymmetric"
        if self.inputs is None:
            return f"w{self.weights.bits}a16 {group} {kind}"
        how = "dynamic" if self.dynamic else "static"
        sign = "symmetric" if self.inputs.symmetric else "asymmetric"
        returned = ""
        if self.outputs is not None:
            returned = f", output static {'symmetric' if self.outputs.symmetric else 'asymmetric'}"
        return f"w{self.weights.bits}a{self.inputs.bits} {group} {kind}, input {how} {sign}{returned}"

    @property
    def one_scale(self) -> bool:
        """Whether a layer is stored with one weight scale; integers of one scale have it written once per channel."""
        return self.layout == "float-quantized" and self.weights.granularity == "tensor"

    def needs_dequantizing(self, table: bool = False) -> bool:
        """Whether transformers reads it with `dequantize=True` only: it has no packed zero points by default, and no
        packed embeddings (table)."""
        return self.layout == "pack-quantized" and (table or not self.weights.symmetric)

    def groups(self, columns: int) -> int:
        """Scales per row."""
        return 1 if self.weights.group_size is None else columns // self.weights.group_size

    def parts(self, rows: int, columns: int) -> dict[str, Part]:
        """The tensors that hold an [N, K] layer."""
        bits, groups = self.weights.bits, self.groups(columns)
        parts = {"weight_scale": Part((1,) if self.one_scale else (rows, groups), FLOATS)}
        if self.layout == "pack-quantized":
            parts["weight_packed"] = Part((rows, words_of(columns, bits)), (torch.int32,))
            parts["weight_shape"] = Part((2,), (torch.int64, torch.int32))
            if not self.weights.symmetric:
                parts["weight_zero_point"] = Part((words_of(rows, bits), groups), (torch.int32,))
        else:
            parts["weight"] = Part((rows, columns), (self.weights.storage,))
            if not self.weights.symmetric:
                parts["weight_zero_point"] = Part((rows, groups), (torch.int8,))
        for side, grid in (("input", None if self.dynamic else self.inputs), ("output", self.outputs)):
            if grid is not None:
                parts[f"{side}_scale"] = Part((1,), FLOATS)
                if not grid.floating:
                    parts[f"{side}_zero_point"] = Part((1,), (torch.int8,), optional=grid.symmetric)
        return parts


def scheme_of(
    weights: Grid, inputs: ActivationCodes | None, outputs: ActivationCodes | None = None, table: bool = False
) -> Scheme:
    """The scheme under which codes are stored. table: of a token embedding or with it, which transformers loads without
    further ado only where its weight is called `weight`: 8 bits are not packed."""
    if inputs is None:
        assert not weights.floating, "float8 weights come with float8 inputs"
        assert outputs is None, "rounded outputs come with rounded inputs"
        return Scheme(weights=weights, layout="int-quantized" if table and weights.bits == 8 else "pack-quantized")
    whole = weights.bits == 8 and weights.symmetric and weights.granularity in ("channel", "tensor")
    layout: Layout = "float-quantized" if weights.floating else "int-quantized" if whole else "pack-quantized"
    returned = None if outputs is None else outputs.grid
    return Scheme(weights=weights, inputs=inputs.grid, outputs=returned, dynamic=inputs.dynamic, layout=layout)


def group_entry(scheme: Scheme) -> dict[str, Any]:
    """A scheme as a `config_groups` entry has it, without its targets."""
    return {
        "format": scheme.layout,
        "weights": _weights_entry(scheme.weights),
        "input_activations": _activations_entry(scheme.inputs, scheme.dynamic),
        "output_activations": _activations_entry(scheme.outputs, dynamic=False),
    }


def _activations_entry(grid: Grid | None, dynamic: bool) -> dict[str, Any] | None:
    if grid is None:
        return None
    return {
        "num_bits": grid.bits,
        "type": grid.type,
        "symmetric": grid.symmetric,
        "dynamic": dynamic,
        "strategy": "token" if dynamic else "tensor",
    }


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
    return {**entry, "group_size": grid.group_size} if group else entry


def read_scheme(group: Mapping[str, Any], layout: str | None, layer: str) -> Scheme:
    """The scheme of a `config_groups` entry. Raises CheckpointError, naming the layer, for one we cannot read."""
    layout = group.get("format") or layout
    if layout not in LAYOUTS:
        raise CheckpointError(f"{layer} is stored as {layout!r}; readable: {', '.join(LAYOUTS)}")
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
        return Scheme(weights=weights, layout=LAYOUTS[layout])
    inputs, dynamic = _activation_grid(given, layer, "input")
    outputs = _activation_grid(returned, layer, "output")[0] if returned else None
    if LAYOUTS[layout] == "int-quantized" and (weights.bits != 8 or not weights.symmetric or weights.group_size):
        raise CheckpointError(f"{layer}: int-quantized weights must be symmetric, 8 bits, one scale per channel")
    if LAYOUTS[layout] == "pack-quantized" and not (dynamic and inputs.symmetric):
        raise CheckpointError(f"{layer}: packed weights with an int8 input that is not dynamic and symmetric")
    return Scheme(weights=weights, inputs=inputs, outputs=outputs, dynamic=dynamic, layout=LAYOUTS[layout])


def _float_scheme(group: Mapping[str, Any], layer: str) -> Scheme:
    """Of float8 weights with a float8 input, and perhaps a float8 output."""
    known = ("num_bits", "symmetric", "dynamic", "strategy")
    weights, inputs = (group.get(key) or {} for key in ("weights", "input_activations"))
    outputs = group.get("output_activations") or None
    dynamic = inputs.get("dynamic", False)
    expected: Granularity = "token" if dynamic else "tensor"
    per: Granularity = weights.get("strategy") or "tensor"
    kinds = [
        ("weights", weights, per in ("channel", "tensor") and not weights.get("dynamic"), "per channel or tensor"),
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
        weights=Grid(bits=8, type="float", granularity=per),
        inputs=Grid(bits=8, type="float", granularity=expected),
        outputs=None if outputs is None else Grid(bits=8, type="float", granularity="tensor"),
        dynamic=dynamic,
        layout="float-quantized",
    )


def _odd(entry: Mapping[str, Any], known: Iterable[str], kind: NumberType = "int") -> bool:
    """Whether an entry says something that is neither known nor empty."""
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
    """(grid, dynamic): int8, per token when dynamic (an input only), per tensor when static."""
    dynamic = entry.get("dynamic", False)
    expected: Granularity = "token" if dynamic else "tensor"
    strategy = entry.get("strategy") or expected
    known = ("num_bits", "symmetric", "dynamic", "strategy")
    fits = dynamic in (True, False) and (what == "input" or not dynamic)
    if _odd(entry, known) or entry.get("num_bits") != 8 or strategy != expected or not fits:
        readable = "dynamic per token or static per tensor" if what == "input" else "static per tensor"
        raise CheckpointError(f"{layer}: {what} {dict(entry)} cannot be read; readable: int8, {readable}")
    return Grid(bits=8, symmetric=entry.get("symmetric", True), granularity=expected), dynamic


def scheme_for(layer: str, quantization: Mapping[str, Any]) -> Scheme:
    """The scheme that a `quantization_config` gives a linear layer: the group that names it, or else one whose pattern
    matches, or else one for all linears, as compressed-tensors decides."""
    groups = list((quantization.get("config_groups") or {}).values())
    for wanted in (lambda target: target == layer, lambda target: _matches(target, layer), "Linear".__eq__):
        for group in groups:
            if any(wanted(target) for target in group.get("targets") or ()):
                return read_scheme(group, quantization.get("format"), layer)
    raise CheckpointError(f"no config group of the quantization_config targets {layer}")


def _matches(target: str, layer: str) -> bool:
    if not target.startswith("re:"):
        return False
    try:
        return re.match(target[3:], layer) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(f"the quantization_config targets {target!r}, which is no pattern ({error})") from None
