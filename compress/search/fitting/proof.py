"""The proof of `fit`: what was searched, what was chosen and what it cost, as figures and in words."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from compress.evaluation.document import Figure
from compress.evaluation.report.markdown import plain

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
    compared with. difference: the KL of the chosen less the uniform one's, paired by windows."""

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
    format: int = 1

    def run(self, name: str | None) -> RunPoint | None:
        """The recipe of a name that was run."""
        return next((each for each in self.runs if each.name == name), None)


def said(figure: Figure) -> str:
    """A figure and its 95 % interval."""
    low, high = interval(figure)
    return f"{figure.value:.4g}" if low == high else f"{figure.value:.4g} ({low:.4g} to {high:.4g})"


def interval(figure: Figure) -> tuple[float, float]:
    """95 %; of a figure without an error its value twice."""
    if figure.interval is not None:
        return figure.interval
    beside = 1.96 * (figure.error or 0.0)
    return figure.value - beside, figure.value + beside


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
        f"is {said(kl)} nats per token, and its perplexity {said(ratio)} times the original's (95 % intervals).",
        f"The target, {proof.target}, is {'met' if proof.met else 'MISSED'}.",
    ]
    other = proof.run(proof.uniform)
    if other is not None and proof.difference is not None:
        low, high = interval(proof.difference)
        judged = "closer to the original" if high < 0 else "farther from the original" if low > 0 else "no different"
        words.append(
            f"Beside the same bits for every layer ({other.name}, {other.bytes:,} bytes, KL "
            f"{other.figures['kl_mean'].value:.4g}) it is {judged}: the difference of KL is {said(proof.difference)}."
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
                *(said(r.figures[name]) for name in SHOWN),
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
