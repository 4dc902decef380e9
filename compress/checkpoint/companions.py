"""Files beside the weights that an output takes along: what a tokenizer, a processor, generation or a person reads.

What transformers reads by name is a list (`leftovers.COMPANIONS`). A model with code of its own may read any file, so
small files that no list names come along, too. Weights of other formats and descriptions of the model's own weights
stay behind. So does what lies elsewhere and is only linked to: a model that somebody else made could link to any file
of the person who compresses it.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from compress.base.errors import CheckpointError
from compress.base.regular_files import lies_in
from compress.checkpoint.files import read_json
from compress.checkpoint.leftovers import COMPANIONS, LEGAL, of_checkpoint
from compress.checkpoint.ownership import is_ours
from compress.checkpoint.read.source import Source
from compress.checkpoint.seal import is_document

OTHERS = "*"  # among patterns: small files that no pattern names
EVERYTHING = (*COMPANIONS, OTHERS)
SMALL = 16 << 20  # bytes of a file that comes along without being known
SHOWN = 5  # names in a remark
MODULES = "modules.json"  # of sentence-transformers: names the folders of its modules
# Weights of other formats, and the state of a training.
WEIGHTS = {".bin", ".ckpt", ".gguf", ".h5", ".msgpack", ".npy", ".npz", ".onnx", ".onnx_data", ".ot", ".pickle", ".pkl"}
WEIGHTS |= {".pt", ".pth", ".safetensors", ".tflite"}
# They describe weights that an output does not have: of an adapter, of another layout, of an earlier quantization.
DESCRIPTIONS = ("adapter_*", "*.index.json", "*.index.*.json", "params.json", "*quant*_config.json")
NEVER = (".*", "__pycache__", "*.partial")


@dataclass(frozen=True)
class Companions:
    """The files that come along. names: paths in `folder`, with '/'. unknown: those of them that no list names. left:
    files and folders (with '/') that stay behind. linked: those that stay behind because they lie elsewhere."""

    folder: Path
    names: tuple[str, ...]
    unknown: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    linked: tuple[str, ...] = ()

    def told(self) -> Iterator[str]:
        """Remarks on unknown files that come along, and on what stays behind."""
        if self.unknown:
            yield f"copied from the model's folder, though compress does not know them: {_first_names(self.unknown)}"
        if self.left:
            yield f"not copied from the model's folder: {_first_names(self.left)}"
        if self.linked:
            yield f"not copied, since links lead out of the model's folder: {_first_names(self.linked)}"


def companions_of(source: Source, patterns: Iterable[str] = EVERYTHING) -> Companions:
    """The files of a model that come along: those that match a pattern, and its licence."""
    folder, patterns = source.path, [*patterns, *LEGAL]
    known = {path for pattern in patterns if pattern != OTHERS for path in folder.glob(pattern) if path.is_file()}
    names = {path.relative_to(folder).as_posix() for path in known if lies_in(path, folder)}
    linked = {path.relative_to(folder).as_posix() for path in known} - names
    if OTHERS not in patterns:
        return Companions(folder, tuple(sorted(names)), linked=tuple(sorted(linked)))
    read = {path.name for path in source.weights.paths}
    modules = _modules(folder)
    unknown, left = list[str](), list[str]()
    for path in sorted(folder.iterdir()):
        name = path.name
        if not lies_in(path, folder):
            linked |= set() if name in read or _matches(name, NEVER) or is_document(name) else {name}
            continue
        if path.is_dir():
            if path.name in modules and (inside := _small_files(path)) is not None:
                unknown += [each.relative_to(folder).as_posix() for each in inside]
            elif not _matches(name, NEVER) and not any(each.startswith(f"{name}/") for each in names):
                left.append(f"{name}/")
        elif name not in names | read and not (_matches(name, NEVER) or is_document(name) or of_checkpoint(name)):
            if not _is_small(path) or _matches(name, DESCRIPTIONS):
                left.append(name)
            elif not is_ours(path):  # what a command found out about the model is not about its output
                unknown.append(name)
    if MODULES in unknown and any(f"{name}/" in left for name in modules):  # its folders would be missed
        unknown.remove(MODULES)
        left.append(MODULES)
    return Companions(folder, tuple(sorted({*names, *unknown})), tuple(unknown), tuple(left), tuple(sorted(linked)))


def _first_names(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_small(path: Path) -> bool:
    readable = path.is_file() and os.access(path, os.R_OK)
    return readable and path.stat().st_size <= SMALL and path.suffix.lower() not in WEIGHTS


def _small_files(folder: Path) -> list[Path] | None:
    files = [path for path in sorted(folder.rglob("*")) if not path.is_dir()]
    return files if all(_is_small(path) and lies_in(path, folder.parent) for path in files) else None


def _modules(folder: Path) -> set[str]:
    """Names of the folders that modules.json of sentence-transformers names."""
    found: Any = None
    with suppress(CheckpointError):
        found = read_json(folder / MODULES) if (folder / MODULES).exists() else None
    paths = [each.get("path") for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return {path for path in paths if isinstance(path, str)}
