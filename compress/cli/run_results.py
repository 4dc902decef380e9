"""The result of a run as text: a line for each fact of its record."""

import math
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from compress.base.terminal import say, visible
from compress.checkpoint.portable_names import portable
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import stored_name
from compress.checkpoint.read.source import Source, find_source
from compress.checkpoint.write.late_files import put_beside
from compress.checkpoint.write.manifest import read_record
from compress.checkpoint.write.record import LayerRecord, RunRecord
from compress.cli.byte_savings import embedding_line, headline
from compress.evaluation.cost.size import measure_size, tensor_sizes
from compress.evaluation.report.calibration import clipping_line
from compress.evaluation.report.card import CARD, HUB_ID, MADE_OF, card_of_export
from compress.evaluation.report.terminal import show
from compress.jobs.job import Result
from compress.jobs.quantize_for import ForEngine
from compress.jobs.target_engines import commands_to_run
from compress.model.untreated_layers import EMBEDDING, HEAD
from compress.train.loop.metrics import ends

TABLES = (EMBEDDING, HEAD)
WEIGHTS = (".gguf", ".onnx", ".safetensors")

ROUTED = "routed_tokens"
# The baseline of a method's loss, by the figure of the record.
BASELINES = {"rtn_loss": "plain rounding", "wanda_loss": "wanda, which leaves survivors as they are"}


def show_result(result: Result, model: str, output: str, left: ForEngine | None, engine: str | None) -> None:
    """Print the bytes before and after, what was compressed, at what loss, and the next commands. model, output: as a
    person named them. left: of a run for an engine."""
    assert result.output is not None
    checkpoint = output if result.output.name == Path(output).name else f"{output}.checkpoint"
    say(headline(result.record, model, checkpoint))
    source = find_source(str(result.output))
    lines = [*lines_of(result.record, model, str(result.output)), *dense_tables(result.record, source, engine)]
    show(*lines, verification_line(result.verification))
    if left is not None and left.exported is not None:
        files = ", ".join(sorted(path.name for path in left.output.iterdir() if path.suffix in WEIGHTS))
        say(f"{engine} opens {output}: {files}")
    say("next:")
    for line in next_commands(source, model, output, engine):
        click.echo(visible(line))


def leave_card(left: ForEngine, engine: str, model: str) -> None:
    """Write a model card into the directory that an engine opens, unless the model has left one. model: as a person
    named it."""
    output, checkpoint = left.output, left.result.output
    if checkpoint is None or (output / CARD).exists():
        return
    source = find_source(str(checkpoint))
    kinds = Counter(str(layer.scheme) for layer in stored_in(source).layers.values() if layer.shares is None)
    schemes = ", ".join(f"{count} layers in {scheme}" for scheme, count in kinds.most_common())
    methods = " and ".join(dict.fromkeys(layer.method for layer in left.result.record.layers))
    words = [
        f"{MADE_OF}{portable(model)} for {engine} by {methods}: {schemes}.",
        "How close it is to the original is not measured; `compress evaluate` does that.",
    ]
    base = model if HUB_ID.fullmatch(model) and not Path(model).exists() else None
    run = commands_to_run(engine, output.name, _architecture(source))
    put_beside(output, {CARD: card_of_export(read_record(output), output.name, base, words, run)})


def _architecture(source: Source) -> str:
    return str(next(iter(source.config.get("architectures") or ()), ""))


def dense_tables(record: RunRecord, output: Source, engine: str | None) -> Iterator[str]:
    """A line about an embedding and head that are much of the output, as they were."""
    names = {f"{stored_name(output, name)}.weight" for name, why in record.left_alone.items() if why in TABLES}
    sizes = {tensor.name: tensor.bytes for tensor in tensor_sizes(output)}
    dense = sum(size for name, size in sizes.items() if name in names)
    return embedding_line(dense, sum(sizes.values()), engine)


def next_commands(source: Source, model: str, output: str, engine: str | None) -> list[str]:
    """Up to three command lines: they run the result, measure it and report on it. source: the checkpoint."""
    architecture, folder = _architecture(source), str(Path(output))
    out, page = shlex.quote(folder), shlex.quote(f"{folder}.html")
    writes = architecture.endswith("ForCausalLM")
    run = [f'compress generate {out} --prompt "Once upon a time"'] if writes else []
    if engine is not None:
        run = commands_to_run(engine, folder, architecture)
    text = "demo" if model == "demo" else "TEXT"
    measure = [f"compress evaluate {out} --reference {shlex.quote(model)} --text {text}"] if writes else []
    return [*run, *measure, f"compress report {out} --output {page}"][:3]


def lines_of(record: RunRecord, model: str | None = None, output: str | None = None) -> Iterator[str]:
    """A line for each fact. model, output: directories, whose bits are measured."""
    if record.structure is not None:
        yield structure_line(record.structure)
    if record.coverage is not None:
        yield f"compressed: {record.coverage}"
        if model is not None and output is not None:
            yield from bits_line(model, output)
    for key, baseline in BASELINES.items():
        losses = [(r.figures["loss"], r.figures[key]) for r in record.layers if key in r.figures]
        if losses:
            own, plain = (sum(float(pair[i]) for pair in losses) / len(losses) for i in (0, 1))
            yield f"mean relative output error of a layer: {own:.3e}, against {plain:.3e} by {baseline}"
    yield from expert_lines(record.layers)
    yield from training_lines(record.training)
    yield from zeros_line(record.layers)
    if record.ranges:
        yield clipping_line(record.ranges)
    if caches := record.caches:
        yield f"keys and values of {len(caches)} attentions: {next(iter(caches.values()))}"
    layers = len({layer.name for layer in record.layers})  # several passes may have had a part in one
    if layers or record.coverage is not None:
        reasons = sorted(Counter(record.left_alone.values()).items())
        alone = ", ".join(f"{count} {reason}" for reason, count in reasons)
        done = "trained" if record.coverage is None else "compressed"
        yield f"{layers} layers {done} in {time_words(record)}; left alone: {alone or 'none'}"


def bits_line(model: str, output: str) -> Iterator[str]:
    """A line about the bits of a weight before and after, where any is compressed."""
    before, after = (measure_size(find_source(name)) for name in (model, output))
    if after.compressed_weights:
        bits = before.bits_per_weight if before.compressed_weights else before.bits_per_parameter
        yield f"bits per compressed weight: {bits:.2f} -> {after.bits_per_weight:.2f}"


def expert_lines(layers: Sequence[LayerRecord]) -> Iterator[str]:
    """The spread of the calibration's tokens over experts."""
    counts = {r.name.rpartition(".")[0]: r.figures[ROUTED] for r in layers if ROUTED in r.figures}
    if not counts:
        return
    tokens = sorted((int(count), name) for name, count in counts.items())
    yield (
        f"{len(tokens)} experts: {tokens[0][0]} to {tokens[-1][0]} tokens each, median {tokens[len(tokens) // 2][0]}; "
        f"fewest: {', '.join(f'{name} {count}' for count, name in tokens[:3])}"
    )
    if tokens[0][0] == 0:
        none = sum(count == 0 for count, _ in tokens)
        yield f"{none} experts got no token: they are decided by tokens of the others; give more calibration text"


def verification_line(seen: Mapping[str, Any] | None) -> str:
    """The result of the comparison in a fresh process."""
    if seen is None:
        return "not verified: run `compress verify` on the output"
    text = f"verified in a fresh process: {seen['layers']} layers bit for bit"
    loader = seen.get("loader", "default")
    if seen["transformers"] != "compared":
        dequantized = "; it loads with CompressedTensorsConfig(dequantize=True)" if loader == "dequantize=True" else ""
        return f"{text}; transformers {seen['transformers']}{dequantized}"
    if seen.get("cache", "compared") != "compared":
        return f"{text}, logits in transformers equal; key-value cache {seen['cache']}"
    how = "" if loader == "default" else f" (load it with CompressedTensorsConfig({loader}))"
    return f"{text}, logits in transformers equal{how}"


def training_lines(histories: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A line for each training: its losses on held-out samples, before and after."""
    for history in histories:
        before, after = ends(history) or ({}, {})
        losses = ", ".join(f"{name} {before[name]:.4g} -> {after[name]:.4g}" for name in before)
        steps = history["resumed"] + len(history["steps"])
        kept = "" if history["kept"] == steps else f" (as it was after step {history['kept']}, the best)"
        told = f"on held-out samples: {losses or 'not measured'}{kept}"
        yield f"trained {steps} steps in {history['seconds']:.0f} s; {told}"


def structure_line(structure: Mapping[str, Any]) -> str:
    """A line about the parameters that are left of a model that was edited as a whole, and the loss."""
    before, after = structure["before"], structure["after"]
    text = f"structure: {after['parameters']} of {before['parameters']} parameters left, as foreseen"
    if before == after:
        text = f"structure: {len(structure['edits'])} edits of the whole model, which has all parameters still"
    if structure["dropped"]:
        text += f"; without {', '.join(structure['dropped'])}"
    figures = [cut["figures"] for cut in structure["cut"] if cut["figures"]]
    if figures:
        own, zeroed = (sum(each[key] for each in figures) / len(figures) for key in ("loss", "zeroed_loss"))
        text += f"; mean relative output error of a layer that reads what went: {own:.3e} (zeros instead: {zeroed:.3e})"
    return text


def time_words(record: RunRecord) -> str:
    """The seconds of a run, and each activity's share of them."""
    shares = [f"{activity} {seconds / record.seconds:.0%}" for activity, seconds in record.spent.items()]
    return f"{record.seconds:.1f} s" + (f" ({', '.join(shares)})" if len(shares) > 1 and record.seconds > 0 else "")


def zeros_line(layers: Sequence[LayerRecord]) -> Iterator[str]:
    """A line about the share of zeros in the pruned layers, where there are any."""
    masks = {layer.name: layer for layer in layers if "sparsity" in layer.figures}  # the last mask of each
    weights = sum(math.prod(layer.shape) for layer in masks.values())
    if weights:
        zero = sum(float(layer.figures["sparsity"]) * math.prod(layer.shape) for layer in masks.values())
        patterns = {str(layer.figures.get("pattern", "")) for layer in masks.values()}
        each = f", {', '.join(sorted(patterns))} in every layer" if len(patterns) == 1 and "" not in patterns else ""
        yield f"zero for good: {zero / weights:.1%} of {weights} weights in {len(masks)} layers{each}"
