"""The options of training."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from compress.base.errors import InputError, one_of
from compress.train.losses.options import LossOptions
from compress.train.rounding.quantizers import LEARNED, Scales

Trains = Literal["all", "layers", "scales"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["auto", "full", "bfloat16"]
Keep = Literal["best", "last"]


@dataclass(frozen=True, kw_only=True)
class TrainingOptions(LossOptions):
    """The options of training, shared by every pass that trains."""

    steps: int = 200
    """1 or more: steps of the optimizer."""

    minutes: float = 0.0
    """0 or more: the time to train for, range test included; steps are then as many as its pace allows. 0: `steps`."""

    rows: int = 16
    """1 or more: samples per step, over all ranks and micro-batches."""

    learning_rate: float = 0.0
    """0 or more: AdamW's, at its highest, of weights; 0: a range test of 31 steps chooses it (of
    fewer, before fewer than 62)."""

    scale_rate: float = 1e-3
    """0 or more: AdamW's of scales, which are learned as factors: 0.001 is a thousandth of a scale a step."""

    weight_decay: float = 0.0
    """0 or more: of matrices; scales, biases and norms have none."""

    warmup: float = 0.05
    """0 to 1: share of the steps in which the rates rise."""

    schedule: Schedule = "cosine"
    """Fall of the rates after the warmup: to zero along a cosine or a line, or none."""

    clip_norm: float = 1.0
    """above 0: largest norm of the gradient of all weights, and of all scales; a longer gradient is scaled down to
    it."""

    scales: Scales = "learned"
    """Scales and zero points are learned (LSQ), fixed, or fitted anew to the weights at every step; anchored: scales
    are learned and choose no codes; fixed ranges of inputs and outputs are learned or stay."""

    trains: Trains = "all"
    """all: every parameter; layers: parameters of compressed layers; scales: only their scales."""

    precision: Precision = "auto"
    """bfloat16: products and activations of 16 bits (autocast), full: of 32; weights are trained in float32 in either
    case. auto: bfloat16 in a run of `minutes` on a device with instructions for it, else full."""

    checkpointing: bool = False
    """Compute activations again in the backward pass rather than keep them: less memory, a third more time."""

    compile: bool = False
    """Compile every block with torch.compile."""

    held_out: float = 0.05
    """0 to 0.5: share of the samples that is kept out, to measure the loss before and after; of them at most one is
    measured for every twenty samples that the steps take. 0: nothing is measured."""

    evaluate_every: int = 0
    """0 or more: steps between measurements in between; 0: eight in a run whose best is kept, or as many as take a
    twentieth of its time."""

    keep: Keep = "best"
    """The parameters that are written: the best of those that were measured on held-out samples, the start included, or
    the last. The last also where nothing is held out and where l1 or group_lasso shrink; best once masks are final."""

    save_every: int = 100
    """0 or more: steps between checkpoints that a stopped run resumes from; 0: none but the last."""

    on_policy: float = 0.0
    """0 to 1: share of the steps on samples whose second half the student writes itself (GKD, on-policy distillation);
    divergence=reverse or jensen-shannon suit it."""

    seed: int = 0
    """0 or more: of the order of the samples."""

    def __post_init__(self) -> None:
        super().__post_init__()
        choices = {"schedule": Schedule, "scales": Scales, "trains": Trains, "precision": Precision, "keep": Keep}
        for name, allowed in choices.items():
            one_of(name, getattr(self, name), get_args(allowed))
        for name in ("steps", "rows"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        self._check("minutes", 0 <= self.minutes < math.inf, "0 or more")
        if self.minutes and (self.learning_rate or self.trains == "scales"):
            other = "learning_rate" if self.learning_rate else "trains=scales"
            raise InputError(f"minutes counts steps by the pace of a range test, and {other} makes none; give steps")
        self._check("clip_norm", self.clip_norm > 0, "above 0")
        for name in ("learning_rate", "scale_rate", "weight_decay", "evaluate_every", "save_every", "seed"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        self._check("warmup", 0 <= self.warmup <= 1, "0 to 1")
        self._check("held_out", 0 <= self.held_out <= 0.5, "0 to 0.5")
        self._check("on_policy", 0 <= self.on_policy <= 1, "0 to 1")
        if self.on_policy and (self.offline or self.task or not self.logits):
            raise InputError(
                "on_policy asks the teacher about what the student writes; give a model as teacher, logits=1 and "
                "task=0, or on_policy=0"
            )
        if self.contrastive and self.rows < 2:
            raise InputError("contrastive tells a sample from the others of a step; give rows=2 or more")
        if self.relations and self.compile:
            raise InputError(
                "relations reads what attention is called with, which compiled blocks hide; give one of the two"
            )
        if self.evaluate_every and not self.held_out:
            raise InputError("evaluate_every measures on samples that are held out; give held_out with it")
        if self.scales not in LEARNED and self.trains == "scales":
            raise InputError(f"trains=scales has nothing to train where scales are {self.scales}")
