"""Reads MXFP4 experts as OpenAI's gpt-oss stores them, all of a block in one tensor.

    {"quant_method": "mxfp4", "modules_to_not_convert": [...]}

    experts.gate_up_proj_blocks   uint8 [E, 2 I, H / 32, 16]   two E2M1 codes per byte, the first in the lower half
    experts.gate_up_proj_scales   uint8 [E, 2 I, H / 32]       127 + the exponent of a power of two
    experts.gate_up_proj_bias     [E, 2 I]                     rows 0, 2, 4 ... are the gate's, the others up's
    experts.down_proj_blocks      uint8 [E, H, I / 32, 16]     and its scales and bias

E experts, I their width, H the hidden size. Each expert is shown as three layers in compressed-tensors' MXFP4, under
the names of other mixtures: `experts.0.gate_proj.weight_packed`.
"""

from collections.abc import Iterator, Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

import torch

from compress.base.errors import CheckpointError
from compress.checkpoint.read.configuration import METHOD as COMPRESSED_TENSORS
from compress.checkpoint.read.views import View, ViewedFiles
from compress.checkpoint.read.weight_files import WeightFiles
from compress.model.split_experts import JOINED, LEAVES
from compress.weights.compressed_tensors import group_entry
from compress.weights.formats.levels import MXFP4
from compress.weights.scheme import Scheme
from compress.weights.terms import FLOATS

METHOD = "mxfp4"
BLOCKS, SCALES, BIAS = "_blocks", "_scales", "_bias"
BLOCK_BYTES = cast(int, MXFP4.on.group_size) // 2
# {joined projection: (layer of an expert, its first row, the distance of its rows)}.
ROWS = {
    JOINED[0]: ((LEAVES[0], 0, 2), (LEAVES[1], 1, 2)),
    JOINED[2]: ((LEAVES[2], 0, 1),),
}


def view(files: WeightFiles, quantization: Mapping[str, Any], where: Path) -> tuple[WeightFiles, dict[str, Any]]:
    """(Files in which each expert has its own tensors, the configuration of compressed-tensors that says so). Raises
    CheckpointError, which names a tensor that is missing or of the wrong shape."""
    hidden: set[str] = set()
    views: dict[str, View] = {}
    for name in files:
        stem = name.removesuffix(BLOCKS)
        module, _, projection = stem.rpartition(".")
        if name.endswith(BLOCKS):
            if projection not in ROWS:
                raise CheckpointError(f"{name} is no projection of experts; known: {', '.join(ROWS)}")
            hidden |= {name, f"{stem}{SCALES}", f"{stem}{BIAS}"}
            views.update(_views(files, module, projection))
    if not views:
        raise CheckpointError(f"{where} says it is {METHOD} but holds no {BLOCKS} of experts")
    group = {"targets": ["Linear"], **group_entry(Scheme(terms=(MXFP4(grid=MXFP4.on),)))}
    told = {"quant_method": COMPRESSED_TENSORS, "format": MXFP4.layout, "config_groups": {"group_0": group}}
    return ViewedFiles(files, hidden, views), told


def _views(files: WeightFiles, module: str, projection: str) -> Iterator[tuple[str, View]]:
    """(Name, view) of the tensors of all experts of a module that one joined projection holds."""
    stem = f"{module}.{projection}"
    shape, dtype = files.headers[f"{stem}{BLOCKS}"]
    if len(shape) != 4 or shape[3] != BLOCK_BYTES or 0 in shape or dtype != "U8":
        raise CheckpointError(f"{stem}{BLOCKS} is {dtype} {list(shape)}; it must be U8 [experts, rows, blocks, 16]")
    experts, rows, groups, _ = shape
    biased = f"{stem}{BIAS}" in files
    files.expect(f"{stem}{SCALES}", shape[:3], (torch.uint8,))
    if biased:
        files.expect(f"{stem}{BIAS}", shape[:2], FLOATS)
    for i in range(experts):
        for leaf, first, step in ROWS[projection]:
            own, count = f"{module}.{i}.{leaf}", len(range(first, rows, step))
            pick = itemgetter((i, slice(first, None, step)))
            yield f"{own}.weight_packed", View(((count, groups * BLOCK_BYTES), "U8"), (f"{stem}{BLOCKS}",), pick)
            yield f"{own}.weight_scale", View(((count, groups), "U8"), (f"{stem}{SCALES}",), pick)
            if biased:
                kind = files.headers[f"{stem}{BIAS}"][1]
                yield f"{own}.bias", View(((count,), kind), (f"{stem}{BIAS}",), pick)
