"""`sweep`: quantizes one model by many recipes, evaluates each against the original, and compares them.

    DIR/NAME/model            the checkpoint
    DIR/NAME/evaluation.json  what `compress evaluate --json` writes
    DIR/NAME/run.json         hash of the model, recipe, texts and version; the tasks and speed that were asked for
    DIR/sweep.json            a row for each recipe
    DIR/original.json         the original's speed, where that is asked for
    DIR/report.html, .md      the report on all recipes that have figures

A recipe that is done (same hash) is not run again. One that was stopped continues after its last finished block. One
that was evaluated on less than is asked for now is only evaluated again. The original's logits and answers are cached
where `evaluate` caches them, and its speed is measured once for all recipes.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torch import Tensor

from compress.base.errors import InputError
from compress.base.progress import Reporter, Silent, tell
from compress.checkpoint.files import write_json, write_whole
from compress.checkpoint.ownership import check_places, marked_text
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.source import find_source
from compress.evaluation.evaluate import check_asked
from compress.evaluation.report.compose import compose
from compress.evaluation.report.markdown import as_markdown
from compress.evaluation.report.page import as_html
from compress.evaluation.report.runs import EVALUATION, ReportedRun, open_runs
from compress.jobs.request import several
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import load_recipe, regrouped
from compress.search.original import OriginalSpeed
from compress.search.stored_trial import RUN, StoredTrial
from compress.search.sweep_rows import Sweep, SweepRow, rank
from compress.search.texts import Beside, Text, Texts
from compress.search.trial import TrialSettings

INDEX, ORIGINAL = "sweep.json", "original.json"
REPORTS = PAGE, TEXT = "report.html", "report.md"
RESERVED = (".", "..", INDEX, ORIGINAL, *REPORTS)
Recipes = Mapping[str, Pass | Sequence[Pass]] | Sequence[str | Path]


def sweep(
    model: str | Path,
    recipes: Recipes,
    *,
    text: Text,
    output: str | Path,
    calibration: Text | None = None,
    training: Text | None = None,
    group_size: int | None = None,
    samples: int | None = None,
    length: int | None = None,
    bos: str | None = None,
    text_samples: int | None = None,
    text_length: int | None = None,
    tasks: Sequence[str | Path] = (),
    questions: int | None = None,
    speed: bool = False,
    batch_size: int = 8,
    keep: bool = True,
    device: str | None = None,
    trust_remote_code: bool = False,
    reporter: Reporter | None = None,
) -> Sweep:
    """Quantize a model by every recipe, evaluate each against it, and write one report on all.

    recipes: {name: passes}, or YAML files and names of built-in ones. calibration, training, samples, length, bos,
    batch_size: as in `quantize`; text, text_samples, text_length, tasks, questions: as `text`, `samples`, `length`,
    `tasks` and `questions` in `evaluate`. group_size: replaces that of every recipe that has groups. speed: measure
    tokens per second, too. output: a directory, new or that of a sweep to continue. keep: keep checkpoints after their
    evaluation.

    A recipe that fails has a row with the reason and does not end the sweep. Raises InputError, before any work, for a
    model, recipe, text or task that does not exist or cannot be used, and for names that cannot be directories.
    """
    place, reporter = Path(output), reporter or Silent()
    steps = _steps(recipes)
    if group_size is not None:
        steps = _regroup(steps, group_size, reporter)
    _check_place(place, steps)
    texts = Texts(calibration, text, training, samples, length, text_samples, text_length, batch_size, bos)
    if calibration is None and (needing := [n for n, r in steps.items() if any(p.calibrated for p in r)]):
        raise InputError(f"recipe {needing[0]!r} needs calibration data ({len(needing)} do); give text or token ids")
    beside = Beside(tuple(map(str, tasks)), questions, speed)
    original = OriginalSpeed(place / ORIGINAL, str(model), device, trust_remote_code, reporter)
    settings = TrialSettings(str(model), texts, device, trust_remote_code, beside, original)
    asked = _asked_words(settings)
    settings.check_data(steps.values())
    text_name = "token ids" if isinstance(text, Tensor) else portable(str(text))
    rows: list[SweepRow] = []
    for done, (name, passes) in enumerate(steps.items()):
        reporter.step(done, len(steps), "")
        rows.append(StoredTrial(name, passes, place / name, settings, asked, keep, reporter).row())
        tell(reporter, "phase", "sweep")
        reporter.step(done + 1, len(steps), name)
        finished = Sweep(portable(find_source(str(model), trust_remote_code).name), text_name, rank(rows))
        write_json(place / INDEX, asdict(finished))
    evaluations = [str(place / row.evaluation) for row in finished.rows if row.evaluation is not None]
    write_reports(place, open_runs(evaluations) if evaluations else [])
    return finished


def _check_place(place: Path, names: Collection[str]) -> None:
    """Raises InputError for a place that is a file, or that holds one under a name of the sweep's that no sweep wrote.
    Files beside an index of ours count as ours, even damaged ones. Reports are always checked: people write such files
    as well."""
    if place.exists() and not place.is_dir():
        raise InputError(f"output {str(place)!r} is a file; give a directory")
    beside = ((place / INDEX, place / ORIGINAL), *((place / name / RUN, place / name / EVALUATION) for name in names))
    known = [path for says, other in beside for path in (says, *(() if says.exists() else (other,)))]
    check_places((*known, *(place / name for name in REPORTS)))


def _asked_words(settings: TrialSettings) -> list[str]:
    """A word for each measurement besides those on texts. Raises InputError for an evaluation that the model does not
    allow."""
    texts, beside = settings.texts, settings.beside
    fingerprints = check_asked(
        settings.model,
        text=texts.held_out,
        length=texts.window,
        bos=texts.bos_of(texts.text),
        samples=texts.text_samples,
        tasks=beside.tasks,
        questions=beside.questions,
        trust_remote_code=settings.trust_remote_code,
    )
    return beside.words(fingerprints)


def _steps(recipes: Recipes) -> dict[str, tuple[Pass, ...]]:
    """{name: passes}. Raises InputError for no recipe, for a recipe that cannot be read, for two of one name, and for a
    name that cannot be a directory."""
    if isinstance(recipes, str | Path | Pass):
        raise InputError(f"recipes: {str(recipes)!r} is one; give a list of files, or a mapping of names to passes")
    steps: dict[str, tuple[Pass, ...]] = {}
    if isinstance(recipes, Mapping):
        steps = {name: several(passes) for name, passes in recipes.items()}
    else:
        for path in recipes:
            name = Path(path).stem
            if name in steps:
                raise InputError(f"two recipes are called {name!r}; each has a directory of its name: rename one")
            steps[name] = load_recipe(path)
    if not steps:
        raise InputError("no recipe given; give at least one .yaml file, or a name from `compress recipes`")
    for name in steps:
        if not name or name in RESERVED or "/" in name or "\0" in name:
            raise InputError(f"recipe name {name!r}; each is the name of a directory: give one without slashes")
    return steps


def _regroup(steps: Mapping[str, tuple[Pass, ...]], size: int, reporter: Reporter) -> dict[str, tuple[Pass, ...]]:
    """{name: passes} with another group size in every recipe that has groups; a note names the recipes without. Raises
    InputError where no recipe has groups."""
    recipes: dict[str, tuple[Pass, ...]] = {}
    without = []
    for name, passes in steps.items():
        try:
            recipes[name], changed = regrouped(passes, size)
        except InputError as error:
            raise InputError(f"recipe {name!r}: {error}") from None
        without += [] if changed else [name]
    if len(without) == len(steps):
        raise InputError(f"no recipe has groups, so group size {size} has no say; leave it out")
    rest = f"; without groups, and as they are: {', '.join(without)}" if without else ""
    reporter.note(f"group size {size} instead of what the recipes give{rest}")
    return recipes


def write_reports(place: Path, runs: Sequence[ReportedRun]) -> None:
    """Write one report on several runs, as HTML and as Markdown; without runs remove an earlier one."""
    if not runs:
        for name in REPORTS:
            (place / name).unlink(missing_ok=True)
        return
    made = compose(runs)
    write_whole(place / PAGE, as_html(made))
    write_whole(place / TEXT, marked_text(as_markdown(made)))
