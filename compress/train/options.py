"""What training is asked for."""

from dataclasses import dataclass
from typing import Literal, get_args

from compress.errors import InputError, one_of
from compress.train.losses.divergence import Kind
from compress.train.losses.features import Distance
from compress.train.losses.layers import Mapped
from compress.train.quantizers import Scales

Trains = Literal["all", "layers", "scales"]
Schedule = Literal["cosine", "linear", "constant"]
Precision = Literal["full", "bfloat16"]
ORIGINAL = "original"
NONE = "none"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """The options of training, whoever it is that trains."""

    steps: int = 200
    """1 or more: steps of the optimizer."""

    rows: int = 16
    """1 or more: samples per step, over all ranks and micro-batches."""

    learning_rate: float = 1e-4
    """above 0: AdamW's, at its highest, of weights."""

    scale_rate: float = 1e-3
    """0 or more: AdamW's of scales, which are learned as factors: 0.001 is a thousandth of a scale a step."""

    weight_decay: float = 0.0
    """0 or more: of matrices; scales, biases and norms have none."""

    warmup: float = 0.05
    """0 to 1: share of the steps in which the rates rise."""

    schedule: Schedule = "cosine"
    """How the rates fall after that: to zero, or not at all."""

    clip_norm: float = 1.0
    """above 0: largest norm of the gradient of all weights, and of all scales; what is longer is shortened."""

    scales: Scales = "learned"
    """Whether scales and zero points are learned (LSQ), fixed, or fitted anew to the weights at every step; fixed
    ranges of inputs and outputs are learned or stay."""

    trains: Trains = "all"
    """all: every parameter; layers: those that are compressed; scales: nothing but theirs."""

    teacher: str = ORIGINAL
    """original, none, or a directory: whom the model learns from; the original is itself, before anything was done."""

    logits: float = 1.0
    """0 or more: weight of the divergence of logits from the teacher's."""

    divergence: Kind = "forward"
    """Of logits: forward is KL(teacher, student), reverse KL(student, teacher)."""

    temperature: float = 1.0
    """above 0: by which both's logits are divided."""

    task: float = 0.0
    """0 or more: weight of the cross entropy with the next token, or with the labels of the samples."""

    features: float = 0.0
    """0 or more: weight of the distance of hidden states from the teacher's."""

    distance: Distance = "relative"
    """By which hidden states are compared, token by token."""

    layer_map: Mapped = "uniform"
    """Which hidden states are compared where the teacher is deeper: all over it, its last, or the last one."""

    precision: Precision = "full"
    """bfloat16: products and activations of 16 bits (autocast); weights are trained in float32 in either case."""

    checkpointing: bool = False
    """Compute activations again in the backward pass rather than keep them: less memory, a third more time."""

    compile: bool = False
    """Compile every block with torch.compile."""

    held_out: float = 0.05
    """0 to 0.5: share of the samples that is kept out, to measure on before and after; 0: nothing is measured."""

    evaluate_every: int = 0
    """0 or more: steps between measurements in between; 0: none."""

    save_every: int = 100
    """0 or more: steps between checkpoints that a stopped run resumes from; 0: none but the last."""

    seed: int = 0
    """0 or more: of the order of the samples."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the pass that these are options of
        for name, allowed in (("schedule", Schedule), ("scales", Scales), ("trains", Trains)):
            one_of(name, getattr(self, name), get_args(allowed))
        one_of("precision", self.precision, get_args(Precision))
        one_of("divergence", self.divergence, get_args(Kind))
        one_of("distance", self.distance, get_args(Distance))
        one_of("layer_map", self.layer_map, get_args(Mapped))
        for name in ("steps", "rows"):
            self._check(name, getattr(self, name) >= 1, "1 or more")
        for name in ("learning_rate", "clip_norm", "temperature"):
            self._check(name, getattr(self, name) > 0, "above 0")
        for name in (
            "scale_rate",
            "weight_decay",
            "logits",
            "task",
            "features",
            "evaluate_every",
            "save_every",
            "seed",
        ):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        self._check("warmup", 0 <= self.warmup <= 1, "0 to 1")
        self._check("held_out", 0 <= self.held_out <= 0.5, "0 to 0.5")
        if not self.teacher:
            raise InputError("teacher ''; allowed: original, none, or a directory")
        if self.teacher == NONE and (self.logits or self.features or not self.task):
            raise InputError("teacher=none leaves nothing to learn but the task; give task=1, logits=0 and features=0")
        if self.teacher != NONE and not (self.logits or self.features):
            raise InputError("a teacher of whom nothing is learned; give logits or features, or teacher=none")
        if self.evaluate_every and not self.held_out:
            raise InputError("evaluate_every measures on samples that are held out; give held_out with it")
        if self.scales != "learned" and self.trains == "scales":
            raise InputError(f"trains=scales has nothing to train where scales are {self.scales}")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise InputError(f"{name} {getattr(self, name)}; allowed: {allowed}")

    @property
    def taught(self) -> bool:
        """Whether there is a teacher."""
        return self.teacher != NONE
