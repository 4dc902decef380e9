"""Statistics that the recipes of a sweep share: gathered by the first that asks for them, read by the others."""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from compress.api.keeping import why_not_kept
from compress.checkpoint.statistics_folder import StatisticsFolder
from compress.passes.protocol.base import Pass
from compress.search.trial import Common

SHARED = ".statistics"  # the folder of a sweep that is not done, beside its recipes


@contextmanager
def shared_statistics(
    place: Path, keep: str | Path | None, steps: Mapping[str, tuple[Pass, ...]], common: Common
) -> Iterator[Common]:
    """The settings of a sweep with a folder for what its recipes share. keep: a folder that stays; None for one that
    goes with the end of the sweep, if two recipes or more can share."""
    reasons = {name: why_not_kept(passes) for name, passes in steps.items() if any(p.calibrated for p in passes)}
    sharing = [name for name, why in reasons.items() if why is None]
    if keep is not None and not sharing:
        why = next(iter(reasons.values()), "no recipe gathers any")
        common.reporter.note(f"no statistics are kept in {keep}: {why}")
    if not sharing or (keep is None and len(sharing) < 2):
        yield common
        return
    others = [f"{name} ({why})" for name, why in reasons.items() if why is not None]
    rest = f"; not for {', '.join(others)}" if others else ""
    if keep is not None:
        StatisticsFolder(Path(keep), common.about["model"]).check()
    common.reporter.note(f"statistics of layers' inputs are gathered once for {', '.join(sharing)}{rest}")
    # By the model: what a sweep that was stopped has left may be of another one.
    yield replace(common, statistics=Path(keep) if keep is not None else place / SHARED / common.about["model"])
    if keep is None:
        shutil.rmtree(place / SHARED, ignore_errors=True)
