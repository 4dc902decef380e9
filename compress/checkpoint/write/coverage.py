"""How much of a model is compressed: of its parameters and of its bytes, not only of the layers that are."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

SMALL = 0.5  # below this share a person is warned
OTHERS = "norms and biases"
TRAINED = "trained, stored dense"


@dataclass(frozen=True)
class Coverage:
    """Parameters and bytes of a model as it was, those of the weights that are compressed, and {why: parameters} of the
    others, most first. What several modules share counts once."""

    parameters: int
    bytes: int
    compressed_parameters: int
    compressed_bytes: int
    rest: dict[str, int]

    @property
    def share(self) -> float:
        """Of the parameters, 0 to 1."""
        return self.compressed_parameters / max(self.parameters, 1)

    @property
    def share_of_bytes(self) -> float:
        """Of the bytes, 0 to 1."""
        return self.compressed_bytes / max(self.bytes, 1)

    def __str__(self) -> str:
        rest = ", ".join(f"{percent(count / self.parameters)} {why}" for why, count in self.rest.items())
        return f"{percent(self.share)} of the parameters, {percent(self.share_of_bytes)} of the bytes; the rest: {rest}"


def percent(share: float) -> str:
    """A share in whole percent, or in tenths where it is small."""
    return f"{share:.0%}" if share >= 0.1 or not share else f"{share:.1%}"


def count(sizes: Mapping[str, tuple[int, int]], compressed: Collection[str], reasons: Mapping[str, str]) -> Coverage:
    """From (elements, bytes) of every parameter by name, the layers that are compressed, and why others are not: by the
    name of a layer (its weight) or of a parameter."""
    weights = {f"{layer}.weight" for layer in compressed}
    rest: dict[str, int] = {}
    for name, (elements, _) in sizes.items():
        if name not in weights:
            why = reasons.get(name) or reasons.get(name.removesuffix(".weight"), OTHERS)
            why = why.partition(":")[0]
            rest[why] = rest.get(why, 0) + elements
    inside = [size for name, size in sizes.items() if name in weights]
    return Coverage(
        parameters=sum(elements for elements, _ in sizes.values()),
        bytes=sum(size for _, size in sizes.values()),
        compressed_parameters=sum(elements for elements, _ in inside),
        compressed_bytes=sum(size for _, size in inside),
        rest=dict(sorted(rest.items(), key=lambda item: -item[1])),
    )


def achieved(
    model: nn.Module,
    compressed: Collection[str],
    dense: Collection[str],
    reasons: Mapping[str, str],
    trained: Collection[str] = (),
) -> Coverage:
    """Of a model as it was, or as large: its compressed layers, those `dense` that have no format and are stored with
    compressed values, and why others were left alone. trained: layers that are dense, too, with values that training
    alone has changed."""
    sizes = {name: (p.numel(), p.numel() * p.element_size()) for name, p in model.named_parameters()}
    kinds = {name: TRAINED if name in trained else _dense_kind(model.get_submodule(name)) for name in dense}
    return count(sizes, set(compressed) - set(dense), {**reasons, **kinds})


def _dense_kind(module: nn.Module) -> str:
    """The words for compressed layers that are stored dense: a Linear is, where it is only pruned."""
    if isinstance(module, nn.Linear):
        return "pruned, stored dense"
    return f"{type(module).__name__} of compressed values, stored dense"


def remark(found: Coverage) -> str | None:
    """What to say before the work where most of a model stays as it is, beside what stays so unless it is asked for."""
    inside = found.parameters - sum(found.rest.get(why, 0) for why in ("embedding", "output head"))
    little = found.compressed_parameters < SMALL * inside
    return f"little of the model will be compressed: {found}" if little else None
