"""Training of a model as the passes before it have left it: quantization-aware training, distillation, or both.

What earlier passes decided is what is trained: codes stay codes on their grids, zeros of a mask stay zeros, inputs are
rounded as they are. The weights behind the codes, and scales, learn from the original model (distillation, Hinton et
al. 2015, arXiv 1503.02531), from the next token, or from both.

    codes        rounded at every step with the gradient of the identity (straight-through, Bengio et al. 2013);
                 scales and zero points by LSQ and LSQ+ (arXiv 1902.08153, 2004.09576):
                 `compress/train/rounding/straight_through.py`; through a range that is fitted to every token goes LSQ's
                 gradient of its scale
    start        the codes that were decided (gptq, say): each weight behind them begins as close to the original as its
                 code lets it, and nearer to the middle of its code where a method has chosen codes together
                 (`compress/train/rounding/latents.py`)
    loss         logits KL(teacher, student) t^2  +  task (cross entropy)  +  features (distance of hidden states)
                 +  attention (KL or distance of attention maps; MiniLM, TinyBERT: arXiv 2002.10957, 1909.10351)
                 +  relations (KL of softmax(A A^T / sqrt(d)), A: values, or queries, keys and values; 2012.15828)
                 +  contrastive (InfoNCE of mean embeddings, arXiv 1807.03748), each times its weight
    logits       of a plain head are made a few tokens at a time and never kept
                 (`compress/train/losses/chunked_logits.py`)
    teacher      called at every step, or a file of its top k tokens: `compress cache-logits`
    optimizer    AdamW, float32, rates rising for `warmup` and then falling; the highest one is chosen by a range test
                 where none is given (`compress/train/learning_rate.py`)
    result       the best of what was measured on held-out samples, the start included (`compress/train/loop/best.py`)
    zeros        `sparsity` or `pattern`: the smallest weights, ever more of them by a cubic schedule (Zhu & Gupta 2017,
                 arXiv 1710.01878): `compress/train/rounding/pruning.py`; of codes the weights behind them are compared
    penalties    `l1` and `group_lasso` (Yuan & Lin 2006) by proximal steps: `compress/train/rounding/penalties.py`

    steps, rows    the training set is gone through rows by rows, in an order that `seed` shuffles

Departs from the papers:
- A scale is learned as a factor exp(t), so that a step changes it by a share of itself; LSQ's gradient scale, which
  makes up for that, is not needed with Adam.
- What is pruned stays zero: no weight comes back while training goes on. Zeros that only a penalty has made are numbers
  like others: a later pass that prunes takes them first.
- Negatives of the contrastive loss are the other samples of the step, over all ranks and micro-batches: the teacher
  is shown the step first, and called twice.
- Layers are in evaluation mode: dropout does nothing, batch norms keep their statistics.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from compress.base.errors import InputError
from compress.passes.protocol.base import Aspect, Pass
from compress.passes.protocol.sites import Site
from compress.passes.protocol.stages import Decide, Learn, Stage
from compress.train.options import TrainingOptions
from compress.train.rounding.sparsity_options import SparsityOptions
from compress.weights.decision import Decision

MINUTES = {"s": 1 / 60, "min": 1.0, "h": 60.0}
ROWS = 8  # samples of a step where time is short: more, and there are too few steps


@dataclass(frozen=True, kw_only=True)
class Train(TrainingOptions, SparsityOptions, Pass):
    """Trains the model as the passes before it have left it."""

    name: ClassVar[str] = "train"
    reads: ClassVar[Aspect] = "quantized weight"
    keeps_zeros: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trains == "scales" and self.shrinks:
            raise InputError("trains=scales leaves weights as they are, and l1 and group_lasso shrink them; give one")

        if self.minutes and self.prunes:
            raise InputError("minutes leaves the number of steps open, which pruning goes by; give steps")

    @property
    def writes(self) -> Aspect:  # type: ignore[override]
        return "mask" if self.prunes else "dense weight"

    @property
    def by_rows(self) -> bool:  # type: ignore[override]
        """An input (channel) has weights in some of a layer's rows alone, where these are groups."""
        return not (self.group_lasso and self.lasso_groups == "inputs")

    @property
    def stages(self) -> tuple[Stage, ...]:
        return (Learn(self, self), Decide({}, self.apply))

    def check(self, shapes: Mapping[str, tuple[int, int]]) -> None:
        super().check(shapes)
        pattern = self.final_pattern
        for name, (_, columns) in shapes.items():
            if pattern is not None and columns % pattern.length:
                raise InputError(
                    f"pattern {pattern} needs inputs in multiples of {pattern.length}; {name} has {columns}: ignore "
                    "it, leave it out (`but`) or prune a share (sparsity)"
                )

    def apply(self, site: Site) -> dict[str, Decision]:
        """Decide nothing: the trained model is decided after training (`engine.learn.training`)."""
        raise AssertionError("training decides when it is done")


def recovery(words: str) -> Train:
    """Training for a length of time, like 90s, 30min or 1.5h. Raises InputError."""
    found = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]{1,6})?)(s|min|h)", words.strip())
    minutes = float(found[1]) * MINUTES[found[2]] if found else 0.0
    if not minutes:
        raise InputError(f"recover {words!r}; allowed: a length of time, like 90s, 30min or 1.5h")
    return Train(minutes=minutes, rows=ROWS)
