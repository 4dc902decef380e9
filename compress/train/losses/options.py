"""The options of a training objective: the teacher, the losses, and their weights."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

from compress.base.errors import InputError, check_idle, one_of
from compress.train.losses.attention import Heads, Measure
from compress.train.losses.divergence import Kind
from compress.train.losses.features import Distance, Mapped
from compress.train.losses.top_k import Tail

ORIGINAL = "original"
NONE = "none"
CACHED = ".safetensors"  # suffix of a file of a teacher's cached logits
Related = Literal["values", "all"]
# Names of losses' weights, by what the losses need: a teacher that is called, any teacher, labels.
OF_A_MODEL = ("features", "attention", "relations", "contrastive")
OF_A_TEACHER = ("logits", *OF_A_MODEL)
LOSSES = ("logits", "task", *OF_A_MODEL)
# {option: the losses of which it needs one}
OF_LOSSES = {
    "divergence": ["logits"],
    "temperature": ["logits"],
    "distance": ["features"],
    "measure": ["attention"],
    "heads": ["attention"],
    "related": ["relations"],
    "relation_heads": ["relations"],
    "contrast": ["contrastive"],
    "layer_map": ["features", "attention", "relations"],
}


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The losses of training."""

    teacher: str = ORIGINAL
    """original, none, a directory, or FILE.safetensors: the model to learn from. original: the model itself before
    compression; a file: logits cached by `compress cache-logits TEACHER`."""

    logits: float = 1.0
    """0 or more: weight of the divergence of logits from the teacher's."""

    divergence: Kind = "forward"
    """Direction of the divergence of logits: forward is KL(teacher, student), reverse KL(student, teacher)."""

    temperature: float = 1.0
    """above 0: divides the logits of both models."""

    tail: Tail = "bucket"
    """Tokens beyond the top k of a file: one more outcome together, or left out on both sides."""

    task: float = 0.0
    """0 or more: weight of the cross entropy with the next token, or with the labels of the samples."""

    features: float = 0.0
    """0 or more: weight of the distance of hidden states from the teacher's."""

    distance: Distance = "relative"
    """Distance between hidden states, token by token."""

    attention: float = 0.0
    """0 or more: weight of the distance of attention maps from the teacher's; both compute eager attention for it."""

    measure: Measure = "kl"
    """Distance between attention maps, query by query."""

    heads: Heads = "each"
    """Maps of each head, or where their numbers differ: the mean of all heads, or of neighbouring ones."""

    relations: float = 0.0
    """0 or more: weight of the divergence of relations between the tokens of a sample from the teacher's (MiniLM)."""

    related: Related = "values"
    """Relations of attention's values, or the mean over those of queries, keys and values."""

    relation_heads: int = 0
    """0 or more: number of heads into which vectors are cut for relations; 0: as many as the teacher's attention
    has."""

    contrastive: float = 0.0
    """0 or more: weight of telling a sample's embedding (the mean over its tokens) from the step's others (InfoNCE)."""

    contrast: float = 0.07
    """above 0: temperature of the contrastive loss; the smaller, the more the closest of the others count."""

    layer_map: Mapped = "uniform"
    """Layers whose states, maps and relations are compared where the teacher is deeper: spread evenly, its last ones,
    or the last one alone."""

    def __post_init__(self) -> None:
        super().__post_init__()  # type: ignore[misc]  # of the pass that these are options of
        choices = {"divergence": Kind, "tail": Tail, "distance": Distance, "measure": Measure, "heads": Heads}
        for name, allowed in {**choices, "related": Related, "layer_map": Mapped}.items():
            one_of(name, getattr(self, name), get_args(allowed))
        for name in (*LOSSES, "relation_heads"):
            self._check(name, getattr(self, name) >= 0, "0 or more")
        for name in ("temperature", "contrast"):
            self._check(name, 0 < getattr(self, name) < math.inf, "above 0, finite")
        if not self.teacher:
            raise InputError("teacher ''; allowed: original, none, a directory, or a file of cached logits")
        taught = [name for name in OF_A_TEACHER if getattr(self, name)]
        if self.teacher == NONE and (taught or not self.task):
            gone = ", ".join(f"{name}=0" for name in taught or ["logits"])
            raise InputError(f"teacher=none leaves nothing to learn but the task; give task=1 and {gone}")
        if self.teacher != NONE and not taught:
            raise InputError(f"a teacher of whom nothing is learned; give {', '.join(OF_A_TEACHER)}, or teacher=none")
        unknown = [name for name in OF_A_MODEL if getattr(self, name)]
        if self.offline and unknown:
            raise InputError(
                f"{self.teacher} holds what a teacher's logits were, and says nothing about {' and '.join(unknown)}; "
                "leave these out, or give the teacher itself"
            )
        if self.attention and self.relations:
            raise InputError(
                "attention reads maps of eager attention, relations the vectors that fused attention is called with; "
                "give one of the two"
            )
        check_idle(self, OF_LOSSES)
        if self.tail != type(self).tail and not self.offline:
            raise InputError(f"tail={self.tail} is of a file of cached logits; give one as teacher, or leave tail out")

    def _check(self, name: str, holds: bool, allowed: str) -> None:
        if not holds:
            raise InputError(f"{name} {getattr(self, name)}; allowed: {allowed}")

    @property
    def taught(self) -> bool:
        """True where there is a teacher."""
        return self.teacher != NONE

    @property
    def offline(self) -> bool:
        """True for a teacher known only by a file of its cached logits."""
        return self.teacher.endswith(CACHED)

    @property
    def weights(self) -> dict[str, float]:
        """The weights of the losses in use, by name."""
        return {name: getattr(self, name) for name in LOSSES if getattr(self, name)}
