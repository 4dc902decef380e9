"""`report`: one page on one run or several, shown in a notebook and saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from markupsafe import Markup

from compress.base.errors import InputError
from compress.checkpoint.ownership import check_replaceable
from compress.evaluation.document import Evaluation
from compress.evaluation.report.compose import compose
from compress.evaluation.report.content import Report
from compress.evaluation.report.page import as_html, write_page
from compress.evaluation.report.runs import ReportedRun, open_runs

HEIGHT = 640  # pixels of a notebook
SUFFIXES = (".html", ".htm")


class WithOutput(Protocol):
    """A result of a run. output: its directory; None of a run in memory."""

    @property
    def output(self) -> Path | None: ...


Run = Evaluation | WithOutput | str | Path


@dataclass(frozen=True)
class ReportPage:
    """A report. A notebook shows the page itself; `save` writes it."""

    content: Report

    def save(self, path: str | Path) -> None:
        """Write the page, which needs no network and no script. Raises InputError for a name that does not end in
        .html, and for a file that compress did not write."""
        if Path(path).suffix.lower() not in SUFFIXES:
            raise InputError(f"{path} is to be a page; give a name that ends in .html")
        check_replaceable(Path(path), "give another file")
        write_page(Path(path), self.content)

    def __repr__(self) -> str:
        return f"{self.content.title}: {self.content.verdict}"

    def _repr_html_(self) -> str:
        """The page in a frame, whose styles stay inside and in which no script runs; on one line, as Markdown needs."""
        page = Markup('<iframe sandbox width="100%" height="{}" style="border:0" srcdoc="{}"></iframe>')
        return str(page.format(HEIGHT, as_html(self.content))).replace("\n", "&#10;")


def report(runs: Run | Sequence[Run] | Mapping[str, Run]) -> ReportPage:
    """One page on one run, or comparing several: evaluations, results of runs, or paths of directories that compress
    wrote and of files of `compress evaluate --json`. A mapping gives them names.

    Raises InputError for nothing to report on, and for a result in memory that was not evaluated.
    """
    if isinstance(runs, Mapping):
        names, given = list(runs), list(runs.values())
    else:
        names, given = [], list(runs) if isinstance(runs, Sequence) and not isinstance(runs, str) else [runs]
    sources = [_source(run) for run in given]
    paths = [source for source in sources if isinstance(source, str)]
    opened = iter(open_runs(paths) if paths or not sources else ())
    found = [next(opened) if isinstance(source, str) else source for source in sources]
    return ReportPage(
        compose([replace(run, name=name) for run, name in zip(found, names or _apart(found), strict=True)])
    )


def _source(run: Run) -> ReportedRun | str:
    """An evaluation as a run, or the path of one."""
    measured = run if isinstance(run, Evaluation) else getattr(run, "evaluation", None)
    if measured is not None:
        return ReportedRun(measured.model.name, Path(measured.model.name), measured)
    path = run if isinstance(run, str | Path) else getattr(run, "output", None)
    if path is None:
        raise InputError(
            f"a {type(run).__name__} in memory was not evaluated; give what compress.evaluate finds of its model"
        )
    return str(path)


def _apart(runs: Sequence[ReportedRun]) -> list[str]:
    """The names, numbered where several are the same: models in memory have that of their class."""
    names = [run.name for run in runs]
    return [name if names.count(name) == 1 else f"{name} {names[:i].count(name) + 1}" for i, name in enumerate(names)]
