"""Sections on a run beside its quality: size, speed, layers left alone, verification, provenance."""

import json
from collections.abc import Callable, Mapping
from typing import Any

from compress.evaluation.document import Evaluation, Figure, RunResult, SizeResult, SpeedResult, Timing
from compress.evaluation.report import wording
from compress.evaluation.report.content import Block, Picture, ReportTable, Section, Words
from compress.evaluation.report.drawing import LETTER, WIDE, hover, inline, label

BAR, GAP = 26.0, 20.0
FAINTEST = 0.2  # opacity of the last part of a bar
NAMED_FROM = 0.02  # of a bar, from which a part is in the legend
CALLED = {"modified": "changed since that commit", "device_type": "kind of device"}
SHOWN = 6  # names of layers in a row


def _bits(value: float | None) -> str:
    return wording.NONE if value is None else f"{value:.3f}"


# (row, its words of a size, whether the original has a word of its own)
SIZE_ROWS: tuple[tuple[str, Callable[[SizeResult], str], bool], ...] = (
    ("weight files", lambda size: wording.data(size.bytes), True),
    ("parameters", lambda size: wording.count(size.parameters), True),
    ("of them compressed", lambda size: wording.share(size.compressed_parameters / max(1, size.parameters)), True),
    ("bits per compressed weight, measured", lambda size: _bits(size.bits_per_weight), False),
    ("bits of a code alone", lambda size: _bits(size.nominal_bits_per_weight), False),
    ("bits per parameter, whole model", lambda size: _bits(size.bits_per_parameter), True),
    ("peak memory to load", lambda size: wording.data(size.peak_load_bytes), True),
    ("peak memory to run", lambda size: wording.data(size.peak_run_bytes), True),
)


def size(evaluation: Evaluation) -> Section:
    """Bytes by component, beside the original's."""
    own, other = evaluation.size, evaluation.reference_size
    if own is None:
        why = evaluation.missing.get("size", "the model was in memory")
        return Section("Size", [Words(f"{wording.NOT_MEASURED}: {why}", "warning")])
    rows = [
        (label, words(own), words(other) if beside and other is not None else wording.NONE)
        for label, words, beside in SIZE_ROWS
    ]
    if own.cache is not None:
        rows.insert(-2, ("keys and values", wording.clean(own.cache), "as they are"))
    blocks: list[Block] = [ReportTable(("", "this model", "original"), rows)]
    if own.components:
        blocks += [_bars(own, other), _components(own, other)]
    return Section("Size", blocks)


def _components(own: SizeResult, other: SizeResult | None) -> ReportTable:
    theirs = {} if other is None else {each.name: each.bytes for each in other.components}
    names = [*dict.fromkeys([*(each.name for each in own.components), *theirs])]
    ours = {each.name: each.bytes for each in own.components}
    rows = [
        (
            wording.name(name),
            f"{ours.get(name, 0):,}",
            wording.share(ours.get(name, 0) / max(1, own.bytes)),
            f"{theirs.get(name, 0):,}" if theirs else wording.NONE,
        )
        for name in names
    ]
    rows.append(("together", f"{own.bytes:,}", "100 %", f"{other.bytes:,}" if other is not None else wording.NONE))
    return ReportTable(("bytes", "this model", "share", "original"), rows, "What the bytes are", folded=True)


def _bars(own: SizeResult, other: SizeResult | None) -> Picture:
    """A bar for each model, as long as its bytes, cut into components, with a legend of all but the smallest below."""
    models = [("this model", own)] + ([] if other is None or not other.components else [("original", other)])
    most = max(each.bytes for _, each in models)
    large = [*dict.fromkeys(p.name for _, each in models for p in each.components if p.bytes > NAMED_FROM * each.bytes)]
    steps = max(1, len(large) - 1)
    shades = {name: 1 - (1 - FAINTEST) * i / steps for i, name in enumerate(large)}
    marks: list[str] = []
    for i, (called, each) in enumerate(models):
        top, x = i * (BAR + GAP) + GAP, 0.0
        marks.append(label(0, top - 6, f"{called}: {wording.data(each.bytes)}", style="strong"))
        for part in each.components:
            width = (WIDE - 2) * part.bytes / most
            share = wording.share(part.bytes / max(1, each.bytes))
            said = hover(f"{wording.name(part.name)}: {wording.data(part.bytes)}, {share}")
            marks.append(_block(x, top, max(0.5, width - 1), BAR, shades.get(part.name, FAINTEST), said))
            x += width
    x, y = 0.0, len(models) * (BAR + GAP) + 14
    for name, shade in shades.items():
        width = LETTER * len(name) + 32
        if x + width > WIDE:
            x, y = 0.0, y + 18
        marks += [_block(x, y, 10, 10, shade), label(x + 15, y + 9, wording.name(name))]
        x += width
    return Picture("Where the bytes are", inline("bytes by component", y + 16, marks))


def _block(x: float, y: float, width: float, height: float, shade: float, inside: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.0f}"'
    return f'<rect {place} class="main" fill-opacity="{shade:.2f}">{inside}</rect>'


def speed(evaluation: Evaluation) -> Section:
    """Tokens per second, and the kernels that computed them."""
    measured = evaluation.speed
    if measured is None:
        return Section(
            "Speed", [Words(f"{wording.NOT_MEASURED}: {evaluation.missing.get('speed', 'it was not asked for')}")]
        )
    threads = f"{measured.threads} thread{'s' if measured.threads > 1 else ''}"
    where = f"{measured.device}, {threads}, {measured.dtype}"
    blocks: list[Block] = [Words(wording.clean(where), "note"), _timings(measured)]
    if measured.kernels:
        rows = [(wording.name(kernel), wording.count(layers)) for kernel, layers in measured.kernels.items()]
        blocks.append(ReportTable(("kernel", "layers"), rows))
    if measured.fallbacks:
        rows = [(wording.clean(reason), wording.count(layers)) for reason, layers in measured.fallbacks.items()]
        blocks.append(ReportTable(("why not a faster kernel", "layers"), rows))
    return Section("Speed", blocks)


def _timings(measured: SpeedResult) -> ReportTable:
    own, other = measured.model, measured.reference
    turns = " in turns" if measured.in_turns else ", the original's taken once for the whole sweep,"

    def row(called: str, field: str) -> tuple[str, ...]:
        figure: Figure = getattr(own, field)
        if other is None:
            return called, wording.with_error(figure), wording.NONE, wording.NONE
        theirs: Figure = getattr(other, field)
        ratio = f"{figure.value / theirs.value:.2f}" if theirs.value else wording.NONE
        return called, wording.with_error(figure), wording.with_error(theirs), ratio

    timing: Timing = own
    return ReportTable(
        ("", "this model", "original", "ratio"),
        [
            row(f"prompt of {timing.prompt_tokens}, tokens/s", "prefill"),
            row(f"decoding {timing.decoded_tokens}, tokens/s", "decode"),
            row("first token, ms", "first_token_ms"),
        ],
        f"One sequence; the median of rounds{turns} ± half their middle half",
    )


def left_alone(run: RunResult) -> Section | None:
    """Layers left uncompressed, by reason, and the run's notes."""
    by_reason: dict[str, list[str]] = {}
    for name, why in run.left_alone.items():
        by_reason.setdefault(why, []).append(name)
    blocks: list[Block] = []
    if by_reason:
        rows = []
        for why, names in sorted(by_reason.items(), key=lambda item: -len(item[1])):
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            rows.append(
                (wording.clean(why), ", ".join(map(wording.name, names[:SHOWN])) + more, wording.count(len(names)))
            )
        blocks.append(ReportTable(("why", "which", "layers"), rows, names=2))
    blocks += [Words(wording.clean(note), "note") for note in run.notes]
    return Section("Left alone, and remarks", blocks) if blocks else None


def verification(run: RunResult) -> Section:
    """The result of comparing the files on disk with the run's decisions."""
    seen = run.verification
    if seen is None:
        return Section("Verification", [Words("Not verified: run `compress verify` on the directory.", "warning")])
    sentences = [f"{seen.get('layers', 'no')} layers bit for bit as the run decided, in a fresh process."]
    if seen.get("transformers") == "compared":
        difference = seen.get("logits_max_difference")
        sentences.append(
            f"transformers loads it ({seen.get('loader')}) with logits that differ by at most {difference}."
        )
    else:
        sentences.append(f"transformers: {seen.get('transformers')}.")
    if "cache" in seen:
        sentences.append(f"Key-value cache: {seen['cache']}.")
    return Section("Verification", [Words(wording.clean(" ".join(sentences)))])


def missing(evaluation: Evaluation) -> Section | None:
    """Measurements that are missing, with reasons."""
    rows = [(wording.name(what), wording.clean(why)) for what, why in evaluation.missing.items()]
    return Section("Not measured", [ReportTable(("what", "why"), rows, names=2)]) if rows else None


def provenance(evaluation: Evaluation) -> Section:
    """The origin of the model and of its figures."""
    model, reference, run = evaluation.model, evaluation.reference, evaluation.run
    rows = [("model", _named(model.name, model.fingerprint))]
    rows.append(("architecture", f"{model.architecture}, {model.parameters:,} parameters, {model.dtype}"))
    if reference is not None:
        rows.append(("original", _named(reference.name, reference.fingerprint)))
    if run is not None:
        rows.append(("made by", run.command or "not recorded"))
        if run.seconds is not None:
            rows.append(("in", f"{run.seconds:.1f} s, at most {wording.data(run.peak_memory_bytes)} of memory"))
        if run.calibration is not None:
            rows.append(("calibrated on", _pairs(run.calibration)))
    rows += [("evaluated on", f"{each.name}, sha256 of the tokens {each.sha256[:16]}") for each in evaluation.texts]
    clean = [(wording.name(key), wording.clean(value)) for key, value in rows] + fact_rows(evaluation.provenance)
    blocks: list[Block] = [ReportTable(("", ""), clean, names=2)]
    if evaluation.recipe is not None:
        steps = evaluation.recipe.get("passes") or [evaluation.recipe]
        options = [(f"step {i}", wording.clean(json.dumps(step))) for i, step in enumerate(steps, 1)]
        title = "The recipe, every option spelled out"
        blocks.append(ReportTable(("", "every option"), options, title, names=2, folded=True))
    return Section("Where this comes from", blocks)


def fact_rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts as rows of a table, without unknown ones."""
    return [
        (wording.name(CALLED.get(key, key)), wording.clean(said))
        for key, value in facts.items()
        if (said := fact_words(value))
    ]


def _named(name: str, fingerprint: str | None) -> str:
    return name if fingerprint is None else f"{name} (sha256 {fingerprint[:16]})"


def fact_words(value: Any) -> str:
    """A fact in words; empty where there is none."""
    if isinstance(value, Mapping):
        return _pairs(value)
    if isinstance(value, list | tuple):
        return ", ".join(map(fact_words, value))
    if isinstance(value, float):
        return f"{value:g}"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else "" if value is None else str(value)


def _pairs(value: Mapping[str, Any]) -> str:
    known = {key: fact_words(each) for key, each in value.items()}
    return ", ".join(f"{key} {said[:16] if key == 'sha256' else said}" for key, said in known.items() if said)


# Methods that are told for how many steps they train.
TRAINED = ("train", "reconstruct")


def recipe_words(evaluation: Evaluation) -> str:
    """The steps of a recipe in a line: each method with its scheme."""
    steps = (evaluation.recipe or {}).get("passes")
    if not isinstance(steps, list) or not steps:
        return ""
    return " + ".join(_step(step) for step in steps if isinstance(step, dict) and step)


def _step(step: Mapping[str, Any]) -> str:
    method = next((key for key in step if key not in ("only", "but")), "")
    options = step[method] if isinstance(step.get(method), dict) else {}
    zeros = "pattern" if options.get("pattern") else "sparsity"
    told = [str(options[key]) for key in ("scheme", zeros, "rank") if options.get(key)]
    told += [f"{options['steps']} steps"] if method in TRAINED and options.get("steps") else []
    group = options.get("group_size")
    told += [f"g{group}"] if isinstance(group, int) and group > 0 else []
    where = " (some layers)" if {"only", "but"} & step.keys() else ""
    return wording.name(" ".join([method, *told]) + where)
