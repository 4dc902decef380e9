"""The memory that a run takes at its peak, from shapes: of the process on a CPU, or of the device.

While a site of a block (layers that read one input) is decided, a run holds, in floats of 4 bytes on a CPU and of the
model's on a GPU:

    program      Python, its libraries and what they hold, as this process has them, and the pieces of a file in writing
    loaded       weights that are not read from their mapped files as they are: layers of a checkpoint that was rounded
                 before, and experts that are stored one by one and that transformers joins all the same
    block        the weights of the block, and values and codes of those that are decided; of a mixture's experts that
                 are opened one by one, two neighbours
    activations  of every calibration token, in the compressed and, where it is compared, in the original model: three
                 hidden states and the input of the site, or five and a half where a forward waits inside an attention.
                 Where that is more than there is room for, forwards are repeated (`engine.walk.forward`): one hidden
                 state, two at the end of a block, and the rest for the tokens of one micro-batch alone, until the
                 statistics are complete. A device with a memory of its own may leave hidden states to the host, and
                 run fewer samples at once, whose inputs of the site are then joined (`engine.walk.state.MemoryMode`)
    statistics   of the input of the site; a Hessian: H, the two halves of the drift and, at first, a half of H; then H,
                 drift and contrast, seven matrices while tokens are few
    solving      by rounding: 3.5 copies of the site's weights; by second order: 3 matrices [K, K] and 9 copies, 6
                 without refit and descent, or 4 matrices; before it, what the forward makes, 4 of its widest
                 tensors, or what adding to the statistics does. Where statistics wait on the host: 3 matrices in all
                 and the targets, or 2 and the copies of so many rows as are solved at once

and a tenth more of all but the first two, which freed memory leaves in pieces. The counts of copies are those of the
code: `tests/engine/walk/test_memory_modes.py` holds them to the tensors that live in a run, and
`recipes/results/plan-memory.json` has what runs took.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from math import prod

import torch
from torch import nn

from compress.base.memory import anonymous_bytes, available_bytes
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.pretrained import split_on_meta
from compress.checkpoint.read.source import Source
from compress.checkpoint.write.shards import PIECE
from compress.engine.plan.batches import tokens_of
from compress.engine.plan.plan import Plan
from compress.engine.walk.forward import REPEATED_SITES
from compress.engine.walk.state import MemoryMode
from compress.jobs.model_source import OpenedModel
from compress.model.calls import Batch
from compress.model.disk_names import places_in
from compress.model.experts import Expert, apart_in, open_one_by_one
from compress.model.layers import Layer, find_stacks
from compress.model.split_experts import is_joined
from compress.passes.options.second_order import AT_ONCE, SecondOrder
from compress.passes.protocol.base import Pass
from compress.passes.protocol.stages import (
    Decide,
    Fix,
    Gradients,
    Learn,
    Reconstruction,
    Restructure,
    Rewrite,
    Survey,
)
from compress.solvers.statistics.hessian import CONVERTED, FEW
from compress.solvers.statistics.input_statistics import Statistic

WITHIN_ATTENTION = 5.5  # hidden states that each token has where a forward waits before an attention's output layer
WITHIN_BLOCK = 3  # elsewhere, beside the input of the layer that it waits for
ROUNDING, SOLVING, SWEEPING = 3.5, 9, 6
# Copies of a site's weights, and of its largest layer, while targets are found.
TARGETS, TARGET = 2, 3
WIDEST = 4  # tensors of a forward, as wide as its widest layer, beside each other
PIECES = 1.1
OPEN_AT_ONCE = 8  # times a block's weights: the originals, what they become and codes take half of it
MIB = 2**20
ONE_EXPERT = re.compile(r"\.experts\.\d+\.")


@dataclass(frozen=True)
class TokenCounts:
    """Calibration data as it passes through a model: samples of `length` tokens, `batch` of them at once."""

    samples: int
    length: int
    batch: int = 8

    @property
    def count(self) -> int:
        return self.samples * self.length


@dataclass(frozen=True)
class PeakMemory:
    """Bytes at the peak of a run, by what they are for. site: the first of the layers that are decided then. kept: the
    working bytes of keeping all forwards, where they are repeated for lack of these. On a GPU the program's bytes are
    the process's, and all others the device's."""

    program: int
    block: int
    activations: int
    statistics: int
    solving: int
    site: str
    loaded: int = 0
    kept: int | None = None
    mode: MemoryMode = field(default_factory=MemoryMode)

    @property
    def fragments(self) -> int:
        """The bytes that freed memory keeps in pieces."""
        return int((PIECES - 1) * self._in_use)

    @property
    def working(self) -> int:
        """All but the program's and what is loaded."""
        return self._in_use + self.fragments

    @property
    def _in_use(self) -> int:
        return self.block + self.activations + self.statistics + self.solving

    @property
    def total(self) -> int:
        return self.program + self.loaded + self.working


@dataclass(frozen=True)
class _Site:
    """A site in numbers, by which it is compared; the end of a block is one without layers. opened: weights of its
    block that are open at one time; hidden, rows: columns of the block's first layer, and the most rows of one. place:
    in its block, no further than it matters. decided: weights before it of which values stay. shapes: of its layers.
    passes: places of those that treat it."""

    name: str = field(compare=False)
    opened: int
    hidden: int
    rows: int
    place: int
    decided: int
    shapes: tuple[tuple[int, int], ...]
    passes: tuple[int, ...]


def memory_of(
    plan: Plan, tokens: TokenCounts, width: int, available: int | None, loaded: int = 0, own: bool = False
) -> PeakMemory | None:
    """The memory at the peak of a plan's run. width: bytes of a number in a block that is worked on. available: bytes
    that the device has for the run. loaded: as in `PeakMemory`. own: whether the device has a memory of its own. None
    where a pass trains, or looks at gradients or at the whole model first: its options decide."""
    if not plan.passes or any(looks_beyond(p) for p in plan.recipe):
        return None
    return peak_of(plan, tokens, width, available, loaded, own)


def peak_of(
    plan: Plan, tokens: TokenCounts, width: int, available: int | None, loaded: int = 0, own: bool = False
) -> PeakMemory | None:
    """`memory_of` of the walk through the blocks alone, in the first mode that fits, or else the one that
    takes least; None for a plan without layers."""
    program, kept, least = (anonymous_bytes() or 0) + 2 * 4 * PIECE, None, None
    blocks = (_in_numbers(plan, b, plan.layers.get(name, ())) for stack in plan.stacks for name, b in stack.blocks)
    sites = dict.fromkeys(chain.from_iterable(blocks))
    for mode in memory_modes(plan, tokens, own and available is not None):
        peaks = (each for site in sites for each in _of_site(plan, site, tokens, width, program, mode))
        highest = max(peaks, key=lambda each: each.total, default=None)
        if highest is None:
            return None
        highest = replace(highest, loaded=loaded, kept=kept)
        kept = highest.working if kept is None else kept
        if least is None or highest.working < least.working:
            least = highest
        if available is None or highest.working + loaded <= available:
            break
    return least


def memory_modes(plan: Plan, tokens: TokenCounts, own: bool) -> Iterator[MemoryMode]:
    """The modes of a run, those first that cost least time. own: whether the device has a
    memory of its own, beside the host's."""
    yield MemoryMode()
    if not plan.calibrated:
        return
    yield MemoryMode(repeats=True)
    if not own or any(looks_beyond(p) for p in plan.recipe):
        return
    yield (offloading := MemoryMode(repeats=True, offloads=True))
    at_once = min(tokens.batch, tokens.samples)
    while at_once > 1 and plan.kv is None:
        at_once = -(-at_once // 2)
        yield replace(offloading, at_once=at_once)


def loaded_bytes(source: Source, model: nn.Module) -> int:
    """Bytes of the weights of experts that files hold one by one, and transformers as one tensor: where they do not
    stay apart, they are joined in memory, all of the model's. model: with these tensors."""
    if not any(ONE_EXPERT.search(name) for name in source.headers) or split_on_meta(source) is not None:
        return 0
    joined = [module for module in model.modules() if is_joined(module)]
    return sum(p.numel() * p.element_size() for module in joined for p in module.parameters(recurse=False))


def unrounded_bytes(source: Source, model: nn.Module) -> int:
    """Bytes of the weights of compressed layers of a checkpoint, in the dtype of the model, without linear layers of
    blocks, which read theirs when the block is open; experts that are joined count in `loaded_bytes`."""
    if source.quantization is None:
        return 0
    width, place, modules = stored_dtype(model).itemsize, places_in(model), dict(model.named_modules())
    apart = any(ONE_EXPERT.search(name) for name in source.headers)
    blocks = [] if loaded_bytes(source, model) else [b for stack in find_stacks(model) for _, b in stack.blocks]
    deferred = {m for block in blocks for m in block.modules() if isinstance(m, nn.Linear)}
    layers = {n: s for n, s in stored_in(source).layers.items() if not (apart and ONE_EXPERT.search(f"{n}."))}
    return sum(width * prod(s.shape) for n, s in layers.items() if modules.get(place(modules, n)) not in deferred)


def stored_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of a model's first parameter of floats; float32 where it has none."""
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def looks_beyond(p: Pass) -> bool:
    """True for a pass whose work is more than one block at a time: that trains, takes gradients or edits the model."""
    stages = (p.stage(Learn), p.stage(Reconstruction), p.stage(Gradients), p.stage(Restructure))
    return p.asks_curvature or any(stage is not None for stage in stages)


def sites_of(layers: Sequence[Layer]) -> Iterator[list[Layer]]:
    """Layers that seem to read one input, and so are decided together where they are calibrated: neighbours of one
    module with as many inputs. (A run finds out by a forward.)"""
    for _, site in groupby(layers, lambda layer: (layer.name.rpartition(".")[0], layer.shape[1])):
        yield list(site)


def weights_in(layers: Sequence[Layer]) -> int:
    """The number of weights of some layers."""
    return sum(layer.shape[0] * layer.shape[1] for layer in layers)


def open_weights(block: nn.Module) -> int:
    """The number of weights of a block that have working copies at one time: of experts that are opened one by one two
    neighbours, of which one is decided."""
    sizes = Counter[Expert]()
    for p, expert in apart_in(block).items():
        sizes[expert] += p.numel()
    return sum(p.numel() for p in block.parameters()) - sizes.total() + 3 * max(sizes.values(), default=0)


def _in_numbers(plan: Plan, block: nn.Module, layers: Sequence[Layer]) -> Iterator[_Site]:
    apart, decided, name = apart_in(block), 0, ""
    hidden, rows = layers[0].shape[1] if layers else 0, max((layer.shape[0] for layer in layers), default=0)
    of_block = open_weights(block), hidden, rows
    for i, site in enumerate(sites_of(layers) if plan.calibrated else ([layer] for layer in layers)):
        name, shapes = site[0].name, tuple(layer.shape for layer in site)
        passes = tuple(k for k, p in enumerate(plan.passes) if any(p.wants(layer.name) for layer in site))
        yield _Site(name, *of_block, min(i, REPEATED_SITES), decided, shapes, passes)
        # Values, and codes, which are in files otherwise.
        decided += sum(map(prod, shapes)) if plan.calibrated and site[0].parameter not in apart else 0
    if layers:
        yield _Site(name, *of_block, REPEATED_SITES, decided, (), ())


def _of_site(
    plan: Plan, site: _Site, tokens: TokenCounts, width: int, program: int, mode: MemoryMode
) -> Iterator[PeakMemory]:
    """The memory while each pass decides about a site, or at the end of a block."""
    streams, hidden = 1 + plan.compares if plan.calibrated else 0, site.hidden
    batch = min(tokens.batch, tokens.samples) * tokens.length
    at_once = batch if mode.at_once is None else mode.at_once * tokens.length
    forward = WIDEST * at_once * site.rows * width if plan.calibrated else 0
    between = 0 if mode.offloads else streams * tokens.count * hidden * width
    weights = site.opened * width + site.decided * (width + 1)
    if not site.shapes:
        if mode.repeats:  # outputs of the block, beside its inputs
            yield PeakMemory(program, weights, 2 * between, 0, forward, site.name, mode=mode)
        return
    columns = site.shapes[0][1]
    per_token = max(WITHIN_ATTENTION * hidden, WITHIN_BLOCK * hidden + columns)
    waiting, passing = int(streams * tokens.count * per_token * width), 0
    if mode.repeats and site.place < REPEATED_SITES:
        joined = batch * columns if at_once < batch else 0
        waiting, passing = between, int(streams * (at_once * per_token + joined) * width)
    for p in (plan.passes[k] for k in site.passes):
        at_site = PeakMemory(program, weights, waiting, 0, 0, site.name, mode=mode)
        if plan.calibrated:
            statistics = statistics_of(p, columns, tokens, done=False)
            counting = max(forward, _counting(p, batch, columns, width))
            yield replace(at_site, activations=waiting + passing, statistics=statistics, solving=counting)
        statistics = statistics_of(p, columns, tokens, done=True) if plan.calibrated else 0
        solving = _solving(p, site.shapes, mode)
        if mode.offloads and isinstance(p, SecondOrder):  # complete, and only then on the host
            yield replace(at_site, statistics=statistics)
            statistics = 0
        yield replace(at_site, statistics=statistics, solving=solving)


def statistics_of(p: Pass, columns: int, tokens: TokenCounts, done: bool) -> int:
    """Bytes of what a pass collects about an input of so many columns. done: once it is complete."""
    if isinstance(p, SecondOrder):
        few = tokens.count < FEW * columns
        # At first, tokens are few in any case, and the sums of the first halves are there.
        matrices = ((7 if few else 3) if done else 4) if p.drift else ((3 if few else 1) if done else 2)
        return columns**2 * _size(p) * matrices
    kinds = (p.stage(Decide), p.stage(Rewrite), p.stage(Survey), p.stage(Fix))
    meta = torch.device("meta")
    made = [make(columns, meta) for stage in kinds if stage is not None for make in stage.needs.values()]
    return sum(_statistic_bytes(statistic, columns, tokens) for statistic in made)


def _counting(p: Pass, batch: int, columns: int, width: int) -> int:
    """Bytes of the work of adding a micro-batch to second moments."""
    if not isinstance(p, SecondOrder):
        return 0
    size = _size(p)
    rows = batch // 2 if size == width else min(CONVERTED, batch) * 3
    return max(rows, 2 * min(CONVERTED, batch)) * columns * size


def _size(p: SecondOrder) -> int:
    """Bytes of a number of the statistics and the solution."""
    return 8 if p.statistics == "float64" else 4


def _statistic_bytes(statistic: Statistic, columns: int, tokens: TokenCounts) -> int:
    tensors = [value for value in vars(statistic).values() if isinstance(value, torch.Tensor)]
    per_batch = getattr(statistic, "per_batch", 0)
    batches = -(-tokens.samples // tokens.batch)
    return sum(t.nbytes for t in tensors) + min(per_batch * batches, tokens.count) * columns * 4


def _solving(p: Pass, shapes: Sequence[tuple[int, int]], mode: MemoryMode) -> int:
    """Bytes of the work on a site of layers of these shapes, beside its statistics where these stay."""
    sizes, columns = [*map(prod, shapes)], shapes[0][1]
    copies = sum(sizes) * 4
    if not (isinstance(p, SecondOrder) and p.calibrated):
        return int(ROUNDING * copies)
    matrix, copies, largest = (each * _size(p) for each in (columns**2, sum(sizes), max(sizes)))
    polished = getattr(p, "refit", 1) or getattr(p, "sweeps", 1)
    each = SOLVING if polished else SWEEPING
    extra = p.act_order != "none"
    if not mode.offloads:
        return max((4 + extra) * matrix, (3 + extra) * matrix + each * copies)
    return max(
        (3 + extra) * matrix + TARGETS * copies + TARGET * largest,
        (2 + extra) * matrix + TARGETS * copies + each * min(copies, AT_ONCE * _size(p)),
        matrix + TARGETS * copies + int(ROUNDING * largest),
    )


def memory_modes_of(
    opened: OpenedModel, plan: Plan, batches: Sequence[Batch], spills: bool
) -> tuple[Sequence[MemoryMode], str | None]:
    """The first mode that fits in memory and those after it, and a remark about the first. The remark is None
    where memory is enough, or not known to lack: of batches without token ids.

    spills: whether large tensors on the CPU lie in files.
    """
    counts = token_counts(batches)
    if not plan.calibrated or counts is None or (spills and opened.device.type == "cpu"):
        return (MemoryMode(),), None
    available, width = available_bytes(opened.device), (opened.dtype or stored_dtype(opened.model)).itemsize
    own = has_own_memory(opened.device)
    memory = peak_of(plan, counts, width, available, own=own)
    if memory is None or available is None:
        return (MemoryMode(),), None
    every = list(memory_modes(plan, counts, own))
    return every[every.index(memory.mode) :], _remark(memory, available, opened.device)


def has_own_memory(device: torch.device) -> bool:
    """True for a device that does not compute in the host's memory."""
    return device.type != "cpu"


def open_as_fits(
    model: nn.Module, plan: Plan, device: torch.device, dtype: torch.dtype | None, available: int | None
) -> None:
    """Let experts be opened one by one, unless the device has a memory of its own and room for all of a block
    (`OPEN_AT_ONCE`): then they are copied there once, and not in every forward. dtype: worked in, None for the stored
    one."""
    if available is not None and has_own_memory(device):
        blocks = [block for stack in plan.stacks for _, block in stack.blocks]
        largest = max(sum(p.numel() for p in block.parameters()) for block in blocks)
        if OPEN_AT_ONCE * largest * (dtype or stored_dtype(model)).itemsize <= available:
            return
    open_one_by_one(model)


def token_counts(batches: Sequence[Batch]) -> TokenCounts | None:
    """The tokens in batches; None where they hold no token ids."""
    tokens = tokens_of(batches)
    if not tokens:
        return None
    rows = [len(batch["input_ids"]) for batch in batches]
    return TokenCounts(sum(rows), tokens // sum(rows), max(rows))


def _remark(memory: PeakMemory, available: int, device: torch.device) -> str | None:
    """The remark about a peak; None where forwards are kept."""
    if memory.kept is None:
        return None
    or_files = ", or --spill FOLDER keeps them in files" if device.type == "cpu" else ""
    still = " (still more than that)" if memory.working > available else ""
    return (
        f"memory: to keep all forwards of a block would take {memory.kept / MIB:,.0f} MiB on {device}, where "
        f"{available / MIB:,.0f} MiB are free; {memory.mode}, which takes {memory.working / MIB:,.0f} MiB{still} and "
        f"about 2.5 times the time of the forwards. Fewer --samples avoid that{or_files}"
    )
