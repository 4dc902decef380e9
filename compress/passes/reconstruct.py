"""Block reconstruction: codes and scales of a block are trained until the block returns what the original returned.

X' is what the block is given behind the compressed blocks before it, X what it was given in the original model:

    min over codes and scales of   |block'(X') - block(X)|^2        of all tokens, a mean

The scales behind the codes of earlier passes (gptq, say) learn, and with a `rate` the codes, too; what was best on all
calibration data is kept, which may be what it began with.

    y = (q - z) s        dy/ds = q - z        codes are chosen by the scales of the beginning: they stay when s changes

Sources: block reconstruction: BRECQ (Li et al. 2021, arXiv 2102.05426); learned rounding by gradients, a linear decay
of the rate, the best kept: SignRound (Cheng et al. 2023, arXiv 2309.05516); weights and scales of a block together,
scales alone beside codes that stay: EfficientQAT (Chen et al. 2024, arXiv 2407.11062), there of the whole model.

Departs from the papers:
- it starts from the solution of another pass, not from the nearest codes.
- the target is what the original block makes of the original's hidden states, not of those that it is given now: errors
  of earlier blocks are made up for.
- codes stay unless `rate` is given: from GPTQ's solution straight-through gradients raise the loss, and lower it less.
- LSQ's gradient of a scale, round(v) - v, is of codes that move with it, and here raised the loss step by step.
- zero points stay.
- a rate is in codes (steps of the layer's grid), the same for layers of any size; Adam, where SignRound has signs.
"""

from dataclasses import dataclass
from typing import ClassVar

from compress.base.errors import InputError, check_least
from compress.passes.protocol.base import Aspect, Pass
from compress.passes.protocol.stages import Reconstruction, Stage


@dataclass(frozen=True, kw_only=True)
class Reconstruct(Pass):
    """Trains what earlier passes made of a block until it returns what the original did."""

    name: ClassVar[str] = "reconstruct"
    reads: ClassVar[Aspect] = "quantized weight"
    keeps_zeros: ClassVar[bool] = True

    steps: int = 60
    """1 or more: steps of the optimizer in each block."""

    rows: int = 8
    """1 or more: samples per step, over all ranks, in whole micro-batches."""

    rate: float = 0.0
    """0 or more: Adam's for weights, at the beginning, in steps of their grid (0.02, say); 0: codes stay."""

    scale_rate: float = 3e-3
    """0 or more: Adam's for scales, as factors: 0.001 is a thousandth of a scale a step."""

    checks: int = 4
    """1 or more: how often the block is measured on all calibration data, to keep the best."""

    seed: int = 0
    """0 or more: of the order of the micro-batches."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_least(self, 1, "steps", "rows", "checks")
        check_least(self, 0, "seed", "rate", "scale_rate")
        if not self.rate and not self.scale_rate:
            raise InputError("rate and scale_rate are 0, which leaves nothing to train; give one of them")

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Reconstruction(self.steps, self.rows, self.rate, self.scale_rate, self.checks, self.seed),)
