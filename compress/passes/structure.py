"""Structure: channels of MLPs, attention heads and whole blocks go; what is left is a smaller model of the same kind.

Shapes: N outputs, K inputs of a *consumer*, the layer that reads what goes (down of an MLP, the output of an
attention); its inputs fall into groups (one channel; the heads of one key-value head), found on the model itself
(`model.structure.couplings`). X [T, K] is the consumer's input behind the blocks that are cut already, H = X^T X / T.

    removing groups R costs    min over Q of |X W^T - X_S Q^T|^2  =  tr(W_R ([H^-1]_RR)^-1 W_R^T)      S: the others
    at                         Q  =  W H_{:,S} H_SS^-1

Groups go one after the other, each time those whose removal costs least now, and the survivors of the consumer make up
for them. An input that is always one stands for the consumer's bias, which makes up, too. Every block loses as many,
because a configuration has one number for all: `intermediate_size`, `num_key_value_heads`. Blocks as a whole go by the
KL of the model without each, on some 4,096 tokens, one after the other, the least first: for every block that goes, as
many forwards of the model as half its blocks. The layers behind them make up for the drift of their inputs.

Sources: optimal brain surgeon for groups, one at a time: ZipLM (Kurtic et al. 2023, arXiv 2302.04089, equations 2-4);
SlimGPT (Ling et al. 2024, arXiv 2412.18110). Blocks: SLEB (Song et al. 2024, arXiv 2402.09025), which removes the one
without which the model loses least, again and again.

Paper -> code: saliency of a group -> `removal.LeastSquares.scores`; its update -> `remove`; the weight that is left ->
`removal.compensated`; the loss without a block -> `run.shrink.without`.

Departs from the papers:
- several groups go between two looks at the scores (`rounds`), the cost of the set being exact; survivors are solved
  for at the end from H itself, not from an inverse that was updated many times.
- H is shrunk towards its diagonal as far as the tokens are few, and damped; both as in gptq. So is `drift`: W becomes
  what returns, from the input behind the cut prefix, what the layer returned before anything was cut inside blocks.
- blocks are judged by the KL to the original (SLEB: by the perplexity), and what is behind them is solved again.
- query heads go with their key-value head, as a group.
- widths are a share of each block; ZipLM searches for those that meet a time.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal, get_args

import torch

from compress.calibration.hessian import AffineHessian, Hessian
from compress.calibration.stats import ChannelNorm, StatisticFactory
from compress.errors import InputError, one_of
from compress.passes.protocol.base import Pass, Treats
from compress.passes.protocol.stages import Stage

Importance = Literal["loss", "activation", "magnitude"]
Part = Literal["heads", "channels"]
PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True, kw_only=True)
class Structure(Pass):
    """Heads, channels and blocks go, the same number from every block."""

    name: ClassVar[str] = "structure"
    treats: ClassVar[Treats] = "structure"

    heads: float = 0.0
    """0 or more, below 1: share of each attention's heads that goes; query heads go with their key-value head."""

    channels: float = 0.0
    """0 or more, below 1: share of the hidden channels of each MLP that goes (of a CNN, of each convolution)."""

    hidden: float = 0.0
    """0 or more, below 1: share of the channels of the hidden state, from all layers, that goes
    (`solvers.hidden_width`)."""

    layers: int = 0
    """0 or more: so many blocks go as a whole."""

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

    statistics: Literal["float32", "float64"] = "float32"
    """The dtype in which H is summed; it is solved in float64."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for part in (*PARTS, "hidden"):
            if not 0 <= (share := getattr(self, part)) < 1:
                raise InputError(f"{part} {share}; allowed: a share of what there is, 0 (none) or more, below 1")
        for option, least in (("layers", 0), ("multiple", 1), ("rounds", 1)):
            if (given := getattr(self, option)) < least:
                raise InputError(f"{option} {given}; allowed: {least} or more")
        if self.multiple > 1 and not self.channels:
            raise InputError("multiple is of the channels that stay, and none go; give channels or leave it out")
        one_of("importance", self.importance, get_args(Importance))
        if not 0 < self.damp <= 1:
            raise InputError(f"damp {self.damp}; allowed: above 0, at most 1 (0.01 is usual)")
        if not 0 <= self.drift <= 1:
            raise InputError(f"drift {self.drift}; allowed: 0 (off) to 1")
        one_of("statistics", self.statistics, ("float32", "float64"))

    @property
    def stages(self) -> tuple[Stage, ...]:
        """None inside the loop over blocks: what it does comes before it (`run.shrink.restructure`)."""
        return ()

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
    def calibrated(self) -> bool:
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
            dtype = torch.float64 if self.statistics == "float64" else torch.float32
            return {"hessian": partial(AffineHessian if bias else Hessian, dtype=dtype, reference=self.compares)}
        return {"norm": ChannelNorm} if self.importance == "activation" else {}

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        """Refuse, before any work, options that remove nothing."""
        super().check(shapes)
        if not (self.shares or self.hidden or self.layers):
            raise InputError(
                "structure with nothing to remove; give heads, channels, hidden (shares) or layers (a count)"
            )

    def staying(self, part: Part | Literal["hidden"], groups: int) -> int:
        """The number of groups that stay of `groups`. Raises InputError where all would."""
        share: float = getattr(self, part)
        least = 0.5 / groups  # what is rounded to one
        gone = min(int(share * groups + 0.5), groups - 1)
        kept = groups - gone
        if part == "channels":
            kept = -(-kept // self.multiple) * self.multiple
            least = max(least, (groups - (groups - 1) // self.multiple * self.multiple) / groups)
        if kept >= groups:
            what = "heads (query heads count with their key-value head)" if part == "heads" else "channels"
            where = f" in multiples of {self.multiple}" if part == "channels" and self.multiple > 1 else ""
            advice = "no share takes any" if least >= 1 else f"give {least:.3g} or more"
            raise InputError(f"{part} {share} of {groups} {what}{where} is none; {advice}, or leave it out")
        return kept
