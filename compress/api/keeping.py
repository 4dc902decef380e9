"""The statistics that a run finds in a folder, or leaves there: which those are, and why others are not among them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint.statistics_folder import StatisticsFolder
from compress.errors import InputError
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import Decide, Learn, Needs, Reorder, Rewrite
from compress.run.kept import KeptStatistics
from compress.run.plan.together import sees_original
from compress.system.comm import Comm

# What decides about the values of statistics, of the identity of a run.
SETTINGS = ("version", "calibration", "batch_size", "compute_dtype", "structure")
OTHER_WORDS = {"batch_size": "batch size", "calibration": "calibration data", "compute_dtype": "dtype of the work"}


def kept_statistics(
    place: str | Path | None, passes: Sequence[Pass], identity: Mapping[str, Any], device: torch.device, comm: Comm
) -> tuple[KeptStatistics | None, list[str]]:
    """(The statistics that these passes find or leave in a folder; None where there are none, remarks on that).

    identity: that of the run. Raises InputError for a folder of something else, and for ranks that do not shard.
    """
    if place is None:
        return None, []
    if comm.active:
        raise InputError("keep_statistics is of runs by one process; leave it out, or fsdp")
    why, notes = why_not_kept(passes), []
    if why is not None:
        return None, [f"no statistics are kept in {place}: {why}"]
    behind = sorted({p.name for p in passes if _gathers_behind(p)})
    if behind:
        notes.append(f"statistics of {', '.join(behind)} are not kept: they are gathered behind compressed layers")
    asked = [p.needs() for p in passes if sees_original(p)]
    return opened_statistics(place, asked, identity, device, notes), notes


def opened_statistics(
    place: str | Path, asked: Sequence[Needs], identity: Mapping[str, Any], device: torch.device, notes: list[str]
) -> KeptStatistics:
    """A folder of statistics. Enters into `notes` why nothing of it can be used, where there is something. Raises
    InputError for a folder of something else or of another model, and for damaged files."""
    about = {name: identity[name] for name in SETTINGS if name in identity} | {"device": device.type}
    kept = KeptStatistics(StatisticsFolder(Path(place), identity["model"]), about)
    found = [kept.open(needs) for needs in asked]
    if not any(found) and (others := kept.differing(asked)):
        words = ", ".join(OTHER_WORDS.get(key, key) for key in others)
        notes.append(f"what {place} holds is of another {words}: statistics are gathered anew, and kept beside it")
    return kept


def why_not_kept(passes: Sequence[Pass]) -> str | None:
    """The reason why no statistics of these passes can be of use to another run; None where some can."""
    editing = next((p.name for p in passes if p.stage(Rewrite) or p.stage(Reorder)), None)
    if editing is not None:
        return f"{editing} changes what the layers are given"
    if any(p.stage(Learn) for p in passes):
        return "train changes the model"
    if any(map(sees_original, passes)):
        return None
    behind = next((p.name for p in passes if _gathers_behind(p)), None)
    if behind is None:
        return "no pass gathers any"
    return f"{behind} gathers them behind compressed layers; other runs can use those of prefix=original with drift=0"


def _gathers_behind(p: Pass) -> bool:
    decides = p.stage(Decide)
    return decides is not None and bool(decides.needs) and not decides.original
