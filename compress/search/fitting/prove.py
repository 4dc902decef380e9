"""The proof of `fit`: what was searched, what was chosen and what it cost, as figures and in words."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from compress.evaluation.document import Evaluation, Figure
from compress.evaluation.report.markdown import plain
from compress.search.fitting.choose import FitChoice, predicted_front, uniform_beside
from compress.search.fitting.paired_kl import compare, interval, with_interval
from compress.search.fitting.runs import RecipeRuns

SHOWN = ("kl_mean", "perplexity_ratio")  # figures


@dataclass(frozen=True)
class FrontPoint:
    """A recipe of the predicted front. embedding: the scheme of it."""

    bytes: int
    bits_per_weight: float
    embedding: str
    predicted_kl: float


@dataclass(frozen=True)
class RunPoint:
    """A recipe that was run. figures: on held-out text, by their names in an evaluation."""

    name: str
    bytes: int
    bits_per_weight: float
    figures: dict[str, Figure]


@dataclass(frozen=True)
class FitProof:
    """target: in words. met: the target is kept. stopped: the time was up before all recipes were run. searched: the
    predicted front. runs: recipes that were run; chosen: the name of the one in OUT; uniform: of the one that it is
    compared with. difference: the KL of the chosen less the uniform one's, paired by windows. value:
    the figure that the target limits (of a loss its upper bound); limit: the most that it may be."""

    model: str
    target: str
    met: bool
    stopped: bool
    held_out: str
    windows: int
    original_bytes: int
    searched: list[FrontPoint]
    runs: list[RunPoint]
    chosen: str
    uniform: str | None
    difference: Figure | None
    seconds: float
    notes: list[str] = field(default_factory=list)
    value: float | None = None
    limit: float | None = None
    format: int = 1

    def run(self, name: str | None) -> RunPoint | None:
        """The recipe of a name that was run."""
        return next((each for each in self.runs if each.name == name), None)


def prove(runs: RecipeRuns, name: str) -> FitProof:
    """Compare a recipe with the uniform one, which is run for it, and put the proof together."""
    request, measured, remarks = runs.request, runs.measured, runs.remarks
    chosen, difference, uniform = runs.done[name], None, None
    other = uniform_beside(measured.layers, chosen.choice)
    if other is None:
        remarks.note("the choice gives all layers the same bits, so that there is no uniform model beside it")
    elif not runs.watch.allows(runs.longest):
        remarks.note(f"no time was left to run {other[0]} beside it")
    elif (uniform := runs.run(other[1], other[0])) is not None:
        checkpoints = chosen.checkpoint, runs.done[uniform].checkpoint
        difference = compare(request.model, *checkpoints, request.data.rows, request.asked.trust_remote_code)
    original = chosen.evaluation.reference_size
    assert original is not None
    return FitProof(
        request.name,
        str(request.target),
        runs.meets(name),
        runs.stopped,
        request.data.source,
        len(request.data.rows),
        original.bytes,
        [_front_point(each) for each in predicted_front(measured.layers, measured.tables)],
        [_run_point(each, run.evaluation) for each, run in runs.done.items()],
        name,
        uniform,
        difference,
        runs.watch.seconds,
        remarks.notes,
        *runs.against_target(name),
    )


def _front_point(choice: FitChoice) -> FrontPoint:
    return FrontPoint(choice.bytes, choice.allocation.bits_per_weight, choice.table.name, choice.predicted_kl)


def _run_point(name: str, found: Evaluation) -> RunPoint:
    (text,) = found.texts
    figures = {n: text.figures[n] for n in ("kl_mean", "perplexity_ratio", "same_top")}
    assert found.bytes is not None
    return RunPoint(name, found.bytes, found.bits_per_weight or 0.0, figures)


def paragraph_of(proof: FitProof) -> str:
    """The result for someone who will not read tables."""
    chosen = proof.run(proof.chosen)
    assert chosen is not None
    kl, ratio = chosen.figures["kl_mean"], chosen.figures["perplexity_ratio"]
    share = chosen.bytes / proof.original_bytes
    tried = len(proof.runs)
    but = f" (the choice among {tried} recipes was)" if tried > 1 else ""
    words = [
        f"{proof.model} now takes {chosen.bytes:,} bytes, {share:.0%} of the original's {proof.original_bytes:,}; its "
        f"layers have {chosen.bits_per_weight:.3g} bits per weight.",
        f"On {proof.windows} windows of {proof.held_out}, which no weight was fitted to{but}, its KL to the original "
        f"is {with_interval(kl)} nats per token, and its perplexity {with_interval(ratio)} times the original's (95 % "
        "intervals).",
        f"The target, {proof.target}, is {'met' if proof.met else 'MISSED'}.",
    ]
    other = proof.run(proof.uniform)
    if other is not None and proof.difference is not None:
        low, high = interval(proof.difference)
        judged = "closer to the original" if high < 0 else "farther from the original" if low > 0 else "no different"
        words.append(
            f"Beside the same bits for every layer ({other.name}, {other.bytes:,} bytes, KL "
            f"{other.figures['kl_mean'].value:.4g}) it is {judged}: the difference of KL is "
            f"{with_interval(proof.difference)}."
        )
    if proof.stopped:
        words.append("The time was up before all recipes were tried: this is the best of those that were.")
    return " ".join(words)


def markdown_of(proof: FitProof) -> str:
    """The proof as a page."""
    lines = [
        f"# {plain(f'{proof.model}: {proof.target}')}",
        "",
        plain(paragraph_of(proof)),
        "",
        "## Recipes that were run",
        "",
    ]
    lines += _table(
        ("recipe", "bytes", "bits per weight", "KL", "perplexity, times the original's"),
        [
            (
                r.name,
                f"{r.bytes:,}",
                f"{r.bits_per_weight:.3g}",
                *(with_interval(r.figures[name]) for name in SHOWN),
            )
            for r in proof.runs
        ],
    )
    lines += ["", "## Front that was searched", "", "Predicted, without what layers make up for.", ""]
    lines += _table(
        ("bytes", "bits per weight", "embedding", "KL"),
        [(f"{p.bytes:,}", f"{p.bits_per_weight:.3g}", p.embedding, f"{p.predicted_kl:.4g}") for p in proof.searched],
    )
    lines += ["", *(f"- {plain(note)}" for note in proof.notes)]
    return "\n".join(lines).rstrip() + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [[plain(cell) for cell in row] for row in (columns, *rows)]
    return [f"| {' | '.join(row)} |" for row in (cells[0], ["---"] * len(columns), *cells[1:])]
