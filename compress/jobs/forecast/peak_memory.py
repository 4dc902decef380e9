"""The memory that a run takes at its peak, from shapes: of the process on a CPU, or of the device.

While a site of a block (layers that read one input) is decided, a run holds, in floats of 4 bytes on a CPU and of the
model's on a GPU:

    program      Python, its libraries and what they hold, as this process has them, and the pieces of a file in writing
    loaded       weights that are not read from their mapped files as they are: experts that are stored one by one, and
                 layers of a checkpoint that was rounded before
    block        the weights of the block, and a second copy of those that are decided, where the original is compared
    activations  of every calibration token, in the compressed and, where it is compared, in the original model: three
                 hidden states and the input of the site, or five and a half where a forward waits inside an attention.
                 Where that is more than there is room for, forwards are repeated (`engine.walk.forward`): one hidden
                 state, two at the end of a block, and the rest for the tokens of one micro-batch alone
    statistics   of the input of the site; a Hessian: H, drift and contrast, seven matrices while tokens are few
    solving      by rounding: 3.5 copies of the site's weights; by second order: 4 matrices [K, K] and 9 copies, 6
                 without refit and descent; before it, what a micro-batch's forward makes: 4 of its widest tensors

and a tenth more of all but the first two, which freed memory leaves in pieces. The counts of copies are those of the
code; `recipes/results/plan-memory.json` has what runs then took.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn

from compress.base.memory import anonymous_bytes, available_bytes
from compress.checkpoint.read.compressed_layers import stored_in
from compress.checkpoint.read.source import Source
from compress.checkpoint.write.shards import PIECE
from compress.engine.plan.batches import tokens_of
from compress.engine.plan.plan import Plan
from compress.engine.walk.forward import REPEATED_SITES
from compress.jobs.model_source import OpenedModel
from compress.model.calls import Batch
from compress.model.layers import Layer
from compress.model.split_experts import is_joined
from compress.passes.options.second_order import SecondOrder
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
from compress.solvers.statistics.hessian import FEW
from compress.solvers.statistics.input_statistics import Statistic

WITHIN_ATTENTION = 5.5  # hidden states that each token has where a forward waits before an attention's output layer
WITHIN_BLOCK = 3  # elsewhere, beside the input of the layer that it waits for
ROUNDING, SOLVING, SWEEPING, SQUARES = 3.5, 9, 6, 4
WIDEST = 4  # tensors of a forward, as wide as its widest layer, beside each other
PIECES = 1.1
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


def memory_of(plan: Plan, tokens: TokenCounts, width: int, available: int | None, loaded: int = 0) -> PeakMemory | None:
    """The memory at the peak of a plan's run. width: bytes of a number in a block that is worked on. available: bytes
    that the device has for the run. loaded: as in `PeakMemory`. None where a pass trains, or looks at gradients or at
    the whole model first: its options decide."""
    if not plan.passes or any(looks_beyond(p) for p in plan.recipe):
        return None
    return peak_of(plan, tokens, width, available, loaded)


def peak_of(plan: Plan, tokens: TokenCounts, width: int, available: int | None, loaded: int = 0) -> PeakMemory | None:
    """`memory_of` of the walk through the blocks alone; None for a plan without layers."""
    program = (anonymous_bytes() or 0) + 2 * 4 * PIECE

    def peak(repeats: bool) -> PeakMemory | None:
        peaks = (
            each
            for stack in plan.stacks
            for name, block in stack.blocks
            for each in _of_block(plan, block, plan.layers.get(name, ()), tokens, width, program, repeats)
        )
        highest = max(peaks, key=lambda each: each.total, default=None)
        return None if highest is None else replace(highest, loaded=loaded)

    baseline = peak(False)
    if baseline is None or available is None or baseline.working + loaded <= available or not plan.calibrated:
        return baseline
    repeated = peak(True)
    if repeated is None or repeated.working >= baseline.working:
        return baseline
    return replace(repeated, kept=baseline.working)


def loaded_bytes(source: Source, model: nn.Module) -> int:
    """Bytes of the weights of experts that files hold one by one, and transformers as one tensor: they are joined in
    memory, all of the model's. model: with these tensors."""
    if not any(ONE_EXPERT.search(name) for name in source.headers):
        return 0
    joined = [module for module in model.modules() if is_joined(module)]
    return sum(p.numel() * p.element_size() for module in joined for p in module.parameters(recurse=False))


def unrounded_bytes(source: Source, model: nn.Module) -> int:
    """Bytes of the weights of compressed layers of a checkpoint, in the dtype of the model; experts that are joined
    count in `loaded_bytes`."""
    if source.quantization is None:
        return 0
    width = stored_dtype(model).itemsize
    apart = any(ONE_EXPERT.search(name) for name in source.headers)
    layers = stored_in(source).layers.items()
    return sum(width * prod(s.shape) for name, s in layers if not (apart and ONE_EXPERT.search(f"{name}.")))


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
    site: list[Layer] = []
    for layer in layers:
        if site and (_place(layer), layer.shape[1]) != (_place(site[0]), site[0].shape[1]):
            yield site
            site = []
        site.append(layer)
    if site:
        yield site


def weights_in(layers: Sequence[Layer]) -> int:
    """The number of weights of some layers."""
    return sum(layer.shape[0] * layer.shape[1] for layer in layers)


def _place(layer: Layer) -> str:
    return layer.name.rpartition(".")[0]


def _of_block(
    plan: Plan,
    block: nn.Module,
    layers: Sequence[Layer],
    tokens: TokenCounts,
    width: int,
    program: int,
    repeats: bool,
) -> Iterator[PeakMemory]:
    """The memory while each site of a block is decided by each pass. repeats: whether forwards are repeated."""
    own = sum(p.numel() for p in block.parameters()) * width
    passes = [p for p in plan.passes if any(p.wants(layer.name) for layer in layers)]
    streams = 1 + plan.compares if plan.calibrated else 0
    hidden = layers[0].shape[1] if layers else 0
    rows = max((layer.shape[0] for layer in layers), default=0)
    at_once = min(tokens.batch, tokens.samples) * tokens.length
    forward = WIDEST * at_once * rows * width if plan.calibrated else 0
    decided, last = 0, ""
    for i, site in enumerate(sites_of(layers) if plan.calibrated else ([layer] for layer in layers)):
        copies = weights_in(site) * 4
        columns = site[0].shape[1]
        last = site[0].name
        per_token = max(WITHIN_ATTENTION * hidden, WITHIN_BLOCK * hidden + columns)
        floats = tokens.count * per_token
        if repeats and i < REPEATED_SITES:
            floats = tokens.count * hidden + at_once * per_token
        activations = int(streams * floats * width)
        for p in (p for p in passes if any(p.wants(layer.name) for layer in site)):
            statistics = _statistics(p, columns, tokens) if plan.calibrated else 0
            solving = max(_solving(p, columns, copies), forward)
            yield PeakMemory(program, own + decided, activations, statistics, solving, site[0].name)
        decided += copies if plan.compares else 0
    if repeats and last:
        # Its outputs, beside its inputs.
        yield PeakMemory(program, own + decided, streams * tokens.count * 2 * hidden * width, 0, forward, last)


def _statistics(p: Pass, columns: int, tokens: TokenCounts) -> int:
    """Bytes of what a pass collects about an input of so many columns."""
    if isinstance(p, SecondOrder):
        size = 8 if p.statistics == "float64" else 4
        matrices = 3 if tokens.count >= FEW * columns else 7
        return columns**2 * size * (matrices if p.drift else 1)
    kinds = (p.stage(Decide), p.stage(Rewrite), p.stage(Survey), p.stage(Fix))
    meta = torch.device("meta")
    made = [make(columns, meta) for stage in kinds if stage is not None for make in stage.needs.values()]
    return sum(_statistic_bytes(statistic, columns, tokens) for statistic in made)


def _statistic_bytes(statistic: Statistic, columns: int, tokens: TokenCounts) -> int:
    tensors = [value for value in vars(statistic).values() if isinstance(value, torch.Tensor)]
    per_batch = getattr(statistic, "per_batch", 0)
    batches = -(-tokens.samples // tokens.batch)
    return sum(t.nbytes for t in tensors) + min(per_batch * batches, tokens.count) * columns * 4


def _solving(p: Pass, columns: int, copies: int) -> int:
    """Bytes of the work on a site. copies: bytes of its weights."""
    if not (isinstance(p, SecondOrder) and p.calibrated):
        return int(ROUNDING * copies)
    polished = getattr(p, "refit", 1) or getattr(p, "sweeps", 1)
    return SQUARES * columns**2 * 4 + (SOLVING if polished else SWEEPING) * copies


def lack_of_memory(opened: OpenedModel, plan: Plan, batches: Sequence[Batch], spills: bool) -> str | None:
    """A remark that forwards are repeated, because all of a block's would take more memory than there is; None where
    there is enough, or where that is not known: of batches without token ids.

    spills: whether large tensors on the CPU lie in files.
    """
    counts = token_counts(batches)
    if not plan.calibrated or counts is None or (spills and opened.device.type == "cpu"):
        return None
    available = available_bytes(opened.device)
    memory = peak_of(plan, counts, (opened.dtype or stored_dtype(opened.model)).itemsize, available)
    return None if memory is None or available is None else _remark(memory, available, opened.device)


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
        f"{available / MIB:,.0f} MiB are free; they are repeated for each group of layers that share an input, which "
        f"takes {memory.working / MIB:,.0f} MiB{still} and about 2.5 times the time of the forwards. Fewer --samples "
        f"avoid that{or_files}"
    )
