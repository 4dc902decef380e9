"""The options of removing structure by shares: heads, channels, channels of the hidden state, and blocks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, get_args

from compress.base.errors import InputError, check_least, one_of
from compress.solvers.hessian_with_drift import check_reliance
from compress.solvers.removal import AffineHessian
from compress.solvers.statistics.hessian import Hessian, Precision, precision
from compress.solvers.statistics.input_statistics import ChannelNorm, StatisticFactory

Importance = Literal["loss", "activation", "magnitude"]
Part = Literal["heads", "channels"]
EXACT = 1e-6  # of a group: a share like 0.3 of 10 counts as 3
PARTS: tuple[Part, ...] = get_args(Part)


def going(share: float, groups: int) -> int:
    """The largest number of groups that is no larger a share of them than this."""
    return int(share * groups + EXACT)


def upwards(share: float) -> str:
    """A share in words, rounded up to three places, so that the share as written is enough."""
    return f"{math.ceil(share * 1000 - EXACT) / 1000:g}"


@dataclass(frozen=True, kw_only=True)
class RemovalOptions:
    """The options of removal, the same share of every block, and of its compensation (`engine.shrink`)."""

    heads: float = 0.0
    """0 or more, below 1: share of each attention's heads that goes; query heads go with their key-value head."""

    channels: float = 0.0
    """0 or more, below 1: share of the hidden channels of each MLP that goes (of a CNN, of each convolution)."""

    hidden: float = 0.0
    """0 or more, below 1: share of the channels of the hidden state, from all layers, that goes
    (`solvers.hidden_width`)."""

    layers: int = 0
    """0 or more: so many blocks go as a whole."""

    experts: float = 0.0
    """0 or more, below 1: share of each layer's experts that goes, in a step of its own (REAP)."""

    multiple: int = 1
    """1 or more: the channels that stay are a multiple of it; 128 lets groups of 128 weights follow."""

    importance: Importance = "loss"
    """Remove what costs the output least, what is read least (|W_j|^2 E[x_j^2]), or the smallest weights."""

    compensate: bool = True
    """Solve for the weights that read what is left, by least squares; behind blocks that go, all weights."""

    drift: float = 1.0
    """0 to 1: how much of what was cut before a layer its weights make up for, too, of what `shrink` leaves."""

    damp: float = 0.01
    """above 0, up to 1: added to the diagonal of H, as a share of its mean; raised where that is not enough."""

    shrink: bool = True
    """Rely on statistics only as far as the calibration tokens carry."""

    rounds: int = 64
    """1 or more: in so many turns groups go, by scores that are computed anew; more is slower, closer to the best."""

    statistics: Precision = "float32"
    """The dtype in which H is summed; it is solved in float64."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the pass that these are options of
        for part in (*PARTS, "hidden", "experts"):
            if not 0 <= (share := getattr(self, part)) < 1:
                raise InputError(f"{part} {share}; allowed: a share of what there is, 0 (none) or more, below 1")
        check_least(self, 0, "layers")
        check_least(self, 1, "multiple", "rounds")
        if self.experts and (self.shares or self.hidden or self.layers):
            raise InputError("experts go in a step of their own; give structure twice, experts first")
        if self.multiple > 1 and not self.channels:
            raise InputError("multiple is of the channels that stay, and none go; give channels or leave it out")
        one_of("importance", self.importance, get_args(Importance))
        check_reliance(self.damp, self.drift, self.statistics)

    @property
    def shares(self) -> dict[Part, float]:
        """{part: the share of it that goes}, in the order in which a block computes them."""
        return {part: share for part in PARTS if (share := getattr(self, part))}

    @property
    def parts(self) -> list[list[str]]:
        """The parts that go, grouped where a configuration may have one number for them: heads and the hidden state."""
        first = [part for part in ("hidden", "heads") if self.hidden and getattr(self, part)]
        others: list[list[str]] = [[part] for part in self.shares if part not in first]
        return [first, *others] if first else others

    @property
    def uses_data(self) -> bool:
        """True if calibration data is needed."""
        return self.layers > 0 or (bool(self.shares) and self.solves) or self.importance != "magnitude"

    @property
    def solves(self) -> bool:
        """True if second moments are needed, not the size of inputs alone."""
        return self.importance == "loss" or self.compensate

    @property
    def compares(self) -> bool:
        """True if statistics compare with the inputs of the model that is not cut."""
        return self.compensate and self.drift > 0

    def needs_of(self, bias: bool) -> Mapping[str, StatisticFactory]:
        """The statistics of a consumer's input, of one that has a bias or none."""
        if self.solves:
            kind, dtype = AffineHessian if bias else Hessian, precision(self.statistics)
            return {"hessian": partial(kind, dtype=dtype, reference=self.compares)}
        return {"norm": ChannelNorm} if self.importance == "activation" else {}

    def staying(self, part: Part | Literal["hidden"], groups: int) -> int:
        """The number of groups that stay of `groups`: no larger share goes than was asked for. Raises InputError where
        all would stay."""
        share: float = getattr(self, part)
        least = 1 / groups
        remaining = groups - going(share, groups)
        if part == "channels":
            remaining = -(-remaining // self.multiple) * self.multiple
            least = max(least, (groups - (groups - 1) // self.multiple * self.multiple) / groups)
        if remaining >= groups:
            what = "heads (query heads count with their key-value head)" if part == "heads" else "channels"
            where = f" in multiples of {self.multiple}" if part == "channels" and self.multiple > 1 else ""
            advice = "no share takes any" if least >= 1 else f"give {upwards(least)} or more"
            raise InputError(f"{part} {share} of {groups} {what}{where} is none; {advice}, or leave it out")
        return remaining
