"""`compress.quantize_for`: quantize for one engine, and leave what it opens.

    MODEL --quantize--> OUT.checkpoint --verify--> --export--> OUT

OUT.checkpoint is what `compress evaluate` and other exports read; an engine that opens it itself has it as OUT.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from compress.base.collectives import Comm
from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter, Silent, tell
from compress.checkpoint.export.registry import exporter_named
from compress.checkpoint.export.write import Exported, export, shard_bytes_of
from compress.checkpoint.read.pretrained import empty_model
from compress.checkpoint.read.source import Source
from compress.checkpoint.seal import rewrite
from compress.checkpoint.write.directory import claim
from compress.checkpoint.write.manifest import read_record
from compress.engine.plan.format_limits import NOT_EXPRESSED
from compress.engine.plan.plan import plan
from compress.inference.check.by_transformers import NOT_LOADED
from compress.jobs.forecast.forecast import Outline, shapes_of
from compress.jobs.fused_layers import check_merged
from compress.jobs.job import Result
from compress.jobs.model_source import find_model
from compress.jobs.quantize import quantize
from compress.jobs.request import check_apart, several
from compress.jobs.target_engines import (
    check_engine,
    check_inputs,
    engine_named,
    with_float16_scales,
)
from compress.passes.protocol.base import Pass
from compress.passes.rtn import RTN

Told = TypeVar("Told", bound=Outline)


@dataclass(frozen=True)
class ForEngine:
    """The result of a run for an engine. output: the directory that it opens. result: of the run, whose output is the
    checkpoint. exported: of the export; None where the engine opens the checkpoint."""

    output: Path
    result: Result
    exported: Exported | None


def quantize_for(
    engine: str,
    model: nn.Module | str | Path,
    passes: Pass | Sequence[Pass],
    *,
    output: str | Path,
    overwrite: bool = False,
    resume: bool = False,
    notes: Sequence[str] = (),
    reporter: Reporter | None = None,
    **options: Any,
) -> ForEngine:
    """Quantize a model for an engine, and leave in `output` what it opens.

    engine: a name of `jobs.target_engines`. For one that opens another form than our checkpoints, the checkpoint of the
    run is OUTPUT.checkpoint. resume: continue a run that was stopped, also between its checkpoint and the export.
    notes: lines for the records. options: those of `compress.quantize`.

    Raises InputError before any work for what the engine does not run, and as `compress.quantize` does; CompressError
    for work that failed.
    """
    check_engine(engine, several(passes))
    passes, said = with_float16_scales(engine, several(passes))
    to, reporter, notes = engine_named(engine).to, reporter or Silent(), [*notes, *said]
    for line in said:
        reporter.note(line)
    how = {"overwrite": overwrite, "resume": resume, "reporter": reporter, **options}
    if to is None:
        _check_merged(engine, model, passes, options)
        result = quantize(model, passes, output=output, **how)
        assert result.output is not None
        _note(result.output, engine, notes)
        _check_opened(engine, result)
        return ForEngine(result.output, result, None)
    exporter, shard_size = exporter_named(to), options.get("shard_size")
    shard_bytes_of(exporter, shard_size)
    _check_options(engine, output, options)
    checkpoint = Path(f"{output}.checkpoint")
    trusted = bool(options.get("trust_remote_code"))
    source = find_model(model, None, trusted).source
    if source is not None:
        check_model(source, engine, passes, options.get("ignore", ()))
    folder = None if source is None else source.path
    tell(reporter, "phase", "quantize", "unknown")
    with claim(output, Comm(), resume=False, overwrite=overwrite, model=folder):  # kept from others meanwhile
        result = quantize(model, passes, output=checkpoint, **{**how, "reporter": _BeforeExport(reporter)})
    tell(reporter, "phase", "export", "part", f"{output} for {engine}, from {checkpoint}")
    try:
        asked: dict[str, Any] = {"trust_remote_code": trusted, "shard_size": shard_size, "reporter": reporter}
        made = export(checkpoint, output, exporter, overwrite=overwrite, **asked)
    except CompressError as error:
        raise CompressError(f"{error}; the checkpoint is complete: {checkpoint}") from None
    for folder in (checkpoint, made.output):
        _note(folder, engine, notes)
    return ForEngine(made.output, result, made)


class _BeforeExport:
    """A reporter that leaves out which readers refuse a checkpoint: they read the export that follows, whose bytes it
    adds to what the run needs."""

    def __init__(self, reporter: Reporter) -> None:
        self._reporter = reporter

    def __getattr__(self, name: str) -> Any:  # what else a reporter may have: see `base.progress.tell`
        found = getattr(self._reporter, name)
        return (lambda told: found(with_export(told))) if name == "outline" else found

    def step(self, done: int, total: int, what: str) -> None:
        self._reporter.step(done, total, what)

    def note(self, message: str) -> None:
        if not message.startswith(NOT_EXPRESSED):
            self._reporter.note(message)


def with_export(told: Told) -> Told:
    """The outline of a run whose checkpoint is exported: the export takes about its bytes again."""
    size = told.saving.after
    return replace(told, disk=replace(told.disk, needed=told.disk.needed + size, exported=size))


def _check_options(engine: str, output: str | Path, options: Mapping[str, Any]) -> None:
    given = next((word for word in ("fsdp", "store") if options.get(word)), None)
    if given is not None:
        raise InputError(f"what {engine} opens is written by one process, from codes; drop {given}, or export later")
    check_apart(output, options.get("spill"))


def check_model(source: Source, engine: str, passes: Sequence[Pass], ignore: Sequence[str]) -> None:
    """Raises InputError for a model of which no codes of these passes can be written for an engine."""
    to, family = engine_named(engine).to, source.config.get("model_type")
    if to is None:
        return
    reasons = exporter_named(to).why_not_model(source)
    if family in engine_named(engine).renames:
        reasons.append(f"it has other names for layers of {family} and does not find these; `--for vllm` takes it")
    if reasons:
        raise InputError(f"{source.name} cannot be written for {engine}: {'; '.join(reasons)}; or leave --for out")
    check_shapes(empty_model(source), engine, passes, ignore)


def check_shapes(model: nn.Module, engine: str, passes: Sequence[Pass], ignore: Sequence[str]) -> None:
    """Raises InputError for a model whose layers have no codes of these passes that an engine reads."""
    if engine_named(engine).to is None or any(p.removes for p in passes):
        return  # a checkpoint has any width; layers that change are looked at by the export
    anything = RTN(scheme="w8a16", group_size=-1)  # takes layers of every width
    found = plan(model, (anything,), ignore, valued=False).all_layers
    check_inputs(engine, passes, {layer.name: layer.shape[1] for layer in found})


def _check_opened(engine: str, result: Result) -> None:
    """Raises CompressError where transformers was to open the result, and verification found that it does not."""
    seen = result.verification or {}
    if engine == "transformers" and seen.get("loader") == NOT_LOADED:
        raise CompressError(
            f"transformers does not open {result.output} ({seen['transformers']}); the checkpoint is complete: run it "
            "with compress.load"
        )


def _check_merged(
    engine: str, model: nn.Module | str | Path, passes: Sequence[Pass], options: Mapping[str, Any]
) -> None:
    """Raises InputError for passes that give different schemes to layers of which an engine makes one."""
    if not engine_named(engine).loads.experts or any(p.removes for p in passes):
        return  # layers may have other sizes then, and the same schemes
    empty, _ = shapes_of(find_model(model, None, bool(options.get("trust_remote_code"))))
    how = {word: options[word] for word in ("ignore", "one_block", "convolutions") if word in options}
    check_merged(engine, plan(empty, passes, valued=False, **how), empty)


def _note(folder: Path, engine: str, notes: Sequence[str]) -> None:
    before = read_record(folder).get("notes", ())
    rewrite(folder, {"engine": engine, "notes": list(dict.fromkeys([*before, *notes]))})
