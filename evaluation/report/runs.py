"""The runs in a report: directories that runs wrote, and files that `compress evaluate --json` wrote."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from compress.base.errors import CheckpointError, InputError
from compress.base.regular_files import special
from compress.checkpoint.files import RECORD
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.source import Source, find_source, path_of
from compress.evaluation.cost.size import size_result
from compress.evaluation.document import Evaluation, Named
from compress.evaluation.evaluation_file import read_evaluation
from compress.evaluation.provenance import run_of

EVALUATION = "evaluation.json"
PARTIAL = ".partial"
MOST_POWER = 300  # of ten, that a number can be
NO_EVALUATION = "no evaluation is kept in this directory: run `compress evaluate` on it"


@dataclass(frozen=True)
class ReportedRun:
    """name: as in the report, as short as possible. path: as it was given; directory: of the weights, None for an
    evaluation alone."""

    name: str
    path: Path
    evaluation: Evaluation
    directory: Path | None = None


def open_runs(names: Sequence[str]) -> list[ReportedRun]:
    """The runs that the arguments name. Raises InputError or CheckpointError in one line that names the file at
    fault."""
    if not names:
        raise InputError("nothing to report on; give directories that compress wrote, or files of `evaluate --json`")
    seen: dict[Path, str] = {}
    for name in names:
        where = path_of(name, "run").absolute()
        if where in seen:
            raise InputError(f"{seen[where]!r} and {name!r} are the same run; give each once")
        seen[where] = name
    found = [_open(name) for name in names]
    short = _short_names([run.path for run in found])
    return [replace(run, name=each) for run, each in zip(found, short, strict=True)]


def _open(name: str) -> ReportedRun:
    if not name:
        raise InputError("a run is an empty name; give a directory that compress wrote, or a file of `evaluate --json`")
    path = path_of(name, "run")
    kind = special(path)
    if kind is None and path.exists():
        return ReportedRun(name, path, _read(path))
    if not path.is_dir():
        raise InputError(
            f"run {name!r} {'is ' + kind if kind else 'does not exist'}; give a directory that compress wrote, or a "
            "file of `evaluate --json`"
        )
    if not (path / RECORD).exists():
        raise InputError(f"{path} holds no {RECORD}{_unfinished(path)}; give a directory that compress wrote")
    return ReportedRun(name, path, _of_directory(path), path)


def _unfinished(path: Path) -> str:
    """A hint for a directory without a record: the unfinished work of a run that it may be."""
    if path.name.endswith(PARTIAL):
        return ", it is the work of a run that is not finished (`--resume` finishes it)"
    beside = path.with_name(path.name + PARTIAL)
    return f", and {beside} is the work of a run that is not finished" if beside.exists() else ""


def _of_directory(path: Path) -> Evaluation:
    """The evaluation stored in a directory, or one made of its files and its run's record alone."""
    source = find_source(str(path))
    recipe, run = run_of(source)
    if not (path / EVALUATION).exists():
        model = name_checkpoint(source)
        size = size_result(source)
        return Evaluation(model, [], recipe=recipe, size=size, run=run, missing={"quality": NO_EVALUATION})
    found = _read(path / EVALUATION)
    if found.model.fingerprint not in (None, source.fingerprint()):
        raise CheckpointError(f"{path / EVALUATION} is about other weights than {path} holds; evaluate it again")
    size = found.size if found.size is not None and found.size.components else size_result(source)
    return replace(found, run=run, recipe=found.recipe or recipe, size=size)


def _read(path: Path) -> Evaluation:
    """An evaluation whose histograms can be drawn. Raises CheckpointError, naming the file, for one whose histograms
    cannot."""
    evaluation = read_evaluation(path)
    for i, text in enumerate(evaluation.texts):
        drawn = text.kl_histogram
        if drawn is None:
            continue
        rising = all(a < b for a, b in pairwise(drawn.edges)) and all(abs(edge) < MOST_POWER for edge in drawn.edges)
        if len(drawn.edges) != len(drawn.counts) + 1 or not rising or min(drawn.counts, default=-1) < 0:
            raise CheckpointError(
                f"{path}: texts[{i}].kl_histogram must have counts of 0 or more, and edges that rise, one more of them"
            )
    return evaluation


def name_checkpoint(source: Source) -> Named:
    """A checkpoint as an evaluation names it."""
    architectures = source.config.get("architectures") or ["unknown"]
    dtype = str(source.config.get("dtype") or source.config.get("torch_dtype") or "unknown")
    parameters = size_result(source).parameters
    return Named(portable(source.name), str(architectures[0]), parameters, dtype, source.fingerprint())


def _short_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of paths, as many as are needed to tell them apart."""
    called = [path.parent if path.name == EVALUATION else path for path in map(Path.absolute, paths)]
    parts = [(path.with_suffix("") if path.suffix == ".json" else path).parts for path in called]
    for length in range(1, max(map(len, parts)) + 1):
        short = ["/".join(each[-length:]) for each in parts]
        if len(set(short)) == len(short):
            return short
    return [str(path) for path in paths]
