"""Reads exports back: by our reader, and by the package of the layout, where it is installed.

decision --export--> files --our reader--> values, with the checksums of the decision
                           --GPTQModel---> the same values, rounded to the dtype in which it computes
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from compress.base.errors import CheckpointError, CompressError, first_line
from compress.checkpoint.files import checksum
from compress.checkpoint.read.checksums import check_tensors
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.pretrained import read_config
from compress.checkpoint.read.source import Source, find_source

PACKAGE = "gptqmodel"
AT_A_TIME = 2048  # inputs of a layer whose weights are asked for together


def read_back(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """`read_by_package` of an export in GPTQ's or AWQ's layout, by GPTQModel."""

    @cache
    def differing() -> list[str]:
        return list(by_gptqmodel(folder)["differ"])

    with redirect_stdout(sys.stderr):  # on which GPTQModel prints
        return read_by_package(folder, record, PACKAGE, lambda _, name: name in differing())


def read_by_us(folder: Path, record: Mapping[str, Any]) -> Source:
    """An export whose tensors and values, as our reader reads them, are those of its record. Raises CheckpointError."""
    source, values = find_source(str(folder)), record.get("values") or {}
    check_tensors(source, record.get("tensors"))
    if missing := sorted(values.keys() - stored_in(source).layers.keys()):
        raise CheckpointError(f"{missing[0]} was exported and is not in {folder}")
    for name, expected in values.items():
        dtype = getattr(torch, expected.partition(" ")[0])
        if summary(weight_of(source, name, dtype).dequantize().to(dtype)) != expected:
            raise CheckpointError(f"{name} of {folder} does not hold the values that were exported; write it again")
    return source


def read_by_package(
    folder: Path, record: Mapping[str, Any], package: str, differs: Callable[[Source, str], bool]
) -> dict[str, Any]:
    """{layers, reader} of an export, read by us, and by a package where that is installed. differs: (source, layer) ->
    True where the package reads other values than we do. Raises CheckpointError for such a layer, CompressError where
    the package does not read them."""
    source = read_by_us(folder, record)
    layers = stored_in(source).layers
    for name in layers if find_spec(package) else ():
        try:
            other = differs(source, name)
        except Exception as error:  # noqa: BLE001 - a package of others: one line, whatever it raises
            raise CompressError(f"{package} does not read {folder}: {first_line(error)}") from None
        if other:
            raise CheckpointError(
                f"{name} of {folder}, as {package} reads it, is not what was exported; write it again"
            )
    return {"layers": len(layers), "reader": reader_of(package)}


def reader_of(package: str) -> str:
    """The package and its version, for the record; where it is not installed, that our reader read alone."""
    if find_spec(package) is None:
        return f"compress alone, as {package} is not installed"
    return f"{package} {version(package)}"


def summary(values: torch.Tensor) -> str:
    """The dtype and the checksum of a layer's values, for the record."""
    return f"{str(values.dtype).removeprefix('torch.')} {checksum(values)}"


@torch.no_grad()
def by_gptqmodel(folder: Path) -> dict[str, Any]:
    """{reader, layers, differ}: the package and its version, how many layers it finds, and those whose weights differ
    from ours, which are rounded to the dtype in which it computes."""
    from gptqmodel import BACKEND, GPTQModel

    source = find_source(str(folder))
    layers = stored_in(source).layers
    # Its own choice on a CPU is bfloat16, which would round the scales of a float16 model.
    kind = torch.bfloat16 if read_config(source).dtype == torch.bfloat16 else torch.float16
    model = GPTQModel.load(str(folder), device="cpu", dtype=kind, backend=BACKEND.TORCH).model
    modules = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
    differ = sorted(layers.keys() ^ modules.keys())
    for name in layers.keys() & modules.keys():
        ours, dtype = weight_of(source, name, torch.float32).dequantize(), modules[name].scales.dtype
        modules[name].bias = None  # a sum with it would be rounded
        for part in torch.eye(ours.shape[1], dtype=dtype).split(AT_A_TIME):
            if not torch.equal(modules[name](part).t(), ours[:, part.argmax(-1)].to(dtype)):
                differ.append(name)
                break
    return {"reader": f"{PACKAGE} {version(PACKAGE)}", "layers": len(modules), "differ": differ}
