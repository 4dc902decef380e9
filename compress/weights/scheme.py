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

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from compress.errors import InputError
from compress.kernels.pack import words_of
from compress.weights.grid import DEFAULT_GROUP, MAX_BITS, MIN_BITS, Grid, usual_group
from compress.weights.rounding import ActivationCodes

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


NARROW, WIDE = 4, 8
# {name: bits of a weight}: beside inputs that stay as they are (a16), 8-bit integers (a8), or both float8 (fp8).
SCHEMES = {f"w{bits}a16": bits for bits in range(MIN_BITS, MAX_BITS + 1)} | {"w4a8": NARROW, "w8a8": WIDE, "fp8": WIDE}
# Weights and inputs of 8 bits, one scale per output channel, inputs dynamic or static.
WHOLE = ("w8a8", "fp8")
BY_NAME = f"w{MIN_BITS}a16 ... w{MAX_BITS}a16, {', '.join(name for name in SCHEMES if not name.endswith('a16'))}"


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


def scheme_named(name: str, group_size: int | None = None, columns: int = DEFAULT_GROUP) -> Scheme:
    """w4a16 and its like; a8: the input int8, fitted to every token. fp8: weight and input float8, fitted likewise.

    group_size: inputs per scale, -1 for one scale per output (always so for w8a8 and fp8); where it is not given, the
    usual one of a layer of `columns` inputs. Raises InputError for a name it does not know.
    """
    if name not in SCHEMES:
        raise InputError(f"scheme {name!r}; allowed: {BY_NAME}")
    if name in WHOLE and group_size not in (None, -1):
        raise InputError(f"{name} has one scale per output; leave group_size out")
    if name == "fp8":
        inputs = Grid(bits=WIDE, granularity="token", type="float")
        return Scheme(weights=Grid(bits=WIDE, type="float"), inputs=inputs, layout="float-quantized")
    tokens = None if name.endswith("a16") else Grid(bits=WIDE, granularity="token")
    if name in WHOLE:
        return Scheme(weights=Grid(bits=WIDE), inputs=tokens, layout="int-quantized")
    bits, size = SCHEMES[name], usual_group([columns]) if group_size is None else group_size
    weights = Grid(bits=bits) if size == -1 else Grid(bits=bits, granularity="group", group_size=size)
    return Scheme(weights=weights, inputs=tokens)
