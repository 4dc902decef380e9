"""Reads the codes of GPTQ and AWQ checkpoints, which are shown as packed ones (`weights.formats.codes.Packed`).

    {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "checkpoint_format": "gptq",
     "dynamic": {"+:PATTERN": {"bits": 8, ...}, "-:PATTERN": {}}, ...}
    {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": true, ...}
    {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 128, "sym": true,
     "data_type": "int", "extra_config": {"LAYER or PATTERN": {"bits": 8, ...}}, ...}

Of a layer with N outputs, K inputs, G groups and codes q of n bits, whose values are (q - z) scale:

    GPTQ    qweight   int32 [K n / 32, N]    q, a bit stream along the inputs, lowest bits first
            qzeros    int32 [G, N n / 32]    z less 1 (format 1) or z (format 2), a stream along the outputs
            scales    float16 [G, N]
            g_idx     int32 [K]              the group of each input; may be absent, where these are in order
    AWQ     qweight   int32 [K, N / 8]       eight outputs in a word; nibble i, from the lowest, holds output
                                             ORDER[i] of them (AutoAWQ, version "gemm")
            qzeros    int32 [G, N / 8]       z, in the same order
            scales    float16 [G, N]

A layer counts as compressed where the checkpoint holds its `qweight`; lists of modules are ignored. `dynamic` gives
some layers another width or group size: the first pattern that matches. Inputs in the groups of act-order are shown as
`weights.formats.act_order`.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from compress.base.errors import CheckpointError, InputError
from compress.base.sandbox import check_expressions
from compress.checkpoint.read.configuration import AUTO_ROUND, AWQ, GPTQ
from compress.checkpoint.read.views import View, ViewedFiles
from compress.checkpoint.read.weight_files import WeightFiles
from compress.kernels.layouts.words import WORD, pack_rows, unpack_rows, words_of
from compress.weights.formats.act_order import INDEX, ActOrder
from compress.weights.formats.codes import Packed
from compress.weights.grid import Grid
from compress.weights.own_config import groups_of
from compress.weights.scheme import Scheme
from compress.weights.terms import FLOATS

MARK = "qweight"  # the tensor that a compressed layer has
AWQ_BITS, GPTQ_BITS = 4, (2, 3, 4, 8)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
# {checkpoint_format: what is subtracted from zero points before they are stored}.
LESS = {"gptq": 1, "gptq_v2": 0}
# {AutoRound's packing_format: (method, checkpoint_format)} of the same words (auto_round 0.16.1, inference/backend.py).
PACKED = {
    "auto_round:auto_gptq": (GPTQ, "gptq"),
    "auto_round:gptqmodel": (GPTQ, "gptq_v2"),
    "auto_round": (GPTQ, "gptq_v2"),
    "auto_round:auto_awq": (AWQ, None),
}
INTS = (torch.int32,)
PATTERN = re.compile(r"[*+?^$()\[\]{}|\\]")  # a sign that a name has not


def view(files: WeightFiles, quantization: Mapping[str, Any], where: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """(Files in which such codes are packed as compressed-tensors packs them, the configuration that says so). Raises
    CheckpointError for another layout of words, and for tensors that are missing or of the wrong shape."""
    if quantization["quant_method"] == AUTO_ROUND:
        quantization = _of_auto_round(quantization, where)
    method = quantization["quant_method"]
    layers = sorted(name.removesuffix(f".{MARK}") for name in files.headers if name.endswith(f".{MARK}"))
    if not layers:
        raise CheckpointError(f"{where} says it is {method} but holds no {MARK}")
    if method == GPTQ:  # AWQ has no words for single layers
        patterns = [*(quantization.get("dynamic") or ())]
        check_expressions(f"dynamic {patterns[:1]}", [pattern.removeprefix("+:") for pattern in patterns], layers)
    views: dict[str, View] = {}
    schemes: dict[str, Scheme] = {}
    hidden: set[str] = set()
    for layer in layers:
        hidden |= {f"{layer}.{part}" for part in (MARK, "qzeros", "scales", "g_idx")}
        if method == AWQ:
            term, own = _awq(files, layer, awq_grid(quantization, layer, where))
        else:
            term, own = _gptq(files, layer, *gptq_grid(quantization, layer, where))
        schemes[layer] = Scheme(terms=(term,))
        views |= {f"{layer}.{part}": view for part, view in own.items()}
    return ViewedFiles(files, hidden, views), groups_of(schemes)


def _of_auto_round(told: Mapping[str, Any], where: Path) -> dict[str, Any]:
    """AutoRound's configuration in the words of GPTQ or AWQ. Raises CheckpointError for other packings and numbers, for
    rounded inputs and for rotations."""
    form, number, inputs = told.get("packing_format"), told.get("data_type", "int"), told.get("act_bits") or WORD
    if form not in PACKED or number != "int" or inputs < WORD // 2 or told.get("rotation_config"):
        raise CheckpointError(
            f"{where} is AutoRound's {form!r} with {number!r} weights and inputs of {inputs} bits, or has rotations; "
            f"readable: int weights alone, as {', '.join(PACKED)}"
        )
    own = (told.get("extra_config") or {}).items()  # names, and patterns that may match anywhere
    dynamic = {f".*?(?:{name})" if PATTERN.search(name) else f"{name}$": words for name, words in own}
    method, version = PACKED[form]
    return {**told, "quant_method": method, "checkpoint_format": version, "dynamic": dynamic}


def gptq_grid(quantization: Mapping[str, Any], layer: str, where: object) -> tuple[Grid, int]:
    """(The grid of a layer, what its stored zero points are less by). Raises CheckpointError, which names `where`, for
    one that cannot be read."""
    settings = {**quantization, **_own_words(quantization, layer, where)}
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    form = "marlin" if settings.get("is_marlin_format") else form
    if form not in LESS:
        raise CheckpointError(f"{where} is GPTQ of the format {form!r}; readable: {', '.join(LESS)}")
    if settings.get("pack_dtype") not in (None, "int32"):
        raise CheckpointError(f"{where} packs GPTQ's codes into {settings['pack_dtype']!r}; readable: 'int32'")
    return _grid(settings, layer, where, GPTQ_BITS, settings.get("sym") is not False), LESS[form]


def awq_grid(quantization: Mapping[str, Any], layer: str, where: object) -> Grid:
    """The grid of a layer. Raises CheckpointError, which names `where`, for one that cannot be read."""
    version, backend = str(quantization.get("version") or "gemm").lower(), quantization.get("backend")
    if version != "gemm" or backend not in (None, "autoawq"):
        named = repr(version) if version != "gemm" else f"of {backend!r}"
        raise CheckpointError(f"{where} is AWQ, version {named}; readable: 'gemm'")
    if quantization.get("zero_point") is False:
        raise CheckpointError(f"{where} is AWQ without zero points (zero_point false); readable: true")
    return _grid(quantization, layer, where, (AWQ_BITS,), False)


def _grid(given: Mapping[str, Any], layer: str, where: object, readable: Sequence[int], symmetric: bool) -> Grid:
    bits, size = given.get("bits", 0), given.get("group_size") or -1
    if bits not in readable:
        method, allowed = str(given["quant_method"]).upper(), ", ".join(map(str, readable))
        raise CheckpointError(f"{where} says that {layer} has {bits!r} bits; readable in {method}'s layout: {allowed}")
    try:
        if size == -1:
            return Grid(bits=bits, symmetric=symmetric)
        return Grid(bits=bits, symmetric=symmetric, granularity="group", group_size=size)
    except InputError as error:
        raise CheckpointError(f"{where}: {layer}: {error}") from None


def _own_words(quantization: Mapping[str, Any], layer: str, where: object) -> Mapping[str, Any]:
    """The entry of `dynamic` for a layer; empty where there is none. Raises CheckpointError for what is no pattern."""
    for pattern, words in (quantization.get("dynamic") or {}).items():
        try:
            matches = re.match(pattern.removeprefix("+:"), layer) is not None
        except (re.error, RecursionError, OverflowError) as error:
            raise CheckpointError(f"{where} has {pattern!r} in dynamic, which is no pattern ({error})") from None
        if matches and not pattern.startswith("-:"):
            return words
    return {}


def _gptq(files: WeightFiles, layer: str, grid: Grid, less: int) -> tuple[Packed, dict[str, View]]:
    """(The format that a layer is shown in, the views of its tensors.)"""
    (lines, rows), bits = _size(files, layer), grid.bits
    columns, zeros, index = lines * WORD // bits, f"{layer}.qzeros", f"{layer}.g_idx"
    if columns * bits % WORD:
        raise CheckpointError(f"{layer} has {columns} inputs; codes of {bits} bits do not fill words of {WORD}")
    groups = _groups(files, layer, grid, rows, columns)
    if index in files:
        files.expect(index, (columns,), INTS)
    in_order = index not in files or torch.equal(files.tensor(index), groups_in_order(columns, groups))

    def stored(held: Tensor) -> Tensor:
        return unpack_rows(held, bits, rows, signed=False)  # [G, N], less `less`

    def packed(words: Tensor, held: Tensor) -> Tensor:
        if grid.symmetric and bool((stored(held) != 2 ** (bits - 1) - less).any()):
            raise CheckpointError(
                f"{zeros} holds zero points beside {2 ** (bits - 1)}, and its codes are said to be symmetric"
            )
        return words.t().contiguous()

    def moved(held: Tensor) -> Tensor:
        zero_GN = stored(held)
        if less and bool((zero_GN == 2**bits - 1).any()):
            raise CheckpointError(
                f"{zeros} holds {2**bits - 1}, which readers of format 1 take for {2**bits} or for 0; convert it to "
                "format 2 (GPTQModel does)"
            )
        return zero_GN + less

    views = _views(files, layer, grid, (rows, columns), View(((), "I32"), (f"{layer}.{MARK}", zeros), packed), moved)
    if in_order:
        return Packed(grid=grid), views
    return ActOrder(grid=grid), {**views, INDEX: View(((columns,), "I32"), (index,), lambda group: group)}


def _awq(files: WeightFiles, layer: str, grid: Grid) -> tuple[Packed, dict[str, View]]:
    """(The format that a layer is shown in, the views of its tensors.)"""
    columns, words = _size(files, layer)
    rows = words * len(ORDER)
    _groups(files, layer, grid, rows, columns)

    def packed(held: Tensor) -> Tensor:
        codes = pad(from_words(held).t(), (0, -columns % len(ORDER)))
        return (codes[:, ::2] | codes[:, 1::2] << AWQ_BITS).contiguous().view(torch.int32)

    view = View(((), "I32"), (f"{layer}.{MARK}",), packed)
    return Packed(grid=grid), _views(files, layer, grid, (rows, columns), view, from_words)


def _views(
    files: WeightFiles,
    layer: str,
    grid: Grid,
    shape: tuple[int, int],
    codes: View,
    zeros: Callable[[Tensor], Tensor],
) -> dict[str, View]:
    """The views of a layer. codes: of packed ones, without their shape; zeros: makes unsigned zero points [G, N] of the
    stored ones."""
    (rows, columns), bits = shape, grid.bits
    (groups, _), dtype = files.headers[f"{layer}.scales"]

    def scale(held: Tensor) -> Tensor:
        if not bool(torch.isfinite(held).all()):
            raise CheckpointError(f"{layer}.scales holds values that are not finite numbers")
        return held.t().contiguous()

    def zero_points(held: Tensor) -> Tensor:
        return pack_rows(zeros(held), bits, signed=False).t()

    # The smallest tensor, as a view is made of one.
    smallest = (f"{layer}.qzeros",)
    views = {
        "weight_packed": View(((rows, words_of(columns, bits)), "I32"), codes.of, codes.make),
        "weight_scale": View(((rows, groups), dtype), (f"{layer}.scales",), scale),
        "weight_shape": View(((2,), "I64"), smallest, lambda _: torch.tensor(shape)),
    }
    if not grid.symmetric:
        views["weight_zero_point"] = View(((words_of(rows, bits), groups), "I32"), smallest, zero_points)
    return views


def _size(files: WeightFiles, layer: str) -> tuple[int, int]:
    """The shape of a layer's words. Raises CheckpointError where it has not two dimensions, or nothing is in it."""
    name = f"{layer}.{MARK}"
    shape, _ = files.headers[name]
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{name} has shape {shape}; it must have two dimensions, and something in it")
    files.expect(name, shape, INTS)
    return shape[0], shape[1]


def _groups(files: WeightFiles, layer: str, grid: Grid, rows: int, columns: int) -> int:
    """The groups of a row, once its zero points and scales are checked. Raises CheckpointError."""
    if (problem := Packed(grid=grid).problem(rows, columns)) is not None:
        raise CheckpointError(f"{layer} {problem}")
    groups = Packed(grid=grid).groups(columns)
    files.expect(f"{layer}.qzeros", (groups, words_of(rows, grid.bits)), INTS)
    files.expect(f"{layer}.scales", (groups, rows), FLOATS)
    return groups


def groups_in_order(columns: int, groups: int) -> Tensor:
    """The group [K] of each input, of groups that lie side by side."""
    return (torch.arange(columns) // (columns // groups)).to(torch.int32)


def to_words(codes: Tensor) -> Tensor:
    """[R, N] codes of 4 bits, eight of a row in a word of int32."""
    places = torch.arange(codes.shape[1]).view(-1, len(ORDER))[:, list(ORDER)].flatten()
    return pack_rows(codes[:, places].contiguous(), AWQ_BITS, signed=False)


def from_words(words: Tensor) -> Tensor:
    """Inverse of `to_words`: uint8."""
    count = words.shape[1] * len(ORDER)
    halves = words.contiguous().view(torch.uint8)
    lying = torch.stack([halves & 15, halves >> AWQ_BITS], -1).view(len(words), -1, len(ORDER))
    found = torch.empty_like(lying)
    found[:, :, list(ORDER)] = lying
    return found.view(len(words), count)
