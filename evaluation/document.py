"""The results of an evaluation as one value, shown by the terminal, `--json`, the page and its Markdown.

Results that were not measured are None or absent, never zero; `missing` has the reasons.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

from compress.base.shown import Shown, plain
from compress.checkpoint.write.record import LayerRecord

FORMAT = 2
Role = Literal["held-out", "calibration", "answers", "recall", "tools"]
DOCUMENT = "compress.evaluation.json_document"  # lies above all that it describes


@dataclass(frozen=True)
class Figure:
    """A value, and its standard error where one is known. token_error: the standard error as if tokens were
    independent, as llama.cpp states it (`compress.evaluation.quality.predictor`). interval: 95 %, of samples too small
    for 1.96 errors to either side."""

    value: float
    error: float | None = None
    token_error: float | None = None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class Named:
    """A model. name: as it was given, or its class where it was given in memory. dtype: of the arithmetic in the
    measurement. fingerprint: sha256 of its weights and configuration; None in memory."""

    name: str
    architecture: str
    parameters: int
    dtype: str
    fingerprint: str | None = None

    @property
    def identity(self) -> str:
        """The fingerprint; the name of a model in memory."""
        return self.fingerprint or self.name


@dataclass(frozen=True)
class Band:
    """Tokens with a value of low up to high, and their mean KL: of the probability that the reference gave its first
    choice (`by_confidence`), or of the tokens before them in their window (`by_position`).

    By position, too: flips, the share of tokens with another first choice, and flip_margin, the mean over these of
    ln(p(first choice of the reference) / p(first choice of the model)) by the reference, nats.
    """

    low: float
    high: float
    tokens: int
    kl_mean: Figure | None
    flips: Figure | None = None
    flip_margin: Figure | None = None


@dataclass(frozen=True)
class ItemFigures:
    """Items of one kind: answers, tool calls, facts to recall.

    figures: kl_mean, flips, flip_margin, log_perplexity_ratio of their tokens; exact, reference_exact: the share of
    items of which each token is the first choice of the model, of the reference; unflipped: the share without a flip.
    """

    name: str
    items: int
    tokens: int
    figures: dict[str, Figure]


@dataclass(frozen=True)
class Agreed:
    """The share of the reference's answers that the model gives in the same words for so many tokens; None: to their
    end. An answer that ends earlier, in the same words, counts."""

    tokens: int | None
    share: Figure


@dataclass(frozen=True)
class Histogram:
    """counts[i] values lie from edges[i] up to edges[i + 1]."""

    edges: list[float]
    counts: list[int]


@dataclass(frozen=True)
class TextResult:
    """A text, how it was read, and the figures on it.

    role: held-out, the model's calibration text, or windows of items: the reference's answers, facts to recall, tool
    calls (`compress.evaluation.probes`). length, stride: tokens of a window, and between the beginnings of
    two; tokens: those that were predicted. figures, noise: by the names of
    `compress.evaluation.quality.kl_and_perplexity`; noise: the reference against itself, computed in its own dtype
    (`compress.evaluation.quality.noise`). kl_histogram: of log10 of the KL per token. by_position: where windows are
    longer than 512 tokens. by_part: of items. agreement: of answers.
    """

    name: str
    sha256: str
    role: Role
    protocol: str
    windows: int
    length: int
    stride: int
    tokens: int
    figures: dict[str, Figure]
    noise: dict[str, Figure] | None = None
    by_confidence: list[Band] = field(default_factory=list)
    kl_histogram: Histogram | None = None
    by_position: list[Band] = field(default_factory=list)
    by_part: list[ItemFigures] = field(default_factory=list)
    agreement: list[Agreed] = field(default_factory=list)

    @property
    def is_probe(self) -> bool:
        """True for windows of items, False for a text that somebody wrote."""
        return self.role not in ("held-out", "calibration")

    def items_with(self, share: str) -> tuple[float, int] | None:
        """(Items that have a share of `by_part`, like `exact`; all items), those of prose aside; None where it was not
        measured."""
        parts = [part for part in self.by_part if part.name != "prose"]
        if not parts or any(share not in part.figures for part in parts):
            return None
        return sum(part.figures[share].value * part.items for part in parts), sum(part.items for part in parts)


@dataclass(frozen=True)
class EmbeddingResult:
    """An encoder on pairs of sentences (`compress.evaluation.quality.encoders`). pooling: the way from a sentence's
    tokens to its embedding."""

    name: str
    sha256: str
    pooling: str
    pairs: int
    sentences: int
    figures: dict[str, Figure]


@dataclass(frozen=True)
class ClassificationResult:
    """A classifier on inputs whose classes are known (`compress.evaluation.quality.classifiers`). sha256: of the
    labels."""

    sha256: str
    inputs: int
    classes: int
    figures: dict[str, Figure]
    name: str = "labelled inputs"


@dataclass(frozen=True)
class TaskResult:
    """Accuracy on a task, 0 to 1, beside the reference's on the same questions.

    sha256: of the questions that were asked, the first of those available. difference: accuracy less the reference's,
    with its paired error; interval: 95 % of it (`compress.evaluation.tasks.results`). gained, lost: questions
    that only one of the two got right. p_value: McNemar's exact test; p_adjusted: Holm, over all tasks. metric:
    lm-eval's name of `accuracy`, where it is another. accuracy_norm: choices by log-probability per character.
    perplexity: of the words that are asked for. truncated: questions whose context the window had no room for.
    outcomes: a character for each question, 1 for a right answer; empty where questions are not right or wrong.
    """

    name: str
    kind: str
    sha256: str
    questions: int
    accuracy: Figure
    reference_accuracy: Figure | None = None
    difference: Figure | None = None
    interval: tuple[float, float] | None = None
    gained: int | None = None
    lost: int | None = None
    p_value: float | None = None
    p_adjusted: float | None = None
    metric: str = "accuracy"
    protocol: str = ""
    available: int | None = None
    truncated: int | None = None
    accuracy_norm: Figure | None = None
    reference_accuracy_norm: Figure | None = None
    difference_norm: Figure | None = None
    perplexity: Figure | None = None
    reference_perplexity: Figure | None = None
    log_perplexity_ratio: Figure | None = None
    outcomes: str = ""
    reference_outcomes: str = ""


@dataclass(frozen=True)
class Component:
    """Bytes of one kind of tensor, like codes, scales, embeddings, or of a file's headers."""

    name: str
    bytes: int


@dataclass(frozen=True)
class SizeResult:
    """Bytes on disk; of a model in memory those that its tensors would take there, with packed weights.

    bits_per_weight: measured, of compressed layers with all that they need; nominal: of codes alone. peak_*_bytes: of
    the memory of a process that loads the model, and that runs it.
    """

    bytes: int
    components: list[Component]
    parameters: int
    compressed_parameters: int
    bits_per_weight: float
    bits_per_parameter: float
    nominal_bits_per_weight: float | None = None
    cache: str | None = None
    peak_load_bytes: int | None = None
    peak_run_bytes: int | None = None


@dataclass(frozen=True)
class Timing:
    """tokens/s of a prompt of prompt_tokens and of decoding after it; milliseconds to the first token."""

    prompt_tokens: int
    decoded_tokens: int
    prefill: Figure
    decode: Figure
    first_token_ms: Figure


@dataclass(frozen=True)
class SpeedResult:
    """The speed of the model and of the reference. in_turns: True where rounds of the two alternated; False where the
    reference was measured by itself, before. kernels: {kernel: layers}; fallbacks: {reason: layers}."""

    device: str
    threads: int
    dtype: str
    model: Timing
    reference: Timing | None = None
    kernels: dict[str, int] = field(default_factory=dict)
    fallbacks: dict[str, int] = field(default_factory=dict)
    in_turns: bool = True


@dataclass(frozen=True)
class Generation:
    """Greedy continuations of a prompt. diverges_at: the first character that differs; None: there is none."""

    prompt: str
    model: str
    reference: str | None = None
    diverges_at: int | None = None


@dataclass(frozen=True)
class UnitSensitivity:
    """The sensitivity of layers of the original that were tried together. fisher: the estimated KL of the model in
    which only they are replaced, by candidate."""

    name: str
    layers: list[str]
    fisher: dict[str, float]


@dataclass(frozen=True)
class SensitivityResult:
    """The sensitivity measurements that shared out a budget between the layers of the original. bits: per weight, of
    each candidate; uniform_kl: KL of the model with all layers compressed by one candidate. calibration: data shown to
    the candidates; held_out: data that KL was measured on."""

    bits: dict[str, float]
    units: list[UnitSensitivity]
    uniform_kl: dict[str, float]
    calibration: dict[str, Any]
    held_out: dict[str, Any] | None


@dataclass(frozen=True)
class RunResult:
    """The record of the run that made the checkpoint; None or empty where this tool did not make it."""

    command: str | None = None
    seconds: float | None = None
    peak_memory_bytes: int | None = None
    calibration: dict[str, Any] | None = None
    verification: dict[str, Any] | None = None
    layers: list[LayerRecord] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, repr=False)
class Evaluation(Shown):
    """The costs and the quality of a model, beside its reference.

    recipe: the passes of the run that wrote it, every option spelled out. missing: {what: why it was not measured}.
    provenance: command, date, commit, versions, device. Figures of the first text can be read as attributes. gap: by
    the names of figures, those of the first held-out text less those of the calibration text, with errors as of two
    independent texts: the gain from fitting the calibration text is lost elsewhere. Texts differ in difficulty, too:
    KL, the distance from the reference, depends on it less than perplexity.
    """

    model: Named
    texts: list[TextResult]
    reference: Named | None = None
    recipe: dict[str, Any] | None = None
    tasks: list[TaskResult] = field(default_factory=list)
    embeddings: list[EmbeddingResult] = field(default_factory=list)
    classifications: list[ClassificationResult] = field(default_factory=list)
    size: SizeResult | None = None
    reference_size: SizeResult | None = None
    speed: SpeedResult | None = None
    sensitivity: SensitivityResult | None = None
    generations: list[Generation] = field(default_factory=list)
    run: RunResult | None = None
    gap: dict[str, Figure] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT

    def _rows(self) -> list[dict[str, Any]]:
        """A row for each text, task, set of pairs or of labelled inputs, with the bytes of the model and the figures;
        the standard error of `kl_mean` is `kl_mean_error`."""
        measured = [(text.name, text.figures) for text in self.texts]
        measured += [(pairs.name, pairs.figures) for pairs in self.embeddings]
        measured += [(inputs.name, inputs.figures) for inputs in self.classifications]
        for task in self.tasks:
            against = {} if task.difference is None else {"accuracy_difference": task.difference}
            measured.append((task.name, {"accuracy": task.accuracy, **against}))
        about = {"model": self.model.name, "bytes": self.bytes, "bits_per_weight": self.bits_per_weight}
        return [{**about, "measured_on": name, **flat(figures)} for name, figures in measured or [("", {})]]

    def to_dict(self) -> dict[str, Any]:
        """The content of `compress evaluate --json`: `summary` first, `gates` empty."""
        return plain(import_module(DOCUMENT).as_document(self))

    def figure(self, name: str) -> float | None:
        """A figure of the first text; None where it was not measured."""
        found = self.texts[0].figures.get(name) if self.texts else None
        return None if found is None else found.value

    def error(self, name: str) -> float | None:
        """The standard error of a figure of the first text, over windows; None where there is none."""
        found = self.texts[0].figures.get(name) if self.texts else None
        return None if found is None else found.error

    @property
    def perplexity(self) -> float | None:
        """exp of the mean negative log-likelihood per token."""
        return self.figure("perplexity")

    @property
    def reference_perplexity(self) -> float | None:
        """exp of the reference's mean negative log-likelihood per token."""
        return self.figure("reference_perplexity")

    @property
    def log_perplexity_ratio(self) -> float | None:
        """The logarithm of perplexity / reference_perplexity."""
        return self.figure("log_perplexity_ratio")

    @property
    def kl_mean(self) -> float | None:
        """KL(reference || model), nats per token."""
        return self.figure("kl_mean")

    @property
    def kl_median(self) -> float | None:
        """KL(reference || model), nats, of the median token."""
        return self.figure("kl_median")

    @property
    def kl_p99(self) -> float | None:
        """KL(reference || model), nats, the 99th percentile over tokens."""
        return self.figure("kl_p99")

    @property
    def same_top(self) -> float | None:
        """The share of tokens with the same first choice."""
        return self.figure("same_top")

    @property
    def tokens(self) -> int:
        """Predicted tokens of the first text; 0 where there is none."""
        return self.texts[0].tokens if self.texts else 0

    @property
    def bytes(self) -> int | None:
        """Bytes of the weight files; None where the size is not known."""
        return None if self.size is None else self.size.bytes

    @property
    def bits_per_weight(self) -> float | None:
        """Bits per weight of the compressed layers, scales included; None where the size is not known."""
        return None if self.size is None else self.size.bits_per_weight


def flat(figures: Mapping[str, Figure]) -> dict[str, float]:
    """Values by name, and standard errors where there are some."""
    errors = {f"{name}_error": each.error for name, each in figures.items() if each.error is not None}
    return {name: each.value for name, each in figures.items()} | errors
