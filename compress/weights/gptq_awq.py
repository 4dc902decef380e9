"""Reads schemes from the configurations of GPTQ and AWQ checkpoints.

    {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "checkpoint_format": "gptq",
     "dynamic": {"+:PATTERN": {"bits": 8, ...}, "-:PATTERN": {}}, ...}
    {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": 128, "zero_point": true, ...}

A layer counts as compressed where the checkpoint holds its `qweight`; lists of modules are ignored. `dynamic` gives
some layers another width or group size: the first pattern that matches.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from compress.base.errors import CheckpointError, InputError
from compress.base.sandbox import check_expressions
from compress.weights.formats.gptq_awq import AWQ_BITS, AWQWords, GPTQActOrder, GPTQWords, grid_of_words
from compress.weights.scheme import Scheme

GPTQ, AWQ = "gptq", "awq"
METHODS = (GPTQ, AWQ)
MARK = "qweight"  # the tensor that a compressed layer has
ORDER = "g_idx"
GPTQ_BITS = (2, 3, 4, 8)
# {checkpoint_format: what is subtracted from zero points before they are stored}.
LESS = {"gptq": 1, "gptq_v2": 0}


class LayerWords(TypedDict, total=False):
    """The entry of `dynamic` for the layers that its pattern matches."""

    bits: int
    group_size: int | None
    sym: bool | None


class GPTQConfig(TypedDict, total=False):
    """A configuration whose method is GPTQ."""

    bits: int
    group_size: int | None
    sym: bool | None
    checkpoint_format: str | None
    format: str | None
    pack_dtype: str | None
    is_marlin_format: bool | None
    dynamic: dict[str, LayerWords] | None


class AWQConfig(TypedDict, total=False):
    """A configuration whose method is AWQ."""

    bits: int
    group_size: int | None
    version: str | None
    zero_point: bool | None
    backend: str | None


def read_gptq(quantization: Mapping[str, Any], layer: str, where: object, in_order: bool = True) -> Scheme:
    """The scheme of a layer. in_order: inputs lie in the order of their groups. Raises CheckpointError, which names
    `where`, for one that cannot be read."""
    given = {**quantization, **_own_words(quantization, layer, where)}
    form = given.get("checkpoint_format") or given.get("format") or "gptq"
    if form not in LESS or given.get("is_marlin_format"):
        form = "marlin" if given.get("is_marlin_format") else form
        raise CheckpointError(f"{where} is GPTQ of the format {form!r}; readable: {', '.join(LESS)}")
    if given.get("pack_dtype") not in (None, "int32"):
        raise CheckpointError(f"{where} packs GPTQ's codes into {given['pack_dtype']!r}; readable: 'int32'")
    bits = given.get("bits")
    if bits not in GPTQ_BITS:
        readable = ", ".join(map(str, GPTQ_BITS))
        raise CheckpointError(f"{where} says that {layer} has {bits!r} bits; readable in GPTQ's layout: {readable}")
    symmetric = given.get("sym") is not False
    kind = GPTQWords if in_order else GPTQActOrder
    try:
        return Scheme(terms=(kind(grid=grid_of_words(bits, group_size_of(given), symmetric), less=LESS[form]),))
    except InputError as error:
        raise CheckpointError(f"{where}: {layer}: {error}") from None


def read_awq(quantization: Mapping[str, Any], layer: str, where: object) -> Scheme:
    """The scheme of a layer. Raises CheckpointError, which names `where`, for one that cannot be read."""
    version, backend = str(quantization.get("version") or "gemm").lower(), quantization.get("backend")
    if version != "gemm" or backend not in (None, "autoawq"):
        named = repr(version) if version != "gemm" else f"of {backend!r}"
        raise CheckpointError(f"{where} is AWQ, version {named}; readable: 'gemm'")
    bits = quantization.get("bits")
    if bits != AWQ_BITS:
        raise CheckpointError(f"{where} says that {layer} has {bits!r} bits; readable in AWQ's layout: {AWQ_BITS}")
    if quantization.get("zero_point") is False:
        raise CheckpointError(f"{where} is AWQ without zero points (zero_point false); readable: true")
    try:
        return Scheme(terms=(AWQWords(grid=grid_of_words(bits, group_size_of(quantization), False)),))
    except InputError as error:
        raise CheckpointError(f"{where}: {layer}: {error}") from None


def group_size_of(quantization: Mapping[str, Any]) -> int:
    """Inputs that share a scale; -1 for one scale per output."""
    return quantization.get("group_size") or -1


def check_dynamic(quantization: Mapping[str, Any], layers: Sequence[str]) -> None:
    """Raises InputError for patterns of `dynamic` that stand still at the name of a layer."""
    patterns = [*(quantization.get("dynamic") or ())]
    check_expressions(f"dynamic {patterns[:1]}", [pattern.removeprefix("+:") for pattern in patterns], layers)


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
