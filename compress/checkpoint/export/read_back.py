"""Reads exports of GPTQ's and AWQ's layouts back: by our reader, and by GPTQModel, which prints, in another process.

    decision --export--> files --our reader--> values, with the checksums of the decision
                               --GPTQModel---> the same values, rounded to the dtype in which it computes

GPTQModel is no requirement: without it, only our reader reads.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from compress.base.errors import CheckpointError, CompressError, first_line
from compress.base.fresh_process import fresh
from compress.checkpoint.files import checksum, read_json, write_json
from compress.checkpoint.read.checksums import check_tensors
from compress.checkpoint.read.compressed_layers import stored_in, weight_of
from compress.checkpoint.read.pretrained import read_config
from compress.checkpoint.read.source import Source, find_source

PACKAGE = "gptqmodel"
AT_A_TIME = 2048  # inputs of a layer whose weights are asked for together


def read_back(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """{layers, reader} of an export in either layout, as `Exporter.read_back` returns it. Raises CheckpointError for a
    layer with other values than were exported, CompressError where GPTQModel does not read them."""
    layers = len(stored_in(read_by_us(folder, record)).layers)
    if find_spec(PACKAGE) is None:
        return {"layers": layers, "reader": reader_of(PACKAGE)}
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch) / "result.json"
        _, environment = fresh()
        line = [sys.executable, "-P", "-m", __name__, str(folder), str(result)]
        done = subprocess.run(line, capture_output=True, text=True, errors="replace", env=environment, check=False)
        if not result.exists():
            said = done.stderr.strip().splitlines()
            raise CompressError(f"{PACKAGE} does not read {folder}: {said[-1] if said else 'it said nothing'}")
        report = read_json(result)
    if report["differ"]:
        raise CheckpointError(
            f"{report['differ'][0]} of {folder}, as {report['reader']} reads it, is not what was decided "
            f"({len(report['differ'])} layers differ in all); write it again"
        )
    return {"layers": layers, "reader": report["reader"]}


def read_by_us(folder: Path, record: Mapping[str, Any]) -> Source:
    """An export whose tensors and values, as our reader reads them, are those of its record. Raises CheckpointError."""
    source = find_source(str(folder))
    check_tensors(source, record.get("tensors"))
    check_values(folder, record.get("values") or {})
    return source


def reader_of(package: str) -> str:
    """The package and its version, for the record; where it is not installed, that our reader read alone."""
    if find_spec(package) is None:
        return f"compress alone, as {package} is not installed"
    return f"{package} {version(package)}"


def check_values(folder: Path, values: Mapping[str, str]) -> None:
    """Hold the values of layers, as our reader reads them, to their summaries. Raises CheckpointError."""
    source = find_source(str(folder))
    if missing := sorted(values.keys() - stored_in(source).layers.keys()):
        raise CheckpointError(f"{missing[0]} was exported and is not in {folder}")
    for name, expected in values.items():
        dtype = getattr(torch, expected.partition(" ")[0])
        if summary(weight_of(source, name, dtype).dequantize().to(dtype)) != expected:
            raise CheckpointError(f"{name} of {folder} does not hold the values that were exported; write it again")


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
        ours, bias = weight_of(source, name, torch.float32).dequantize(), getattr(modules[name], "bias", None)
        dtype = modules[name].scales.dtype
        for part in torch.eye(ours.shape[1], dtype=dtype).split(AT_A_TIME):
            theirs = modules[name](part) - (0 if bias is None else bias)
            if not torch.equal(theirs.t(), ours[:, part.argmax(-1)].to(dtype)):
                differ.append(name)
                break
    return {"reader": f"{PACKAGE} {version(PACKAGE)}", "layers": len(modules), "differ": differ}


def main(folder: str, result: str) -> None:
    """Write what `by_gptqmodel` returns."""
    try:
        found = by_gptqmodel(Path(folder))
    except Exception as error:  # noqa: BLE001 - a package of others: one line, whatever it raises
        sys.exit(f"{type(error).__name__}: {first_line(error)}")
    write_json(Path(result), found)


if __name__ == "__main__":
    main(*sys.argv[1:])
