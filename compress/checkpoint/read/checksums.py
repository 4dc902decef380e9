"""Holds the tensors of a checkpoint to the checksums in its record."""

from collections.abc import Mapping

from compress.base.errors import CheckpointError
from compress.checkpoint.files import RECORD, checksum
from compress.checkpoint.read.source import Source


def check_tensors(source: Source, recorded: Mapping[str, str] | None) -> None:
    """Hold the bytes of every tensor to the SHA-256 in the record: scales, norms, embeddings and all. Raises
    CheckpointError that names one which is missing, superfluous or not what was written."""
    if recorded is None:
        return
    # By the index: a copy of a tensor in another file must not stand for the one that is read.
    found = {name: checksum(source.weights.stored_tensor(name)) for name in source.weights.stored}
    if lost := sorted(recorded.keys() - found.keys()):
        raise CheckpointError(f"{lost[0]} is in {RECORD} but not in the checkpoint ({len(lost)} missing in all)")
    if foreign := sorted(found.keys() - recorded.keys()):
        raise CheckpointError(f"{foreign[0]} is in the checkpoint but not in {RECORD} ({len(foreign)} such tensors)")
    if changed := [name for name in recorded if found[name] != recorded[name]]:
        raise CheckpointError(
            f"{changed[0]} is not what the run wrote ({len(changed)} tensors differ in all); write it again"
        )
