"""Coverage: the share of a whole model's parameters and bytes that is compressed."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from compress.checkpoint.read.unplaced_tensors import KeptTensor
from compress.model.untreated_layers import EMBEDDING, HEAD

SMALL = 0.5  # warn below this share
OTHERS = "norms and biases"
TRAINED = "trained, stored dense"


@dataclass(frozen=True)
class Coverage:
    """Parameters and bytes of the original model, in all and in its compressed weights. rest: {reason: parameters that
    are not compressed}, largest first. Shared parameters count once."""

    parameters: int
    bytes: int
    compressed_parameters: int
    compressed_bytes: int
    rest: dict[str, int]

    @property
    def share(self) -> float:
        """The share of parameters that are compressed, 0 to 1."""
        return self.compressed_parameters / max(self.parameters, 1)

    @property
    def share_of_bytes(self) -> float:
        """The share of bytes that are compressed, 0 to 1."""
        return self.compressed_bytes / max(self.bytes, 1)

    def __str__(self) -> str:
        rest = ", ".join(f"{percent(count / self.parameters)} {why}" for why, count in self.rest.items())
        return f"{percent(self.share)} of the parameters, {percent(self.share_of_bytes)} of the bytes; the rest: {rest}"


def percent(share: float) -> str:
    """A share as text, in whole percent, or in tenths of a percent below 10 %."""
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def count(sizes: Mapping[str, tuple[int, int]], compressed: Collection[str], reasons: Mapping[str, str]) -> Coverage:
    """The coverage of a model. sizes: {parameter: (elements, bytes)}; compressed: names of layers; reasons: {layer or
    parameter: the reason why it is not compressed}."""
    weights = {f"{layer}.weight" for layer in compressed}
    rest: dict[str, int] = {}
    for name, (elements, _) in sizes.items():
        if name not in weights:
            why = reasons.get(name) or reasons.get(name.removesuffix(".weight"), OTHERS)
            why = why.partition(": ")[0]
            rest[why] = rest.get(why, 0) + elements
    inside = [size for name, size in sizes.items() if name in weights]
    return Coverage(
        parameters=sum(elements for elements, _ in sizes.values()),
        bytes=sum(size for _, size in sizes.values()),
        compressed_parameters=sum(elements for elements, _ in inside),
        compressed_bytes=sum(size for _, size in inside),
        rest=dict(sorted(rest.items(), key=lambda item: -item[1])),
    )


def run_coverage(
    model: nn.Module,
    compressed: Collection[str],
    dense: Collection[str],
    reasons: Mapping[str, str],
    trained: Collection[str] = (),
    beside: Mapping[str, KeptTensor] | None = None,
) -> Coverage:
    """The coverage that a run has reached. model: the original, or one of the same size. compressed: layers; dense:
    those of them that are stored dense, with compressed values, for lack of a format. reasons: {layer: the reason why
    it was left alone}. trained: dense layers that only training has changed. beside: {name: tensor} kept with the
    model."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, p in model.named_parameters():
        experts = [f"{name}.{i}" for i in range(len(p))] if p.ndim == 3 else []
        if any(expert in compressed or expert in reasons for expert in experts):  # each is a layer
            each = p.shape[1:].numel()
            sizes |= {f"{expert}.weight": (each, each * p.element_size()) for expert in experts}
        else:
            sizes[name] = p.numel(), p.numel() * p.element_size()
    kept = beside or {}
    sizes |= {name: (tensor.elements, tensor.bytes) for name, tensor in kept.items()}
    reasons = {**reasons, **{name: tensor.kind for name, tensor in kept.items()}}
    kinds = {name: TRAINED if name in trained else _dense_kind(model.get_submodule(name)) for name in dense}
    return count(sizes, set(compressed) - set(dense), {**reasons, **kinds})


def _dense_kind(module: nn.Module) -> str:
    """Words for a compressed layer that is stored dense. A Linear is stored so only when it is pruned and not
    rounded."""
    if isinstance(module, nn.Linear):
        return "pruned, stored dense"
    return f"{type(module).__name__} of compressed values, stored dense"


def remark(found: Coverage) -> str | None:
    """A warning, before the work, when most of the model would stay uncompressed; None otherwise. Embeddings and the
    output head, which stay so by default, are not counted."""
    inside = found.parameters - sum(found.rest.get(why, 0) for why in (EMBEDDING, HEAD))
    little = found.compressed_parameters < SMALL * inside
    return f"little of the model will be compressed: {found}" if little else None
