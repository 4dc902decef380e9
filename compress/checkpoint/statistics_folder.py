"""Statistics of layers' inputs in a folder, for runs that gather the same.

    FOLDER/statistics.json         the model
    FOLDER/KEY/about.json          the kind of statistic, the text, and all else that decides about its values
    FOLDER/KEY/BLOCK.json          the inputs of a block: layers that read each, its file with SHA-256 of its tensors
    FOLDER/KEY/INPUT.safetensors   the tensors of one input, in the dtype in which they were summed

Every file is written whole or not at all. A block counts once its JSON is there; the files that this names are then on
the disk. Two runs may gather at once: INPUT is a fingerprint of the tensors, too, so no run replaces what the JSON of
another names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor

from compress.calibration.hessian import HessianResult
from compress.calibration.observers import Range
from compress.checkpoint.files import checksum, fingerprint, read_json, write_json
from compress.checkpoint.read.weight_files import WeightFiles
from compress.checkpoint.scratch import Scratch, becomes
from compress.checkpoint.write.block_file import write_tensors
from compress.errors import InputError
from compress.system.schema import fits
from compress.weights.decision import Figures

ABOUT, SETTINGS = "statistics.json", "about.json"
KIND, FORMAT = "statistics", 1
DIGITS = 16  # of a fingerprint, in a name
RESULTS: dict[str, type[HessianResult] | type[Range]] = {kind.__name__: kind for kind in (HessianResult, Range)}


class InputEntry(TypedDict):
    """The statistics of an input. layers: those that read it. sums: {tensor: SHA-256}. results: one for each group of
    channels, with the names of tensors in place of these. figures: about the tokens that were seen."""

    layers: list[str]
    file: str
    sums: dict[str, str]
    results: list[Any]
    figures: dict[str, int | float | str]


class BlockEntry(TypedDict):
    """The inputs of a block. alone: {layer: why it has no statistics}."""

    block: str
    inputs: list[InputEntry]
    alone: dict[str, str]


class StoredBlock(BlockEntry):
    """A block as its file has it. sha256: the fingerprint of the rest."""

    sha256: str


class FolderEntry(TypedDict):
    """The content of `statistics.json`. model: its fingerprint."""

    compress: str
    format: int
    model: str


class StatisticsFolder:
    """A folder of statistics of one model. Raises InputError for a folder of something else or of another model."""

    def __init__(self, place: Path, model: str) -> None:
        self.place = place
        if place.exists() and not place.is_dir():
            raise InputError(f"{place} is a file; statistics are kept in a folder")
        head: FolderEntry = {"compress": KIND, "format": FORMAT, "model": model}
        if (place / ABOUT).exists():
            found = read_json(place / ABOUT)
            fits(found, FolderEntry, place / ABOUT)
            if (found["compress"], found["format"]) != (KIND, FORMAT):
                raise InputError(f"{place} holds something else, or statistics of another version; give another folder")
            if found["model"] != model:
                raise InputError(f"{place} holds statistics of another model; give another folder, or remove it")
        elif place.exists() and any(becomes(path.name) != ABOUT for path in place.iterdir()):
            raise InputError(f"{place} holds other files and no {ABOUT}; give an empty or new folder for statistics")
        else:
            place.mkdir(parents=True, exist_ok=True)
            write_json(place / ABOUT, head)

    def kind(self, about: Mapping[str, Any]) -> "KeptKind":
        """The part of the folder for statistics of which all this is true, empty or not."""
        return KeptKind(self.place / fingerprint(about)[:DIGITS], about)

    def check(self) -> None:
        """Check all that is there. Raises InputError for what is damaged."""
        for path in sorted(self.place.glob(f"*/{SETTINGS}")):
            KeptKind(path.parent, {})

    def others(self, about: Mapping[str, Any]) -> list[str]:
        """The keys whose values differ in every other part of the folder for the same statistic; none where there is no
        such part."""
        found = [read_json(path) for path in sorted(self.place.glob(f"*/{SETTINGS}"))]
        differing = [[k for k in about if other.get(k) != about[k]] for other in found if isinstance(other, dict)]
        near = [keys for keys in differing if "statistic" not in keys]
        return min(near, key=len, default=[])


class KeptKind:
    """The statistics of one kind in a folder. All that is there is checked when this is made: raises InputError for
    what is damaged."""

    def __init__(self, place: Path, about: Mapping[str, Any]) -> None:
        self.place, self.about = place, about
        self.blocks: dict[str, BlockEntry] = {}
        for path in sorted(place.glob("*.json")):
            if path.name != SETTINGS:
                found = read_json(path)
                fits(found, StoredBlock, path)
                known = found.pop("sha256")
                if fingerprint(found) != known:
                    raise _damaged(path)
                for each in found["inputs"]:
                    _check(place / each["file"], each)
                self.blocks[found["block"]] = found

    def entry(self, block: str, layer: str) -> InputEntry | None:
        """The statistics of a layer's input; None where there are none."""
        return next((each for each in self._of(block)["inputs"] if layer in each["layers"]), None)

    def alone(self, block: str) -> Mapping[str, str]:
        """{layer: why it has no statistics}, of a block."""
        return self._of(block)["alone"]

    def read(self, entry: InputEntry, device: torch.device) -> tuple[list[Any], Figures]:
        """The results for each group of channels, and the figures."""
        tensors = WeightFiles([self.place / entry["file"]])
        return [_restored(each, tensors, device) for each in entry["results"]], entry["figures"]

    def keep(self, block: str, layers: Sequence[str], results: Sequence[Any], figures: Figures) -> None:
        """Write the statistics of an input that these layers read. They count once the block is finished."""
        tensors: dict[str, Tensor] = {}
        noted = [_noted(each, f"{i}", tensors) for i, each in enumerate(results)]
        self.place.mkdir(parents=True, exist_ok=True)
        if not (self.place / SETTINGS).exists():
            write_json(self.place / SETTINGS, dict(self.about))
        input_name = fingerprint({"block": block, "layers": list(layers)})[:DIGITS]
        scratch = Scratch(self.place / input_name)
        try:
            sums = write_tensors(scratch.place, tensors, ())
            name = f"{input_name}-{fingerprint(sums)[:DIGITS]}.safetensors"
            scratch.become(self.place / name)
        except BaseException:
            scratch.drop()
            raise
        made: InputEntry = {
            "layers": list(layers),
            "file": name,
            "sums": sums,
            "results": noted,
            "figures": dict(figures),
        }
        self._of(block)["inputs"].append(made)

    def finish(self, block: str, alone: Mapping[str, str]) -> None:
        """Make what was kept of a block count. alone: layers without statistics, and why."""
        entry = self._of(block)
        entry["alone"] |= alone
        if self.place.exists():
            stored: StoredBlock = {**entry, "sha256": fingerprint(entry)}
            write_json(self.place / f"{fingerprint({'block': block})[:DIGITS]}.json", stored)

    def _of(self, block: str) -> BlockEntry:
        empty: BlockEntry = {"block": block, "inputs": [], "alone": {}}
        return self.blocks.setdefault(block, empty)


def _check(path: Path, entry: InputEntry) -> None:
    """Refuse a file that is not what was written."""
    if not path.is_file():
        raise InputError(f"{path} is missing; remove the folder {path.parent}, to gather its statistics anew")
    held = WeightFiles([path])  # refuses what is cut off
    if held.headers.keys() != entry["sums"].keys() or any(
        checksum(held.tensor(name)) != known for name, known in entry["sums"].items()
    ):
        raise _damaged(path)


def _damaged(path: Path) -> InputError:
    return InputError(f"{path} is damaged; remove the folder {path.parent}, to gather its statistics anew")


def _noted(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A result as JSON. Its tensors are entered by the names that stand for them there."""
    if isinstance(value, Tensor):
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, tuple):
        return {"several": [_noted(each, f"{name}.{i}", tensors) for i, each in enumerate(value)]}
    if is_dataclass(value):
        assert type(value).__name__ in RESULTS, "a statistic whose result has a stored form"
        held = {f.name: _noted(getattr(value, f.name), f"{name}.{f.name}", tensors) for f in fields(value)}
        return {"kind": type(value).__name__, "fields": held}
    return value


def _restored(found: Any, tensors: WeightFiles, device: torch.device) -> Any:
    """Inverse of `_noted`."""
    if not isinstance(found, dict):
        return found
    if "tensor" in found:
        return tensors.tensor(found["tensor"]).clone().to(device)
    if "several" in found:
        return tuple(_restored(each, tensors, device) for each in found["several"])
    return RESULTS[found["kind"]](**{name: _restored(each, tensors, device) for name, each in found["fields"].items()})
