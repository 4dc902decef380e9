"""Tokens from which dense blocks are faster than the loops, as measured on this machine, in a file.

routes-KEY.json     {"about", "processor", "from": {kind of product: tokens, or null where the loops stay faster}}

It lies in the private folder of the libraries. KEY is a hash of the sources, of torch, of the processor and of what it
may use, so that a change of any of them measures anew. A figure that is there is never measured again: processes that
share the folder agree, and a product is computed alike in every run.
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from compress.kernels.cpu import build, compiled_libraries
from compress.kernels.cpu.libraries import HERE
from compress.kernels.cpu.processor import amx_allowed, cpu_flags, cpu_name, target
from compress.kernels.private_folders import candidates, why_not_ours

NEVER = 2**62  # tokens
ABOUT = "tokens from which dense blocks are faster than the loops on this machine; null: never"


@cache
def _key(of: str, amx: bool) -> str:
    sources = [path.read_text(encoding="utf-8") for path in sorted(HERE.glob("cpu_*"))]
    depends = [*sources, of, str(amx), torch.__version__, cpu_name(), *sorted(cpu_flags())]
    return hashlib.sha256("\0".join(depends).encode()).hexdigest()[:20]


def file() -> Path | None:
    """The file of this machine's figures; None where no folder of this user's can be written."""
    for folder in candidates(build.PRIVATE_FOLDER):
        if folder.is_dir() and os.access(folder, os.W_OK) and why_not_ours(folder) is None:
            return folder / f"routes-{_key(target(), amx_allowed())}.json"
    return None


def read(path: Path) -> dict[str, int]:
    """{kind of product: tokens}; nothing where the file is missing, or is not one of ours."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if why_not_ours(path) is None else {}
        held = found["from"].items() if isinstance(found, dict) and "from" in found else ()
        return {str(kind): NEVER if tokens is None else int(tokens) for kind, tokens in held}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def found_or_measured(path: Path | None, kind: str, measure: Callable[[], int]) -> int:
    """The tokens of a kind of product: from the file, or measured and added to it. Processes that share the folder
    measure one after the other, and the later ones find what the first has measured."""
    if path is None:
        return measure()
    thresholds = read(path)
    if kind in thresholds:
        return thresholds[kind]
    with compiled_libraries.locked(path.with_suffix(".lock"), lambda: None):
        thresholds = read(path)
        if kind not in thresholds:
            thresholds[kind] = measure()
            _write(path, thresholds)
    return thresholds[kind]


def _write(path: Path, found: dict[str, int]) -> None:
    held = {kind: None if tokens == NEVER else tokens for kind, tokens in sorted(found.items())}
    content = {"about": ABOUT, "processor": cpu_name(), "from": held}
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix="build-", encoding="utf-8", delete=False) as file:
        json.dump(content, file, indent=1)
    Path(file.name).replace(path)
