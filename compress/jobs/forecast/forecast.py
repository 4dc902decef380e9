"""`plan`: what a run of `quantize` will do and make, from a configuration and the headers of weight files."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from compress.base.byte_sizes import parse_bytes
from compress.base.device import find_device, is_absent, planned_device
from compress.base.errors import InputError
from compress.base.memory import available_bytes
from compress.base.shown import Shown
from compress.checkpoint.byte_savings import Saving, bytes_before
from compress.checkpoint.read.pretrained import meta_model
from compress.checkpoint.read.source import Source
from compress.checkpoint.read.unplaced_tensors import beside, totals
from compress.checkpoint.write.shards import SHARD_BYTES
from compress.data.text import check_windows, default_length
from compress.engine.plan.experts_by_rank import why_whole
from compress.engine.plan.format_limits import caches_config, check_storable
from compress.engine.plan.plan import Plan
from compress.engine.plan.stored_sizes import WrittenLayer, bytes_of_tensors, stored_layers, stored_tensors
from compress.engine.plan.treatable_layers import tied_head
from compress.jobs.calibration_data import WINDOWS
from compress.jobs.forecast.duration import seconds_of
from compress.jobs.forecast.inference_memory import RunMemory, run_memory
from compress.jobs.forecast.peak_memory import (
    PeakMemory,
    TokenCounts,
    has_own_memory,
    loaded_bytes,
    memory_of,
    open_as_fits,
    stored_dtype,
    unrounded_bytes,
)
from compress.jobs.forecast.ranks import RankForecast, check_ranks, of_rank
from compress.jobs.forecast.readers import Kernel, engines_for, kernels_for
from compress.jobs.known_models import model_from_configuration
from compress.jobs.model_source import FoundModel, compute_dtype, find_model
from compress.jobs.request import Request
from compress.jobs.whole_model import check_structural
from compress.model.split_experts import split_experts
from compress.model.tensors import without_values
from compress.model.untreated_layers import EMBEDDING, HEAD
from compress.passes.options.quantize import QuantizeWeights
from compress.passes.protocol.base import Pass
from compress.passes.protocol.recipe import options_of
from compress.passes.protocol.stages import Restructure
from compress.passes.rtn import RTN
from compress.weights.formats.sparse24 import TWO_OF_FOUR

CARDS = {"h100": 80 * 2**30, "h200": 141 * 10**9}  # bytes of memory of GPUs, by the names that a plan may give
FEWER = ((128, 512), (64, 512))  # samples and tokens of each, of runs that take less memory


@dataclass(frozen=True)
class LayerForecast:
    """A layer that is compressed. shape: (N, K). scheme: in words. bytes: of its tensors. exact: whether these are
    known before the work."""

    name: str
    shape: tuple[int, int]
    passes: tuple[str, ...]
    scheme: str
    bytes: int
    bits_per_weight: float
    exact: bool


@dataclass(frozen=True)
class Disk:
    """Bytes that a run needs beside each other where the output is to be, and those that are free there. exported: of
    them, about those of the files that an engine opens, where these lie beside the checkpoint."""

    needed: int
    free: int
    exported: int = 0


@dataclass(frozen=True)
class Outline:
    """The layers, bytes, memory and time of a run, before it begins.

    layers: those stored as codes. dense: {name: the reason why it stays as it is, or is stored dense}. saving: bytes of
    all tensors before and after. exact: whether those after are known before the work. tables: bytes of an embedding
    and head that stay as they are. memory: at the peak. seconds: of the work on a CPU, without verification and files.
    Both are None where they are not known before. tokens: the calibration data that they are told for.
    """

    model: str
    device: str
    layers: list[LayerForecast]
    dense: dict[str, str]
    saving: Saving
    exact: bool
    tables: int
    bits_per_weight: float | None
    disk: Disk
    memory: PeakMemory | None
    seconds: float | None
    tokens: TokenCounts | None
    notes: list[str]


@dataclass(frozen=True)
class CheaperRun:
    """A run with other options, and its peak in bytes on the device. calibrated: it needs a text."""

    options: str
    memory: int
    calibrated: bool


@dataclass(frozen=True, repr=False)
class Forecast(Shown, Outline):
    """A run, before it begins, and what its result runs on.

    engines: {name: the reason why it does not run the result, None where it does}. kernels: of `compress.load` on the
    device, by shape and scheme; none for a GPU that is not here. run: the memory of running the result; None where the
    configuration does not tell it. device_memory: bytes that the device has, as asked; None: not asked. cheaper: runs
    that take less memory, where this one takes more than that. rank: each of several ranks, where these were asked for.
    """

    engines: dict[str, str | None]
    kernels: list[Kernel]
    run: RunMemory | None = None
    device_memory: int | None = None
    cheaper: Sequence[CheaperRun] = ()
    rank: RankForecast | None = None

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(layer) for layer in self.layers]


def plan(
    model: nn.Module | str | Path,
    passes: Pass | Sequence[Pass],
    *,
    ignore: Sequence[str] = (),
    output: str | Path | None = None,
    device: str | torch.device | None = None,
    store: str | None = None,
    one_block: bool = False,
    convolutions: bool | None = None,
    samples: int | None = None,
    length: int | None = None,
    bos: str | None = None,
    batch_size: int = 8,
    device_memory: int | str | None = None,
    ranks: int | None = None,
    trust_remote_code: bool = False,
) -> Forecast:
    """Tell what `quantize` will do with a model: schemes, what stays dense and why, bytes, memory, kernels, engines.

    No weight is read: of a checkpoint its configuration and the headers of its files, of a model in memory its shapes.
    model may also be a config.json alone, or the name of a well-known model (`known_models`), and device a GPU that is
    not here, or a name of `CARDS`. ranks: tell what each of so many takes, too. The options mean what they mean in
    `quantize`. device_memory: what the device has, like "12GB", for which the forecast then says whether the run and
    its result fit. output: where the result would be, for the free disk. samples, length, bos, batch_size: of the
    calibration data, for memory and time. Raises InputError for what `quantize` refuses by shapes and names.
    """
    check_ranks(ranks)
    alone = model_from_configuration(str(model)) if isinstance(model, str | Path) else None
    name, model = str(model), model if alone is None else alone
    limit = parse_bytes(device_memory, "device memory") if isinstance(device_memory, str) else device_memory
    limit, device = (limit or CARDS[str(device)], "cuda") if device in CARDS else (limit, device)
    elsewhere = None if device is None else planned_device(device)
    device = None if elsewhere is None or is_absent(elsewhere) else elsewhere
    request = Request.of({**locals(), "output": "" if output is None else output})
    check_windows(length, samples)
    _check_structure(request)
    opened = find_model(model, device, trust_remote_code)
    empty, loaded = shapes_of(opened) if alone is None else (alone, 0)
    planned = request.match(empty, valued=False)
    worked_on = elsewhere or find_device(opened.device)
    if (opened.given is None or alone is not None) and why_whole(planned, empty, 1) is None:
        open_as_fits(empty, planned, worked_on, request.dtype, limit or available_bytes(worked_on))
    if opened.source is not None and not any(p.stage(Restructure) for p in request.passes):
        planned = replace(planned, beside=beside(opened.source))
    tokens = TokenCounts(samples or WINDOWS, length or default_length(getattr(empty, "config", None)), batch_size)
    memory = partial(_memory, empty, worked_on, loaded, limit)
    layers = written_layers(planned, request.store)
    told = outline(opened.source, worked_on, empty, planned, layers, request, tokens, loaded, available=limit)
    forecast = replace(
        (forecast := _forecast(told, empty, planned, layers)),
        model=forecast.model if alone is None else name,
        run=run_memory(empty, forecast.saving.after, planned.cache_scheme),
        device_memory=limit,
        notes=[*forecast.notes, *_not_had(name, alone), *_decimal(device_memory, limit)],
    )
    forecast = _with_untied_head(forecast, empty, request.passes)
    cheaper, match = _cheaper(forecast, memory, tokens, planned, request, empty), partial(request.match, valued=False)
    rank = None if ranks is None else of_rank(empty, planned, ranks, tokens, worked_on, memory, match)
    return replace(forecast, cheaper=cheaper, rank=rank)


def _not_had(name: str, alone: nn.Module | None) -> list[str]:
    """A remark about a hub id that is planned by a known configuration."""
    if alone is None or Path(name).exists() or "/" not in name:
        return []
    known = name.lower().rpartition("/")[2]
    return [f"{name} cannot be had from the hub now; planned by the known configuration of {known}"]


def _decimal(words: int | str | None, size: int | None) -> list[str]:
    """A remark about a memory in GB, which a card's GiB are called, too."""
    if size is None or not isinstance(words, str) or not words.strip().upper().endswith("GB"):
        return []
    count = words.strip()[:-2].strip()
    return [
        f"{count} GB = {size / 2**30:.3g} GiB (a card sold as {count} GB has {count} GiB: --device-memory {count}GiB)"
    ]


def _check_structure(request: Request) -> None:
    """Raises InputError for what `check_structural` refuses, and for a pass that removes structure, after which no
    shape is known beforehand."""
    check_structural(request)
    if removing := next((p.name for p in request.passes if p.removes), None):
        raise InputError(
            f"{removing} changes the shapes of the layers by what it finds in their values, so nothing can be told "
            "before it; plan the passes behind it on its output"
        )


def _with_untied_head(told: Forecast, model: nn.Module, passes: Sequence[Pass]) -> Forecast:
    """A forecast with a remark for each pass that may give a tied output head a weight of its own."""
    weight = tied_head(model)
    stages = [(p.name, stage) for p in passes if (stage := p.stage(Restructure)) is not None]
    if weight is None:
        return told
    remarks = [
        f"{name} gives the output head, tied to the embedding, a weight of its own unless the gains of its norm are "
        f"alike, which only their values show: up to {weight.numel() * weight.element_size()} bytes more than told"
        for name, stage in stages
        if stage.unties
    ]
    return replace(told, exact=told.exact and not remarks, notes=[*told.notes, *remarks])


def _rounded(passes: Sequence[Pass]) -> RTN | None:
    """Rounding to nearest in the format of a recipe's only pass; None for other recipes."""
    only = passes[0] if len(passes) == 1 else None
    if not isinstance(only, QuantizeWeights) or isinstance(only, RTN):
        return None
    return RTN(**{key: getattr(only, key) for key in options_of(RTN)})


def _memory(
    model: nn.Module, device: torch.device, loaded: int, available: int | None, tokens: TokenCounts, plan: Plan
) -> PeakMemory | None:
    worked_in = compute_dtype(model, device, None) or stored_dtype(model)
    free = available or available_bytes(device)
    return memory_of(plan, tokens, worked_in.itemsize, free, loaded, has_own_memory(device))


def _cheaper(
    told: Forecast,
    memory: Callable[[TokenCounts, Plan], PeakMemory | None],
    tokens: TokenCounts,
    plan: Plan,
    request: Request,
    model: nn.Module,
) -> list[CheaperRun]:
    """Runs with other options that take less memory, the most tokens first; none where this one fits."""
    if told.device_memory is None or told.memory is None or working_bytes(told) <= told.device_memory:
        return []
    tries = {"--batch-size 1": (replace(tokens, batch=1), plan)}
    for samples, length in FEWER:
        if samples * length < tokens.count:
            tries[f"--samples {samples} --length {length} --batch-size 1"] = TokenCounts(samples, length, 1), plan
    if (rounded := _rounded(request.passes)) is not None:
        tries["--method rtn"] = tokens, replace(request, passes=(rounded,)).match(model, valued=False)
    peaks = ((words, memory(counts, each), each.calibrated) for words, (counts, each) in tries.items())
    others = ((words, replace(told, memory=peak), needs) for words, peak, needs in peaks if peak is not None)
    runs = [CheaperRun(words, working_bytes(other), needs) for words, other, needs in others]
    return [run for run in runs if run.memory < working_bytes(told)]


def shapes_of(found: FoundModel) -> tuple[nn.Module, int]:
    """(The model that a run would open, on the meta device; bytes of it that do not stay in mapped files)."""
    if found.source is None:
        assert found.given is not None
        return without_values(found.given), 0
    model = meta_model(found.source)
    loaded = loaded_bytes(found.source, model) + unrounded_bytes(found.source, model)
    split_experts(model)
    return model, loaded


def outline(
    source: Source | None,
    device: torch.device,
    model: nn.Module,
    plan: Plan,
    layers: Sequence[WrittenLayer],
    request: Request,
    tokens: TokenCounts | None,
    loaded: int = 0,
    timed: bool = True,
    available: int | None = None,
) -> Outline:
    """The outline of a plan's run. model: of any device. layers: those of `written_layers`. tokens: the calibration
    data; None where it is not of tokens. loaded: bytes of the model that do not stay in mapped files. timed: whether
    the rate of this machine is measured. available: bytes that the device has; None: those that are free."""
    check_storable(plan)
    caches_config(plan, model)
    coded = [layer for layer in layers if layer.scheme is not None]
    weights = sum(layer.shape[0] * layer.shape[1] for layer in coded)
    tensors = stored_tensors(model, plan, layers)
    after = bytes_of_tensors(tensors) + sum(t.bytes for t in plan.beside.values())
    dense = {**plan.left_alone(model), **_dense(layers, plan)}
    tables = {f"{name}.weight" for name, why in dense.items() if why in (EMBEDDING, HEAD)}
    counted = tokens or (None if plan.calibrated else TokenCounts(0, 0))
    memory, seconds = None, None
    if counted is not None:
        memory = _memory(model, device, loaded, available, counted, plan)
        repeats = memory is not None and memory.mode.repeats
        seconds = seconds_of(plan, counted, repeats) if timed and device.type == "cpu" else None
    return Outline(
        type(model).__name__ if source is None else source.name,
        str(device),
        [_layer_forecast(layer) for layer in coded],
        dense,
        Saving(bytes_before(source, model), after),
        all(layer.exact for layer in layers),
        bytes_of_tensors({name: tensor for name, tensor in tensors.items() if name in tables}),
        8 * sum(layer.bytes for layer in coded) / weights if weights else None,
        Disk(after + min(after, request.shard_bytes or SHARD_BYTES), free_at(Path(request.output or "."))),
        memory,
        seconds,
        tokens,
        [*(f"kept dense: {words}" for words in totals(plan.beside)), *plan.notes],
    )


def _forecast(told: Outline, model: nn.Module, plan: Plan, layers: Sequence[WrittenLayer]) -> Forecast:
    """An outline, with what the result runs on."""
    coded = [layer for layer in layers if layer.scheme is not None]
    tables = {table.name for table in plan.tables}
    device = torch.device(told.device)
    kernels = [] if is_absent(device) else kernels_for(model, coded, tables, stored_dtype(model), device)
    return Forecast(**vars(told), engines=engines_for(plan, model, layers), kernels=kernels)


def written_layers(plan: Plan, store: str | None) -> list[WrittenLayer]:
    """Every layer and table that a plan treats, as a run with such a `store` writes them."""
    return stored_layers(plan, plan.treated if store == TWO_OF_FOUR else plan.halved)


def _layer_forecast(layer: WrittenLayer) -> LayerForecast:
    weights = layer.shape[0] * layer.shape[1]
    bits = 8 * layer.bytes / weights
    return LayerForecast(layer.name, layer.shape, layer.passes, str(layer.scheme), layer.bytes, bits, layer.exact)


def _dense(layers: Sequence[WrittenLayer], plan: Plan) -> dict[str, str]:
    """{layer: the reason why it is treated and yet stored dense}."""
    known = {layer.name: layer for layer in plan.all_layers}
    reasons = {}
    for layer in layers:
        if layer.scheme is None and not known[layer.name].has_format:
            kind = type(known[layer.name].module).__name__
            reasons[layer.name] = f"compressed values, stored dense: compressed-tensors has no {kind}"
        elif layer.scheme is None:
            pruned = any(p.writes == "mask" for p in plan.passes if p.wants(layer.name))
            reasons[layer.name] = "pruned, stored dense" if pruned else "no pass rounds it"
    return reasons


def working_bytes(told: Outline) -> int:
    """The bytes at the peak: of the process on a CPU, of the device elsewhere."""
    assert told.memory is not None
    return told.memory.total if told.device == "cpu" else told.memory.working


def count_reasons(dense: dict[str, str]) -> list[tuple[str, int, str]]:
    """(Reason, layers, one of them) of what stays dense, most layers first."""
    counts = Counter(dense.values())
    first = {why: name for name, why in reversed(dense.items())}
    return [(why, count, first[why]) for why, count in counts.most_common()]


def free_at(path: Path) -> int:
    """Free bytes where a directory is or would be."""
    place = path.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
