"""Reads an export back with the package of its readers, and compares it with what was decided.

An exporter that writes what no reader of checkpoints reads says itself how its output is read (`Exporter.read_back`).
`export` does so in a process of its own before the output gets its name, `compress verify` whenever asked.
"""

from pathlib import Path
from typing import Any

from compress.base.fresh_process import verified
from compress.checkpoint import seal
from compress.checkpoint.export.registry import EXPORTERS, exporter_named
from compress.checkpoint.files import RECORD
from compress.checkpoint.write.manifest import read_record


def read_again(folder: Path) -> dict[str, Any] | None:
    """The findings of `Exporter.read_back`, and remarks on documents; None for a folder that is no export, or for one
    that is a checkpoint. Raises CheckpointError for an output that differs from its record, InputError where the
    package that reads it is missing."""
    try:
        recorded = (folder / RECORD).is_file()
    except OSError:  # a name that the system cannot look up, of which the reader of checkpoints says so
        recorded = False
    identity = (record := read_record(folder)).get("identity") if recorded else None
    kind = identity.get("export") if isinstance(identity, dict) else None
    exporter = next((each for name in EXPORTERS if kind and (each := exporter_named(name)).kind == kind), None)
    if exporter is None:
        return None
    seal.check_itself(folder, record)
    found = exporter.read_back(folder, record)
    if found is not None and (remarks := seal.check(folder, record)):
        found["remarks"] = [*found.get("remarks", ()), *remarks]
    return found


def in_own_process(folder: Path) -> dict[str, Any]:
    """`compress verify` of an export, in a process of its own. Raises CompressError where it does not verify."""
    unread, wrong = "the output cannot be read back", "the output is not what was decided"
    found: dict[str, Any] = verified(folder, unread=unread, wrong=wrong, instead="leave that out with --no-verify")
    return found
