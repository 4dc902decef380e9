"""`compress bench MODEL`: prefill and decode of a whole model, dense and compressed, checked before they are timed.

A result is one variant at one batch size:

    kernels             what multiplies in prefill, and in decode, by the weights of the compressed layers
    weights_bytes       parameters and buffers            peak_bytes, build_peak_bytes    see `memory`
    layer_error         of the worst layer, over what is allowed (`inference.check.dense_twin.compare_layers`), in a
                        prefill and a step; a wrong variant is not timed
    prefill, decode     times of one prefill and of one step, tokens per second, ratio to dense

On a GPU one variant is made, measured and dropped after the other. On a CPU all are kept and take turns round by
round.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.base.errors import CompressError, InputError
from compress.base.progress import Reporter
from compress.checkpoint.read.source import find_source
from compress.evaluation.speed import decoder, memory
from compress.evaluation.speed.generation import GenerationTimer
from compress.evaluation.speed.options import ModelOptions
from compress.evaluation.speed.report import SpeedReport
from compress.evaluation.speed.timing import summary
from compress.inference.check.dense_twin import compare_layers
from compress.inference.layers.compressed_layers import compressed_layers
from compress.inference.load.conversions import fuse
from compress.inference.load.loading import load
from compress.kernels import workspace

Build = Callable[[], nn.Module]
SAMPLED = 16  # tokens of a product that are compared
STORED = "compressed"
DEFAULT_SCHEMES = (decoder.DENSE, "w4a16", "w8a8")  # of a shape; the dense model comes first


def bench_model(options: ModelOptions, file: Path | None, reporter: Reporter) -> SpeedReport:
    """The report on a model, complete like its file; `failures` names what is wrong. Raises InputError before anything
    is measured."""
    settings = {"model": options.model, "batches": list(options.batches), "prompt": options.prompt, "new": options.new}
    settings |= {"dtype": str(options.dtype).removeprefix("torch."), "rounds": options.rounds, "quick": options.quick}
    report = SpeedReport("model", options.device, settings, file)
    measure_variants(options, report, reporter)
    report.finish()
    return report


def measure_variants(options: ModelOptions, report: SpeedReport, reporter: Reporter) -> None:
    """Fill a report, saving it after every variant."""
    variants = list(find_variants(options, report.notes))
    report.settings["variants"] = [name for name, _ in variants]
    if options.device.type == "cuda":
        torch.cuda.set_device(options.device)
        workspace.prepare(options.device)
    waiting: list[tuple[dict[str, Any], GenerationTimer]] = []
    for done, (name, build) in enumerate(variants, 1):
        entries = [{"variant": name, "batch": batch} for batch in options.batches]
        report.results += entries
        try:
            waiting += measure_variant(entries, build, options, report)
        except CompressError:
            raise
        except Exception as reason:  # noqa: BLE001 - a kernel may fail in any way; the other variants are still of use
            _leave_out(entries, reason, report)
        report.keep()
        reporter.step(done, len(variants), name)
    time_rounds(waiting, options.rounds)
    for entry in report.results:
        explain(entry, options, report)


def _leave_out(entries: list[dict[str, Any]], reason: Exception, report: SpeedReport) -> None:
    """Record on entries without figures why they have none; any reason but a lack of memory is a failure."""
    line = next(iter(str(reason).splitlines()), "")
    for entry in entries:
        if "decode" not in entry and "skipped" not in entry:
            if isinstance(reason, torch.OutOfMemoryError):
                entry["skipped"] = f"out of memory: {line}"
                continue
            entry["skipped"] = f"{type(reason).__name__}: {line}"
            report.failures.append(f"{entry['variant']}, batch {entry['batch']}: {entry['skipped']}")


def measure_variant(
    entries: list[dict[str, Any]], build: Build, options: ModelOptions, report: SpeedReport
) -> list[tuple[dict[str, Any], GenerationTimer]]:
    """Make and check one variant, and on a GPU time it. Returns the entries still to be timed."""
    prepared = prepare(entries, build, options, report)
    if options.device.type == "cpu":
        return list(prepared)
    for entry, generation in prepared:
        with memory.watch_memory(options.device, None) as timing:
            generation.capture()
            time_rounds([(entry, generation)], options.rounds)
        entry["peak_bytes"] = max(entry["peak_bytes"], timing.bytes or 0)
    return []


def find_variants(options: ModelOptions, notes: list[str]) -> Iterator[tuple[str, Build]]:
    """(name, function that builds it) of every variant to measure, the dense model first. Raises InputError."""
    room = options.prompt + options.new
    if options.model in decoder.SHAPES:
        if options.trust_remote_code:
            raise InputError(f"--trust-remote-code is for a checkpoint; {options.model} is a shape: drop it")
        config = decoder.config_of(options.model)
        _check_room(room, config.max_position_embeddings)
        for scheme in options.schemes or DEFAULT_SCHEMES:
            yield scheme, partial(_of_shape, options, scheme, notes)
        return
    known = ", ".join(decoder.SHAPES)
    if options.schemes is not None:
        raise InputError(f"--schemes is for a shape ({known}); a checkpoint runs as it is stored")
    try:
        source = find_source(options.model, options.trust_remote_code)
    except InputError as error:
        raise InputError(f"{error}; or a shape: {known}") from None
    if source.quantization is None:
        raise InputError(f"{options.model} is not compressed; give a compressed checkpoint or a shape: {known}")
    _check_room(room, source.config.get("max_position_embeddings"))
    yield decoder.DENSE, partial(_of_checkpoint, options, decoder.DENSE, notes)
    yield STORED, partial(_of_checkpoint, options, STORED, notes)


def _check_room(room: int, context: int | None) -> None:
    if context is not None and room > context:
        raise InputError(f"--prompt and --new make {room} tokens; the model holds {context}")


def _of_shape(options: ModelOptions, scheme: str, notes: list[str]) -> nn.Module:
    model = decoder.random_llama(decoder.config_of(options.model), scheme, options.dtype, options.device)
    return _fused(model, options.device, notes)


def _of_checkpoint(options: ModelOptions, variant: str, notes: list[str]) -> nn.Module:
    trusted = options.trust_remote_code
    model = load(options.model, options.dtype, options.device, fuse=False, trust_remote_code=trusted)
    if not getattr(model, "can_generate", lambda: False)():
        raise InputError(f"{type(model).__name__} does not generate text; give a decoder")
    if variant == decoder.DENSE:
        decoder.densify(model)
    return _fused(model, options.device, notes)


def _fused(model: nn.Module, device: torch.device, notes: list[str]) -> nn.Module:
    """Fuse layers that read the same tensor, where `compress.load` does: on a GPU."""
    if device.type != "cuda":
        return model
    if next(compressed_layers(model), None) is None:
        decoder.fuse_dense(model)
    else:
        notes += fuse(model)
    return model


def prepare(
    entries: list[dict[str, Any]], build: Build, options: ModelOptions, report: SpeedReport
) -> Iterator[tuple[dict[str, Any], GenerationTimer]]:
    """Make one variant, record its memory, check it at every batch size. Yields the correct ones, ready to be timed."""
    device = options.device
    base = memory.settled_bytes(device)
    with memory.watch_memory(device, base) as building:
        model: Any = build()
    schemes = sorted({str(layer.scheme) for _, layer in compressed_layers(model)})
    for entry in entries:
        entry |= {"layers": sum(1 for _ in compressed_layers(model)), "schemes": schemes}
        entry |= {"fused_groups": decoder.fused_groups(model), "weights_bytes": memory.held_bytes(model)}
        entry["kernels"] = {
            "prefill": _kernels(model, entry["batch"] * options.prompt),
            "decode": _kernels(model, entry["batch"]),
        }
        entry["build_peak_bytes"] = building.bytes
    for entry in entries:
        generation = GenerationTimer(model, entry["batch"], options.prompt, options.new)
        memory.settled_bytes(device)
        with memory.watch_memory(device, base) as running:
            generation.start()
            generation.step()
        entry["peak_bytes"] = running.bytes
        if entry["layers"]:
            wrong = check_variant(entry, generation)
            if wrong:
                entry["skipped"] = f"wrong: {wrong}"
                report.failures.append(f"{entry['variant']}, batch {entry['batch']}: {wrong}")
                continue
        yield entry, generation


def _kernels(model: nn.Module, tokens: int) -> list[str]:
    """The kernels of a model's compressed layers for so many tokens."""
    layers = (layer for _, layer in compressed_layers(model))
    routes = (
        layer.route(layer.scheme, tokens, (layer.out_features, layer.in_features), layer.dtype, layer.device)
        for layer in layers
    )
    return sorted({route.kernel for route in routes})


def check_variant(entry: dict[str, Any], generation: GenerationTimer) -> str:
    """Add the largest error of a compressed layer to its entry. Returns the problem in a line, or an empty string."""
    with compare_layers(generation.model, SAMPLED) as errors:
        generation.start()
        generation.step()
    worst = max(errors, key=errors.__getitem__)
    entry |= {"layer_error": errors[worst], "worst_layer": worst}
    return "" if errors[worst] <= 1 else f"{worst} is off by {errors[worst]:.3g} times what is allowed"


def time_rounds(ready: list[tuple[dict[str, Any], GenerationTimer]], rounds: int) -> None:
    """Time generations in turns, and add the times to their entries."""
    times: list[list[tuple[float, float]]] = [[] for _ in ready]
    for _, generation in ready:
        generation.round()
    for _ in range(rounds):
        for (_, generation), found in zip(ready, times, strict=True):
            found.append(generation.round())
    for (entry, generation), found in zip(ready, times, strict=True):
        entry |= {"launch": generation.launch, "why_eager": generation.why_eager}
        for i, part in enumerate(("prefill", "decode")):
            entry[part] = summary([pair[i] for pair in found], generation.device)


def explain(entry: dict[str, Any], options: ModelOptions, report: SpeedReport) -> None:
    """Add to a timed entry its tokens per second and its ratio to dense."""
    if "decode" not in entry:
        return
    batch = entry["batch"]
    same = (e for e in report.results if e["variant"] == decoder.DENSE and e["batch"] == batch and "decode" in e)
    baseline = next(same, None)
    for part, tokens in (("prefill", batch * options.prompt), ("decode", batch)):
        figures = entry[part]
        figures["tokens_per_s"] = tokens / figures["time_ms"] * 1e3
        if baseline is not None and entry is not baseline:
            figures["speedup_over"] = {decoder.DENSE: baseline[part]["time_ms"] / figures["time_ms"]}
