"""Rotation of hidden state and heads: outliers are spread over channels before anything is rounded; no product is new.

    R1   x' = x Q            embeddings, what adds to the hidden state, and what reads it; gains of norms go into the
                             layers behind them, as a norm without gain commutes with Q
    R2   v' = R^T v          the rows of v, and the columns of what reads the values of a head: o (W R)(R^T v) = W v
    R4   z' = H^T z          the columns of what reads neither, like down_proj behind a gate; the model multiplies by H
                             as it runs (`online`): checkpoints say so, and other readers refuse them

Q, R: a Hadamard matrix with random signs, [C, C] or blocks [B, B] of it. The function of the model stays what it was,
and so do its shapes: every engine runs the result as it runs the original. Weights with outliers come to look like
normal numbers, which grids of few levels fit better; so do inputs, for schemes that round them. H has
no signs: the size of its blocks says all about it.

Sources: QuaRot (Ashkboos et al. 2024, arXiv 2404.00456): random Hadamard rotations, fused where they can be. SpinQuant
(Liu et al. 2024, arXiv 2405.16406): the names R1 and R2. SliceGPT (Ashkboos et al. 2024, arXiv 2401.15024): a hidden
state may be rotated, with the gains of its norms in the layers behind them.

Paper -> code: R1 -> `model.structure.rotate_stream.RotateStream`; R2 -> `model.structure.rotate.Rotate`; Hadamard
matrices -> `weights.rotations.orthogonal.hadamard_rotation`; R4 -> `model.online_rotation.RotateOnline`. What a
rotation fits is found on the model by trial: `model.structure.streams.find_streams`, `model.structure.rotate.widest`.

Departs from the papers:
- norms that subtract the mean stay as they are: Q leaves the vector of ones where it is, by a reflection. SliceGPT
  centers the writers and changes the norm, which no reader of such models expects.
- the bias of a norm goes into the biases behind it.
- widths that are no power of two: Paley's matrices, of any order that a prime power gives; QuaRot has tables of some.
- R2 is found as a linear path from one layer to others, of whatever size it takes; heads are one case.
- an output head that is tied to the embedding gets a weight of its own, as the last norm's gain goes into it. The model
  is larger by that, and the run says by how much.
- R4 is for every layer of a block that no other rotation reaches, in the largest blocks of which there is a Hadamard
  matrix; R3, of keys, belongs to the caches that round them (`passes.kv_cache`).
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from compress.base.errors import InputError
from compress.model.edits.folds import Fold
from compress.model.experts import Experts
from compress.model.known_edits import Edit
from compress.model.layers import is_linear, layers_of, output_head
from compress.model.online_rotation import RotateOnline, input_rotation
from compress.model.structure.rotate import Rotate
from compress.model.structure.rotate_stream import RotateStream, stream_rotation
from compress.model.structure.streams import Stream
from compress.passes.protocol.base import Pass
from compress.passes.protocol.model_view import Whole
from compress.passes.protocol.stages import Restructure, Stage
from compress.weights.rotations.hadamard import hadamard_sizes
from compress.weights.rotations.orthogonal import hadamard_rotation

SMALLEST_BLOCK = 2
LARGEST_SEED = 2**63 - 1


@dataclass(frozen=True, kw_only=True)
class Rotation(Pass):
    """The hidden state and the values of heads are rotated; the function stays."""

    name: ClassVar[str] = "rotate"

    hidden: bool = True
    """Rotate the hidden state (R1). A tied output head then gets a weight of its own."""

    heads: bool = True
    """Rotate the values of attention heads (R2)."""

    online: bool = False
    """Rotate the other inputs of blocks as the model runs: of down_proj (R4), and what hidden and heads leave out."""

    block: int | None = None
    """2 or more: channels that are rotated together, like the groups of a scheme: 16 to 128.  [default: all of them]"""

    seed: int = 0
    """0 or more: of the random signs."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.hidden or self.heads or self.online):
            raise InputError("rotate with nothing to rotate; give hidden, heads or online")
        if self.block is not None and self.block < SMALLEST_BLOCK:
            raise InputError(f"rotate: block {self.block}; allowed: {SMALLEST_BLOCK} or more, or none")
        if not 0 <= self.seed <= LARGEST_SEED:
            raise InputError(f"rotate: seed {self.seed}; allowed: 0 to {LARGEST_SEED}")

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Restructure(self.edits, removes=False, unties=self.hidden),)

    def edits(self, whole: Whole) -> Iterator[tuple[str, Edit]]:
        """The rotations of a model, with notes about what takes none."""
        generator = torch.Generator().manual_seed(self.seed)
        if self.hidden:
            yield from (("", edit) for edit in self._of_hidden(whole, generator))
        if self.heads:
            yield from self._of_heads(whole, generator)
        if self.online:
            yield from (("", edit) for edit in self._of_inputs(whole))

    def _of_hidden(self, whole: Whole, generator: torch.Generator) -> Iterator[RotateStream]:
        streams = whole.streams()
        for reason in streams.rejected:
            whole.note(f"rotate: the hidden state stays as it is: {reason}")
        for stream in streams.found:
            width = stream.width
            if self.block is not None and width % self.block:
                fits = ", ".join(str(size) for size in range(SMALLEST_BLOCK, width + 1) if width % size == 0)
                raise InputError(f"rotate: blocks of {self.block} for {width} channels; blocks that fit: {fits}")
            try:
                edit = stream_rotation(
                    whole.model, stream, hadamard_rotation(width, generator, self.block, stream.keeps_ones)
                )
            except InputError as error:
                whole.note(f"rotate: the hidden state stays as it is: {error}")
                continue
            whole.note(
                f"rotate: the hidden state of {width} channels, with {len(stream.norms)} norms and {len(edit.turns)} "
                f"weights{'' if self.block is None else f', in blocks of {self.block}'}"
            )
            for head in edit.untied:
                weight = whole.model.get_submodule(head).get_parameter("weight")
                whole.note(
                    f"rotate: {head} was tied to the embedding and gets a weight of its own, as the gain of its norm "
                    f"goes into it: {weight.numel()} parameters more (hidden=false does without)"
                )
            yield edit

    def _of_heads(self, whole: Whole, generator: torch.Generator) -> Iterator[tuple[str, Rotate]]:
        without: list[str] = []
        sizes: list[int] = []
        for block, found in whole.matrix_folds().items():
            for fold, size in found:
                within = self.block if self.block is not None and size % self.block == 0 else None
                yield block, Rotate(fold, hadamard_rotation(size, generator, within).matrix())
                sizes.append(size)
            without += [] if found else [block or "the model"]
        if sizes:
            said = " and ".join(str(size) for size in sorted(set(sizes)))
            whole.note(f"rotate: values of {len(sizes)} layers, {said} channels at a time")
        if without:
            whole.note(f"rotate: no layer's values take a rotation in {', '.join(without)}")

    def _of_inputs(self, whole: Whole) -> Iterator[RotateOnline]:
        folds = {
            block: [fold for fold, _ in found] if self.heads else [] for block, found in whole.matrix_folds().items()
        }
        streams = whole.streams().found if self.hidden else ()
        without: list[str] = []
        blocks: Counter[int] = Counter()
        for name, width in _unreached(whole.model, streams, folds):
            sizes = hadamard_sizes(width)
            if self.block is not None and self.block not in sizes:
                fits = ", ".join(map(str, sizes)) or "none"
                raise InputError(
                    f"rotate: blocks of {self.block} for {width} inputs of {name}; blocks that fit: {fits}"
                )
            if not sizes:
                without.append(name)
                continue
            blocks[size := self.block or sizes[-1]] += 1
            yield RotateOnline(name, size)
        if blocks:
            said = " and ".join(f"{number} layers, {size} channels at a time" for size, number in blocks.items())
            whole.note(f"rotate: inputs of {said}, as the model runs")
        if without or not blocks:
            whole.note(f"rotate: no input is rotated as the model runs in {', '.join(without) or 'any layer'}")


def _unreached(
    model: nn.Module, streams: Sequence[Stream], folds: Mapping[str, list[Fold]]
) -> Iterator[tuple[str, int]]:
    """(Name, K) of layers of blocks whose inputs no rotation of a producer reaches: those that read neither a hidden
    state nor what a linear path leads to. streams, folds: the hidden states and, {block: folds along which a matrix
    passes}, the linear paths that are rotated. Layers that rotate their input already, and experts, are none."""
    reached = {name for stream in streams for name in stream.readers}
    reached |= {name for stream in streams for norm in stream.norms for name in norm.readers}
    for block, found in folds.items():
        reached |= {f"{block}.{each.name}" if block else each.name for fold in found for each in fold.consumers}
    experts = [module for module in model.modules() if isinstance(module, Experts)]
    inside = {inner for module in experts for inner in module.modules()}
    head = output_head(model)
    for block in folds:
        for layer in layers_of(model.get_submodule(block), block):
            module = layer.module
            own = layer.is_called and is_linear(module) and module is not head and module not in inside
            if own and layer.name not in reached and input_rotation(module) is None:
                yield layer.name, layer.shape[1]
