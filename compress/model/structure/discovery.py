"""Finds the folds of a block: norms and linear layers whose channels enter other linear layers as scales alone.

Found by numbers, not by names: no table of architectures. For one block and one short micro-batch,

1. run it once as it is, to get its outputs and the kind of each norm (times w, or times 1 + w);
2. scale every producer in turn in hollow forwards (`model.structure.hollow_forward`), to find the readers of each of
its
   channels, and any other use of them (a residual sum, another norm, a product of two of its channels);
3. apply all folds found, with random powers of two, and run the block again: its outputs must be the same bits.

A fold is kept only if its producer feeds nothing but linear layers of the fold. Blocks of one kind share the folds of
the first one; the others only repeat 1 and 3. `Discovery.rejected` gives the reasons for refused folds.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from compress.model.calls import Call, evaluating
from compress.model.edits.changes import for_now
from compress.model.edits.folds import Consumer, Fold, apply, layer_at
from compress.model.structure.excerpt import in_float32, short_call
from compress.model.structure.hollow_forward import (
    HollowOutputs,
    codes,
    compare,
    decode,
    hollow_forward,
    repeatable,
    scalable_channels,
    tensors_of,
)
from compress.model.structure.producers import (
    LARGEST_SHIFT,
    ROUNDING,
    Producer,
    distance,
    powers_of_two,
    producers_of,
    repeated_parameters,
)


@dataclass(frozen=True)
class Discovery:
    """The folds of a block, a reason for every producer without one (rejected), and the full (forwards) and hollow
    (probes) forwards that it took to find them."""

    folds: tuple[Fold, ...]
    rejected: tuple[str, ...]
    forwards: int = 0
    probes: int = 0


def discover(block: nn.Module, call: Call, shared: Collection[int] = ()) -> Discovery:
    """The folds of an opened block, from the micro-batch of one call. The block is left as it was, bit for bit.

    All linear layers of the block take part, even those that no pass treats: a fold must include every reader. shared:
    identities of parameters that modules outside the block also use (a tied head); sharing inside the block is found
    here. Any error gives no folds, with the reason.
    """
    return _guarded(block, call, shared, _Discoverer.discover)


def confirm(block: nn.Module, call: Call, folds: Sequence[Fold], shared: Collection[int] = ()) -> Discovery:
    """The folds, of those found on another block of the same kind, that hold for this one. Takes two full forwards."""
    return _guarded(block, call, shared, partial(_Discoverer.confirm, folds=folds))


class Finder:
    """Discovers the folds of the first block of each kind and verifies them on the others."""

    def __init__(self) -> None:
        self.known: dict[tuple[object, ...], Discovery] = {}

    def find(self, block: nn.Module, call: Call, shared: Collection[int] = ()) -> Discovery:
        """The folds of this block."""
        kind = signature_of(block)
        if kind not in self.known:
            self.known[kind] = discover(block, call, shared)
            return self.known[kind]
        first = self.known[kind]
        again = confirm(block, call, first.folds, shared)
        return replace(again, rejected=first.rejected + again.rejected)


def signature_of(block: nn.Module) -> tuple[object, ...]:
    """A key that is equal for blocks of one kind: names and types of modules, names, shapes and dtypes of
    parameters."""
    modules = tuple((name, type(module)) for name, module in block.named_modules())
    return modules, tuple((name, p.shape, p.dtype) for name, p in block.named_parameters(remove_duplicate=False))


def _guarded(
    block: nn.Module, call: Call, shared: Collection[int], work: Callable[["_Discoverer"], Discovery]
) -> Discovery:
    """The result of `work` on a few tokens of the call, or on the whole call where the short one does not run or misses
    layers. Any error gives no folds, with the reason."""
    short = short_call(call)
    discovery = None
    problem = ""
    for attempt in [call] if short is call else [short, call]:
        try:
            with evaluating(block), in_float32(block, attempt) as exact_call:
                run = _Discoverer(block, exact_call, set(shared) | repeated_parameters(block))
                discovery = work(run)
        except Exception as error:  # noqa: BLE001 - folds are an offer: a block that cannot be probed goes without
            said = str(error).strip().splitlines()
            problem = f"no folds: {type(error).__name__}{': ' + said[0] if said else ''}"
        else:
            if not run.unreached:
                break
    return discovery or Discovery((), (problem,))


class _Discoverer:
    """The discovery of folds in one block in float32, with one call."""

    def __init__(self, block: nn.Module, call: Call, shared: set[int]) -> None:
        self.block, self.call, self.shared = block, call, shared
        self.forwards = self.probes = 0
        self.unreached: list[str] = []
        self.producers: dict[str, Producer] = {}
        self.outputs: list[Tensor] = []
        self.noise: float | None = None

    def discover(self) -> Discovery:
        self.producers = producers_of(self.block, self.run_original)
        base = self.hollow()
        if compare(base, self.hollow(), self.producers) != ({}, None):
            raise RuntimeError("the block does not compute the same twice (is there a cache among its arguments?)")
        self.unreached = [n for n, p in self.producers.items() if p.is_linear and n not in base.reached]
        folds: list[Fold] = []
        rejected: list[str] = []
        for name, producer in self.producers.items():
            if name not in base.reached:
                rejected.append(f"{name}: never called during the probe")
                continue
            consumers, problem = self.readers(name, base)
            if problem is None:
                folds.append(Fold(name, producer.kind, producer.channels, consumers))
            else:
                rejected.append(f"{name}: {problem}")
        return self.confirm_folds(folds, rejected)

    def confirm(self, folds: Sequence[Fold]) -> Discovery:
        if folds:
            self.run_original()
        return self.confirm_folds(folds, [])

    def run(self) -> list[Tensor]:
        """The outputs of a full forward."""
        self.forwards += 1
        with torch.no_grad(), repeatable(self.block):
            return tensors_of(self.block(*self.call.args, **self.call.kwargs))

    def run_original(self) -> None:
        self.outputs = self.run()
        if not all(bool(torch.isfinite(t).all()) for t in self.outputs if t.is_floating_point()):
            raise RuntimeError("its output is not finite")

    def hollow(self, scaled: str | None = None, scale_C: Tensor | None = None) -> HollowOutputs:
        self.probes += 1

        def given(name: str, output: Tensor) -> Tensor:
            return output if name != scaled or scale_C is None else output * scale_C.to(output.device, output.dtype)

        return hollow_forward(self.block, self.call, self.producers, given)

    def readers(self, name: str, base: HollowOutputs) -> tuple[tuple[Consumer, ...], str | None]:
        """(The layers that read a producer as a scale, None), or (..., the reason why it cannot be folded)."""
        every_C = torch.ones(self.producers[name].channels, dtype=torch.bool)
        consumers, problem = self.probe(name, base, every_C)
        if problem is None or not self.producers[name].is_linear:
            return consumers, problem
        self.probes += 1
        try:
            some_C = scalable_channels(self.block, self.call, self.producers, name)
        except RuntimeError:  # no backward pass through this block
            some_C = None
        if some_C is not None:
            consumers, other_problem = self.probe(name, base, some_C)
            if other_problem is None:
                return consumers, None
        return (), problem

    def probe(self, name: str, base: HollowOutputs, chosen_C: Tensor) -> tuple[tuple[Consumer, ...], str | None]:
        """Find the readers of the chosen channels: scale each by a power of two that encodes its number, and decode the
        numbers from the inputs of the layers. Returns (consumers, the reason why they make no fold, or None)."""
        channels = self.producers[name].channels
        digits: dict[str, list[Tensor]] = {}
        for i, code_C in enumerate(codes(channels)):
            scale_C = powers_of_two(torch.where(chosen_C, code_C, 0))
            changes, problem = compare(base, self.hollow(name, scale_C), self.producers)
            if problem is not None:
                return (), problem
            for reader, exponent_K in changes.items():
                digits.setdefault(reader, []).append(exponent_K)
            if any(len(found) != i + 1 for found in digits.values()):
                return (), "is read by other layers when it is scaled in another way"
        consumers = []
        for reader, found in digits.items():
            channel_of_K = decode(found, channels)
            if channel_of_K is None:
                return (), f"enters {reader} as more than a scale of single channels"
            consumers.append(Consumer(reader, channel_of_K))
        return tuple(consumers), None if consumers else "no linear layer reads it"

    def confirm_folds(self, folds: Sequence[Fold], rejected: list[str]) -> Discovery:
        """Keeps the folds whose parameters may be edited and that do not change the outputs."""
        candidates: list[Fold] = []
        for fold in folds:
            problem = self.unwritable(fold)
            if problem is None:
                candidates.append(fold)
            else:
                rejected.append(_refusal(fold, problem))
        # Tried apart: only norms that multiply by 1 + w need a tolerance.
        plus_one = [fold for fold in candidates if fold.kind == "norm_plus_one"]
        others = [fold for fold in candidates if fold.kind != "norm_plus_one"]
        valid: list[Fold] = []
        for group, tolerance in ((others, 0.0), (plus_one, ROUNDING)):
            if not group or self.harm(group, tolerance) is None:
                valid += group
                continue
            for fold in group:
                harm = self.harm([fold], tolerance)
                if harm is None:
                    valid.append(fold)
                else:
                    rejected.append(_refusal(fold, f"the block's output changes by {harm:.1e} of its largest value"))
        return Discovery(tuple(sorted(valid, key=folds.index)), tuple(rejected), self.forwards, self.probes)

    def unwritable(self, fold: Fold) -> str | None:
        """The reason why the parameters of a fold must not be edited; None where they may."""
        for name in (fold.producer, *(consumer.name for consumer in fold.consumers)):
            if any(id(p) in self.shared for p in self.block.get_submodule(name).parameters(recurse=False)):
                return f"{name} shares a parameter with another module"
        widths = {layer_at(self.block, consumer.name).shape[1] for consumer in fold.consumers}
        for name in self.unreached:
            if layer_at(self.block, name).shape[1] in widths:
                return f"{name} was never called during the probe and may read it, too"
        return None

    def harm(self, folds: Sequence[Fold], tolerance: float) -> float | None:
        """The relative change of the outputs by the folds with random powers of two; None where it is within the
        tolerance (and the noise of the device)."""
        generator = torch.Generator().manual_seed(0)
        with for_now() as done:
            for fold in folds:
                # Producers are scaled up, so that no value in between becomes subnormal.
                shift_C = torch.randint(LARGEST_SHIFT + 1, (fold.channels,), generator=generator)
                done += apply(self.block, fold, powers_of_two(-shift_C)).changes
            change = distance(self.run(), self.outputs)
        if change > tolerance and self.noise is None:
            # A device that adds in no fixed order does not repeat its own results.
            self.noise = 2 * distance(self.run(), self.outputs)
        return change if change > tolerance + (self.noise or 0) else None


def _refusal(fold: Fold, problem: str) -> str:
    return f"{fold.producer} -> {', '.join(consumer.name for consumer in fold.consumers)}: {problem}"
