"""The provenance of figures: the models measured, the runs that made them, and the machine."""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from compress.base.schema import built, fits
from compress.base.version import VERSION
from compress.checkpoint.files import RECORD
from compress.checkpoint.portable_names import command, shown
from compress.checkpoint.read.source import Source
from compress.checkpoint.write.manifest import read_record
from compress.evaluation.cost.components import size_result
from compress.evaluation.document import Evaluation, Named, RunResult, SizeResult
from compress.evaluation.origin import origin

NO_REFERENCE = "no reference was given"
IN_MEMORY = "the model was in memory, not in files"


@dataclass(frozen=True)
class MeasuredModel:
    """A model as it was given, and the network that it was measured as."""

    given: nn.Module | Source
    network: nn.Module


def size_of(model: nn.Module | Source | None) -> SizeResult | None:
    """Bytes on disk, from the headers of the files; None of a model in memory."""
    if not isinstance(model, Source):
        return None
    return size_result(model)


def named(model: nn.Module | Source, network: nn.Module, size: SizeResult | None) -> Named:
    """A model as it was given, and the network that it was measured as."""
    dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
    kind = type(network).__name__
    if not isinstance(model, Source) or size is None:
        return Named(kind, kind, sum(parameter.numel() for parameter in network.parameters()), dtype)
    architecture = str(next(iter(model.config.get("architectures") or ()), kind))
    return Named(shown(model.name), architecture, size.parameters, dtype, model.fingerprint())


def run_of(model: nn.Module | Source) -> tuple[dict[str, Any] | None, RunResult | None]:
    """(The recipe of a checkpoint, every option spelled out, the record of its run); None and None where no run of this
    tool has written it. Raises CheckpointError for a damaged record."""
    path = model.path / RECORD if isinstance(model, Source) else None
    if path is None or not path.exists():
        return None, None
    record = read_record(path.parent)
    noted = {field.name: record[field.name] for field in fields(RunResult) if field.name in record}
    fits(noted, RunResult, path)
    identity = record.get("identity")
    recipe = identity.get("recipe") if isinstance(identity, dict) else None
    return recipe if isinstance(recipe, dict) else None, built(noted, RunResult)


def missing_of(reference: bool, size: SizeResult | None) -> dict[str, str]:
    """{measurement: reason} for measurements that nothing was given for: the reference, the size on disk."""
    missing = {} if reference else {"reference": NO_REFERENCE}
    return missing if size is not None else {**missing, "size": IN_MEMORY}


def evaluation_of(ours: MeasuredModel, theirs: MeasuredModel | None, device: torch.device) -> Evaluation:
    """An evaluation without figures: the model and its reference, their sizes, the run, and the machine."""
    size, (recipe, run) = size_of(ours.given), run_of(ours.given)
    reference_size = None if theirs is None else size_of(theirs.given)
    return Evaluation(
        model=named(ours.given, ours.network, size),
        texts=[],
        reference=None if theirs is None else named(theirs.given, theirs.network, reference_size),
        recipe=recipe,
        size=size,
        reference_size=reference_size,
        run=run,
        missing=missing_of(theirs is not None, size),
        provenance=circumstances(device),
    )


def circumstances(device: torch.device) -> dict[str, Any]:
    """The command (None in a program of somebody's own), the commit, the versions, the machine."""
    facts = origin(device)
    return {**facts, "command": command(), "versions": {"compress": VERSION, **facts["versions"]}}
