"""Details of an evaluation, shown below its row: the spread of figures over tokens, the noise floor, the gap between
texts."""

from collections.abc import Iterator, Mapping

from compress.cli.tables import MIB, measured, number
from compress.evaluation.document import Band, ClassificationResult, EmbeddingResult, Evaluation, Figure, TextResult
from compress.evaluation.quality.statistics import PERCENTILES
from compress.evaluation.report.content import ReportTable
from compress.evaluation.report.terminal import show

ROWS = {"kl": ("KL, nats", ".5f"), "delta_p": ("delta p", "+.4f")}
COLUMNS = {"mean": "mean", "max": "max", **{name: name.replace("p999", "p99.9") for name in PERCENTILES}, "min": "min"}
NOISE = {"kl_mean": ".2e", "log_perplexity_ratio": ".2e", "delta_p_rms": ".2e", "same_top": ".2%"}
GAP = {"perplexity": "+.4f", "log_perplexity_ratio": "+.4f", "kl_mean": "+.5f", "same_top": "+.2%"}


def details(found: Evaluation, model: str) -> None:
    """Show the spread over tokens for every text, then the gap, and figures that were asked for but not measured. An
    encoder or a classifier has a row instead."""
    blocks: list[ReportTable | str] = [_encoder(found, pairs, model) for pairs in found.embeddings]
    blocks += [_classifier(found, inputs, model) for inputs in found.classifications]
    for text in found.texts:
        if "kl_mean" in text.figures:
            blocks += [_spread(text), *_lines(text)]
    if found.gap:
        blocks.append(f"gap, held-out less calibration text: {_listed(found.gap, GAP)}")
    if "noise" in found.missing:
        blocks.append(f"no noise floor: {found.missing['noise']}")
    show(*blocks)


def _encoder(found: Evaluation, pairs: EmbeddingResult, model: str) -> ReportTable:
    """An encoder beside its original: Spearman's correlation, cosine of embeddings."""
    title = f"{pairs.name}: {pairs.pairs} pairs, {pairs.sentences} sentences, {found.model.dtype}"
    columns = {
        "Spearman": ("spearman", ".4f"),
        "less the original": ("spearman_difference", ".4f"),
        "cosine mean": ("cosine_mean", ".4f"),
        "cosine p01": ("cosine_p01", ".4f"),
        "cosine min": ("cosine_min", ".4f"),
    }
    return _beside(found, pairs.figures, title, columns, model)


def _classifier(found: Evaluation, inputs: ClassificationResult, model: str) -> ReportTable:
    """A classifier beside its original: how often it is right, and says the same."""
    title = f"{inputs.name}: {inputs.inputs} inputs, {inputs.classes} classes, {found.model.dtype}"
    columns = {
        "accuracy": ("accuracy", ".2%"),
        "less the original's": ("accuracy_difference", ".2%"),
        "agreement": ("agreement", ".2%"),
        "KL mean": ("kl_mean", ".5f"),
    }
    return _beside(found, inputs.figures, title, columns, model)


def _beside(
    found: Evaluation, figures: Mapping[str, Figure], title: str, columns: Mapping[str, tuple[str, str]], model: str
) -> ReportTable:
    """A row for the original, which has the first figure alone, and one for the model. columns: {heading: (figure, its
    form)}."""
    rows: list[tuple[str, ...]] = []
    if found.reference is not None:
        size = None if found.reference_size is None else found.reference_size.bytes
        (name, form), *others = columns.values()
        score = measured(figures.get(f"reference_{name}"), form)
        rows.append((found.reference.name, score, *("-" for _ in others), number(size, ".2f", MIB)))
    forms = (measured(figures.get(name), form) for name, form in columns.values())
    rows.append((model, *forms, number(found.bytes, ".2f", MIB)))
    return ReportTable(("model", *columns, "MiB"), rows, title)


def _spread(text: TextResult) -> ReportTable:
    """Percentiles of KL and delta p per token. delta p: the probability of the text's token less the reference's."""
    rows = []
    for name, (title, form) in ROWS.items():
        figures = (text.figures.get(f"{name}_{column}") for column in COLUMNS)
        rows.append((title, *("-" if figure is None else f"{figure.value:{form}}" for figure in figures)))
    return ReportTable(("", *COLUMNS.values()), rows, f"{text.name}, per token")


def _lines(text: TextResult) -> Iterator[str]:
    figures = text.figures
    yield (
        f"correlation of log-likelihoods {measured(figures.get('correlation'), '.5f')}; "
        f"perplexity ratio {measured(figures.get('perplexity_ratio'), '.5f')}; "
        f"RMS delta p {measured(figures.get('delta_p_rms'), '.4f')}"
    )
    bands = ", ".join(_band(band) for band in text.by_confidence if band.tokens)
    yield f"KL by the probability of the original's first choice: {bands}"
    if text.noise is not None:
        yield f"noise floor, the original in its own dtype: {_listed(text.noise, NOISE)}"


def _band(band: Band) -> str:
    mean = "-" if band.kl_mean is None else f"{band.kl_mean.value:.5f}"
    return f"{band.low:g}-{band.high:g}: {mean} ({band.tokens} tokens)"


def _listed(figures: Mapping[str, Figure], forms: Mapping[str, str]) -> str:
    words = ((name, form) for name, form in forms.items() if name in figures)
    return ", ".join(f"{name.replace('_', ' ')} {_signed(figures[name], form)}" for name, form in words)


def _signed(figure: Figure, form: str) -> str:
    """A figure, and its error without a sign."""
    error = "" if figure.error is None else f" ± {figure.error:{form.removeprefix('+')}}"
    return f"{figure.value:{form}}{error}"
